"""The server that a storm is fired at: how large it is, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.serve.metrics import Metrics, total
from bench.storm.client import Tally

BLOCK_SIZE = 32
NUM_BLOCKS = 129  # a third of what is alive at a time: preemptions, and pins that give way
DRAM_BLOCKS = 397
MAX_TTL_S = 6.0
MOST_PROGRAMS = 200  # of the table: full early on, so that what grows later is a leak
MAX_MODEL_LEN = 4096
IDLE_S = 60.0  # to let everything go once max_ttl_s is over
FILES = {"trace_path": "trace.jsonl", "switch_path": "switch"}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Look:
    """What the process holds after so many requests. `tables`: items by container of ours."""

    done: int
    num_objects: int
    num_steps: int
    cpu_s: float
    tables: dict[str, int]


@dataclass
class ArmRun:
    """What the server did in the storm. `samples`: requests done, bytes of the process;
    `open_accounts`, `held`: of the idle server at the end."""

    tally: Tally = field(default_factory=Tally)
    samples: list[tuple[int, int]] = field(default_factory=list)
    scrapes: list[tuple[int, Metrics]] = field(default_factory=list)  # by requests done
    looks: list[Look] = field(default_factory=list)
    wall_s: float = 0.0
    virtual_s: float = 0.0
    open_accounts: list[str] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Everything but the metrics' buckets, for --json."""
        last = self.scrapes[-1][1] if self.scrapes else {}
        names = ("wall_s", "virtual_s", "held", "open_accounts", "samples")
        return {
            **{name: getattr(self, name) for name in names},
            "statuses": self.tally.by_status,
            "unexpected": self.tally.unexpected,
            "hits": [[done, *hits(metrics)] for done, metrics in self.scrapes],
            "looks": [asdict(look) for look in self.looks],
            "metrics": {
                f"{name} {dict(sorted(labels))}": value
                for (name, labels), value in last.items()
                if not name.endswith("_bucket")
            },
        }


def hits(metrics: Metrics) -> list[float]:
    """Prompt tokens that were found, in each tier, and all."""
    tiers = ("vram", "dram")
    found = [total(metrics, "continuum:hit_tokens_total", tier=tier) for tier in tiers]
    return [*found, total(metrics, "continuum:prompt_tokens_total")]
