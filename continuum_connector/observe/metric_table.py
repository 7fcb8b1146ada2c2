"""METRICS: every number we publish, with its type, help text, labels and buckets.

Needs no vLLM. Those of a disk are in disk_metrics.py. account.py adds the numbers up, metrics.py
hands them to Prometheus.
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
OPENED = ("fits_vram", "fits_dram", "gpu_idle", "empty", "deadline", "switched_off")
CHANCES = tuple(f"{low}-{low + 10}" for low in range(0, 100, 10))  # percent
PIN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
HOOK_BUCKETS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 0.01, 0.1)

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

METRICS: tuple[Metric, ...] = (
    Metric("switched_on", _G, "1: on; 0: switched off, or stepped aside", first=1.0),
    Metric("epoch", _G, "Which weights serve: grows when they change and with each reset"),
    Metric(
        "epochs",
        _C,
        "Epochs begun, by what began them; each empties all below VRAM and ends every pin",
        "cause",
        EPOCHS,
    ),
    Metric("programs", _G, "Programs remembered; at max_programs the quiet ones are forgotten"),
    Metric(
        "turns",
        _C,
        "Turns begun, by how their program was identified; mostly `none` means no turn can be kept",
        "source",
        tuple(source.value for source in IdentitySource),
    ),
    Metric(
        "decisions",
        _C,
        "Finished turns, by what was decided; all `free` means the connector changes nothing",
        "decision",
        ("pin", "offload", "free"),
    ),
    Metric(
        "endings",
        _C,
        "Finished turns, by how their output ends; mostly `unread` means tool calls are not seen",
        "ending",
        tuple(ending.value for ending in Ending),
    ),
    Metric(
        "unread_turns",
        _C,
        "Turns whose tool calls were not read, by reason; `no_tokenizer` after the first minute: "
        "see the log, `no_time`: more turns end at once than one step reads in 1 ms",
        "reason",
        WHY_UNREAD,
    ),
    Metric(
        "hints",
        _C,
        "Hints answered, by outcome; much `refused`: see `hints` of a response, or docs/hints.md",
        "outcome",
        ("accepted", "clipped", "refused"),
    ),
    Metric(
        "outcomes",
        _C,
        "What came of decisions; much `pin_never`: VRAM kept for nobody, much `free_recomputed`: "
        "what returned was gone",
        "decision_outcome",
        OUTCOMES,
    ),
    Metric(
        "forecasts",
        _C,
        "Predicted returns, by predicted chance in percent, once the outcome is known",
        "chance",
        CHANCES,
    ),
    Metric(
        "forecasts_true",
        _C,
        "Predicted returns that came in time; a share far from the chance: gaps are not learned",
        "chance",
        CHANCES,
    ),
    Metric("pins_live", _G, "Turns pinned now; still above 0 after an idle max_ttl_s: a leak"),
    Metric("vram_blocks", _G, "VRAM blocks that requests and pins share: the whole KV cache"),
    Metric("pinned_blocks", _G, "VRAM blocks kept by pins; near the budget, pins end by pressure"),
    Metric(
        "held_blocks",
        _G,
        "VRAM blocks held for pins and stores; above 0 with no pin and no store is a leak",
    ),
    Metric("pins_started", _C, "Turns pinned; minus pins_ended it is pins_live"),
    Metric(
        "pins_ended",
        _C,
        "Pins ended, by cause; much `expired`: the TTL is short, much `pressure`: VRAM is short",
        "cause",
        PIN_CAUSES,
    ),
    Metric(
        "pin_seconds",
        _H,
        "How long pins were held; piled up at ttl_s means tool calls outlast the TTL",
        buckets=PIN_BUCKETS,
    ),
    Metric("prompt_tokens", _C, "Prompt tokens looked up: what hit_tokens is a share of"),
    Metric(
        "hit_tokens",
        _C,
        "Prompt tokens found, by tier; a falling share of prompt_tokens means KV is lost in pauses",
        "tier",
        ("vram", "dram", "disk"),
    ),
    Metric("sample_groups", _G, "Prompts of which several samples are known, or announced"),
    Metric("samples", _G, "Programs of those groups that are not over"),
    Metric(
        "sample_prompt_tokens",
        _C,
        "Prompts of samples that began after a first one: what sample_hit_tokens is a share of",
    ),
    Metric(
        "sample_hit_tokens", _C, "Of those, found in some tier; little: samples compute them anew"
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
        "Transfers not settled; growing without end means copies are slower than turns, or stuck",
        "direction",
        DIRECTIONS,
    ),
    Metric(
        "stores",
        _C,
        "Transfers VRAM to DRAM, by outcome; `abandoned`: overtaken by a reset or shutdown",
        "outcome",
        ("done", "failed", "abandoned"),
    ),
    Metric(
        "loads",
        _C,
        "Transfers DRAM to VRAM, by outcome; all but `done` were recomputed instead",
        "outcome",
        ("done", "failed", "cancelled", "abandoned"),
    ),
    Metric(
        "transfer_failures",
        _C,
        "Ranks' failed transfers, by reason; each is a miss, `corrupt` or `driver` needs a look",
        "reason",
        FAILURES,
    ),
    Metric("stored_blocks", _C, "Blocks copied to DRAM"),
    Metric("loaded_blocks", _C, "Blocks copied back; far below stored_blocks means wasted stores"),
    Metric("stored_bytes", _C, "Bytes copied to DRAM, over all ranks"),
    Metric("loaded_bytes", _C, "Bytes copied back, over all ranks"),
    Metric(
        "store_seconds",
        _H,
        "From queued to settled, per store; far above its bytes over the bus speed: a busy bus",
        buckets=COPY_BUCKETS,
    ),
    Metric(
        "load_seconds",
        _H,
        "From queued to settled, per load, which a request waits for; at load_timeout_s it ends",
        buckets=COPY_BUCKETS,
    ),
    Metric("tier_up", _G, "1 while the DRAM tier works; 0: off by config, or a rank has none"),
    Metric("dram_capacity_blocks", _G, "Blocks the DRAM tier can hold by now; 0 without a tier"),
    Metric(
        "dram_wanted_blocks",
        _G,
        "Blocks that fit dram_bytes; minutes above dram_capacity_blocks: a rank is short of DRAM",
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
        "Seconds per token of a prompt of 1000 behind so many cached ones; 0: not known yet",
        "cached_tokens",
        ("0", "32768"),
    ),
    Metric(
        "load_seconds_per_block",
        _G,
        "Seconds per block of a load of 1000 from DRAM; above its tokens' prefill: DRAM is no use",
    ),
    Metric(
        "queueing_seconds",
        _G,
        "Mean wait of turns that had lost their blocks, last 10 min; above 0: VRAM is short",
    ),
    Metric(
        "memoryfulness",
        _G,
        "1: programs are equally long, keeping the oldest ends them soonest; 0: age says nothing",
    ),
    Metric(
        "block_second_price",
        _G,
        "Seconds of delay that one VRAM block kept for 1 s costs others; 0: keeping is free",
    ),
    Metric(
        "costs_known",
        _G,
        "1: measured, here or by `continuum calibrate`; long 0: too little traffic to learn from",
        "cost",
        ("prefill", "load", "memoryfulness"),
    ),
    Metric("dram_used_bytes", _G, "Host bytes of the blocks in DRAM, over all ranks"),
    Metric("dram_evicted_blocks", _C, "Blocks dropped from DRAM for room; fast: raise dram_bytes"),
    Metric(
        "dram_refused_blocks",
        _C,
        "Blocks not stored: what fills DRAM is worth more, or busy; above stored: raise dram_bytes",
    ),
    Metric("gate_held", _G, "First turns held at the gate; above 0 for long: memory is short"),
    Metric(
        "gate_opened",
        _C,
        "Held first turns let in, by reason; much `deadline`: more programs than memory is for",
        "because",
        OPENED,
    ),
    Metric(
        "gate_wait_seconds",
        _H,
        "How long first turns were held; part of their time to first token",
        buckets=PIN_BUCKETS,
    ),
    Metric(
        "gate_bank_seconds",
        _G,
        "Idle seconds of the last cycle that a start may still spend, by what was idle",
        "of",
        ("gpu", "bus"),
    ),
    Metric("working_set_programs", _G, "Programs under way: begun, and expected back"),
    Metric("working_set_blocks", _G, "Blocks that programs under way want within a cycle"),
    Metric(
        "hook_seconds",
        _H,
        "Time we spend inside vLLM's step, by hook; above 0.0001 it costs throughput",
        "hook",
        HOOKS,
        HOOK_BUCKETS,
    ),
    Metric("trace_dropped", _C, "Trace records lost; above 0 the file at trace_path is incomplete"),
    *DISK_METRICS,
)

# Counted in an API server by middleware.py, as long as it is loaded; no engine knows of it.
UNREAD_BODIES = Metric(
    "unread_bodies",
    _C,
    "Requests whose body the middleware left unread, by reason; `in_part`: only a field or "
    "cache marks; what they say outside of vLLM's own fields is not heard",
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
        """The key that crosses processes, `pins_ended{expired}` or `pins_live`."""
        return self.metric.name if self.label is None else f"{self.metric.name}{{{self.label}}}"


WIRE_KEYS: dict[str, WireKey] = {
    key.text: key for key in (WireKey(m, label) for m in METRICS for label in m.labels)
}
