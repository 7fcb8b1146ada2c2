"""Samples of /metrics by name and labels, sums over them, and the connector's books: do they close,
is anything still held?"""

from __future__ import annotations

from continuum_connector.tools.cli.server import Labels, samples

Metrics = dict[tuple[str, Labels], float]
WAYS = ("store", "load", "write", "read")
HELD = ("pins_live", "pinned_blocks", "held_blocks", "transfers_in_flight")


def parse_metrics(text: str) -> Metrics:
    """Read the exposition format: (name, labels) -> value."""
    return {(name, labels): value for name, labels, value in samples(text)}


def total(samples: Metrics, name: str, **labels: str) -> float:
    """Sum of the samples of `name` that carry all of `labels`; 0.0 if there is none."""
    wanted = set(labels.items())
    return sum(v for (n, have), v in samples.items() if n == name and wanted <= have)


def open_accounts(samples: Metrics) -> list[str]:
    """Every account that does not add up, in words: begun is not ended plus still there."""

    def of(name: str, **labels: str) -> float:
        return total(samples, f"continuum:{name}", **labels)

    started, ended, live = of("pins_started_total"), of("pins_ended_total"), of("pins_live")
    wrong = []
    if started != ended + live:
        wrong.append(f"pins: {started:.0f} started, {ended:.0f} ended, {live:.0f} live")
    for way in WAYS:
        admitted = of("transfers_admitted_total", direction=way)
        settled, moving = of(f"{way}s_total"), of("transfers_in_flight", direction=way)
        if admitted != settled + moving:
            counts = f"{admitted:.0f} admitted, {settled:.0f} settled, {moving:.0f} in flight"
            wrong.append(f"{way}s: {counts}")
    return wrong


def still_held(samples: Metrics) -> dict[str, float]:
    """What an idle server must not have any of, once every pin's time is over, where it has."""
    found = {name: total(samples, f"continuum:{name}") for name in HELD}
    for tier in ("dram", "disk"):
        name = f"{tier}_blocks"
        found[f"{name} writing"] = total(samples, f"continuum:{name}", state="writing")
    return {name: value for name, value in found.items() if value}
