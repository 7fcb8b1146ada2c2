"""What operators and routers see: metrics, trace, KV events, streamed answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import zmq

from bench.serve.server import SERVED_NAME, VllmServer
from continuum_connector.observe.account import PUBLISHED, Kind
from continuum_connector.observe.trace import EVENTS
from tests.server.helpers import (
    ask,
    by_label,
    count_by,
    dialogs,
    eventually,
    ledger_closes,
    pins_live,
    play,
    read_trace,
    reset,
    text_of,
    told,
)

SUFFIX = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}


def trace_of(server: VllmServer) -> list[dict[str, Any]]:
    assert server.options.connector is not None
    return read_trace(Path(server.options.connector["trace_path"]))


def test_every_metric_is_on_the_metrics_page_with_every_label(agents: VllmServer) -> None:
    samples = agents.metrics()
    for metric in PUBLISHED:
        name = metric.full_name + SUFFIX[metric.kind]
        found = [dict(labels) for each, labels in samples if each == name]
        assert len(found) == len(metric.labels), name
        if metric.label:
            assert {labels[metric.label] for labels in found} == set(metric.values), name
    page = agents.get("/metrics")
    assert all(f"# HELP {m.full_name}" in page and m.help in page for m in PUBLISHED)


def test_the_ledger_closes_at_every_look(agents: VllmServer) -> None:
    reset(agents)
    programs = dialogs(3, rounds=2, first=400, tool=100)
    looks = []
    play(agents, programs, before_last=lambda: looks.append(ledger_closes(agents.metrics())))
    eventually(lambda: ledger_closes(agents.metrics()))
    assert looks == [True]
    assert agents.metric("continuum:stores_total", outcome="done") > 0
    assert agents.metric("continuum:tier_up") == 1
    assert agents.metric("continuum:trace_dropped_total") == 0


def test_the_trace_has_one_line_for_each_decision_and_each_outcome(agents: VllmServer) -> None:
    play(agents, dialogs(2, rounds=2, first=200, tool=100))
    reset(agents)

    def agrees() -> bool:
        records, samples = trace_of(agents), agents.metrics()
        pairs = (
            ("decision", "decision", "decisions_total", "decision"),
            ("pin_end", "cause", "pins_ended_total", "cause"),
            ("store", "outcome", "stores_total", "outcome"),
            ("load", "outcome", "loads_total", "outcome"),
        )
        return all(
            count_by(records, event, field)
            == {k: n for k, n in by_label(samples, f"continuum:{name}", label).items() if n}
            for event, field, name, label in pairs
        )

    eventually(agrees)
    records = trace_of(agents)
    assert records[0]["event"] == "start"
    assert all(record["event"] in EVENTS and record["now"] > 0 for record in records)
    for turn in (r for r in records if r["event"] == "decision"):
        assert turn["why"]
    assert [r["now"] for r in records] == sorted(r["now"] for r in records)


def test_the_trace_is_analyzed_and_explained_without_loss(agents: VllmServer) -> None:
    pytest.importorskip("typer")
    from continuum_connector.tools.analysis.source import Source
    from continuum_connector.tools.analysis.words import told
    from continuum_connector.tools.cli import analyze, explain

    play(agents, dialogs(2, rounds=3, first=200, tool=100))
    reset(agents)
    assert agents.options.connector is not None
    path = Path(agents.options.connector["trace_path"])

    def agrees() -> bool:
        """Every turn and every block is in the sums, as /metrics has them."""
        source, metric = Source(path), agents.metric
        summary = analyze.summarize(source)
        num, num_stored = summary.num, summary.num["DRAM"]["blocks stored"]
        return source.num_bad == 0 and all(
            counted == metric(f"continuum:{name}_total", **labels)
            for name, labels, counted in (
                ("decisions", {}, num["decisions"].total()),
                ("outcomes", {}, num["outcomes"].total()),
                ("outcomes", {"decision_outcome": "pin_in_time"}, num["outcomes"]["pin in_time"]),
                ("prompt_tokens", {}, num["all prompts"]["tokens"]),
                ("hit_tokens", {"tier": "vram"}, num["all prompts"]["vram"]),
                ("hit_tokens", {"tier": "dram"}, num["all prompts"]["dram"]),
                ("stored_blocks", {}, num_stored),
                ("stored_bytes", {}, num_stored * summary.block_bytes),
                ("pins_ended", {}, num["pins ended"].total()),
            )
        )

    eventually(agrees)
    assert agents.metric("continuum:outcomes_total", decision_outcome="pin_in_time") > 0
    records = trace_of(agents)
    assert all(list(told([record])) for record in records)
    program = next(r["program"] for r in records if r["event"] == "outcome")
    life = explain.find(Source(path), program)
    own = [r for r in life if r.get("program") == program]
    assert own == [r for r in records if r.get("program") == program]
    assert {line.record["event"] for line in told(life)} >= {"admit", "outcome"}


def test_blocks_that_come_to_dram_are_announced_as_kv_events(
    agents: VllmServer, events_port: int
) -> None:
    reset(agents)
    context = zmq.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.connect(f"tcp://127.0.0.1:{events_port}")
        socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        attempts = iter(range(1000))

        def stored() -> list[Any]:
            """Make new blocks until the subscription is in place and theirs arrive."""
            ask(agents, "completions", [text_of(100, f"event {next(attempts)}")], job_id="event")
            found = []
            while socket.poll(500):
                _, events, *_ = msgspec.msgpack.decode(socket.recv_multipart()[-1])
                found += [e for e in events if e["type"] == "BlockStored"]
            return [event for event in found if event["medium"] == "CPU"]

        events = eventually(stored)
    finally:
        context.destroy(linger=0)
    for event in events:
        assert len(event["block_hashes"]) == 1
        assert event["block_size"] == len(event["token_ids"]) == 32
    assert any(event["parent_block_hash"] is None for event in events)


def test_a_streamed_answer_is_the_same_and_its_turn_is_pinned(agents: VllmServer) -> None:
    reset(agents)
    client = openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": text_of(150, "stream")}]
    pieces, usage = [], None
    with client.chat.completions.create(  # type: ignore[call-overload]
        model=SERVED_NAME,
        messages=messages,
        max_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"job_id": "streams", "is_last_step": False},
    ) as stream:
        for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens == 30
    eventually(lambda: pins_live(agents) == 1)
    whole = ask(agents, "chat", [messages[0]["content"]], 30, job_id="streams")
    assert whole["choices"][0]["message"]["content"] == "".join(pieces)
    assert told(whole)["turn"] == 2
