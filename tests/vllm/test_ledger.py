"""What is published closes in every step, also while turns begin and end: not once a second."""

from __future__ import annotations

from typing import Any

from continuum_connector.observe.account import Payload, merge
from tests.vllm.agents import AgentEngine
from tests.vllm.tiering import SLOT_BYTES


def open_by(seen: Payload) -> dict[str, float]:
    """By how much what began differs from what ended and what is still there."""
    counters, gauges = seen.get("counters", {}), seen.get("gauges", {})

    def ended(name: str) -> int:
        return sum(n for key, n in counters.items() if key.startswith(name + "{"))

    def there(name: str) -> float:
        return float(gauges.get(name, 0))

    def admitted(way: str) -> int:
        return int(counters.get(f"transfers_admitted{{{way}}}", 0))

    return {
        "pins": counters.get("pins_started", 0) - ended("pins_ended") - there("pins_live"),
        "stores": admitted("store") - ended("stores") - there("transfers_in_flight{store}"),
        "loads": admitted("load") - ended("loads") - there("transfers_in_flight{load}"),
    }


def published(stats: Any) -> Payload:
    payload = stats.kv_connector_stats
    return {} if payload is None else getattr(payload, "data", payload)


def test_the_published_ledger_closes_after_every_step() -> None:
    config = {"dram_bytes": 60 * SLOT_BYTES, "ttl_s": 0.2, "policy": "fixed_ttl"}
    engine = AgentEngine(60, extra_config=config)
    seen: Payload = {}
    taken = 0
    for turn in range(12):  # overlapping turns of three programs: some return, some expire
        engine.add(f"t{turn}", 150 + 3 * turn, program=f"p{turn % 3}", seed=turn % 3)
        for _ in range(7):
            engine.step()
            for stats in engine.stats[taken:]:
                seen = merge(seen, published(stats))
            taken = len(engine.stats)
            assert open_by(seen) == {"pins": 0, "stores": 0, "loads": 0}, f"turn {turn}"
    assert engine.total("pins_started") > 5
    assert engine.total("stores") > 5
