"""Turn: one request while vLLM knows it.

Turns: the one table of them, and what is asked of those that wait whenever room is made in DRAM.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from continuum_connector.programs.program import Identity, Program


class TurnEnd(enum.Enum):
    """How vLLM says that a request ended."""

    STOP = "stop"  # it said all it had to say
    LENGTH = "length"  # at a token limit
    ABORTED = "aborted"  # by the API server: a stop string, or the client went away


class Sample(NamedTuple):
    """The `number`th program of a group, counted from 1; of `size`, 0 if nobody said. `num_tokens`:
    the prompt that they share."""

    group: str
    number: int
    size: int
    num_tokens: int


@dataclass(eq=False)
class Turn:
    """`number` counts the program's turns from 1; `arrival` is monotonic seconds.

    `vram_tokens` are what VRAM had for it when it was first admitted, `tier_tokens` what each
    memory below it had beyond, nearest first. `was_asked`: vLLM has looked for it, to admit it, at
    least once. `is_let_in`: the gate let it pass, after `held_s`.
    `is_stray`: as `strays` said last, when it arrived or when it ended. `max_head_start_s`: how
    much earlier than it came it may stand in line. `epoch`: of the oldest of its KV. `sample`:
    which it begins, of a prompt that others send too. `group`: key of the samples that its program
    is one of, "" if it is of none.
    """

    program: Program
    identity: Identity
    number: int
    arrival: float
    was_asked: bool = False
    is_admitted: bool = False
    is_preempted: bool = False  # and not admitted again yet
    vram_tokens: int = 0
    is_stray: bool = False
    sample: Sample | None = None
    group: str = ""
    is_let_in: bool = False
    held_s: float = 0.0
    epoch: int = 0
    max_head_start_s: float = 0.0
    tier_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_tokens(self) -> dict[str, int]:
        """Tokens of its prompt that were found, by the memory that had them, nearest first."""
        return {"vram": self.vram_tokens, **self.tier_tokens}

    def place(self, is_ahead: bool = False) -> float:
        """Where it stands among turns, in monotonic seconds: where its program's arrival says, and
        half of the head start earlier if it `is_ahead`, as its KV is pinned; but never more than
        the head start before its own arrival, so that who comes that much later cannot pass those
        who wait.
        """
        program = self.program.arrival - (self.max_head_start_s / 2 if is_ahead else 0.0)
        return max(program, self.arrival - self.max_head_start_s)

    def strays(self, hashes: Sequence[bytes]) -> bool:
        """Whether it says `final` without continuing what its program's last turn left: an id can
        be guessed, and a call beside the program may carry it; the content shows who ends it.

        Where no turn of it has left anything yet, another that is under way shows that there is
        more to come. A stray turn has its place in the queue, and takes nothing of the program.
        """
        if not self.identity.hints.final:
            return False
        kept = self.program.kept
        return not kept.goes_on_in(hashes) if kept.marks else self.program.num_active > 1


class Turns:
    """By request id: every turn that vLLM knows, from its arrival to its end.

    Those that never ran wait. How many do, and of which programs, is kept up to date turn by turn:
    thousands wait, and one ends in each step.
    """

    def __init__(self) -> None:
        self._turns: dict[str, Turn] = {}
        self._waiting: dict[str, float] = {}  # their programs' arrivals, as each turn came
        self._arrivals: list[float] = []  # the same, ascending
        self._num_by_program: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._turns)

    def get(self, request_id: str) -> Turn | None:
        return self._turns.get(request_id)

    def begin(self, request_id: str, turn: Turn) -> None:
        """The turn arrived, and waits."""
        arrival = turn.program.arrival
        self._turns[request_id] = turn
        self._waiting[request_id] = arrival
        insort(self._arrivals, arrival)
        self._num_by_program[turn.program.key] += 1

    def admit(self, request_id: str) -> None:
        """The turn runs for the first time."""
        turn = self._turns[request_id]
        turn.is_admitted = True
        self._no_longer_waits(request_id, turn)

    def end(self, request_id: str) -> Turn | None:
        """Forget the turn and return it; None if it is not known."""
        turn = self._turns.pop(request_id, None)
        if turn is not None and not turn.is_admitted:
            self._no_longer_waits(request_id, turn)
        return turn

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_waiting(self, program: str) -> bool:
        """Whether a turn of the program waits."""
        return program in self._num_by_program

    def share_ahead(self, arrival: float) -> float:
        """The share of the waiting turns whose program comes before one of that arrival."""
        return bisect_left(self._arrivals, arrival) / len(self._arrivals) if self._arrivals else 0.0

    def _no_longer_waits(self, request_id: str, turn: Turn) -> None:
        del self._arrivals[bisect_left(self._arrivals, self._waiting.pop(request_id))]
        key = turn.program.key
        self._num_by_program[key] -= 1
        if not self._num_by_program[key]:
            del self._num_by_program[key]
