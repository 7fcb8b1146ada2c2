"""A fresh server keeps a program from its first turn on, by a prior of what a prefill takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ParallelConfig

from bench.sim import versions
from continuum_connector.costs import TYPICAL
from continuum_connector.vllm import served
from tests.vllm.harness import Engine

NUM_TURNS = 4


def played(tmp_path: Path, **extra: Any) -> tuple[list[tuple[int, int]], list[dict[str, Any]]]:
    """The blocks that are pinned, and in DRAM, in the pause after each turn of a program on a fresh
    engine; and its decisions as traced."""
    path = tmp_path / "trace.jsonl"
    engine = Engine(200, extra_config={"policy": "adaptive", "trace_path": str(path), **extra})
    polls, tokens = [], 100
    for turn in range(NUM_TURNS):
        name, is_last = f"t{turn}", turn == NUM_TURNS - 1
        engine.add(name, tokens, 8, program="agent", final=is_last)
        engine.run_until_idle(until=lambda name=name: name in engine.finish_reasons)
        engine.idle(0.1)
        side = engine.connector.side
        side.update_gauges()
        account = engine.connector.account
        polls.append(tuple(int(account.total(*each)) for each in POLLED))
        tokens = engine.next_prompt(name, 50, seed=turn)
    engine.connector.shutdown()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return polls, [each for each in records if each["event"] == "decision"]


POLLED = (("pinned_blocks",), ("dram_blocks", "ready"))


def test_without_dram_each_pause_has_a_pin_and_the_last_turn_leaves_none(tmp_path: Path) -> None:
    polls, decisions = played(tmp_path)
    pinned = [blocks for blocks, _ in polls]
    # 100 tokens, 50 more each turn, 8 answered, of which the last has no KV: blocks of 16 tokens
    assert pinned == [107 // 16, 165 // 16, 223 // 16, 0]
    assert [each["decision"] for each in decisions] == ["pin", "pin", "pin", "free"]
    first = decisions[0]
    assert first["why"].endswith(", from a prior")
    assert first["known"]["prior"] is True
    assert first["known"]["prefill"] > 0.0


def test_with_dram_each_pause_has_the_turn_pinned_or_stored(tmp_path: Path) -> None:
    polls, decisions = played(tmp_path, dram_bytes="64MiB")
    assert all(pinned + in_dram > 0 for pinned, in_dram in polls[:-1])
    assert polls[-1][0] == 0
    assert decisions[0]["decision"] in ("pin", "offload")


# --- what vLLM says of the model and the device ---------------------------------------------
def test_the_shape_is_that_of_the_models_config() -> None:
    """Two layers of hidden size 64: products 2 * 64 * (3 * 64 + 64 + 3 * 128) a layer."""
    shape = served.shape(versions.vllm_config(block_size=16))
    assert shape.token_flops == pytest.approx(2 * 2 * 64 * (3 * 64 + 64 + 3 * 128), rel=0.05)
    assert shape.pair_flops == 2 * 4 * 64
    weights = 2 * (2 * 64 * (4 * 64 + 3 * 128) + 64 * 32_000)
    assert weights <= shape.weight_bytes < 1.5 * weights


def test_tensor_parallel_ranks_share_the_work() -> None:
    config = versions.vllm_config(block_size=16)
    alone = served.shape(config)
    config.parallel_config = ParallelConfig(
        tensor_parallel_size=2, distributed_executor_backend="mp"
    )
    assert served.shape(config).token_flops == pytest.approx(alone.token_flops / 2, rel=0.05)


def test_a_model_that_vllm_cannot_estimate_is_a_typical_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.metrics import perf

    def fails(*_: Any) -> Any:
        raise perf.InvalidComponent("no such model")

    for kind in perf.ComponentMetrics.registered_metrics():
        monkeypatch.setattr(kind, "from_vllm_config", fails)
    assert served.shape(versions.vllm_config(block_size=16)) is TYPICAL
