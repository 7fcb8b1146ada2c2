"""`/pause` and `/sleep`: when vLLM's engine takes them for complete, which is when it is idle.

Real are the engine core's own pause and the scheduler; sleep then unmaps what copies touch.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc

from continuum_connector.scheduler.tiers.traffic import HANGS_AFTER_S, Kind
from tests.vllm.harness import Engine
from tests.vllm.tiering import (
    assert_drained,
    hold,
    in_flight,
    run_turn,
    tiered,
    wind_down,
)

PAUSES = pytest.mark.parametrize("mode", ["abort", "wait", "keep"])


class Core(EngineCoreProc):
    """vLLM's engine core as far as a pause goes: around our scheduler, without processes."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.engines_running, self.batch_queue = False, None
        self._idle_state_callbacks: list[Any] = []
        self.model_executor = self

    def collective_rpc(self, method: str) -> None:
        """What vLLM >= 0.32 has the workers do before a pause is complete."""
        assert method == "synchronize_device"

    def _send_abort_outputs(self, aborted: Any) -> None:
        """To nobody."""

    def _reset_caches(self) -> None:
        flags = {"reset_running_requests": True, "reset_connector": True}
        assert self.scheduler.reset_prefix_cache(**flags)

    def turn(self) -> None:
        """Once round the busy loop (run_busy_loop): idle or a step."""
        if self.has_work():
            self.engine.step()
        else:
            self._notify_idle_state_callbacks()


def storing(**options: Any) -> Engine:
    """A turn is over and its store under way, until the test lets it go."""
    engine = tiered(**options)
    hold(engine)
    run_turn(engine, "a", 200, idle=False, program="p")
    engine.step()
    assert in_flight(engine, Kind.STORE)
    return engine


@PAUSES
def test_a_pause_is_complete_once_copies_under_way_are_over(mode: Any) -> None:
    engine = storing()
    core = Core(engine)
    paused = core.pause_scheduler(mode)
    for _ in range(20):
        core.turn()
    assert paused is not None
    assert not paused.done(), "sleep would unmap the blocks that the copy reads"
    hold(engine, False)
    for _ in range(5):
        core.turn()
    assert paused.done()
    assert not paused.exception()
    assert (len(engine.connector.side.pins), engine.usage()) == (0, 0)
    assert_drained(engine)


@PAUSES
def test_a_pause_behind_a_copy_that_hangs_is_complete_once_the_tier_is_down(mode: Any) -> None:
    engine = storing(timeout_s=5.0)
    for worker in engine.workers:
        worker._cancel = lambda transfer_id: None  # the driver has it
    core = Core(engine)
    paused = core.pause_scheduler(mode)
    for seconds in (0.0, 5.1, HANGS_AFTER_S):
        engine.clock.advance(seconds)
        assert paused is not None
        assert not paused.done()
        for _ in range(20):
            core.turn()
    assert not engine.connector.side.tier.is_up
    assert paused.done()
    assert not paused.exception()
    core.resume_scheduler()
    hold(engine, False)
    run_turn(engine, "b", 40, program="q")
    wind_down(engine)
