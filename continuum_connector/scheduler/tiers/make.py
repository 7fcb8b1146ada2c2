"""make_tier: what lies below VRAM on this server; only this file knows how many tiers there are."""

from __future__ import annotations

from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.tiers.disk import DiskTier
from continuum_connector.scheduler.tiers.dram import DramTier
from continuum_connector.scheduler.tiers.events import EventFactory, TierEvents
from continuum_connector.scheduler.tiers.reading import DiskPlan
from continuum_connector.scheduler.tiers.traffic import Traffic


def make_tier(
    num_slots: int,
    slot_bytes: int,
    groups: KvGroups,
    traffic: Traffic,
    account: Account,
    events: EventFactory | None,
    disk: DiskPlan | None = None,
    keep_epochs: int = 0,
) -> Tier:
    """Return host memory of `num_slots` blocks, 0 for none, each of `slot_bytes` on all ranks; with
    `disk` its overflow is kept there.

    `events` builds vLLM's KV events, if the server publishes any. `keep_epochs`: how many epochs
    that have a name are kept in DRAM while others serve.
    """
    announced = None if events is None else TierEvents(events, groups)
    dram = DramTier(num_slots, slot_bytes, groups, traffic, account, announced)
    past = dram.index.past
    past.most_kept = keep_epochs
    return dram if disk is None else DiskTier(dram, disk, groups, account)
