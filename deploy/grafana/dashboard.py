"""Dashboard: what continuum.json asks of Prometheus, with Grafana's variables filled in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("continuum.json")


@dataclass(frozen=True)
class Query:
    """One line, or bundle of lines, of a panel. `legend` has `{{label}}` in it."""

    expr: str
    legend: str

    def name(self, labels: dict[str, str]) -> str:
        """What one of its series is called."""
        text = self.legend
        for label, value in labels.items():
            text = text.replace("{{" + label + "}}", value)
        return text


def load(path: Path = PATH) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel that draws something, in reading order."""
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def queries(panel: dict[str, Any], rate: str, range_: str, instance: str = ".*") -> list[Query]:
    """A panel's queries. `rate`, `range_`: what Grafana would take for $__rate_interval (four
    scrapes, at least) and $__range, as PromQL durations."""
    values = {"$__rate_interval": rate, "$__range": range_, "$instance": instance}
    found = []
    for target in panel["targets"]:
        expr = target["expr"]
        for name, value in values.items():
            expr = expr.replace(name, value)
        found.append(Query(expr, target["legendFormat"]))
    return found
