"""Rollouts in the lab: batches, and what is made up of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.common.plans import ProgramPlan, Span, TurnPlan, Workload
from bench.sim.batches import BATCH_MAX, LATE_BY, RATE, Batches
from bench.sim.hardware import machine
from bench.sim.load import demand, stretched
from bench.sim.workloads.registry import build


def plan(name: str, batch: int) -> ProgramPlan:
    return ProgramPlan(name, (TurnPlan((Span(1, 900),), Span(2, 9)),), batch=batch)


def four(overlap: float = 0.0) -> Batches:
    """Two batches of four."""
    plans = tuple(plan(f"{batch}.{n}", batch) for batch in (0, 1) for n in range(4))
    return Batches(Workload("w", plans, overlap=overlap))


def begun(answer: tuple[bool, list[ProgramPlan]]) -> tuple[bool, list[str]]:
    changes, plans = answer
    return changes, [each.name for each in plans]


def test_a_batch_begins_after_the_weights_have_changed() -> None:
    batches = four()
    assert [each.name for each in batches.first()] == ["0.0", "0.1", "0.2", "0.3"]
    for name in ("0.1", "0.3", "0.0"):
        assert begun(batches.ended(name, 1.0)) == (False, [])
    assert begun(batches.ended("0.2", 2.0)) == (True, ["1.0", "1.1", "1.2", "1.3"])
    ends = [begun(batches.ended(f"1.{number}", 3.0)) for number in range(4)]
    assert ends == [(False, [])] * 4


def test_one_step_off_a_batch_begins_while_the_last_quarter_runs() -> None:
    batches = four(overlap=0.25)
    batches.ended("0.1", 1.0), batches.ended("0.3", 1.0)
    assert begun(batches.ended("0.0", 2.0)) == (False, ["1.0", "1.1", "1.2", "1.3"])
    assert begun(batches.ended("1.0", 3.0)) == (False, [])
    assert begun(batches.ended("0.2", 4.0)) == (True, [])


def test_what_counts_is_programs_per_second_the_longest_batch_and_how_late_its_last_is() -> None:
    batches = four()
    for number in range(4):
        batches.ended(f"0.{number}", 10.0 * number)
    for number in range(4):
        batches.ended(f"1.{number}", 32.0 + number)
    figures = dict(batches.figures())
    assert figures == {RATE: 8 / 35.0, BATCH_MAX: 30.0, LATE_BY: 0.0}
    assert not dict(Batches(Workload("w", (plan("a", 0),))).figures())


def test_samples_of_a_prompt_send_the_same_prompt_in_one_batch() -> None:
    made = build("rollouts", {"programs": 48, "batches": 2, "samples": 4})
    groups: dict[str, list[ProgramPlan]] = {}
    for each in made.programs:
        groups.setdefault(each.name.rpartition(".")[0], []).append(each)
    assert {len(samples) for samples in groups.values()} == {4}
    for samples in groups.values():
        assert len({each.batch for each in samples}) == 1
        assert len({each.turns[0].prompt[:2] for each in samples}) == 1
        assert {each.turns[0].prompt[-1].length for each in samples} == {1}
    assert [each.batch for each in made.programs].count(1) == 24


def test_lengths_have_heavy_tails_and_those_of_a_prompt_are_alike() -> None:
    made = build("rollouts", {"programs": 1600, "batches": 2})
    turns = sorted(len(each.turns) for each in made.programs)
    assert turns[-1] >= 4 * turns[len(turns) // 2]
    groups: dict[str, list[int]] = {}
    for each in made.programs:
        groups.setdefault(each.name.rpartition(".")[0], []).append(len(each.turns))
    means = [sum(each) / len(each) for each in groups.values()]
    spread = max(means) / min(means)
    assert spread > 3


def test_a_trainer_sends_a_batch_at_once_so_nothing_is_stretched() -> None:
    made = build("rollouts", {"programs": 32})
    assert stretched(made, 100.0) is made
    other = build("agents", {"programs": 4})
    assert stretched(other, 100.0) != other


def test_on_paper_the_second_batch_finds_nothing_and_holds_no_more_than_the_first() -> None:
    plans = tuple(replace(plan(f"{batch}.{n}", batch)) for batch in (0, 1) for n in range(2))
    h100 = machine("H100")
    asked = demand(Workload("w", plans), h100)
    alone = demand(Workload("w", plans[:2]), h100)
    assert asked.live_tokens == alone.live_tokens
    assert asked.work_s == pytest.approx(2 * alone.work_s)
