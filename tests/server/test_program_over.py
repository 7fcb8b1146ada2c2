"""An operator ends a program over HTTP, through whichever of two API servers answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.serve.server import SERVED_NAME, VllmServer
from tests.server.conftest import NUM_BLOCKS
from tests.server.helpers import eventually, pins_live, tokens_of

KEY = "the-operators-own"
CONFIG = {
    "kv_connector": "ContinuumConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"policy": "fixed_ttl", "ttl_s": 600, "max_ttl_s": 600},
}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[VllmServer]:
    endpoint = "continuum_connector.program_endpoint.ProgramEndpoint"
    args = ("--middleware", endpoint, "--api-server-count", "2")
    options = {"num_blocks": NUM_BLOCKS, "kv_transfer_config": CONFIG, "args": args}
    env = {"CONTINUUM_ADMIN_KEY": KEY}
    with VllmServer(tiny_model, "test-program-over", env=env, **options) as server:
        yield server


def delete(server: VllmServer, program: str, key: str = KEY) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{server.url}/continuum/programs/{program}",
        method="DELETE",
        headers={"Authorization": f"Bearer {key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def turn(server: VllmServer, program: str) -> None:
    body = {"model": SERVED_NAME, "prompt": tokens_of(400, program), "max_tokens": 4}
    server.post("/v1/completions", {**body, "vllm_xargs": {"job_id": program}})


def test_a_program_ends_and_its_neighbour_stays(server: VllmServer) -> None:
    for program in ("run/1", "run/2"):
        turn(server, program)
    eventually(lambda: pins_live(server) == 2)
    assert delete(server, "job%3Arun/1", key="guess")[0] == 401
    assert delete(server, "job%3Arun/1") == (200, {"program": "job:run/1", "ended": True})
    turn(server, "other")  # metrics come with a step
    eventually(lambda: pins_live(server) == 2)
    assert server.metric("continuum:pins_ended_total", cause="program_done") == 1
    assert server.metric("continuum:epoch") == 0
    for _ in range(8):  # new connections, so both API servers answer
        status, told = delete(server, "job:never")
        assert (status, "no program 'job:never' is known" in told["error"]) == (404, True)
