"""Recorded: a trace that somebody has, whatever recorded it, replayed turn by turn."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from bench.common.plans import Workload
from bench.common.workloads import read_requests
from bench.sim.workloads.claude_code import Replay, sessions


@dataclass(frozen=True)
class Recording(Replay):
    """`file`: a trace, or a folder of such (tools/analysis/foreign.py says of what formats)."""

    file: str = ""


def recorded(recording: Recording) -> Workload:
    """Programs of the file, picked by its seed. What the file does not say is in the note."""
    requests, note = read_requests(Path(recording.file))
    own = {each.name: getattr(recording, each.name) for each in fields(Replay)}
    found = sessions("recorded", requests, Replay(**own))
    return Workload(found.name, found.programs, f"{found.note}; {note}" if note else found.note)
