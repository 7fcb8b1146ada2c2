"""METRICS: every number we publish, with its type, help text, labels and buckets.

This file needs no vLLM. disk_metrics.py has the disk's numbers, account.py adds all of them up, and
metrics.py hands them to Prometheus.
"""

from __future__ import annotations

from typing import NamedTuple

from continuum_connector.observe.disk_metrics import DISK_METRICS
from continuum_connector.observe.metric import COPY_BUCKETS, OTHER, Kind, Metric
from continuum_connector.programs.program import IdentitySource
from continuum_connector.toolcalls.asked import WHY_UNREAD, Ending

DIRECTIONS = ("store", "load", "write", "read")
PIN_CAUSES: tuple[str, ...] = ("returned", "expired", "pressure", "superseded", "program_done")
PIN_CAUSES += ("reset", "switched_off", "shutdown")
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
OPENED = ("fits_vram", "fits_dram", "gpu_idle", "empty", "deadline", "switched_off")
CHANCES = tuple(f"{low}-{low + 10}" for low in range(0, 100, 10))  # percent
PIN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
HOOK_BUCKETS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 0.01, 0.1)

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

METRICS: tuple[Metric, ...] = (
    Metric("switched_on", _G, "1 while on; 0: switched off, or stepped aside", first=1.0),
    Metric("aside", _G, "1: this server cannot use the connector; the log says why, `steps aside`"),
    Metric(
        "epoch", _G, "Number of the current epoch; grows with each reset and each change of weights"
    ),
    Metric(
        "epochs",
        _C,
        "Epochs begun, by cause; each empties every tier below VRAM and ends every pin",
        "cause",
        EPOCHS,
    ),
    Metric("programs", _G, "Programs remembered; at max_programs those that never came back go"),
    Metric(
        "turns",
        _C,
        "Turns begun, by how their program was identified; mostly `none`: no turn can be kept",
        "source",
        tuple(source.value for source in IdentitySource),
    ),
    Metric(
        "diverged_turns",
        _C,
        "Turns that go on with a conversation behind changed text, so that nothing kept is found; "
        "many: a clock or tools in another order; answers and `continuum explain` say where",
    ),
    Metric(
        "decisions",
        _C,
        "Finished turns, by decision; all `free`: the connector changes nothing",
        "decision",
        ("pin", "offload", "free"),
    ),
    Metric(
        "endings",
        _C,
        "Finished turns, by how their output ends; mostly `unread`: tool calls are not recognised",
        "ending",
        tuple(ending.value for ending in Ending),
    ),
    Metric(
        "unread_turns",
        _C,
        "Turns whose tool calls were not read, by reason; `no_tokenizer` after the first minute: "
        "see the log; `no_time`: more turns end at once than one step has time to read",
        "reason",
        WHY_UNREAD,
    ),
    Metric(
        "hints",
        _C,
        "Hints answered, by outcome; many `refused`: see `hints` in a response, or docs/hints.md",
        "outcome",
        ("accepted", "clipped", "refused"),
    ),
    Metric(
        "outcomes",
        _C,
        "Decisions, by outcome; many `pin_never`: VRAM kept for nobody; many `free_recomputed`: "
        "programs came back and their KV was gone",
        "decision_outcome",
        OUTCOMES,
    ),
    Metric(
        "forecasts",
        _C,
        "Predicted returns whose outcome is known, by predicted chance in percent",
        "chance",
        CHANCES,
    ),
    Metric(
        "forecasts_true",
        _C,
        "Predicted returns that came in time; a share far from the chance: forecasts are off",
        "chance",
        CHANCES,
    ),
    Metric(
        "pins_live", _G, "Turns pinned now; still above 0 after max_ttl_s without traffic: a leak"
    ),
    Metric("vram_blocks", _G, "VRAM blocks in the whole KV cache, which requests and pins share"),
    Metric("pinned_blocks", _G, "VRAM blocks kept by pins; near the budget pins end by pressure"),
    Metric(
        "held_blocks",
        _G,
        "VRAM blocks held for pins and stores; above 0 with no pin and no store: a leak",
    ),
    Metric("pins_started", _C, "Turns pinned; minus pins_ended this is pins_live"),
    Metric(
        "pins_ended",
        _C,
        "Pins ended, by cause; many `expired`: the TTL is short; many `pressure`: VRAM is short",
        "cause",
        PIN_CAUSES,
    ),
    Metric(
        "pin_seconds",
        _H,
        "How long pins were held; most near ttl_s: tool calls outlast the TTL",
        buckets=PIN_BUCKETS,
    ),
    Metric("prompt_tokens", _C, "Prompt tokens looked up; hit_tokens is a share of them"),
    Metric(
        "hit_tokens",
        _C,
        "Prompt tokens found, by tier; a falling share of prompt_tokens: pauses lose KV",
        "tier",
        ("vram", "dram", "disk"),
    ),
    Metric(
        "tokens_against_stock",
        _C,
        "Prompt tokens by who kept them; mostly `stock_too`: stock vLLM would have found them as "
        "well; many `only_stock`: what we keep displaces what is needed",
        "kept",
        KEPT,
    ),
    Metric(
        "transfers_admitted",
        _C,
        "Transfers begun; equals stores, loads, ... of every outcome plus transfers_in_flight",
        "direction",
        DIRECTIONS,
    ),
    Metric(
        "transfers_in_flight",
        _G,
        "Transfers not settled; growing without end: copies are slower than turns, or stuck",
        "direction",
        DIRECTIONS,
    ),
    Metric(
        "stores",
        _C,
        "Transfers VRAM to DRAM, by outcome; `abandoned`: a reset or shutdown came first",
        "outcome",
        ("done", "failed", "abandoned"),
    ),
    Metric(
        "loads",
        _C,
        "Transfers DRAM to VRAM, by outcome; all but `done` were recomputed",
        "outcome",
        ("done", "failed", "cancelled", "abandoned"),
    ),
    Metric(
        "transfer_failures",
        _C,
        "Ranks' failed transfers, by reason; each is a miss; `corrupt`, `driver`: check the host",
        "reason",
        FAILURES,
    ),
    Metric("stored_blocks", _C, "Blocks copied to DRAM"),
    Metric("loaded_blocks", _C, "Blocks copied back; far below stored_blocks: wasted stores"),
    Metric("stored_bytes", _C, "Bytes copied to DRAM, over all ranks"),
    Metric("loaded_bytes", _C, "Bytes copied back, over all ranks"),
    Metric(
        "store_seconds",
        _H,
        "Time of a store from queued to settled; far above bytes / bus speed: the bus is busy",
        buckets=COPY_BUCKETS,
    ),
    Metric(
        "load_seconds",
        _H,
        "Time of a load from queued to settled; its request waits, 30 s at most",
        buckets=COPY_BUCKETS,
    ),
    Metric("tier_up", _G, "1 while the DRAM tier works; 0: off by config, or a rank has none"),
    Metric(
        "dram_capacity_blocks", _G, "Blocks that the DRAM tier can hold by now; 0 without a tier"
    ),
    Metric(
        "dram_wanted_blocks",
        _G,
        "Blocks that dram_bytes can hold; above dram_capacity_blocks for minutes: DRAM is short. "
        "With dram_bytes left out as many as there are",
    ),
    Metric(
        "dram_blocks",
        _G,
        "Blocks in DRAM, by state; `writing` stays up only while stores are in flight",
        "state",
        ("ready", "writing"),
    ),
    Metric(
        "prefill_seconds_per_token",
        _G,
        "Seconds per token of a 1000-token prefill behind that many cached ones; first a prior",
        "cached_tokens",
        ("0", "32768"),
    ),
    Metric(
        "load_seconds_per_block",
        _G,
        "Seconds per block of a 1000-block load from DRAM; above prefill of its tokens: no gain",
    ),
    Metric(
        "queueing_seconds",
        _G,
        "Mean wait of turns that had lost their blocks, last 10 min; above 0: VRAM is short",
    ),
    Metric(
        "memoryfulness",
        _G,
        "1: programs are equally long, so the oldest ends soonest; 0: age says nothing",
    ),
    Metric(
        "block_second_price",
        _G,
        "Seconds that one VRAM block kept for 1 s delays others; 0: keeping is free",
    ),
    Metric(
        "costs_known",
        _G,
        "1: measured; 0: still from a prior, or not known; 0 for long: too little traffic to learn",
        "cost",
        ("prefill", "load", "memoryfulness"),
    ),
    Metric("dram_used_bytes", _G, "Host bytes that blocks take in DRAM, over all ranks"),
    Metric("dram_evicted_blocks", _C, "Blocks dropped from DRAM for room; many: raise dram_bytes"),
    Metric(
        "dram_refused_blocks",
        _C,
        "Blocks not stored because those in DRAM are worth more or busy; many: raise dram_bytes",
    ),
    Metric("gate_held", _G, "First turns held at the gate; above 0 for long: memory is short"),
    Metric(
        "gate_opened",
        _C,
        "Held first turns let in, by reason; many `deadline`: more programs than memory can hold",
        "because",
        OPENED,
    ),
    Metric(
        "gate_wait_seconds",
        _H,
        "How long first turns were held; their time to first token includes it",
        buckets=PIN_BUCKETS,
    ),
    Metric(
        "gate_bank_seconds",
        _G,
        "Idle seconds of the last cycle that a start may still spend, by what was idle",
        "of",
        ("gpu", "bus"),
    ),
    Metric("working_set_programs", _G, "Programs that have begun and are expected back"),
    Metric("working_set_blocks", _G, "Blocks that these programs want within a cycle"),
    Metric(
        "hook_seconds",
        _H,
        "Time of our hooks inside vLLM's step; above 0.0001 they cost throughput",
        "hook",
        HOOKS,
        HOOK_BUCKETS,
    ),
    Metric(
        "trace_dropped", _C, "Trace records lost; above 0: the file at trace_path is incomplete"
    ),
    *DISK_METRICS,
)

# middleware.py counts it in an API server, if it is loaded; engines do not know it.
UNREAD_BODIES = Metric(
    "unread_bodies",
    _C,
    "Requests whose body the middleware did not read, by reason; `in_part`: only a field or the "
    "cache marks; only vLLM's own fields in them count",
    "reason",
    ("long", "compressed", "in_part"),
)

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
