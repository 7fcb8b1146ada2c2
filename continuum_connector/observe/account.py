"""Account: adds up what happened, for METRICS: every number we publish, with its type, help text,
labels and buckets.

Needs no vLLM: the scheduler half and the worker half each own one Account, and
metrics.py carries what `take` returns to Prometheus.

Timed: how long each of vLLM's hooks takes us, for `continuum:hook_seconds`. Told: what a memory
tells of a turn.
"""

from __future__ import annotations

import enum
import functools
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from continuum_connector.errors import InvariantError
from continuum_connector.programs.program import IdentitySource
from continuum_connector.toolcalls import WHY_UNREAD, Ending

PREFIX = "continuum:"
OTHER = "other"  # the label value that stands for every value the code did not foresee


class Kind(enum.Enum):
    """The kinds of metrics, as Prometheus calls them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"

    @property
    def part(self) -> str:
        """The part of a payload that holds this kind: "counters", "gauges" or "histograms"."""
        return self.value + "s"


@dataclass(frozen=True)
class Metric:
    """One published number. `label`: its values are the closed set `values`, never a request's
    text. `first`: a gauge's value before anything sets it."""

    name: str
    kind: Kind
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    first: float = 0.0

    @property
    def full_name(self) -> str:
        """The name on /metrics, where Prometheus appends `_total` to a counter's."""
        return PREFIX + self.name

    @property
    def labels(self) -> tuple[str | None, ...]:
        """Every value that the label can take; a single None without a label."""
        return self.values or (None,)


def _metric(
    kind: Kind,
    name: str,
    help: str,
    buckets: tuple[float, ...] = (),
    first: float = 0.0,
    **label: tuple[str, ...],
) -> Metric:
    [(of, values)] = label.items() or [("", ())]
    return Metric(name, kind, help, of, values, buckets, first)


counter, gauge, histogram = (functools.partial(_metric, kind) for kind in Kind)

DIRECTIONS = ("store", "load", "write", "read")
PIN_CAUSES: tuple[str, ...] = ("returned", "expired", "pressure", "superseded", "loses")
PIN_CAUSES += ("program_done", "reset", "switched_off", "shutdown")
_ANY = ("superseded", "never", "switched_off")
_FOUND = ("in_vram", "in_dram", "in_disk", "recomputed", *_ANY)
_OF_PIN = ("in_time", "expired", "pressure", "diverged", "reset", *_ANY)
OUTCOMES = (*(f"pin_{each}" for each in _OF_PIN), *(f"offload_{each}" for each in _FOUND))
OUTCOMES += (*(f"free_{each}" for each in _FOUND), "free_done")
FAILURES: tuple[str, ...] = ("driver", "cancelled", "closed", "no_tier", "corrupt", "timeout")
FAILURES += ("stale", "asleep", OTHER)
EPOCHS = ("reset", "weights", "version", OTHER)
HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"),
    *("build_connector_meta", "update_connector_output", "request_finished", "allocate_slots"),
    *("start_load_kv", "wait_for_save", "get_finished", OTHER),
)
KEPT = ("only_ours", "stock_too", "only_stock", "unknown")
OPENED = ("fits", "empty", "deadline", "switched_off")
CHANCES = tuple(f"{low}-{low + 10}" for low in range(0, 100, 10))  # percent
PIN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
HOOK_BUCKETS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 0.01, 0.1)
COPY_BUCKETS = (5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)
DISK_FAILURES: tuple[str, ...] = ("eio", "enospc", "corrupt", "missing", "timeout")
DISK_FAILURES += ("driver", "cancelled", "no_tier", "refused", "stale", "asleep", OTHER)

# fmt: off
METRICS: tuple[Metric, ...] = (
    gauge("switched_on", "1 while on; 0: switched off, or stepped aside", first=1.0),
    gauge("aside", "1: this server cannot use the connector; the log says why, `steps aside`"),
    gauge("epoch", "Number of the current epoch; grows with each reset and each change of weights"),
    counter("epochs", "Epochs begun, by cause; each empties every tier below VRAM and ends every "
        "pin", cause=EPOCHS),
    gauge("programs", "Programs remembered; at max_programs those that never came back go"),
    counter("turns", "Turns begun, by how their program was identified; mostly `none`: no turn "
        "can be kept", source=tuple(source.value for source in IdentitySource)),
    counter("diverged_turns", "Turns that go on with a conversation behind changed text, so that "
        "nothing kept is found; many: a clock or tools in another order; answers and `continuum "
        "explain` say where"),
    counter("decisions", "Finished turns, by decision; all `free`: the connector changes nothing",
        decision=("pin", "offload", "free")),
    counter("endings", "Finished turns, by how their output ends; mostly `unread`: tool calls are "
        "not recognised", ending=tuple(ending.value for ending in Ending)),
    counter("unread_turns", "Turns whose tool calls were not read, by reason; `no_tokenizer` "
        "after the first minute: see the log; `no_time`: more turns end at once than one step has "
        "time to read", reason=WHY_UNREAD),
    counter("hints", "Hints answered, by outcome; many `refused`: see `hints` in a response, or "
        "docs/hints.md", outcome=("accepted", "clipped", "refused")),
    counter("outcomes", "Decisions, by outcome; many `pin_never`: VRAM kept for nobody; many "
        "`free_recomputed`: programs came back and their KV was gone", decision_outcome=OUTCOMES),
    counter("forecasts", "Predicted returns whose outcome is known, by predicted chance in percent",
        chance=CHANCES),
    counter("forecasts_true", "Predicted returns that came in time; a share far from the chance: "
        "forecasts are off", chance=CHANCES),
    gauge("pins_live", "Turns pinned now; still above 0 after max_ttl_s without traffic: a leak"),
    gauge("vram_blocks", "VRAM blocks in the whole KV cache, which requests and pins share"),
    gauge("pinned_blocks", "VRAM blocks kept by pins; near the budget pins end by pressure"),
    gauge("held_blocks", "VRAM blocks held for pins and stores; above 0 with no pin and no store: "
        "a leak"),
    counter("pins_started", "Turns pinned; minus pins_ended this is pins_live"),
    counter("pins_ended", "Pins ended, by cause; many `expired`: the TTL is short; many "
        "`pressure`: VRAM is short; `loses`: stock vLLM would find more, so none is made",
        cause=PIN_CAUSES),
    histogram("pin_seconds", "How long pins were held; most near ttl_s: tool calls outlast the TTL",
        PIN_BUCKETS),
    counter("prompt_tokens", "Prompt tokens looked up; hit_tokens is a share of them"),
    counter("hit_tokens", "Prompt tokens found, by tier; a falling share of prompt_tokens: pauses "
        "lose KV", tier=("vram", "dram", "disk")),
    counter("tokens_against_stock", "Prompt tokens by who kept them; mostly `stock_too`: stock "
        "vLLM would have found them as well; many `only_stock`: what we keep displaces what is "
        "needed", kept=KEPT),
    counter("transfers_admitted", "Transfers begun; equals stores, loads, ... of every outcome "
        "plus transfers_in_flight", direction=DIRECTIONS),
    gauge("transfers_in_flight", "Transfers not settled; growing without end: copies are slower "
        "than turns, or stuck", direction=DIRECTIONS),
    counter("stores", "Transfers VRAM to DRAM, by outcome; `abandoned`: a reset or shutdown came "
        "first", outcome=("done", "failed", "abandoned")),
    counter("loads", "Transfers DRAM to VRAM, by outcome; all but `done` were recomputed",
        outcome=("done", "failed", "cancelled", "abandoned")),
    counter("transfer_failures", "Ranks' failed transfers, by reason; each is a miss; `corrupt`, "
        "`driver`: check the host", reason=FAILURES),
    counter("stored_blocks", "Blocks copied to DRAM"),
    counter("loaded_blocks", "Blocks copied back; far below stored_blocks: wasted stores"),
    counter("stored_bytes", "Bytes copied to DRAM, over all ranks"),
    counter("loaded_bytes", "Bytes copied back, over all ranks"),
    histogram("store_seconds", "Time of a store from queued to settled; far above bytes / bus "
        "speed: the bus is busy", COPY_BUCKETS),
    histogram("load_seconds", "Time of a load from queued to settled; its request waits, "
        "30 s at most", COPY_BUCKETS),
    gauge("tier_up", "1 while the DRAM tier works; 0: off by config, or a rank has none"),
    gauge("dram_capacity_blocks", "Blocks that the DRAM tier can hold by now; 0 without a tier"),
    gauge("dram_wanted_blocks", "Blocks that dram_bytes can hold; above dram_capacity_blocks for "
        "minutes: DRAM is short. With dram_bytes left out as many as there are"),
    gauge("dram_blocks", "Blocks in DRAM, by state; `writing` stays up only while stores are in "
        "flight", state=("ready", "writing")),
    gauge("prefill_seconds_per_token", "Seconds per token of a 1000-token prefill behind that "
        "many cached ones; first a prior", cached_tokens=("0", "32768")),
    gauge("load_seconds_per_block", "Seconds per block of a 1000-block load from DRAM; above "
        "prefill of its tokens: no gain"),
    gauge("queueing_seconds", "Mean wait of turns that had lost their blocks, last 10 min; above "
        "0: VRAM is short"),
    gauge("memoryfulness", "1: programs are equally long, so the oldest ends soonest; 0: age says "
        "nothing"),
    gauge("block_second_price", "Seconds that one VRAM block kept for 1 s delays others; 0: "
        "keeping is free"),
    gauge("costs_known", "1: measured; 0: still from a prior, or not known; 0 for long: too "
        "little traffic to learn", cost=("prefill", "load", "memoryfulness")),
    gauge("dram_used_bytes", "Host bytes that blocks take in DRAM, over all ranks"),
    counter("dram_evicted_blocks", "Blocks dropped from DRAM for room; many: raise dram_bytes"),
    counter("dram_refused_blocks", "Blocks not stored because those in DRAM are worth more or "
        "busy; many: raise dram_bytes"),
    gauge("gate_held", "First turns held at the gate; above 0 for long: memory is short"),
    counter("gate_opened", "Held first turns let in, by reason; many `deadline`: more programs "
        "than memory can hold", because=OPENED),
    histogram("gate_wait_seconds", "How long first turns were held; their time to first token "
        "includes it", PIN_BUCKETS),
    gauge("working_set_programs", "Programs that have begun and are expected back"),
    gauge("working_set_blocks", "Blocks that these programs want within a cycle"),
    histogram("hook_seconds", "Time of our hooks inside vLLM's step; above 0.0001 they cost "
        "throughput", HOOK_BUCKETS, hook=HOOKS),
    counter("trace_dropped", "Trace records lost; above 0: the file at trace_path is incomplete"),
    # of a disk tier; all are 0 without one
    gauge("disk_up", "1 while the disk tier works; 0: off by config, not open yet, or failed"),
    gauge("disk_writable", "1 while the disk takes writes; 0 with disk_up at 1: full or failing, "
        "so only read"),
    gauge("disk_wanted_bytes", "disk_bytes of the config; above 0 with disk_up at 0 for long: no "
        "disk tier, see the log"),
    gauge("disk_capacity_blocks", "Blocks that the disk can hold; 0 without a disk"),
    gauge("disk_blocks", "Blocks on disk, by state; `writing` stays up only while writes are in "
        "flight", state=("ready", "writing")),
    gauge("disk_used_bytes", "Bytes that blocks take on disk, over all ranks"),
    counter("writes", "Transfers DRAM to disk, by outcome; many `cancelled`: the disk is slow, or "
        "busy reading", outcome=("done", "failed", "cancelled", "abandoned")),
    counter("reads", "Transfers disk to DRAM, by outcome; all but `done` were recomputed",
        outcome=("done", "failed", "cancelled", "abandoned")),
    counter("disk_written_bytes", "Bytes written to disk, over all ranks: what wears the drive"),
    counter("disk_read_bytes", "Bytes read from disk, over all ranks; below written: little use"),
    histogram("write_seconds", "Time of a write from queued to settled; nobody waits for it",
        COPY_BUCKETS),
    histogram("read_seconds", "Time of a read from queued to settled; its turn waits, "
        "disk_timeout_s at most", COPY_BUCKETS),
    counter("disk_failures", "Ranks' failed reads and writes, by reason; `corrupt`, `eio`: check "
        "the drive", reason=DISK_FAILURES),
    counter("disk_unsaved_blocks", "Blocks that left DRAM before they were written; many: the "
        "disk is slow, or DRAM small"),
    counter("disk_refused_blocks", "Blocks not written, by reason; many `once` or `budget`: "
        "disk_write_budget is spent", because=("once", "budget")),
    gauge("disk_budget_fill", "Share left of a day's disk_write_budget; 1 without a bound"),
    gauge("disk_oldest_op_seconds", "Age of the oldest read or write under way; above "
        "disk_timeout_s: the disk hangs"),
    gauge("read_seconds_per_block", "Seconds per block of a 1000-block read; above prefill of its "
        "tokens: no gain"),
)

# middleware.py counts it in an API server, if it is loaded; engines do not know it.
UNREAD_BODIES = counter("unread_bodies", "Requests whose body the middleware did not read, by "
    "reason; `in_part`: only a field or the cache marks; only vLLM's own fields in them count",
    reason=("long", "compressed", "in_part"))
# fmt: on

PUBLISHED = (*METRICS, UNREAD_BODIES)


class WireKey(NamedTuple):
    """One time series: a metric and one value of its label."""

    metric: Metric
    label: str | None

    @property
    def text(self) -> str:
        """The key that crosses processes, such as `pins_ended{expired}` or `pins_live`."""
        return self.metric.name if self.label is None else f"{self.metric.name}{{{self.label}}}"


WIRE_KEYS: dict[str, WireKey] = {
    key.text: key for key in (WireKey(m, label) for m in METRICS for label in m.labels)
}


class Told(Protocol):
    """What a memory below DRAM had for a turn, for the trace and the answer: of `num_tokens` that
    were neither in VRAM nor in DRAM. It may change until the turn is admitted."""

    num_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """By the name of the memory."""


Payload = dict[str, dict[str, Any]]
Scope = Callable[[str], AbstractContextManager[Any]]
Key = tuple[str, str | None]


class _Histogram:
    """Counts and sums per bucket. They merge exactly and do not grow with the observations."""

    __slots__ = ("bounds", "num_taken", "numbers", "sums", "sums_taken", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = self.num_taken = 0
        self.sums_taken = 0.0
        self._empty()

    def _empty(self) -> None:
        self.numbers = [0] * (len(self.bounds) + 1)
        self.sums = [0.0] * (len(self.bounds) + 1)

    def drain(self) -> list[list[Any]]:
        """[bucket, observations, their sum] of each that has some since this was last called."""
        cells = [[i, n, self.sums[i]] for i, n in enumerate(self.numbers) if n]
        self.num_taken = self.total
        self.sums_taken += sum(self.sums)
        self._empty()
        return cells


class Account:
    """Adds up what happened, in well under a microsecond per call, from one thread.

    A name or label outside METRICS raises InvariantError, unless the metric has the label `other`.
    Nothing grows if nobody calls `take`. `scope`: opens a profiler's range of a name around each
    hook that is timed; None: nobody profiles.
    """

    def __init__(self, scope: Scope | None = None) -> None:
        self.scope = scope
        self._text: dict[Key, str] = {(k.metric.name, k.label): t for t, k in WIRE_KEYS.items()}
        kinds = {(k.metric.name, k.label): k.metric for k in WIRE_KEYS.values()}
        self._counts = {k: 0 for k, m in kinds.items() if m.kind is Kind.COUNTER}
        self._taken = dict(self._counts)
        gauges = {k: m.first for k, m in kinds.items() if m.kind is Kind.GAUGE}
        self._gauges: dict[Key, float] = gauges
        self._histograms = {
            k: _Histogram(m.buckets) for k, m in kinds.items() if m.kind is Kind.HISTOGRAM
        }
        self._moved: set[Key] = set()
        self._keys_of: dict[str, list[Key]] = {}
        for name, label in kinds:
            self._keys_of.setdefault(name, []).append((name, label))

    def count(self, name: str, n: int = 1, label: str | None = None) -> None:
        """Add `n`, which is never negative, to a counter."""
        key = (name, label)
        if key not in self._counts:
            key = self._other(key, self._counts)
        self._counts[key] += n

    def gauge(self, name: str, value: float, label: str | None = None) -> None:
        """Set a gauge; it is sent only if it differs from what it was."""
        key = (name, label)
        if key not in self._gauges:
            key = self._other(key, self._gauges)
        if self._gauges[key] != value:
            self._gauges[key] = value
            self._moved.add(key)

    def observe(self, name: str, value: float, label: str | None = None) -> None:
        """Add one value to a histogram."""
        key = (name, label)
        if key not in self._histograms:
            key = self._other(key, self._histograms)
        histogram = self._histograms[key]
        histogram.total += 1
        index = bisect_left(histogram.bounds, value)
        histogram.numbers[index] += 1
        histogram.sums[index] += value

    def total(self, name: str, label: str | None = None) -> float:
        """Return a counter's or a gauge's value, or a histogram's number of observations.

        Without a label, the sum over all labels.
        """
        found = [key for key in self._keys_of.get(name, ()) if label in (None, key[1])]
        if not found:
            raise InvariantError(f"metric {name!r} with label {label!r} is not in METRICS")
        return sum(self._value(key) for key in found)

    def _value(self, key: Key) -> float:
        if key in self._histograms:
            return self._histograms[key].total
        return self._counts[key] if key in self._counts else self._gauges[key]

    def take(self) -> Payload | None:
        """Return what changed since the last take, or None, in a form that can cross processes.

        Counters and observations are increments, gauges are absolute values.
        """
        payload: Payload = {}
        counts, taken = self._counts, self._taken
        # Once a second over all counters costs less than noting each change when it happens.
        grown = [key for key, n in counts.items() if n != taken[key]]
        if grown:
            payload["counters"] = {self._text[k]: counts[k] - taken[k] for k in grown}
            self._taken = dict(counts)
        if self._moved:
            payload["gauges"] = {self._text[k]: self._gauges[k] for k in self._moved}
            self._moved.clear()
        seen = [
            (key, each) for key, each in self._histograms.items() if each.total > each.num_taken
        ]
        if seen:
            payload["histograms"] = {self._text[key]: each.drain() for key, each in seen}
        return payload or None

    @staticmethod
    def _other(key: Key, known: dict[Key, Any]) -> Key:
        """The key that counts an unforeseen label."""
        if key[1] is not None and (key[0], OTHER) in known:
            return (key[0], OTHER)
        raise InvariantError(f"metric {key[0]!r} with label {key[1]!r} is not in METRICS")


def merge(first: Payload, second: Payload) -> Payload:
    """Return both payloads as one: sums, and the second's value of each gauge.

    Neither argument is changed: loggers of one process share them.
    """
    counters = dict(first.get("counters", {}))
    for key, n in second.get("counters", {}).items():
        counters[key] = counters.get(key, 0) + n
    histograms = dict(first.get("histograms", {}))
    for key, cells in second.get("histograms", {}).items():
        summed = {index: [n, total] for index, n, total in histograms.get(key, ())}
        for index, n, total in cells:
            cell = summed.setdefault(index, [0, 0.0])
            cell[0] += n
            cell[1] += total
        histograms[key] = [[index, *cell] for index, cell in summed.items()]
    gauges = first.get("gauges", {}) | second.get("gauges", {})
    payload = {"counters": counters, "gauges": gauges, "histograms": histograms}
    return {part: values for part, values in payload.items() if values}


Hook = TypeVar("Hook", bound=Callable[..., Any])


def timed(label: str) -> Callable[[Hook], Hook]:
    """Count the seconds spent in a hook, for `continuum:hook_seconds`."""

    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                if self.account.scope is None:
                    return hook(self, *args, **kwargs)
                with self.account.scope(f"continuum: {label}"):
                    return hook(self, *args, **kwargs)
            finally:
                self.account.observe("hook_seconds", time.perf_counter() - began, label)

        return cast(Hook, measured)

    return wrap
