"""Rates: two scrapes -> the numbers that `continuum top` shows. Pure: no clock, no terminal."""

from __future__ import annotations

import re
from dataclasses import dataclass

from continuum_connector.tools.cli.server import Scrape

TIERS = ("vram", "dram", "disk")
_CHANCE = re.compile(r"[0-9]{1,3}-[0-9]{1,3}")
# Outcomes of decisions that cost something: KV kept for nobody, or gone when it was needed.
BAD_OUTCOMES = ("expired", "pressure", "diverged", "never", "recomputed")


@dataclass(frozen=True)
class Copies:
    """Copies in one direction. `mean_s`: from queued to settled, None if none settled. `num_bad`:
    how many failed, were cancelled or were abandoned since the server started."""

    in_flight: int
    per_s: float
    bytes_per_s: float
    mean_s: float | None
    num_bad: int


@dataclass(frozen=True)
class Disk:
    """A disk that the config asks for. `used`: the share of its blocks in use, None until it is
    open. `budget_fill`: the share left of a day's disk_write_budget, on the engine with the least.
    `oldest_op_s`: the age of the oldest read or write under way. `num_wrong`: corrupt reads and
    errors of the drive since the start. `unsaved_per_s`: blocks that left DRAM before they were
    written."""

    num_down: int  # of the engines
    used: float | None
    used_bytes: int
    budget_fill: float
    oldest_op_s: float
    num_wrong: int
    unsaved_per_s: float
    writes: Copies
    reads: Copies


@dataclass(frozen=True)
class Hook:
    """One of our hooks. `busy`: the share of time spent in it. `mean_s`: seconds per call."""

    name: str
    busy: float
    mean_s: float


@dataclass(frozen=True)
class DecisionOutcome:
    """One kind of outcome: how many since the start, and which share of all outcomes that is."""

    name: str
    num: int
    share: float


@dataclass(frozen=True)
class Forecasts:
    """Predicted returns since the start. `error`: the share by which too many or too few came. Only
    the tenth that a chance lies in is known, so anything within it counts as right. `worst`: the
    chance, such as "70-80" percent, that adds most to the error. `came`: the share of its
    `num_worst` predictions that came true."""

    num: int
    error: float
    worst: str
    came: float
    num_worst: int


@dataclass(frozen=True)
class Served:
    """vLLM's part, in tokens per second. `vram_used`: the share of VRAM blocks in use, including
    pins. `vram_hit`: the share of prompt tokens that were found in VRAM, None if none were looked
    up."""

    models: list[str]
    num_engines: int
    num_running: int
    num_waiting: int
    prompt_per_s: float
    output_per_s: float
    finished_per_s: float
    preempted_per_s: float
    vram_used: float
    vram_hit: float | None


@dataclass(frozen=True)
class Gate:
    """The gate begins only as many programs as memory or idle time allows. `wanted`: blocks that
    the programs under way need within a cycle, as a share of VRAM's."""

    num_under_way: int
    wanted: float | None
    num_held: int  # first turns that wait now
    let_in: dict[str, int]  # why earlier ones were let in; empty if none was ever held


@dataclass(frozen=True)
class Kept:
    """The connector's part. Shares are of VRAM blocks; `pins_ended`, `worst` and `forecasts` count
    from the server's start."""

    num_switched_off: int  # engines that are switched off or have stepped aside
    num_programs: int
    pinned: float | None  # None before the engine's first step
    held_for_stores: float | None
    num_pinned_blocks: int
    num_pins: int
    pins_per_s: float
    pins_ended: dict[str, int]
    tier_up: bool  # on at least one engine
    num_without_tier: int  # engines without a DRAM tier
    dram_used: float | None  # share in use of the blocks that DRAM has so far; None without a tier
    dram_used_bytes: int
    dram_writing_blocks: int
    dram_capacity_blocks: int
    dram_wanted_blocks: int
    dram_evicted_per_s: float
    # Shares of the prompt tokens admitted: by tier, and "computed"; by who kept them.
    hit: dict[str, float | None]
    stores: Copies
    loads: Copies
    disk: Disk | None  # None if the config asks for none
    gate: Gate | None  # None if it is off, or no program has come yet
    epochs: dict[str, int]  # by cause, on all engines, since the server's start
    decisions_per_s: dict[str, float]
    outcomes: int
    worst: list[DecisionOutcome]
    forecasts: Forecasts | None  # None until the outcome of the first is known
    hooks: list[Hook]  # the busiest first


@dataclass(frozen=True)
class Numbers:
    """`interval_s`: the seconds over which the rates are means. `kept` is None without our
    connector."""

    interval_s: float
    served: Served
    kept: Kept | None


def numbers(before: Scrape, after: Scrape) -> Numbers:
    """Return what happened between two scrapes of one server, and its state at the second."""
    added = after.since(before)
    kept = _kept(after, added) if after.has("continuum:") else None
    return Numbers(added.at, _served(after, added), kept)


def _served(now: Scrape, added: Scrape) -> Served:
    queries = added.total("vllm:prefix_cache_queries_total")
    engines = now.values("vllm:kv_cache_usage_perc", "engine")
    num_engines = max(1, len(engines))
    return Served(
        models=now.values("vllm:num_requests_running", "model_name"),
        num_engines=num_engines,
        num_running=int(now.total("vllm:num_requests_running")),
        num_waiting=int(now.total("vllm:num_requests_waiting")),
        prompt_per_s=_rate(added, "vllm:prompt_tokens_total"),
        output_per_s=_rate(added, "vllm:generation_tokens_total"),
        finished_per_s=_rate(added, "vllm:request_success_total"),
        preempted_per_s=_rate(added, "vllm:num_preemptions_total"),
        vram_used=now.total("vllm:kv_cache_usage_perc") / num_engines,
        vram_hit=_share(added.total("vllm:prefix_cache_hits_total"), queries),
    )


def _kept(now: Scrape, added: Scrape) -> Kept:
    pinned = now.total("continuum:pinned_blocks")
    vram = now.total("continuum:vram_blocks")
    capacity = now.total("continuum:dram_capacity_blocks")
    ready = now.total("continuum:dram_blocks", state="ready")
    writing = now.total("continuum:dram_blocks", state="writing")
    outcomes = now.by("continuum:outcomes_total", "decision_outcome")
    decisions = added.by("continuum:decisions_total", "decision")
    return Kept(
        num_switched_off=_num_at_0(now, "continuum:switched_on"),
        num_programs=int(now.total("continuum:programs")),
        pinned=_share(pinned, vram),
        held_for_stores=_share(now.total("continuum:held_blocks") - pinned, vram),
        num_pinned_blocks=int(pinned),
        num_pins=int(now.total("continuum:pins_live")),
        pins_per_s=_rate(added, "continuum:pins_started_total"),
        pins_ended=_counts(now.by("continuum:pins_ended_total", "cause")),
        tier_up=bool(now.total("continuum:tier_up")),
        num_without_tier=_num_at_0(now, "continuum:tier_up"),
        dram_used=_share(ready + writing, capacity),
        dram_used_bytes=int(now.total("continuum:dram_used_bytes")),
        dram_writing_blocks=int(writing),
        dram_capacity_blocks=int(capacity),
        dram_wanted_blocks=int(now.total("continuum:dram_wanted_blocks")),
        dram_evicted_per_s=_rate(added, "continuum:dram_evicted_blocks_total"),
        hit=_hits(added),
        stores=_copies("store", "stored", now, added),
        loads=_copies("load", "loaded", now, added),
        disk=_disk(now, added),
        gate=_gate(now, vram),
        epochs=_counts(now.by("continuum:epochs_total", "cause")),
        decisions_per_s={name: num / added.at for name, num in decisions.items()},
        outcomes=int(sum(outcomes.values())),
        worst=_worst(outcomes),
        forecasts=_forecasts(now),
        hooks=_hooks(added),
    )


def _hits(added: Scrape) -> dict[str, float | None]:
    prompt = added.total("continuum:prompt_tokens_total")
    hits = {tier: added.total("continuum:hit_tokens_total", tier=tier) for tier in TIERS}
    # A preempted turn is looked up twice but counted once, so the difference may fall below 0.
    hits["computed"] = max(0.0, prompt - sum(hits.values()))
    hits |= added.by("continuum:tokens_against_stock_total", "kept")
    return {where: _share(num, prompt) for where, num in hits.items()}


def _copies(kind: str, verb: str, now: Scrape, added: Scrape) -> Copies:
    name = f"continuum:{kind}_seconds"
    num = added.total(f"{name}_count")
    settled = now.by(f"continuum:{kind}s_total", "outcome")
    return Copies(
        in_flight=int(now.total("continuum:transfers_in_flight", direction=kind)),
        per_s=num / added.at,
        bytes_per_s=_rate(added, f"continuum:{verb}_bytes_total"),
        mean_s=_share(added.total(f"{name}_sum"), num),
        num_bad=int(sum(settled.values()) - settled.get("done", 0.0)),
    )


def _disk(now: Scrape, added: Scrape) -> Disk | None:
    if not now.total("continuum:disk_wanted_bytes"):
        return None
    used = now.total("continuum:disk_blocks")
    failures = now.by("continuum:disk_failures_total", "reason")
    fills = now.samples.get("continuum:disk_budget_fill", {}).values()
    ages = now.samples.get("continuum:disk_oldest_op_seconds", {}).values()
    return Disk(
        num_down=_num_at_0(now, "continuum:disk_up"),
        used=_share(used, now.total("continuum:disk_capacity_blocks")),
        used_bytes=int(now.total("continuum:disk_used_bytes")),
        budget_fill=min(fills, default=0.0),
        oldest_op_s=max(ages, default=0.0),
        num_wrong=int(failures.get("corrupt", 0.0) + failures.get("eio", 0.0)),
        unsaved_per_s=_rate(added, "continuum:disk_unsaved_blocks_total"),
        writes=_copies("write", "disk_written", now, added),
        reads=_copies("read", "disk_read", now, added),
    )


def _gate(now: Scrape, vram: float) -> Gate | None:
    num_under_way = int(now.total("continuum:working_set_programs"))
    num_held = int(now.total("continuum:gate_held"))
    let_in = _counts(now.by("continuum:gate_opened_total", "because"))
    if not (num_under_way or num_held or any(let_in.values())):
        return None
    wanted = _share(now.total("continuum:working_set_blocks"), vram)
    return Gate(num_under_way, wanted, num_held, let_in)


def _worst(outcomes: dict[str, float]) -> list[DecisionOutcome]:
    """The decisions that cost something, the most frequent kind first."""
    total = sum(outcomes.values())
    bad = [
        DecisionOutcome(name.replace("_", " ", 1), int(num), num / total)
        for name, num in outcomes.items()
        if num and name.partition("_")[2] in BAD_OUTCOMES
    ]
    return sorted(bad, key=lambda each: -each.num)


def _forecasts(now: Scrape) -> Forecasts | None:
    came = now.by("continuum:forecasts_true_total", "chance")
    told = now.by("continuum:forecasts_total", "chance").items()
    nums = {chance: num for chance, num in told if num > 0 and _CHANCE.fullmatch(chance)}
    if not nums:
        return None
    off = {chance: _outside(chance, came.get(chance, 0.0), num) for chance, num in nums.items()}
    worst = max(off, key=off.__getitem__)
    total = sum(nums.values())
    share = came.get(worst, 0.0) / nums[worst]
    return Forecasts(int(total), sum(off.values()) / total, worst, share, int(nums[worst]))


def _outside(chance: str, came: float, num: float) -> float:
    """How many more or fewer came than a chance of "70-80" percent allows."""
    low, high = (num * float(edge) / 100 for edge in chance.split("-"))
    return max(0.0, low - came, came - high)


def _hooks(added: Scrape) -> list[Hook]:
    seconds = added.by("continuum:hook_seconds_sum", "hook")
    calls = added.by("continuum:hook_seconds_count", "hook")
    hooks = [
        Hook(name, busy / added.at, busy / calls[name])
        for name, busy in seconds.items()
        if calls.get(name)
    ]
    return sorted(hooks, key=lambda each: -each.busy)


def _counts(values: dict[str, float]) -> dict[str, int]:
    return {name: int(num) for name, num in values.items()}


def _num_at_0(now: Scrape, name: str) -> int:
    """The number of engines on which this gauge is 0."""
    return list(now.samples.get(name, {}).values()).count(0.0)


def _rate(added: Scrape, name: str) -> float:
    return added.total(name) / added.at


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
