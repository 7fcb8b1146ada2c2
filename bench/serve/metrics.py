"""Samples of /metrics by name and labels, and sums over them."""

from __future__ import annotations

from continuum_connector.tools.cli.server import Labels, samples

Metrics = dict[tuple[str, Labels], float]


def parse_metrics(text: str) -> Metrics:
    """Read the exposition format: (name, labels) -> value."""
    return {(name, labels): value for name, labels, value in samples(text)}


def total(samples: Metrics, name: str, **labels: str) -> float:
    """Sum of the samples of `name` that carry all of `labels`; 0.0 if there is none."""
    wanted = set(labels.items())
    return sum(v for (n, have), v in samples.items() if n == name and wanted <= have)


def delta(after: Metrics, before: Metrics) -> Metrics:
    """What was added between two readings."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}
