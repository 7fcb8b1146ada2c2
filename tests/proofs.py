"""What must hold of holds and of slots whatever has happened to them. O(blocks)."""

from __future__ import annotations

from collections import Counter

import numpy as np

from continuum_connector.scheduler.holds import HoldTable
from continuum_connector.scheduler.kv_groups import Numbers
from continuum_connector.scheduler.tiers.chains import SlotClaims
from continuum_connector.scheduler.tiers.disk_index import Claims, DiskIndex, _State
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.slots import FreeSlots, numbers_of

NONE: Numbers = np.empty(0, np.int64)


def prove_holds(table: HoldTable) -> None:
    """The pool knows of the blocks we hold."""
    refs = table._refs
    assert (refs >= 0).all(), f"negative references on blocks {np.where(refs < 0)[0]}"
    held = np.nonzero(refs)[0].tolist()
    for block_id in held:
        assert table._pool.blocks[block_id].ref_cnt, f"block {block_id} is free, and we hold it"
    assert table.num_blocks == len(held)


def prove_dram(index: HostIndex) -> None:
    """Every slot is in exactly one state and claimed."""
    table, found = index._table, index._numbers
    used = np.fromiter(found.values(), np.int64, len(found))
    assert index.num_ready == np.count_nonzero(~table.is_writing[used])
    in_use = index.num_ready + index.num_writing + num_orphans_read(index)
    assert index.num_free + in_use == index.num_slots
    free = _free(index._free)
    past = np.array([n for old in index.past._tables for n in old.values()], np.int64)
    numbers = np.concatenate([used, free, past])
    assert len(set(numbers.tolist())) == len(numbers), "both free and used, or used twice"
    assert table.keys[used].tolist() == list(found), "another key than the one it is found by"
    idle = np.concatenate([free, past])
    assert not (table.is_writing[idle] | (table.num_readers[idle] > 0)).any(), "free, and busy"
    _prove_chains(index._claims, used, past)


def num_orphans_read(index: HostIndex) -> int:
    """How many slots were forgotten while they were read, and are read still."""
    is_read = (index._table.num_readers > 0).nonzero()[0]
    return sum(key is None for key in index._table.keys[is_read].tolist())


def _prove_chains(claims: SlotClaims, used: Numbers, past: Numbers) -> None:
    """Used slots are claimed as often as counted; `past`: slots that no longer are."""
    table, chains = claims._table, list(claims.order)
    claimed = np.concatenate([NONE, *(chain.tickets for chain in chains)])
    counts = np.zeros(len(table.tickets), np.int64)
    np.add.at(counts, numbers_of(claimed[table.are_there(claimed)]), 1)
    counts[past] = table.num_chains[past]
    assert (table.num_chains == counts).all()
    assert counts[used].all()
    assert max(Counter(chains).values(), default=1) == 1, "a chain is in two queues"
    assert all(len(chain.tickets) for chain in chains), "without slots, and still to be evicted"
    assert claims._num_claims == len(claimed)


def prove_disk(index: DiskIndex) -> None:
    """Every slot is in exactly one state, and stands on one shelf if it holds anything."""
    found, free = index._numbers, _free(index._free)
    used = np.fromiter(found.values(), np.int64, len(found))
    states = {state: int(np.count_nonzero(index._states == state)) for state in _State}
    states[_State.READY] -= index.past.num
    assert states[_State.FREE] == len(free) == len(set(free.tolist()))
    assert (states[_State.READY], states[_State.BAD]) == (index.num_ready, index.num_bad)
    assert states[_State.READY] + states[_State.WRITING] == len(used)
    assert index._keys[used].tolist() == list(found), "another key than the one it is found by"
    standing = [index.shelves.standing(shelf) for shelf in index.shelves.to_leave()]
    there = np.concatenate([NONE, *standing])
    assert sorted(there.tolist()) == sorted(used.tolist()), "on no shelf, or on two"
    prove_claims(index.shelves.claims)


def prove_claims(claims: Claims) -> None:
    """The counts are those of the claims."""
    all_of_them = [claim for chains in claims.of.values() for claim in chains]
    held = [slots[claims._content[slots] == content] for slots, content in all_of_them]
    counts = np.bincount(np.concatenate([NONE, *held]), minlength=len(claims.num_of))
    assert (counts == claims.num_of).all()
    assert claims._num_entries == sum(len(slots) for slots, _ in all_of_them)


def _free(slots: FreeSlots) -> Numbers:
    """All free slots, with those that are away."""
    return np.concatenate([slots.away, slots._numbers[: slots.num]])
