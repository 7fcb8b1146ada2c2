"""The tables of keys and metrics say what the code says."""

from __future__ import annotations

import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from bench.markers import replace
from continuum_connector.config import KNOBS
from continuum_connector.observe.account import PUBLISHED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """scripts/tables, which has no `.py` because it is a command."""
    loader = SourceFileLoader("tables", str(ROOT / "scripts" / "tables"))
    spec = spec_from_loader("tables", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def rows(table: str) -> list[list[str]]:
    """Return the cells of each row below the header."""
    return [re.split(r"\s*(?<!\\)\|\s*", line.strip("| ")) for line in table.splitlines()[2:]]


@pytest.mark.parametrize(("name", "marker"), [("configuration", "config"), ("metrics", "metrics")])
def test_the_documents_agree_with_the_code(tables: ModuleType, name: str, marker: str) -> None:
    document = (ROOT / "docs" / f"{name}.md").read_text()
    table = tables.config_table() if marker == "config" else tables.metrics_table()
    assert replace(document, marker, table) == document, "run scripts/tables --write"


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_config_table_has_each_key_with_its_default(tables: ModuleType) -> None:
    found = rows(tables.config_table())
    assert [row[0] for row in found] == [f"`{key}`" for key in KNOBS]
    defaults = {row[0]: row[1] for row in found}
    assert defaults["`dram_bytes`"] == "left out"
    assert defaults["`policy`"] == "`adaptive`"
    assert defaults["`ttl_s`"] == "`2`"
    assert defaults["`numa`"] == "1"
    assert defaults["`trace_path`"] == "empty"


def test_the_metrics_table_has_each_metric_as_it_is_scraped(tables: ModuleType) -> None:
    found = {row[0]: row[1:] for row in rows(tables.metrics_table())}
    assert len(found) == len(PUBLISHED)
    assert found["`continuum:pins_live`"][0] == "gauge"
    assert found["`continuum:pins_ended_total`"][:2] == [
        "counter",
        "cause: returned, expired, pressure, superseded, loses, program_done, reset, switched_off, "
        "shutdown",
    ]
    assert found["`continuum:pin_seconds`"][:2] == ["histogram", ""]
