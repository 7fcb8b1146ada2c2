"""Lab: plays a workload on an engine in virtual time and writes down what became of each turn."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.sampling_params import SamplingParams

from bench.common.plans import ProgramPlan, Workload
from bench.sim.arms import Asking, LabArm
from bench.sim.bus import Bus, Disk, Way
from bench.sim.clock import Clock
from bench.sim.engine import Engine, Progress
from bench.sim.hardware import Machine
from bench.sim.job import RunRecord, TurnRecord

STEP_CAP_S = 10e-3  # an engine that has requests but nothing to compute looks again so soon
STUCK_S = 3600.0  # of virtual time in which nothing ends: the run is given up


class StuckError(RuntimeError):
    """No turn ended for an hour of virtual time."""


@dataclass
class Running:
    """A program under way. `open`: what its next turn still waits for."""

    plan: ProgramPlan
    next_turn: int = 0
    began: float = 0.0
    open: set[str] = field(default_factory=set)
    ended: float | None = None
    tokens: Sequence[int] = ()  # of its last prompt


class Lab:
    """One run. `play` may be called once. Raises ValueError if the arm lacks a disk."""

    def __init__(self, machine: Machine, arm: LabArm, workload: Workload) -> None:
        self.clock = Clock()
        if reason := arm.lacks(machine.drive is not None):
            raise ValueError(f"{arm.name}: {reason}")
        machine = arm.machine(machine, workload)
        self.bus = Bus(machine.gpu.pcie_rate)
        programs = {plan.name: plan for plan in workload.programs}
        length = max(32_768, 1 << (workload.num_tokens + 256).bit_length())
        policy = "priority" if arm.is_ordered else "fcfs"
        self.engine = Engine(machine, self.clock, length, arm.transfer(machine), policy)
        if drive := machine.drive:
            self.engine.disk = Disk(drive.reads, drive.writes)
        self.engine.worker = arm.worker(self.engine, self.bus)
        arm.prepare(self.engine)
        self._arm, self._workload = arm, workload
        self._running = {name: Running(plan) for name, plan in programs.items()}
        self._children: dict[tuple[str, int], list[ProgramPlan]] = {}
        self._sent: dict[str, tuple[Running, int, float]] = {}
        self.turns: list[TurnRecord] = []
        # When whose next turn arrives; of equal times, in the order in which they were put down.
        self._due: list[tuple[float, int, str]] = []
        self._count = itertools.count()
        for plan in workload.programs:
            if plan.after is None:
                self._later(plan.arrival_s, plan.name)
            else:
                self._children.setdefault(plan.after, []).append(plan)

    # -- the clients -------------------------------------------------------------------
    def _send(self, name: str, arrived: float) -> None:
        """A program's next turn arrives."""
        running = self._running[name]
        turn, index = running.plan.turns[running.next_turn], running.next_turn
        if not index:
            running.began = arrived
        request_id = f"{name}/{index}"
        self._sent[request_id] = (running, index, arrived)
        running.next_turn += 1
        before = running.plan.turns[index - 1] if index else None
        running.tokens = turn.tokens(before, running.tokens)
        script, args = turn.answer.tokens(), self._arm.args(Asking(running.plan, turn))
        self.engine.send(
            request_id,
            running.tokens,
            SamplingParams(max_tokens=len(script), ignore_eos=True, extra_args=args),
            script,
            arrival_time=arrived,
            priority=round(running.began * 1e6) if self._arm.is_ordered else 0,
        )

    def _answered(self, progress: Progress) -> None:
        running, index, arrived = self._sent.pop(progress.request_id)
        plan, now = running.plan, progress.finished
        turn = plan.turns[index]
        self.turns.append(
            TurnRecord(
                plan.name,
                index,
                arrived,
                progress.first_token,
                now,
                turn.num_prompt_tokens,
                progress.num_local,
                progress.num_external,
            )
        )
        for child in self._children.pop((plan.name, index), ()):
            self._later(now + child.arrival_s, child.name)
        if running.next_turn < len(plan.turns):
            self._await(running, now)
        else:
            running.ended, running.tokens = now, ()
            self._release(plan.name, now)

    def _await(self, running: Running, now: float) -> None:
        """The program's next turn comes a gap after now, or after the programs it joins."""
        turn = running.plan.turns[running.next_turn]
        running.open = {name for name in turn.joins if self._running[name].ended is None}
        if not running.open:
            self._later(max(now + turn.gap_s, turn.at_s), running.plan.name)

    def _release(self, name: str, now: float) -> None:
        for other in self._running.values():
            if name in other.open:
                other.open.discard(name)
                if not other.open:
                    gap_s = other.plan.turns[other.next_turn].gap_s
                    self._later(now + gap_s, other.plan.name)

    def _later(self, at: float, name: str) -> None:
        heapq.heappush(self._due, (at, next(self._count), name))

    # -- the run -----------------------------------------------------------------------
    def play(self) -> RunRecord:
        """Run until every program is answered. Raises StuckError, naming who waits, if nothing ends
        for an hour."""
        began, last_end = time.perf_counter(), 0.0
        total = sum(len(plan.turns) for plan in self._workload.programs)
        while len(self.turns) < total:
            self._arrive()
            if not self.engine.has_requests:
                self.clock.now = max(self.clock.now, self._next_arrival())
                continue
            for progress in self.engine.step(self._wake):
                last_end = progress.finished
                self._answered(progress)
            if self.clock.now > last_end + STUCK_S and self._sent:
                raise StuckError(f"{self._arm.name}: nothing ends; waiting: {sorted(self._sent)}")
        return self._record(time.perf_counter() - began)

    def _arrive(self) -> None:
        """Everything due by now happens, each at its own time; the engine was busy meanwhile."""
        while self._next_arrival() <= self.clock.now:
            arrived, _, name = heapq.heappop(self._due)
            self._send(name, arrived)

    def _next_arrival(self) -> float:
        """When the next turn arrives; infinite if nobody's is known."""
        return self._due[0][0] if self._due else math.inf

    def _wake(self) -> float:
        """When an engine with nothing to compute has something to do again, at the latest."""
        now = self.clock.now
        soon = min(self._next_arrival(), self.engine.worker.next_done(), now + STEP_CAP_S)
        return max(soon, now)

    def _record(self, wall_s: float) -> RunRecord:
        disk = self.engine.disk
        jct = {n: (r.ended or math.nan) - r.began for n, r in self._running.items()}
        return RunRecord(
            arm=self._arm.name,
            workload=self._workload.name,
            machine=self.engine.machine.gpu.name,
            seed=0,
            jct_s=jct,
            turns=self.turns,
            num_prompt_tokens=sum(turn.num_prompt for turn in self.turns),
            num_computed_tokens=self.engine.num_computed_tokens,
            num_local_tokens=sum(turn.num_local for turn in self.turns),
            num_external_tokens=sum(turn.num_external for turn in self.turns),
            stored_bytes=self.bus.num_bytes[Way.STORE],
            loaded_bytes=self.bus.num_bytes[Way.LOAD],
            num_preemptions=self.engine.num_preemptions,
            num_steps=self.engine.num_steps,
            busy_s=self.engine.busy_s,
            span_s=self.clock.now,
            wall_s=wall_s,
            written_bytes=disk.num_bytes[Way.WRITE] if disk else 0.0,
            read_bytes=disk.num_bytes[Way.READ] if disk else 0.0,
        )
