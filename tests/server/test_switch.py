"""A server is switched off and on under load: nothing lost, nothing left, stock's answers."""

from __future__ import annotations

import itertools
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.serve.server import VllmServer
from tests.server.conftest import DRAM_BYTES, Stock
from tests.server.helpers import (
    PROGRAMS,
    administer,
    ask,
    count_by,
    eventually,
    in_flight,
    ledger_closes,
    log_of,
    pins_live,
    play,
    read_trace,
    terminate,
    text_of,
    told,
    usage,
)

KEY = "the-operators-own"
ENDPOINT = ("--middleware", "continuum_connector.switch_endpoint.SwitchEndpoint")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("switch")


@pytest.fixture(scope="module")
def server(tiny_model: Path, stock: Stock, folder: Path) -> Iterator[VllmServer]:
    connector = {
        "policy": "fixed_ttl",
        "ttl_s": 50,
        "dram_bytes": DRAM_BYTES,
        "trace_path": str(folder / "trace.jsonl"),
    }
    with VllmServer(
        tiny_model,
        "test-switch",
        num_blocks=stock.num_blocks,
        connector=connector,
        env={"CONTINUUM_SWITCH_PATH": str(folder / "switch"), "CONTINUUM_ADMIN_KEY": KEY},
        args=(*("--shutdown-timeout", "60"), *ENDPOINT),
    ) as server:
        yield server


def switch(server: VllmServer, folder: Path, text: str) -> None:
    """As docs/switch-off.md says: write, and wait for the metric."""
    (folder / "switch").write_text(f"{text}\n")
    wanted = float(text == "on")
    eventually(lambda: server.metric("continuum:switched_on") == wanted)


def at_endpoint(server: VllmServer, text: str = "", key: str = KEY) -> dict[str, str]:
    return administer(server, "switch", key, text)


def is_neutral(server: VllmServer) -> bool:
    held = ("continuum:pins_live", "continuum:held_blocks", "continuum:dram_blocks")
    return not in_flight(server) and not any(server.metric(name) for name in held)


def test_an_idle_server_is_switched_off_with_nobody_asking_anything(
    server: VllmServer, folder: Path
) -> None:
    assert server.metric("continuum:switched_on") == 1  # before its first step, too
    first = ask(server, "completions", [text_of(300, "idle")], vllm_xargs={"job_id": "idle"})
    assert told(first)["decision"] == "pin"
    eventually(lambda: pins_live(server) == 1)
    eventually(lambda: server.metric("continuum:dram_blocks", state="ready") > 0)
    switch(server, folder, "off")
    eventually(lambda: is_neutral(server))
    assert usage(server) == 0
    assert server.metric("continuum:pins_ended_total", cause="switched_off") == 1


def test_while_off_the_client_is_told_nothing_and_vllm_caches_on(server: VllmServer) -> None:
    decided = server.metric("continuum:decisions_total")
    prompt, who = [text_of(300, "off")], {"vllm_xargs": {"job_id": "off"}}
    answers = [ask(server, "completions", prompt, **who) for _ in range(2)]
    assert not any(answer.get("kv_transfer_params") for answer in answers)
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 288
    assert server.metric("continuum:decisions_total") == decided
    assert is_neutral(server)


def test_under_load_no_request_is_lost_and_every_answer_is_stocks(
    server: VllmServer, folder: Path, stock: Stock
) -> None:
    num_changes = 0
    with ThreadPoolExecutor(len(PROGRAMS)) as threads:
        for last in ("on", "off"):
            enough = num_changes + 2
            while num_changes < enough:  # a fast machine answers before it is switched twice
                switch(server, folder, "on")
                plays = [threads.submit(play, server, [dialog]) for dialog in PROGRAMS]
                for text in itertools.cycle(("off", "on")):
                    if all(each.done() for each in plays):
                        break
                    switch(server, folder, text)
                    num_changes += 1
                assert [each.result()[0] for each in plays] == stock.answers
            switch(server, folder, last)
    print(f"\nswitched {num_changes} times meanwhile")
    eventually(lambda: is_neutral(server))
    eventually(lambda: usage(server) == 0)
    assert ledger_closes(server.metrics())
    assert server.metric("vllm:num_requests_waiting") == 0


def test_switched_on_again_it_pins_and_tiers(server: VllmServer, folder: Path) -> None:
    switch(server, folder, "on")
    history: list[str] = [text_of(300, "again")]
    for _ in range(2):
        answer = ask(server, "completions", history, vllm_xargs={"job_id": "again"})
        assert told(answer)["decision"] == "pin"
        history += [answer["choices"][0]["text"], text_of(40, "tool")]
    assert told(answer)["cached_tokens"]["vram"] == 288
    eventually(lambda: server.metric("continuum:dram_blocks", state="ready") > 0)


def test_who_has_the_key_switches_over_http(server: VllmServer, folder: Path) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        at_endpoint(server, "off", key="a guess")
    assert at_endpoint(server) == {"switch": "on"}
    for text, switched_on in (("off", 0), ("on", 1)):
        assert at_endpoint(server, text) == at_endpoint(server) == {"switch": text}
        assert (folder / "switch").read_text() == f"{text}\n"
        eventually(lambda on=switched_on: server.metric("continuum:switched_on") == on)


def test_each_change_is_one_line_in_the_log_and_one_record(
    server: VllmServer, folder: Path
) -> None:
    terminate(server)
    log = log_of(server)
    switches: list[dict[str, Any]] = [
        record for record in read_trace(folder / "trace.jsonl") if record["event"] == "switch"
    ]
    assert [record["on"] for record in switches] == [i % 2 == 1 for i in range(len(switches))]
    assert log.count("ContinuumConnector is switched off by switch_path") == len(switches) // 2
    assert log.count("ContinuumConnector is switched on again") == len(switches) // 2
    ends = count_by(read_trace(folder / "trace.jsonl"), "pin_end", "cause")
    assert ends["switched_off"] >= 1
