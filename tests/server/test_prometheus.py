"""A real Prometheus watches a real server at work: no panel is empty, every alert evaluates."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.chat.agents import agents, run_agents
from bench.serve.server import VllmServer
from deploy.grafana.dashboard import load, panels, queries
from deploy.prometheus.running import RULES, Prometheus, find
from tests.server.conftest import ServerFactory
from tests.server.helpers import eventually

MISSING = "no prometheus on PATH or in .cache: run `make prometheus`, or install it"
PROGRAMS, TURNS = 6, 3
LOAD = agents(PROGRAMS, TURNS, rate=2.0)
NUM_BLOCKS = 150  # half of what the agents need in the end, so that pins give way and DRAM is used
RATE, RANGE = "2m", "10m"
PANELS = {panel["title"]: panel for panel in panels(load())}
# Shares of what did not happen: 0 / 0, a bar or a line that is missing.
MAY_BE_NAN = {
    "Pins ended by pressure",
    "How long transfers take",
    "How long reads and writes of the disk take",  # there is none
    "95 % of held first turns waited at most",  # the gate is off
}


@dataclass
class Watched:
    """A server that has worked, and who watched it."""

    server: VllmServer
    prometheus: Prometheus
    began: float
    ended: float  # all was scraped by then; a later scrape may come too late, and all is stale


@pytest.fixture(scope="module")
def watched(server_factory: ServerFactory) -> Iterator[Watched]:
    """Agents have run from the first scrape on; their last counts are scraped."""
    if find("prometheus") is None:
        pytest.skip(MISSING)
    connector = {"dram_bytes": "256MiB", "policy": "fixed_ttl"}
    server = server_factory("watched", num_blocks=NUM_BLOCKS, connector=connector)
    with Prometheus([server.url]) as prometheus:
        eventually(lambda: prometheus.num_scrapes() > 0)
        began = time.time()
        found = asyncio.run(run_agents(server.url, LOAD))
        assert len(found.finished) == PROGRAMS
        turns = PROGRAMS * TURNS

        def scraped() -> float:
            at = time.time()
            decided = value(prometheus, "sum(continuum:decisions_total)", at)
            in_flight = value(prometheus, "sum(continuum:transfers_in_flight)", at)
            return at if (decided, in_flight) == (turns, 0.0) else 0.0

        yield Watched(server, prometheus, began, eventually(scraped))


def value(prometheus: Prometheus, expr: str, at: float | None = None) -> float:
    """The only value of `expr`; NaN where there is none."""
    found = prometheus.query(expr, at)
    return float(found[0]["value"][1]) if len(found) == 1 else math.nan


@pytest.mark.parametrize("title", PANELS)
def test_no_panel_of_the_dashboard_is_empty(watched: Watched, title: str) -> None:
    for query in queries(PANELS[title], RATE, RANGE):
        series = watched.prometheus.query(query.expr, watched.ended)
        assert series, f"{query.expr} has no series"
        if title not in MAY_BE_NAN:
            values = [float(one["value"][1]) for one in series]
            assert not all(map(math.isnan, values)), f"{query.expr} is NaN"
        names = [query.name(one["metric"]) for one in series]
        assert len(set(names)) == len(names), f"two lines of {title!r} have one name"
        assert not any("{{" in name for name in names), f"{query.legend}: no such label"


def test_the_dashboard_shows_what_the_server_says(watched: Watched) -> None:
    eventually(lambda: agrees(watched))


def agrees(watched: Watched) -> bool:
    names = ("hit_tokens_total", "prompt_tokens_total", "pins_started_total", "vram_blocks")
    return all(
        value(watched.prometheus, f"sum(continuum:{name})")
        == watched.server.metric(f"continuum:{name}")
        for name in names
    ) and watched.server.metric("continuum:vram_blocks") == (NUM_BLOCKS - 1)


def test_every_alert_loads_and_evaluates_and_none_fires(watched: Watched) -> None:
    def evaluated() -> list[dict[str, Any]]:
        rules = watched.prometheus.rules()
        return rules if all(rule["health"] != "unknown" for rule in rules) else []

    rules = eventually(evaluated)
    assert len(rules) == RULES.read_text().count("- alert:")
    assert {rule["name"]: rule.get("lastError", "") for rule in rules} == {
        rule["name"]: "" for rule in rules
    }
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_the_dashboard_can_be_drawn_where_there_is_no_grafana(
    watched: Watched, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from deploy.grafana.render import draw

    png = tmp_path / "dashboard.png"
    draw(watched.prometheus.url, png, watched.began, time.time(), "15s")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert 50_000 < png.stat().st_size < 300_000
