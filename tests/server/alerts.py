"""Which alerts of deploy/ fire on what a real server publishes.

Promtool plays a server's own samples: the metrics' names and labels are those of its /metrics, so
a rule that asks for one nobody publishes stays silent here, and its test fails.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from bench.serve.metrics import Labels, Metrics
from deploy.prometheus.running import RULES, find

HELD_MIN = 120  # the longest alert looks back 30 minutes, and must be true for an hour
COUNTER = re.compile(r"_(total|sum|count|bucket)$")


def firing(before: Metrics, after: Metrics, folder: Path) -> set[str]:
    """Names of all alerts that fire at the end of two hours of a server like this.

    Every minute adds to the counters what lies between the two scrapes, and gauges stay as they are
    in `after`. So take both when no pin lives and nothing is copied, or the books do not close.
    `folder` gets promtool's file; skips the test where promtool is missing.
    """
    tool = find("promtool")
    if tool is None:
        pytest.skip("no promtool on PATH or in .cache: run `make prometheus`")
    rules = RULES.read_text()
    silent = [
        {"eval_time": f"{HELD_MIN}m", "alertname": name, "exp_alerts": []}
        for name in re.findall(r"- alert: (\w+)", rules)
    ]
    series = [
        {"series": _series(*key), "values": _values(key[0], before.get(key, 0.0), value)}
        for key, value in after.items()
        if re.search(rf"{key[0]}\b", rules)
    ]
    case = {"interval": "1m", "input_series": series, "alert_rule_test": silent}
    file = folder / "alerts.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [case]}))
    done = subprocess.run(
        [tool, "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    # The case says that none fires; promtool names each that does.
    fired = set(re.findall(r"alertname: ?(\w+)", done.stdout + done.stderr))
    assert bool(fired) == bool(done.returncode), done.stdout + done.stderr
    return fired


def _series(name: str, labels: Labels) -> str:
    have = [*sorted(labels), ("instance", "here")]
    return f"{name}{{{','.join(f'{label}=' + json.dumps(value) for label, value in have)}}}"


def _values(name: str, before: float, after: float) -> str:
    """In promtool's notation: a counter's step each minute, a gauge that stays."""
    if COUNTER.search(name):
        return f"{before!r}+{after - before!r}x{HELD_MIN}"
    return f"{after!r}x{HELD_MIN}"
