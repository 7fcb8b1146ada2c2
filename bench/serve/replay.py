"""Recorded coding sessions, played again: their lengths, their cuts, their pauses.

    FILE[,scale=8][,pauses=8][,longest=32768]        also as claude-code:FILE

FILE, or a folder of such, is a trace of any format that tools/analysis/foreign.py knows; ours holds
JSON lines (.gz or not), one per request: `trace`, `lane`, `turn`, `inp`, `out` (tokens),
`common_blocks` (64-token blocks shared with the lane's previous prompt), `think` (seconds between
the previous answer and this request). A lane is one program. `scale` divides every length and
`pauses` every pause, for small pools; `longest` ends a lane before its context grows beyond that
many tokens (after scaling).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.cli import regular
from bench.common.plans import ProgramPlan, Streams, Talk
from bench.common.workloads import BLOCK, Request, lanes, read_requests
from bench.serve.programs import Defaults, WorkloadError


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """What may follow the file's name."""

    scale: float = 1.0
    pauses: float = 1.0
    longest: int = 32_768


@dataclass(frozen=True)
class Replay:
    """Lanes as programs, in the file's order."""

    name: str
    lanes: list[ProgramPlan]

    @property
    def defaults(self) -> Defaults:
        """Sessions have no arrivals of their own: a number of them at a time."""
        return Defaults("closed:16", duration_s=600.0)

    @property
    def size(self) -> int:
        """How many lanes there are."""
        return len(self.lanes)

    def program(self, number: int, seed: int) -> ProgramPlan:
        """Lane `number`: recorded, so the seed changes its token ids only."""
        return self.lanes[number]


def read(text: str, name: str = "claude-code") -> Replay:
    """Read `FILE[,OPTION=VALUE...]`."""
    path, *pairs = text.split(",")
    options = _options(pairs)
    if not Path(path).is_dir():
        regular(Path(path), f"--workload {name}:", WorkloadError)
    try:
        found = lanes(read_requests(Path(path))[0])
    except ValueError as error:
        raise WorkloadError(f"--workload {name}:{path}: {error}") from None
    plans = [_plan("/".join(key), found[key], options) for key in found]
    plans = [plan for plan in plans if plan.turns]
    if not plans:
        raise WorkloadError(
            f"--workload {name}:{path}: no lane begins with {options.longest} tokens or "
            "less; give a larger longest= or scale="
        )
    return Replay(",".join((name, *pairs)), plans)  # scaling is part of the name


def _plan(name: str, requests: list[Request], options: Options) -> ProgramPlan:
    talk, num_answer = Talk(Streams()), 0
    for request in sorted(requests, key=lambda each: each.turn):
        length = max(int(request.inp / options.scale), 2)
        answer = max(int(request.out / options.scale), 1)
        if length + answer > options.longest:
            break
        # The prompt began as the one before, up to here; a cut takes the answer off as well.
        context = talk.num_tokens
        kept = min(int(request.common_blocks * BLOCK / options.scale), context)
        is_whole = talk.num_turns and kept + BLOCK / options.scale >= context - num_answer
        kept = min(context if is_whole else kept, length - 1)
        pause_s = (request.think or 0.0) / options.pauses if talk.num_turns else 0.0
        if kept < context:
            talk.forget(kept)
        talk.turn(length - kept, answer, pause_s)
        num_answer = answer
    return ProgramPlan(name, talk.turns() if talk.num_turns else ())


def _options(pairs: list[str]) -> Options:
    values = dict(pair.partition("=")[::2] for pair in pairs)
    try:
        options = msgspec.convert(values, Options, strict=False)
    except msgspec.MsgspecError as error:
        raise WorkloadError(f"--workload claude-code: {error}") from None
    if min(options.scale, options.pauses) <= 0:
        raise WorkloadError("--workload claude-code: scale and pauses must be above 0")
    return options
