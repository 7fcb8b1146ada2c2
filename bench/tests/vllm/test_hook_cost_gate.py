"""bench.hook_cost.gate, small: it measures a gate that holds what it says."""

from __future__ import annotations

from bench.hook_cost.gate import measure


def test_so_many_are_held_and_each_step_and_each_arrival_is_measured() -> None:
    timed = measure(num_under_way=200, num_held=50, num_steps=5)
    assert {name: len(us) for name, us in timed.items()} == {"step": 5, "arrival": 5}
    assert min(map(min, timed.values())) > 0.0
