"""make_tier: what lies below VRAM on this server; only this file knows how many tiers there are."""

from __future__ import annotations

from collections.abc import Callable

from continuum_connector.observe.account import Account
from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.tiers.base import Below, NothingBelow, RankAt, Tier
from continuum_connector.scheduler.tiers.dram import DramPlan as DramPlan
from continuum_connector.scheduler.tiers.dram import DramTier
from continuum_connector.scheduler.tiers.events import EventFactory, TierEvents
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.on_disk.disk import Disk
from continuum_connector.scheduler.tiers.on_disk.reading import DiskPlan as DiskPlan
from continuum_connector.scheduler.tiers.traffic import Traffic


def make_tier(
    dram: DramPlan,
    disk: DiskPlan | None,
    groups: KvGroups,
    traffic: Traffic,
    account: Account,
    events: EventFactory | None,
    rank_at: RankAt | None,
    has_waiting: Callable[[str], bool],
) -> Tier:
    """Return host memory as planned; with `disk` what leaves it is kept there. `events` builds
    vLLM's KV events, if the server publishes any. `rank_at`: the worth of chains, None: the least
    recently used leave first. `has_waiting`: whether a turn of that program waits."""
    announced = None if events is None else TierEvents(events, groups)

    def below(index: HostIndex) -> Below:
        if disk is None:
            return NothingBelow()
        return Disk(index, disk, groups, traffic, account, announced, rank_at, has_waiting)

    return DramTier(dram, groups, traffic, account, announced, rank_at, below)
