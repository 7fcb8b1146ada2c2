"""Keys of other KV connectors, and what to write here instead.

Whoever moves from one of them to ours pastes its config. Sources: vLLM 0.33
(simple_cpu_offload_connector.py, v1/offloading/, v1/kv_offload/) and LMCache 0.5.6 (v1/config.py).
"""

from __future__ import annotations

_OFFLOADING = "vLLM's own offloading"
_LMCACHE = "LMCache"
_ALL_RANKS = "bytes per node, for all its ranks and engines together"
_POLICY = "leave it out; here `policy` decides what is stored and what leaves first"
_NOT_HERE = "leave it out; there is no such choice here"
_BEHIND = "leave it out, or put that connector behind ours in a MultiConnector"

OF_OFFLOADING = {
    "cpu_bytes_to_use": f"set `dram_bytes` ({_ALL_RANKS})",
    "cpu_bytes_to_use_per_rank": f"set `dram_bytes` ({_ALL_RANKS}: this times the ranks)",
    "num_cpu_blocks": f"set `dram_bytes` ({_ALL_RANKS})",
    "disk_capacity_bytes": f"set `disk_bytes` ({_ALL_RANKS}) beside `disk_path`",
    "kv_offload_backend": "leave it out; `disk_path` and `disk_bytes` add a disk below DRAM",
    "secondary_tiers": "set `disk_path` and `disk_bytes` for a local drive; for anything remote, "
    "put that connector behind ours in a MultiConnector",
    "block_size": "leave it out; here a block is vLLM's own (`--block-size`)",
    **dict.fromkeys(("eviction_policy", "store_threshold", "lazy_offload"), _POLICY),
    **dict.fromkeys(("offload_prompt_only", "max_tracker_size"), _POLICY),
    **dict.fromkeys(("cache_policy_module_path", "spec_name", "spec_module_path"), _NOT_HERE),
    **dict.fromkeys(("blocks_per_chunk", "canonical_layout", "disk_buffer_slots"), _NOT_HERE),
    **dict.fromkeys(("use_page_cache", "self_describing_kv_events"), _NOT_HERE),
    **dict.fromkeys(("backpressure", "tier_poll_interval_s", "enable_telemetry"), _NOT_HERE),
    "sync_load_budget_bytes": _NOT_HERE,
}
OF_LMCACHE = {
    "max_local_cpu_size": f"set `dram_bytes` ({_ALL_RANKS}; LMCache counts in GiB)",
    "local_disk": "set `disk_path`",
    "max_local_disk_size": f"set `disk_bytes` ({_ALL_RANKS}; LMCache counts in GiB)",
    "chunk_size": "leave it out; here a block is vLLM's own (`--block-size`)",
}


def instead_of(key: str) -> str:
    """Say whose key this is, what follows, and what to write; "" if we know nobody who has it.

    It continues a sentence that begins with the key.
    """
    if key == "connectors":
        return (
            "is one of MultiConnector, so the connectors in it would not run; "
            "write MultiConnector as kv_connector, with ours as the first in its list"
        )
    owner, cure = _OFFLOADING, OF_OFFLOADING.get(key)
    if key.startswith("lmcache."):
        owner, cure = _LMCACHE, OF_LMCACHE.get(key.removeprefix("lmcache."), _BEHIND)
    return f"is one of {owner}, so it would have no effect here; {cure}" if cure else ""
