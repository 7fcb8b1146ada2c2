"""make_tier: what lies below VRAM on this server; only this file knows how many tiers there are."""

from __future__ import annotations

from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.tiers.dram import DramPlan as DramPlan
from continuum_connector.scheduler.tiers.dram import DramTier
from continuum_connector.scheduler.tiers.events import EventFactory, TierEvents
from continuum_connector.scheduler.tiers.on_disk.disk import DiskTier
from continuum_connector.scheduler.tiers.on_disk.reading import DiskPlan as DiskPlan
from continuum_connector.scheduler.tiers.traffic import Traffic


def make_tier(
    dram: DramPlan,
    disk: DiskPlan | None,
    groups: KvGroups,
    traffic: Traffic,
    account: Account,
    events: EventFactory | None,
) -> Tier:
    """Return host memory as planned; with `disk` its overflow is kept there. `events` builds vLLM's
    KV events, if the server publishes any."""
    announced = None if events is None else TierEvents(events, groups)
    tier = DramTier(dram, groups, traffic, account, announced)
    return tier if disk is None else DiskTier(tier, disk, groups, account)
