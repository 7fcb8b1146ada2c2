"""Program, Identity and Hints: what is known of one agent run and of one of its turns.

ProgramTable holds the programs that we remember; Answers learns whether they send their answers
back unchanged.

A program's key: the name its client gave it, in a namespace that only such clients can write.

    job:run-17                             named without a `cache_salt`
    salted:<digest of the salt>:job:run-17 named with one: only requests with that salt reach it
    anonymous:<random>                     named by nobody: only its own lineage reaches it

No client's text becomes a key of the last two kinds, because `program_key` puts a colon before
text that begins like them. So it does not matter who has read such a key. The digests are keyed
per process, so nobody can use one to check a guess of a salt. Nothing that outlives the process may
be found by a key.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct, structs

from continuum_connector.errors import shown
from continuum_connector.programs.continuation import (
    MAX_CHAINS,
    TO_ITS_END,
    UNKNOWN,
    Divergence,
    Kept,
    PromptText,
    find_divergence,
)
from continuum_connector.programs.lineage import NUM_ENDS, LineageIndex

# A program that is silent for longer counts as over: 99 % of the tool calls of real coding
# sessions are done by then (P99 916 s), and learning must not wait for ever.
OVER_S = 900.0
MAX_LEFT = 64  # contexts of a program; a client may send one id for all it does
MAX_RESTING = 4  # of one that counts as over: thousands are remembered


class IdentitySource(enum.Enum):
    """Where a request's program came from; earlier members win (docs/identity.md)."""

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a Python call

    CONTINUUM = "kv_transfer_params"  # kv_transfer_params.continuum or .agent_hint
    CLIENT = "job_id"  # vllm_xargs or top level through the middleware
    SESSION = "session_id"  # vLLM's session_id field or X-Session-ID
    VENDOR = "vendor"  # vendor headers and body fields through the middleware
    LINEAGE = "lineage"  # the prompt extends a finished turn's block-hash chain
    NONE = "none"  # nobody said and nothing matched: a program of its own


class Hints(Struct, frozen=True):
    """What the client declared about this turn; None means it did not say.

    `final`: this is the program's last turn. `ttl_s`: how long the client expects the tool call to
    take, in seconds. `tools`: names of the tools that it will run next. `parent`: the program that
    started this one. `compaction`: this turn condenses the program's history, so what comes next
    extends an old prefix and not this turn. `unread`: names of the hints that were given but could
    not be read.
    """

    final: bool | None = None
    ttl_s: float | None = None
    tools: tuple[str, ...] = ()
    parent: str | None = None
    compaction: bool = False
    unread: tuple[str, ...] = ()


class Identity(Struct, frozen=True):
    """Which program a request belongs to. `key` is bounded in length and never empty. `parts`:
    digests of what it was made of (continuation.py), if the middleware saw it."""

    key: str
    source: IdentitySource
    hints: Hints = Hints()
    parts: str = ""


class Edited(NamedTuple):
    """What a turn left, and when the one ended `by` which it may have been edited."""

    kept: Kept
    by: float


@dataclass
class Program:
    """One agent run.

    `arrival`: when its first turn arrived, in monotonic seconds; orders programs, first come, first
    served. `num_active`: its turns that have not finished. `num_counted`: its turns before its last
    long silence; for statistics, those after it are a program of their own.
    """

    key: str
    source: IdentitySource
    arrival: float
    num_turns: int = 0
    num_finished: int = 0
    num_counted: int = 0
    last_seen: float = 0.0
    kept: Kept = field(default_factory=Kept)  # of its last finished turn
    prompt_end: tuple[int, bytes] | None = None  # of its prompt's last block to hit: index, hash
    alters_answers: bool | None = None  # before it sends them back (Answers); None: unknown
    # Whether a prompt differed before the end of the last one, since one had its answer, too.
    departed: bool = False
    # Those of `left` that end in an answer which its client cut off, until it goes on with it, and
    # whether it ever did with one (Interruptions).
    cuts: tuple[float, ...] = ()
    resumes_cut: bool = False
    runs_blocks: bool | None = None  # the shell blocks that it is answered (Decider); None: unknown
    parent: str | None = None
    final: bool = False
    num_active: int = 0
    # What its turns left that none has continued yet, by when each ended. Several where it has
    # side requests, forks, or conversations that share its name.
    left: dict[float, Kept] = field(default_factory=dict)
    # What turns were taken for edits of, by when it was left. If any of it is continued after all,
    # the conversations of this id `begin_alike`, and no turn is taken for an edit again: that is
    # its client's way, so it outlives the program's last turn.
    edited: dict[float, Edited] = field(default_factory=dict)
    begin_alike: bool = False
    # How the prompts diverged of the turns that left the newest of these.
    diverged: dict[float, Divergence] = field(default_factory=dict)

    @property
    def is_named(self) -> bool:
        return self.source is not IdentitySource.NONE

    def left_by(self, hashes: Sequence[bytes], text: PromptText) -> float | None:
        """When the turn ended that a turn with those hashes continues; None if it continues none,
        or none that is known any more."""
        found = [(kept.continued(hashes, text), at) for at, kept in self.left.items()]
        surest, at = max(found, default=(0, 0.0))
        # What has no full block, as a request for a title, may be continued by anything.
        if surest > UNKNOWN or (surest and not any(kept.marks for kept in self.left.values())):
            return at
        for at, edited in self.edited.items():
            if edited.kept.continued(hashes, text) and _is_sure(edited.kept, hashes, text):
                return at
        if self.begin_alike:
            return None
        # An edited context: what shares at least half of it, if nothing else does.
        edits = (at for at, kept in self.left.items() if kept.goes_on_in(hashes))
        return max(edits, default=None)

    def num_common(
        self, since: float | None, hashes: Sequence[bytes], text: PromptText
    ) -> int | None:
        """How many blocks others begin with of what a turn continued at `since`; None if it
        continued nothing, or nobody can be sure, as what begins alike may be another's."""
        if since in self.edited:
            return self.edited[since].kept.num_common
        kept = None if since is None else self.left.get(since)
        if kept is None:
            return None
        return kept.num_common if _is_sure(kept, hashes, text) else None

    def may_begin_alike(self, since: float | None, hashes: Sequence[bytes]) -> bool:
        """Whether a turn has no more in common with what was left at `since` than others have."""
        kept = None if since is None else self.left.get(since)
        return kept is not None and kept.shared(hashes) <= kept.num_common

    def departs(self, since: float | None, hashes: Sequence[bytes]) -> bool:
        """Whether a turn that continues what was left at `since` departs from it, or from others'
        prompts, before its end, and the next one may there, too: it ends in a message that is never
        kept, or asks another question of a text."""
        if self.alters_answers and not self.departed:  # they go on from where its prompts end
            return False
        kept = None if since is None else self.left.get(since)
        return kept is None or kept.continued(hashes) < TO_ITS_END

    def edited_by(self, ended: float | None) -> float | None:
        """When that was left which the turn that ended then was taken for an edit of."""
        return next((at for at, each in self.edited.items() if each.by == ended), None)

    def differs(
        self, since: float | None, identity: Identity, request: Any, block_size: int
    ) -> Divergence | None:
        """How the prompt differs of a turn that continues what was left at `since`, None: nothing,
        from the one that it goes on with; None if it continues, or goes on with none."""
        if since is not None or identity.hints.compaction:
            return None
        newest = ((kept, self.diverged.get(at)) for at, kept in reversed(self.left.items()))
        return find_divergence(newest, request, block_size, identity.parts)

    def answers_blocks(self, runs: bool) -> None:
        """A prompt has shown whether somebody runs the shell blocks that it is answered."""
        self.runs_blocks = runs

    def counts(self, num_turns: int) -> int:
        """It was silent for so long that its first `num_turns` count as a program of their own;
        return how many of them are new."""
        num_new, self.num_counted = num_turns - self.num_counted, num_turns
        return num_new

    def end(self) -> None:
        """No turn follows; one under way says so itself when it ends."""
        self.final = self.final or not self.num_active

    def left_at(self, last_used: float) -> float | None:
        """When the turn ended that left what was used last then: a copy that follows the turn, as
        when its pin expires, is no use of its own."""
        return max((at for at in self.left if at <= last_used), default=None)

    def leave(
        self,
        kept: Kept,
        since: float | None,
        diverged: Divergence | None,
        now: float,
        is_edit: bool = False,
    ) -> None:
        """A turn that continued what was left at `since`, or `diverged`, leaves `kept`. `is_edit`:
        it only shares so much with what was left that it may be its context, edited."""
        if since in self.edited and not is_edit:
            self.begin_alike = True
            del self.edited[since]
        elif since is not None and not (is_edit and self.begin_alike):
            before = self.left.pop(since, None)
            if is_edit and before is not None and before.marks:
                self.edited[since] = Edited(before, by=now)
                _forget_oldest(self.edited, MAX_LEFT)
        if not kept.marks:  # nothing tells it from others without a full block
            self.left = {at: each for at, each in self.left.items() if each.marks}
        self.left[now] = self.kept = kept
        _forget_oldest(self.left, MAX_LEFT)
        if diverged is not None:
            self.diverged[now] = diverged
            _forget_oldest(self.diverged, MAX_CHAINS)

    def rest(self) -> None:
        """It counts as over: of what its turns left only the newest is known again."""
        _forget_oldest(self.left, MAX_RESTING)
        _forget_oldest(self.edited, MAX_RESTING)


def _is_sure(kept: Kept, hashes: Sequence[bytes], text: PromptText) -> bool:
    """Whether a turn that shares blocks with the chain goes on with its conversation for sure."""
    return kept.continued(hashes) == TO_ITS_END or text.goes_on_from(kept)


def _forget_oldest(chains: dict[float, Any], most: int) -> None:
    while len(chains) > most:
        del chains[next(iter(chains))]


class Answers:
    """Whether a program's next prompt repeats its last answer unchanged, or continues from the last
    prompt's end.

    Many clients send an answer back without its thinking. Such a prompt still finds all blocks of
    full attention up to that point. Of windows, chunks and states it finds only what was kept for a
    hit that ends there.

    Learns from each returning turn, per program. A program that has not returned yet is expected
    to do what the last program that returned did. Before any has returned, programs are expected to
    continue from their answers."""

    def __init__(self, hash_size: int) -> None:
        self._hash_size = hash_size
        self._are_altered = False

    def came_back(self, program: Program, hashes: Sequence[bytes]) -> None:
        """A prompt of these block hashes continues from the program's last finished turn."""
        marks, prompt = program.kept.marks, program.prompt_end
        if not marks or prompt is None or marks[-1][0] <= prompt[0]:
            return  # the answer did not fill a block
        index, answer = marks[-1]
        if len(hashes) <= prompt[0] or hashes[prompt[0]] != prompt[1]:
            program.departed = True  # it differs before the answer
            return
        self._are_altered = len(hashes) <= index or hashes[index] != answer
        program.alters_answers = self._are_altered
        program.departed &= self._are_altered

    def are_altered(self, program: Program) -> bool:
        """Whether we expect the next prompt to continue from the end of the last prompt."""
        known = program.alters_answers
        return self._are_altered if known is None else known

    def finished(self, program: Program, hashes: Sequence[bytes], end: int) -> None:
        """The program's last prompt can be hit up to `end`, in tokens."""
        last = end // self._hash_size - 1
        program.prompt_end = (last, hashes[last]) if 0 <= last < len(hashes) else None


class Interruptions:
    """Whether clients that interrupt an answer go on with what they have, as in speech, or are
    gone. A program that has gone on with one does so; any other does what is done with at least
    half of all."""

    MAX_COUNTED = 64  # then what was long ago counts half

    def __init__(self) -> None:
        self._num_cut = self._num_resumed = 0

    def cut_off(self, program: Program, now: float) -> None:
        """Its client went away in the middle of an answer, which leaves what is left `now`."""
        program.cuts = (*(at for at in program.cuts if at in program.left), now)
        self._num_cut += 1
        if self._num_cut > self.MAX_COUNTED:
            self._num_cut, self._num_resumed = self._num_cut // 2, self._num_resumed // 2

    def came_back(self, program: Program, since: float | None, num_tokens: int) -> None:
        """A turn with a prompt of so many tokens arrives that continues what was left at `since`,
        None: nothing. The same prompt again is a retry."""
        kept = program.left.get(since) if since in program.cuts else None
        if kept is not None and num_tokens > kept.num_prompt_tokens:
            program.cuts = tuple([at for at in program.cuts if at != since])
            program.resumes_cut = True
            self._num_resumed += 1

    def are_resumed(self, program: Program) -> bool:
        most_are = 2 * self._num_resumed >= self._num_cut > 0
        return program.resumes_cut or most_are


MAX_KEY_CHARS = 200

_SALTED, _ANONYMOUS = "salted:", "anonymous:"  # tools/analysis/summary.py knows the second
_DIGEST_BYTES = 16
_SECRET = secrets.token_bytes(32)


def program_key(name: str, salt: str | None) -> str:
    """Return the printable, bounded key of the program that requests of this salt call `name`."""
    if salt:
        space = f"{_SALTED}{_digest(salt, b'salt')}:"
        return space + _bounded(name, MAX_KEY_CHARS - len(space))
    if name.startswith((_SALTED, _ANONYMOUS)):
        name = f":{name}"
    return _bounded(name, MAX_KEY_CHARS)


# Namespaces of ids that may stand for more than one program: OpenAI means `prompt_cache_key` to be
# one per application or template; tracing gives an id to all that serves one user's request, and
# routers one to all that is to reach one server.
SHARED = (
    *("cache-key:", "correlation:", "helicone:", "metadata:", "baggage:", "affinity:", "task:"),
)
PART, _PART_BYTES = "~part-", 8  # between the key that such programs share and a program's own end
MAX_PART_CHARS = len(PART) + 2 * _PART_BYTES


def sender_of(identity: Identity) -> str:
    """Who made the id up: its source; of a vendor's key that may stand for several programs, which
    only their prompts tell apart, its namespace of SHARED."""
    source: str = identity.source.value
    if identity.source is not IdentitySource.VENDOR:
        return source
    name = identity.key
    if name.startswith(_SALTED):
        name = name.split(":", 2)[-1]
    return next((each for each in SHARED if name.startswith(each)), source)


def anonymous_key() -> str:
    """Return a new key for a program without a name. It is random, because a counter would tell any
    client how many requests of others have come since its last one."""
    return f"{_ANONYMOUS}{secrets.token_hex(_DIGEST_BYTES)}"


def _bounded(name: str, room: int) -> str:
    """Shorten a name that is too long to its beginning and a digest of the whole."""
    said = shown(name[: room + 1])
    if len(said) <= room:
        return said
    end = f"~{_digest(name, b'name')}"
    return said[: room - len(end)] + end


def _digest(text: str, use: bytes) -> str:
    raw = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=_DIGEST_BYTES, key=_SECRET, person=use).hexdigest()


_TRIES = 32  # programs in use that a turn looks at before it leaves the table too full


class Names:
    """Whether the ids of a source name programs. Some clients and proxies send a new one with each
    request. So if NUM_IN_VAIN prompts under new ids have gone on with what turns under other ids of
    that source left, and no id of it ever came back with a longer prompt, the prompts tell its
    programs apart, as if there were no ids. Once one comes back, its source is believed for good.
    Of vendors, each namespace of SHARED is a source: agents prove nothing of a gateway's ids.
    """

    NUM_IN_VAIN = 3
    MAX_IDS = 4096  # by which one would come back

    def __init__(self) -> None:
        self._believed: set[str] = set()
        self._num_in_vain: Counter[str] = Counter()
        self._num_blocks: OrderedDict[str, int] = OrderedDict()  # of the first prompt under an id

    def sent(self, key: str, sender: str, num_blocks: int) -> bool:
        """An id was sent with a prompt of so many blocks; return whether it may name nobody."""
        if sender in self._believed:
            return False
        # The same prompt again is a retry, or another sample.
        if num_blocks > self._num_blocks.setdefault(key, num_blocks):
            self._believed.add(sender)
            return False
        if len(self._num_blocks) > self.MAX_IDS:
            self._num_blocks.popitem(last=False)
        return True

    def name_nobody(self, sender: str) -> bool:
        """A prompt under a new id goes on with another's last turn; return whether such ids name
        nobody."""
        self._num_in_vain[sender] += 1
        return self._num_in_vain[sender] > self.NUM_IN_VAIN


class ProgramTable:
    """Programs by key, about `max_programs` of them. Those that never came back leave first,
    unnamed ones before named ones, then the least recently seen: a flood of questions does not make
    us forget agents.

    A program with a turn under way stays, and so does one for which `evictable(key)` is false, for
    instance because it has a pin. Only those can make the table exceed its bound, and it shrinks
    again as turns begin and end. Every call costs the same, whatever the number of programs.
    """

    def __init__(
        self,
        max_programs: int,
        evictable: Callable[[str], bool] = lambda _key: True,
    ) -> None:
        self._max_programs = max_programs
        self._evictable = evictable
        self._lineage = LineageIndex(NUM_ENDS * max_programs)
        self._programs: OrderedDict[str, Program] = OrderedDict()
        self._names = Names()
        # Those whose first turn has ended and that no other followed: unnamed, then named ones.
        self._once: tuple[OrderedDict[str, None], ...] = (OrderedDict(), OrderedDict())

    def __len__(self) -> int:
        return len(self._programs)

    def begin_turn(
        self,
        identity: Identity | None,
        block_hashes: Sequence[bytes],
        now: float,
        hints: Hints | None = None,
        num_prompt_tokens: int = 0,
        tokens: Sequence[int] | None = None,
    ) -> tuple[Program, Identity]:
        """A turn begins; return its program and identity.

        Without an `identity`, the lineage of the prompt names the program, by its blocks and its
        number of tokens, and by the `tokens` themselves if they are known; if that does not
        either, it is a new program. `hints` are for such requests.
        """
        sender = "" if identity is None else sender_of(identity)
        is_open = identity is not None and self._names.sent(identity.key, sender, len(block_hashes))
        may_be_many = sender in SHARED
        if identity is None or is_open or may_be_many:
            known = self._lineage.match(block_hashes, num_prompt_tokens, tokens)
            known = known if known in self._programs else None
            if identity is None:
                source = IdentitySource.NONE if known is None else IdentitySource.LINEAGE
                identity = Identity(known or anonymous_key(), source, hints or Hints())
            elif may_be_many:
                identity = self._one_of(identity, known)
            if is_open and known is not None:
                identity = self._unless_in_vain(identity, self._programs[known])
        program = self._programs.get(identity.key)
        if program is None:
            program = Program(identity.key, identity.source, arrival=now)
            self._programs[program.key] = program
        elif program.final and not program.num_active:
            _start_over(program, now)
        elif now - program.last_seen > OVER_S and not program.num_active:
            program.arrival = now  # it must not come before all who came meanwhile
        program.final &= identity.hints.final is not False  # False says that more is to come
        program.num_turns += 1
        program.num_active += 1
        program.last_seen = now
        self._once[program.is_named].pop(program.key, None)
        self._programs.move_to_end(program.key)
        self._shrink()
        return program, identity

    def end_turn(
        self,
        program: Program,
        hints: Hints,
        now: float,
        request: Any = None,
        num_prompt_blocks: int = 0,
        is_stray: bool = False,
    ) -> None:
        """A turn of `program` that began with those `hints` is over.

        By the block hashes of its `request` the program can be recognised without an id from now
        on; the first `num_prompt_blocks` are the prompt's own. None: its output is lost. A stray
        turn leaves no trace (strays, in turns.py).
        """
        program.num_active -= 1
        if program.num_turns == 1:
            self._once[program.is_named][program.key] = None
        self._programs.move_to_end(program.key)
        if not is_stray:
            program.num_finished += 1
            program.last_seen = now
            program.final |= bool(hints.final)
            program.parent = program.parent or hints.parent
            if request is not None and request.block_hashes:
                self._lineage.register(
                    program.key,
                    request.block_hashes,
                    num_prompt_blocks,
                    program.parent,
                    request.num_prompt_tokens,
                    request.prompt_token_ids or (),
                    request.output_token_ids,
                )
        self._shrink()

    def get(self, key: str) -> Program | None:
        """Return the program with this key, if it is remembered."""
        return self._programs.get(key)

    def _one_of(self, shared: Identity, known: str | None) -> Identity:
        """Which of the programs behind a shared key a turn belongs to: the one whose last turn it
        continues (`known`, if that has the key), or a new one."""
        part = shared.key[: MAX_KEY_CHARS - MAX_PART_CHARS] + PART
        if known is not None and (known == shared.key or known.startswith(part)):
            return structs.replace(shared, key=known)
        if shared.key not in self._programs:
            return shared
        return structs.replace(shared, key=part + secrets.token_hex(_PART_BYTES))

    def _unless_in_vain(self, new: Identity, known: Program) -> Identity:
        """Whose turn it is, if it continues the last turn of `known` under an id that nobody has
        had: that program's, if such ids name nobody."""
        # A sub-agent says whose it is, and what says that it is the last may be another's fork.
        says_more = new.hints.parent is not None or new.hints.final
        is_known = new.key in self._programs
        is_others = known.source is new.source and not known.final
        if is_known or says_more or not is_others or not self._names.name_nobody(sender_of(new)):
            return new
        return structs.replace(new, key=known.key)

    def _shrink(self) -> None:
        """Forget programs until the bound holds, or all that were looked at are in use. Each queue
        has its share of the tries, as all in one may be in use: agents in their first pause."""
        queues: tuple[OrderedDict[str, Any], ...] = (*self._once, self._programs)
        for queue in queues:
            for _ in range(min(_TRIES // len(queues), len(queue))):
                if len(self._programs) <= self._max_programs:
                    return
                key = next(iter(queue))
                program = self._programs[key]
                if program.num_active or not self._evictable(key):
                    queue.move_to_end(key)  # a program in use counts as just seen
                    continue
                del self._programs[key]
                self._once[program.is_named].pop(key, None)
                self._lineage.forget(key)


def _start_over(program: Program, now: float) -> None:
    """Reuse a finished program's key: it queues and counts as a program that just came."""
    program.arrival = now
    program.num_turns = program.num_finished = program.num_counted = 0
    program.kept = Kept()
    program.left.clear()
    program.edited.clear()
    program.diverged.clear()
    program.parent = None
    program.final = False
