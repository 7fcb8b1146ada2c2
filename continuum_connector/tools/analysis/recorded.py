"""Recorded: traces of requests, with their lengths -> requests.

A request is a mapping with the fields of `Request` in bench/common/workloads.py, in which bench
keeps its own recordings: `trace`, `lane`, `turn`, `inp` and `out` (tokens), `common_blocks` (of 64
tokens, in common with the lane's request before), `think` (seconds since that was answered),
`itypes` (a tool's result, or a person's words).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from continuum_connector.tools.analysis.source import Record, is_number, read_original

Request = dict[str, Any]
BLOCK = 64  # tokens of `common_blocks`
TOKEN_S = 0.03  # made up: what an answer's token took, where only arrivals are recorded


class Lane:
    """One agent, and how many turns of it there are so far."""

    def __init__(self, trace: str, lane: str = "main") -> None:
        self.trace, self.lane, self.num_turns = trace, lane, 0

    def turn(
        self, inp: int, out: int, common: int, think: float, t: float | None = None
    ) -> Request:
        """Its next turn. `common`: tokens in common with the one before. Only the first comes from
        a person."""
        numbers = {"turn": self.num_turns, "inp": max(1, inp), "out": max(1, out)}
        at = {"common_blocks": common // BLOCK, "think": think} | ({} if t is None else {"t": t})
        kinds = ["tool_result" if self.num_turns else "text"]
        self.num_turns += 1
        return {"trace": self.trace, "lane": self.lane, **numbers, "itypes": kinds, **at}


def _numbers(one: dict[str, Any], *keys: str) -> list[Any]:
    """These fields. Raises ValueError if one is no number, or a bool."""
    for key in keys:
        if not is_number(one[key]):
            raise ValueError(f"{key} is {one[key]!r}, which is no number")
    return [one[key] for key in keys]


# --- equal hash ids are equal text ----------------------------------------------------------------
Conversation = list[dict[str, Any]]


def conversations(requests: Iterable[dict[str, Any]]) -> list[Conversation]:
    """Chains of requests of which each begins with the one before, but for its last block; in
    the order of their first."""
    open_ends: dict[Any, Conversation] = {}  # (blocks, last of them) -> conversation
    found: list[Conversation] = []
    for request in requests:
        ids = request["hash_ids"]
        ends = ((count, ids[count - 1]) for count in range(len(ids), 1, -1))
        talk = _continued(open_ends, ends, found)
        talk.append(request)
        if len(ids) > 2:  # the last block is not full: its id is that of its text so far
            open_ends[len(ids) - 1, ids[-2]] = talk
    return found


def _continued(
    open_ends: dict[Any, Conversation], ends: Iterable[Any], found: list[Conversation]
) -> Conversation:
    """The conversation at the first of the ends that is open, which is open no more, or a new
    one."""
    talk = next((open_ends.pop(end) for end in ends if end in open_ends), None)
    if talk is None:
        talk = []
        found.append(talk)
    return talk


def _by_parent(requests: Iterable[dict[str, Any]]) -> list[Conversation]:
    """Chats by the id of the request that each goes on from."""
    last: dict[Any, Conversation] = {}
    found: list[Conversation] = []
    for request in requests:
        talk = _continued(last, [request["parent_chat_id"]], found)
        talk.append(request)
        last[request["chat_id"]] = talk
    return found


def _talks(talks: Iterable[Conversation], block: int, second: float) -> Iterator[Request]:
    """`block`: tokens of a hash id; `second`: of its clock."""
    for number, talk in enumerate(talks):
        lane = Lane(f"chat{number}")
        for before, one in zip([None, *talk], talk, strict=False):
            think, common = 0.0, 0
            at, inp, out = _numbers(one, "timestamp", "input_length", "output_length")
            if inp > 2 * block * (1 + len(one["hash_ids"])):
                of = f"its {len(one['hash_ids'])} hash_ids of {block} tokens"
                raise ValueError(f"input_length is {inp:,}, far beyond {of}")
            if before is not None:
                away_s = (at - before["timestamp"]) / second
                think = max(0.0, away_s - before["output_length"] * TOKEN_S)
                common = _shared(before["hash_ids"], one["hash_ids"]) * block
            made = lane.turn(inp, out, common, think, at / second)
            yield made | {"itypes": ["text"]}


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two lists begin with in common."""
    same = (a == b for a, b in zip(one, other, strict=False))
    return sum(itertools.takewhile(bool, same))


def mooncake(documents: list[Any], _: str) -> Iterator[Request]:
    return _talks(conversations(documents), 512, 1e3)


def bailian(documents: list[Any], _: str) -> Iterator[Request]:
    return _talks(_by_parent(documents), 16, 1.0)


def weka(documents: list[Any], stem: str) -> Iterator[Request]:
    for index, one in enumerate(documents):
        lane = Lane(str(one.get("id") or f"{stem}{index}"))
        yield from _agent(lane, one["requests"], int(one.get("block_size", BLOCK)))


def _agent(lane: Lane, requests: list[Any], block: int) -> Iterator[Request]:
    """A sub-agent stands among its parent's requests, with requests of its own."""
    before: dict[str, Any] = {}
    for index, one in enumerate(requests):
        if isinstance(one.get("requests"), list):
            name = f"{lane.lane}/{one.get('agent_id') or one.get('id') or index}"
            yield from _agent(Lane(lane.trace, name), one["requests"], block)
            continue
        times = [key for key in ("t", "think_time", "api_time") if one.get(key) is not None]
        inp, out, *_ = _numbers(one, "in", "out", *times)
        shared = _shared(before.get("hash_ids") or (), one.get("hash_ids") or ())
        ended = before.get("t", 0.0) + (before.get("api_time") or 0.0)
        think = one.get("think_time")
        if think is None:
            think = max(0.0, one.get("t", ended) - ended) if before else 0.0
        made = lane.turn(inp, out, shared * block, think, one.get("t", 0.0))
        kinds = one.get("input_types")
        yield made | ({"itypes": kinds} if isinstance(kinds, list) else {})
        before = one


# --- our own, and the original recorder's -------------------------------------------------------
def of_records(records: Iterable[Record]) -> Iterator[Request]:
    """The requests behind a trace of ours: what was asked, found and waited for. How long an answer
    was is not recorded: it is what the next prompt does not need to compute, or 1."""
    turns: dict[str, list[dict[str, float]]] = {}
    for record in records:
        program, now = str(record.get("program")), float(record["now"])
        talk = turns.setdefault(program, [])
        if record["event"] == "arrive":
            talk.append({"t": now})
        elif record["event"] == "admit" and talk and is_number(record.get("tokens")):
            talk[-1]["inp"] = record["tokens"]
        elif record["event"] == "decision" and talk:
            talk[-1]["end"] = now
    for program, talk in turns.items():
        lane, before = Lane(program), dict[str, float]()
        for one in (each for each in talk if "inp" in each):
            think = max(0.0, one["t"] - before.get("end", one["t"]))
            yield lane.turn(int(one["inp"]), 1, int(before.get("inp", 0)), think)
            before = one


def original(documents: list[Any], _: str) -> Iterator[Request]:
    return of_records(record for record in read_original(documents[0]) if record)
