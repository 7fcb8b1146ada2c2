"""The lab's model of LMCache 0.3.7 against what that release's code does, rule by rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.sim.arms import ARMS
from bench.sim.hardware import machine
from bench.sim.lab import Lab
from bench.sim.lmcache import CHUNK, LmcacheModel
from bench.tests.vllm.lab import small_workload


@pytest.fixture
def lmcache() -> LmcacheModel:
    """With room for five chunks."""
    on = machine("H100", dram_gb=(5 * CHUNK + 1) * 131_072 / 1e9)
    model: LmcacheModel = Lab(on, ARMS["lmcache"], small_workload(1)).engine.connector
    return model


def asks(name: str, num_tokens: int, text: str = "") -> Any:
    """A turn whose text is that of `text`, its own without; one block hash per 64 tokens."""
    hashes = [f"{text or name} {i}".encode() for i in range(num_tokens // 64)]
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, num_tokens=num_tokens, num_prompt_tokens=num_tokens
    )


def computes(model: LmcacheModel, request: Any, in_vram: int = 0) -> tuple[int, int, int]:
    """The turn is admitted, computed in one step and gone: tokens found, loaded, stored."""
    found, _ = model.get_num_new_matched_tokens(request, in_vram)
    model.update_state_after_alloc(request, None, found)
    new = {request.request_id: request.num_tokens - in_vram - found}
    step = model.build_connector_meta(SimpleNamespace(num_scheduled_tokens=new))
    model.request_finished(request, [])
    return found, step.num_loaded, step.num_stored


def test_only_the_same_prompt_finds_what_is_left_of_it_behind_the_last_chunk(
    lmcache: LmcacheModel,
) -> None:
    assert computes(lmcache, asks("a", 600)) == (0, 0, 600)
    assert computes(lmcache, asks("a2", 1000, text="a")) == (512, 512, 1000 - 512)
    assert computes(lmcache, asks("a", 600)) == (599, 600, 0)  # the last token is computed anew


def test_a_prompts_tail_leaves_before_its_head(lmcache: LmcacheModel) -> None:
    computes(lmcache, asks("a", 3 * CHUNK))
    assert computes(lmcache, asks("a2", 3 * CHUNK, text="a"))[0] == 3 * CHUNK - 1  # all are used
    computes(lmcache, asks("b", 4 * CHUNK))  # room for one more
    assert computes(lmcache, asks("a3", 3 * CHUNK, text="a"))[0] == CHUNK


def test_what_was_never_found_again_leaves_from_its_head(lmcache: LmcacheModel) -> None:
    computes(lmcache, asks("a", 3 * CHUNK))
    computes(lmcache, asks("b", 3 * CHUNK))
    assert computes(lmcache, asks("a2", 3 * CHUNK, text="a")) == (0, 0, 3 * CHUNK)


def test_a_load_begins_at_the_chunk_that_vram_has_part_of(lmcache: LmcacheModel) -> None:
    computes(lmcache, asks("a", 4 * CHUNK))
    again = computes(lmcache, asks("a2", 5 * CHUNK, text="a"), in_vram=CHUNK + 64)
    assert again == (3 * CHUNK - 64, 3 * CHUNK, CHUNK)


def test_what_vllm_calls_computed_of_a_turn_that_resumes_is_not_loaded(
    lmcache: LmcacheModel,
) -> None:
    computes(lmcache, asks("a", 2 * CHUNK))
    request = asks("a2", 3 * CHUNK, text="a")
    for _ in ("admitted", "after a preemption"):
        found, _ = lmcache.get_num_new_matched_tokens(request, 0)
        assert found == 2 * CHUNK
        lmcache.update_state_after_alloc(request, None, found)
    step = lmcache.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"a2": CHUNK}))
    assert (step.num_loaded, step.num_stored) == (2 * CHUNK, CHUNK)
