"""Mooncake: an hour of a chat service's requests; equal hash ids are equal text.

A record is one request: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: one per 512
tokens of prompt. Who asked is not recorded: a request that goes on where another's prompt ended
is taken for the next turn of its conversation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from bench.common.plans import Span, TurnPlan, Workload
from bench.sim.workloads.recorded import Replay, records
from continuum_connector.tools.analysis.foreign import TOKEN_S, Conversation, conversations

NAME = "mooncake.jsonl.gz"
SOURCE = "https://github.com/kvcache-ai/Mooncake (FAST25-release/traces, Apache-2.0)"
BLOCK = 512
ANSWERS = 1 << 32  # streams of answers, which no prompt repeats token by token


def mooncake(replay: Replay) -> Workload:
    """`replay.programs` conversations, one after the other from one that its seed picks."""
    rng = random.Random(f"mooncake {replay.seed}")
    every = conversations(records(NAME, SOURCE, dict))
    begin = rng.randrange(max(1, len(every) - replay.programs + 1))
    taken = every[begin : begin + replay.programs]
    first_ms, last_ms = taken[0][0]["timestamp"], taken[-1][0]["timestamp"] + 1
    numbers = itertools.count(ANSWERS)
    programs = []
    for index, talk in enumerate(taken):
        arrival_s = (talk[0]["timestamp"] - first_ms) / (last_ms - first_ms)
        turns = _turns(talk[: replay.turns], replay, numbers)
        programs.append(replay.plan(f"chat{index}", turns, arrival_s))
    return Workload("mooncake", tuple(programs), replay.note)


def _turns(talk: Conversation, replay: Replay, numbers: Iterator[int]) -> Iterator[TurnPlan]:
    for index, request in enumerate(talk):
        gap_s = 0.0
        if index:
            before = talk[index - 1]
            away_s = (request["timestamp"] - before["timestamp"]) / 1e3
            gap_s = max(0.0, away_s - before["output_length"] * TOKEN_S) * replay.gap_scale
        answer = Span(next(numbers), max(1, round(request["output_length"] * replay.scale)))
        is_final = index == len(talk) - 1
        prompt = tuple(_prompt(request, replay.scale))
        yield TurnPlan(prompt, answer, min(gap_s, replay.longest_s), is_final=is_final)


def _prompt(request: dict[str, Any], scale: float) -> Iterator[Span]:
    size, left = round(BLOCK * scale), max(1, round(request["input_length"] * scale))
    for number in request["hash_ids"]:
        if left > 0:
            yield Span(number + 1, min(size, left))
            left -= size
