"""Build: puts the two halves together from vLLM's configs. Runs once, at start."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from continuum_connector import memory
from continuum_connector.config import FIRST_BYTES, ContinuumConfig, load_config
from continuum_connector.costs import Costs
from continuum_connector.errors import ConfigError
from continuum_connector.forecast import Gaps
from continuum_connector.memory import size
from continuum_connector.observe.account import Account
from continuum_connector.observe.trace import open_trace
from continuum_connector.policy.baselines import make_policy
from continuum_connector.policy.hinted import Hinted
from continuum_connector.scheduler.decisions import Decider
from continuum_connector.scheduler.holds import HoldTable, num_usable
from continuum_connector.scheduler.kv_groups import KvGroups
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.scheduler import SchedulerSide
from continuum_connector.scheduler.tiers.base import (
    Below,
    NothingBelow,
    RankAt,
    Tier,
    TierEvents,
)
from continuum_connector.scheduler.tiers.disk import Disk
from continuum_connector.scheduler.tiers.disk_reading import DiskPlan
from continuum_connector.scheduler.tiers.dram import DramPlan, DramTier
from continuum_connector.scheduler.tiers.index import HostIndex
from continuum_connector.scheduler.tiers.traffic import Traffic
from continuum_connector.scheduler.turns import Away
from continuum_connector.scheduler.waker import Waker
from continuum_connector.toolcalls import ToolReader
from continuum_connector.vllm import compat, coordinator, facts, proven, resets, served, touched
from continuum_connector.vllm.touched import Part
from continuum_connector.worker.disk import DiskPlace, WorkerDisk, blocks_per_slot
from continuum_connector.worker.layout import padded
from continuum_connector.worker.tier import num_slots_for
from continuum_connector.worker.worker import ContinuumWorker, current_stream

logger = logging.getLogger(f"vllm.{__name__}")

SWITCHED_OFF = (
    "ContinuumConnector is switched off by switch_path: every pin has ended, no block is kept in "
    "DRAM, turns wait in vLLM's own order; the DRAM itself is given back when the server stops"
)
NO_RULE = (
    "ContinuumConnector cannot ask this vLLM which blocks a turn will hit, so pins of models with "
    "windows or states may keep blocks that nobody finds; vLLM 0.33 can be asked"
)
NO_LOOKUP = (
    "no DRAM tier for hybrid KV groups on this vLLM, which cannot be asked what a load could "
    "bring; vLLM 0.33 can be"
)
NEVER_BOUND = (
    "{} has bound no block pool to it (bind_kv_cache_manager, bind_gpu_block_pool), so turns are "
    "served as stock vLLM serves them"
)
NOT_ATTACHED = (
    "our plugin did not attach it to the scheduler, so turns are served as stock vLLM serves them; "
    "let VLLM_PLUGINS load `continuum`"
)
SWITCHED_ON = "ContinuumConnector is switched on again by switch_path; it begins with nothing kept"


def reason_to_step_aside(vllm_config: Any, kv_cache_config: Any) -> str:
    """Say in one sentence why this server cannot use us, or return ""."""
    if why := proven.why_not_attached(served.own_scheduler(vllm_config)):
        return why
    unproven = ""
    try:
        served.read_groups(vllm_config, kv_cache_config)
    except ConfigError as error:
        unproven = str(error)
    runner = getattr(vllm_config.model_config, "runner_type", "generate")
    return proven.why_aside(vllm_config.cache_config.enable_prefix_caching, unproven, runner)


def resolve_config(vllm_config: Any, kv_cache_config: Any) -> tuple[ContinuumConfig, str]:
    """Return our config, and why this server cannot use us ("" if it can). The config leaves out
    what needs names that this vLLM lacks, and has a size of DRAM if the user gave none."""
    if why_aside := touched.why_aside(*served.features(vllm_config, kv_cache_config)):
        return ContinuumConfig(), why_aside  # what else is there may not be as we know it
    config = load_config(compat.our_extra_config(vllm_config.kv_transfer_config))
    if why_aside := reason_to_step_aside(vllm_config, kv_cache_config):
        return config, why_aside
    if touched.is_off(Part.ORDER):
        config = msgspec.structs.replace(config, max_head_start_s=0.0)
    if touched.is_off(Part.TIER):
        config = msgspec.structs.replace(config, dram_bytes=0)
    if touched.is_off(Part.TIER) or touched.is_off(Part.DISK):
        config = msgspec.structs.replace(config, disk_path="")
    return with_default_dram(config, vllm_config, kv_cache_config), ""


def scheduler_side(
    config: ContinuumConfig,
    vllm_config: Any,
    kv_cache_config: Any,
    cache: tuple[Any, Any],
    account: Account,
    costs: Costs,
    wake: Callable[[], None] | None,
) -> SchedulerSide:
    """Build the scheduler half around vLLM's block pool and its coordinator, `cache`."""
    pool, found = cache
    groups = _groups(vllm_config, kv_cache_config, pool, found)
    world_size = vllm_config.parallel_config.world_size
    node_ranks = served.num_node_ranks(vllm_config)
    slot_bytes = _host_slot_bytes(config, kv_cache_config)
    seen = served.server(vllm_config, kv_cache_config)
    # What is asked for, also where there can be no tier: an alert compares it with `tier_up`.
    asked = num_slots_for(config.dram_bytes or 0, node_ranks, slot_bytes)
    account.gauge("dram_wanted_blocks", asked)
    num_slots = num_host_slots(config, seen, groups, node_ranks, slot_bytes)
    traffic = Traffic(world_size, HoldTable(pool), account, config.disk_timeout_s)
    account.gauge("disk_wanted_bytes", config.disk_bytes)
    dram = DramPlan(num_slots, slot_bytes * world_size, config.dram_bytes is None)
    disk = _disk_plan(config, seen, num_slots, slot_bytes, (world_size, node_ranks), costs)
    reader = ToolReader(
        functools.partial(compat.load_tokenizer, vllm_config),
        time.perf_counter,
        lambda why: account.count("unread_turns", 1, why),
    )
    sizes = {"vram_blocks": num_usable(pool), "dram_blocks": num_slots}
    trace = _trace(config, vllm_config, groups.scheduler_size, dram.block_bytes, **sizes)
    decider = _decider(config, vllm_config, costs, slot_bytes, reader)
    return SchedulerSide(
        config,
        decider=decider,
        pool=pool,
        groups=groups,
        traffic=traffic,
        make_tier=functools.partial(
            make_tier, dram, disk, groups, traffic, account, _tier_events(vllm_config)
        ),
        records=Records(account, trace, decider.away),
        stock=coordinator.stock_beside(pool, found, groups),
        waker=Waker(wake),
        reader=reader,
        max_loras=vllm_config.lora_config.max_loras if vllm_config.lora_config else 0,
        max_running=compat.max_running(vllm_config),
        is_vram_empty=functools.partial(resets.is_empty, pool),
        pop_blocks=coordinator.popper(found, groups) if served.is_alone(vllm_config) else None,
    )


def make_tier(
    dram: DramPlan,
    disk: DiskPlan | None,
    groups: KvGroups,
    traffic: Traffic,
    account: Account,
    events: compat.KvEventFactory | None,
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


def _groups(vllm_config: Any, kv_cache_config: Any, pool: Any, found: Any) -> KvGroups:
    if why := touched.why_less():
        logger.warning("ContinuumConnector: %s", why)
    groups = served.read_groups(vllm_config, kv_cache_config)
    if found is None or touched.is_off(Part.HYBRIDS):  # and then this server has none
        if not groups.are_simple:
            logger.warning(NO_RULE)
        return groups
    rule = coordinator.HitRule(found, pool)
    if groups.are_simple and not rule.num_proof_tokens:
        return groups
    own = None if groups.are_simple else rule
    return groups.asking(own, coordinator.Shadow(found, pool), rule.num_proof_tokens)


def _decider(
    config: ContinuumConfig,
    vllm_config: Any,
    costs: Costs,
    block_bytes: int,
    reader: ToolReader,
) -> Decider:
    costs.assume(block_bytes=block_bytes, prefill=served.prefill(vllm_config))
    gaps = Gaps()
    policy = make_policy(config.policy, config.ttl_s, config.max_ttl_s)
    return Decider(
        Hinted(policy, config.max_ttl_s),
        gaps,
        Away(gaps, config.max_programs),
        costs,
        reader,
    )


def _trace(
    config: ContinuumConfig, vllm_config: Any, block_size: int, block_bytes: int, **world: int
) -> Any:
    """Open the trace; its first record describes the server that the others come from.

    `block_size`: tokens; `block_bytes`: on all ranks.
    """
    trace = open_trace(config)
    engine = vllm_config.parallel_config.data_parallel_index
    world |= {"block_size": block_size, "block_bytes": block_bytes}
    trace.record("start", time.monotonic(), policy=config.policy, engine=engine, **world)
    return trace


def _tier_events(vllm_config: Any) -> compat.KvEventFactory | None:
    """KV events for DRAM blocks, where the server publishes KV events at all."""
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events or touched.is_off(Part.EVENTS):
        return None
    return compat.KvEventFactory()


def _disk_plan(
    config: ContinuumConfig,
    seen: proven.Server,
    num_slots: int,
    slot_bytes: int,
    ranks: tuple[int, int],  # of this engine; of all that share the node's disk
    costs: Costs,
) -> DiskPlan | None:
    """The plan for a disk below DRAM; None if there is to be no disk, and the log says why."""
    if not config.disk_path or not num_slots:
        return None
    if why := proven.why_no_disk(seen):
        logger.warning("ContinuumConnector: %s", why)
        return None
    budget = config.disk_bytes if config.disk_write_budget is None else config.disk_write_budget
    return DiskPlan(
        slot_blocks=blocks_per_slot(config, ranks[1], slot_bytes),
        block_bytes=slot_bytes,
        timeout_s=config.disk_timeout_s,
        write_budget=-(-budget * ranks[0] // ranks[1]),  # rounded up: 0 would be no bound
        costs=costs,
    )


# --- how many slots a rank has for blocks in DRAM, how large they are, the line about it ----
def with_default_dram(
    config: ContinuumConfig, vllm_config: Any, kv_cache_config: Any
) -> ContinuumConfig:
    """The config with the size of a DRAM tier that nobody gave one. Every half and engine of a node
    gets the same. While vLLM sleeps, the tier gives its memory back, because a copy of the weights
    needs some (device_allocator/cumem.py)."""
    if config.dram_bytes is not None:
        return config
    kv_bytes = served.bytes_per_block(kv_cache_config) * kv_cache_config.num_blocks
    node_ranks = served.num_node_ranks(vllm_config)
    platform = served.platform()
    if why := proven.why_no_tier(served.server(vllm_config, kv_cache_config)):
        taken = memory.Taken(0, why)
    elif platform not in ("cuda", "cpu"):
        taken = memory.Taken(0, f"the copy engine does not know the platform `{platform}`")
    else:
        spare = served.spare(vllm_config)
        taken = memory.take(spare, kv_bytes * node_ranks, on_cpu=platform == "cpu")
    if not num_slots_for(taken.num_bytes, node_ranks, _host_slot_bytes(config, kv_cache_config)):
        taken = taken._replace(num_bytes=0)
    # Chains of windows and states are stored whole or not at all. One that finds no room is never
    # ordered, so the pool would not hear that more is wanted.
    if taken.num_bytes and not served.read_groups(vllm_config, kv_cache_config).are_simple:
        taken = taken._replace(num_left=0)
    sleeps = vllm_config.model_config.enable_sleep_mode
    sleep_dram = "release" if sleeps else config.sleep_dram
    return msgspec.structs.replace(config, dram=taken, sleep_dram=sleep_dram)


def _host_slot_bytes(config: ContinuumConfig, kv_cache_config: Any) -> int:
    """The size of one rank's host slots, as the worker half lays them out (Layout.padded)."""
    num_bytes = served.bytes_per_block(kv_cache_config)
    return padded(num_bytes) if config.disk_path else num_bytes


def num_host_slots(
    config: ContinuumConfig,
    seen: proven.Server,
    groups: KvGroups,
    node_ranks: int,
    num_bytes: int,
) -> int:
    """The number of one rank's host slots; 0 without a tier, and the log says why."""
    if config.tier_bytes == 0:
        why = config.dram.why if config.dram else "dram_bytes = 0"
        logger.info("ContinuumConnector: no DRAM tier (%s); %s", why, memory.SETS)
        return 0
    why = proven.why_no_tier(seen)
    if not why and not groups.are_simple and groups.lookup is None:
        why = NO_LOOKUP
    if why:
        is_asked = config.dram_bytes is not None
        logger.log(logging.WARNING if is_asked else logging.INFO, "ContinuumConnector: %s", why)
        return 0
    number = num_slots_for(config.tier_bytes, node_ranks, num_bytes)
    if number == 0:
        raise ConfigError(
            f"dram_bytes = {config.tier_bytes} over {node_ranks} ranks holds no block "
            f"({num_bytes} bytes each), so nothing could be offloaded; "
            f"set {num_bytes * node_ranks} or more, or 0"
        )
    told = size(config.tier_bytes)
    if config.dram:
        told = f"up to {told}, by default {config.dram.why}; {memory.SETS}"
    logger.info(
        "ContinuumConnector: DRAM tier of %d blocks of %d KiB on each of %d ranks, %s",
        number,
        num_bytes // 1024,
        node_ranks,
        told,
    )
    return number


# --- worker half ------------------------------------------------------------------------
def worker(config: ContinuumConfig, vllm_config: Any) -> ContinuumWorker:
    """Build the worker half; its engine comes with the KV caches."""
    node_ranks = served.num_node_ranks(vllm_config)

    def make_engine(layout: Any, num_slots: int) -> Any:
        from continuum_connector.worker.native import NativeEngine, Tuning

        driver = "cuda" if layout.device == "cuda" else "sim"  # each refuses the other's memory
        tuning = Tuning(
            numa=config.numa,
            first_bytes=max(FIRST_BYTES, layout.slot_bytes),
            checksum_every=config.checksum_every,
            num_left=config.dram.num_left * node_ranks if config.dram else 0,
        )
        engine = NativeEngine(driver, layout, num_slots, tuning)
        # If a driver or device lacks one, the others are used, so nothing else would show it.
        logger.info("blocks are copied over %s by %s", driver, ", ".join(engine.paths))
        return engine

    return ContinuumWorker(
        make_engine,
        config,
        node_ranks,
        current_stream,
        served.rank(vllm_config),
        time.monotonic,
    )


def disk(config: ContinuumConfig, vllm_config: Any, kv_cache_config: Any) -> WorkerDisk | None:
    """This rank's part of the disk; None without a disk tier, and the scheduler half says why."""
    if not config.disk_path or proven.why_no_disk(served.server(vllm_config, kv_cache_config)):
        return None
    node_ranks = served.num_node_ranks(vllm_config)
    engine = int(vllm_config.parallel_config.data_parallel_index)
    place = DiskPlace(engine, served.rank(vllm_config), node_ranks)
    prove = facts.prover(
        lambda: facts.facts(vllm_config),
        lambda: facts.checkpoint(vllm_config),
        config.disk_path,
    )
    return WorkerDisk(config, place, prove, time.monotonic, time.time)
