"""What is kept of a storm: how requests ended, a word for each, and looks at the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.serve.metrics import Metrics

ABORTED = "hung up by us"  # the client's own doing; not a status
# vLLM's own answer to reset_running_requests while a step or a load is under way
# (v1/core/sched/scheduler.py, reset_prefix_cache), as docs/switch-off.md says
RESET_REFUSED = "reset refused by vLLM"
EXPECTED = {"200", "400", ABORTED, RESET_REFUSED}  # 400: the client's mistake
KEPT = 20  # examples of what was not expected


@dataclass
class Ended:
    """How a request ended: a status, ABORTED, or what is wrong in words."""

    status: str
    text: str = ""  # of the answer, or of the error


@dataclass
class Tally:
    """Requests by how they ended."""

    by_status: dict[str, int] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    def add(self, ended: Ended, what: str) -> None:
        """Count one; `what` was sent."""
        self.by_status[ended.status] = self.by_status.get(ended.status, 0) + 1
        if ended.status not in EXPECTED and len(self.unexpected) < KEPT:
            said = " ".join(ended.text.split())[:200]
            self.unexpected.append(f"{ended.status}: {what}: {said}")

    @property
    def num_ended(self) -> int:
        return sum(self.by_status.values())

    @property
    def num_unexpected(self) -> int:
        return sum(n for status, n in self.by_status.items() if status not in EXPECTED)


@dataclass(frozen=True)
class Look:
    """What there is after so many requests. `num_bytes`: of the process; `tables`: items by
    container of ours."""

    done: int
    num_steps: int
    num_bytes: float
    num_objects: int
    metrics: Metrics
    tables: dict[str, int]


@dataclass
class Run:
    """What the server did in the storm. `open_accounts`, `held`: of the idle server at the end."""

    tally: Tally = field(default_factory=Tally)
    looks: list[Look] = field(default_factory=list)
    virtual_s: float = 0.0
    open_accounts: list[str] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
