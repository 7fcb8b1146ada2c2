"""The original recorder's `scheduler_timestamps`, read and written.

One JSON object: job -> list of entries in the order of time, each with one of the keys of
RECORDER_KEYS and the wall clock in seconds; `waiting_to_running` and `evicted_to_running` also
have `prompt_length` and `hit_length` (Continuum's estimate_with_func.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from continuum_connector.observe.trace import RECORDER_KEYS

Entry = dict[str, Any]
MAX_NUMBER = 1e15  # seconds, tokens, bytes: beyond it is no count of anything, and sums overflow
_ARRIVAL, _ADMIT, _READMIT, _PREEMPT, _DEPARTURE, _PINNED, _UNPINNED = RECORDER_KEYS
_KEYS = {event: key for key, events in RECORDER_KEYS.items() for event in events}
_KEYS["decision"] = _DEPARTURE  # `pinned_time` is a second entry


def read(jobs: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
    """The records our trace would have, job after job; None for each entry that is none."""
    for job, entries in jobs.items():
        if not isinstance(entries, list):
            yield None
            continue
        yield from _Job(job).records(entries)


class _Job:
    """One job's entries as records. A departure that is followed by a pin decided on it."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._turn = 0
        self._arrived = self._pinned = 0.0

    def records(self, entries: list[Any]) -> Iterator[dict[str, Any] | None]:
        for entry, after in zip(entries, [*entries[1:], None], strict=True):
            key = next((key for key in RECORDER_KEYS if _time(entry, key) is not None), None)
            if key is None:
                yield None
            elif key == _PINNED:
                self._pinned = entry[key]
            else:
                yield self._record(key, entry[key], entry, _time(after, _PINNED) is not None)

    def _record(self, key: str, now: float, entry: Entry, is_pinned: bool) -> dict[str, Any]:
        event = RECORDER_KEYS[key][0]
        more: dict[str, Any] = {}
        if key == _ARRIVAL:
            self._turn += 1
            self._arrived = now
        elif key in (_ADMIT, _READMIT):
            hits = {"vram": entry.get("hit_length", 0), "dram": 0}
            more = {"tokens": entry.get("prompt_length"), "hit_tokens": hits}
            more["waited_s"] = now - self._arrived
        elif key == _DEPARTURE:
            more = {"decision": "pin" if is_pinned else "free"}
        elif key == _UNPINNED:
            more = {"held_s": now - self._pinned}
        record = {"t": now, "now": now, "event": event, "program": self._job, "turn": self._turn}
        return {**record, **more}


def write(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Entry]]:
    """Every job's entries. What the original does not know, as loads, is left out."""
    jobs: dict[str, list[Entry]] = {}
    for record in records:
        key, program, t = _KEYS.get(record["event"]), record.get("program"), record.get("t")
        if key is None or not isinstance(program, str) or t is None:
            continue
        entry: Entry = {key: t}
        tokens, hits = record.get("tokens"), record.get("hit_tokens")
        if key in (_ADMIT, _READMIT) and tokens is not None and isinstance(hits, Mapping):
            entry |= {"prompt_length": tokens, "hit_length": sum(filter(is_number, hits.values()))}
        entries = jobs.setdefault(program, [])
        if key == _UNPINNED and record.get("cause") == "superseded":
            # The pin was handled before its successor's departure and pin: keep pairs together.
            entries.insert(_before_last_pin(entries), entry)
            continue
        entries.append(entry)
        if record.get("decision") == "pin":
            entries.append({_PINNED: t})
    return jobs


def _before_last_pin(entries: list[Entry]) -> int:
    return len(entries) - 2 if entries and _PINNED in entries[-1] else len(entries)


def _time(entry: Any, key: str) -> float | None:
    value = entry.get(key) if isinstance(entry, dict) else None
    return value if is_number(value) else None


def is_number(value: object) -> bool:
    """Whether it is one that something may be: finite, and of a size to reckon with."""
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_one and -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]
