"""Words: what one record of a trace says, as a sentence with its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from continuum_connector.errors import shown
from continuum_connector.tools.analysis.report import NOT_READ, seconds
from continuum_connector.tools.analysis.source import (
    Kept,
    Record,
    against_stock,
    count,
    number,
    part,
    text,
    texts,
    tiers,
)


class Line(NamedTuple):
    """One line of a program's life. `kind`: "good", "bad", "detail" or "", which sets the
    colour."""

    record: Record
    text: str
    kind: str = ""


def told(record: Record) -> Iterator[Line]:
    """The lines that describe a record; none for an event that we do not know."""
    tell = _TELL.get(record["event"])
    if tell is not None:
        yield from tell(record)


def _start(record: Record) -> Iterator[Line]:
    policy = text(record, "policy") or "unknown"
    yield Line(record, f"a server started, policy {policy}")


def _arrive(record: Record) -> Iterator[Line]:
    gap_s = number(record, "gap_s")
    back = "" if gap_s is None else f"back after {seconds(gap_s)}, "
    pin = ", its pin waits for it" if record["event"] == "return" else ""
    yield Line(record, f"arrived: {back}{_tokens(record)}{pin}")


_WHERE = ("in VRAM", "in DRAM", "on disk")


def _admit(record: Record) -> Iterator[Line]:
    hits = tiers(record)
    parts = [f"{num:,} {where}" for num, where in zip(hits, _WHERE, strict=True) if num]
    rest = f"{max(0, count(record, 'tokens') - sum(hits)):,} to compute"
    waited_s = number(record, "waited_s") or 0.0
    yield Line(record, f"ran after {seconds(waited_s)} of waiting: {', '.join([*parts, rest])}")
    if (kept := against_stock(record)) is not None and any(kept):
        yield Line(record, f"of these {_kept(kept)}", "detail")
    on_disk = part(record, "disk")
    if why := text(on_disk, "not_read"):
        yield Line(record, _not_read(record, on_disk, why), "detail")


def _kept(kept: Kept) -> str:
    """Who kept the tokens that were found."""
    words = f"{kept.only_ours:,} only we kept, {kept.stock_too:,} stock vLLM would have kept too"
    return words + (f"; {kept.only_stock:,} more only stock would have" if kept.only_stock else "")


def _not_read(record: Record, on_disk: Record, why: str) -> str:
    because = NOT_READ.get(why, shown(why))
    if why == "prefill":
        reading, prefill = _of(on_disk, "read_s"), _of(on_disk, "prefill_s")
        because = f"{prefill} of prefill, for all who wait for it, is cheaper than {reading}"
    had = f"disk had {count(on_disk, 'tokens'):,} of {_tokens(record)}; " if why != "down" else ""
    return f"{had}not read{'' if why == 'prefill' else ' in full'}: {because}"


def _let_in(record: Record) -> Iterator[Line]:
    why = {
        "fits_vram": "now it fits into VRAM",
        "fits_dram": "now it fits into DRAM",
        "gpu_idle": "the GPU had been idle for as long as the others will pay",
        "empty": "nobody else was left",
        "deadline": "it had waited long enough",
        "switched_off": "the connector was switched off",
    }.get(text(record, "because"), text(record, "because"))
    cost = f"starting it would have cost the others {_of(record, 'cost_s')} of prefill"
    yield Line(
        record,
        f"held for {_of(record, 'held_s')}: {cost} per cycle of {_of(record, 'cycle_s')}; {why}",
    )


def _preempt(record: Record) -> Iterator[Line]:
    yield Line(record, "put back by vLLM to make room", "bad")


def _readmit(record: Record) -> Iterator[Line]:
    yield Line(record, "ran again")


def _decision(record: Record) -> Iterator[Line]:
    known = part(record, "known")
    verdict = {
        "pin": f"pinned{_ttl(record)}{_then(record)}",
        "offload": "offloaded to DRAM",
        "free": "let go",
    }.get(text(record, "decision"), text(record, "decision"))
    why = f": {text(record, 'why')}" if text(record, "why") else ""
    yield Line(record, f"ended {_ending(record, known)}; {verdict}{why}")
    values = part(record, "values")
    if len(values) > 1:
        worth = ", ".join(f"{shown(name)} {_of(values, name)}" for name in _by_worth(values))
        yield Line(record, f"worth to all programs: {worth}", "detail")
    if text(record, "decision") == "pin" or values:
        yield Line(record, _known(record, known), "detail")


def _ending(record: Record, known: Record) -> str:
    if record.get("aborted") is True:
        return "with its client gone"
    if tools := texts(known, "tools"):
        return f"with a call of {', '.join(tools)}"
    answers = {"answer": "with an answer", "cut": "cut short", "unread": "unread"}
    return answers.get(text(known, "ending"), f"with {_tokens(record)}")


def _ttl(record: Record) -> str:
    return f" for {_of(record, 'ttl_s')}" if number(record, "ttl_s") is not None else ""


def _then(record: Record) -> str:
    return ", with a copy in DRAM" if text(record, "then") == "store" else ""


def _by_worth(values: Record) -> list[str]:
    return sorted(values, key=lambda name: -(number(values, name) or 0.0))


def _known(record: Record, known: Record) -> str:
    p, num_seen = number(known, "p_in_time"), number(known, "gaps_seen")
    chance = f"back in time with {100 * p:.0f} %; " if p is not None else ""
    median = f"half of such pauses are over after {_of(known, 'gap_p50')}"
    seen = f" ({num_seen:.0f} seen)" if num_seen is not None else ""
    costs = f"{_of(known, 'prefill')} to compute, {_of(known, 'load')} to load"
    if number(known, "load") is None:
        costs = f"{_of(known, 'prefill')} to compute, no DRAM tier"
    if known.get("prior") is True:
        costs += ", from a prior"
    if not number(known, "prefill"):
        costs = "what prefills cost is not measured yet"
    blocks = count(record, "blocks")
    held = (number(known, "price") or 0.0) * blocks
    price = f"{blocks:,} blocks cost the others {seconds(held)} per second"
    return f"{chance}{median}{seen}; {costs}; {price}; {count(known, 'waiting')} waiting"


_CAUSES = {
    "reset": "the prefix cache was reset",
    "weights": "the weights changed",
    "version": "vLLM was told another weight version",
}
_OUTCOMES = {
    "in_time": ("'s pin served: it was in time", "good"),
    "expired": ("'s pin had expired when it was needed", "bad"),
    "pressure": ("'s pin had been given up for others", "bad"),
    "diverged": ("'s pin was of no use: the next turn did not continue it", "bad"),
    "superseded": (" was overtaken by a newer turn of the program", ""),
    "reset": ("'s pin had ended with a reset of the prefix cache", "bad"),
    "switched_off": (": the connector was switched off before it was known", ""),
    "never": (": nobody came back for it", "bad"),
    "done": (": nothing more is needed of it", ""),
    "in_vram": (" was still in VRAM", "good"),
    "in_dram": (" was in DRAM", "good"),
    "in_disk": (" was on disk", "good"),
    "recomputed": (" was gone and is computed again", "bad"),
}


def _outcome(record: Record) -> Iterator[Line]:
    outcome = text(record, "outcome")
    words, kind = _OUTCOMES.get(outcome, (f": {outcome}", ""))
    words = f"turn {count(record, 'turn')}{words}"
    if "hit_tokens" in record:
        vram, dram, disk = tiers(record)
        lost = count(record, "recomputed_tokens")
        below = f"{dram:,} in DRAM" + (f", {disk:,} on disk" if disk else "")
        words += f"; of its tokens {vram:,} were in VRAM, {below}, {lost:,} lost"
        if (kept := against_stock(record)) is not None and any(kept):
            words += f"; {_kept(kept)}"
        saved_s, lost_s = number(record, "saved_s"), number(record, "lost_s") or 0.0
        if saved_s or lost_s:
            saved = "" if saved_s is None else f"{seconds(saved_s)} of prefill saved, "
            words += f"; about {saved}{seconds(lost_s)} repeated"
    yield Line(record, words, kind)


def _pin_end(record: Record) -> Iterator[Line]:
    cause = text(record, "cause") or "unpinned"
    kind = {"returned": "good", "expired": "bad", "pressure": "bad"}.get(cause, "")
    yield Line(record, f"pin ended after {_of(record, 'held_s')}: {cause}", kind)


_COPIED = {"store": "stored in DRAM", "load": "loaded from DRAM"}
_COPIED |= {"write": "written to disk", "read": "read from disk"}


def _copy(record: Record) -> Iterator[Line]:
    what = _COPIED[record["event"]]
    blocks, outcome = f"{count(record, 'blocks'):,} blocks", text(record, "outcome")
    if outcome == "done":
        yield Line(record, f"{blocks} {what} in {_of(record, 'seconds')}", "detail")
        return
    reasons = texts(record, "reasons")
    why = f" ({', '.join(reasons)})" if reasons else ""
    yield Line(record, f"{blocks} not {what}: {outcome}{why}", "bad")


def _everybody(words: str) -> Callable[[Record], Iterator[Line]]:
    def tell(record: Record) -> Iterator[Line]:
        reason = text(record, "reason")
        yield Line(record, f"{words}{f': {reason}' if reason else ''}", "bad")

    return tell


def _epoch(record: Record) -> Iterator[Line]:
    cause, why = text(record, "cause"), text(record, "why")
    words = _CAUSES.get(cause, f"a new epoch began ({cause})")
    words += f" ({why})" if why else ""
    yield Line(record, f"{words}: every pin ended, everything below VRAM is forgotten", "bad")


def _switch(record: Record) -> Iterator[Line]:
    on = "the connector was switched on"
    off = "the connector was switched off: every pin ended, DRAM was emptied"
    yield Line(record, on if record.get("on") else off, "bad")


def _tokens(record: Record) -> str:
    return f"{count(record, 'tokens'):,} tokens"


def _of(record: Record, key: str) -> str:
    """Seconds; null stands for infinity, which JSON does not have."""
    value = number(record, key)
    return "for ever" if value is None else seconds(value)


_TELL: dict[str, Callable[[Any], Iterator[Line]]] = {
    "start": _start,
    "arrive": _arrive,
    "return": _arrive,
    "admit": _admit,
    "preempt": _preempt,
    "readmit": _readmit,
    "let_in": _let_in,
    "decision": _decision,
    "outcome": _outcome,
    "pin_end": _pin_end,
    "store": _copy,
    "load": _copy,
    "write": _copy,
    "read": _copy,
    "epoch": _epoch,
    "tier_down": _everybody("the DRAM tier went down"),
    "disk_down": _everybody("the disk tier went down"),
    "switch": _switch,
    "stop": _everybody("the server stopped"),
}
