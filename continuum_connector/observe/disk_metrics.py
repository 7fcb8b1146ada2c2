"""DISK_METRICS: the numbers of a disk tier; all are 0 without one."""

from __future__ import annotations

from continuum_connector.observe.metric import COPY_BUCKETS, OTHER, Kind, Metric

DISK_FAILURES: tuple[str, ...] = ("eio", "enospc", "corrupt", "missing", "timeout")
DISK_FAILURES += ("driver", "cancelled", "no_tier", "refused", "stale", "asleep", OTHER)
_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

DISK_METRICS: tuple[Metric, ...] = (
    Metric("disk_up", _G, "1 while the disk tier works; 0: off by config, not open yet, or failed"),
    Metric(
        "disk_writable",
        _G,
        "1 while the disk takes writes; 0 with disk_up at 1: full or failing, so only read",
    ),
    Metric(
        "disk_wanted_bytes",
        _G,
        "disk_bytes of the config; above 0 with disk_up at 0 for long: no disk tier, see the log",
    ),
    Metric("disk_capacity_blocks", _G, "Blocks that the disk can hold; 0 without a disk"),
    Metric(
        "disk_blocks",
        _G,
        "Blocks on disk, by state; `writing` stays up only while writes are in flight",
        "state",
        ("ready", "writing"),
    ),
    Metric("disk_used_bytes", _G, "Bytes that blocks take on disk, over all ranks"),
    Metric(
        "writes",
        _C,
        "Transfers DRAM to disk, by outcome; many `cancelled`: the disk is slow, or busy reading",
        "outcome",
        ("done", "failed", "cancelled", "abandoned"),
    ),
    Metric(
        "reads",
        _C,
        "Transfers disk to DRAM, by outcome; all but `done` were recomputed",
        "outcome",
        ("done", "failed", "cancelled", "abandoned"),
    ),
    Metric("disk_written_bytes", _C, "Bytes written to disk, over all ranks: what wears the drive"),
    Metric(
        "disk_read_bytes", _C, "Bytes read from disk, over all ranks; below written: little use"
    ),
    Metric(
        "write_seconds",
        _H,
        "Time of a write from queued to settled; nobody waits for it",
        buckets=COPY_BUCKETS,
    ),
    Metric(
        "read_seconds",
        _H,
        "Time of a read from queued to settled; its turn waits, disk_timeout_s at most",
        buckets=COPY_BUCKETS,
    ),
    Metric(
        "disk_failures",
        _C,
        "Ranks' failed reads and writes, by reason; `corrupt`, `eio`: check the drive",
        "reason",
        DISK_FAILURES,
    ),
    Metric(
        "disk_unsaved_blocks",
        _C,
        "Blocks that left DRAM before they were written; many: the disk is slow, or DRAM small",
    ),
    Metric(
        "disk_refused_blocks",
        _C,
        "Blocks not written, by reason; many `once` or `budget`: disk_write_budget is spent",
        "because",
        ("once", "budget"),
    ),
    Metric("disk_budget_fill", _G, "Share left of a day's disk_write_budget; 1 without a bound"),
    Metric(
        "disk_oldest_op_seconds",
        _G,
        "Age of the oldest read or write under way; above disk_timeout_s: the disk hangs",
    ),
    Metric(
        "read_seconds_per_block",
        _G,
        "Seconds per block of a 1000-block read; above prefill of its tokens: no gain",
    ),
)
