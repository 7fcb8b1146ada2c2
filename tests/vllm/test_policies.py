"""Whatever the policy: the answers are the model's own, and nothing is left behind."""

from __future__ import annotations

import pytest

from continuum_connector.config import POLICIES
from tests.vllm.agents import AgentEngine, model_output
from tests.vllm.test_everything import TIER, Agents


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
