"""What a server goes through, short: played where vLLM lacks something, and to see what we touch.

Each drives an engine of whatever mode: attached, without a tier, or one that has stepped aside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

from vllm.v1.request import Request

from tests.vllm.harness import Engine
from tests.vllm.test_victims import PROGRAM_ORDER, preempts_in_a_prefill
from tests.vllm.tiering import SLOT_BYTES, Costs

TIER = {"dram_bytes": 400 * SLOT_BYTES, "policy": "fixed_ttl"}
Make = Callable[..., Engine]


def side_of(engine: Engine) -> Any:
    return getattr(engine.connector, "side", None)


def _play(
    engine: Engine, programs: str, num_turns: int, length: int = 200, answer: int = 8
) -> None:
    for turn in range(num_turns):
        for seed, name in enumerate(programs):
            before = f"{name}{turn - 1}"
            tokens: Any = engine.next_prompt(before, 20) if turn else length
            engine.add(f"{name}{turn}", tokens, answer, seed=seed, program=name)
        engine.run_until_idle()


def _rest(engine: Engine) -> None:
    """A long tool call on a busy server: pins are over, and nothing is left in VRAM."""
    engine.clock.advance(100.0)
    engine.run_until_idle()
    engine.pool.reset_prefix_cache()


def _hold(engine: Engine, on: bool) -> None:
    for worker in engine.workers:
        worker.hold = on


def _is_loading(engine: Engine) -> bool:
    return any(each.status.name == "WAITING_FOR_REMOTE_KVS" for each in engine.requests.values())


def _loading(make: Make, **options: Any) -> Engine:
    """`b` waits for its load, which is under way; without a tier it is over already."""
    engine = make(200, extra_config=TIER, async_scheduling=True, **options)
    engine.add("a", 200, 8, program="p")
    engine.run_until_idle()
    _rest(engine)
    _hold(engine, True)
    engine.add("b", engine.next_prompt("a", 20), 8, program="p")
    engine.run_until_idle(until=lambda: _is_loading(engine))
    return engine


def _go_on(engine: Engine) -> Engine:
    _hold(engine, False)
    engine.run_until_idle()
    return engine


def pins(make: Make) -> Engine:
    engine = make(80, async_scheduling=True)
    _play(engine, "abc", 3)
    engine.idle(0.1)
    return engine


def vram_too_small(make: Make) -> Engine:
    """Prompts, answers and pins want more than there is: turns are preempted."""
    engine = make(40, extra_config=TIER | PROGRAM_ORDER, max_num_batched_tokens=128)
    _play(engine, "abcdef", 2, 150, 60)
    return engine


def load(make: Make) -> Engine:
    engine = _go_on(_loading(make))
    named = {"session_id": "s"} if "session_id" in signature(Request).parameters else {}  # 0.28
    engine.add("c", 40, 4, program="q", final=True, stop=["x"], **named)
    engine.add("d", 300, 40, program="r")
    engine.step()
    engine.abort("d")
    return _go_on(engine)


def failed_load(make: Make) -> Engine:
    engine = _loading(make)
    engine.fail()
    return _go_on(engine)


def reset_amid_a_load(make: Make) -> Engine:
    engine = _loading(make)
    engine.scheduler.reset_prefix_cache(False, True)
    engine.add("c", 100, 4, program="q")
    return _go_on(engine)


def reset_amid_turns(make: Make) -> Engine:
    engine = make(200, extra_config=TIER)
    engine.add("a", 200, 8, program="p")
    engine.run_until_idle()
    for name in "bc":
        engine.add(name, engine.next_prompt("a", 20), 40, program="p")
    for _ in range(4):
        engine.step()
    engine.scheduler.reset_prefix_cache(False, True)
    engine.add("d", engine.next_prompt("a", 30), 8, program="p")
    engine.run_until_idle()
    return engine


def priority(make: Make) -> Engine:
    """`new` is preempted in the step that has scheduled its last chunk."""
    options = {"policy": "priority", "extra_config": PROGRAM_ORDER}
    preempts_in_a_prefill(46, make, **options)
    return preempts_in_a_prefill(47, make, **options)


def states(make: Make) -> Engine:
    engine = _go_on(_loading(make, groups="state"))
    _play(engine, "xy", 2)
    return engine


def windows(make: Make) -> Engine:
    engine = _go_on(_loading(make, groups="hybrid"))
    _play(engine, "wxyz", 2, 300, 80)
    return engine


def chunks(make: Make) -> Engine:
    engine = make(120, groups="chunked", extra_config=TIER)
    _play(engine, "abcd", 2, 300, 40)
    return engine


def drafts(make: Make) -> Engine:
    engine = make(300, groups="state", num_drafts=2, extra_config=TIER)
    _play(engine, "ab", 3)
    return engine


def disk(make: Make) -> Engine:
    """DRAM is smaller than what the turns leave, and the disk below it is fast."""
    extra = {"dram_bytes": 20 * SLOT_BYTES, "disk_path": "/disk", "disk_bytes": "1GiB"}
    extra |= {"policy": "fixed_ttl"}
    engine = make(200, extra_config=extra)
    side = side_of(engine)
    if side is not None and side.tier.below.brings_up:
        side.tier.below.reading._plan = replace(side.tier.below.reading._plan, costs=Costs())
        for worker in engine.workers:
            worker.report_disk(200)
    for turn in range(2):
        for seed, name in enumerate("abc"):
            tokens: Any = engine.next_prompt(f"{name}{turn - 1}", 20) if turn else 200
            engine.add(f"{name}{turn}", tokens, 8, seed=seed, program=name)
            engine.run_until_idle()
            _rest(engine)
            engine.idle(1.0)
    return engine


def events_and_adapters(make: Make) -> Engine:
    from tests.vllm.harness import adapter_named

    engine = make(120, extra_config=TIER, publishes=True, max_loras=1)
    for turn in range(2):
        for name in "ab":
            tokens: Any = engine.next_prompt(f"{name}{turn - 1}", 20) if turn else 120
            adapter = adapter_named(name)
            engine.add(f"{name}{turn}", tokens, 8, program=name, lora_request=adapter)
        engine.run_until_idle()
        _rest(engine)
    return engine


def switch(make: Make) -> Engine:
    """Turned off and on again while turns wait."""
    engine = make(30, extra_config=TIER, max_num_seqs=2)
    for is_on in (False, True):
        for seed, name in enumerate("abcde"):
            engine.add(f"{name}{is_on}", 100, 8, seed=seed, program=name)
        engine.step()
        engine.connector.switch = SimpleNamespace(is_on=is_on, close=lambda: None)
        engine.step()
        engine.run_until_idle()
    return engine


SCENARIOS: dict[str, Callable[[Make], Engine]] = {
    each.__name__.replace("_", " "): each
    for each in (
        *(pins, vram_too_small, load, failed_load, reset_amid_a_load, reset_amid_turns, priority),
        *(states, windows, chunks, drafts, disk, events_and_adapters, switch),
    )
}
