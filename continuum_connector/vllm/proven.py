"""Proven: which servers we serve, and the sentence for each that is left to stock vLLM.

The connector asks at start, with what vLLM built; `continuum check` asks before, with what it
could see. Both get the same answer, because it is given here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import ConfigError

NO_UNATTACHED_TIER = (
    "ContinuumConnector: no DRAM tier under the priority policy of this vLLM, whose own scheduler "
    "can wait for ever between a turn that has loaded and one that comes before it; upgrade to "
    "vLLM 0.32, or let ContinuumConnector attach to the scheduler"
)

# Classes of vLLM's specs, and no subclass of them: one may keep its blocks in another way, as
# RSWASpec does, which drops blocks amid a turn.
KINDS = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"})
# --kv-cache-dtype: numbers as they are, or FP8 whose scales lie beside the weights or in the block.
PLAIN_DTYPES = frozenset({"auto", "float32", "float", "bfloat16", "float16", "half"})
FP8_DTYPES = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"})


class Group(NamedTuple):
    """A KV group as vLLM's scheduler sees it. `kind`: the class of its spec, of one layer's where
    layers differ in bytes alone; `block_size`: tokens; `window`: tokens that stay, None for all."""

    kind: str
    block_size: int
    window: int | None = None


def check_groups(groups: Sequence[Group], hash_size: int, context_parallel: int) -> None:
    """ConfigError, with what is not proven yet, unless the DRAM tier and pins know these groups.

    `hash_size`: tokens per block hash; `context_parallel`: ranks that share a sequence's KV.
    """
    for index, group in enumerate(groups):
        if group.kind not in KINDS:
            raise ConfigError(f"KV group {index} is {group.kind}, which is not proven yet")
    if not groups:
        raise ConfigError("the model has no KV cache")
    sizes = {group.block_size for group in groups}
    if sizes != {hash_size}:
        raise ConfigError(
            f"block sizes {sorted(sizes)} with hashes of {hash_size} are not proven yet"
        )
    if context_parallel > 1:
        raise ConfigError("decode context parallelism is not proven yet")


def why_aside(has_prefix_caching: bool, unproven: str) -> str:
    """Say in one sentence why this server cannot use us, or return "".

    `unproven`: what `check_groups` said of its KV groups, "" if nothing.
    """
    if not has_prefix_caching:
        return (
            "prefix caching is off, so a kept block could never be found again; "
            "serve with --enable-prefix-caching"
        )
    if unproven:
        return f"{unproven}, so turns of this model are served as stock vLLM serves them"
    return ""


def why_no_tier(
    pipeline_parallel: int, num_groups: int, can_fail_by_request: bool, kv_cache_dtype: str
) -> str:
    """Say why pins work and the DRAM tier cannot, or return "".

    `kv_cache_dtype`: --kv-cache-dtype, or what the checkpoint asks for instead of auto.
    """
    if kv_cache_dtype not in PLAIN_DTYPES | FP8_DTYPES:
        return (
            f"no DRAM tier with --kv-cache-dtype {kv_cache_dtype}: where its scales lie is not "
            "proven yet"
        )
    if pipeline_parallel > 1:
        return "no DRAM tier with pipeline parallelism, not proven yet"
    if num_groups > 1 and not can_fail_by_request:
        return (
            "no DRAM tier for hybrid KV groups on this vLLM, which cannot "
            "recompute a failed load there; vLLM 0.30 can"
        )
    return ""


def why_unattached(config: ContinuumConfig, named: object) -> str:
    """Say what it means that vLLM's scheduler is not our subclass, and how it would be.

    `named`: what --scheduler-cls names, None if nothing.
    """
    why, cure = "the plugin did not attach it", "let VLLM_PLUGINS load `continuum`"
    if not config.scheduler:
        why, cure = "scheduler = 0", "set scheduler = 1"
    elif named is not None:
        why, cure = f"--scheduler-cls {named}", "leave --scheduler-cls out"
    return (
        f"ContinuumConnector is not attached to the scheduler ({why}): turns wait in vLLM's own "
        "order, pins give way through the connector API only, and /reset_prefix_cache fails "
        f"while a pin lives; {cure} to change that"
    )
