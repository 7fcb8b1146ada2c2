"""What the state machine of machine.py draws from: requests, and engines to send them to."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from bench.sim import versions
from tests.vllm.drafts import HAS_FLAGS

# Windows have a DRAM tier where a load can fail by request; the others have pins alone.
GROUPS = st.sampled_from(
    [
        *["full"] * 3,
        *["state"] * 2,
        *["chunked", "mixed"],
        *["hybrid"] * 2 * versions.CAN_FAIL_REQUESTS,
    ]
)
# Of each step, and the KV group that they read, of which each lookup drops a block.
DRAFTS = st.sampled_from(
    [{}, {}, *({"num_drafts": n, "draft_group": i} for n, i in ((1, 0), (3, 0), (3, -1)))]
    if HAS_FLAGS
    else [{}]
)
PROGRAMS = st.sampled_from([None, "a", "b", "c", "d"])
STEPS = st.sampled_from([0, 1, 3, 40])
RARELY = st.integers(0, 3).map(lambda dice: dice == 3)
# What a request may bring besides its prompt and its program; then the steps that follow it.
REQUEST = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 5, 17, 33]),
        "num_steps": STEPS,
        "tool": st.sampled_from([None, None, "fast", "slow"]),
        "final": st.sampled_from([None, None, False, True]),
        "priority": st.sampled_from([0, 0, 1, 2]),
        "skips_cache": st.integers(0, 7).map(lambda dice: dice == 7),
        "stop": st.sampled_from([None, None, None, ["stop"]]),
    }
)
ADAPTERS = st.sampled_from([None, None, "one", "two", "three"])
SALTS = st.sampled_from([None, None, None, "x", "y"])
# Prefill (base, per token, pair, decode, context) and load (latency, per block) in seconds, under
# which `adaptive` pins and stores, pins without a store, stores without a pin, keeps nothing.
COSTS: dict[str, Any] = {
    "both": {"prefill": [0.01, 1e-2, 0.0, 0.0, 0.0], "load": [0.01, 1e-3]},
    "pins": {"prefill": [0.01, 1e-2, 0.0, 0.0, 0.0], "load": [9.0, 1.0]},
    "stores": {"prefill": [0.01, 1e-2, 0.0, 0.0, 0.0], "load": [0.0, 1e-9]},
    "nothing": {"prefill": [0.0, 1e-12, 0.0, 0.0, 0.0], "load": [0.0, 1.0]},
}
# Seconds that the bus seems to take for a load: nobody knows yet, some steps, longer than a test.
BUS_S = st.sampled_from([None, None, 0.05, 10.0])
SCHEDULING = st.fixed_dictionaries(
    {
        "async_scheduling": st.booleans(),
        "policy": st.sampled_from(["fcfs", "fcfs", "priority"]),
        "max_num_batched_tokens": st.sampled_from([128, 128, 512, 32]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 16, 64]),
        "long_prefill_token_threshold_adaptive": st.booleans(),
        "max_num_seqs": st.sampled_from([8, 8, 2, 1]),
        "watermark": st.sampled_from([0.0, 0.0, 0.1]),
        "max_loras": st.sampled_from([1, 2, 3]),
        "world_size": st.sampled_from([1, 1, 2]),
        "hold_transfers": st.booleans(),
        "ready_slots": st.sampled_from([None, None, 0, 5]),
    }
)
# Steps from one that may compute prompts to the next, while others decode: data-parallel ranks
# agree on that (v1/engine/core.py, throttle_prefills).
PREFILL_EVERY = st.sampled_from([1, 1, 1, 3, 16])
OURS = st.fixed_dictionaries(
    {
        "max_head_start_s": st.sampled_from([0.0, 300.0]),
        "max_pinned_fraction": st.sampled_from([0.3, 0.9]),
        "max_wait_s": st.sampled_from([0.0, 0.05, 1.0]),
        "gate_wait_s": st.sampled_from([0.0, 0.05, 30.0, "inf"]),
    }
)
# Below a DRAM of one group of full attention: None, or a disk of so many slots of so many blocks.
DISK = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"disk_slots": st.sampled_from([200, 20]), "per_slot": st.sampled_from([1, 1, 3])}
    ),
)
# How the copies of a rank end: FakeWorker's own switches.
COPIES = st.fixed_dictionaries(
    {
        "is_fast": st.booleans(),
        "cancels_late": st.booleans(),
        "saves_late": st.just(False) if versions.saves_on_empty_steps() else st.booleans(),
    }
)
