"""Whatever the policy: the answers are the model's own, and nothing is left behind."""

from __future__ import annotations

import pytest

from continuum_connector.config import POLICIES
from tests.vllm.agents import AgentEngine, model_output
from tests.vllm.test_everything import TIER, Agents
from tests.vllm.tiering import MODES


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("extra", [{}, TIER], ids=["vram", "tier"])
def test_choosing_another_policy_changes_no_answer(policy: str, extra: dict[str, str]) -> None:
    engine = AgentEngine(52, max_num_seqs=4, extra_config=extra | {"policy": policy})
    Agents(engine, seed=5).run(num_turns=16)
    for request_id, outputs in engine.outputs.items():
        tokens = engine.requests[request_id].prompt_token_ids
        assert outputs == model_output(tokens, len(outputs)), request_id
    engine.clock.advance(60)
    engine.run_until_idle()
    assert (engine.usage(), engine.num_pins()) == (0, 0)


@MODES
@pytest.mark.parametrize("extra", [{}, TIER], ids=["vram", "tier"])
def test_adaptive_where_nothing_costs_anything_is_program_order(
    extra: dict[str, str], async_scheduling: bool
) -> None:
    """Law 5: what is left of us is the order, to the very step."""
    played = []
    for policy in ("program_order", "adaptive"):
        engine = AgentEngine(
            52,
            max_num_seqs=4,
            async_scheduling=async_scheduling,
            extra_config=extra | {"policy": policy},
        )
        costs = engine.connector.costs
        for name in ("prefill_s", "load_s", "queueing_s", "price"):
            setattr(costs, name, lambda *_: 0.0)
        Agents(engine, seed=7).run(num_turns=40)
        assert engine.num_preemptions > 2
        assert engine.total("decisions", "free") == engine.total("decisions")
        played.append(engine)
    plain, ours = played
    assert ours.admissions == plain.admissions
    assert ours.num_preemptions == plain.num_preemptions
    assert ours.outputs == plain.outputs
    assert ours.cached == plain.cached
    assert ours.clock() == plain.clock()
