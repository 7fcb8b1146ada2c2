"""Every arm of bench/sim answers every turn and leaves no block behind."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench.sim.arms import ARMS, Asking
from bench.sim.arms.ours import NO_BOUND_S
from bench.sim.lab import Lab
from bench.tests.vllm.lab import assert_lets_go, small_machine, small_workload
from continuum_connector.forecast import Forecast
from continuum_connector.policy.base import Choice, Pin, Resident
from continuum_connector.policy.baselines import Released


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_answers_every_turn_and_lets_go_of_every_block(name: str) -> None:
    workload = small_workload()
    lab = Lab(small_machine(100.0 if ARMS[name].needs_disk else 0.0), ARMS[name], workload)
    record = lab.play()
    assert len(record.turns) == 8 * len(workload.programs)
    assert all(turn.arrived < turn.first_token <= turn.finished for turn in record.turns)
    assert all(0 < seconds < math.inf for seconds in record.jct_s.values())
    assert record.num_local_tokens + record.num_external_tokens < record.num_prompt_tokens
    assert_lets_go(lab)


def test_an_arm_without_tool_names_says_all_but_them() -> None:
    plan = small_workload().programs[0]
    turn = next(turn for turn in plan.turns if turn.tool)
    asking = Asking(plan, turn)
    said, unsaid = (
        ARMS[name].args(asking)["kv_transfer_params"]["continuum"]
        for name in ("adaptive", "adaptive-no-tools")
    )
    assert said == {**unsaid, "tools": [turn.tool]} != unsaid
    assert unsaid["program"] == plan.name


def test_the_fork_pins_after_calls_that_its_parser_finds_in_an_order_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide, whys = Released.decide, dict[str, set[str]]()
    for name in ("cont-pin", "released"):
        said: list[Choice] = []

        def decided(*asked: Any, said: list[Choice] = said) -> Choice:
            said.append(decide(*asked))
            return said[-1]

        monkeypatch.setattr(Released, "decide", decided)
        lab = Lab(small_machine(), ARMS[name], small_workload())
        assert lab.engine.connector.config.max_head_start_s == NO_BOUND_S
        lab.play()
        whys[name] = {each.why for each in said if isinstance(each.decision, Pin)}
        assert len(said) == 8 * len(lab._running)
    assert whys == {"cont-pin": whys["cont-pin"], "released": set()}
    assert "this tool's first call" in whys["cont-pin"]


def test_fixed_ttl_with_adaptives_order_in_dram_decides_as_one_and_ranks_as_the_other() -> None:
    workload = small_workload()
    lab = Lab(small_machine(), ARMS["fixed_ttl-dram-order"], workload)
    side = lab.engine.connector.side
    assert side.tier.rank_at == side._worth.rank_at
    soon, late = (
        Resident("p", 0.0, last_used=0.0, finished=0.0, gap=Forecast.known(gap_s))
        for gap_s in (1.0, 60.0)
    )
    rank = side.decider.policy.dram_rank
    assert rank(soon, 0.0) > rank(late, 0.0)
    lab.play()
    num_pinned = sum(not turn.is_final for plan in workload.programs for turn in plan.turns)
    assert side.records.account.total("decisions", "pin") == num_pinned
