"""The interface of every retention policy, and the types of its answer."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from continuum_connector.forecast import Forecast
from continuum_connector.programs.continuation import Divergence
from continuum_connector.programs.program import Hints
from continuum_connector.toolcalls import UNREAD, Asked, Ending

NO_FORECAST = Forecast.never()


class After(enum.Enum):
    """What remains of a pinned turn when its pin ends."""

    STORE = "store"  # its blocks are in DRAM by then: the copy starts with the pin
    DROP = "drop"  # nothing: the blocks go back to the pool


class Pin(Struct, frozen=True):
    """Keep the turn's blocks in VRAM for `ttl_s` seconds.

    `value` ranks pins under pressure, lowest first; policies that cannot price a pin leave it 0 and
    the program that arrived last gives way first (Continuum, section 5.2). `asked_from_s`: from
    then on the pin exists only because its client asked for it, so it gives way before every other
    and does not change anybody's place in the queue.
    """

    ttl_s: float
    then: After = After.DROP
    value: float = 0.0
    asked_from_s: float = math.inf


class Offload(Struct, frozen=True):
    """Store the turn's blocks to DRAM, then free them."""


class Free(Struct, frozen=True):
    """Let go of the turn's blocks now, as stock vLLM does."""


Decision = Pin | Offload | Free


def name_of(decision: Decision) -> str:
    """The decision's label in metrics, trace and response."""
    if isinstance(decision, Pin):
        return "pin"
    return "offload" if isinstance(decision, Offload) else "free"


class HintOutcome(enum.Enum):
    """What became of a hint."""

    ACCEPTED = "accepted"  # taken into account; a wish is granted in full
    CLIPPED = "clipped"  # a wish is granted in part
    REFUSED = "refused"  # it has no effect


class Receipt(Struct, frozen=True):
    """The answer to one hint. `until_s`: for how many seconds after the turn's end a wish is
    granted. `value`: how any other hint was understood."""

    hint: str
    outcome: HintOutcome
    why: str = ""
    until_s: float | None = None
    value: Any = None


class Choice(Struct, frozen=True):
    """A decision, the reason in a few words, and what each alternative was worth.

    `values`: net seconds that all programs together are expected to gain by "pin", "pin_store",
    "offload" and "free"; empty if a policy does not price them. `receipts`: one answer for each
    hint of the turn. `reason`, `prices`: reason and values, or functions that make them. Few
    callers need them, and it takes longer to word them than to decide.
    """

    decision: Decision
    reason: str | Callable[[], str]
    prices: Mapping[str, float] | Callable[[], Mapping[str, float]] = {}
    receipts: tuple[Receipt, ...] = ()

    @property
    def why(self) -> str:
        return self.reason if isinstance(self.reason, str) else self.reason()

    @property
    def values(self) -> Mapping[str, float]:
        return self.prices() if callable(self.prices) else self.prices


def stores(decision: Decision) -> bool:
    """Whether the turn's blocks are to be in DRAM."""
    return isinstance(decision, Offload) or (
        isinstance(decision, Pin) and decision.then is After.STORE
    )


class FinishedTurn(Struct, frozen=True):
    """What is known about a turn when it ends.

    `num_tokens`: prompt and output. `num_blocks`: the hashed blocks over all KV groups, which are
    what can be kept. `aborted`: the client went away, rather than got a stop string. `asked`: the
    tool calls that the turn ends with. `gap`: when its program's next turn is expected.
    `tool_gaps`, `all_gaps`: recorded gaps in seconds, ascending, of this turn's tool and of every
    tool (Continuum's S[f] and S). `prefill_s`: seconds to compute again what those blocks hold.
    `is_prior`: that is from a prior, for no prefill was measured yet.
    `load_s`: seconds to load them from DRAM, infinite without a tier. `bus_s`: seconds
    that this load takes the bus. `diverged`: where its prompt differs from those that it goes on
    with, if it found nothing of them.
    """

    program: str
    turn: int
    num_tokens: int
    num_blocks: int
    hints: Hints
    aborted: bool = False
    asked: Asked = UNREAD
    gap: Forecast = NO_FORECAST
    tool_gaps: Sequence[float] = ()
    all_gaps: Sequence[float] = ()
    prefill_s: float = 0.0
    load_s: float = math.inf
    bus_s: float = 0.0
    is_prior: bool = False
    diverged: Divergence | None = None

    @property
    def is_last(self) -> bool:
        """Whether the client says that no turn follows, or the turn ends with a call that does."""
        return bool(self.hints.final) or self.asked.ending is Ending.LAST


class Snapshot(Struct, frozen=True):
    """The server at decision time. Blocks are VRAM blocks; `now` is monotonic seconds.
    `num_waiting`, `num_running`: turns beside the one that ends.

    `queueing_s`: how long a turn waits that has lost its blocks (Continuum's T). `eta`: how much a
    program's age says about its end, -1 to 1 (its memoryfulness). `mean_blocks`: blocks of an
    average running or waiting turn (its M). `price`: seconds of delay that one held block costs the
    others per second; 0 while nobody waits for blocks. `residence_s`: how long a stored block stays
    in DRAM before it is evicted; infinite while DRAM is not full. `num_hinted_blocks`: blocks in
    pins that a client made longer than the policy would have. From then on they count as free,
    because anybody who needs them gets them. `num_at_bus`: turns that load or wait for the bus, on
    average over the last seconds. `takes_store`: False if DRAM has just refused most of
    this turn's blocks, because what it holds is needed sooner, or busy. `pins_lose`: there
    is no load, and stock vLLM would have found more lately than we did.
    """

    now: float
    num_blocks: int
    num_free_blocks: int
    num_pinned_blocks: int
    num_waiting: int
    has_tier: bool
    num_running: int = 0
    queueing_s: float = 0.0
    eta: float = 1.0
    mean_blocks: float = 1.0
    price: float = 0.0
    residence_s: float = math.inf
    num_hinted_blocks: int = 0
    num_at_bus: float = 0.0
    takes_store: bool = True
    pins_lose: bool = False

    @property
    def num_delayed(self) -> int:
        """Turns that a prefill delays: all that run or wait, and the one that needs it."""
        return 1 + self.num_running + self.num_waiting


class Resident(Struct, frozen=True):
    """A program with blocks in DRAM, as whoever makes room there sees it.

    `last_used`: when its blocks were last stored or loaded. `finished`: when its last turn ended,
    None while one is under way. `is_waiting`: its next turn has arrived and is in the queue.
    `queueing_s`: how much longer that turn will wait, or how long its next one will once it is
    back. In program order, that is the work of the programs that came before it.
    """

    program: str
    arrival: float
    last_used: float
    finished: float | None = None
    gap: Forecast = NO_FORECAST
    is_waiting: bool = False
    queueing_s: float = 0.0


class RetentionPolicy(Protocol):
    """Decides what becomes of a finished turn, and whose blocks leave DRAM first.

    `orders`: whether waiting turns are put into program order; if not, vLLM's own order stays.
    `reads`: whether tool calls matter to it; if not, no output is read and no tokenizer is loaded.
    `ranks_dram`: whether `dram_rank` says whose blocks leave DRAM; if not, the least recently used
    leave. `heeds_stock`: whether its pins end while what they keep finds less than stock vLLM
    would. The defaults are those of policies that price nothing.
    """

    orders: bool
    reads: bool
    ranks_dram: bool = False
    heeds_stock: bool = False

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        """Return the decision and why; a pure function of its arguments."""
        ...

    def dram_rank(self, resident: Resident, now: float) -> float:
        """Return the worth of a program's blocks in DRAM: the lowest leave first.

        Programs that are done, and chains that a newer turn superseded, leave before all others.
        """
        return resident.last_used

    def aged(self, value: float, gap: Forecast, age: float) -> float:
        """Return what a pin made at `value` is worth after `age` seconds without a return."""
        return value


def must_free(turn: FinishedTurn) -> Choice | None:
    """Return the choice for a turn that every policy frees; None: it is the policy's to choose."""
    if turn.aborted:
        return Choice(Free(), "the client went away")
    if turn.is_last:
        return Choice(Free(), "last turn of its program")
    if not turn.num_blocks:
        at = turn.diverged
        return Choice(Free(), at.why if at is not None and at.is_habit else "no full block to keep")
    return None
