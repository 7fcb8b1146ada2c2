"""Program, Identity and Hints: what is known of one agent run and of one of its turns.

A program's key: the name its client gave it, in a namespace that only such clients can write.

    job:run-17                             named without a `cache_salt`
    salted:<digest of the salt>:job:run-17 named with one: only requests with that salt reach it
    anonymous:<random>                     named by nobody: only its own lineage reaches it

No client's text becomes a key of the lower two kinds, because `program_key` puts a colon before
one that begins like them. So it does not matter who has read such a key. The digests are keyed
per process: a digest does not tell somebody who guesses a salt that the guess is right. Nothing
that outlives the process may be found by a key.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

NUM_MARKS = 8  # of a chain
# A program that is silent for longer counts as over: 99 % of the tool calls of real coding
# sessions are done by then (field.md 3.3: P99 916 s), and what is learned must not wait for ever.
OVER_S = 900.0


class IdentitySource(enum.Enum):
    """Where a request's program came from; earlier members win (architecture.md)."""

    CONTINUUM = "kv_transfer_params"  # kv_transfer_params.continuum or .agent_hint
    CLIENT = "job_id"  # vllm_xargs or top level through the middleware
    SESSION = "session_id"  # vLLM's session_id field or X-Session-ID
    VENDOR = "vendor"  # vendor headers and body fields through the middleware
    LINEAGE = "lineage"  # the prompt extends a finished turn's block-hash chain
    NONE = "none"  # nobody said and nothing matched: a program of its own


class Hints(Struct, frozen=True):
    """What the client declared about this turn; None means it did not say.

    `final`: this is the program's last turn. `ttl_s`: how long the client expects the tool
    call to take, in seconds. `keep_s`: for how long it would like to find this turn's KV
    somewhere, be it in DRAM. `tools`: names of the tools it will run next. `parent`: the
    program that started this one. `compaction`: this turn condenses the program's history, so
    what comes next extends an old prefix and not this turn. `group`: key of the samples of one
    prompt that this program is one of, of which there are `group_size`.

    `unread`: names of the hints that were there and could not be read. `actions`: of vLLM's
    KvHints, each action's id with the hint it became, "" if none.
    """

    final: bool | None = None
    ttl_s: float | None = None
    tools: tuple[str, ...] = ()
    parent: str | None = None
    compaction: bool = False
    keep_s: float | None = None
    group: str | None = None
    group_size: int | None = None
    unread: tuple[str, ...] = ()
    actions: tuple[tuple[str, str], ...] = ()


class Identity(Struct, frozen=True):
    """Which program a request belongs to. `key` is bounded in length and never empty."""

    key: str
    source: IdentitySource
    hints: Hints = Hints()


@dataclass(frozen=True)
class Kept:
    """The chain of full blocks that a turn left: its tokens, and marks of (index, block hash)
    along it, a few, for thousands of programs keep them."""

    num_tokens: int = 0
    marks: tuple[tuple[int, bytes], ...] = ()

    @classmethod
    def of(cls, hashes: Sequence[bytes], num_blocks: int, block_size: int) -> Kept:
        """Mark the first `num_blocks` of `hashes`."""
        ends = {num_blocks * i // NUM_MARKS for i in range(1, NUM_MARKS + 1)} - {0}
        marks = tuple((end - 1, hashes[end - 1]) for end in sorted(ends))
        return cls(num_blocks * block_size, marks)

    def shared(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of the chain a prompt begins with: up to an eighth fewer than it does."""
        found = (i + 1 for i, mark in self.marks if i < len(hashes) and hashes[i] == mark)
        return max(found, default=0)

    def goes_on_in(self, hashes: Sequence[bytes]) -> bool:
        """Whether a turn of those hashes continues the chain, to its middle at least: what a turn
        answered may look different in the next prompt, without its thoughts."""
        return 2 * self.shared(hashes) > self.marks[-1][0] if self.marks else False


@dataclass
class Program:
    """One agent run.

    `arrival` orders programs (first come, first served): monotonic seconds of its first
    turn's arrival. `num_active`: its turns not yet finished. `num_counted`: turns up
    to its last long silence; those after it are a program of their own for statistics.
    """

    key: str
    source: IdentitySource
    arrival: float
    num_turns: int = 0
    num_finished: int = 0
    num_counted: int = 0
    last_seen: float = 0.0
    last_finish: float | None = None
    kept: Kept = field(default_factory=lambda: Kept())  # of its last finished turn
    prompt_end: tuple[int, bytes] | None = None  # of that turn: index and hash of a block
    alters_answers: bool | None = None  # before it sends them back (answers.py); None: not seen
    parent: str | None = None
    final: bool = False
    num_active: int = 0


MAX_KEY_CHARS = 200

_SALTED, _ANONYMOUS = "salted:", "anonymous:"  # tools/analysis/summary.py knows the second
GROUP = "group:"  # of samples; no program's key begins like it
_DIGEST_BYTES = 16
_SECRET = secrets.token_bytes(32)


def program_key(name: str, salt: str | None) -> str:
    """Return the printable, bounded key of the program that requests of this salt call `name`."""
    if salt:
        space = f"{_SALTED}{_digest(salt, b'salt')}:"
        return space + _bounded(name, MAX_KEY_CHARS - len(space))
    if name.startswith((_SALTED, _ANONYMOUS, GROUP)):
        name = f":{name}"
    return _bounded(name, MAX_KEY_CHARS)


def anonymous_key() -> str:
    """Return a new key for a program without a name: random, for a count would tell any client
    how many requests of others came since its last one."""
    return f"{_ANONYMOUS}{secrets.token_hex(_DIGEST_BYTES)}"


def printable(text: str) -> str:
    """Return `text`, or its escaped form if a log or a terminal would not show it as it is."""
    if text.isprintable():
        return text
    return text.encode("unicode_escape").decode("ascii")  # covers lone surrogates, newlines


def _bounded(name: str, room: int) -> str:
    """Shorten what is too long to its beginning and a digest of the whole."""
    shown = printable(name[: room + 1])
    if len(shown) <= room:
        return shown
    end = f"~{_digest(name, b'name')}"
    return shown[: room - len(end)] + end


def _digest(text: str, use: bytes) -> str:
    raw = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=_DIGEST_BYTES, key=_SECRET, person=use).hexdigest()
