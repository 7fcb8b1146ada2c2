"""Rates: two scrapes -> the numbers that `continuum top` shows and prints as JSON. Pure: no clock,
no terminal. Rates are per second; shares are from 0 to 1, and None where there is no whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from continuum_connector.errors import shown
from continuum_connector.tools.cli.server import CommandError, Labels, samples

TIERS = ("vram", "dram", "disk")
_CHANCE = re.compile(r"[0-9]{1,3}-[0-9]{1,3}")
# Outcomes of decisions that cost something: KV kept for nobody, or gone when it was needed.
BAD_OUTCOMES = ("expired", "pressure", "diverged", "never", "recomputed")

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Scrape:
    """One answer of /metrics: samples by name, each with labels and value. `at`: seconds on any
    monotonic clock."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def parse(cls, text: str, at: float) -> Scrape:
        """Read the exposition format; CommandError if the text is something else."""
        found: dict[str, dict[Labels, float]] = {}
        for name, labels, value in samples(text):
            if name.startswith(("vllm:", "continuum:")):
                shown_as = frozenset((key, shown(of)) for key, of in labels)
                found.setdefault(name, {})[shown_as] = value
        if not found and not next(samples(text), None):
            raise CommandError(
                "/metrics answers, but not in Prometheus' format; check host and port"
            )
        return cls(at, found)

    def since(self, older: Scrape) -> Scrape:
        """What was added between the two. As for Prometheus, a counter that fell has restarted."""
        added: dict[str, dict[Labels, float]] = {}
        for name, each in self.samples.items():
            before = older.samples.get(name, {})
            grown = {labels: value - before.get(labels, 0.0) for labels, value in each.items()}
            added[name] = {key: new if new >= 0.0 else each[key] for key, new in grown.items()}
        return Scrape(self.at - older.at, added)

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples that carry all of `labels`; 0.0 if there is none."""
        wanted = set(labels.items())
        return sum(v for have, v in self.samples.get(name, {}).items() if wanted <= have)

    def rate(self, name: str) -> float:
        return self.total(name) / self.at

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of one label."""
        sums: dict[str, float] = {}
        for have, value in self.samples.get(name, {}).items():
            if (key := dict(have).get(label)) is not None:
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def each(self, name: str) -> list[float]:
        """The values, one for each engine."""
        return list(self.samples.get(name, {}).values())


def numbers(before: Scrape, after: Scrape) -> Numbers:
    """What happened between two scrapes of one server, and its state at the second. `interval_s`:
    the seconds between them. `kept` is None without our connector."""
    added = after.since(before)
    is_ours = any(name.startswith("continuum:") for name in after.samples)
    kept = _kept(after, added) if is_ours else None
    return {"interval_s": added.at, "served": _served(after, added), "kept": kept}


def _served(now: Scrape, added: Scrape) -> Numbers:
    """vLLM's part. `vram_used`: of its blocks, including pins. `vram_hit`: of the prompt tokens."""
    engines = {*now.by("vllm:kv_cache_usage_perc", "engine")} - {""}
    num_engines = max(1, len(engines))
    queries = added.total("vllm:prefix_cache_queries_total")
    return {
        "models": sorted({*now.by("vllm:num_requests_running", "model_name")} - {""}),
        "num_engines": num_engines,
        "num_running": int(now.total("vllm:num_requests_running")),
        "num_waiting": int(now.total("vllm:num_requests_waiting")),
        "prompt_per_s": added.rate("vllm:prompt_tokens_total"),
        "output_per_s": added.rate("vllm:generation_tokens_total"),
        "finished_per_s": added.rate("vllm:request_success_total"),
        "preempted_per_s": added.rate("vllm:num_preemptions_total"),
        "vram_used": now.total("vllm:kv_cache_usage_perc") / num_engines,
        "vram_hit": _share(added.total("vllm:prefix_cache_hits_total"), queries),
    }


def _kept(now: Scrape, added: Scrape) -> Numbers:
    """The connector's part. `pins_ended`, `epochs`, `outcomes`, `worst` and `forecasts` count from
    the server's start."""
    pinned, vram = now.total("continuum:pinned_blocks"), now.total("continuum:vram_blocks")
    capacity = now.total("continuum:dram_capacity_blocks")
    writing = now.total("continuum:dram_blocks", state="writing")
    used = now.total("continuum:dram_blocks", state="ready") + writing
    outcomes = now.by("continuum:outcomes_total", "decision_outcome")
    decisions = added.by("continuum:decisions_total", "decision")
    return {
        # Engines that are switched off or have stepped aside.
        "num_switched_off": now.each("continuum:switched_on").count(0.0),
        "num_programs": int(now.total("continuum:programs")),
        "pinned": _share(pinned, vram),  # of VRAM's blocks, as is `held_for_stores`
        "held_for_stores": _share(now.total("continuum:held_blocks") - pinned, vram),
        "num_pinned_blocks": int(pinned),
        "num_pins": int(now.total("continuum:pins_live")),
        "pins_per_s": added.rate("continuum:pins_started_total"),
        "pins_ended": _counts(now.by("continuum:pins_ended_total", "cause")),
        "tier_up": bool(now.total("continuum:tier_up")),  # on at least one engine
        "num_without_tier": now.each("continuum:tier_up").count(0.0),
        "dram_used": _share(used, capacity),  # of the blocks that DRAM has so far
        "dram_used_bytes": int(now.total("continuum:dram_used_bytes")),
        "dram_writing_blocks": int(writing),
        "dram_capacity_blocks": int(capacity),
        "dram_wanted_blocks": int(now.total("continuum:dram_wanted_blocks")),
        "dram_evicted_per_s": added.rate("continuum:dram_evicted_blocks_total"),
        "hit": _hits(added),
        "stores": _copies("store", "stored", now, added),
        "loads": _copies("load", "loaded", now, added),
        "disk": _disk(now, added),
        "gate": _gate(now, vram),
        "epochs": _counts(now.by("continuum:epochs_total", "cause")),
        "decisions_per_s": {name: num / added.at for name, num in decisions.items()},
        "outcomes": int(sum(outcomes.values())),
        "worst": _worst(outcomes),
        "forecasts": _forecasts(now),
        "hooks": _hooks(added),
    }


def _hits(added: Scrape) -> dict[str, float | None]:
    """Shares of the prompt tokens admitted: by tier, and "computed"; by who kept them."""
    prompt = added.total("continuum:prompt_tokens_total")
    hits = {tier: added.total("continuum:hit_tokens_total", tier=tier) for tier in TIERS}
    # A preempted turn is looked up twice but counted once, so the difference may fall below 0.
    hits["computed"] = max(0.0, prompt - sum(hits.values()))
    hits |= added.by("continuum:tokens_against_stock_total", "kept")
    return {where: _share(num, prompt) for where, num in hits.items()}


def _copies(kind: str, verb: str, now: Scrape, added: Scrape) -> Numbers:
    """Copies in one direction. `mean_s`: from queued to settled. `num_bad`: how many failed, were
    cancelled or were abandoned since the server started."""
    name = f"continuum:{kind}_seconds"
    num = added.total(f"{name}_count")
    settled = now.by(f"continuum:{kind}s_total", "outcome")
    return {
        "in_flight": int(now.total("continuum:transfers_in_flight", direction=kind)),
        "per_s": num / added.at,
        "bytes_per_s": added.rate(f"continuum:{verb}_bytes_total"),
        "mean_s": _share(added.total(f"{name}_sum"), num),
        "num_bad": int(sum(settled.values()) - settled.get("done", 0.0)),
    }


def _disk(now: Scrape, added: Scrape) -> Numbers | None:
    """None if the config asks for no disk. `used` is None until it is open."""
    if not now.total("continuum:disk_wanted_bytes"):
        return None
    failures = now.by("continuum:disk_failures_total", "reason")
    capacity = now.total("continuum:disk_capacity_blocks")
    return {
        "num_down": now.each("continuum:disk_up").count(0.0),  # engines
        "used": _share(now.total("continuum:disk_blocks"), capacity),
        "used_bytes": int(now.total("continuum:disk_used_bytes")),
        # Of a day's disk_write_budget, what is left on the engine with the least.
        "budget_fill": min(now.each("continuum:disk_budget_fill"), default=0.0),
        "oldest_op_s": max(now.each("continuum:disk_oldest_op_seconds"), default=0.0),
        "num_wrong": int(failures.get("corrupt", 0.0) + failures.get("eio", 0.0)),
        "unsaved_per_s": added.rate("continuum:disk_unsaved_blocks_total"),
        "writes": _copies("write", "disk_written", now, added),
        "reads": _copies("read", "disk_read", now, added),
    }


def _gate(now: Scrape, vram: float) -> Numbers | None:
    """None if it is off, or no program has come yet. `wanted`: blocks that the programs under way
    need within a cycle, as a share of VRAM's. `num_held`: first turns that wait now. `let_in`: why
    earlier ones were let in."""
    num_under_way = int(now.total("continuum:working_set_programs"))
    num_held = int(now.total("continuum:gate_held"))
    let_in = _counts(now.by("continuum:gate_opened_total", "because"))
    if not (num_under_way or num_held or any(let_in.values())):
        return None
    wanted = _share(now.total("continuum:working_set_blocks"), vram)
    found = {"num_under_way": num_under_way, "wanted": wanted}
    return {**found, "num_held": num_held, "let_in": let_in}


def _worst(outcomes: dict[str, float]) -> list[Numbers]:
    """The decisions that cost something, the most frequent kind first; `share`: of all outcomes."""
    total = sum(outcomes.values())
    bad = [
        {"name": name.replace("_", " ", 1), "num": int(num), "share": num / total}
        for name, num in outcomes.items()
        if num and name.partition("_")[2] in BAD_OUTCOMES
    ]
    return sorted(bad, key=lambda one: -one["num"])


def _forecasts(now: Scrape) -> Numbers | None:
    """Predicted returns; None until the outcome of the first is known. `error`: the share by which
    too many or too few came. Only the tenth that a chance lies in is known, so anything within it
    counts as right. `worst`: the chance, such as "70-80" percent, that adds most to the error;
    `came`: the share of its `num_worst` predictions that came true."""
    came = now.by("continuum:forecasts_true_total", "chance")
    told = now.by("continuum:forecasts_total", "chance").items()
    nums = {chance: num for chance, num in told if num > 0 and _CHANCE.fullmatch(chance)}
    if not nums:
        return None
    off: dict[str, float] = {}
    for chance, num in nums.items():
        low, high = (num * float(edge) / 100 for edge in chance.split("-"))
        off[chance] = max(0.0, low - came.get(chance, 0.0), came.get(chance, 0.0) - high)
    worst, total = max(off, key=off.__getitem__), sum(nums.values())
    found = {"num": int(total), "error": sum(off.values()) / total, "worst": worst}
    num = nums[worst]
    return {**found, "came": came.get(worst, 0.0) / num, "num_worst": int(num)}


def _hooks(added: Scrape) -> list[Numbers]:
    """Our hooks, the busiest first. `busy`: share of the time; `mean_s`: seconds per call."""
    spent = added.by("continuum:hook_seconds_sum", "hook")
    calls = added.by("continuum:hook_seconds_count", "hook")
    hooks = [
        {"name": name, "busy": busy / added.at, "mean_s": busy / calls[name]}
        for name, busy in spent.items()
        if calls.get(name)
    ]
    return sorted(hooks, key=lambda hook: -hook["busy"])


def by_number(counts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Those above 0, the most frequent first."""
    return sorted(((k, n) for k, n in counts.items() if n), key=lambda one: -one[1])


def _counts(values: dict[str, float]) -> dict[str, int]:
    return {name: int(num) for name, num in values.items()}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
