"""A trace that somebody has, whatever recorded it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bench.common.plans import Workload
from bench.common.workloads import read_requests
from bench.sim.workloads.mooncake import played
from bench.sim.workloads.recorded import Replay, sessions
from continuum_connector.tools.analysis import foreign

RECORDED = "recorded"


@dataclass(frozen=True)
class Recording(Replay):
    """`file`: a trace, or a folder of such (tools/analysis/foreign.py says of what formats)."""

    file: str = ""


def recorded(recording: Recording) -> Workload:
    """Programs of the file, picked by its seed: of chats with hash ids those that follow each
    other, so that what they have in common is found. What the file does not say is in the note."""
    path = Path(recording.file)
    requests, note = read_requests(path)
    chats = foreign.chats(path) if path.is_file() else None
    if chats is None:
        found = sessions(RECORDED, requests, recording)
    else:
        numbers: dict[object, int] = {}  # ids may be anything
        for one in (one for talk in chats.talks for one in talk):
            one["hash_ids"] = [numbers.setdefault(each, len(numbers)) for each in one["hash_ids"]]
        chats.talks.sort(key=lambda talk: talk[0]["timestamp"])
        found = played(RECORDED, chats, recording)
    return replace(found, note=f"{found.note}; {note}") if note else found
