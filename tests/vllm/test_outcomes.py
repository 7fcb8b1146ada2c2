"""Outcomes on the real scheduler: what came of each decision is told exactly once."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from bench.common.known_costs import know
from continuum_connector.observe.account import CHANCES, OUTCOMES
from continuum_connector.observe.trace import EVENTS
from continuum_connector.policy.base import Choice, FinishedTurn, Free, Offload, Pin, Snapshot
from continuum_connector.policy.baselines import FixedTtl
from continuum_connector.programs.program import OVER_S, Identity, IdentitySource, Program
from continuum_connector.scheduler.records import FoundTokens
from continuum_connector.scheduler.turns import AgainstStock, Turn
from tests.vllm.agents import AgentEngine
from tests.vllm.harness import prompt
from tests.vllm.tiering import SLOT_BYTES

SECOND = {"prefill": [0.0, 1e-3, 0.0, 0.0, 0.0]}  # a millisecond per token, whatever is cached


A_PROGRAM = (
    Program("job:a", IdentitySource.CLIENT, 0.0),
    Identity("job:a", IdentitySource.CLIENT),
)


class Says(FixedTtl):
    """Always the same decision, except for what nobody keeps."""

    def __init__(self, decision: Any) -> None:
        super().__init__(60.0, 60.0)
        self.decision = decision

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        choice = super().decide(turn, snapshot)
        return choice if isinstance(choice.decision, Free) else Choice(self.decision, "said")


class Kept:
    """A trace that keeps its records."""

    enabled = True

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def record(self, event: str, now: float, **fields: Any) -> None:
        assert event in EVENTS
        self.records.append({"event": event, "now": now, **fields})

    def take_dropped(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Agents(AgentEngine):
    """An engine whose trace is kept here."""

    def __init__(self, decision: Any, num_blocks: int = 200, **kwargs: Any) -> None:
        config = {"dram_bytes": kwargs.pop("num_slots", 0) * SLOT_BYTES, "max_pinned_fraction": 0.5}
        super().__init__(num_blocks, extra_config=config, **kwargs)
        self.side.decider.policy = Says(decision)
        know(self.side.decider.costs, SECOND)
        self.kept = Kept()
        self.side.records.trace = self.kept

    def outcomes(self) -> list[tuple[str, str]]:
        """Decision and outcome, in the order in which they became known; as counted."""
        told = [(r["decision"], r["outcome"]) for r in self.kept.records if r["event"] == "outcome"]
        counts = {label: self.total("outcomes", label) for label in OUTCOMES}
        assert {k: n for k, n in counts.items() if n} == {
            f"{d}_{o}": told.count((d, o)) for d, o in told
        }
        return told

    def last(self) -> dict[str, Any]:
        return [r for r in self.kept.records if r["event"] == "outcome"][-1]

    def back(self, request_id: str, before: str, away_s: float, **kwargs: Any) -> None:
        """The program of `before` returns `away_s` seconds from now."""
        self.clock.advance(away_s)
        kwargs.setdefault("program", "p")
        self.run_turn(request_id, self.next_prompt(before, 20), **kwargs)

    def forget_vram(self) -> None:
        """What nobody holds leaves VRAM."""
        assert self.pool.reset_prefix_cache()


def first_turn(engine: Agents, **kwargs: Any) -> None:
    engine.run_turn("a", 100, program="p", **kwargs)  # 116 tokens: 7 full blocks, 112 tokens
    assert engine.outcomes() == []
    assert len(engine.side.decider.away.decisions()) == 1


@pytest.mark.parametrize(
    ("vram", "dram", "disk", "found", "most"),
    [
        (60, 30, 0, (60, 30, 0, 10), "in_vram"),
        (40, 40, 10, (40, 40, 10, 10), "in_dram"),  # of equals the slower way
        (10, 20, 60, (10, 20, 60, 10), "in_disk"),
        (80, 90, 90, (80, 20, 0, 0), "in_vram"),  # no more than the turn had left
        (50, 0, 0, (50, 0, 0, 50), "recomputed"),
    ],
)
def test_what_was_left_is_found_in_the_nearest_memory(
    vram: int, dram: int, disk: int, found: tuple[int, ...], most: str
) -> None:
    turn = Turn("r", *A_PROGRAM, 2, 0.0, hit_tokens={"vram": vram, "dram": dram, "disk": disk})
    assert FoundTokens.of(100, turn, 300).against_stock is None  # nobody knows
    turn.stock_tokens = 60
    what = FoundTokens.of(100, turn, 300)
    num_found = sum(what.by_memory.values())
    assert what.against_stock == AgainstStock.of(num_found, 60)
    assert (*what.by_memory.values(), what.recomputed) == found
    assert what.most == most


def test_a_turn_that_returns_to_its_pin_is_in_time() -> None:
    engine = Agents(Pin(5.0))
    first_turn(engine)
    engine.back("b", "a", 2.0)
    assert engine.outcomes() == [("pin", "in_time")]
    told = engine.last()
    assert told["gap_s"] == pytest.approx(2.0, abs=0.02)
    assert (told["turn"], told["next_turn"], told["horizon_s"]) == (1, 2, 5.0)
    assert told["hit_tokens"] == {"vram": 112, "dram": 0}
    assert told["recomputed_tokens"] == 0
    assert told["against_stock"] == {"only_ours": 0, "stock_too": 112, "only_stock": 0}
    assert told["saved_s"] == 0.0  # nobody would have displaced it
    assert told["lost_s"] == 0.0
    assert 0.0 < told["p"] < 1.0


def test_what_was_foretold_is_counted_by_its_chance_once_it_shows() -> None:
    engine = Agents(Pin(5.0))
    first_turn(engine)
    assert engine.total("forecasts") == 0  # nobody can know yet
    engine.back("b", "a", 2.0)
    chance = label_of(engine.last()["p"])
    assert (engine.total("forecasts", chance), engine.total("forecasts_true", chance)) == (1, 1)
    assert (engine.total("forecasts"), engine.total("forecasts_true")) == (1, 1)
    engine.back("c", "b", 7.0)  # it came, but not in time
    assert (engine.total("forecasts"), engine.total("forecasts_true")) == (2, 1)


def test_a_program_that_is_over_was_foretold_nothing() -> None:
    engine = Agents(Pin(5.0))
    engine.run_turn("a", 100, program="p", final=True)
    assert engine.outcomes() == [("free", "done")]
    assert engine.total("forecasts") == 0


def label_of(p: float) -> str:
    """The tenth that `p` is in, as the metrics name it."""
    return CHANCES[min(int(p * 10), 9)]


def test_a_turn_that_comes_after_the_ttl_finds_its_pin_expired() -> None:
    engine = Agents(Pin(5.0))
    first_turn(engine)
    engine.clock.advance(6.0)
    engine.side.steps.expire(engine.clock())
    engine.forget_vram()
    engine.back("b", "a", 1.0)
    assert engine.outcomes() == [("pin", "expired")]
    assert engine.last()["recomputed_tokens"] == 112
    assert engine.last()["lost_s"] == pytest.approx(0.112)


def test_a_pin_given_up_for_others_ends_under_pressure() -> None:
    engine = Agents(Pin(50.0), num_blocks=20)
    first_turn(engine)
    engine.run_turn("x", 250, program="x", seed=5, final=True)
    assert engine.num_pins() == 0
    assert engine.outcomes() == [("free", "done")]
    engine.back("b", "a", 1.0)
    assert engine.outcomes() == [("free", "done"), ("pin", "pressure")]


def test_a_pin_over_the_budget_is_given_up_in_the_moment_it_is_made() -> None:
    engine = Agents(Pin(50.0, value=2.0), num_blocks=20, max_num_batched_tokens=2048)
    first_turn(engine)
    engine.side.decider.policy.decision = Pin(50.0, value=1.0)  # 7 + 7 blocks of 19: over half
    engine.run_turn("x", 100, program="x", seed=5)
    assert engine.num_pins() == 1
    engine.back("y", "x", 1.0, program="x")
    assert engine.outcomes() == [("pin", "pressure")]
    events = [(r["event"], r["program"]) for r in engine.kept.records if "program" in r]
    assert events.index(("decision", "job:x")) < events.index(("pin_end", "job:x"))


def test_a_turn_that_goes_another_way_is_no_return_to_the_pin() -> None:
    engine = Agents(Pin(50.0))
    first_turn(engine)
    engine.clock.advance(1.0)
    engine.run_turn("b", prompt(100, seed=9), program="p")
    assert engine.outcomes() == [("pin", "diverged")]


def test_a_reset_takes_what_was_pinned() -> None:
    engine = Agents(Pin(50.0))
    first_turn(engine)
    engine.reset_prefix_cache()
    engine.back("b", "a", 1.0)
    assert engine.outcomes() == [("pin", "reset")]


def test_of_turns_side_by_side_the_last_one_counts() -> None:
    engine = Agents(Pin(50.0))
    engine.add("a", 100, program="p", max_tokens=4)
    engine.add("b", 120, program="p", max_tokens=9)
    engine.run_until_idle()
    assert engine.outcomes() == [("pin", "superseded")]
    assert engine.last()["turn"] == 1
    assert len(engine.side.decider.away.decisions()) == 1


def test_a_last_turn_is_done_at_once() -> None:
    engine = Agents(Pin(50.0))
    engine.run_turn("a", 100, program="p", final=True)
    assert engine.outcomes() == [("free", "done")]
    assert engine.last()["next_turn"] is None


def test_a_last_turn_beside_an_open_decision_closes_it_too() -> None:
    engine = Agents(Pin(50.0))
    engine.add("a", 100, program="p", max_tokens=4)
    engine.add("b", 120, program="p", max_tokens=9, final=True)
    engine.run_until_idle()
    assert engine.outcomes() == [("free", "done"), ("pin", "never")]


def test_a_turn_that_goes_away_while_it_waits_leaves_the_decision_open() -> None:
    engine = Agents(Pin(50.0))
    first_turn(engine)
    engine.clock.advance(1.0)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.abort("b")
    assert engine.outcomes() == [("free", "done")]
    engine.back("c", "a", 2.0)
    assert engine.outcomes() == [("free", "done"), ("pin", "in_time")]
    assert engine.last()["gap_s"] == pytest.approx(1.0, abs=0.02)  # it was back then


def test_a_silent_program_never_returned() -> None:
    engine = Agents(Pin(5.0))
    first_turn(engine)
    engine.clock.advance(OVER_S - 1.0)
    engine.run_turn("x", 20, program="x", final=True)
    assert engine.outcomes() == [("free", "done")]
    engine.clock.advance(2.0)
    engine.run_turn("y", 20, program="x", final=True)
    assert engine.outcomes()[1:] == [("pin", "never"), ("free", "done")]


def test_whoever_went_away_while_waiting_may_still_be_silent() -> None:
    engine = Agents(Offload())
    first_turn(engine)
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.abort("b")
    engine.clock.advance(OVER_S + 1.0)
    engine.run_turn("x", 20, program="x", final=True)
    assert ("offload", "never") in engine.outcomes()


def test_a_turn_that_waits_for_long_is_not_silent() -> None:
    engine = Agents(Offload(), max_num_seqs=1)
    first_turn(engine)
    engine.add("x", 20, program="x", final=True, max_tokens=20)
    engine.step()
    engine.add("b", engine.next_prompt("a", 20), program="p")
    engine.clock.advance(OVER_S + 1.0)
    engine.steps(5)
    assert engine.outcomes() == []
    engine.run_until_idle()
    assert engine.outcomes() == [("free", "done"), ("offload", "in_vram")]


def test_a_prompt_cut_short_did_not_lose_what_it_left_out() -> None:
    engine = Agents(Offload())
    first_turn(engine)
    engine.run_turn("b", engine.next_prompt("a", 0)[:50], program="p")
    assert engine.last()["hit_tokens"]["vram"] == 48
    assert engine.last()["recomputed_tokens"] == 2


def test_a_pin_outlasts_the_patience_with_silent_programs() -> None:
    engine = Agents(Pin(5.0))
    engine.side.retention._max_ttl_s = 2 * OVER_S
    engine.side.decider.policy.decision = Pin(2 * OVER_S)
    first_turn(engine)
    engine.clock.advance(OVER_S + 1.0)
    engine.run_turn("x", 20, program="x", final=True)
    engine.back("b", "a", 1.0)
    assert engine.outcomes() == [("free", "done"), ("pin", "in_time")]


def test_whoever_is_away_when_the_server_stops_never_returned() -> None:
    engine = Agents(Pin(50.0))
    first_turn(engine)
    engine.side.steps.shutdown(engine.clock())
    engine.side.steps.shutdown(engine.clock())
    assert engine.outcomes() == [("pin", "never")]
    assert engine.kept.records[-1]["event"] == "stop"


def test_no_more_decisions_are_open_than_programs_are_remembered() -> None:
    engine = Agents(Offload(), num_blocks=400)
    engine.side.decider.away._max_programs = 3
    for i in range(5):
        engine.run_turn(f"a{i}", 40, program=f"p{i}", seed=i)
    assert engine.outcomes() == [("offload", "never")] * 2
    assert len(engine.side.decider.away.decisions()) == 3


def test_an_open_decision_does_not_keep_its_forecast() -> None:
    """Ten thousand of them would be 60 MB."""
    engine, seen = Agents(Offload()), set()
    decide = engine.side.decider.policy.decide

    def look(turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        assert gc.is_tracked(turn)
        seen.add(id(turn))
        return decide(turn, snapshot)

    engine.side.decider.policy.decide = look  # type: ignore[method-assign]
    first_turn(engine)
    gc.collect()
    assert len(engine.side.decider.away.decisions()) == 1
    left = [each for each in gc.get_objects() if type(each) is FinishedTurn]
    assert seen
    assert seen.isdisjoint(map(id, left))


@pytest.mark.parametrize("decision", [Offload(), Free()], ids=["offload", "free"])
def test_what_is_let_go_may_still_be_in_vram(decision: Any) -> None:
    engine = Agents(decision)
    first_turn(engine)
    engine.back("b", "a", 2.0)
    assert engine.outcomes()[0][1] == "in_vram"
    assert engine.last()["hit_tokens"] == {"vram": 112, "dram": 0}


def test_what_is_offloaded_is_found_in_dram() -> None:
    engine = Agents(Offload(), num_slots=50)
    first_turn(engine)
    engine.forget_vram()
    engine.back("b", "a", 2.0)
    assert engine.outcomes() == [("offload", "in_dram")]
    assert engine.last()["hit_tokens"] == {"vram": 0, "dram": 112}


def test_what_is_freed_and_overwritten_is_computed_again() -> None:
    engine = Agents(Free())
    engine.side.decider.policy.decide = lambda *_: Choice(Free(), "said")  # type: ignore
    first_turn(engine)
    engine.forget_vram()
    engine.back("b", "a", 2.0)
    assert engine.outcomes() == [("free", "recomputed")]
    assert engine.last()["recomputed_tokens"] == 112


def test_without_a_trace_outcomes_are_counted_all_the_same() -> None:
    engine = AgentEngine(200)
    engine.run_turn("a", 100, program="p")
    engine.run_turn("b", engine.next_prompt("a", 20), program="p")
    assert engine.total("outcomes", "pin_in_time") == 1
