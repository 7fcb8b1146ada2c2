"""The format of a result folder: what every run leaves behind, and how to read it back.

README.md has the files.

Lines are appended as things end, so a run that was interrupted has all that was measured until
then. Seconds are floats since the run began; a field that is not known is left out or 0.
`load` reads a folder; unknown fields are skipped, so that older readers read newer folders.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from bench.serve.metrics import Metrics, parse_metrics
from continuum_connector.errors import ToldError

RUNS = "runs"
RUN, TURNS, PROGRAMS = "run.json", "turns.jsonl", "programs.jsonl"
BEFORE, AFTER, LOG = "before.prom", "after.prom", "server.log"

State = Literal["running", "done", "interrupted", "cannot_run", "died"]


class ResultError(ToldError):
    """A folder that holds no results, or broken ones; the message says what to do."""


class Turn(msgspec.Struct, kw_only=True):
    """One request as its client saw it, all its tries together."""

    program: str
    turn: int  # from 0
    start_s: float  # when it was first sent
    latency_s: float  # from then to the end of the answer, retries included
    ttft_s: float = 0.0  # from then to the first token; 0 if there was none
    tpot_s: float = 0.0  # per token after the first; 0 with fewer than two
    gaps_ms: list[float] = []  # from each arrival of tokens to the next: one less than there were
    prompt_tokens: int = 0  # as the server counted
    cached_tokens: int = 0  # of them not computed, as the server said
    answer_tokens: int = 0
    tries: int = 1
    failures: list[str] = []  # what went wrong with each try that failed, the last one too
    error: str = ""  # why the turn failed for good; empty when it did not
    answer: list[int] = []  # token ids; empty where the server does not say them
    text: str = ""  # the answer in words, of a chat


class Program(msgspec.Struct, kw_only=True):
    """One agent run. It ends at its first failed turn; its JCT says nothing then."""

    program: str
    arrival_s: float  # when it should have begun
    start_s: float  # when it did: the difference is the client's own lateness
    jct_s: float  # from `arrival_s` to the end of its last turn, tools included
    turns: int  # that ended well
    planned_turns: int
    tool_s: float = 0.0  # of `jct_s`: pauses between turns
    error: str = ""


class Dram(msgspec.Struct, kw_only=True, frozen=True):
    """How much DRAM an arm had, and how much KV is alive at a time, in bytes."""

    bytes: int
    live_bytes: int

    @property
    def pressure(self) -> float:
        """Live KV / DRAM: above 1 not everything can be kept."""
        return self.live_bytes / self.bytes if self.bytes else 0.0


class Run(msgspec.Struct, kw_only=True):
    """One server under one load, once."""

    name: str  # of the folder
    arm: str = ""  # which way to serve; empty: a server that was already there
    title: str = ""  # of the arm, for people
    repeat: int = 0  # from 0; runs of all arms with the same number got the same requests
    order: int = 0  # how many runs came before it
    state: State = "running"
    reason: str = ""  # why it cannot run, or what went wrong
    workload: str = ""  # its name
    settings: dict[str, Any] = {}  # all that defines the load
    seed: int = 0
    dram: Dram | None = None
    url: str = ""
    model: str = ""
    command: list[str] = []  # of the server, where the runner started it
    front: list[str] = []  # of the router in front of it
    versions: dict[str, str] = {}
    machine: dict[str, str] = {}
    started: str = ""  # local time, ISO 8601
    server_start_s: float = 0.0
    wall_s: float = 0.0  # from the first arrival to the last answer
    planned_programs: int = 0
    max_lag_s: float = 0.0  # the longest that the client's own event loop was late
    told: dict[
        str, float
    ] = {}  # of the whole run, by aiperf (aiperf.py) or the lab (sim/report.py)


class Loaded(msgspec.Struct):
    """A run as it lies in its folder, or in memory only."""

    folder: Path
    run: Run
    turns: list[Turn] = []
    programs: list[Program] = []
    added: Metrics = {}  # what the run added to the server's counters; empty if it was not read

    def turn(self, turn: Turn) -> None:
        """A turn ended."""
        self.turns.append(turn)

    def program(self, program: Program) -> None:
        """A program ended."""
        self.programs.append(program)

    @property
    def finished(self) -> list[Program]:
        """Programs that came to their end."""
        return [each for each in self.programs if not each.error]


Line = TypeVar("Line", bound=msgspec.Struct)


def load(folder: Path) -> list[Loaded]:
    """Every run below a result folder, in the order they were started."""
    if not (folder / RUNS).is_dir():
        raise ResultError(
            f"{folder} holds no results (no folder {RUNS}/ in it); "
            "give one that `continuum bench agents` or `continuum bench ab` wrote"
        )
    found = [load_run(each.parent) for each in sorted((folder / RUNS).glob(f"*/{RUN}"))]
    return sorted(found, key=lambda each: each.run.order)


def load_run(folder: Path) -> Loaded:
    """One run's folder; a last line that was cut off is left out."""
    return Loaded(
        folder=folder,
        run=read_run(folder),
        turns=list(_lines(folder / TURNS, Turn)),
        programs=list(_lines(folder / PROGRAMS, Program)),
        added=_added(folder),
    )


def read_run(folder: Path) -> Run:
    """Only the run's own record."""
    try:
        return msgspec.json.decode((folder / RUN).read_bytes(), type=Run)
    except (OSError, ValueError, RecursionError) as error:
        raise ResultError(f"{folder / RUN} cannot be read: {error}") from None


def write_run(folder: Path, run: Run) -> None:
    """Write the run's record whole, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{RUN}"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    draft.replace(folder / RUN)


def _added(folder: Path) -> Metrics:
    """What a run added to the server's metrics; empty if one of the readings is missing."""
    before, after = folder / BEFORE, folder / AFTER
    if not before.exists() or not after.exists():
        return {}
    first, last = (parse_metrics(each.read_text(errors="replace")) for each in (before, after))
    return {key: value - first.get(key, 0.0) for key, value in last.items()}


def _lines(path: Path, kind: type[Line]) -> Iterator[Line]:
    whole, _, _ = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
    try:
        yield from msgspec.json.Decoder(kind).decode_lines(whole)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path}: {error}; it was not written by `continuum bench`") from None
