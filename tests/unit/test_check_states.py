"""Models with states: config.json -> blocks, bytes, and what an operator is told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from continuum_connector.tools.checks.line import Verdict
from continuum_connector.tools.checks.shape import FULL, MLA, STATE, Layer, count_kinds, read_shape
from continuum_connector.tools.checks.states import match_unit
from tests.unit import fake_machine as fake
from tests.unit.fake_machine import VLLM
from tests.unit.test_check_lines import plan

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "torch_dtype": "bfloat16",
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}
KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "hidden_size": 2304,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "dtype": "bfloat16",
}
WARNING, ERROR, OK, UNSEEN = Verdict.WARNING, Verdict.ERROR, Verdict.OK, Verdict.UNSEEN


@pytest.mark.parametrize(
    ("config", "flags", "kinds", "block", "state"),
    [
        (QWEN3_NEXT, {}, [(Layer(STATE), 36), (Layer(FULL), 12)], 544, 1_097_728),
        (QWEN3_NEXT, {"ssm_dtype": "float32"}, None, 1056, 2_146_304),
        ({**QWEN3_NEXT, "mamba_ssm_dtype": "float32"}, {}, None, 1056, 2_146_304),
        (NEMOTRON, {}, [(Layer(STATE), 23), (Layer(FULL), 6)], 2096, 2_134_016),
        (KIMI, {}, [(Layer(STATE), 20), (Layer(MLA), 7)], 1920, 2_170_880),
    ],
)
def test_blocks_are_as_large_as_vllm_makes_them(
    config: dict[str, Any], flags: dict[str, Any], kinds: Any, block: int, state: int
) -> None:
    """The sizes of tests/vllm/families.py, which vLLM itself groups."""
    shape = read_shape(config, **flags)
    assert (shape.block_size(), shape.state_bytes) == (block, state)
    if kinds is not None:
        assert count_kinds(shape) == kinds


def test_ranks_share_states_as_they_share_heads() -> None:
    shape = read_shape(QWEN3_NEXT)
    assert shape.block_size(2) == 544
    assert shape.block_size(4) == 272  # a KV head on each pair of ranks, a quarter of a state


def test_a_context_costs_its_tokens_and_one_state_of_each_layer() -> None:
    shape = read_shape(QWEN3_NEXT)
    token = 12 * 2048
    assert shape.context_bytes(50_000) == 50_000 * token + 36 * 544 * 2048
    assert shape.new_bytes(3_000) == 3_000 * token + 36 * 544 * 2048


def test_layers_of_state_that_are_not_known_make_blocks_that_are_not() -> None:
    config = {**QWEN3_NEXT, "linear_conv_kernel_dim": None}
    assert read_shape(config).block_size() == 0


@pytest.mark.parametrize(("block", "unit"), [(544, 32), (1056, 32), (2096, 16), (1920, 64)])
def test_the_match_unit_divides_the_blocks(block: int, unit: int) -> None:
    assert match_unit(block) == unit
    assert block % unit == 0


def said(tmp_path: Path, *words: str, model: Any = QWEN3_NEXT, **vllm: Any) -> Any:
    machine = fake.make(tmp_path, vllm={**VLLM, **vllm})
    return lambda subject: fake.one(machine, plan(*words, root=tmp_path, model=model), subject)


def test_a_model_with_states_is_served_and_its_bytes_are_told(tmp_path: Path) -> None:
    line = said(tmp_path)("model")
    assert line.verdict is OK
    assert line.text == (
        "Qwen3NextForCausalLM is served: 36 layers of states, 12 layers of full attention; "
        "24.0 KiB per token, 38.2 MiB of states per turn, blocks of 544 tokens"
    )


def test_a_match_unit_is_recommended_with_its_numbers(tmp_path: Path) -> None:
    line = said(tmp_path)("states")
    assert line.verdict is WARNING
    assert "computes up to that many again, 272 in the mean" in line.text
    assert line.cure.startswith("--prefix-match-unit 32 where answers are shorter than 256 tokens")


def test_with_a_match_unit_there_is_nothing_to_do(tmp_path: Path) -> None:
    line = said(tmp_path, "--prefix-match-unit", "32")("states")
    assert line.verdict is OK
    assert line.text.endswith("or the last answer and 16 tokens, if less")


@pytest.mark.parametrize("words", [[], ["--enable-prefix-caching"]])
def test_prefix_caching_is_off_for_states_before_0_29(tmp_path: Path, words: list[str]) -> None:
    told = said(tmp_path, *words, version="0.27.1", has_layouts=False)
    line = told("states")
    assert line.verdict is (WARNING if words else ERROR)
    assert ("prefix caching is off" in line.text) is not bool(words)
    assert ("unless the model has states" in told("prefix caching").text) is not bool(words)
    if not words:
        assert line.cure == "serve with --enable-prefix-caching"


def test_states_of_unknown_size_are_not_judged(tmp_path: Path) -> None:
    line = said(tmp_path, model={**QWEN3_NEXT, "linear_conv_kernel_dim": None})("states")
    assert line.verdict is UNSEEN


@pytest.mark.parametrize(
    ("config", "warns"),
    [
        ('{"method": "mtp", "num_speculative_tokens": 2}', True),
        ('{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}', True),
        ('{"method": "mtp", "disable_eagle_block_drop": true}', False),
        ('{"method": "ngram"}', False),
        ("{", False),
    ],
)
def test_drafts_that_cost_a_block_are_told(tmp_path: Path, config: str, warns: bool) -> None:
    machine = fake.make(tmp_path)
    from continuum_connector.tools.checks.run import check

    served = plan("--speculative-config", config, root=tmp_path, model=QWEN3_NEXT)
    found = {line.subject: line for line in check(machine, served)}
    assert ("drafts" in found) is warns
    if warns:
        assert "computes 544 tokens more" in found["drafts"].text
        assert "disable_eagle_block_drop" in found["drafts"].cure
    assert "and, with speculative decoding, the last answer" in found["states"].text
    assert "DRAM tier" not in found


def test_drafts_that_may_spoil_states_leave_no_dram_tier(tmp_path: Path) -> None:
    from continuum_connector.tools.checks.run import check

    words = ("--speculative-config", '{"method": "mtp"}')
    served = plan(*words, root=tmp_path, model=QWEN3_NEXT)
    machine = fake.make(tmp_path, vllm={**VLLM, "mends_drafted_states": False})
    [line] = [line for line in check(machine, served) if line.subject == "DRAM tier"]
    assert "vLLM 0.32 with its model runner V2 leaves right ones" in line.text


def test_a_config_json_without_model_type_is_not_ok(tmp_path: Path) -> None:
    line = said(tmp_path, model={k: v for k, v in QWEN3_NEXT.items() if k != "model_type"})("model")
    assert line.verdict is WARNING
    assert "no model_type" in line.text


def test_deepseek_v4_has_a_dram_tier_and_no_disk(tmp_path: Path) -> None:
    """Its layers are not in config.json, and yet they are several groups."""
    from continuum_connector.tools.checks.run import check

    v4 = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}
    served = plan(root=tmp_path, model=v4, disk_path=str(tmp_path), disk_bytes="8GiB")
    found = {line.subject: line for line in check(fake.make(tmp_path / "machine"), served)}
    assert "cannot be told from config.json" in found["model"].text
    assert "DRAM tier" not in found
    assert "windows, chunks or states" in found["disk tier"].text
