"""How much a workload asks of a machine: what makes the cells of the matrix comparable.

All of it is arithmetic on the plan, as if the machine forgot nothing and each turn were alone.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace

from bench.common.plans import ProgramPlan, Span, TurnPlan, Workload
from bench.sim.hardware import Machine, step_seconds
from continuum_connector.costs import Work


@dataclass(frozen=True)
class Demand:
    """`work_s`: GPU seconds of all turns with a perfect memory; `live_tokens`: the most KV that
    programs under way have at once, from a program's first turn to the end of its last, with a
    perfect memory and no queue; states count as the tokens whose place they take."""

    work_s: float
    live_tokens: int


def prefill_seconds(machine: Machine, turn: TurnPlan, num_known: int) -> float:
    """Seconds to compute a turn's prompt alone, `num_known` tokens of it being cached."""
    num_new = turn.num_prompt_tokens - num_known
    work = Work(num_new=num_new, pairs=num_new * (num_known + num_new / 2))
    more_steps = math.ceil(num_new / machine.gpu.chunk) - 1
    return step_seconds(machine, work) + more_steps * machine.gpu.step_s


def answer_seconds(machine: Machine, turn: TurnPlan) -> tuple[float, float]:
    """Seconds to say a turn's answer: added to the steps of others, and alone."""
    decode = Work(num_decodes=1, decode_context=turn.num_prompt_tokens)
    step_s = step_seconds(machine, decode)
    num_steps = turn.answer.length - 1  # the first token comes with the prefill
    return num_steps * (step_s - step_seconds(machine, Work())), num_steps * step_s


class Seen:
    """Remembers prompts and answers, which are equal where the spans before them are.

    `unit`: tokens that are known all or none; `num_dropped`: units at the end of what is known
    that are computed again all the same.
    """

    def __init__(self, unit: int = 1, num_dropped: int = 0) -> None:
        self._unit, self._num_dropped = unit, num_dropped
        self._lengths: dict[tuple[tuple[Span, ...], int, int], int] = {}

    def known(self, turn: TurnPlan) -> int:
        """Tokens of the turn's prompt that were said before, at least one less than all of it:
        vLLM computes the last one again."""
        known, before = 0, tuple[Span, ...]()
        for span in turn.prompt:
            length = self._lengths.get((before, span.stream, span.start), 0)
            known += min(length, span.length)
            if length < span.length:
                break
            before = (*before, span)
        num_units = min(known, turn.num_prompt_tokens - 1) // self._unit
        return max(0, num_units - self._num_dropped) * self._unit

    def add(self, turn: TurnPlan) -> None:
        """Remember a turn's prompt and, where it goes on with it, its answer."""
        before = tuple[Span, ...]()
        for span, said in zip(turn.prompt, turn.said, strict=False):
            key = (before, span.stream, span.start)
            self._lengths[key] = max(self._lengths.get(key, 0), said.length)
            before = (*before, span)


@dataclass
class _OnPaper:
    """Plays a workload without an engine: no turn waits for another program's."""

    machine: Machine
    programs: dict[str, ProgramPlan]
    seen: Seen
    work_s: float = 0.0
    changes: list[tuple[float, int]] = field(default_factory=list)  # when, tokens of KV
    _due: list[tuple[float, str, int]] = field(default_factory=list)
    _ended: dict[str, float] = field(default_factory=dict)
    _waiting: dict[str, tuple[float, int]] = field(default_factory=dict)  # the turn before's end
    _held: dict[str, int] = field(default_factory=dict)

    def play(self) -> None:
        for plan in self.programs.values():
            if plan.after is None:
                heapq.heappush(self._due, (plan.arrival_s, plan.name, 0))
        while self._due:
            self._turn(*heapq.heappop(self._due))

    def _turn(self, now: float, name: str, index: int) -> None:
        plan = self.programs[name]
        turn = plan.turns[index]
        known = self.seen.known(turn)
        self.seen.add(turn)
        prefill_s = prefill_seconds(self.machine, turn, known)
        added_s, alone_s = answer_seconds(self.machine, turn)
        self.work_s += prefill_s + added_s
        held = self.machine.held_tokens(turn.num_prompt_tokens + turn.answer.length)
        self._hold(now, name, held)
        self._answered(now + prefill_s + alone_s, plan, index)

    def _answered(self, now: float, plan: ProgramPlan, index: int) -> None:
        for child in self.programs.values():
            if child.after == (plan.name, index):
                heapq.heappush(self._due, (now + child.arrival_s, child.name, 0))
        if index + 1 < len(plan.turns):
            self._waiting[plan.name] = now, index + 1
        else:
            self._ended[plan.name] = now
            self._hold(now, plan.name, 0)
        for name, (before, next_index) in list(self._waiting.items()):
            turn = self.programs[name].turns[next_index]
            if all(other in self._ended for other in turn.joins):
                begin = max([before, *(self._ended[other] for other in turn.joins)])
                heapq.heappush(self._due, (begin + turn.gap_s, name, next_index))
                del self._waiting[name]

    def _hold(self, now: float, name: str, num_tokens: int) -> None:
        self.changes.append((now, num_tokens - self._held.get(name, 0)))
        self._held[name] = num_tokens


def demand(workload: Workload, machine: Machine) -> Demand:
    """Play the workload on paper and say what it asks."""
    num_dropped = 1 if machine.model.num_drafts else 0  # vLLM drops a block for the MTP layer
    seen = Seen(machine.reuse_unit, num_dropped)
    plans = {plan.name: plan for plan in workload.programs}
    paper = _OnPaper(machine, plans, seen)
    paper.play()
    held = most = 0
    for _, change in sorted(paper.changes):
        held += change
        most = max(most, held)
    return Demand(paper.work_s, most)


def stretched(workload: Workload, window_s: float) -> Workload:
    """The same programs, arriving within `window_s` instead of a second."""
    programs = (
        plan if plan.after else replace(plan, arrival_s=plan.arrival_s * window_s)
        for plan in workload.programs
    )
    return replace(workload, programs=tuple(programs))
