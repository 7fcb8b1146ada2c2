"""Chains of made-up blocks, and what a HostIndex keeps of them."""

from __future__ import annotations

from collections.abc import Sequence

from continuum_connector.scheduler.kv_groups import Key, block_key
from continuum_connector.scheduler.tiers.eviction import Rank
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import Tickets, numbers_of

NOW = 1000.0


def keys(name: str, end: int, start: int = 0, group: int = 0) -> list[Key]:
    """Return the keys of a chain's blocks."""
    return [block_key(f"{name}{i}".encode(), group) for i in range(start, end)]


def store(
    index: HostIndex,
    program: str,
    chain: Sequence[Key],
    now: float = NOW,
    rank: Rank | None = None,
    supersedes: bool = True,
) -> Tickets:
    """Store what is not there yet, at once."""
    slots = index.reserve(chain, program, now, rank, supersedes, range(len(chain)))
    index.settle(slots, stored=True)
    index.check()
    return slots


def ready(index: HostIndex, chain: Sequence[Key]) -> int:
    """Return how many blocks of the chain can be found, and that they are its head."""
    found = [index.is_ready(key) for key in chain]
    assert found == sorted(found, reverse=True)
    return sum(found)


def numbers(tickets: Tickets) -> list[int]:
    return list(numbers_of(tickets).tolist())
