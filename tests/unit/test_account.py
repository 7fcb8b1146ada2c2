"""Account adds up exactly, sends what changed, and knows nothing outside METRICS."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import continuum_connector
from continuum_connector.errors import InvariantError
from continuum_connector.observe.account import (
    HOOKS,
    METRICS,
    OTHER,
    WIRE_KEYS,
    Account,
    Kind,
    Payload,
    merge,
)

PACKAGE = Path(continuum_connector.__file__).parent


@pytest.fixture
def account() -> Account:
    return Account()


def taken(account: Account) -> Payload:
    payload = account.take()
    assert payload is not None
    return payload


def test_nothing_happened_is_nothing_to_send(account: Account) -> None:
    assert account.take() is None


def test_a_gauge_begins_at_what_the_page_shows_first(account: Account) -> None:
    account.gauge("switched_on", 1.0)
    assert account.take() is None
    account.gauge("switched_on", 0.0)
    assert taken(account) == {"gauges": {"switched_on": 0.0}}


def test_counters_are_sent_as_increments_and_kept_as_totals(account: Account) -> None:
    account.count("pins_started")
    account.count("pins_started", 2)
    assert taken(account) == {"counters": {"pins_started": 3}}
    assert account.take() is None
    account.count("pins_started", 4)
    assert taken(account) == {"counters": {"pins_started": 4}}
    assert account.total("pins_started") == 7


def test_each_label_value_is_a_series_of_its_own(account: Account) -> None:
    account.count("pins_ended", label="expired")
    account.count("pins_ended", 2, "pressure")
    assert taken(account) == {"counters": {"pins_ended{expired}": 1, "pins_ended{pressure}": 2}}
    assert account.total("pins_ended", "pressure") == 2
    assert account.total("pins_ended", "reset") == 0
    assert account.total("pins_ended") == 3


def test_counting_zero_sends_nothing(account: Account) -> None:
    account.count("stored_blocks", 0)
    assert account.take() is None


def test_gauges_are_absolute_and_sent_only_when_they_change(account: Account) -> None:
    account.gauge("pins_live", 3)
    assert taken(account) == {"gauges": {"pins_live": 3}}
    account.gauge("pins_live", 3)
    assert account.take() is None
    account.gauge("pins_live", 5)
    account.gauge("pins_live", 0)
    assert taken(account) == {"gauges": {"pins_live": 0}}
    assert account.total("pins_live") == 0


def test_observations_are_counted_in_the_bucket_whose_upper_bound_holds_them(
    account: Account,
) -> None:
    for seconds in (0.05, 0.06, 0.1, 1000.0):  # bounds 0.05, 0.1, ..., 300: the first holds 0.05
        account.observe("pin_seconds", seconds)
    cells = taken(account)["histograms"]["pin_seconds"]
    assert cells == [[0, 1, 0.05], [1, 2, pytest.approx(0.16)], [13, 1, 1000.0]]
    assert account.take() is None
    assert account.total("pin_seconds") == 4


def test_observations_do_not_grow_without_a_take(account: Account) -> None:
    for i in range(10_000):
        account.observe("hook_seconds", i * 1e-6, "wait_for_save")
    cells = taken(account)["histograms"]["hook_seconds{wait_for_save}"]
    assert len(cells) <= 13
    assert sum(cell[1] for cell in cells) == 10_000


@pytest.mark.parametrize(
    ("method", "name", "label"),
    [
        ("count", "pins_startet", None),
        ("count", "pins_ended", "bored"),
        ("count", "pins_ended", None),
        ("count", "transfer_failures", None),
        ("count", "pins_started", "expired"),
        ("count", "pins_live", None),
        ("gauge", "pins_started", None),
        ("observe", "pins_live", None),
        ("total", "pins_startet", None),
        ("total", "pins_ended", "bored"),
    ],
)
def test_an_unknown_name_label_or_kind_is_a_bug(
    account: Account, method: str, name: str, label: str | None
) -> None:
    call = getattr(account, method)
    with pytest.raises(InvariantError, match=f"'{name}'.*{label!r}.*bug in continuum_connector"):
        call(name, label=label) if method in ("count", "total") else call(name, 1, label=label)
    assert account.take() is None


def test_a_failure_reason_that_nobody_foresaw_is_counted_as_other(account: Account) -> None:
    account.count("transfer_failures", label="CUDA_ERROR_UNKNOWN")
    account.observe("hook_seconds", 1e-5, "a_hook_of_a_later_vllm")
    assert account.total("transfer_failures", "other") == 1
    assert account.total("hook_seconds", "other") == 1


def test_a_payload_survives_json_and_msgpack_unchanged(account: Account) -> None:
    account.count("stores", label="done")
    account.gauge("tier_up", 1)
    account.observe("store_seconds", 0.004)
    payload = taken(account)
    assert json.loads(json.dumps(payload)) == payload
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(payload)) == payload


def test_a_payload_does_not_change_after_it_was_taken(account: Account) -> None:
    account.count("stores", label="done")
    account.observe("store_seconds", 0.004)
    payload = taken(account)
    before = json.dumps(payload)
    account.count("stores", label="done")
    account.observe("store_seconds", 0.004)
    taken(account)
    assert json.dumps(payload) == before


def test_merging_the_payloads_of_many_takes_equals_one_take() -> None:
    pieces, whole = Account(), Account()
    merged: Payload = {}
    for i in range(50):
        for account in (pieces, whole):
            account.count("loaded_bytes", i)
            account.count("pins_ended", label="returned" if i % 3 else "expired")
            account.gauge("pins_live", i % 7)
            account.observe("load_seconds", i / 100)
        merged = merge(merged, taken(pieces))
    expected = taken(whole)
    assert merged["counters"] == expected["counters"]
    assert merged["gauges"] == expected["gauges"]
    assert sorted_cells(merged) == pytest.approx(sorted_cells(expected))


def sorted_cells(payload: Payload) -> list[float]:
    return [x for cell in sorted(payload["histograms"]["load_seconds"]) for x in cell]


def test_merging_changes_neither_payload() -> None:
    def payload(n: int) -> Payload:
        cells: list[list[Any]] = [[2, n, 0.5 * n]]
        return {
            "counters": {"pins_started": n},
            "gauges": {"pins_live": n},
            "histograms": {"pin_seconds": cells},
        }

    first, second = payload(1), payload(2)
    assert merge(first, second) == {
        "counters": {"pins_started": 3},
        "gauges": {"pins_live": 2},
        "histograms": {"pin_seconds": [[2, 3, 1.5]]},
    }
    assert (first, second) == (payload(1), payload(2))
    assert merge({}, {}) == {}


def test_merging_keeps_a_gauge_that_the_later_payload_does_not_mention() -> None:
    assert merge({"gauges": {"tier_up": 1}}, {"counters": {"stores{done}": 1}})["gauges"] == {
        "tier_up": 1
    }


def test_the_metric_table_is_well_formed() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]+", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_created"))
        assert metric.help
        assert not metric.help.endswith(".")
        assert bool(metric.label) == bool(metric.values)
        assert len(set(metric.values)) == len(metric.values)
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.label not in ("engine", "model_name", "le")
    assert len(WIRE_KEYS) < 210, "each key is a time series on every server"


def test_the_package_counts_only_what_the_table_names() -> None:
    pattern = re.compile(r'account\.(count|gauge|observe)\(\s*"(\w+)"(?:.*?label="(\w+)")?')
    kinds = {"count": Kind.COUNTER, "gauge": Kind.GAUGE, "observe": Kind.HISTOGRAM}
    known = {metric.name: metric for metric in METRICS}
    for path in PACKAGE.rglob("*.py"):
        for method, name, label in pattern.findall(path.read_text()):
            assert name in known, f"{path.name}: {name}"
            assert known[name].kind is kinds[method], f"{path.name}: {method} of {name}"
            assert not label or label in known[name].values, f"{path.name}: {name}{{{label}}}"


def test_every_timed_hook_has_a_label_of_its_own() -> None:
    labels = set(re.findall(r'@timed\("(\w+)"\)', (PACKAGE / "connector.py").read_text()))
    assert "build_connector_meta" in labels
    assert labels <= set(HOOKS) - {OTHER}


def test_account_and_table_import_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, continuum_connector.observe.account, continuum_connector.observe.trace\n"
        "print([m for m in ('vllm', 'torch', 'prometheus_client') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
