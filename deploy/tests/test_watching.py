"""Alerts, runbook and dashboard agree with the metrics that we publish, and with promtool.

Promtool comes with `make prometheus`; without it its tests are skipped.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.observe.account import HOOKS, METRICS, OTHER, Kind
from deploy.grafana.dashboard import load, panels
from deploy.prometheus.running import find

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which vLLM brings")

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
PYPROJECT = (ROOT / "pyproject.toml").read_text()
REPOSITORY = re.search(r'^Repository = "(.+)"$', PYPROJECT, re.M)[1]  # type: ignore[index]
SUFFIXES = {
    Kind.COUNTER: ("_total",),
    Kind.GAUGE: ("",),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}
SERIES = {m.full_name + suffix: m for m in METRICS for suffix in SUFFIXES[m.kind]}


def alerts() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels(load()) for target in panel["targets"]]


def selectors(expr: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Our series in an expression, each with its label matchers."""
    for name, inside in re.findall(r"(continuum:\w+)(?:\{([^}]*)\})?", expr):
        yield name, dict(re.findall(r'(\w+)=~?"([^"]*)"', inside))


@pytest.mark.parametrize("expr", [*dashboard_queries(), *(rule["expr"] for rule in alerts())])
def test_every_query_asks_for_what_we_publish(expr: str) -> None:
    for name, matchers in selectors(expr):
        assert name in SERIES, f"{name} is not published"
        metric = SERIES[name]
        for label, wanted in matchers.items():
            if label == "instance":
                continue
            assert label == metric.label, f"{name} has no label {label}"
            assert set(wanted.split("|")) <= set(metric.values), (
                f"{name}: no such {label}: {wanted}"
            )
    for labels in re.findall(r"(?:by|without) \(([^)]*)\)", expr):
        known = {m.label for m in METRICS} | {"le", "instance", "job", "namespace"}
        assert {label.strip() for label in labels.split(",")} <= known


def test_the_time_in_our_hooks_is_that_of_the_scheduler_which_no_rank_multiplies() -> None:
    connector = (ROOT / "continuum_connector" / "connector.py").read_text()
    _, worker = connector.split("# --- worker half")
    of_scheduler = set(HOOKS) - set(re.findall(r'@timed\("(\w+)"\)', worker)) - {OTHER}
    (alert,) = (rule["expr"] for rule in alerts() if rule["alert"] == "ContinuumHooksSlow")
    (panel,) = (p for p in panels(load()) if p["title"] == "Time in our hooks")
    for expr in (alert, panel["targets"][0]["expr"]):
        ((_, matchers),) = selectors(expr)
        assert set(matchers["hook"].split("|")) == of_scheduler


def test_the_dashboard_shows_every_metric() -> None:
    shown = {SERIES[name].name for expr in dashboard_queries() for name, _ in selectors(expr)}
    assert {m.name for m in METRICS} - shown == set()


def test_the_dashboard_is_laid_out_without_overlap() -> None:
    dashboard = load()
    ids = [panel["id"] for panel in dashboard["panels"]]
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        columns = range(grid["x"], grid["x"] + grid["w"])
        cells = set(itertools.product(columns, range(grid["y"], grid["y"] + grid["h"])))
        assert not taken & cells, panel["title"]
        assert max(columns) < 24, panel["title"]
        taken |= cells
    assert all(panel["description"] for panel in panels(dashboard))


def test_every_alert_has_its_section_in_the_runbook_and_none_is_left_over() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    sections = dict(re.findall(r"^## (Continuum\w+)\n(.*?)(?=^## |\Z)", runbook, re.M | re.S))
    assert list(sections) == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        anchor = rule["annotations"]["runbook_url"]
        assert anchor == f"{REPOSITORY}/blob/main/docs/runbook.md#{rule['alert'].lower()}"
        for part in ("**Means.**", "**Look at.**", "**Do.**", "**Switch off.**"):
            assert part in sections[rule["alert"]], f"{rule['alert']}: {part}"


def test_the_dashboards_links_begin_with_the_repositorys_address() -> None:
    dashboard = (DEPLOY / "grafana" / "continuum.json").read_text()
    links = re.findall(r"[^\s\"(]*docs/\w+\.md", dashboard)
    assert len(links) > 3
    assert all(link.startswith(f"{REPOSITORY}/blob/main/docs/") for link in links)


def test_one_command_changes_the_address_wherever_it_is(tmp_path: Path) -> None:
    files = ["pyproject.toml", "scripts/repository", "deploy/grafana/continuum.json"]
    files += [f"deploy/prometheus/{name}" for name in ("rules.yml", "rules_test.yml")]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    changed = {name: (tmp_path / name).read_text().count(REPOSITORY) for name in files}
    other = "https://git.example.com/you/fork"
    subprocess.run([tmp_path / "scripts" / "repository", other], check=True)
    for name in files:
        text = (tmp_path / name).read_text()
        assert (text.count(REPOSITORY), text.count(other)) == (0, changed[name]), name
    assert changed["deploy/prometheus/rules.yml"] == len(alerts())
    refused = subprocess.run(
        [tmp_path / "scripts" / "repository"], capture_output=True, check=False
    )
    assert refused.returncode == 2
    assert b"say which" in refused.stderr


SILENT_WHEN_OFF = {
    *("ContinuumHitCollapse", "ContinuumTierDown", "ContinuumTierShort"),
    *("ContinuumDiskDown", "ContinuumDiskBudgetSpent", "ContinuumProgramsUnknown"),
}


def test_the_alerts_about_hits_programs_and_the_tier_are_silent_while_switched_off() -> None:
    silent = {rule["alert"] for rule in alerts() if "continuum:switched_on == 0" in rule["expr"]}
    assert silent == SILENT_WHEN_OFF


def test_the_runbook_names_panels_as_the_dashboard_does() -> None:
    runbook = re.sub(r"`[^`]*`", "", (ROOT / "docs" / "runbook.md").read_text())
    found = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", runbook)
    named = {" ".join(title.split()) for title in found}
    assert named - {panel["title"] for panel in panels(load())} == set()
    assert len(named) > 10


def test_every_alert_is_tested_firing_and_not_firing() -> None:
    cases = [
        case
        for test in yaml.safe_load((RULES.parent / "rules_test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    for rule in alerts():
        of_rule = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == rule["alert"]]
        assert set(of_rule) == {True, False}, rule["alert"]


def promtool(*arguments: str) -> str:
    tool = find("promtool")
    if tool is None:
        pytest.skip("no promtool on PATH or in .cache: run `make prometheus`")
    return run(tool, *arguments)


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=RULES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_configuration_and_rules() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "config", "prometheus.yml")


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")
