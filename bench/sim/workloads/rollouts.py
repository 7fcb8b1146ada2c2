"""Rollouts: batches of trajectories, several of each prompt, after which a trainer changes the
weights. Made up; lengths have heavy tails, and those of one prompt are alike."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from bench.common.plans import ProgramPlan, Span, Streams, Talk, Workload
from bench.sim.workloads.shape import Shape

SENT_S = 2e-3  # between two requests that a trainer sends at once
LONGEST = 4.0  # times the median, of turns and answers


@dataclass(frozen=True)
class Rollouts(Shape):
    """Of a Shape: `programs` in all `batches`, `samples` of a prompt; `turns` and `answer` are
    medians; `context` and `first`, as if a trajectory of so many turns had it: `first` of it is the
    prompt, the rest comes evenly. `alike`, `apart`: the spread of the lengths of prompts, and of
    one prompt's samples, as the deviation of a logarithm; `overlap`: as in Workload."""

    programs: int = 192
    turns: int = 6
    context: int = 8_000
    answer: int = 96
    gaps: str = "coding"
    gap_scale: float = 0.2
    longest_s: float = 60.0
    samples: int = 8
    batches: int = 3
    alike: float = 0.5
    apart: float = 0.5
    overlap: float = 0.0


def rollouts(shape: Rollouts) -> Workload:
    """As many prompts in every batch."""
    rng, streams = shape.rng("rollouts"), Streams()
    system = Span(streams.new(), shape.shared)
    programs: list[ProgramPlan] = []
    prompts = max(1, shape.programs // (shape.batches * shape.samples))
    for batch in range(shape.batches):
        for number in range(prompts):
            task = Span(streams.new(), round(shape.context * shape.first) - shape.shared)
            harder = math.exp(rng.gauss(0.0, shape.alike))
            for sample in range(shape.samples):
                talk = Talk(streams, (system, task))
                _grow(shape, talk, rng, harder)
                sent_s = (number * shape.samples + sample) * SENT_S
                name = f"batch{batch}.{number}.{sample}"
                plan = shape.program(name, talk.turns(), sent_s)
                programs.append(replace(plan, batch=batch))
    return Workload("rollouts", tuple(programs), shape.gap.note, shape.overlap)


def _grow(shape: Rollouts, talk: Talk, rng: random.Random, harder: float) -> None:
    """The first turn's prompt is the task alone, of which all samples have the same."""
    num_turns = _heavy(rng, shape.turns * harder, shape.apart, shape.turns * LONGEST)
    result = shape.context * (1.0 - shape.first) / shape.turns
    gap_s = 0.0
    for index in range(num_turns):
        answer = _heavy(rng, shape.answer, shape.apart, shape.answer * LONGEST)
        num_new = shape.about(rng, result) - answer if index else 1
        next_gap_s, tool = shape.gap.draw(rng)
        talk.turn(num_new, answer, gap_s, tool)
        gap_s = next_gap_s


def _heavy(rng: random.Random, median: float, deviation: float, most: float) -> int:
    """A number from a log-normal distribution, from one to `most`."""
    return round(min(max(1.0, median * math.exp(rng.gauss(0.0, deviation))), most))
