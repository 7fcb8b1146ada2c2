"""Runs steps one after the other, each bounded in time, and keeps what is known as one JSON file.

The file is written anew after each step, so whatever ends a sitting costs that step only; the next
call goes on behind it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.steps import Ended, Step, Verdict, filled
from bench.serve.record import versions
from bench.serve.rivals import FOLDER
from bench.serve.server import end_group, spawn
from continuum_connector.errors import ToldError

REPO = Path(__file__).resolve().parents[2]
FILE = "gpu.json"
GRACE_S = 30.0  # after SIGINT: servers are stopped, what was measured is written
REHEARSAL_S = 900.0  # a CPU starts servers in its own time
STEERING = ("VLLM_", "CONTINUUM_", "CUDA_")
NO_VERDICT = 2  # of serve_equal, and of bench.copy_engine where there is no GPU

Launch = Callable[[Sequence[str], Path, float], int | None]


@dataclass
class Known:
    """What came of one step."""

    verdict: str
    said: str
    wall_s: float = 0.0
    command: list[str] = field(default_factory=list)
    log: str = ""


@dataclass
class State:
    """All that is known, and where."""

    rehearsal: bool
    machine: str = ""
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    steps: dict[str, Known] = field(default_factory=dict)

    def of(self, step: Step) -> Known:
        """What is known of a step."""
        if known := self.steps.get(step.name):
            return known
        return Known(Verdict.NOT_REACHED.value, "")

    def write(self, out: Path) -> None:
        """Whole, or not at all."""
        draft = out / f".{FILE}"
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
        draft.replace(out / FILE)


def read_state(path: Path) -> State:
    """The file that a call left behind."""
    raw: dict[str, Any] = json.loads(path.read_text())
    raw["steps"] = {name: Known(**known) for name, known in raw["steps"].items()}
    return State(**raw)


def open_state(out: Path, *, rehearsal: bool) -> State:
    """The state to go on with; ToldError where a rehearsal lies, or the other way round."""
    out.mkdir(parents=True, exist_ok=True)
    state = read_state(out / FILE) if (out / FILE).exists() else State(rehearsal)
    if state.rehearsal != rehearsal:
        kinds = ("a run on a GPU", "a dry run")
        raise ToldError(
            f"--out {out} holds {kinds[state.rehearsal]} and this is {kinds[rehearsal]}, so their "
            "results would be mixed; give another --out"
        )
    state.date = time.strftime("%Y-%m-%d")
    state.versions = versions()
    steering = {k: v for k, v in os.environ.items() if k.startswith(STEERING)}
    state.environment = {k: v for k, v in steering.items() if "/" not in v}  # no folders of yours
    state.machine = state.machine or f"{os.cpu_count()} {platform.machine()} cores, no GPU asked"
    return state


def launch(argv: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Run a command to its log in a process group of its own. Its status; None: it was cut off."""
    with log.open("wb") as file:
        try:
            process = spawn(argv, file, REPO)
        except OSError as error:
            file.write(f"{error}\n".encode())
            return 127  # as a shell says
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(process, GRACE_S)


@dataclass(frozen=True)
class Sitting:
    """How steps are run: at `until`, by `clock`, the last of them is cut off."""

    out: Path
    state: State
    launch: Launch = launch
    clock: Callable[[], float] = time.monotonic
    until: float = float("inf")
    rivals: Path = FOLDER

    def run(self, steps: Sequence[Step], again: Collection[str] = ()) -> Iterator[Step]:
        """Run what is not settled; yields each step that has ended. A gate that is shut ends it."""
        for step in steps:
            if not self._is_settled(step) or step.name in again:
                if self.clock() >= self.until:
                    return
                self.state.steps[step.name] = self._run(step)
                self.state.write(self.out)
                yield step
            if step.is_gate and self._is_shut(step):
                return

    def _is_settled(self, step: Step) -> bool:
        """By this very command: a longer plan asks the same at more rates."""
        known = self.state.of(step)
        return known.verdict != Verdict.NOT_REACHED.value and known.command == list(
            self._command(step)
        )

    def _command(self, step: Step) -> Sequence[str]:
        return step.rehearsal if self.state.rehearsal else step.command

    def _is_shut(self, gate: Step) -> bool:
        return not self.state.rehearsal and self.state.of(gate).verdict != Verdict.PROVEN.value

    def _run(self, step: Step) -> Known:
        rehearsal, command = self.state.rehearsal, self._command(step)
        if isinstance(command, str):
            return Known(Verdict.NOT_REACHED.value, f"cannot be rehearsed: {command}")
        vllm = self.state.versions.get("vllm", "0")
        if not rehearsal and step.since > tuple(map(int, vllm.split("+")[0].split(".")[:2])):
            return Known(Verdict.NOT_REACHED.value, f"vLLM {vllm} does not have it")
        log, began = self.out / f"{step.name}.log", self.clock()
        limit_s = min(REHEARSAL_S if rehearsal else step.limit_s, self.until - began)
        status = self.launch(filled(command, self.out, self.rivals), log, limit_s)
        wall_s = self.clock() - began
        verdict, said = judge(step, status, log, self.out, rehearsal=rehearsal)
        if step.name == "machine" and verdict is Verdict.PROVEN:
            self.state.machine = said
        if status is None:
            said = f"cut off after {wall_s:.0f} s; {said}"
        return Known(verdict.value, said, wall_s, list(command), log.name)


def judge(
    step: Step, status: int | None, log: Path, out: Path, *, rehearsal: bool
) -> tuple[Verdict, str]:
    """What a command's end says. A rehearsal proves that it runs and that its file can be read."""
    text = log.read_text(errors="replace") if log.exists() else ""
    ended = Ended(text, out)
    if status in (None, NO_VERDICT):
        return Verdict.NOT_REACHED, ended.last_line
    if status:
        return Verdict.FAILED, f"status {status}: {ended.last_line}"
    if rehearsal and not (out / step.leaves).exists():
        return Verdict.PROVEN, ended.last_line  # its own dry run leaves nothing
    with suppress(OSError, ValueError, KeyError, SyntaxError):
        verdict, said = step.read(ended)
        return (Verdict.PROVEN if rehearsal else verdict), said
    return Verdict.FAILED, f"{step.leaves or log.name} is not what was expected"
