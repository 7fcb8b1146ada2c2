"""What bench/hook_cost times at a long turn's end and begin is what it says it is."""

from __future__ import annotations

import pytest

from bench.hook_cost.turns import CACHES, measure
from bench.sim import versions

NUM_TOKENS = 3_000


@pytest.mark.parametrize("name", CACHES)
def test_a_second_turn_finds_the_whole_first_one_in_dram(name: str) -> None:
    groups = CACHES[name]
    if len(groups) > 1 and not versions.CAN_FAIL_REQUESTS:
        pytest.skip("no DRAM tier for several groups on this vLLM")
    row = measure(groups, 3, NUM_TOKENS)
    missing = round((1 - row.pop("found")) * NUM_TOKENS)
    assert missing <= NUM_TOKENS % groups[0].block_size
    assert set(row) == {"end of a turn", "its blocks", "first look", "asked again"}
    assert all(us > 0 for us in row.values())
