"""Two replicas behind vLLM's router: a program that returns to its replica finds its KV there.

The router hashes what the connector names programs by, the header `X-Session-ID`.
"""

from __future__ import annotations

import importlib.util
import json
import urllib.error
from collections.abc import Sequence
from typing import Any

import pytest

from bench.serve.metrics import Metrics, total
from bench.serve.server import SERVED_NAME, VllmServer
from tests.server.conftest import MIDDLEWARE, ServerFactory
from tests.server.helpers import Dialog, by_label, dialogs, reset, told
from tests.server.router import BINDING, router

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm_router") is None,
    reason="vLLM's router is not installed; its wheel is for Linux on x86-64",
)

# An odd number, so that round robin takes each program elsewhere with every turn; and so many
# that a hash of them hardly ever picks one replica for all.
PROGRAMS = dialogs(11, rounds=3, first=200, tool=150)
NUM_BLOCKS = 401  # all programs fit: nothing is lost but by going elsewhere
NUM_ANSWER = 24

Answers = list[list[list[int]]]


# Agents' own headers -> what the connector puts before the id.
OWN = {"x-claude-code-session-id": "claude-code", "session-id": "codex"}
OPTIONS: dict[str, Any] = {
    "num_blocks": NUM_BLOCKS,
    "connector": {"policy": "fixed_ttl", "ttl_s": 50},
}


@pytest.fixture(scope="module")
def replicas(server_factory: ServerFactory) -> list[VllmServer]:
    """Two equal servers that know nothing of each other."""
    return [server_factory(name, args=MIDDLEWARE, **OPTIONS) for name in ("left", "right")]


def converse(server: VllmServer, header: str = "X-Session-ID") -> Answers:
    """Run PROGRAMS, turn about, each with its id in this header."""
    contexts = [list(dialog.prompt) for dialog in PROGRAMS]
    answers: Answers = [[] for _ in PROGRAMS]
    for turn in range(len(PROGRAMS[0].tools) + 1):
        for i, dialog in enumerate(PROGRAMS):
            contexts[i] += dialog.tools[turn - 1] if turn else []
            answers[i].append(ask_turn(server, dialog, contexts[i], header))
            contexts[i] += answers[i][-1]
    return answers


def ask_turn(
    server: VllmServer, dialog: Dialog, context: list[int], header: str = "X-Session-ID"
) -> list[int]:
    body = {
        "model": SERVED_NAME,
        "prompt": context,
        "max_tokens": NUM_ANSWER,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = server.post("/v1/completions", body, {header: dialog.name})
    assert told(answer)["program"] == f"{OWN.get(header, 'session')}:{dialog.name}"
    return list(answer["choices"][0]["token_ids"])


def work(servers: Sequence[VllmServer], before: Sequence[Metrics]) -> tuple[float, list[float]]:
    """Prompt tokens found, on all servers together, and turns served, on each."""
    hits, turns = 0.0, []
    for server, known in zip(servers, before, strict=True):
        now = server.metrics()
        hits += total(now, "continuum:hit_tokens_total") - total(
            known, "continuum:hit_tokens_total"
        )
        turns.append(total(now, "continuum:turns_total") - total(known, "continuum:turns_total"))
    return hits, turns


def through(
    policy: str, replicas: list[VllmServer], *args: str, header: str = "X-Session-ID"
) -> tuple[Answers, float]:
    """Run PROGRAMS through the router, on empty caches; the answers, and the tokens found."""
    for replica in replicas:
        reset(replica)
    before = [replica.metrics() for replica in replicas]
    with router(policy, [replica.url for replica in replicas], *args) as front:
        answers = converse(front, header)
    hits, turns = work(replicas, before)
    print(f"\n{policy}: {hits:.0f} tokens found; turns on each replica: {turns}")
    assert min(turns) > 0, "both replicas must serve"
    return answers, hits


@pytest.fixture(scope="module")
def alone(replicas: list[VllmServer]) -> tuple[Answers, float]:
    """What one server answers and finds when it serves every program."""
    reset(replicas[0])
    before = replicas[0].metrics()
    answers = converse(replicas[0])
    return answers, work(replicas[:1], [before])[0]


def test_with_affinity_two_replicas_find_what_one_server_finds(
    replicas: list[VllmServer], alone: tuple[Answers, float]
) -> None:
    assert through("consistent_hash", replicas) == alone


@pytest.mark.parametrize("header", OWN)
def test_bound_by_an_agents_own_header_they_find_as_much(
    replicas: list[VllmServer], alone: tuple[Answers, float], header: str
) -> None:
    assert through("round_robin", replicas, *BINDING, header=header) == alone


def test_the_routers_own_field_is_refused_by_vllm_as_an_object_and_taken_as_text(
    replicas: list[VllmServer],
) -> None:
    context = {"program_id": "run-1"}
    with router("round_robin", [replicas[0].url], *BINDING) as front:
        ask_with(front, json.dumps(context))
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask_with(front, context)


def ask_with(server: VllmServer, context: Any) -> None:
    xargs = {"agentic_context": context}
    body = {"model": SERVED_NAME, "prompt": [1, 2], "max_tokens": 1, "vllm_xargs": xargs}
    server.post("/v1/completions", body)


def test_without_affinity_hits_collapse(
    replicas: list[VllmServer], alone: tuple[Answers, float]
) -> None:
    answers, hits = through("round_robin", replicas)
    assert answers == alone[0], "a miss costs time, never an answer"
    assert hits < 0.5 * alone[1]


def test_engines_of_one_data_parallel_server_are_replicas_too(
    server_factory: ServerFactory, alone: tuple[Answers, float]
) -> None:
    server_factory.stop()  # two cores are for two engines
    pair = server_factory("pair", args=(*MIDDLEWARE, "--data-parallel-size", "2"), **OPTIONS)
    before = pair.metrics()
    with router("consistent_hash", [pair.url], "--intra-node-data-parallel-size", "2") as front:
        assert converse(front) == alone[0]
    did = {key: value - before.get(key, 0.0) for key, value in pair.metrics().items()}
    turns = by_label(did, "continuum:turns_total", "engine")
    print(f"\ntwo engines: {total(did, 'continuum:hit_tokens_total'):.0f} tokens found; {turns}")
    assert total(did, "continuum:hit_tokens_total") == alone[1]
    assert min(turns.values()) > 0
    assert len(turns) == 2
