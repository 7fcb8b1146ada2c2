"""Pool: worker processes that play one job after another; importing vLLM takes seconds.

concurrent.futures would end every job with the first process that dies; here a process that is
killed costs the job it was at, and another takes its place.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

from bench.sim.job import Job, Result, RunRecord

Play = Callable[[Job], RunRecord]

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # hash_block() hashes text
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Pool:
    """`play_all` yields results as they come. Leaving the context ends the processes."""

    def __init__(self, play: Play, num_workers: int) -> None:
        self._play = play
        self._num_workers = num_workers
        self._workers: dict[Connection, _Worker] = {}

    def play_all(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Play the jobs, begun in their order; each ends with exactly one result."""
        left = list(reversed(jobs))
        for _ in range(min(self._num_workers, len(left))):
            self._start(left.pop())
        while self._workers:
            for connection in wait(list(self._workers)):
                worker = self._workers[connection]
                yield worker.result()
                if not worker.is_alive:
                    self._end(worker)
                    if left:
                        self._start(left.pop())
                elif left:
                    worker.give(left.pop())
                else:
                    self._end(worker)

    def _start(self, job: Job) -> None:
        worker = _Worker(self._play)
        self._workers[worker.connection] = worker
        worker.give(job)

    def _end(self, worker: _Worker) -> None:
        del self._workers[worker.connection]
        worker.end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *ended: object) -> None:
        for worker in list(self._workers.values()):
            self._end(worker)


class _Worker:
    """One process, and the job it is at."""

    def __init__(self, play: Play) -> None:
        self._log: IO[bytes] = tempfile.NamedTemporaryFile(prefix="continuum-lab-")  # noqa: SIM115
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_serve, args=(theirs, play, self._log.name), daemon=True
        )
        with environment():
            self._process.start()
        theirs.close()
        self._job: Job
        self.is_alive = True

    def give(self, job: Job) -> None:
        self._job = job
        with contextlib.suppress(BrokenPipeError):  # result() will find that it died
            self.connection.send(job)

    def result(self) -> Result:
        """Of the job, once it has ended."""
        try:
            record, error = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.is_alive = False
            record, error = None, self._death()
        return Result(self._job, record, error)

    def _death(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        return f"its process ended with {how}" + (f": {lines[-1]}" if lines else "")

    def end(self) -> None:
        self._process.terminate()
        self._process.join()
        self.connection.close()
        self._log.close()


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Processes that begin meanwhile play alike; they take their environment from ours."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- in the process -------------------------------------------------------------------------
def _serve(connection: Connection, play: Play, log: str) -> None:
    """Play what comes, until nothing comes any more. vLLM's words at its start go to `log`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(_played(play, connection.recv()))


def _played(play: Play, job: Job) -> tuple[RunRecord | None, str]:
    try:
        return play(job), ""
    except Exception as error:  # the job's failure, not the run's
        return None, f"{type(error).__name__}: {error}".rstrip(": ")
