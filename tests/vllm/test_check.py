"""`continuum check` beside the real vLLM: it sees this one, and both give the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config.cache import CacheDType
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

pytest.importorskip("typer")
from typer.testing import CliRunner

from bench.sim import versions
from continuum_connector import build
from continuum_connector.config import ContinuumConfig
from continuum_connector.scheduler.kv_groups import KvGroup, KvGroups
from continuum_connector.tools.checks import Verdict
from continuum_connector.tools.checks.machine import VllmSeen, this_machine
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.tools.checks.serving import lines
from continuum_connector.tools.cli.app import app
from continuum_connector.vllm import compat, served
from continuum_connector.vllm.proven import Server, why_no_tier
from tests.vllm import kv_caches
from tests.vllm.model_configs import LLAMA_8B

HEADS = {"block_size": 16, "dtype": torch.bfloat16, "num_kv_heads": 2, "head_size": 32}
LATENT = {"block_size": 16, "dtype": torch.bfloat16, "num_kv_heads": 1}
FULL = FullAttentionSpec(**HEADS)
MLA = MLAAttentionSpec(**LATENT, head_size=576, cache_dtype_str="auto")
INDEX = kv_caches.indexer_spec(block_size=16)


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


def reasons(specs: list[KVCacheSpec]) -> str:
    """Why a server of these layers steps aside: the scheduler's answer, and each worker's."""
    config = config_of()
    layers = {f"model.layers.{i}.attn": spec for i, spec in enumerate(specs)}
    at_workers = kv_caches.describe(config, layers)
    at_scheduler = generate_scheduler_kv_cache_config([at_workers])
    why = build.reason_to_step_aside(config, at_scheduler)
    assert why == build.reason_to_step_aside(config, at_workers)
    return why


@pytest.mark.parametrize(
    "specs",
    [[MLA, INDEX], [INDEX, MLA], [FULL, replace(FULL, num_kv_heads=1, head_size=24)]],
    ids=["MLA, index", "index, MLA", "heads"],
)
def test_layers_that_differ_in_bytes_alone_are_served_as_one_group(
    specs: list[KVCacheSpec],
) -> None:
    layers = {f"layers.{i}": spec for i, spec in enumerate(specs)}
    [group] = kv_caches.describe(config_of(), layers).kv_cache_groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert reasons(specs) == ""


class Novel(FullAttentionSpec):
    """Full attention of somebody's plugin."""


@pytest.mark.parametrize(
    "spec",
    [
        RSWASpec(**HEADS, rswa_window=64),
        SinkFullAttentionSpec(**HEADS, sink_len=32),
        Novel(**HEADS),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_subclasses_of_full_attention_keep_blocks_in_ways_of_their_own_and_are_not_served(
    spec: Any,
) -> None:
    groups = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    why = build.reason_to_step_aside(config_of(), groups)
    assert f"{type(spec).__name__}, which is not proven" in why


DTYPES = [name for name in typing.get_args(CacheDType) if name != "auto"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scheduler_and_the_check_have_a_tier_for_the_same_types_of_the_cache(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of()
    config.cache_config.cache_dtype = dtype
    continuum = ContinuumConfig(dram_bytes=2**30)
    one_group = KvGroups([KvGroup(0, 16)], 16)
    num_slots = build.num_host_slots(continuum, served.server(config), one_group, 1, 2**20)
    said = why_no_tier(Server(kv_cache_dtype=dtype))
    assert bool(num_slots) is not bool(said)
    assert said in caplog.text
    mode = get_kv_quant_mode(dtype)
    if mode > KVQuantMode.FP8_PER_TENSOR:  # what workers refuse, of the layers themselves
        assert f"--kv-cache-dtype {dtype}: where its scales lie" in said
    if mode == KVQuantMode.NONE and dtype in ("float16", "bfloat16"):
        assert not said


def test_the_server_and_the_check_say_the_same_of_prefix_caching() -> None:
    config = config_of(enable_prefix_caching=False)
    at_start = build.reason_to_step_aside(config, versions.kv_cache_config(100, 16, (None,)))
    machine, plan = this_machine(os.environ), Plan(enable_prefix_caching=False)
    line = next(
        each for each in lines(machine, plan, VllmSeen()) if each.subject == "prefix caching"
    )
    assert line.verdict is Verdict.ERROR
    assert f"{line.text}; {line.cure}" == f"the connector steps aside: {at_start}"


def test_this_vllm_is_seen() -> None:
    seen = this_machine(os.environ).see("vllm", VllmSeen)
    assert seen.is_installed
    assert not seen.trouble
    assert not seen.plugin_trouble
    assert seen.version == vllm.__version__
    assert seen.platform == "cpu"
    assert (seen.has_layouts, seen.fails_by_request) == (
        compat.has_layouts(),
        compat.can_fail_by_request(),
    )


def test_the_command_beside_a_real_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    result = CliRunner().invoke(app, ["check", "--json", "--", "vllm", "serve", str(tmp_path)])
    found = {line["subject"]: line for line in json.loads(result.stdout)["lines"]}
    assert found["vLLM"]["verdict"] == "ok"
    says = found["model"]["text"]
    if HAS_PLANNED or found["model"]["verdict"] == "ok":
        assert says == (
            "LlamaForCausalLM is served: 32 layers of full attention; 128.0 KiB per token, as vLLM "
            "makes them on sm_90"
        )
    else:
        assert found["model"]["verdict"] == "not seen", says


# What vllm/planned.py asks for is not in releases before; a later one may have moved it.
HAS_PLANNED = vllm.__version__.startswith("0.32.")
KV = '{"kv_connector":"ContinuumConnector","kv_role":"kv_both"%s}'


COMMANDS: list[tuple[list[str], str | None, str]] = [
    (["m", "-tp", "2", "--kv-transfer-config", KV % ""], None, ""),
    (["m", "-tp2"], "refused", "unrecognized arguments: -tp2"),
    (["m", "--tensor-paralel-size", "2"], "refused", "unrecognized arguments"),
    (["m", "extra"], "refused", "unrecognized arguments: extra"),
    (["m", "--dtype", "float99"], "refused", "invalid choice: 'float99'"),
    (["m", "--kv-transfer-config", KV % ',"bogus":1'], "refused", "bogus"),
    (["m", "--config", "/nowhere.yaml"], "refused", "No such file"),
    (["m", "--enable-auto-tool-choice"], "refused", "--tool-call-parser"),
    (["m", "--kv-transfer-config", '{"kv_connector":"MultiConnector"}'], "refused", "kv_role"),
    (["--help"], "refused", "only print"),
    (["m", "--no-enable-prefix"], None, ""),
    (["--port", "8000", "m"], None, ""),
]


@pytest.fixture(scope="module")
def said_by_vllm() -> list[dict[str, str]]:
    """Of each command, from a process of its own: on vLLM <= 0.29 logs go elsewhere afterwards."""
    code = """
import json, sys
from continuum_connector.vllm import planned
found = [planned.read_by_vllm(words, ["model"])[1] for words in json.loads(sys.argv[1])]
print(json.dumps(found, default=str))
"""
    words = json.dumps([each for each, _, _ in COMMANDS])
    command = [sys.executable, "-W", "ignore", "-c", code, words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "number", range(len(COMMANDS)), ids=lambda n: " ".join(COMMANDS[n][0])[:40]
)
def test_vllms_own_parser_has_a_say(said_by_vllm: list[dict[str, str]], number: int) -> None:
    said, (_, key, part) = said_by_vllm[number], COMMANDS[number]
    assert said.get("model") == (None if key == "refused" else "m")
    assert set(said) - {"model", "options"} == ({key} if key else set())
    assert part in said.get(key or "model", ""), said
