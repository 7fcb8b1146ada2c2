"""Recorded: traces of requests, with their lengths -> requests.

A request is a mapping with the fields of `Request` in bench/common/workloads.py, in which bench
keeps its own recordings: `trace`, `lane`, `turn`, `inp` and `out` (tokens), `common_blocks` (of 64
tokens, in common with the lane's request before), `think` (seconds since that was answered),
`itypes` (a tool's result, or a person's words).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from continuum_connector.tools.analysis.source import Record, is_number, read_original

Request = dict[str, Any]
BLOCK = 64  # tokens of `common_blocks`
TOKEN_S = 0.03  # made up: what an answer's token took, where only arrivals are recorded


def request(lane: tuple[str, str], turn: int, tokens: tuple[int, int], **more: Any) -> Request:
    """`tokens`: of the prompt, of the answer. Only a first turn comes from a person."""
    inp, out = tokens
    kinds = ["tool_result" if turn else "text"]
    head = {"trace": lane[0], "lane": lane[1], "turn": turn, "inp": max(1, inp), "out": max(1, out)}
    return {**head, "itypes": kinds, **more}


# --- equal hash ids are equal text ----------------------------------------------------------------
Conversation = list[dict[str, Any]]


def conversations(requests: Iterable[dict[str, Any]]) -> list[Conversation]:
    """Chains of requests of which each begins with the one before, but for its last block; in
    the order of their first."""
    open_ends: dict[tuple[int, int], Conversation] = {}  # (blocks, last of them) -> conversation
    found = []
    for request in requests:
        ids = request["hash_ids"]
        ends = ((count, ids[count - 1]) for count in range(len(ids), 1, -1))
        talk = next((open_ends.pop(end) for end in ends if end in open_ends), None)
        if talk is None:
            talk = []
            found.append(talk)
        talk.append(request)
        if len(ids) > 2:  # the last block is not full: its id is that of its text so far
            open_ends[len(ids) - 1, ids[-2]] = talk
    return found


def _by_parent(requests: Iterable[dict[str, Any]]) -> list[Conversation]:
    """Chats by the id of the request that each goes on from."""
    last: dict[Any, Conversation] = {}
    found = []
    for request in requests:
        talk = last.pop(request["parent_chat_id"], None)
        if talk is None:
            talk = []
            found.append(talk)
        talk.append(request)
        last[request["chat_id"]] = talk
    return found


def _talks(talks: Iterable[Conversation], block: int, second: float) -> Iterator[Request]:
    """`block`: tokens of a hash id; `second`: of its clock."""
    for number, talk in enumerate(talks):
        before: dict[str, Any] = {}
        for turn, one in enumerate(talk):
            away_s = (one["timestamp"] - before["timestamp"]) / second if before else 0.0
            think = max(0.0, away_s - before.get("output_length", 0) * TOKEN_S)
            yield request(
                (f"chat{number}", "main"),
                turn,
                (one["input_length"], one["output_length"]),
                common_blocks=_shared(before.get("hash_ids", ()), one["hash_ids"]) * block // BLOCK,
                think=think,
                t=one["timestamp"] / second,
                itypes=["text"],
            )
            before = one


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two lists begin with in common."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def mooncake(documents: list[Any], _: str) -> Iterator[Request]:
    return _talks(conversations(documents), 512, 1e3)


def bailian(documents: list[Any], _: str) -> Iterator[Request]:
    return _talks(_by_parent(documents), 16, 1.0)


def weka(documents: list[Any], stem: str) -> Iterator[Request]:
    for index, one in enumerate(documents):
        name = str(one.get("id") or f"{stem}{index}")
        yield from _lane((name, "main"), one["requests"], int(one.get("block_size", BLOCK)))


def _lane(lane: tuple[str, str], requests: list[Any], block: int) -> Iterator[Request]:
    """A sub-agent stands among its parent's requests, with requests of its own."""
    before: dict[str, Any] = {}
    turn = 0
    for index, one in enumerate(requests):
        if isinstance(one.get("requests"), list):
            below = (lane[0], f"{lane[1]}/{one.get('agent_id') or one.get('id') or index}")
            yield from _lane(below, one["requests"], block)
            continue
        shared = _shared(before.get("hash_ids") or (), one.get("hash_ids") or ())
        ended = before.get("t", 0.0) + (before.get("api_time") or 0.0)
        think = one.get("think_time")
        if think is None:
            think = max(0.0, one.get("t", ended) - ended) if before else 0.0
        more = {"think": think, "t": one.get("t", 0.0), "common_blocks": shared * block // BLOCK}
        kinds = one.get("input_types")
        more |= {"itypes": kinds} if isinstance(kinds, list) else {}
        yield request(lane, turn, (one["in"], one["out"]), **more)
        before, turn = one, turn + 1


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
        before: dict[str, float] = {}
        for turn, one in enumerate(each for each in talk if "inp" in each):
            think = max(0.0, one["t"] - before.get("end", one["t"]))
            common = int(before.get("inp", 0)) // BLOCK
            tokens = int(one["inp"]), 1
            yield request((program, "main"), turn, tokens, think=think, common_blocks=common)
            before = one


def original(documents: list[Any], _: str) -> Iterator[Request]:
    return of_records(record for record in read_original(documents[0]) if record)
