"""Chats of which equal hash ids are equal text, whoever's it is: Mooncake's hour of a service, and
whatever file has such ids; and any trace that somebody has.

A record is one request: `timestamp`, `input_length`, `output_length`, `hash_ids`: one per block of
the prompt. Who asked Mooncake is not recorded: a request that goes on where another's prompt ended
is taken for the next turn of its conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common.plans import Span, TurnPlan, Workload
from bench.common.workloads import read_requests
from bench.sim.workloads.recorded import Replay, records, sessions
from continuum_connector.tools.analysis.foreign import (
    TOKEN_S,
    Chats,
    Conversation,
    conversations,
    read,
)

NAME = "mooncake.jsonl.gz"
SOURCE = "https://github.com/kvcache-ai/Mooncake (FAST25-release/traces, Apache-2.0)"
BLOCK = 512
RECORDED = "recorded"
ANSWERS = 1 << 32  # streams of answers, which no prompt repeats token by token


def mooncake(replay: Replay) -> Workload:
    """`replay.programs` conversations, one after the other from one that its seed picks."""
    every = conversations(records(NAME, SOURCE, dict))
    return played("mooncake", Chats(every, BLOCK, 1e3), replay)


def played(name: str, chats: Chats, replay: Replay) -> Workload:
    """The same of any chats, whose ids are below 2^32."""
    rng, every = replay.rng(name), chats.talks
    begin = rng.randrange(max(1, len(every) - replay.programs + 1))
    taken = every[begin : begin + replay.programs]
    first, last = taken[0][0]["timestamp"], taken[-1][0]["timestamp"] + chats.second / 1e3
    numbers = itertools.count(ANSWERS)
    programs = []
    for index, talk in enumerate(taken):
        arrival_s = (talk[0]["timestamp"] - first) / (last - first)
        turns = _turns(chats, talk[: replay.turns], replay, numbers)
        programs.append(replay.program(f"chat{index}", turns, arrival_s))
    return Workload(name, tuple(programs), replay.note)


def _turns(
    chats: Chats, talk: Conversation, replay: Replay, numbers: Iterator[int]
) -> Iterator[TurnPlan]:
    for index, request in enumerate(talk):
        gap_s = 0.0
        if index:
            before = talk[index - 1]
            away_s = (request["timestamp"] - before["timestamp"]) / chats.second
            gap_s = max(0.0, away_s - before["output_length"] * TOKEN_S) * replay.gap_scale
        answer = Span(next(numbers), max(1, round(request["output_length"] * replay.scale)))
        is_final = index == len(talk) - 1
        prompt = tuple(_prompt(request, chats.block * replay.scale, replay.scale, numbers))
        yield TurnPlan(prompt, answer, min(gap_s, replay.longest_s), is_final=is_final)


def _prompt(
    request: dict[str, Any], block: float, scale: float, numbers: Iterator[int]
) -> Iterator[Span]:
    """Its blocks; what no id tells is text of its own."""
    left = max(1, round(request["input_length"] * scale))
    for index, number in enumerate(request["hash_ids"]):
        length = min(round((index + 1) * block) - round(index * block), left)
        if length:
            yield Span(number + 1, length)
            left -= length
    if left:
        yield Span(next(numbers), left)


@dataclass(frozen=True)
class Recording(Replay):
    """`file`: a trace, or a folder of such (tools/analysis/foreign.py says of what formats)."""

    file: str = ""


def recorded(recording: Recording) -> Workload:
    """Programs of the file, picked by its seed: of chats with hash ids those that follow each
    other, so that what they have in common is found. What the file does not say is in the note."""
    path = Path(recording.file)
    requests, note = read_requests(path)
    own = read(path).chats if path.is_file() else None
    if own is None:
        found = sessions(RECORDED, requests, recording)
    else:
        numbers: dict[object, int] = {}  # ids may be anything
        for one in (one for talk in own.talks for one in talk):
            one["hash_ids"] = [numbers.setdefault(each, len(numbers)) for each in one["hash_ids"]]
        own.talks.sort(key=lambda talk: talk[0]["timestamp"])
        found = played(RECORDED, own, recording)
    return replace(found, note=f"{found.note}; {note}") if note else found
