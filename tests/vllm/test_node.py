"""`dram_bytes` is one node's, whatever vLLM leaves in an engine's config of the others there."""

from __future__ import annotations

import json
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import core

from continuum_connector.tools.checks.plan import read_plan
from continuum_connector.vllm import plugin
from continuum_connector.vllm.served import num_node_ranks

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(autouse=True)
def _no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's process takes SIGTERM for itself."""
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    plugin.register()


class _SeenError(Exception):
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config


def served(folder: Path, model: dict[str, Any], **flags: Any) -> Any:
    """The config that `vllm serve` makes of these flags, in the process that starts the engines."""
    (folder / "config.json").write_text(json.dumps(model))
    transfer = KVTransferConfig(
        kv_connector="ContinuumConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"dram_bytes": "1GiB"},
    )
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, kv_transfer_config=transfer, **flags
    ).create_engine_config()


def in_engine(config: Any, rank: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What an engine's process finds in its config once vLLM's own code has set it right."""

    def see(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        raise _SeenError(vllm_config)

    for kind in (core.EngineCoreProc, core.DPEngineCoreProc):
        monkeypatch.setattr(kind, "__init__", see)
    sent = pickle.loads(pickle.dumps(config))
    with pytest.raises(_SeenError) as seen:
        core.EngineCoreProc.run_engine_core(vllm_config=sent, dp_rank=rank, local_dp_rank=rank)
    return seen.value.vllm_config


@pytest.mark.parametrize(
    ("model", "flags", "ranks"),
    [
        (LLAMA, {"data_parallel_size": 4}, 4),
        (LLAMA, {"data_parallel_size": 2, "tensor_parallel_size": 4}, 8),
        (LLAMA, {"data_parallel_size": 8, "data_parallel_size_local": 2}, 2),
        (LLAMA, {}, 1),
        (MIXTRAL, {"data_parallel_size": 4}, 4),
        (MIXTRAL, {"data_parallel_size": 4, "data_parallel_rank": 1}, 1),
    ],
)
def test_every_engine_of_a_node_counts_the_ranks_of_all_of_them_as_check_does(
    model: dict[str, Any],
    flags: dict[str, int],
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = served(tmp_path, model, **flags)
    for rank in range(min(2, flags.get("data_parallel_size_local", 2))):
        seen = in_engine(config, rank, monkeypatch)
        assert seen.parallel_config.world_size == flags.get("tensor_parallel_size", 1)
        assert num_node_ranks(seen) == ranks
        worker = pickle.loads(pickle.dumps(seen))  # vLLM spawns workers
        assert worker.parallel_config.world_size == seen.parallel_config.world_size
        assert num_node_ranks(worker) == ranks
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert read_plan(words, {}).num_ranks == ranks


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL], ids=["dense", "experts"])
def test_an_engine_on_each_of_two_nodes_has_its_node_alone(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"tensor_parallel_size": 8, "data_parallel_size": 2, "nnodes": 2}
    config = served(
        tmp_path,
        model,
        **flags,
        node_rank=1,
        master_addr="127.0.0.1",
        distributed_executor_backend="mp",
    )
    seen = in_engine(config, 1, monkeypatch)
    assert (seen.parallel_config.world_size, num_node_ranks(seen)) == (8, 8)
