"""The lab's runner: what is done is kept, what is not is done once. Jobs here are fakes."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bench.sim import runner
from bench.sim.job import Job, Result, RunRecord, Start
from bench.sim.provenance import sources
from bench.sim.runner import Outcome, compact
from bench.sim.store import Store, read, results, starts
from bench.tests.lab_results import record
from continuum_connector.errors import ToldError

ROOT = Path(__file__).parents[2]


# --- what the workers play ------------------------------------------------------------------
def fake(job: Job) -> RunRecord:
    """Leaves a mark, so that a test sees who was played; some arms do not end well."""
    marks = Path(str(job.params["marks"]))
    with marks.open("a") as file:
        file.write(f"{job.arm}\n")
    if job.arm == "raises":
        raise ValueError("no such thing")
    if job.arm == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if job.arm == "hangs":
        signal.pause()
    return record(job.arm)


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    return tmp_path / "marks"


def jobs(marks: Path, *arms: str) -> list[Job]:
    return [Job(arm, "fake", {"marks": str(marks)}) for arm in arms]


def run(out: Path, todo: list[Job], num_workers: int = 1) -> tuple[Outcome, str]:
    console = Console(file=io.StringIO(), width=200)
    outcome = runner.run(todo, out, num_workers=num_workers, play=fake, console=console)
    return outcome, console.file.getvalue()  # type: ignore[attr-defined]


# --- keys -----------------------------------------------------------------------------------
def test_a_key_does_not_depend_on_order_and_on_all_else() -> None:
    one = Job("stock", "w", {"a": 1, "b": 2.5}, {"gpu": "H100", "dram_gb": 400})
    assert one.key == Job("stock", "w", {"b": 2.5, "a": 1}, {"dram_gb": 400, "gpu": "H100"}).key
    others = {"arm": "a", "workload": "v", "params": {"a": 1}, "machine": {}, "seed": 1}
    for name, value in others.items():
        assert msgspec.structs.replace(one, **{name: value}).key != one.key


def test_what_only_shows_results_is_not_the_code_that_made_them() -> None:
    names = {path.name for path in sources()}
    assert {"engine.py", "adaptive.py", "registry.py"} <= names
    assert not {"verdict.py", "command.py", "progress.py"} & names


# --- the file -------------------------------------------------------------------------------
def test_a_half_written_last_line_is_dropped(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    whole, half = Result(Job("a", "w"), record("a")), Result(Job("b", "w"), record("b"))
    content = msgspec.json.encode(whole) + b"\n"
    out.write_bytes(content + msgspec.json.encode(half)[:-9])
    assert list(read(out)) == [whole]  # for who only reads
    with Store(out) as store:
        assert store.known == {whole.job.key: whole}
        store.append(half)
    assert list(read(out)) == [whole, half]


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text('{"some": "thing"}\n')
    with pytest.raises(ToldError, match=r"line 1 is no result of the lab .*another file"):
        Store(out)


def test_what_is_no_file_keeps_no_results_and_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (tmp_path, "a folder")):
        with pytest.raises(ToldError, match=f"is {kind}, which keeps no results"):
            Store(path)


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    with Store(tmp_path / "x.jsonl"), pytest.raises(ToldError, match="another run"):
        Store(tmp_path / "x.jsonl")


def test_times_are_kept_to_a_tenth_of_a_millisecond() -> None:
    kept = compact(record("stock", factor=1 / 3, programs=1, turns=1))
    assert kept.turns[0].first_token == 0.1667
    assert kept.jct_s == {"p0": 0.3333}


# --- runs -----------------------------------------------------------------------------------
def test_a_second_run_does_only_what_is_missing(tmp_path: Path, marks: Path) -> None:
    out = tmp_path / "x.jsonl"
    run(out, jobs(marks, "a", "b"))
    outcome, _ = run(out, jobs(marks, "a", "b", "c", "c"))
    assert sorted(marks.read_text().split()) == ["a", "b", "c"]
    assert (outcome.num_jobs, outcome.num_found, outcome.exit_code) == (3, 2, 0)
    assert [result.job.arm for result in outcome.results] == ["a", "b", "c"]
    assert len(starts(out)) == 2
    before = out.read_bytes()
    outcome, said = run(out, jobs(marks, "a", "b", "c"))
    assert all(result.record for result in outcome.results)
    assert (out.read_bytes(), said) == (before, "")


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        ("raises", "ValueError: no such thing"),
        ("dies", "BrokenProcessPool: A process in"),
    ],
)
def test_a_job_that_fails_costs_nobody_else(
    arm: str, reason: str, tmp_path: Path, marks: Path
) -> None:
    out = tmp_path / "x.jsonl"
    outcome, said = run(out, jobs(marks, arm, "a", "b"))
    assert outcome.exit_code == 1
    assert [result.error[: len(reason)] for result in outcome.failed] == [reason]
    assert {result.job.arm for result in results(out).values() if result.record} == {"a", "b"}
    assert f"failed: {arm} fake" in said
    assert "tries the failed ones again" in str(outcome)
    run(out, jobs(marks, arm, "a", "b"))
    assert marks.read_text().split().count(arm) == 2
    assert marks.read_text().split().count("a") == 1


def test_every_worker_takes_many_jobs(tmp_path: Path, marks: Path) -> None:
    arms = [f"arm{i}" for i in range(7)]
    outcome, _ = run(tmp_path / "x.jsonl", jobs(marks, *arms), num_workers=2)
    assert sorted(marks.read_text().split()) == arms
    assert str(outcome) == "7 of 7 runs done."


def test_off_a_terminal_progress_is_a_few_lines(tmp_path: Path, marks: Path) -> None:
    _, said = run(tmp_path / "x.jsonl", jobs(marks, *(f"arm{i}" for i in range(40))))
    assert len(said.splitlines()) == 10
    assert said.splitlines()[-1].startswith("100 %  40 of 40 runs")


SCRIPT = """
import sys
from pathlib import Path
from bench.sim import runner
from bench.tests.test_sim_runner import fake, jobs
if __name__ == "__main__":
    out, marks = map(Path, sys.argv[1:])
    outcome = runner.run(jobs(marks, "a", "hangs"), out, num_workers=1, play=fake)
    print(outcome)
    sys.exit(outcome.exit_code)
"""


def test_a_stopped_run_keeps_what_is_done_and_says_how_to_go_on(
    tmp_path: Path, marks: Path
) -> None:
    out, script = tmp_path / "x.jsonl", tmp_path / "script.py"
    script.write_text(SCRIPT)
    os.mkfifo(marks)  # whoever plays "hangs" has written to it: no need to guess when
    pipe = os.open(marks, os.O_RDWR)  # always open, so that no writer finds that nobody reads
    process = subprocess.Popen(
        [sys.executable, script, out, marks],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with open(pipe, "rb", buffering=0) as read_end:
        said = b""
        while b"hangs" not in said and select.select([read_end], [], [], 60)[0]:
            said += read_end.read(64)
    assert said == b"a\nhangs\n"
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "Stopped: 1 of 2 runs done and kept. The same command goes on from here.\n"
    assert [line.job.arm for line in read(out) if isinstance(line, Result)] == ["a"]
    assert isinstance(next(iter(read(out))), Start)
