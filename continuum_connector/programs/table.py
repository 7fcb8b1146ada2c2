"""ProgramTable: every program we remember, and how many of its turns are under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from continuum_connector.programs.lineage import NUM_ENDS, LineageIndex
from continuum_connector.programs.program import (
    OVER_S,
    Hints,
    Identity,
    IdentitySource,
    Kept,
    Program,
    anonymous_key,
)

_TRIES = 32  # programs in use looked at per turn before the table is left too full


def _always(_key: str) -> bool:
    return True


class ProgramTable:
    """Programs by key, about `max_programs` of them; the least recently seen goes first.

    A program with a turn under way stays, and so does one for which `evictable(key)` is false
    (it has a pin, say); only those can make the table exceed its bound, and it shrinks again
    as turns begin and end. Everything here costs the same whatever the number of programs.
    """

    def __init__(
        self,
        max_programs: int,
        evictable: Callable[[str], bool] = _always,
        lineage: LineageIndex | None = None,
    ) -> None:
        self._max_programs = max_programs
        self._evictable = evictable
        if lineage is None:
            lineage = LineageIndex(NUM_ENDS * max_programs)
        self._lineage = lineage
        self._programs: OrderedDict[str, Program] = OrderedDict()

    def __len__(self) -> int:
        return len(self._programs)

    def begin_turn(
        self,
        identity: Identity | None,
        block_hashes: Sequence[bytes],
        now: float,
        hints: Hints | None = None,
        num_prompt_tokens: int = 0,
    ) -> tuple[Program, Identity]:
        """A turn is under way; return its program and who it is.

        Without an identity the lineage of the prompt, of those blocks and so many tokens, names
        the program, else it is a new one of its own; `hints` are for such requests.
        """
        if identity is None:
            identity = self._infer(block_hashes, num_prompt_tokens, hints or Hints())
        program = self._programs.get(identity.key)
        if program is None:
            program = Program(identity.key, identity.source, arrival=now)
            self._programs[program.key] = program
        elif program.final and not program.num_active:
            _start_over(program, now)
        elif now - program.last_seen > OVER_S and not program.num_active:
            program.arrival = now  # it does not come before all who came meanwhile
        program.final &= identity.hints.final is not False  # it says that there is more to come
        program.num_turns += 1
        program.num_active += 1
        program.last_seen = now
        self._programs.move_to_end(program.key)
        self._shrink()
        return program, identity

    def end_turn(
        self,
        program: Program,
        hints: Hints,
        now: float,
        block_hashes: Sequence[bytes] = (),
        num_prompt_blocks: int = 0,
        num_prompt_tokens: int = 0,
        is_stray: bool = False,
    ) -> None:
        """A turn of `program` with those `hints`, begun before, is over.

        With the turn's `block_hashes` (of prompt and output; the first `num_prompt_blocks` are
        the prompt's own, which has `num_prompt_tokens`) the program can be recognised without an
        id from now on. A turn whose output is lost is ended without them. A stray turn leaves no
        trace (Turn.strays).
        """
        program.num_active -= 1
        self._programs.move_to_end(program.key)
        if not is_stray:
            program.num_finished += 1
            program.last_finish = program.last_seen = now
            program.final |= bool(hints.final)
            program.parent = program.parent or hints.parent
            if block_hashes and not hints.compaction:
                self._lineage.register(
                    program.key, block_hashes, num_prompt_blocks, program.parent, num_prompt_tokens
                )
        self._shrink()

    def get(self, key: str) -> Program | None:
        """Return the program with this key, if it is remembered."""
        return self._programs.get(key)

    def _infer(
        self, block_hashes: Sequence[bytes], num_prompt_tokens: int, hints: Hints
    ) -> Identity:
        key = self._lineage.match(block_hashes, num_prompt_tokens)
        if key is not None and key in self._programs:
            return Identity(key, IdentitySource.LINEAGE, hints)
        return Identity(anonymous_key(), IdentitySource.NONE, hints)

    def _shrink(self) -> None:
        """Forget the least recently seen programs until the bound holds or all are in use."""
        for _ in range(_TRIES):
            if len(self._programs) <= self._max_programs:
                return
            key, program = next(iter(self._programs.items()))
            if program.num_active or not self._evictable(key):
                self._programs.move_to_end(key)  # in use is as good as seen
                continue
            del self._programs[key]
            self._lineage.forget(key)


def _start_over(program: Program, now: float) -> None:
    """Give a finished program's key a new life: it queues and counts as one that just came."""
    program.arrival = now
    program.num_turns = program.num_finished = program.num_counted = 0
    program.kept = Kept()
    program.last_finish = program.parent = None
    program.final = False
