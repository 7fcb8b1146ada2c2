"""Many runs of the lab, over all cores, into one file; a run that was stopped goes on.

Kept of each run: every total, every program's completion time, and every turn as an array of
eight numbers (result.TurnRecord), times to 0.1 ms: some 50 bytes a turn, 0.1 MB for 255 programs
of eight turns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from rich.console import Console

from bench.common.progress import Progress
from bench.sim.job import Job, Result, RunRecord, Start, TurnRecord
from bench.sim.provenance import code_mark, versions
from bench.sim.store import Store

DIGITS = 4  # of virtual seconds, in the file
ENVIRONMENT = {  # of the processes that play, who take theirs from ours as they begin
    "PYTHONHASHSEED": "0",  # hash_block() hashes text
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
Play = Callable[[Job], RunRecord]


@dataclass
class Outcome:
    """What a call did. `results`: of all its jobs that are done, those found in the file too."""

    results: list[Result] = field(default_factory=list)
    num_jobs: int = 0
    num_found: int = 0  # were in the file already
    is_stopped: bool = False

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.error]

    @property
    def exit_code(self) -> int:
        """0; 1 if a job failed; 130, as shells have it, if Ctrl-C stopped the run."""
        return 128 + signal.SIGINT if self.is_stopped else 1 if self.failed else 0

    def __str__(self) -> str:
        done = sum(result.record is not None for result in self.results)
        text = f"{done} of {self.num_jobs} runs done"
        text += f", {self.num_found} of them before" if self.num_found else ""
        text += f", {len(self.failed)} failed" if self.failed else ""
        if self.is_stopped:
            return f"Stopped: {text} and kept. The same command goes on from here."
        return text + (". The same command tries the failed ones again." if self.failed else ".")


def play(job: Job) -> RunRecord:
    """Play one job in this process; the first imports vLLM."""
    from bench.sim.arms import ARMS
    from bench.sim.hardware import machine
    from bench.sim.lab import Lab
    from bench.sim.workloads.registry import at_rate

    built = at_rate(job.workload, job.params, job.seed)
    options: dict[str, Any] = dict(job.machine)
    record = Lab(machine(**options), ARMS[job.arm], built).play()
    return msgspec.structs.replace(compact(record), seed=job.seed, note=built.note)


def compact(record: RunRecord) -> RunRecord:
    """The record with times as exact as anyone reads them."""
    turns = [
        TurnRecord(
            *(
                round(v, DIGITS) if isinstance(v, float) else v
                for v in msgspec.structs.astuple(turn)
            )
        )
        for turn in record.turns
    ]
    jct_s = {name: round(seconds, DIGITS) for name, seconds in record.jct_s.items()}
    return msgspec.structs.replace(record, turns=turns, jct_s=jct_s)


def run(
    jobs: Iterable[Job],
    out: Path,
    *,
    num_workers: int = 0,
    play: Play = play,
    command: str = "",
    console: Console | None = None,
) -> Outcome:
    """Do the jobs that `out` does not have; append each result as it comes.

    Those that failed before, or were done by other code, are done again. Ctrl-C ends the run
    without an exception.
    `num_workers`: processes, 0 for one per core; `play` must be importable by name.
    Raises ToldError if `out` cannot be used.
    """
    unique = {job.key: job for job in jobs}
    outcome = Outcome(num_jobs=len(unique))
    with Store(out) as store:
        mark, known = code_mark(), store.known
        found = {key for key in unique if key in known and known[key].is_done(mark)}
        left = [job for key, job in unique.items() if key not in found]
        outcome.num_found = len(found)
        if left:
            store.append(Start(command or shlex.join(sys.argv), versions()))
            outcome.is_stopped = _do(left, store, play, num_workers, console)
        outcome.results = [store.known[key] for key in unique if key in store.known]
    return outcome


def _do(
    jobs: list[Job], store: Store, play: Play, num_workers: int, console: Console | None
) -> bool:
    """Play the jobs; return whether Ctrl-C ended it early."""
    num_workers = min(num_workers or len(os.sched_getaffinity(0)), len(jobs))
    console = console or Console(stderr=True)
    num_failed, own = 0, threading.local()
    try:
        with (
            mock.patch.dict(os.environ, ENVIRONMENT),
            Progress(console, "simulating", len(jobs)) as progress,
            ThreadPoolExecutor(num_workers) as threads,
            contextlib.ExitStack() as ending,
        ):
            ending.callback(_end, threads)
            playing = [threads.submit(_play, job, play, own) for job in jobs]
            for num_ended, each in enumerate(as_completed(playing), 1):
                result = each.result()
                store.append(msgspec.structs.replace(result, code=code_mark()))
                if result.error:
                    num_failed += 1
                    line = f"failed: {result.job}: {result.error}"
                    console.print(line, markup=False, highlight=False)
                failed = f", {num_failed} failed" if num_failed else ""
                progress.update(num_ended, f"{num_ended} of {len(jobs)} runs{failed}")
    except KeyboardInterrupt:
        return True
    return False


def _play(job: Job, play: Play, own: threading.local) -> Result:
    """Play a job in this thread's own process, which imports vLLM once. One that dies costs the job
    it was at, and another takes its place."""
    if not hasattr(own, "process"):
        spawn = multiprocessing.get_context("spawn")
        own.process = ProcessPoolExecutor(1, spawn, _begin)
    try:
        return Result(job, own.process.submit(play, job).result())
    except Exception as error:  # the job's failure, not the run's
        if isinstance(error, BrokenProcessPool):
            del own.process
        return Result(job, error=f"{type(error).__name__}: {error}".rstrip(": "))


def _begin() -> None:
    """In a process that plays: Ctrl-C, which reaches the whole group, is for who began it, and what
    vLLM says at its start is for nobody."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _end(threads: ThreadPoolExecutor) -> None:
    """Begin no other job, and end the processes, whatever they are at."""
    threads.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
        process.terminate()
