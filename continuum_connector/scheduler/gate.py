"""Gate: holds a program's first turn while starting it would cost the others more than idle time.

If live KV exceeds VRAM and DRAM, each start pushes out another program's context, which must be
computed or loaded again in every cycle, as long as too many programs are under way. No eviction
order mends that. So the first turn in line begins once its context fits, or once the GPU or the bus
has been idle, per cycle, for as long as the start will cost it. A turn that has waited for `wait_s`
begins anyway. docs/decisions.md says why, and proves the bound.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from continuum_connector.costs.costs import Costs
from continuum_connector.costs.prefill import Work
from continuum_connector.observe.account import Account
from continuum_connector.scheduler.lazy_heap import LazyHeap
from continuum_connector.scheduler.tiers.base import Tier
from continuum_connector.scheduler.turns import Turn
from continuum_connector.scheduler.working_set import WorkingSet

# The program that is pushed out pays once per cycle, and so may the next one that it pushes out.
# Between 1 and 2 the value makes no difference.
COST_FACTOR = 1.5
# Share of a mean turn: a smaller prompt passes, and its program is held once it has grown.
SMALL = 0.2
REFRESHED_PER_STEP = 4  # programs under way, while a turn is held


class Because(enum.Enum):
    """Why a turn that was held may begin."""

    FITS_VRAM = "fits_vram"
    FITS_DRAM = "fits_dram"  # and the bus has time to load the context again once per cycle
    GPU_IDLE = "gpu_idle"  # the GPU has time to compute the context again once per cycle
    EMPTY = "empty"  # no other turn is under way
    DEADLINE = "deadline"  # it has waited long enough
    SWITCHED_OFF = "switched_off"


class Bank:
    """Idle seconds of about the last cycle: older ones decay, with one cycle as time constant."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def advance(self, idle_s: float, passed_s: float, cycle_s: float) -> None:
        """`passed_s` have passed, of which `idle_s` were idle."""
        self.seconds = self.seconds * math.exp(-passed_s / cycle_s) + min(idle_s, cycle_s)

    def pay(self, cost_s: float) -> bool:
        """Take `cost_s` if the bank has it, so that a burst cannot spend the same idle time
        twice."""
        if cost_s > self.seconds:
            return False
        self.seconds -= cost_s
        return True


@dataclass(eq=False)
class Held:
    """A turn at the gate. `work_s`: the prefill that its program still needs. `cost_s`: what its
    start would cost others per cycle of `cycle_s`, estimated when it came."""

    request_id: str
    turn: Turn
    num_tokens: int
    since: float
    deadline: float
    work_s: float
    cost_s: float
    cycle_s: float
    because: Because | None = None  # set once the turn is let in

    def trace_fields(self) -> dict[str, Any]:
        """What the trace records of the turn once it is let in."""
        because = self.because.value if self.because else None
        return {
            "because": because,
            "held_s": self.turn.held_s,
            "cost_s": self.cost_s,
            "cycle_s": self.cycle_s,
        }


class Gate:
    """The turns that are held, their deadlines, and the idle time.

    `wait_s`: a turn is held for at most this long or, if that is longer, for as long as the work
    takes that was under way when it came; 0: no turn is held. `vram_blocks`: all there are. For one
    thread; `now` is monotonic seconds. Microseconds per call.
    """

    def __init__(
        self,
        wait_s: float,
        vram_blocks: int,
        tier: Tier,
        costs: Costs,
        working_set: WorkingSet,
        account: Account,
    ) -> None:
        self.is_on = wait_s > 0.0
        self.working_set = working_set
        self.gpu, self.bus = Bank(), Bank()
        self._wait_s = wait_s
        self._vram_blocks = vram_blocks
        self._tier = tier
        self._costs = costs
        self._account = account
        self._line: OrderedDict[str, Held] = OrderedDict()
        self._of_program = working_set.at_gate  # whose programs need nothing yet
        self._deadlines: LazyHeap[str] = LazyHeap()
        self._held_work_s = 0.0
        self._banked_until = -math.inf
        self._step_s = 0.0  # seconds of the last step's prompt work that is not done yet
        self._is_gpu_free = self._is_bus_free = True

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._line

    def __iter__(self) -> Iterator[str]:
        return iter(self._line)

    # --- which turns are held ---------------------------------------------------------
    def holds(
        self, request_id: str, turn: Turn, num_tokens: int, num_known: int, now: float
    ) -> bool:
        """Whether the turn must wait here; repeated calls agree until it is let in.

        `num_known`: how many turns the engine has, including this one and those at the gate.
        """
        if request_id in self._line:
            return True
        if not self.is_on or turn.is_let_in:
            return False
        is_small = self._is_small(num_tokens)
        if is_small or self._may_pass(turn):
            self._let_in(turn, num_tokens, not is_small, now)
            return False
        size = self.working_set.full_size(num_tokens)
        work_s = self._costs.prefill_s(size)
        ahead_s = self.working_set.work_s + self._held_work_s
        deadline = now + max(self._wait_s, ahead_s)
        cost_s, cycle_s = self._cost_s(size), self.working_set.cycle_s
        held = Held(request_id, turn, num_tokens, now, deadline, work_s, cost_s, cycle_s)
        self._line[request_id] = held
        self._of_program.setdefault(turn.program.key, {})[request_id] = None
        self._deadlines.push((deadline,), request_id)
        self._held_work_s += work_s
        is_first = len(self._line) == 1
        if is_first and self._why_now(held, num_known - 1, now) is not None:
            self.left(request_id)
            self._let_in(turn, num_tokens, True, now)
            return False
        return True

    def open(self, num_known: int, now: float) -> Iterator[Held]:
        """Let in turns that may begin now; called before each step. `num_known`: see `holds`."""
        num_let_in = num_known - len(self._line)
        while (first := self._deadlines.first()) is not None and first[0][0] <= now:
            for held in self._begin(first[1], Because.DEADLINE, now):
                num_let_in += 1
                yield held
        while self._line:
            held = next(iter(self._line.values()))
            because = self._why_now(held, num_let_in, now)
            if because is None:
                return
            for each in self._begin(held.request_id, because, now):
                num_let_in += 1
                yield each

    def let_all_in(self, now: float) -> Iterator[Held]:
        """Let in all turns, and follow no program any more."""
        while self._line:
            yield from self._begin(next(iter(self._line)), Because.SWITCHED_OFF, now)
        self.working_set.clear()

    def left(self, request_id: str) -> None:
        """The turn is over; if it was held, its client went away."""
        held = self._line.pop(request_id, None)
        if held is not None:
            self._deadlines.discard(request_id)
            beside = self._of_program[held.turn.program.key]
            del beside[request_id]
            if not beside:
                del self._of_program[held.turn.program.key]
            self._held_work_s = self._held_work_s - held.work_s if self._line else 0.0

    # --- idle time --------------------------------------------------------------------
    def stepped(
        self, work: Work | None, is_loading: bool, is_anybody_waiting: bool, now: float
    ) -> None:
        """A step was put together. A step that only decodes counts as idle, because a prompt in it
        would cost no throughput. If a load is under way or a turn waits, work is coming, and the
        GPU does not count as idle."""
        self._bank_idle_time(now)
        if work is not None:  # else the step only decodes; an earlier prompt may still run
            self._step_s = self._costs.prompt_s(work)
        self._is_gpu_free = not (is_loading or is_anybody_waiting)
        self._is_bus_free = not is_loading

    def _bank_idle_time(self, now: float) -> None:
        """Put the idle part of the time since the last call into the banks."""
        passed = now - self._banked_until
        if passed <= 0.0:
            return
        self._banked_until = now
        if math.isinf(passed):
            return
        busy_s = min(passed, self._step_s)
        self._step_s -= busy_s
        cycle_s = max(self.working_set.cycle_s, 1e-3)
        self.gpu.advance(passed - busy_s if self._is_gpu_free else 0.0, passed, cycle_s)
        self.bus.advance(passed if self._is_bus_free else 0.0, passed, cycle_s)

    def update_gauges(self) -> None:
        """Set the gauges, which are levels, not events; called about once a second."""
        account = self._account
        account.gauge("gate_held", len(self._line))
        account.gauge("gate_bank_seconds", self.gpu.seconds, "gpu")
        account.gauge("gate_bank_seconds", self.bus.seconds, "bus")
        account.gauge("working_set_blocks", self.working_set.blocks)
        account.gauge("working_set_programs", len(self.working_set))

    # --- parts ------------------------------------------------------------------------
    def _is_small(self, num_tokens: int) -> bool:
        blocks = self.working_set.num_blocks(num_tokens)
        return bool(blocks < SMALL * self._costs.mean_blocks)

    def _may_pass(self, turn: Turn) -> bool:
        """Whether the turn passes unheld. A program that has begun does, and so does a child that
        names its parent, because the parent waits for it. So does a program's last turn, after
        which the program needs no KV again."""
        hints = turn.identity.hints
        is_last = bool(hints.final) and not turn.is_stray
        return is_last or hints.parent is not None or self.working_set.has_begun(turn)

    def _cost_s(self, size: int) -> float:
        """GPU seconds per cycle that a program of that size costs the programs it pushes out."""
        return COST_FACTOR * self.working_set.return_share * self._costs.prefill_s(size)

    def _why_now(self, held: Held, num_let_in: int, now: float) -> Because | None:
        if num_let_in <= 0:
            return Because.EMPTY
        self._bank_idle_time(now)
        self.working_set.refresh(REFRESHED_PER_STEP, now)
        size = self.working_set.full_size(held.num_tokens)
        blocks = self.working_set.num_blocks(size)
        wanted = self.working_set.blocks + blocks
        if wanted <= self._vram_blocks:
            return Because.FITS_VRAM
        # Not their sum, because what turns have in VRAM needs room in DRAM at their ends.
        fits_dram = wanted <= max(self._vram_blocks, self._tier.num_blocks)
        if fits_dram and self.bus.pay(self._costs.load_s(blocks)):
            return Because.FITS_DRAM
        return Because.GPU_IDLE if self.gpu.pay(self._cost_s(size)) else None

    def _begin(self, request_id: str, because: Because, now: float) -> Iterator[Held]:
        """Let in the request and all others of its program, because the program has begun now."""
        beside = self._of_program[self._line[request_id].turn.program.key]
        for each in (request_id, *(other for other in beside if other != request_id)):
            yield self._let_out(each, because, now)

    def _let_out(self, request_id: str, because: Because, now: float) -> Held:
        held = self._line[request_id]
        self.left(request_id)
        held.because, held.turn.held_s = because, now - held.since
        self._account.count("gate_opened", label=because.value)
        self._account.observe("gate_wait_seconds", held.turn.held_s)
        self._let_in(held.turn, held.num_tokens, True, now)
        return held

    def _let_in(self, turn: Turn, num_tokens: int, has_begun: bool, now: float) -> None:
        turn.is_let_in = True
        self.working_set.let_in(turn, num_tokens, has_begun, now)
