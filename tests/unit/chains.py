"""Chains of made-up blocks, and what a HostIndex keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from continuum_connector.scheduler.kv_groups import Key, block_key
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Rank, Tickets, numbers_of
from tests.proofs import prove_dram

NOW = 1000.0
Worth = Callable[[str], float]  # of a program


def request_of(hashes: Sequence[bytes]) -> Any:
    """A turn's request of which only the hashes of its blocks are known."""
    nothing = {"num_prompt_tokens": 0, "prompt_token_ids": None, "output_token_ids": ()}
    return SimpleNamespace(block_hashes=hashes, **nothing)


def keys(name: str, end: int, start: int = 0, group: int = 0) -> list[Key]:
    """Return the keys of a chain's blocks."""
    return [block_key(f"{name}{i}".encode(), group) for i in range(start, end)]


def by_program(worth: Worth | None) -> Rank | None:
    """All chains of a program are worth the same, whenever they were used."""
    return None if worth is None else lambda program, _last_used: worth(program)


def touch(index: HostIndex, program: str, now: float) -> None:
    """A turn uses all that the program has."""
    index.order.use(index.order.current(program), now)


def demote(index: HostIndex, program: str) -> None:
    """Nobody will continue what the program has."""
    index.order.demote(index.order.current(program))


def store(
    index: HostIndex,
    program: str,
    chain: Sequence[Key],
    now: float = NOW,
    rank: Worth | None = None,
    num_prompt: int = 0,
) -> Tickets:
    """Store what is not there yet, at once."""
    ends = range(1, len(chain) + 1)
    slots = index.reserve(chain, program, now, by_program(rank), num_prompt, ends)
    index.settle(slots, stored=True)
    prove_dram(index)
    return slots


def ready(index: HostIndex, chain: Sequence[Key]) -> int:
    """Return how many blocks of the chain can be found, and that they are its head."""
    found = [index.is_ready(key) for key in chain]
    assert found == sorted(found, reverse=True)
    return sum(found)


def numbers(tickets: Tickets) -> list[int]:
    return list(numbers_of(tickets).tolist())
