"""Receipts over HTTP: what clients say, and what the server says to it."""

from __future__ import annotations

from typing import Any

from bench.serve.server import VllmServer
from tests.server.helpers import ask, text_of, told


def receipts(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {receipt["hint"]: receipt for receipt in told(answer).get("hints", [])}


def hints(server: VllmServer, outcome: str) -> float:
    return server.metric("continuum:hints_total", outcome=outcome)


def test_every_hint_has_its_receipt(agents: VllmServer) -> None:
    said = {
        "program": "told",
        "ttl_s": 9_000,
        "tools": ["pytest"],
        "parent": "above",
        "keep_s": "soon",
    }
    params = {"continuum": said}
    answer = ask(agents, "chat", [text_of(100, "told")], kv_transfer_params=params)
    assert receipts(answer) == {
        "tools": {"hint": "tools", "outcome": "accepted", "value": ["pytest"]},
        "parent": {"hint": "parent", "outcome": "accepted", "value": "above"},
        "ttl_s": {
            "hint": "ttl_s",
            "outcome": "clipped",
            "until_s": 60.0,
            "why": "no pin lives longer than max_ttl_s = 60",
        },
        "keep_s": {
            "hint": "keep_s",
            "outcome": "refused",
            "why": "not understood, so it has no effect",
        },
    }
