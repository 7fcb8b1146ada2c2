"""ContinuumStats and ContinuumPromMetrics: from an Account to vLLM's log line and /metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from continuum_connector.observe.account import (
    METRICS,
    WIRE_KEYS,
    Account,
    Kind,
    Metric,
    Payload,
    merge,
)

# what the log line says; /metrics has the rest
LOGGED = {
    "pins_live",
    "pinned_blocks",
    "pins_started",
    "pins_ended",
    "stores",
    "loads",
    "transfer_failures",
    "store_seconds",
    "load_seconds",
    "dram_evicted_blocks",
    "trace_dropped",
}


class ContinuumStats(KVConnectorStats):  # type: ignore[misc]
    """One step's payload of one Account, or the sum of several.

    Scheduler and workers send this same class, because vLLM merges them. The payload
    crosses processes as `data`, from which the API server builds it again.
    """

    data: Payload

    @classmethod
    def take(cls, account: Account) -> ContinuumStats | None:
        """Return what changed in `account`, or None, as `get_kv_connector_stats` must."""
        payload = account.take()
        return None if payload is None else cls(data=payload)

    @classmethod
    def build(cls, data: Payload | None = None) -> ContinuumStats:
        """Return the stats for a payload that came from another process."""
        return cls(data={} if data is None else data)

    def reset(self) -> None:
        """Forget the payload. On /metrics, gauges keep their values and do not fall to 0."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ContinuumStats:
        """Add `other`, the later one, to this: sums, and the later value of each gauge."""
        self.data = merge(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        """Return True if there is nothing to send."""
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """Return a few numbers about the log interval, without zeros except for hook_seconds."""
        summary: dict[str, int | float] = {}
        for text, key in WIRE_KEYS.items():
            value = self.data.get(key.metric.kind.part, {}).get(text)
            if not value or key.metric.name not in LOGGED:
                continue
            if key.metric.kind is Kind.HISTOGRAM:
                num, total = sum(cell[1] for cell in value), sum(cell[2] for cell in value)
                summary[f"mean {text}"] = float(f"{total / num:.3g}")
            else:
                summary[text] = value
        return summary | self._hit_shares() | {"hook_seconds": self._hook_seconds()}

    def _hook_seconds(self) -> float:
        """Return the seconds that all ranks spent in our hooks, which is what we cost."""
        cells = [
            cell
            for text, cells in self.data.get("histograms", {}).items()
            if text.startswith("hook_seconds{")
            for cell in cells
        ]
        return float(f"{sum(cell[2] for cell in cells):.3g}")

    def _hit_shares(self) -> dict[str, int | float]:
        """Return the share of prompt tokens that each tier with hits had."""
        counters = self.data.get("counters", {})
        num_tokens = counters.get("prompt_tokens", 0)
        hits = {tier: counters.get(f"hit_tokens{{{tier}}}", 0) for tier in ("vram", "dram", "disk")}
        return {
            f"{t} hit share": round(n / num_tokens, 3) for t, n in hits.items() if n and num_tokens
        }


class ContinuumPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers METRICS with the labels of vLLM's own metrics and feeds them payloads.

    Every time series exists from the start, at 0, so that an alert can tell "none yet"
    from "not scraped".
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        unregister()
        self._updates: dict[int, dict[str, Callable[[Any], None]]] = {
            engine: {} for engine in per_engine_labelvalues
        }
        for metric in METRICS:
            family = _register(metric, metric_types, labelnames)
            for text, key in WIRE_KEYS.items():
                if key.metric is not metric:
                    continue
                for engine, values in per_engine_labelvalues.items():
                    own = [] if key.label is None else [key.label]
                    child = family.labels(*values, *own)
                    self._updates[engine][text] = _update(metric, child)
                    if metric.first:
                        child.set(metric.first)

    def observe(self, transfer_stats_data: Payload, engine_idx: int = 0) -> None:
        """Publish one payload of one engine. Keys of another release are skipped."""
        updates = self._updates[engine_idx]
        for part in transfer_stats_data.values():
            for text, value in part.items():
                if text in updates:
                    updates[text](value)


def unregister() -> None:
    """Take metrics of an earlier engine of this process out of the registry.

    vLLM does it for its own (`unregister_vllm_metrics`) whenever an engine is made, but
    only by its own prefix; ours would be refused as duplicates. What the middleware counts goes
    on: it is no engine's.
    """
    names = {metric.full_name for metric in METRICS}
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "") in names:
            REGISTRY.unregister(collector)


def _register(metric: Metric, types: dict[type[Any], type[Any]], labelnames: list[str]) -> Any:
    names = [*labelnames, *([metric.label] if metric.label else [])]
    common = {"name": metric.full_name, "documentation": metric.help, "labelnames": names}
    if metric.kind is Kind.COUNTER:
        return types[Counter](**common)
    if metric.kind is Kind.HISTOGRAM:
        return types[Histogram](**common, buckets=metric.buckets)
    # with several API servers the latest value is right, because gauges are absolute
    return types[Gauge](**common, multiprocess_mode="mostrecent")


def _update(metric: Metric, child: Any) -> Callable[[Any], None]:
    if metric.kind is Kind.COUNTER:
        return child.inc  # type: ignore[no-any-return]
    if metric.kind is Kind.GAUGE:
        return child.set  # type: ignore[no-any-return]

    def observe_cells(cells: list[list[Any]]) -> None:
        for index, num, total in cells:
            value = representative(metric.buckets, index, total / num)
            for _ in range(num):
                child.observe(value)

    return observe_cells


def representative(buckets: tuple[float, ...], index: int, mean: float) -> float:
    """Return `mean`, kept inside bucket `index` despite rounding: (lower, upper]."""
    if index > 0:
        mean = max(mean, math.nextafter(buckets[index - 1], math.inf))
    return min(mean, buckets[index]) if index < len(buckets) else mean
