"""How much KV is alive at a time, whichever way programs arrive."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bench.common.plans import Added, ProgramPlan, grown
from bench.serve.arrivals import Arrivals, read_arrivals
from bench.serve.live import live
from bench.serve.load import Load
from bench.serve.programs import Defaults, Source
from bench.serve.token_ids import Tokens
from bench.serve.workloads import PRESSURE

TURNS = Defaults("turns")


@dataclass(frozen=True)
class Growing:
    """Program n holds 100 (n + 1) tokens, and its tool takes two seconds."""

    name: str = "growing"
    defaults: Defaults = TURNS
    size: int | None = None

    def program(self, number: int, seed: int) -> ProgramPlan:
        tokens = 50 * (number + 1)
        return grown(f"p{number}", (Added(tokens - 5, 5), Added(tokens - 5, 5, 2.0)))


def load(arrivals: Arrivals | str, programs: int = 5, workload: Source | None = None) -> Load:
    if isinstance(arrivals, str):
        arrivals = read_arrivals(arrivals, 42, 45.0, programs)
    return Load(workload or Growing(), arrivals, Tokens(42), "m", programs=programs)


def test_turn_by_turn_all_programs_are_alive() -> None:
    assert live(load("turns")) == 1500
    assert live(load("turns", 6, PRESSURE)) == 6 * 1332


def test_a_closed_loop_has_as_many_alive_as_work_at_once_at_worst_the_largest() -> None:
    assert live(load("closed:2")) == 900
    assert live(load("closed:9")) == 1500


@pytest.mark.parametrize(
    ("times_s", "tokens"),
    [
        ((0.0, 10.0, 20.0), 300),  # one after the other: the largest
        ((0.0, 1.0, 1.5), 600),
        ((0.0, 1.0, 2.5), 500),  # the first has gone when the third comes
        ((0.0, 2.0, 2.0), 600),  # at that very moment it is still there
    ],
)
def test_in_an_open_loop_those_are_alive_that_overlap(
    times_s: tuple[float, ...], tokens: int
) -> None:
    assert live(load(Arrivals("poisson:1", times_s=times_s), 0)) == tokens


def test_nobody_knows_where_only_time_ends_a_closed_loop() -> None:
    assert live(load("closed:2", 0)) is None
