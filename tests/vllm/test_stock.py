"""What stock vLLM would have found: the shadow beside a scheduler that is stock says what it found,
turn by turn. Balance: where that is more than we find, pins end."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from bench.common.known_costs import know
from continuum_connector.observe.account import KEPT
from continuum_connector.policy.base import After, Free, Offload, Pin
from continuum_connector.scheduler.stock import Balance, StockCache
from continuum_connector.toolcalls import Asked, Ending
from tests.vllm.agents import AgentEngine
from tests.vllm.harness import Engine, prompt
from tests.vllm.machine_draws import COSTS
from tests.vllm.test_everything import Agents
from tests.vllm.test_outcomes import Agents as Deciding
from tests.vllm.test_outcomes import Says
from tests.vllm.tiering import BLOCK, MODES, tiered

NOTHING = dict.fromkeys(("only_ours", "stock_too", "only_stock"), 0)
ONLY = {kept: NOTHING | {kept: 96} for kept in NOTHING}
STOCK = {"policy": "stock", "max_head_start_s": 0}


class Beside:
    """Notes at each admission, also after a preemption, what VRAM had and what the shadow says."""

    def __init__(self, engine: AgentEngine) -> None:
        self.found: list[tuple[str, int, int]] = []  # request, tokens in VRAM, tokens in the shadow
        self.num_resumed = 0
        side, stock = engine.side, engine.side._stock
        self.stock = stock
        match, admitted = side.match, stock.admitted
        looked_up: dict[str, int] = {}

        def noting_match(request: Any, num_vram_tokens: int, now: float) -> Any:
            looked_up[request.request_id] = num_vram_tokens
            return match(request, num_vram_tokens, now)

        def noting_admitted(request: Any, num_vram_tokens: int) -> Any:
            in_vram = looked_up[request.request_id]
            in_stock = admitted(request, 0)  # without help from what VRAM really had
            self.num_resumed += any(name == request.request_id for name, _, _ in self.found)
            self.found.append((request.request_id, in_vram, in_stock))
            return in_stock

        side.match, stock.admitted = noting_match, noting_admitted

    def differing(self) -> list[tuple[str, int, int]]:
        return [each for each in self.found if each[1] != each[2]]


def check(stock: Any) -> None:
    """Its books close, and it has no more entries than VRAM has blocks."""
    queued, named = list(stock._queue), [each for all in stock._copies.values() for each in all]
    assert sum(len(each.hashes) for each in queued) == len(stock) <= stock._num_blocks
    assert len(queued) == sum(not each.users for each in named)
    for first, copies in stock._copies.items():
        assert first == copies[0].hashes[0]
        assert all(each.hashes == copies[0].hashes for each in copies)
        assert all((each in queued) == (not each.users) for each in copies)
    assert stock._num_shared == sum(
        max(0, len(each.users) - 1) * len(each.hashes) for each in named
    )


@MODES
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_blocks", [52, 70])
def test_beside_stock_the_shadow_says_what_stock_found(
    num_blocks: int, async_scheduling: bool, seed: int
) -> None:
    """Forks, aborts, preemptions, prompts in chunks, turns that go on from running ones."""
    engine = AgentEngine(
        num_blocks,
        max_num_seqs=5,
        max_num_batched_tokens=[512, 64][seed % 2],
        async_scheduling=async_scheduling,
        extra_config=dict(STOCK),
    )
    beside = Beside(engine)
    Agents(engine, seed).run(num_turns=60)
    assert beside.differing() == []
    assert beside.num_resumed > 3
    assert sum(in_vram for _, in_vram, _ in beside.found) > 3000
    check(beside.stock)
    assert not beside.stock._uses
    assert not beside.stock._growing
    assert not beside.stock._ends


@MODES
@pytest.mark.parametrize("seed", range(3))
def test_copies_of_one_prompt_and_turns_that_read_no_cache(
    async_scheduling: bool, seed: int
) -> None:
    """A prompt of whole blocks is found but for its last block, which is computed beside a copy;
    with prompt_logprobs all of it is. Two that begin in one step share what fits a chunk. Of two
    copies stock finds the older one, and the other has its own place in the queue."""
    engine = AgentEngine(
        80,
        max_num_seqs=5,
        max_num_batched_tokens=64,
        async_scheduling=async_scheduling,
        extra_config=dict(STOCK),
    )
    beside, draw = Beside(engine), random.Random(seed)
    for number in range(80):
        length = draw.choice([3, 6, 10]) * BLOCK + draw.choice([0, 0, 5])
        engine.add(
            str(number),
            prompt(length, seed=draw.randrange(4)),
            max_tokens=draw.randrange(1, 40),
            prompt_logprobs=1 if draw.random() < 0.2 else None,
        )
        engine.steps(draw.choice([0, 0, 1, 7]))
        check(beside.stock)
    engine.run_until_idle()
    assert beside.differing() == []
    assert sum(in_vram > 0 for _, in_vram, _ in beside.found) > 20


@pytest.mark.parametrize("seed", range(4))
def test_samples_of_forks_of_what_has_copies(seed: int) -> None:
    """Three samples of one prompt, forks, retries, prompts that read no cache, clients that go
    away; every other seed with drafts, of which each hit leaves a copy of a block."""
    draw = random.Random(seed)
    engine = AgentEngine(
        80,
        num_drafts=2 * (seed % 2),
        max_num_seqs=5,
        max_num_batched_tokens=128,
        extra_config=dict(STOCK),
    )
    beside, ids = Beside(engine), []
    for number in range(100):
        done = [each for each in ids if engine.requests[each].is_finished()]
        tokens = prompt(draw.choice([3, 6, 10]) * BLOCK + draw.choice([0, 0, 5]), draw.randrange(5))
        if done and draw.random() < 0.3:
            tokens = engine.next_prompt(draw.choice(done), draw.choice([0, 3, 16]))[:300]
        for sample in range(draw.choice([1, 1, 3])):
            ids.append(f"{number}.{sample}")
            reads_none = draw.random() < 0.15
            engine.add(
                ids[-1],
                tokens,
                max_tokens=draw.randrange(1, 40),
                prompt_logprobs=1 if reads_none else None,
            )
        engine.steps(draw.choice([0, 0, 1, 7, 20]))
        check(beside.stock)
        running = [each for each in ids if not engine.requests[each].is_finished()]
        if running and draw.random() < 0.1:
            engine.abort(draw.choice(running))
    engine.run_until_idle()
    assert beside.differing() == []
    assert sum(in_vram > 0 for _, in_vram, _ in beside.found) > 60
    assert any(len(copies) > 2 for copies in beside.stock._copies.values())


def test_drafts_drop_a_block_of_every_hit() -> None:
    engine = AgentEngine(60, num_drafts=2, max_num_seqs=4, extra_config=dict(STOCK))
    beside = Beside(engine)
    Agents(engine, seed=3).run(num_turns=40)
    assert beside.differing() == []
    assert sum(in_vram for _, in_vram, _ in beside.found) > 1000


def test_of_what_a_turn_leaves_its_tail_goes_first() -> None:
    """Beside a copy that a running turn uses, what a turn leaves is two stretches: its own copy and
    what it computed beyond. Stock displaces the latter first, and the next turn lacks just that."""
    engine = AgentEngine(40, max_num_seqs=5, extra_config=dict(STOCK))
    beside = Beside(engine)

    def run(request_id: str, tokens: list[int], max_tokens: int) -> None:
        request = engine.add(request_id, tokens, max_tokens=max_tokens)
        while not request.is_finished():
            engine.step()

    engine.add("long", prompt(4 * BLOCK) + prompt(8, seed=3), max_tokens=6 * BLOCK)
    engine.steps(3)
    run("short", prompt(4 * BLOCK), max_tokens=BLOCK + 2)
    assert [len(stretch.hashes) for stretch in beside.stock._queue] == [1, 1]
    num_free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    run("others", prompt((num_free - 2) * BLOCK, seed=5), max_tokens=2)  # all free blocks but one
    run("next", engine.next_prompt("short", 8), max_tokens=2)
    assert not engine.requests["long"].is_finished()
    assert beside.differing() == []
    assert beside.found[-1][1] == 4 * BLOCK


def test_a_reset_empties_it() -> None:
    engine = AgentEngine(100, extra_config=dict(STOCK))
    beside = Beside(engine)
    engine.run_turn("a", 100)
    engine.run_turn("b", 100)
    assert engine.reset_prefix_cache()
    assert len(beside.stock) == 0
    engine.run_turn("c", 100)
    assert [each[1:] for each in beside.found] == [(0, 0), (96, 96), (0, 0)]


# --- who kept what was found --------------------------------------------------------------
class Told(Deciding):
    """39 blocks of VRAM, of which a program leaves six and comes back; others come between."""

    def leave(self, name: str, tokens: int, seed: int, decision: Any) -> None:
        """A turn of a program of this name is decided so."""
        self.side.decider.policy = Says(decision)
        self.run_turn(name, tokens, seed=seed, max_tokens=8, program=name)

    def back(self) -> dict[str, Any]:
        """The program comes back. Returns what the answer says, as trace and metrics do."""
        before = {kept: self.total("tokens_against_stock", kept) for kept in KEPT}
        self.run_turn("b", self.next_prompt("a", 20), program="a")
        told = self.kv_transfer_params["b"]["continuum"]
        admitted = [each for each in self.kept.records if each["event"] == "admit"][-1]
        assert admitted["against_stock"] == told["against_stock"] == self.last()["against_stock"]
        added = {kept: self.total("tokens_against_stock", kept) - before[kept] for kept in KEPT}
        assert added == {"unknown": 0, **told["against_stock"]}
        return {**told["cached_tokens"], **told["against_stock"]}


def test_what_nobody_displaced_stock_would_have_kept_too() -> None:
    engine = Told(Pin(60.0), 40)
    engine.leave("a", 90, 1, Pin(60.0))
    engine.leave("x", 400, 2, Free())
    assert engine.back() == {"vram": 96, "dram": 0} | ONLY["stock_too"]
    assert engine.last()["saved_s"] == 0.0


def test_what_a_pin_held_against_others_only_we_kept() -> None:
    engine = Told(Pin(60.0), 40)
    engine.leave("a", 90, 1, Pin(60.0))
    engine.leave("x", 400, 2, Free())
    engine.leave("y", 400, 3, Free())
    assert engine.back() == {"vram": 96, "dram": 0} | ONLY["only_ours"]
    assert engine.last()["saved_s"] == pytest.approx(0.096)


def test_what_dram_had_stock_might_have_kept_in_vram() -> None:
    """In stock the older program's blocks would have left first; its pin put them last."""
    engine = Told(Pin(60.0), 40, num_slots=50)
    engine.leave("p", 240, 1, Pin(1.0))
    engine.leave("a", 90, 2, Offload())
    engine.idle(2.0)
    engine.leave("x", 400, 3, Free())
    assert engine.back() == {"vram": 0, "dram": 96} | ONLY["stock_too"]
    assert engine.last()["saved_s"] <= 0.0  # stock would not even have loaded it


def test_what_a_pin_displaced_only_stock_would_have_kept() -> None:
    engine = Told(Pin(60.0), 40)
    engine.leave("p", 240, 1, Pin(1.0))
    engine.leave("a", 90, 2, Free())
    engine.idle(2.0)
    engine.leave("x", 400, 3, Free())
    assert engine.back() == {"vram": 0, "dram": 0} | ONLY["only_stock"]
    assert engine.last()["saved_s"] == pytest.approx(-0.096)


def test_where_nobody_knows_nothing_is_said() -> None:
    """Of windows a hit needs more than blocks of one kind."""
    engine = Told(Pin(60.0), 200, groups="hybrid")
    engine.leave("a", 200, 1, Pin(60.0))
    engine.run_turn("b", engine.next_prompt("a", 20), program="a")
    told = engine.kv_transfer_params["b"]["continuum"]
    assert told["cached_tokens"]["vram"] > 100
    assert "against_stock" not in told
    assert "saved_s" not in engine.last()
    found = sum(told["cached_tokens"].values())
    assert {kept: engine.total("tokens_against_stock", kept) for kept in KEPT} == {
        **dict.fromkeys(KEPT, 0),
        "unknown": found,
    }


def test_after_a_switch_what_vram_has_is_stocks() -> None:
    """Nobody saw what happened meanwhile, and nothing of ours was kept."""
    engine = Told(Pin(60.0), 40)
    engine.side.switch(False, engine.clock())
    assert len(engine.side._stock) == 0
    engine.side.switch(True, engine.clock())
    engine.leave("a", 90, 1, Pin(60.0))
    engine.side._stock.clear()  # as a switch would; the pin stays
    assert engine.back() == {"vram": 96, "dram": 0} | ONLY["stock_too"]


# --- what only tells stops nobody -----------------------------------------------------
def test_a_turn_that_leaves_while_it_loads_leaves_nothing_behind() -> None:
    """Its tables have no block yet that stock would have found."""
    num_cached: dict[str, int] = {}
    shadow = StockCache(20, 16, {}, num_cached)
    for name in ("a", "b"):
        ended = turn(name, 10)
        shadow.admitted(ended, 0)
        num_cached[name] = 10
        shadow.finished(ended)
        assert len(shadow) == 10
        for number in range(3):
            assert shadow.admitted(turn(f"{name}{number}", 10), 0) == 9 * 16
            shadow.finished(turn(f"{name}{number}", 10))
            assert not any(each.users for copies in shadow._copies.values() for each in copies)
        shadow.clear()


def test_a_mistake_of_the_shadow_costs_its_books_alone(caplog: pytest.LogCaptureFixture) -> None:
    shadow = StockCache(20, 16, {}, {})
    assert shadow.admitted(turn("a", 3), 0) == 0
    assert shadow.admitted(SimpleNamespace(request_id="b"), 0) is None
    assert (len(shadow._uses), len(shadow._copies)) == (0, 0)
    shadow.finished(turn("a", 3))
    assert shadow.admitted(turn("c", 3), 0) == 0
    assert "did not add up" in caplog.text
    assert shadow.admitted(SimpleNamespace(request_id="d"), 0) is None
    assert caplog.text.count("did not add up") == 1


def turn(name: str, num_blocks: int) -> Any:
    """A request; turns whose names begin alike have one prompt."""
    return SimpleNamespace(
        request_id=name,
        block_hashes=[f"{name[0]}{index}".encode() for index in range(num_blocks)],
        num_tokens=16 * num_blocks,
        skip_reading_prefix_cache=False,
    )


# --- what it decides: pins end while they lose ------------------------------------------
def test_pins_lose_once_stock_has_found_an_eighth_of_vram_more() -> None:
    balance = Balance(800, lambda: False)
    assert not balance.lost(100, 0.0)
    assert not balance.pins_lose(0.0)
    assert balance.lost(1, 0.0)
    assert balance.pins_lose(0.0)


def test_what_pins_won_pays_for_as_much_as_they_may_lose() -> None:
    balance = Balance(800, lambda: False)
    assert not balance.lost(-5000, 0.0)
    assert not balance.lost(200, 0.0)
    assert balance.lost(1, 0.0)
    assert not balance.lost(-1, 0.0)
    assert not balance.pins_lose(0.0)


def test_pins_are_tried_again() -> None:
    """A turn that pins win is no reason to end them, and what was lost counts less with time."""
    balance = Balance(800, lambda: False)
    assert balance.lost(180, 0.0)
    assert not balance.lost(-10, 1.0)
    assert balance.pins_lose(1.0)
    assert not balance.pins_lose(Balance.HALF_S)


def test_under_load_nobody_can_tell_what_stock_would_have_found() -> None:
    waiting = ["a turn, for a seat"]
    balance = Balance(800, lambda: bool(waiting))
    balance.look(0.0)
    assert not balance.lost(900, 1.0)
    waiting.clear()
    assert balance.lost(900, 1.0)
    assert balance.pins_lose(1.0)
    waiting.append("another one")
    assert not balance.pins_lose(1.0), "what is known of quiet times says nothing of load"


def test_shortly_after_load_nobody_can_tell_either() -> None:
    waiting = ["a turn, for a seat"]
    balance = Balance(800, lambda: bool(waiting))
    balance.look(0.0)
    waiting.clear()
    balance.look(20.0)
    assert not balance.lost(900, 20.0)
    assert balance.lost(900, 160.0)


@pytest.mark.parametrize(
    ("num_waiting", "max_num_seqs", "has_load"),
    [(0, 8, False), (2, 8, False), (9, 8, True), (1, 1, True)],
)
def test_who_waits_for_the_room_of_pins_is_no_load(
    num_waiting: int, max_num_seqs: int, has_load: bool
) -> None:
    """On stock vLLM it would not wait. It would where all seats are taken, or where no pin's room
    is enough."""
    engine = tiered(60, 0, config={"policy": "adaptive"}, max_num_seqs=max_num_seqs)
    know(engine.connector.costs, COSTS["both"])
    side = engine.connector.side
    side.decider._reader.read = lambda *_, **__: Asked(Ending.CALLS, ("run",))
    engine.add("agent", prompt(400, 1), 8, program="agent")
    engine.run_until_idle()
    assert len(side.pins) == 1
    engine.add("runs", prompt(20, 2), 40)
    engine.step()
    engine.step()
    for number in range(num_waiting):
        engine.add(str(number), prompt(400, 3 + number), 8)
        side.begin_turn(engine.requests[str(number)], engine.clock())
    assert side.turns.num_waiting == num_waiting
    assert side._has_load() is has_load


def test_what_was_lost_is_forgotten_however_much_it_was() -> None:
    balance = Balance(800, lambda: False)
    assert balance.lost(80_000, 0.0)
    assert balance.pins_lose(Balance.HALF_S - 1)
    assert not balance.pins_lose(Balance.HALF_S)


def a_chat_beside_scripts(engine: Engine, num_rounds: int = 12) -> int:
    """What a chat finds beside scripts that call a tool and never come back. What they left is
    worth more than what a person will read, as far as anybody knows."""
    found, history = 0, prompt(300, seed=1)
    rest = engine.clock.advance if engine.connector is None else engine.idle
    for number in range(num_rounds):
        engine.add(f"script{number}", prompt(300, seed=100 + number), 6, program=f"s{number}")
        engine.run_until_idle()
        rest(4.0)
        engine.add(f"chat{number}", history, 6)
        engine.run_until_idle()
        found += sum(engine.cached[f"chat{number}"])
        history = list(engine.requests[f"chat{number}"].all_token_ids) + prompt(10, seed=number)
        rest(4.0)
    return found


def reading(num_slots: int, **config: Any) -> Engine:
    """Every other turn calls a tool; to compute is slow."""
    engine = tiered(60, num_slots, config={"policy": "adaptive", **config})
    know(engine.connector.costs, COSTS["both"])
    said = itertools.cycle([Asked(Ending.CALLS, ("run",)), Asked(Ending.ANSWER)])
    engine.connector.side.decider._reader.read = lambda *_, **__: next(said)
    return engine


def num_ended(engine: Engine) -> int:
    """Pins that ended because stock would find more."""
    return int(engine.connector.side.records.account.total("pins_ended", "loses"))


def test_pins_that_lose_end_and_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lose an eighth of VRAM and the turn that shows it, once."""
    stock = a_chat_beside_scripts(Engine(60, connector=None))
    ours = reading(0)
    assert a_chat_beside_scripts(ours) == stock - 304
    assert num_ended(ours) > 0
    assert len(ours.connector.side.pins) == 0
    monkeypatch.setattr(Balance, "lost", lambda *_: False)
    assert a_chat_beside_scripts(reading(0)) < stock - 600, "as it would be without"


def test_what_loses_in_vram_goes_to_dram_all_the_same() -> None:
    """There is no loss where DRAM has what VRAM lost: pins stay."""
    ours = reading(200)
    stock = a_chat_beside_scripts(Engine(60, connector=None))
    assert a_chat_beside_scripts(ours) >= stock
    assert num_ended(ours) == 0


def test_pins_that_end_so_leave_what_they_were_to_leave() -> None:
    """Not the one that a turn came back for; and what was to be in DRAM afterwards is stored."""
    engine = Told(Pin(60.0, After.STORE), 60, num_slots=60)
    engine.leave("a", 90, 1, Pin(60.0, After.STORE))
    engine.leave("b", 90, 2, Pin(60.0, After.STORE))
    side = engine.side
    assert len(side.pins) == 2
    engine.add("back", engine.next_prompt("a", 20), 4, program="a")
    side.steps.give_up_pins(engine.clock())
    assert [pin.program for pin in side.pins] == ["job:a"]
    engine.run_until_idle()
    assert engine.total("pins_ended", "loses") == 1
    engine.leave("x", 900, 3, Free())
    engine.run_turn("b2", engine.next_prompt("b", 20), program="b")
    assert engine.kv_transfer_params["b2"]["continuum"]["cached_tokens"] == {"vram": 0, "dram": 96}


def test_whose_client_goes_away_while_pins_lose_gets_no_pin_again() -> None:
    """Not even for the pin that it had taken over."""
    engine = tiered(60, 0, config={"policy": "adaptive"})
    know(engine.connector.costs, COSTS["both"])
    side = engine.connector.side
    side.decider._reader.read = lambda *_, **__: Asked(Ending.CALLS, ("run",))
    engine.add("a", prompt(200, 1), 8, program="p")
    engine.run_until_idle()
    engine.add("b", engine.next_prompt("a", 20), 40, program="p")
    assert len(side.pins) == 1
    engine.run_until_idle(until=lambda: len(engine.outputs["b"]) >= 2)
    side._balance.lost(1000, engine.clock())
    engine.abort("b")
    engine.run_until_idle()
    assert len(side.pins) == 0


def test_what_a_pin_displaced_counts_after_its_end() -> None:
    """Who comes back later than the pin lasts finds less all the same."""
    engine = Told(Pin(60.0), 40)
    side = engine.side
    side._heeds_stock = True
    engine.leave("p", 240, 1, Pin(1.0))
    engine.leave("a", 90, 2, Free())
    engine.idle(2.0)
    engine.leave("x", 400, 3, Free())
    assert len(side.pins) == 0
    assert not side._balance.pins_lose(engine.clock())
    assert engine.back()["only_stock"] == 96
    assert side._balance.pins_lose(engine.clock())
