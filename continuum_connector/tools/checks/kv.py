"""KV: the cache that vLLM would make, in bytes and in words."""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector.scheduler.kv_groups import FULL, STATE
from continuum_connector.tools.checks.line import several
from continuum_connector.tools.checks.machine import Kv
from continuum_connector.vllm.proven import KINDS

_LARGEST_UNIT = 64
_WORDS = {
    "FullAttentionSpec": "full attention",
    "MLAAttentionSpec": "latent attention (MLA)",
    "MambaSpec": "states",
}


def token_bytes(kv: Kv) -> float:
    """What one more token takes, over all ranks, in groups that keep all tokens."""
    return sum(kv.block_bytes / size for size in _sizes(kv, FULL))


def state_bytes(kv: Kv) -> int:
    """What the states take at one point of a context."""
    return kv.block_bytes * sum(1 for _ in _sizes(kv, STATE))


def state_block(kv: Kv) -> int:
    """Tokens between two states that are kept; 0 without states."""
    return max(_sizes(kv, STATE), default=0)


def context_bytes(kv: Kv, num_tokens: int) -> int:
    """What the next turn needs of a context: whole blocks, as a tier keeps them. Of a window or a
    chunk as many as it reaches, of states one."""
    return kv.block_bytes * sum(_blocks(kv, num_tokens))


def new_bytes(kv: Kv, num_tokens: int) -> float:
    """What a turn of so many tokens adds, and the states after it."""
    grown = sum(kv.block_bytes * num_tokens / size for kind, size, _ in _kinds(kv) if kind != STATE)
    return grown + state_bytes(kv)


def match_unit(size: int) -> int:
    """The largest --prefix-match-unit for blocks of this size: a power of two that divides it."""
    return min(_LARGEST_UNIT, size & -size)


def in_words(kv: Kv) -> str:
    """ "36 layers of full attention, 12 layers with a window of 128"."""
    return ", ".join(_layers(*each) for each in kv.layers)


def _layers(kind: str, reach: int | None, number: int) -> str:
    if "Chunked" in kind:
        return f"{several('layer', number)} in chunks of {reach or 0:,}"
    if reach:
        return f"{several('layer', number)} with a window of {reach:,}"
    return f"{several('layer', number)} of {_WORDS.get(kind, kind)}"


def _kinds(kv: Kv) -> Iterator[tuple[str, int, int | None]]:
    for kind, size, reach in kv.groups:
        yield KINDS.get(kind, kind), size, reach


def _sizes(kv: Kv, wanted: str) -> Iterator[int]:
    return (size for kind, size, _ in _kinds(kv) if kind == wanted)


def _blocks(kv: Kv, num_tokens: int) -> Iterator[int]:
    for kind, size, reach in _kinds(kv):
        if kind == STATE:
            yield 1
        else:
            kept = min(num_tokens, reach or num_tokens)
            yield -(-kept // size)
