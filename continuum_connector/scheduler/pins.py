"""PinTable: held turns, their deadlines, and why each one ended.

A pin is a preference, never a lock (law 1): it has a deadline and an owner, and the
cheapest gives way first when a request needs the room.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from continuum_connector.errors import InvariantError
from continuum_connector.policy.base import After
from continuum_connector.programs.continuation import Kept
from continuum_connector.scheduler.holds import Hold
from continuum_connector.scheduler.kv_groups import ChainBlocks
from continuum_connector.scheduler.lazy_heap import LazyHeap

if TYPE_CHECKING:
    from continuum_connector.scheduler.turns import Turn


class PinEnd(enum.Enum):
    """Each pin ends with exactly one cause."""

    RETURNED = "returned"  # the program's next turn took the blocks over
    EXPIRED = "expired"  # the tool call took longer than the TTL
    PRESSURE = "pressure"  # a request needed the room, or the budget was full
    SUPERSEDED = "superseded"  # a turn that continues its chain ended; or too many newer pins
    PROGRAM_DONE = "program_done"  # the program's last turn ended
    RESET = "reset"  # the prefix cache was reset
    SWITCHED_OFF = "switched_off"  # an operator switched the connector off
    SHUTDOWN = "shutdown"  # the server stopped


@dataclass(eq=False)
class LivePin:
    """A program's finished turn, kept in VRAM until `deadline` (monotonic seconds).

    `kept`: its chain, by which we see which turn continues it. `priority`: the user's, of the
    turn's request; the lower, the more urgent. From `asked_from` on only the client's request keeps
    the pin (`is_wish`), so it gives way first.
    """

    program: str
    hold: Hold
    blocks: ChainBlocks
    started: float
    deadline: float
    then: After
    rank: tuple[float, float]  # under pressure the lowest goes first
    kept: Kept
    priority: int = 0
    asked_from: float = math.inf
    is_wish: bool = False
    waiting: OrderedDict[Turn, None] = field(default_factory=OrderedDict)  # that are back for it
    ended: PinEnd | None = None
    value: float = field(init=False)  # worth when it was made; `rank` may have aged since

    def __post_init__(self) -> None:
        self.value = self.rank[0]

    @property
    def is_returning(self) -> bool:
        return bool(self.waiting)

    @property
    def first_waiting(self) -> Turn | None:
        """The turn that has this pin's place in the queue: the first of those that came back.

        Only one has it, because the first one admitted takes the pin, and thousands may have come.
        """
        return next(iter(self.waiting), None)

    def leads(self, turn: Turn) -> bool:
        """Whether the pin gives this turn its head start in the queue. Only the first turn that is
        back for it has that, and none if the pin is only a client's wish."""
        return not self.is_wish and self.first_waiting is turn

    @property
    def is_hinted(self) -> bool:
        """Whether the pin will last longer than the policy wanted, or does already."""
        return self.asked_from < self.deadline

    @property
    def next_change(self) -> float:
        return self.deadline if self.is_wish else min(self.asked_from, self.deadline)


class PinTable:
    """Pins by program, deadline and rank; every operation is O(log pins), or O(pins of a program),
    which are few."""

    def __init__(self) -> None:
        self._pins: OrderedDict[LivePin, None] = OrderedDict()
        self._of_program: dict[str, list[LivePin]] = {}  # the newest last
        self._by_deadline: LazyHeap[LivePin] = LazyHeap()
        self._by_rank: LazyHeap[LivePin] = LazyHeap()

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[LivePin]:
        return iter(list(self._pins))

    def __contains__(self, program: str) -> bool:
        return program in self._of_program

    def of(self, program: str) -> Sequence[LivePin]:
        """The program's pins, the newest last."""
        return tuple(self._of_program.get(program, ()))

    def add(self, pin: LivePin) -> None:
        self._pins[pin] = None
        self._of_program.setdefault(pin.program, []).append(pin)
        self._queue(pin)

    def remove(self, pin: LivePin, cause: PinEnd) -> None:
        """Forget the pin and note why; its hold is the caller's to release."""
        if pin.ended is not None or pin not in self._pins:
            raise InvariantError(
                f"pin of {pin.program!r} ended twice: {pin.ended}, now {cause.value}"
            )
        del self._pins[pin]
        pins = self._of_program[pin.program]
        pins.remove(pin)
        if not pins:
            del self._of_program[pin.program]
        pin.ended = cause
        self._by_deadline.discard(pin)
        self._by_rank.discard(pin)

    def expect(self, pin: LivePin, turn: Turn) -> None:
        """The program's next turn has arrived: the pin cannot expire while it waits."""
        pin.waiting[turn] = None
        self._queue(pin)

    def unexpect(self, pin: LivePin, turn: Turn) -> None:
        """That turn went away without taking the pin: its deadline counts again."""
        pin.waiting.pop(turn, None)
        self._queue(pin)

    def make_wish(self, pin: LivePin) -> None:
        """From now on only its client wants the pin: it gives way before all that are no wish."""
        pin.is_wish = True
        self.revalue(pin, -math.inf)

    def revalue(self, pin: LivePin, value: float) -> None:
        """Give the pin a new worth; -inf: it is only a client's wish."""
        pin.rank = (value, pin.rank[1])
        self._queue(pin)

    def least_recent(self, number: int) -> list[LivePin]:
        """Up to `number` pins in turn, so that each is returned as often as any other."""
        pins = list(itertools.islice(self._pins, number))
        for pin in pins:
            self._pins.move_to_end(pin)
        return pins

    def due(self, now: float) -> list[LivePin]:
        """The pins whose deadline has passed, or the time for which the policy wanted them;
        earliest first. They stay registered.

        An idle engine takes no steps, so deadlines pass unseen; call this before every
        lookup. Cost grows with the number of pins that are due, not with those held.
        """
        found = []
        while (entry := self._by_deadline.first()) and entry[0][0] <= now:
            self._by_deadline.discard(entry[1])
            found.append(entry[1])
        return found

    def next_deadline(self) -> float:
        """The earliest time at which a pin is due, or infinity."""
        entry = self._by_deadline.first()
        return entry[0][0] if entry else math.inf

    def cheapest_first(self) -> Generator[LivePin, None, None]:
        """Pins in the order in which they give way; those that a turn came back for are last.

        O(log pins) per pin taken. The iterator must be exhausted or closed before the
        table is used otherwise.
        """
        passed = []
        try:
            while entry := self._by_rank.first():
                self._by_rank.discard(entry[1])
                passed.append(entry)
                yield entry[1]
        finally:
            for key, pin in passed:
                if pin.ended is None:
                    self._by_rank.push(key, pin)

    def _queue(self, pin: LivePin) -> None:
        is_returning = pin.is_returning
        if is_returning:
            self._by_deadline.discard(pin)
        else:
            self._by_deadline.push((pin.next_change,), pin)
        is_last = is_returning and not pin.is_wish
        self._by_rank.push((float(is_last), *pin.rank), pin)
