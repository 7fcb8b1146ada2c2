"""Program, Identity and Hints: what is known of one agent run and of one of its turns."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class IdentitySource(enum.Enum):
    """Where a request's program came from; earlier members win (architecture.md)."""

    CONTINUUM = "kv_transfer_params"  # kv_transfer_params.continuum or .agent_hint
    CLIENT = "job_id"  # vllm_xargs or top level through the middleware
    SESSION = "session_id"  # vLLM's session_id field or X-Session-ID
    VENDOR = "vendor"  # vendor headers and body fields through the middleware
    LINEAGE = "lineage"  # the prompt extends a finished turn's block-hash chain
    NONE = "none"  # nobody said and nothing matched: a program of its own


@dataclass(frozen=True)
class Hints:
    """What the client declared about this turn; None means it did not say.

    `final`: this is the program's last turn. `ttl_s`: how long the client expects the tool
    call to take, in seconds. `keep_s`: for how long it would like to find this turn's KV
    somewhere, be it in DRAM. `tools`: names of the tools it will run next. `parent`: the
    program that started this one. `compaction`: this turn condenses the program's history, so
    what comes next extends an old prefix and not this turn.

    `unread`: names of the hints that were there and could not be read. `actions`: of vLLM's
    KvHints, each action's id with the hint it became, "" if none.
    """

    final: bool | None = None
    ttl_s: float | None = None
    tools: tuple[str, ...] = ()
    parent: str | None = None
    compaction: bool = False
    keep_s: float | None = None
    unread: tuple[str, ...] = ()
    actions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Identity:
    """Which program a request belongs to. `key` is bounded in length and never empty."""

    key: str
    source: IdentitySource
    hints: Hints = field(default_factory=Hints)

    @property
    def is_anonymous(self) -> bool:
        return self.source is IdentitySource.NONE


@dataclass
class Program:
    """One agent run.

    `arrival` orders programs (first come, first served): monotonic seconds of its first
    turn's arrival. `active` are the request ids of its turns not yet finished. `num_counted`:
    turns up to its last long silence; those after it are a program of their own for statistics.
    """

    key: str
    source: IdentitySource
    arrival: float
    num_turns: int = 0
    num_finished: int = 0
    num_counted: int = 0
    last_seen: float = 0.0
    last_finish: float | None = None
    num_kept_tokens: int = 0  # of its last finished turn, in full blocks
    parent: str | None = None
    final: bool = False
    active: set[str] = field(default_factory=set)
