"""Proven: which servers we serve, and the sentence for each that is left to stock vLLM.

The connector asks at start, with what vLLM built; `continuum check` asks before, with what it
could see. Both get the same answer, because it is given here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from continuum_connector.errors import ConfigError
from continuum_connector.scheduler.kv_groups import CHUNKED, FULL, STATE, WINDOW

# What the next token reads of a group, by the class of vLLM's spec. Subclasses do not count: one
# may keep its blocks in another way, such as RSWASpec, which drops blocks in the middle of a turn.
KINDS: Mapping[str, str] = {
    "FullAttentionSpec": FULL,
    "MLAAttentionSpec": FULL,
    "SlidingWindowSpec": WINDOW,
    "SlidingWindowMLASpec": WINDOW,
    "ChunkedLocalAttentionSpec": CHUNKED,
    "MambaSpec": STATE,
}
# --mamba-cache-mode: those that keep states at block boundaries, so that a turn can go on from one.
STATE_MODES = frozenset({"align", "all"})
# --kv-cache-dtype: numbers as they are, or FP8 whose scales lie beside the weights or in the block.
PLAIN_DTYPES = frozenset({"auto", "float32", "float", "bfloat16", "float16", "half"})
FP8_DTYPES = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"})
STATES = "MambaSpec"


class Server(NamedTuple):
    """What decides whether blocks may go to DRAM, on a server whose pins work.

    `kinds`: one for each KV group; `kv_cache_dtype`: --kv-cache-dtype, or what the checkpoint asks
    for instead of auto; `executor`: --distributed-executor-backend; `has_drafts`:
    --speculative-config is set; `has_lora`: --enable-lora. For layers of state, `state_mode`:
    --mamba-cache-mode; `finds_answers`: vLLM itself finds the states of answers;
    `leaves_right_states`: compat.leaves_right_states.
    """

    kinds: tuple[str, ...] = ("FullAttentionSpec",)
    fails_by_request: bool = True
    kv_cache_dtype: str = "auto"
    pipeline_parallel: int = 1
    executor: str = "mp"
    has_drafts: bool = False
    has_lora: bool = False
    state_mode: str = "align"
    finds_answers: bool = False
    leaves_right_states: bool = True


class Group(NamedTuple):
    """A KV group as vLLM's scheduler sees it. `kind`: the class of its spec, or of one layer's spec
    if layers differ only in bytes; `block_size`: tokens; `window`: tokens of a window or a chunk,
    None for neither; `mode`: when a state is kept; `is_scratch`: no hit ever reads it."""

    kind: str
    block_size: int
    window: int | None = None
    mode: str = "align"
    is_scratch: bool = False


def check_groups(groups: Sequence[Group], hash_size: int, context_parallel: int) -> None:
    """Raise a ConfigError that says what is not proven yet, unless pins can handle these groups.

    `hash_size`: tokens per block hash; `context_parallel`: ranks that share a sequence's KV.
    """
    for index, group in enumerate(groups):
        if group.kind not in KINDS:
            raise ConfigError(f"KV group {index} is {group.kind}, which is not proven yet")
        if group.is_scratch:
            raise ConfigError(
                f"KV group {index} is {group.kind} that no hit reads, which is not proven yet"
            )
        if KINDS[group.kind] == STATE and group.mode not in STATE_MODES:
            raise ConfigError(f"states with mamba_cache_mode {group.mode} are not proven yet")
    if not groups:
        raise ConfigError("the model has no KV cache")
    sizes = sorted({group.block_size for group in groups})
    if any(size % hash_size for size in sizes):
        raise ConfigError(f"block sizes {sizes} with hashes of {hash_size} are not proven yet")
    if context_parallel > 1:
        raise ConfigError("decode context parallelism is not proven yet")


def why_aside(has_prefix_caching: bool, unproven: str, runner: str = "generate") -> str:
    """Say in one sentence why this server cannot use us, or return "".

    `unproven`: what `check_groups` said of its KV groups, "" if nothing. `runner`: --runner, or
    what vLLM chose for the model.
    """
    if runner == "pooling":
        return "the runner is pooling, whose requests have no turns after them to keep KV for"
    if not has_prefix_caching:
        return (
            "prefix caching is off, so a kept block could never be found again; "
            "serve with --enable-prefix-caching"
        )
    if unproven:
        return f"{unproven}, so turns of this model are served as stock vLLM serves them"
    return ""


def why_no_tier(server: Server) -> str:
    """Say why pins work and the DRAM tier cannot, or return ""."""
    if server.kv_cache_dtype not in PLAIN_DTYPES | FP8_DTYPES:
        return (
            f"no DRAM tier with --kv-cache-dtype {server.kv_cache_dtype}: where its scales lie is "
            "not proven yet"
        )
    if server.pipeline_parallel > 1 and server.executor != "mp":
        return (
            f"no DRAM tier with pipeline parallelism over the executor `{server.executor}`, which "
            "may keep what the first stages report; --distributed-executor-backend mp passes it on"
        )
    if len(server.kinds) > 1 and not server.fails_by_request:
        return (
            "no DRAM tier for hybrid KV groups on this vLLM, which cannot "
            "recompute a failed load there; vLLM 0.30 can"
        )
    if STATES in server.kinds and server.has_drafts:
        return _why_no_drafted_states(server)
    return ""


def _why_no_drafted_states(server: Server) -> str:
    """Say why drafts may leave wrong states, which DRAM would keep, or return ""."""
    if not server.leaves_right_states:
        return (
            "no DRAM tier for layers of state with speculative decoding on this vLLM, which may "
            "leave wrong states there; vLLM 0.32 with its model runner V2 leaves right ones"
        )
    if server.state_mode != "align":
        return (
            f"no DRAM tier for --mamba-cache-mode {server.state_mode} with speculative decoding: "
            "not proven yet"
        )
    if server.finds_answers:
        return (
            "no DRAM tier for layers of state with speculative decoding and a "
            "--prefix-cache-retention-interval, with which vLLM finds states that were left amid "
            "drafts: not proven yet"
        )
    return ""


def why_no_disk(server: Server) -> str:
    """Say why a server that has a DRAM tier cannot have a disk below it, or return ""."""
    if [KINDS.get(kind) for kind in server.kinds] != [FULL]:
        return (
            "no disk tier for KV groups with windows, chunks or states, of which a hit needs more "
            "than the blocks of a chain: not proven yet"
        )
    if server.has_drafts:
        return "no disk tier with speculative decoding: not proven yet"
    if server.has_lora:
        return (
            "no disk tier with --enable-lora: an adapter that is trained again under its old name "
            "would find the KV of before"
        )
    if server.pipeline_parallel > 1:
        return "no disk tier with pipeline parallelism: not proven yet"
    return ""


def why_not_attached(own_scheduler: str) -> str:
    """Say that --scheduler-cls names `own_scheduler`, which is not ours, or return ""."""
    return own_scheduler and (
        f"--scheduler-cls {own_scheduler} is not ours, so turns are served as stock vLLM serves "
        "them; leave --scheduler-cls out"
    )


def why_replaced(offloading_gib: float | None) -> str:
    """Say what it means that the command line also sets --kv-offloading-size; "" if it does not.

    vLLM then puts its own connector in the place of the one that --kv-transfer-config names.
    """
    if offloading_gib is None:
        return ""
    return (
        f"--kv-offloading-size {offloading_gib:g} makes vLLM's own offloading take the place of "
        "ContinuumConnector, so nothing of ours would run; leave it out (the DRAM tier is "
        f"CONTINUUM_DRAM_BYTES={offloading_gib:g}GiB), or leave --kv-transfer-config out"
    )
