"""A turn's own references become ours at its end, where vLLM would free them right after."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from continuum_connector.vllm import compat, coordinator, served
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import MODES, tiered


class Pool:
    """Counts the blocks that somebody touches or frees."""

    def __init__(self, engine: Engine) -> None:
        self.num = {"touch": 0, "free_blocks": 0}
        for name in self.num:
            self._count(engine.pool, name)

    def _count(self, pool: Any, name: str) -> None:
        original = getattr(pool, name)

        def counted(blocks: Any) -> None:
            found = list(blocks)
            self.num[name] += len(found)
            original(found)

        setattr(pool, name, counted)


@MODES
def test_neither_we_nor_vllm_touch_and_free_what_is_kept(async_scheduling: bool) -> None:
    engine = tiered(async_scheduling=async_scheduling)
    engine.add("first", 160, 20, program="a")
    pool = Pool(engine)
    engine.run_until_idle()
    assert len(engine.connector.side.pins) == 1
    assert pool.num == {"touch": 0, "free_blocks": 1}  # the last block, which is not full
    engine.add("next", engine.next_prompt("first", 16), 16, program="a")
    engine.run_until_idle()
    # vLLM takes the pinned blocks over, and the pin ends.
    assert pool.num == {"touch": 11, "free_blocks": 1 + 11 + 1}


def test_blocks_that_others_have_stay_theirs() -> None:
    engine = tiered()
    for name in "abc":
        engine.add(name, prompt(160) + prompt(40, ord(name)), 20, program=name)
    engine.run_until_idle()
    assert len(engine.connector.side.pins) == 3
    assert {block.ref_cnt for block in engine.pool.blocks if not block.is_null} == {0, 1}
    assert engine.reset_prefix_cache()
    assert engine.free_blocks() == len(engine.pool.blocks) - 1


def test_what_is_being_loaded_stays_with_vllm() -> None:
    """The turn's client goes away, and vLLM frees the blocks once the load is over."""
    engine = tiered(num_blocks=60, config={"ttl_s": 1.0})
    engine.add("first", 160, 16, program="a")
    engine.run_until_idle()
    engine.idle(2.0)
    engine.add("filler", 900, 1, seed=9)  # pushes it out of VRAM
    engine.run_until_idle()
    for worker in engine.workers:
        worker.hold = True
    later = engine.add("next", engine.next_prompt("first", 16), 16, program="a")
    engine.run_until_idle(until=lambda: compat.is_loading(later))
    popped: list[str] = []
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    pop = coordinator.pop_blocks_for_free
    coordinator.pop_blocks_for_free = lambda each: popped.append(each) or pop(each)
    engine.connector.side._pop_blocks = coordinator.pop_blocks_for_free
    before = engine.free_blocks()
    engine.abort("next")
    assert (engine.free_blocks(), popped) == (before, [])
    for worker in engine.workers:
        worker.hold = False
    engine.run_until_idle()
    assert engine.free_blocks() > before


@pytest.mark.parametrize("how", ["no such method", "another connector"])
def test_vllm_frees_the_blocks_itself_where_it_must(how: str) -> None:
    where, what = (coordinator, "popper") if how == "no such method" else (served, "is_alone")
    with patch.object(where, what, lambda *_: None):
        engine = tiered()
    assert engine.connector.side._pop_blocks is None
    engine.add("first", 160, 17, program="a")
    engine.run_until_idle()
    engine.add("next", engine.next_prompt("first", 16), 16, program="a")
    engine.run_until_idle()
    assert engine.cached["next"] == (176, 0)
