"""One request of the storm: one word for how it ended, and how many ended so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

ABORTED = "hung up by us"  # the client's own doing; not a status
# vLLM's own answer to reset_running_requests while a step or a load is under way
# (v1/core/sched/scheduler.py, reset_prefix_cache), as docs/switch-off.md says
RESET_REFUSED = "reset refused by vLLM"
TIMEOUT_S = 180.0
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
        if not is_expected(ended.status) and len(self.unexpected) < KEPT:
            said = " ".join(ended.text.split())[:200]
            self.unexpected.append(f"{ended.status}: {what}: {said}")

    @property
    def num_ended(self) -> int:
        """All that were counted."""
        return sum(self.by_status.values())

    @property
    def num_unexpected(self) -> int:
        """Requests that ended as none may."""
        return sum(n for status, n in self.by_status.items() if not is_expected(status))


def is_expected(status: str) -> bool:
    """Answered, refused as the client's mistake, or not waited for."""
    return status in ("200", "400", ABORTED, RESET_REFUSED)


class Server(Protocol):
    """What the storm needs of what it is fired at."""

    async def generate(
        self, api: str, payload: bytes, headers: Mapping[str, str], abort_s: float = 0.0
    ) -> Ended:
        """Send a request to one of the four APIs; hang up after `abort_s`, unless it is 0."""
        ...

    async def reset(self, query: str) -> Ended:
        """Empty the prefix cache, as far as the server does that now."""
        ...
