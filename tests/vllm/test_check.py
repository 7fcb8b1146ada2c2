"""`continuum check` beside the real vLLM: it sees this one, and both give the same answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # >= 0.33
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

pytest.importorskip("typer")
from typer.testing import CliRunner

from bench.sim import versions
from continuum_connector import build, compat
from continuum_connector.checks.line import Verdict
from continuum_connector.checks.machine import this_machine
from continuum_connector.checks.model import aside
from continuum_connector.checks.plan import Plan
from continuum_connector.checks.seen import Seen, VllmSeen
from continuum_connector.checks.serving import lines
from continuum_connector.checks.shape import read_shape
from continuum_connector.cli.app import app

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
HEADS = {"block_size": 16, "dtype": torch.bfloat16, "num_kv_heads": 2, "head_size": 32}
LATENT = {"block_size": 16, "dtype": torch.bfloat16, "num_kv_heads": 1}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=64)
MLA = MLAAttentionSpec(**LATENT, head_size=576)
SPARSE = MLAAttentionSpec(**LATENT, head_size=576, cache_dtype_str="auto")
INDEX = MLAAttentionSpec(**LATENT, head_size=128)
STATE = MambaSpec(
    block_size=16,
    shapes=((2, 64),),
    dtypes=(torch.bfloat16,),
    page_size_padded=FULL.page_size_bytes,
)
MLA_MODEL = {**MODEL, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def config_of(enable_prefix_caching: bool = True) -> Any:
    config = versions.vllm_config(
        block_size=16,
        enable_prefix_caching=enable_prefix_caching,
        world_size=1,
        transfer=None,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        policy="fcfs",
    )
    if hasattr(config.cache_config, "kv_cache_layout"):  # 0.32: the engine resolves it first
        config.cache_config.kv_cache_layout = "LBNHC"
    return config


@pytest.mark.parametrize(
    ("model", "specs"),
    [
        (MODEL, [FULL] * 4),
        ({**MODEL, "sliding_window": 64}, [WINDOW] * 4),
        ({**MODEL, "sliding_window": 64, "sliding_window_pattern": 2}, [WINDOW, FULL] * 2),
        (MLA_MODEL, [MLA] * 4),
        ({**MLA_MODEL, "index_topk": 2048}, [SPARSE, INDEX] * 4),
        ({**MODEL, "layer_types": ["mamba", "attention"] * 2}, [STATE, FULL] * 2),
    ],
    ids=["full", "windows", "hybrid", "MLA", "MLA with an indexer", "Mamba"],
)
def test_the_server_and_the_check_step_aside_for_the_same_models(
    model: dict[str, Any], specs: list[KVCacheSpec]
) -> None:
    layers = {f"model.layers.{i}.attn": spec for i, spec in enumerate(specs)}
    config = config_of()
    groups = SimpleNamespace(kv_cache_groups=get_kv_cache_groups(config, layers))
    at_start = build.reason_to_step_aside(config, groups)
    before = aside(Plan(), read_shape(model))
    assert bool(before) is bool(at_start), (before, at_start)
    if before:  # the same sentence, but for the number of the group
        assert before.split(" is ")[1] == at_start.split(" is ")[1]


def test_attention_that_drops_blocks_amid_a_turn_is_not_served_though_vllm_calls_it_full() -> None:
    groups = get_kv_cache_groups(config_of(), {"layer": RSWASpec(**HEADS, rswa_window=64)})
    why = build.reason_to_step_aside(config_of(), SimpleNamespace(kv_cache_groups=groups))
    assert "RSWASpec, which is not proven" in why


def test_the_server_and_the_check_say_the_same_of_prefix_caching() -> None:
    config = config_of(enable_prefix_caching=False)
    at_start = build.reason_to_step_aside(config, versions.kv_cache_config(100, 16, (None,)))
    machine, plan = this_machine(os.environ), Plan(prefix_caching=False)
    line = next(iter(lines(machine, plan, VllmSeen())))
    assert line.verdict is Verdict.ERROR
    assert f"{line.text}; {line.cure}" == f"the connector steps aside: {at_start}"


def test_this_vllm_is_seen() -> None:
    seen = Seen(this_machine(os.environ)).vllm
    assert seen.is_installed
    assert not seen.trouble
    assert not seen.plugin_trouble
    assert seen.version == vllm.__version__
    assert seen.platform == "cpu"
    assert (seen.has_layouts, seen.fails_by_request) == (
        compat.wanted_layout("auto", True) is not None,
        compat.can_fail_by_request(),
    )


def test_the_command_beside_a_real_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    result = CliRunner().invoke(app, ["check", "--json", "--", "vllm", "serve", str(tmp_path)])
    found = {line["subject"]: line for line in json.loads(result.stdout)["lines"]}
    assert found["vLLM"]["verdict"] == "ok"
    assert found["model"]["text"] == (
        "LlamaForCausalLM is served: 4 layers of full attention; 1.0 KiB per token"
    )
