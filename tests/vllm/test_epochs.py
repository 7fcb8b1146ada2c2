"""Epochs: KV that other weights computed is found by nobody, whatever is under way at a change.

The fake model's KV depends on its weights, and the oracle compares all that is read.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from continuum_connector.scheduler.epochs import Epochs
from continuum_connector.scheduler.tiers.traffic import Kind
from continuum_connector.vllm.resets import OlderTurns
from tests.proofs import prove_dram
from tests.vllm.harness import Engine, OracleError, prompt
from tests.vllm.tiering import (
    GROUPS,
    MODES,
    assert_drained,
    dram_of,
    hold,
    in_flight,
    loading,
    on_disk,
    outlast_pins,
    park,
    reference,
    run_turn,
    tiered,
    total,
    wind_down,
)

RESETS = pytest.mark.parametrize("running", [False, True], ids=["alone", "with-running"])


def update(engine: Engine, way: str = "update_weights") -> None:
    """Other weights on every rank, between two steps as vLLM's utilities are; `way`: as the worker
    half saw it, if it did."""
    for worker in engine.workers:
        worker.change_weights(way)


def answers(engine: Engine, request_id: str, weights: int) -> bool:
    """Whether all of it is what these weights say."""
    request, outputs = engine.requests[request_id], engine.outputs[request_id]
    tokens = list(request.prompt_token_ids)
    return outputs == reference(tokens, request.max_tokens, weights)


def number(engine: Engine) -> int:
    return int(engine.connector.side.steps.epochs.number)


def loaded(**options: Any) -> Engine:
    """The same once that has ended, before `b` runs."""
    engine = loading(**options)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    hold(engine, False)
    engine.run_until_idle()
    assert not in_flight(engine, Kind.LOAD)
    assert engine.requests["b"].num_computed_tokens
    return engine


# --- whoever says that the weights changed ------------------------------------------------
@MODES
@GROUPS
def test_weights_that_a_worker_saw_change_begin_an_epoch(
    async_scheduling: bool, groups: str
) -> None:
    engine = tiered(async_scheduling=async_scheduling, groups=groups, world_size=2)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    update(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached.get("b", (0, 0)) == (0, 0)
    assert answers(engine, "b", weights=1)
    assert number(engine) == total(engine, "epochs", "weights") == 1
    wind_down(engine)


def test_without_an_epoch_a_turn_is_served_what_other_weights_computed() -> None:
    """The negative control: nobody has seen the change, and nobody has said so."""
    engine = tiered()
    run_turn(engine, "a", 200, program="p")
    park(engine)
    update(engine, way="")
    with pytest.raises(OracleError, match="reads wrong KV"):
        run_turn(engine, "b", engine.next_prompt("a", 20), program="p")


def test_with_epochs_switched_off_a_reset_of_vram_alone_serves_old_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same for a reset: vLLM empties VRAM, and nobody what lies below it."""
    engine = tiered()
    run_turn(engine, "a", 200, program="p")
    outlast_pins(engine)
    monkeypatch.setattr(Epochs, "begin", lambda *args: None)
    update(engine, way="")
    assert engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    with pytest.raises(OracleError, match="reads wrong KV"):
        run_turn(engine, "b", engine.next_prompt("a", 20), program="p")


@MODES
@RESETS
def test_a_reset_begins_one(async_scheduling: bool, running: bool) -> None:
    engine = tiered(async_scheduling=async_scheduling)
    run_turn(engine, "a", 200, program="p")
    update(engine, way="")
    assert engine.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert answers(engine, "b", weights=1)
    assert number(engine) == total(engine, "epochs", "reset") == 1
    park(engine)
    run_turn(engine, "c", engine.next_prompt("b", 20), program="p")
    assert engine.cached["c"][1] > 200, "what the new weights computed is kept as ever"
    wind_down(engine)


@MODES
def test_an_update_and_then_a_reset_are_one_epoch(async_scheduling: bool) -> None:
    """The worker's word of the update comes a step after the reset that was made because of it."""
    engine = tiered(async_scheduling=async_scheduling, config={"ttl_s": 50})
    run_turn(engine, "a", 200, program="p")
    update(engine)
    assert engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    run_turn(engine, "b", 200, program="q", seed=1)
    run_turn(engine, "c", engine.next_prompt("b", 20), program="q")
    assert number(engine) == 1
    assert engine.cached["c"][0] >= 192
    assert len(engine.connector.side.pins) == 1, "what goes on from the new weights' KV is kept"
    assert answers(engine, "c", weights=1)


def test_what_is_on_disk_is_of_the_past_too() -> None:
    engine = on_disk(num_slots=20)
    run_turn(engine, "a", 200, program="p")
    engine.idle(2.0)
    run_turn(engine, "x", 300, program="x", seed=5)
    engine.idle(2.0)
    assert engine.worker.disk.slots
    park(engine)
    update(engine)
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert answers(engine, "b", weights=1)
    assert engine.worker.disk.num_resets == 1
    assert not engine.worker.num_blocks_loaded


# --- copies under way ---------------------------------------------------------------------
@MODES
@GROUPS
def test_a_load_under_way_brings_nothing(async_scheduling: bool, groups: str) -> None:
    """Also one that cannot be stopped, and ends as if nothing had happened."""
    engine = loading(async_scheduling=async_scheduling, groups=groups)
    for worker in engine.workers:
        worker.cancels_late = True
    update(engine)
    engine.step()
    engine.step()
    assert number(engine) == 1
    hold(engine, False)
    engine.run_until_idle()
    assert answers(engine, "b", weights=1)
    assert total(engine, "loads", "abandoned") == 1
    assert total(engine, "loads", "done") == 0
    wind_down(engine)


def test_a_store_that_settles_late_is_found_by_nobody_and_has_its_slots_to_itself() -> None:
    """14 slots: the old store has 13, and the new epoch could use them all."""
    engine = tiered(num_slots=14)
    for worker in engine.workers:
        worker.cancels_late = True
    hold(engine)
    run_turn(engine, "a", 200, idle=False, program="p")
    (late,) = in_flight(engine, Kind.STORE)
    update(engine, way="")
    assert engine.reset_prefix_cache(reset_connector=True)
    run_turn(engine, "b", 200, idle=False, program="q", seed=2)
    index = dram_of(engine).index
    (new,) = in_flight(engine, Kind.STORE)[1:]
    assert not set(new.slots.tolist()) & set(late.slots.tolist())
    engine.settle(late.id)
    engine.step()
    prove_dram(index)
    assert not index.num_ready
    hold(engine, False)
    engine.run_until_idle()
    park(engine)
    run_turn(engine, "c", engine.next_prompt("b", 20), program="q")
    run_turn(engine, "d", engine.next_prompt("a", 20), program="p")
    assert answers(engine, "c", weights=1)
    assert answers(engine, "d", weights=1)
    wind_down(engine)


# --- a reset never fails for what is ours -------------------------------------------------
def pinned(**options: Any) -> Engine:
    engine = tiered(config={"ttl_s": 50}, **options)
    run_turn(engine, "a", 200, program="p")
    return engine


def storing(**options: Any) -> Engine:
    engine = tiered(**options)
    hold(engine)
    run_turn(engine, "a", 200, idle=False, program="p")
    return engine


def left_while_loading(**options: Any) -> Engine:
    engine = loading(**options)
    engine.abort("b")
    return engine


def waits_with_kv(**options: Any) -> Engine:
    """`b` has loaded, and stands in line with that: nobody else may run."""
    engine = loading(max_num_seqs=1, **options)
    engine.add("x", 40, max_tokens=30, seed=3, program="x")
    engine.run_until_idle(until=lambda: len(engine.scheduler.running) == 1)
    hold(engine, False)
    for _ in range(3):
        engine.step()
    engine.abort("x")
    assert engine.requests["b"].num_computed_tokens
    return engine


STATES = pytest.mark.parametrize(
    "state", [pinned, storing, loading, loaded, left_while_loading, waits_with_kv]
)


@MODES
@GROUPS
@RESETS
@STATES
def test_a_reset_is_done_whatever_is_pinned_stored_or_loaded(
    state: Any, running: bool, groups: str, async_scheduling: bool
) -> None:
    """Stock vLLM has nothing that would hinder it: nobody runs."""
    engine = state(async_scheduling=async_scheduling, groups=groups)
    while engine._queue:  # steps in flight
        engine._update()
    update(engine, way="")
    assert engine.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
    assert not [block for block in engine.pool.blocks if block.block_hash is not None]
    assert not engine.scheduler._inflight_prefill_reserved_blocks(), "for who has none yet"
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    hold(engine, False)
    engine.run_until_idle()
    if "b" in engine.requests and state is not left_while_loading:
        assert answers(engine, "b", weights=1)
    wind_down(engine)


def test_a_load_that_ends_after_a_reset_writes_to_nobodys_blocks() -> None:
    """Its blocks are nobody else's until then, though a reset found the pool free."""
    engine = loading(num_blocks=40)
    for worker in engine.workers:
        worker.cancels_late = True
    update(engine, way="")
    assert engine.reset_prefix_cache(reset_connector=True)
    under_way = {int(block) for block in in_flight(engine, Kind.LOAD)[0].blocks}
    engine.add("x", 320, max_tokens=8, seed=3, program="x")
    for _ in range(5):
        engine.step()
    (taken,) = engine.scheduler.kv_cache_manager.get_block_ids("x")
    assert taken
    assert not under_way & set(taken)
    hold(engine, False)
    engine.run_until_idle()
    assert answers(engine, "x", weights=1)
    assert answers(engine, "b", weights=1)
    wind_down(engine)


# --- VRAM that nobody empties -------------------------------------------------------------
def test_a_turn_that_runs_on_over_an_epoch_leaves_nothing_behind() -> None:
    """vLLM lets it go on with KV of both; nobody is to go on from that."""
    engine = tiered(config={"ttl_s": 50})
    engine.add("a", 200, max_tokens=40, program="p")
    for _ in range(10):
        engine.step()
    update(engine)
    engine.run_until_idle()
    assert not len(engine.connector.side.pins)
    assert not dram_of(engine).index.num_ready
    assert_drained(engine)


def test_what_is_computed_behind_old_kv_in_vram_is_not_kept_either() -> None:
    engine = tiered(config={"ttl_s": 50})
    run_turn(engine, "a", 200, program="p")
    for worker in engine.workers:  # as if the new ones computed the same, for the oracle's sake
        worker._report.new_weights = "update_weights"  # and it does not say when
    run_turn(engine, "x", 40, program="x", seed=5)
    assert number(engine) == 1
    num_stored = engine.worker.num_blocks_stored
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert engine.cached["b"][0] >= 192, "vLLM's own cache is vLLM's"
    assert engine.worker.num_blocks_stored == num_stored
    assert engine.reset_prefix_cache()
    run_turn(engine, "c", engine.next_prompt("b", 20), program="p")
    assert engine.worker.num_blocks_stored > num_stored
    wind_down(engine)


@pytest.mark.parametrize("groups", ["hybrid", "state"])
def test_blocks_of_before_that_only_a_hash_finds_are_not_kept(groups: str) -> None:
    """`b` has computed all of it anew, and what vLLM's lookup names for the next turn are blocks
    of `a`, which are still findable in the group whose blocks nobody took."""
    engine = tiered(groups=groups, config={"ttl_s": 50})
    run_turn(engine, "a", 200, program="p")
    for block_hash in engine.requests["a"].block_hashes:
        for group in (1, 2):
            while blocks := engine.pool.get_cached_block(block_hash, [group]):
                engine.pool.evict_blocks({blocks[0].block_id})
    engine.add("r", 100, max_tokens=60, seed=9, program="r")
    engine.run_until_idle(until=lambda: len(engine.outputs["r"]) > 5)
    update(engine, way="")
    assert not engine.reset_prefix_cache()
    run_beside(engine, "b", list(engine.requests["a"].prompt_token_ids), "q")
    assert engine.cached.get("b", (0, 0)) == (0, 0)
    assert not is_pinned(engine, "q")
    engine.run_until_idle()
    park(engine)
    assert engine.reset_prefix_cache()
    for turn, tokens in (("c", engine.next_prompt("b", 20)), ("d", None)):
        run_turn(engine, turn, tokens or engine.next_prompt("c", 20), program="q")
        assert answers(engine, turn, weights=1)
    assert engine.cached["d"][0] > 200, "what the new weights computed is kept as ever"
    wind_down(engine)


def with_one_of_before(max_tokens: int, weights: int = 0) -> Engine:
    """A turn runs, `r`, and vLLM has refused to empty its cache for that."""
    engine = tiered(config={"ttl_s": 50})
    engine.add("r", 200, max_tokens=max_tokens, program="r")
    engine.run_until_idle(until=lambda: len(engine.outputs["r"]) > 5)
    for _ in range(weights):
        update(engine, way="")
    assert not engine.reset_prefix_cache()
    return engine


def run_beside(engine: Engine, request_id: str, tokens: Any, program: str) -> None:
    """A turn to its end, while `r` runs on."""
    engine.add(request_id, tokens, max_tokens=2, program=program)
    engine.run_until_idle(until=lambda: request_id in engine.finish_reasons)
    assert "r" not in engine.finish_reasons


def switch(engine: Engine, is_on: bool) -> None:
    engine.connector.switch = SimpleNamespace(is_on=is_on, close=lambda: None)
    engine.step()


def is_pinned(engine: Engine, program: str) -> bool:
    return f"job:{program}" in engine.connector.side.pins


def test_beside_a_turn_that_made_vllm_refuse_a_reset_new_ones_compute_all_and_are_kept() -> None:
    engine = with_one_of_before(max_tokens=60, weights=1)
    run_beside(engine, "t", 230, "t")  # which begins like `r`
    assert engine.cached.get("t", (0, 0)) == (0, 0)
    assert answers(engine, "t", weights=1)
    assert is_pinned(engine, "t")
    engine.run_until_idle()
    assert not is_pinned(engine, "r")
    run_turn(engine, "u", engine.next_prompt("t", 20), program="t")
    assert engine.cached["u"] == (224, 0)
    assert answers(engine, "u", weights=1)
    wind_down(engine)


@pytest.mark.parametrize("is_blind", [False, True])
def test_who_finds_what_such_a_turn_has_cached_since_is_not_kept(
    is_blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blind, the negative control: it is kept, as if it were of this epoch."""
    if is_blind:
        monkeypatch.setattr(OlderTurns, "_found_theirs", lambda *args: False)
    engine = with_one_of_before(max_tokens=120)
    run_beside(engine, "u", 200, "u")
    engine.run_until_idle(until=lambda: len(engine.outputs["r"]) > 60)
    request = engine.requests["r"]
    tail = [*request.prompt_token_ids, *engine.outputs["r"][:50], *range(200, 230)]
    # Of `r` it finds but what `r` got after `u` came: `w` has the block between.
    (block,) = engine.pool.get_cached_block(request.block_hashes[12], [0])
    engine.pool.evict_blocks({block.block_id})
    run_beside(engine, "w", tail[:212], "w")
    run_beside(engine, "v", tail, "v")
    assert engine.cached["v"] == (240, 0), "vLLM's own cache is vLLM's"
    assert is_pinned(engine, "u")
    assert is_pinned(engine, "v") == is_blind
    if not is_blind:
        engine.run_until_idle()
        assert engine.connector.side.steps.epochs.found_older is None
        run_turn(engine, "x", tail, program="x")
        assert engine.cached["x"] == (208, 0), "what `u` and `w` have computed, and nothing of `r`"
        assert is_pinned(engine, "x")
        wind_down(engine)


def test_what_new_turns_share_with_one_of_before_is_not_its_own() -> None:
    """Of three samples of one prompt x is of before, n computes it anew, and y finds n's first
    blocks and x's later ones. n's are of now, and with overlapping turns never free again: as y's
    they kept every turn with that system prompt from being kept, for ever."""
    engine = tiered(400, 400, config={"ttl_s": 0.5}, max_num_batched_tokens=64)
    system = prompt(96, seed=1)
    sample = system + prompt(300, seed=2)
    engine.add("x", sample, 20, program="x")
    for _ in range(3):
        engine.step()
    assert not engine.reset_prefix_cache()
    engine.run_until_idle(until=lambda: len(engine.outputs["x"]) > 3)
    engine.add("n", sample, 30, program="n")
    engine.run_until_idle(until=lambda: bool(engine.outputs["n"]))
    engine.add("y", sample + prompt(40, seed=5), 4, program="y")
    engine.run_until_idle(until=lambda: bool(engine.outputs["y"]))
    epochs = engine.connector.side.steps.epochs
    assert epochs.found_older is not None
    for number in range(200):
        if number % 6 == 0:
            engine.add(f"z{number}", system + prompt(20, seed=100 + number), 12)
        engine.step()
    assert epochs.found_older is None
    engine.run_until_idle()
    wind_down(engine)


@pytest.mark.parametrize("how", ["preempted", "aborted"])
def test_such_a_turn_takes_along_what_it_has_cached_however_it_goes(how: str) -> None:
    engine = with_one_of_before(max_tokens=120)
    run_beside(engine, "u", 200, "u")
    engine.run_until_idle(until=lambda: len(engine.outputs["r"]) > 60)
    tail = [*engine.requests["r"].prompt_token_ids, *engine.outputs["r"][:50]]
    if how == "aborted":
        engine.abort("r")
    else:
        engine.scheduler.running.remove(engine.requests["r"])
        engine.scheduler._preempt_request(engine.requests["r"], 0.0)
    run_turn(engine, "x", tail, program="x")
    assert engine.connector.side.steps.epochs.found_older is None
    # Who was preempted is back by then, and has computed it anew.
    assert engine.cached["x"] == (192 if how == "aborted" else 240, 0)
    engine.run_until_idle()
    assert is_pinned(engine, "x")
    assert is_pinned(engine, "r") == (how == "preempted")
    wind_down(engine)


def test_what_came_while_we_were_off_is_not_taken_for_new() -> None:
    engine = with_one_of_before(max_tokens=120)
    run_beside(engine, "u", 200, "u")
    switch(engine, False)
    engine.run_until_idle(until=lambda: len(engine.outputs["r"]) > 60)
    tail = [*engine.requests["r"].prompt_token_ids, *engine.outputs["r"][:50]]
    engine.add("v", tail, max_tokens=40, program="v")
    engine.run_until_idle(until=lambda: len(engine.outputs["v"]) > 5)
    assert engine.cached["v"] == (240, 0)
    switch(engine, True)
    run_beside(engine, "x", tail, "x")
    assert engine.cached.get("x", (0, 0)) == (0, 0), "all of it may be of before"
    assert is_pinned(engine, "x")
    engine.run_until_idle()
    assert not is_pinned(engine, "v")
    assert engine.connector.side.steps.epochs.found_older is None
    wind_down(engine)


def test_a_reset_that_was_refused_while_we_were_off_is_made_up_for() -> None:
    engine = tiered(config={"ttl_s": 50})
    engine.add("r", 200, max_tokens=60, program="r")
    engine.run_until_idle(until=lambda: len(engine.outputs["r"]) > 5)
    switch(engine, False)
    assert not engine.reset_prefix_cache()
    switch(engine, True)
    run_beside(engine, "t", 230, "t")
    assert engine.cached.get("t", (0, 0)) == (0, 0)
    assert is_pinned(engine, "t")
    engine.run_until_idle()
    assert not is_pinned(engine, "r")
    wind_down(engine)


@MODES
def test_a_reset_that_vllm_refuses_with_an_exception_forgets_all_the_rest_too(
    async_scheduling: bool,
) -> None:
    """Running turns were to begin anew, but a session that waits for its client keeps its blocks:
    nothing that found the system prompt of before was kept until somebody asked again."""
    engine = tiered(config={"ttl_s": 50}, async_scheduling=async_scheduling)
    run_turn(engine, "a", 96, program="a")
    engine.add("s", 60, max_tokens=4, seed=9, program="s", resumable=True)
    engine.run_until_idle()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.reset_prefix_cache(reset_running_requests=True)
    run_beside(engine, "b", prompt(96) + prompt(60, seed=5), "b")
    assert engine.cached.get("b", (0, 0)) == (0, 0)
    assert is_pinned(engine, "b")
    engine.abort("s")
    engine.run_until_idle()
    assert engine.connector.side.steps.epochs.is_vram_of_now
    wind_down(engine)


def test_a_turn_that_waits_with_old_kv_while_we_are_switched_off_and_on_is_not_kept() -> None:
    """Its first blocks are VRAM's, of before; the rest is being loaded, of the new weights."""
    engine = tiered(config={"ttl_s": 0.05})
    run_turn(engine, "a", 100, program="p")
    for worker in engine.workers:  # they compute the same, for the oracle's sake
        worker._report.new_weights = "update_weights"
    run_turn(engine, "x", 10, seed=3, program="x")
    run_turn(engine, "b", 200, program="q", prompt_logprobs=1)  # which computes all of it
    outlast_pins(engine)
    for block_hash in engine.requests["b"].block_hashes[6:]:
        while blocks := engine.pool.get_cached_block(block_hash, [0]):
            engine.pool.evict_blocks({blocks[0].block_id})
    hold(engine)
    engine.add("c", 190, program="r")
    engine.run_until_idle(until=lambda: bool(in_flight(engine, Kind.LOAD)))
    switch(engine, False)
    switch(engine, True)
    hold(engine, False)
    engine.run_until_idle()
    assert engine.cached["c"] == (96, 80)
    assert not dram_of(engine).index.num_ready
    wind_down(engine)


# --- keep mode, and trajectories that are sent again --------------------------------------
@MODES
def test_a_paused_turn_goes_on_with_its_kv_in_the_same_epoch(async_scheduling: bool) -> None:
    engine = tiered(async_scheduling=async_scheduling)
    engine.add("a", 200, max_tokens=30, program="p")
    for _ in range(8):
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.run_until_idle()
    computed = engine.num_prefill_tokens
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run_until_idle()
    assert engine.num_prefill_tokens == computed
    assert answers(engine, "a", weights=0)


@MODES
def test_in_a_new_epoch_it_is_computed_again(async_scheduling: bool) -> None:
    engine = tiered(async_scheduling=async_scheduling)
    engine.add("a", 200, max_tokens=30, program="p")
    for _ in range(8):
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.run_until_idle()
    computed = engine.num_prefill_tokens
    update(engine, way="")
    assert engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run_until_idle()
    assert engine.num_prefill_tokens >= computed + 200
    assert len(engine.outputs["a"]) == 30
    wind_down(engine)


def test_a_trajectory_aborted_and_sent_again_has_its_place_and_its_chain() -> None:
    """As partial rollouts do it: abort all, update or not, send again what was there."""
    engine = tiered(max_num_seqs=1)
    run_turn(engine, "a", 200, program="p")
    run_turn(engine, "x", 200, program="later", seed=4)
    park(engine)
    engine.add("b", engine.next_prompt("a", 20), max_tokens=40, program="p")
    for _ in range(8):
        engine.step()
    engine.abort("b")
    again = engine.next_prompt("b", 0)
    engine.add("x2", engine.next_prompt("x", 20), program="later")
    engine.add("new", 100, program="new", seed=6)
    engine.add("b2", again, program="p")
    engine.run_until_idle()
    assert sum(engine.cached["b2"]) >= 208, "all that the trajectory had, but for the last block"
    assert engine.admissions[-3] == "b2"


# --- epochs with a name -------------------------------------------------------------------
def named(engine: Engine, name: str, weights: int) -> None:
    """What `llm.reset_prefix_cache(reset_connector=name)` does, once those weights are loaded."""
    for worker in engine.workers:
        worker.weights = weights
    assert engine.reset_prefix_cache(reset_running_requests=True, reset_connector=name)


def test_weights_that_come_back_by_their_name_find_nothing_of_before() -> None:
    engine = tiered()
    named(engine, "reference", 1)
    run_turn(engine, "a", 200, program="p")
    park(engine)
    named(engine, "policy", 2)
    named(engine, "reference", 1)
    assert not dram_of(engine).index.num_ready
    run_turn(engine, "c", engine.next_prompt("a", 20), program="p")
    assert engine.cached["c"] == (0, 0)


# --- vLLM's own word for it ---------------------------------------------------------------
def test_another_weight_version_begins_an_epoch() -> None:
    """`update_weight_version`, `finish_weight_update` (vLLM >= 0.29): only the core hears of it."""
    engine = tiered()
    resets = engine.scheduler._continuum.resets
    resets._version_now = lambda: version
    version = "default"
    run_turn(engine, "a", 200, program="p")
    park(engine)
    assert number(engine) == 0
    version = "step-1"
    for worker in engine.workers:
        worker.weights = 1
    run_turn(engine, "b", engine.next_prompt("a", 20), program="p")
    assert number(engine) == total(engine, "epochs", "version") == 1
    assert answers(engine, "b", weights=1)


def test_the_version_is_read_from_the_core_that_builds_the_scheduler() -> None:
    from vllm.v1.engine.core import EngineCore

    from continuum_connector.vllm.resets import _weight_version

    class Core(EngineCore):
        def __init__(self) -> None:
            self.version = _weight_version()
            self._weight_version = "default"

    core = Core()
    if not hasattr(EngineCore, "get_weight_version"):
        assert core.version() == ""
        return
    assert core.version() == "default"
    core.set_weight_version("step-1")
    assert core.version() == "step-1"


def test_vllm_hands_a_name_through_as_it_is() -> None:
    """From the client's `reset_connector` to the scheduler's; annotated as a bool, and not one."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    given = (False, "policy-120")
    assert EngineCoreProc._convert_msgspec_args(EngineCore.reset_prefix_cache, given) == given
    engine = tiered()
    core = EngineCore.__new__(EngineCore)
    core.scheduler = engine.scheduler
    assert core.reset_prefix_cache(*given)
    assert engine.connector.side.steps.epochs.number == 1
