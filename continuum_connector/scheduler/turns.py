"""Turn: one request while vLLM knows it.

Turns: the one table of all turns. It also answers what making room in DRAM asks of waiting turns.

StopStrings: whether an aborted turn ended or its client went away.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import structs

from continuum_connector.programs.continuation import Divergence
from continuum_connector.programs.program import Identity, Program
from continuum_connector.scheduler.against_stock import AgainstStock
from continuum_connector.scheduler.kv_groups import NO_BLOCKS, ChainBlocks
from continuum_connector.scheduler.pins import LivePin
from continuum_connector.scheduler.tiers.base import Told
from continuum_connector.toolcalls.reader import BackgroundTokenizer


class TurnEnd(enum.Enum):
    """How vLLM says that a request ended."""

    STOP = "stop"  # the model ended its answer
    LENGTH = "length"  # it reached a token limit
    ABORTED = "aborted"  # by the API server: a stop string matched, or the client went away
    FAILED = "failed"  # by vLLM, as after a load that failed


BY_ITSELF = (TurnEnd.STOP, TurnEnd.LENGTH)  # it ran, so nothing is being loaded for it


class State(enum.Enum):
    """Where a turn stands; `Turns` alone moves it."""

    WAITING = "waiting"  # it has never run
    RUNNING = "running"  # it computes, or loads first
    PREEMPTED = "preempted"  # and it has not been admitted again yet


def strays(program: Program, identity: Identity, hashes: Sequence[bytes]) -> bool:
    """Whether a turn says `final` without continuing what its program's last turn left.

    A program's id can be guessed, and a call that is no part of the program may carry it, so
    the content must show whether the turn really ends the program. If no turn of the program
    has left anything yet, another turn under way shows that there is more to come. A stray turn
    has its place in the queue, and takes nothing of the program.
    """
    if not identity.hints.final:
        return False
    kept = program.kept
    return not kept.goes_on_in(hashes) if kept.marks else program.num_active > 1


class InUse(NamedTuple):
    """An adapter's id. `is_awaited`: the turn that uses it loads, or has loaded, and does not run
    yet."""

    adapter: int
    is_awaited: bool


@dataclass(eq=False)
class Turn:
    """One request while vLLM knows it: the one record of it. `number` counts the program's turns
    from 1; `arrival` is monotonic seconds.

    `is_stray`: what `strays` said at its arrival, and says again at its end. `since`: the end of
    the earlier turn that it continues, the key in `Program.left`; None if it continues none.
    `diverged`: where its prompt departs from its program's earlier ones, if it repeats them without
    continuing any. `epoch`: the epoch of its oldest KV. `max_head_start_s`: how much earlier than
    its arrival it may stand in line.

    `vram_tokens`: tokens that VRAM had for it when vLLM last looked before it ran; `hit_tokens`:
    tokens of its prompt that were found, by memory, nearest first, once it runs; `stock_tokens`:
    what stock vLLM would have had for it, None if nobody knows (stock.py). `taken`: what a pin held
    for it. `is_let_in`: the gate let it pass, after `held_s`. `was_tried`: vLLM has tried
    to admit it, where a memory lies below DRAM. `below`: what that had for it, if anything of use.
    `awaits_below`: when last asked, it had to wait for some of that to come up.
    `num_wanted`: blocks that it wants to load, while it waits for the bus. `adapter`: what it uses
    of a step's places for adapters.
    """

    request_id: str
    program: Program
    identity: Identity
    number: int
    arrival: float
    is_stray: bool = False
    since: float | None = None
    diverged: Divergence | None = None
    epoch: int = 0
    max_head_start_s: float = 0.0
    state: State = State.WAITING
    vram_tokens: int = 0
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    stock_tokens: int | None = None
    taken: ChainBlocks = NO_BLOCKS
    is_let_in: bool = False
    held_s: float = 0.0
    was_tried: bool = False
    below: Told | None = None
    awaits_below: bool = False
    num_wanted: int = 0
    adapter: InUse | None = None
    _pin: LivePin | None = None
    program_arrival: float = field(init=False)  # its program's arrival, as it was when it came

    def __post_init__(self) -> None:
        self.program_arrival = self.program.arrival

    @property
    def is_admitted(self) -> bool:
        """Whether it has run, so that it may have held blocks."""
        return self.state is not State.WAITING

    @property
    def pin(self) -> LivePin | None:
        """The pin that waits for it."""
        return self._pin if self._pin is not None and self._pin.ended is None else None

    @property
    def against_stock(self) -> AgainstStock | None:
        """The tokens that it found by who kept them; None if nobody knows."""
        if self.stock_tokens is None:
            return None
        return AgainstStock.of(sum(self.hit_tokens.values()), self.stock_tokens)

    def place(self) -> float:
        """The turn's place in line, in monotonic seconds: its program's arrival, or half the head
        start earlier if its KV is pinned. The place is never earlier than its own arrival by more
        than the head start, so that a turn that comes later by that much cannot pass turns that
        already wait.
        """
        pin = self.pin
        return self._place(pin is not None and pin.leads(self))

    def victim_place(self) -> float:
        """Its place among those that run: its program's last turn ranks half the head start
        earlier."""
        return self._place(bool(self.identity.hints.final) and not self.is_stray)

    def _place(self, is_ahead: bool) -> float:
        program = self.program.arrival - (self.max_head_start_s / 2 if is_ahead else 0.0)
        return max(program, self.arrival - self.max_head_start_s)

    # --- what becomes of it -----------------------------------------------------------
    def set_pin(self, pin: LivePin) -> None:
        """It has come back for the pin."""
        self._pin = pin

    def let_in(self, held_s: float = 0.0) -> None:
        """The gate lets it in, after so long."""
        self.is_let_in, self.held_s = True, held_s

    def set_below(self, below: Told | None) -> None:
        """The memory below DRAM has that for it."""
        self.below = below

    def set_awaits_below(self, awaits: bool) -> None:
        """It waits for blocks that come up to DRAM, or no longer does."""
        self.awaits_below = awaits

    def note_tried(self) -> None:
        """vLLM tries to admit it."""
        self.was_tried = True

    def set_num_wanted(self, num_blocks: int) -> None:
        """It waits for the bus, to load so many blocks; 0: it no longer does."""
        self.num_wanted = num_blocks

    def set_adapter(self, adapter: InUse | None) -> None:
        """It runs or loads with that LoRA adapter; None: it does neither."""
        self.adapter = adapter

    def note_vram_hit(self, num_vram_tokens: int, epoch: int) -> None:
        """vLLM would admit it, and VRAM has so much for it, of this epoch or a later one."""
        self.epoch = epoch
        if self.state is State.WAITING:
            self.vram_tokens = num_vram_tokens

    def set_epoch(self, epoch: int) -> None:
        """It has its blocks, whose KV is of this epoch or a later one."""
        self.epoch = epoch

    def note_hits(self, in_tier: Mapping[str, int], in_stock: int | None) -> None:
        """It is about to run for the first time, and so much was there for it."""
        self.hit_tokens = {"vram": self.vram_tokens, **in_tier}
        self.stock_tokens = in_stock

    def take_over(self, blocks: ChainBlocks) -> None:
        """It has taken over what a pin held."""
        self.taken = blocks

    def recheck_stray(self, hashes: Sequence[bytes]) -> None:
        """It is over, with these blocks; others may have ended since its arrival."""
        self.is_stray = strays(self.program, self.identity, hashes)


class Turns:
    """Every turn that vLLM knows, by request id, from its arrival to its end.

    Turns that have never run count as waiting. Their number and their programs are kept up to date
    with every turn, because thousands may wait while a turn ends in each step.
    """

    def __init__(self) -> None:
        self._turns: dict[str, Turn] = {}
        self._arrivals: list[float] = []  # of the programs of those that wait, ascending
        self._num_by_program: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._turns)

    def get(self, request_id: str) -> Turn | None:
        return self._turns.get(request_id)

    def all(self) -> Iterable[Turn]:
        return self._turns.values()

    def begin(self, turn: Turn) -> None:
        """The turn has arrived, and waits."""
        self._turns[turn.request_id] = turn
        insort(self._arrivals, turn.program_arrival)
        self._num_by_program[turn.program.key] += 1

    def run(self, turn: Turn) -> None:
        """The turn is admitted, for the first time or again."""
        if turn.state is State.WAITING:
            self._no_longer_waits(turn)
        turn.state = State.RUNNING

    def preempt(self, turn: Turn) -> None:
        turn.state = State.PREEMPTED

    def end(self, request_id: str) -> Turn | None:
        """Forget the turn and return it; None if it is not known."""
        turn = self._turns.pop(request_id, None)
        if turn is not None and turn.state is State.WAITING:
            self._no_longer_waits(turn)
        return turn

    def make_last(self, program: Program) -> None:
        """The program's turns under way are its last, as if their client had said so."""
        for turn in self._turns.values():
            if turn.program is program:
                hints = structs.replace(turn.identity.hints, final=True)
                turn.identity = structs.replace(turn.identity, hints=hints)

    @property
    def num_waiting(self) -> int:
        return len(self._arrivals)

    def has_waiting(self, program: str) -> bool:
        """Whether a turn of the program waits."""
        return program in self._num_by_program

    def share_ahead(self, arrival: float) -> float:
        """The share of the waiting turns whose programs arrived before `arrival`."""
        return bisect_left(self._arrivals, arrival) / len(self._arrivals) if self._arrivals else 0.0

    def _no_longer_waits(self, turn: Turn) -> None:
        del self._arrivals[bisect_left(self._arrivals, turn.program_arrival)]
        key = turn.program.key
        self._num_by_program[key] -= 1
        if not self._num_by_program[key]:
            del self._num_by_program[key]


TAIL_TOKENS = 64  # stop strings are short; async scheduling adds a few tokens after them


class StopStrings:
    """Tells an aborted turn that a stop string ended from one whose client went away.

    Stop strings are matched in the API server, which then aborts the request: the scheduler
    sees FINISHED_ABORTED in both cases (vLLM v1/engine/output_processor.py). The text tells them
    apart. The tokenizer begins to load when the first request with stop strings arrives.
    """

    def __init__(self, tokenizer: BackgroundTokenizer) -> None:
        self._tokenizer = tokenizer

    def arrived(self, request: Any) -> None:
        """A turn arrives; if it has stop strings, begin to load the tokenizer."""
        if _stop_strings(request):
            self._tokenizer.start()

    def went_away(self, request: Any) -> bool:
        """Whether an aborted turn's client is gone.

        If the turn has no stop strings, it is. Otherwise the text decides. While the tokenizer is
        not loaded, the turn counts as ended, because a pin is a preference and expires by itself.
        """
        stops = _stop_strings(request)
        if not stops or not request.num_output_tokens:
            return True
        tokenizer = self._tokenizer.get()
        if tokenizer is None:
            return False
        try:
            text = tokenizer.decode(list(request.output_token_ids[-TAIL_TOKENS:]))
        except Exception:  # a tokenizer may raise on any id; the step must go on
            return False
        return not any(stop in text for stop in stops)


def _stop_strings(request: Any) -> list[str]:
    params = request.sampling_params
    stop = params.stop if params is not None else None
    return [stop] if isinstance(stop, str) else list(stop or ())
