"""Payloads reach /metrics and the log line through vLLM's own classes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as vllm_metrics  # noqa: E402

from continuum_connector.middleware import unread_bodies  # noqa: E402
from continuum_connector.observe.account import (  # noqa: E402
    METRICS,
    WIRE_KEYS,
    Account,
    Kind,
)
from continuum_connector.observe.metrics import (  # noqa: E402
    ContinuumPromMetrics,
    ContinuumStats,
    representative,
    unregister,
)
from continuum_connector.vllm import proven  # noqa: E402
from tests.vllm.tiering import run_turn, tiered, total  # noqa: E402

LABELNAMES = ["model_name", "engine"]


class Connector:
    """The two hooks of the real connector that vLLM's metrics call."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> ContinuumPromMetrics:
        return ContinuumPromMetrics(*args)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ContinuumStats:
        return ContinuumStats.build(data)


@pytest.fixture(autouse=True)
def _connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda _config: Connector)


@dataclass
class Server:
    """vLLM's KVConnectorProm for two engines on a registry of its own."""

    registry: CollectorRegistry
    prom: Any

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        labels |= {"model_name": "m", "engine": str(engine)}
        return self.registry.get_sample_value(f"continuum:{name}", labels)


def vllm_config() -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector="ContinuumConnector", engine_id="e")
    )


@pytest.fixture
def server() -> Server:
    registry = CollectorRegistry()

    def into_registry(metric: type[Any]) -> Any:
        return lambda *args, **kwargs: metric(*args, registry=registry, **kwargs)

    class Prom(vllm_metrics.KVConnectorProm):
        _gauge_cls: ClassVar[Any] = staticmethod(into_registry(Gauge))
        _counter_cls: ClassVar[Any] = staticmethod(into_registry(Counter))
        _histogram_cls: ClassVar[Any] = staticmethod(into_registry(Histogram))

    return Server(registry, Prom(vllm_config(), LABELNAMES, {0: ["m", "0"], 1: ["m", "1"]}))


def sent(account: Account) -> dict[str, Any]:
    """What the API server gets: the payload after a trip between processes."""
    stats = ContinuumStats.take(account)
    assert stats is not None
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data))


def test_every_metric_is_on_the_page_from_the_start_with_its_type_help_and_labels(
    server: Server,
) -> None:
    firsts = {metric.name: metric.first for metric in METRICS if metric.first}
    assert firsts == {"switched_on": 1.0}, "any other would be a claim before the first step"
    page = generate_latest(server.registry).decode()
    for metric in METRICS:
        name = metric.full_name
        scraped = f"{name}_total" if metric.kind is Kind.COUNTER else name
        assert f"# TYPE {scraped} {metric.kind.value}\n" in page
        assert f"# HELP {scraped} {metric.help}\n" in page
        sample = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}[metric.kind]
        for engine in (0, 1):
            for value in metric.labels:
                own = {} if value is None else {metric.label: value}
                value_now = server.value(metric.name + sample, engine, **own)
                assert value_now == metric.first, (name, own)
    assert "_total_total" not in page


def test_counters_add_up_gauges_are_set_and_engines_are_apart(server: Server) -> None:
    account = Account()
    account.count("pins_started", 2)
    account.count("pins_ended", label="expired")
    account.gauge("pins_live", 1)
    account.gauge("transfers_in_flight", 4, "load")
    server.prom.observe(sent(account), 0)
    account.count("pins_started")
    account.gauge("pins_live", 2)
    server.prom.observe(sent(account), 0)
    assert server.value("pins_started_total") == 3
    assert server.value("pins_ended_total", cause="expired") == 1
    assert server.value("pins_ended_total", cause="pressure") == 0
    assert server.value("pins_live") == 2
    assert server.value("transfers_in_flight", direction="load") == 4
    assert server.value("pins_started_total", engine=1) == 0


def test_a_payload_without_a_gauge_leaves_it_as_it_was(server: Server) -> None:
    account = Account()
    account.gauge("pinned_blocks", 96)
    server.prom.observe(sent(account), 0)
    account.count("pins_started")
    server.prom.observe(sent(account), 0)
    assert server.value("pinned_blocks") == 96
    account.gauge("pinned_blocks", 0)
    server.prom.observe(sent(account), 0)
    assert server.value("pinned_blocks") == 0


def test_histograms_land_in_the_right_buckets_with_the_right_sum(server: Server) -> None:
    account = Account()
    seconds = [1e-6, 1.5e-6, 1.9e-6, 2e-6, 4e-5, 0.1, 7.0]
    for value in seconds:
        account.observe("hook_seconds", value, "wait_for_save")
    server.prom.observe(sent(account), 0)

    def at(le: str) -> float | None:
        return server.value("hook_seconds_bucket", hook="wait_for_save", le=le)

    assert (at("1e-06"), at("2e-06"), at("5e-05"), at("0.1"), at("+Inf")) == (1, 4, 5, 6, 7)
    assert server.value("hook_seconds_sum", hook="wait_for_save") == pytest.approx(sum(seconds))
    assert server.value("hook_seconds_count", hook="on_new_request") == 0


@pytest.mark.parametrize("metric", [m for m in METRICS if m.buckets], ids=lambda m: m.name)
def test_a_mean_never_leaves_its_bucket(metric: Any) -> None:
    for index, upper in enumerate(metric.buckets):
        account = Account()
        for _ in range(3):  # three times 0.1 is more than 0.3
            account.observe(metric.name, upper, metric.labels[0])
        ((cells),) = sent(account)["histograms"].values()
        ((found, num, total),) = cells
        assert (found, num) == (index, 3)
        assert representative(metric.buckets, index, total / num) <= upper
        if index:
            lower = metric.buckets[index - 1]
            assert representative(metric.buckets, index, lower) > lower


def test_scheduler_and_workers_aggregate_to_the_sum() -> None:
    scheduler, workers, whole = Account(), [Account(), Account()], Account()
    for account in (scheduler, whole):
        account.count("decisions", 3, "pin")
        account.gauge("pins_live", 3)
    for i, worker in enumerate(workers):
        for account in (worker, whole):
            account.observe("hook_seconds", 1e-5 * (i + 1), "wait_for_save")
            account.count("stored_bytes", 100)
    total = ContinuumStats.take(workers[0])
    assert total is not None
    for account in (workers[1], scheduler):
        stats = ContinuumStats.take(account)
        assert stats is not None
        total = total.aggregate(stats)
    assert isinstance(total, ContinuumStats)
    expected = ContinuumStats.take(whole)
    assert expected is not None
    assert total.data["counters"] == expected.data["counters"]
    assert total.data["gauges"] == expected.data["gauges"]
    assert {k: sorted(v) for k, v in total.data["histograms"].items()} == {
        k: sorted(v) for k, v in expected.data["histograms"].items()
    }


def test_two_payloads_published_one_by_one_or_aggregated_give_the_same_page(
    server: Server,
) -> None:
    account = Account()
    payloads = []
    for i in (1, 2):
        account.count("stores", i, "done")
        account.gauge("tier_up", i)
        account.observe("store_seconds", 0.25 * i)
        payloads.append(sent(account))
    for payload in payloads:
        server.prom.observe(payload, 0)
    merged = ContinuumStats.build(payloads[0]).aggregate(ContinuumStats.build(payloads[1]))
    server.prom.observe(merged.data, 1)
    for key in WIRE_KEYS.values():
        labels = {key.metric.label: key.label} if key.label else {}
        ends = {Kind.COUNTER: ["_total"], Kind.GAUGE: [""], Kind.HISTOGRAM: ["_sum", "_count"]}
        for end in ends[key.metric.kind]:
            name = key.metric.name + end
            assert server.value(name, 0, **labels) == server.value(name, 1, **labels) is not None


def test_nothing_to_send_is_none_and_an_empty_payload_is_empty() -> None:
    assert ContinuumStats.take(Account()) is None
    assert ContinuumStats.build(None).is_empty()
    stats = ContinuumStats.build({"counters": {"pins_started": 1}})
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_a_key_of_another_release_is_skipped(server: Server) -> None:
    payload = {"counters": {"retired_metric": 1, "pins_started": 1}}
    server.prom.observe(payload, 0)
    assert server.value("pins_started_total") == 1


def test_the_log_line_is_short_and_says_what_matters() -> None:
    logging = vllm_metrics.KVConnectorLogging(vllm_config().kv_transfer_config)
    account = Account()
    logged: list[tuple[Any, ...]] = []
    payloads = []
    for _ in range(2):
        account.count("pins_started", 3)
        account.count("pins_ended", 2, "returned")
        account.count("stored_bytes", 10**9)
        account.count("prompt_tokens", 1000)
        account.count("hit_tokens", 250, "dram")
        account.count("hit_tokens", 100, "disk")
        account.gauge("pins_live", len(payloads))
        account.observe("load_seconds", 0.02)
        account.observe("hook_seconds", 1e-5, "wait_for_save")
        payloads.append(sent(account))
    before = msgspec.json.encode(payloads)
    for payload in payloads:
        logging.observe(payload)
    logging.log(lambda *args: logged.append(args))
    assert msgspec.json.encode(payloads) == before, "Prometheus gets the same objects"
    ((_, text),) = logged
    assert text == (
        "pins_live=1, pins_started=6, pins_ended{returned}=4, mean load_seconds=0.02, "
        "dram hit share=0.25, disk hit share=0.1, hook_seconds=2e-05"
    )
    logging.log(lambda *args: logged.append(args))
    assert len(logged) == 1, "an interval in which nothing happened says nothing"


@pytest.fixture
def _clean_registry() -> Iterator[None]:
    unregister()
    yield
    unregister()


@pytest.mark.usefixtures("_clean_registry")
def test_a_second_engine_in_one_process_replaces_the_firsts_metrics() -> None:
    for _ in range(2):  # the second would raise "Duplicated timeseries"
        prom = vllm_metrics.KVConnectorProm(vllm_config(), LABELNAMES, {0: ["m", "0"]})
    prom.observe({"counters": {"pins_started": 1}}, 0)
    labels = {"model_name": "m", "engine": "0"}
    assert REGISTRY.get_sample_value("continuum:pins_started_total", labels) == 1
    unregister()
    assert REGISTRY.get_sample_value("continuum:pins_started_total", labels) is None


@pytest.mark.usefixtures("_clean_registry")
def test_what_the_middleware_counts_outlives_the_engines_of_its_process() -> None:
    count = unread_bodies()
    labels = {"reason": "compressed"}
    before = REGISTRY.get_sample_value("continuum:unread_bodies_total", labels)
    count("compressed")
    vllm_metrics.KVConnectorProm(vllm_config(), LABELNAMES, {0: ["m", "0"]})
    unregister()
    assert before is not None
    assert REGISTRY.get_sample_value("continuum:unread_bodies_total", labels) == before + 1


API_SERVERS = """
import os
from types import SimpleNamespace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, multiprocess
from continuum_connector.observe.metrics import ContinuumPromMetrics
from continuum_connector.middleware import unread_bodies

def serve(payloads):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        return
    config = SimpleNamespace(kv_transfer_config=None)
    types = {t: t for t in (Counter, Gauge, Histogram)}
    prom = ContinuumPromMetrics(config, types, ["engine"], {0: ["0"]})
    for payload in payloads:
        prom.observe(payload, 0)
        unread_bodies()("long")
    os._exit(0)

serve([])
serve([{"counters": {"pins_started": 2}, "gauges": {"pins_live": 5}}])
serve([{"counters": {"pins_started": 3}, "gauges": {"pins_live": 1}}])
serve([])
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
value = lambda name, **of: registry.get_sample_value("continuum:" + name, of or {"engine": "0"})
print(value("pins_started_total"), value("pins_live"), value("unread_bodies_total", reason="long"))
"""


def test_of_several_api_servers_counters_add_and_the_last_gauge_wins(tmp_path: Path) -> None:
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", API_SERVERS],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["5.0", "1.0", "2.0"]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_disk_that_is_asked_for_and_cannot_be_is_told_from_one_nobody_asks_for(
    monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    monkeypatch.undo()  # the engine below wants the real connector
    config = {"disk_path": "/disk", "disk_bytes": "1GiB"}
    if drafts:
        monkeypatch.setattr(proven, "why_no_disk", lambda _server: "no disk tier with drafts")
    for extra, wanted in ((config, 2**30), ({}, 0)):
        engine = tiered(num_slots=40, config=extra)
        run_turn(engine, "a", 100)
        assert total(engine, "disk_wanted_bytes") == wanted
        assert total(engine, "disk_up") == 0, "no rank has opened one"
