"""`continuum convert`: our trace for scripts of the original recorder, anybody's for `continuum
simulate` and `continuum bench agents`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from continuum_connector import files
from continuum_connector.errors import ToldError
from continuum_connector.tools.analysis import foreign
from continuum_connector.tools.analysis.source import Record, Source, UnknownError, is_number


def convert(
    trace: Annotated[
        Path, typer.Argument(help="The file that trace_path names, or somebody else's; a folder.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Empty: the format's own name, here.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a trace in another form.

    Ours as scheduler_timestamps, as the original recorder would have written it: one JSON file, job
    -> time stamps. It leaves out loads and stores, reasons, and worth. Its hit_length is what was
    found in VRAM and DRAM together.

    What others record as requests: a JSON line per request with its lengths, its gap, and what it
    has in common with the one before. Others are Mooncake, Bailian, Weka, AgentX, trajectories of
    SWE-agent and its mini form, and events of OpenHands. Not told is what one conversation has in
    common with another (hash_ids of Bailian and Mooncake); a simulation of the file as it is has
    that, too:

    \b
      continuum simulate --workload TRACE
    """
    ours = None
    if not trace.is_dir():
        with contextlib.suppress(UnknownError):
            ours = Source(trace)
    path = out or Path("scheduler_timestamps" if ours else "requests")
    _may_write(path, force, ours.paths if ours else [trace])
    if ours:
        jobs = write_original(ours.records())
        data = json.dumps(jobs, indent=2).encode()
        said = f"{len(jobs):,} programs written to {path}; {ours.num_bad:,} lines skipped"
    else:
        found = foreign.read(trace)
        data = msgspec.json.Encoder().encode_lines(found.requests)
        made_up = f" (made up: {found.note})" if found.note else ""
        said = f"{len(found.requests):,} requests of {found.format}{made_up} written to {path}"
    try:
        files.put(path, data)
    except OSError as error:
        raise ToldError(f"{path} cannot be written ({error.strerror})") from None
    print(said)


def _may_write(path: Path, forced: bool, read: list[Path]) -> None:
    """Raise ToldError, before a long read, if writing `path` would destroy something unasked."""
    if not path.name:
        raise ToldError(f"--out {path} names no file; give one")
    if not path.exists():
        return
    if any(files.is_same(path, each) for each in read):
        raise ToldError(f"{path} is the trace itself, which would be lost; name another file")
    if not forced:
        raise ToldError(f"{path} exists and would be lost; name another file, or add --force")


# --- the original recorder's format ---------------------------------------------------------
Entry = dict[str, Any]
# Its key for each event of ours: an entry has one of them, with the wall clock in seconds.
KEYS = {
    "arrive": "Request_arrival_time",
    "return": "Request_arrival_time",
    "admit": "waiting_to_running",
    "readmit": "evicted_to_running",
    "preempt": "Request_evicted_from_running_queue_time",
    "decision": "Request_departure_time",
    "pin_end": "unpinned_time",
}
_PINNED = "pinned_time"  # a second entry of a decision to pin


def write_original(records: Iterable[Record]) -> dict[str, list[Entry]]:
    """Each program's entries in the order of time (Continuum's estimate_with_func.py reads them).
    What the original does not know, such as loads, is left out."""
    jobs: dict[str, list[Entry]] = {}
    for record in records:
        event, program, t = record["event"], record.get("program"), record.get("t")
        if event not in KEYS or not isinstance(program, str) or t is None:
            continue
        entry: Entry = {KEYS[event]: t}
        tokens, hits = record.get("tokens"), record.get("hit_tokens")
        if event in ("admit", "readmit") and tokens is not None and isinstance(hits, Mapping):
            entry |= {"prompt_length": tokens, "hit_length": sum(filter(is_number, hits.values()))}
        entries = jobs.setdefault(program, [])
        place = len(entries)
        if record.get("cause") == "superseded" and entries and _PINNED in entries[-1]:
            place -= 2  # the pin was handled before its successor's departure and pin
        entries.insert(place, entry)
        if record.get("decision") == "pin":
            entries.append({_PINNED: t})
    return jobs
