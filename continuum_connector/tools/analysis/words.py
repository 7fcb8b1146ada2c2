"""Words: what one record of a trace says, as sentences; how seconds are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from continuum_connector.errors import shown
from continuum_connector.tools.analysis.source import (
    Record,
    against_stock,
    count,
    number,
    part,
    text,
    texts,
    tiers,
)

# Why a turn did not get from the disk what the disk had.
NOT_READ = {
    "prefill": "a prefill is cheaper",
    "room": "DRAM had no room",
    "deadline": "its deadline passed",
    "failed": "a read failed",
    "cleared": "the tier was reset or went down meanwhile",
    "stuck": "the disk owed an answer for too long",
    "down": "there was no disk",
    "unsaved": "blocks left DRAM before they were written",
    "budget": "the write budget did not allow blocks to be written",
}


def seconds(value: float) -> str:
    """Seconds as text, to three digits if three are enough."""
    if value and abs(value) < 0.01:
        return f"{1000 * value:.3g} ms"
    return f"{value:,.0f} s" if abs(value) >= 1000 else f"{value:.3g} s"


def where(hits: Mapping[str, int]) -> list[str]:
    """Tokens found, by where they were (`tiers`); nothing of where there were none."""
    places = {"vram": "in VRAM", "dram": "in DRAM", "disk": "on disk"}
    return [f"{num:,} {places[tier]}" for tier, num in hits.items() if num]


def ratio(part: float, whole: float) -> float | None:
    """A part of the whole, or a mean; None of nothing."""
    return part / whole if whole else None


class Line(NamedTuple):
    """One line of a program's life. `kind`: "good", "bad", "detail" or "", which sets the
    colour."""

    record: Record
    text: str
    kind: str = ""


Said = Iterator[tuple[str, str]]  # sentences, each with its kind

# Events of which there is one thing to say, and a reason where the record has one.
PLAIN = {
    "preempt": ("put back by vLLM to make room", "bad"),
    "readmit": ("ran again", ""),
    "tier_down": ("the DRAM tier went down", "bad"),
    "disk_down": ("the disk tier went down", "bad"),
    "stop": ("the server stopped", "bad"),
}
LET_IN = {
    "fits": "now there is room for it",
    "empty": "nobody else was left",
    "deadline": "it had waited long enough",
    "switched_off": "the connector was switched off",
}
EPOCHS = {
    "reset": "the prefix cache was reset",
    "weights": "the weights changed",
    "version": "vLLM was told another weight version",
}
COPIED = {  # what a transfer did, and where
    "store": ("stored", "in", "DRAM"),
    "load": ("loaded", "from", "DRAM"),
    "write": ("written", "to", "disk"),
    "read": ("read", "from", "disk"),
}


def told(records: Iterable[Record]) -> Iterator[Line]:
    """The lines that describe each record; none for an event that we do not know."""
    return (Line(each, *said) for each in records for said in _told(each["event"], each))


def _told(event: str, record: Record) -> Said:
    if event in PLAIN:
        words, kind = PLAIN[event]
        yield words + _after(": ", text(record, "reason")), kind
    elif event == "start":
        yield f"a server started, policy {text(record, 'policy') or 'unknown'}", ""
    elif event == "let_in":
        why = text(record, "because")
        said = f"held for {_of(record, 'held_s')} at the gate"
        yield f"{said}; {LET_IN.get(why, why)}", ""
    elif event == "pin_end":
        cause = text(record, "cause") or "unpinned"
        kind = {"returned": "good", "expired": "bad", "pressure": "bad"}.get(cause, "")
        yield f"pin ended after {_of(record, 'held_s')}: {cause}", kind
    elif event == "epoch":
        cause, why = text(record, "cause"), text(record, "why")
        began = EPOCHS.get(cause, f"a new epoch began ({cause})") + (f" ({why})" if why else "")
        yield f"{began}: every pin ended, everything below VRAM is forgotten", "bad"
    elif event == "switch":
        off = "off: every pin ended, DRAM was emptied"
        yield f"the connector was switched {'on' if record.get('on') else off}", "bad"
    elif event in COPIED:
        blocks, what = f"{count(record, 'blocks'):,} blocks", " ".join(COPIED[event])
        reasons, outcome = ", ".join(texts(record, "reasons")), text(record, "outcome")
        if outcome == "done":
            yield f"{blocks} {what} in {_of(record, 'seconds')}", "detail"
        else:
            yield f"{blocks} not {what}: {outcome}{f' ({reasons})' if reasons else ''}", "bad"
    elif event in _TELL:
        yield from _TELL[event](record)


def _arrive(record: Record) -> Said:
    gap_s = number(record, "gap_s")
    back = "" if gap_s is None else f"back after {seconds(gap_s)}, "
    pin = ", its pin waits for it" if record["event"] == "return" else ""
    yield f"arrived: {back}{_tokens(record)}{pin}", ""
    if at := part(record, "diverged"):
        what = f" ({shown(text(at, 'part'))})" if text(at, "part") else ""
        place = f"tokens {count(at, 'from'):,}..{count(at, 'to'):,} of {count(at, 'of'):,}{what}"
        again = f", {count(at, 'in_a_row')} times in a row" if count(at, "in_a_row") > 1 else ""
        yield f"goes on, but differs within {place}{again}: nothing kept fits", "bad"


def _admit(record: Record) -> Said:
    hits, kept = tiers(record), against_stock(record)
    missing = max(0, count(record, "tokens") - sum(hits.values()))
    found = "".join(f"{each}, " for each in where(hits))
    waited_s = number(record, "waited_s") or 0.0
    yield f"ran after {seconds(waited_s)} of waiting: {found}{missing:,} to compute", ""
    if any(kept.values()):
        ours, too, only = kept.values()
        more = f"; {only:,} more only stock would have" if only else ""
        said = f"of these {ours:,} only we kept, {too:,} stock vLLM would have kept too{more}"
        yield said, "detail"
    on_disk = part(record, "disk")
    if why := text(on_disk, "not_read"):
        because = NOT_READ.get(why, shown(why))
        if why == "prefill":
            reading, prefill = _of(on_disk, "read_s"), _of(on_disk, "prefill_s")
            because = f"{prefill} of prefill, for all who wait for it, is cheaper than {reading}"
        had = f"disk had {count(on_disk, 'tokens'):,} of {_tokens(record)}; "
        yield f"{had if why != 'down' else ''}not read in full: {because}", "detail"


def _decision(record: Record) -> Said:
    known, values, kind = part(record, "known"), part(record, "values"), text(record, "decision")
    ttl = f" for {_of(record, 'ttl_s')}" if number(record, "ttl_s") is not None else ""
    copy = ", with a copy in DRAM" if text(record, "then") == "store" else ""
    verdicts = {"pin": f"pinned{ttl}{copy}", "offload": "offloaded to DRAM", "free": "let go"}
    why = _after(": ", text(record, "why"))
    yield f"ended {_ending(record, known)}; {verdicts.get(kind, kind)}{why}", ""
    if len(values) > 1:
        best = sorted(values, key=lambda name: -(number(values, name) or 0.0))
        worth = ", ".join(f"{shown(name)} {_of(values, name)}" for name in best)
        yield f"worth to all programs: {worth}", "detail"
    if kind == "pin" or values:
        yield _known(record, known), "detail"


def _ending(record: Record, known: Record) -> str:
    if record.get("aborted") is True:
        return "with its client gone"
    if tools := texts(known, "tools"):
        return f"with a call of {', '.join(tools)}"
    answers = {"answer": "with an answer", "cut": "cut short", "unread": "unread"}
    return answers.get(text(known, "ending"), f"with {_tokens(record)}")


def _known(record: Record, known: Record) -> str:
    p, num_seen = number(known, "p_in_time"), number(known, "gaps_seen")
    chance = f"back in time with {100 * p:.0f} %; " if p is not None else ""
    seen = f" ({num_seen:.0f} seen)" if num_seen is not None else ""
    load = ", no DRAM tier" if number(known, "load") is None else f", {_of(known, 'load')} to load"
    prior = ", from a prior" if known.get("prior") is True else ""
    costs = f"{_of(known, 'prefill')} to compute{load}{prior}"
    blocks = count(record, "blocks")
    price = f"{blocks:,} blocks cost the others {seconds((number(known, 'price') or 0.0) * blocks)}"
    median = f"half of such pauses are over after {_of(known, 'gap_p50')}{seen}"
    return f"{chance}{median}; {costs}; {price} per second; {count(known, 'waiting')} waiting"


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


def _outcome(record: Record) -> Said:
    outcome = text(record, "outcome")
    words, kind = _OUTCOMES.get(outcome, (f": {outcome}", ""))
    words = f"turn {count(record, 'turn')}{words}"
    if "recomputed_tokens" in record:
        words += f"; {count(record, 'recomputed_tokens'):,} of its tokens were lost"
        saved_s, lost_s = number(record, "saved_s"), number(record, "lost_s") or 0.0
        if saved_s or lost_s:
            saved = "" if saved_s is None else f"{seconds(saved_s)} of prefill saved, "
            words += f"; about {saved}{seconds(lost_s)} repeated"
    yield words, kind


def _after(mark: str, said: str) -> str:
    return f"{mark}{said}" if said else ""


def _tokens(record: Record) -> str:
    return f"{count(record, 'tokens'):,} tokens"


def _of(record: Record, key: str) -> str:
    """Seconds; null stands for infinity, which JSON does not have."""
    value = number(record, key)
    return "for ever" if value is None else seconds(value)


_TELL: dict[str, Callable[[Record], Said]] = {
    "arrive": _arrive,
    "return": _arrive,
    "admit": _admit,
    "decision": _decision,
    "outcome": _outcome,
}
