"""Which alerts of deploy/ fire on what a real server publishes, and which of them end.

Promtool plays a server's own samples: the metrics' names and labels are those of its /metrics, so
a rule that asks for one nobody publishes stays silent here, and its test fails.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.serve.metrics import Labels, Metrics
from deploy.prometheus.running import RULES, find

ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())
HOUR = 60
# The longest window is six hours and ends 15 minutes ago; the longest wait for an alert is one.
BEFORE_MIN, TROUBLE_MIN, AFTER_MIN = 7 * HOUR, 2 * HOUR, 8 * HOUR
EVALUATED = "5m"  # each minute would take seconds more, and tell the same
COUNTER = re.compile(r"_(total|sum|count|bucket)$")  # by its name; all else is a gauge


@dataclass(frozen=True)
class Stretch:
    """Some minutes of a server's life. Each adds to the counters what lies between two scrapes, and
    gauges stay as they are in `after`. So both are taken when no pin lives and nothing is copied,
    or the books do not close."""

    minutes: int
    before: Metrics
    after: Metrics
    restarted: bool = False  # it begins with counters at 0
    is_gone: bool = False  # nobody answers a scrape


def firing(before: Metrics, after: Metrics, folder: Path, well: Metrics | None = None) -> set[str]:
    """Names of all alerts that fire at the end of two hours of a server like this.

    None of them fires before, nor after a restart: then the server is idle and as it was in `well`,
    which is `before` if that was taken in good times.
    """
    well = before if well is None else well
    silent, fired, ended = firing_after_each(
        [
            Stretch(BEFORE_MIN, well, well),
            Stretch(TROUBLE_MIN, before, after),
            Stretch(AFTER_MIN, well, well, restarted=True),
        ],
        folder,
    )
    assert silent == set(), "fires on a server that is well"
    assert ended == set(), "fires for ever"
    return fired


def firing_after_each(stretches: Sequence[Stretch], folder: Path) -> list[set[str]]:
    """Names of all alerts that fire in the last minute of each stretch, one behind the other.

    `folder` gets promtool's file; skips the test where promtool is missing.
    """
    tool = find("promtool")
    if tool is None:
        pytest.skip("no promtool on PATH or in .cache: run `make prometheus`")
    times, end = [], 0
    for stretch in stretches:
        end += stretch.minutes
        times.append(_duration(end - 1))
    silent = [
        {"eval_time": time, "alertname": name, "exp_alerts": []}
        for time in times
        for name in ALERTS
    ]
    rules = RULES.read_text()
    series = [
        {"series": _series(*key), "values": _values(key, stretches)}
        for key in dict.fromkeys(key for stretch in stretches for key in stretch.after)
        if re.search(rf"{key[0]}\b", rules)
    ]
    ups = (f"{int(not each.is_gone)}x{each.minutes - 1}" for each in stretches)
    series.append({"series": _series("up", frozenset()), "values": " ".join(ups)})
    case = {"interval": "1m", "input_series": series, "alert_rule_test": silent}
    file = folder / "alerts.yml"  # JSON is YAML
    told = {"rule_files": [str(RULES)], "evaluation_interval": EVALUATED, "tests": [case]}
    file.write_text(json.dumps(told))
    done = subprocess.run(
        [tool, "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    # The case says that none fires; promtool names each that does, and when.
    fired = re.findall(r"alertname: ?(\w+), time: ?(\w+)", done.stdout + done.stderr)
    assert bool(fired) == bool(done.returncode), done.stdout + done.stderr
    return [{name for name, at in fired if at == time} for time in times]


def _duration(minutes: int) -> str:
    """As promtool writes it."""
    hours, minutes = divmod(minutes, HOUR)
    return f"{hours}h" * bool(hours) + f"{minutes}m" * bool(minutes)


def _series(name: str, labels: Labels) -> str:
    have = [*sorted(labels), ("instance", "here")]
    return f"{name}{{{','.join(f'{label}=' + json.dumps(value) for label, value in have)}}}"


def _values(key: tuple[str, Labels], stretches: Sequence[Stretch]) -> str:
    """In promtool's notation: a counter's step each minute, a gauge that stays. What a server does
    not publish yet is 0."""
    told, count = [], stretches[0].before.get(key, 0.0)
    for stretch in stretches:
        after = stretch.after.get(key, 0.0)
        if stretch.is_gone:
            told.append(f"stale _x{stretch.minutes - 1}")
        elif COUNTER.search(key[0]):
            step = after - stretch.before.get(key, 0.0)
            count = 0.0 if stretch.restarted else count
            told.append(f"{count + step!r}+{step!r}x{stretch.minutes - 1}")
            count += step * stretch.minutes
        else:
            told.append(f"{after!r}x{stretch.minutes - 1}")
    return " ".join(told)
