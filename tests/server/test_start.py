"""How servers start, step aside, and stop."""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.serve.server import ServerError, VllmServer
from continuum_connector.tools.checks import Verdict
from continuum_connector.tools.checks.machine import this_machine
from continuum_connector.tools.checks.plan import read_plan
from continuum_connector.tools.cli.check import look
from tests.server.conftest import ServerFactory
from tests.server.helpers import (
    ask,
    count_by,
    eventually,
    log_of,
    pins_live,
    read_trace,
    terminate,
    text_of,
    usage,
)

IN_MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "connectors": [
            {
                "kv_connector": "ContinuumConnector",
                "kv_connector_extra_config": {"ttl_s": 90, "max_ttl_s": 60},
            }
        ]
    },
}
BAD: dict[str, dict[str, Any]] = {
    "unknown-key": {"connector": {"dram_byte": "1GiB"}},
    "key-of-vllms-offloading": {"connector": {"cpu_bytes_to_use": 2**30}},
    "bad-size": {"connector": {}, "env": {"CONTINUUM_DRAM_BYTES": "lots"}},
    "ttl-above-max": {"args": ("--kv-transfer-config", json.dumps(IN_MULTI))},
}
STOCK = {"args": ("--max-model-len", "999999")}  # a config that vLLM itself refuses


def ended(model: Path, name: str, options: dict[str, Any]) -> tuple[VllmServer, float]:
    """Start a server that does not come up; it, and how many seconds that took."""
    server = VllmServer(model, f"test-{name}", num_blocks=64, **options)
    began = time.monotonic()
    with pytest.raises(ServerError, match="ended with status 1 while"):
        server.start()
    return server, time.monotonic() - began


def test_a_bad_config_ends_the_server_with_one_sentence_before_an_engine_is_started(
    tiny_model: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    bad = {**BAD, "pipe": {"connector": {"trace_path": str(tmp_path / "pipe")}}}
    with ThreadPoolExecutor(3) as pool:  # most of a start is waiting for imports
        stock, *ours = pool.map(
            lambda case: ended(tiny_model, *case), [("stock", STOCK), *bad.items()]
        )
    assert "max_model_len" in log_of(stock[0])
    for name, (server, seconds) in zip(bad, ours, strict=True):
        print(
            f"\n{name}: ended after {seconds:.1f} s, vLLM's own bad config after {stock[1]:.1f} s"
        )
        plan = read_plan(server.options.command(server.model, 8000), server.options.environment())
        log = log_of(server)
        assert log.splitlines()[-1] == f"ContinuumConnector: {plan.why_no_config}", "as check says"
        assert plan.why_no_config
        assert "Traceback" not in log
        assert "EngineCore" not in log, "and so no weights"


def test_without_prefix_caching_the_connector_steps_aside(server_factory: ServerFactory) -> None:
    server = server_factory(
        "no-prefix-caching", num_blocks=64, connector={}, args=("--no-enable-prefix-caching",)
    )
    try:
        said = re.findall(r"ContinuumConnector steps aside: (.*)", log_of(server))
        assert said == [
            "prefix caching is off, so a kept block could never be found again; "
            "serve with --enable-prefix-caching"
        ]
        command = server.options.command(server.model, server.port)
        checked = list(look(this_machine(os.environ), read_plan(command, os.environ)))
        foretold = next(line for line in checked if line.subject == "prefix caching")
        assert f"{foretold.text}; {foretold.cure}" == f"the connector steps aside: {said[0]}"
        assert [line for line in checked if line.verdict is Verdict.ERROR] == [foretold]
        answer = ask(server, "completions", [text_of(200, "aside")], 8)
        assert answer["usage"]["completion_tokens"] == 8
        assert not answer.get("kv_transfer_params")
        eventually(lambda: usage(server) == 0)
    finally:
        server_factory.stop("no-prefix-caching")


def test_sigterm_ends_pins_and_trace_and_leaves_no_process(
    server_factory: ServerFactory, tmp_path: Path
) -> None:
    """It is given time: by default the API server kills the engine at once."""
    trace_path = tmp_path / "trace.jsonl"
    server = server_factory(
        "ends",
        num_blocks=64,
        connector={"policy": "fixed_ttl", "ttl_s": 50, "trace_path": str(trace_path)},
        args=("--shutdown-timeout", "60"),
    )
    ask(server, "completions", [text_of(100, "left")], vllm_xargs={"job_id": "left"})
    eventually(lambda: pins_live(server) > 0)
    left = pins_live(server)
    terminate(server)
    records = read_trace(trace_path)
    assert count_by(records, "pin_end", "cause")["shutdown"] == left
    assert records[-1]["event"] == "stop"
