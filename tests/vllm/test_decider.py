"""Decider on the real scheduler: what is learned while serving, and what follows from it."""

from __future__ import annotations

import pytest

from bench.common.known_costs import know
from continuum_connector.policy.base import Choice, FinishedTurn, Pin, Snapshot
from continuum_connector.policy.baselines import FixedTtl
from continuum_connector.programs.program import OVER_S, Identity
from continuum_connector.scheduler.pins import MAX_WAIT_S
from continuum_connector.scheduler.turns import Turn, TurnEnd
from continuum_connector.toolcalls import ANSWER, CUT, UNREAD, Asked, Ending, ToolReader
from tests.vllm.agents import AgentEngine, live, pinned
from tests.vllm.harness import prompt

TOOLS = {"continuum": {"tools": ["pytest"]}}
# base, per token, per token and context, per decode, per decode and context; seconds
SLOW_PREFILL = {"prefill": [0.01, 1e-3, 0.0, 0.0, 0.0]}


class Spy(FixedTtl):
    """The fixed TTL, and what it was shown."""

    reads = True

    def __init__(self, value: float = 0.0) -> None:
        super().__init__(60.0, 60.0)
        self.seen: list[tuple[FinishedTurn, Snapshot]] = []
        self.value = value

    def decide(self, turn: FinishedTurn, snapshot: Snapshot) -> Choice:
        self.seen.append((turn, snapshot))
        choice = super().decide(turn, snapshot)
        if isinstance(choice.decision, Pin):
            return Choice(Pin(60.0, choice.decision.then, self.value), choice.why)
        return choice


def spied(engine: AgentEngine, value: float = 0.0) -> Spy:
    spy = Spy(value)
    engine.side.decider.policy = spy
    return spy


# --- tool calls and gaps -------------------------------------------------------------------
def test_a_gap_is_from_the_finish_to_the_next_arrival() -> None:
    engine = AgentEngine(200)
    spy = spied(engine)
    ended = engine.run_turn("a", 100, program="p", kv_transfer_params=TOOLS)
    engine.clock.now = ended + 7.0
    engine.run_turn("b", engine.next_prompt("a", 20), program="p", kv_transfer_params=TOOLS)
    turn, _ = spy.seen[-1]
    assert turn.asked == Asked(Ending.CALLS, ("pytest",))
    assert turn.tool_gaps == pytest.approx([7.0], abs=0.02)
    assert turn.all_gaps == turn.tool_gaps


def test_turns_side_by_side_are_no_gap() -> None:
    engine = AgentEngine(200)
    spy = spied(engine)
    engine.add("a", 100, program="p", max_tokens=4)
    engine.add("b", 100, program="p", seed=1, max_tokens=40)
    engine.run_until_idle(until=lambda: "a" in engine.finish_reasons)
    engine.add("c", 100, program="p", seed=2)
    engine.run_until_idle()
    assert all(not turn.all_gaps for turn, _ in spy.seen)


def test_without_a_tokenizer_nothing_is_read_and_it_is_counted() -> None:
    engine = AgentEngine(200)
    spy = spied(engine)
    engine.run_turn("a", 100, program="p")
    assert spy.seen[0][0].asked == UNREAD
    assert engine.total("endings", "unread") == 1
    assert engine.total("unread_turns", "no_tokenizer") == 1


@pytest.mark.parametrize(
    ("final", "seen"), [(None, Ending.ANSWER), (False, Ending.UNREAD), (True, Ending.ANSWER)]
)
def test_who_says_that_more_will_come_is_no_person(final: bool | None, seen: Ending) -> None:
    engine = AgentEngine(200)
    spy = spied(engine)
    engine.side.decider._reader.read = lambda *_, **__: Asked(Ending.ANSWER)
    engine.run_turn("a", 100, program="p", final=final)
    assert spy.seen[0][0].asked.ending is seen


class Spoken:
    """A tokenizer of prompts that say what the test says, and of answers that end in a block."""

    def __init__(self, *prompts: str) -> None:
        self.prompts = prompts  # of the programs whose prompts have these seeds
        self.num_prompts = 0

    def get_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        for seed, said in enumerate(self.prompts):
            if token_ids[:1] == prompt(1, seed):
                self.num_prompts += 1
                return said
        return "Like this:\n```bash\npytest -q\n```"


def read_with(engine: AgentEngine, tokenizer: Spoken) -> None:
    reader = ToolReader(lambda: tokenizer, lambda: 0.0, lambda _: None)
    engine.side.decider._reader = reader
    reader.start()
    reader.join()


def test_a_shell_block_is_a_call_only_where_the_prompt_asks_for_one() -> None:
    engine = AgentEngine(300)
    spy = spied(engine)
    tokenizer = Spoken("Answer with one ```bash block", "How do I run the tests?")
    read_with(engine, tokenizer)
    engine.run_turn("a", 100, program="agent")
    engine.run_turn("b", 100, program="person", seed=1)
    asked = [turn.asked for turn, _ in spy.seen]
    assert asked == [Asked(Ending.CALLS, ("pytest",)), CUT]  # at its token limit
    assert tokenizer.num_prompts == 2
    # From now on the person's prompt has the answer in it, as the agent's had from the first.
    tokenizer.prompts = (tokenizer.prompts[0], "How? ```bash\npytest -q\n``` And all of them?")
    engine.run_turn("a2", engine.next_prompt("a", 20), program="agent")
    engine.run_turn("b2", engine.next_prompt("b", 20), program="person")
    assert [turn.asked for turn, _ in spy.seen[2:]] == asked
    assert tokenizer.num_prompts == 2


@pytest.mark.parametrize(
    ("end", "asked"),
    [(TurnEnd.STOP, ANSWER), (TurnEnd.LENGTH, CUT), (TurnEnd.ABORTED, UNREAD)],
)
def test_a_shell_block_for_a_person_is_an_answer(end: TurnEnd, asked: Asked) -> None:
    engine = AgentEngine(100)
    spied(engine)
    read_with(engine, Spoken("How do I run the tests?"))
    engine.run_turn("a", 100, program="person")
    program = engine.side.programs.get("job:person")
    turn = Turn("a", program, Identity(program.key, program.source), 1, 0.0)
    assert engine.side.decider._asked(turn, engine.requests["a"], end) == asked


# --- costs ---------------------------------------------------------------------------------
def test_a_turn_that_lost_its_blocks_counts_for_the_queueing_delay_and_others_do_not() -> None:
    engine = AgentEngine(60, max_num_seqs=1, extra_config={"policy": "program_order"})
    costs = engine.connector.costs
    engine.run_turn("a", 400, program="p")
    engine.run_turn("b", engine.next_prompt("a", 20), program="p")  # found in VRAM
    engine.run_turn("x", 800, program="q", seed=9)  # takes its place
    assert costs.queueing_s(engine.clock()) == 0
    engine.add("y", 700, program="r", seed=10, max_tokens=30)
    engine.step()
    engine.add("c", engine.next_prompt("b", 20), program="p")
    arrived = engine.clock()
    engine.run_until_idle(until=lambda: "c" in engine.admissions)
    assert costs.queueing_s(engine.clock()) == pytest.approx(engine.clock() - arrived, abs=0.03)


def test_a_program_is_over_with_its_last_turn_or_after_a_long_silence() -> None:
    engine = AgentEngine(200)
    over: list[int] = []
    engine.connector.costs.program_over = over.append
    engine.run_turn("a", 100, program="p")
    engine.run_turn("b", engine.next_prompt("a", 20), program="p", final=True)
    assert over == [2]
    engine.run_turn("c", 100, program="q", seed=3)
    engine.run_turn("d", engine.next_prompt("c", 20), program="q")
    engine.clock.advance(OVER_S - 1)
    engine.run_turn("e", 100, program="r", seed=4)
    assert over == [2]
    engine.clock.advance(2)
    engine.run_turn("f", 100, program="s", seed=5)
    assert over == [2, 2]


def test_what_a_program_does_after_a_long_silence_is_a_program_of_its_own() -> None:
    engine = AgentEngine(200)
    over: list[int] = []
    engine.connector.costs.program_over = over.append
    engine.run_turn("a", 100, program="p")
    for before, after in ("ab", "bc"):
        engine.clock.advance(OVER_S + 1)
        engine.run_turn("x" + after, 20, seed=9)
        engine.run_turn(after, engine.next_prompt(before, 20), program="p")
    engine.run_turn("d", engine.next_prompt("c", 20), program="p", final=True)
    assert over == [1, 1, 2]
    engine.run_turn("e", 100, program="p", final=True)  # a new life
    assert over == [1, 1, 2, 1]


def test_one_request_that_nobody_named_is_no_program() -> None:
    engine = AgentEngine(200)
    over: list[int] = []
    engine.connector.costs.program_over = over.append
    engine.run_turn("question", 100, seed=1)
    engine.run_turn("a", 100, seed=2)
    engine.run_turn("b", engine.next_prompt("a", 40))  # known by its lineage
    engine.run_turn("named", 100, seed=3, program="p")
    engine.clock.advance(OVER_S + 1)
    engine.run_turn("z", 100, seed=4)
    assert over == [2, 1]


def test_a_client_that_writes_each_answer_anew_is_one_program() -> None:
    """Its prompts grow by what it says itself, once by less than a block."""
    engine = AgentEngine(200)
    tokens = prompt(100, seed=2)
    for number, num_more in enumerate((0, 60, 5, 40)):
        tokens = tokens + prompt(num_more, seed=10 + number)
        engine.run_turn(f"t{number}", tokens)
    assert len(engine.side.programs) == 1
    engine.run_turn("once more", tokens)
    assert len(engine.side.programs) == 2, "another sample, for all that is known"


def test_after_a_quiet_night_programs_are_over_a_few_per_step() -> None:
    engine = AgentEngine(200)
    over: list[int] = []
    engine.connector.costs.program_over = over.append
    for number in range(20):
        engine.run_turn(f"a{number}", 20, max_tokens=1, program=f"p{number}", seed=number)
    engine.clock.advance(OVER_S + 1)
    engine.add("z", 100, max_tokens=30, program="z", seed=99)
    engine.step()
    assert 0 < len(over) < 10
    engine.run_until_idle()
    assert len(over) == 20


def test_a_program_that_came_back_beside_a_stray_turn_is_not_over() -> None:
    engine = AgentEngine(200)
    over: list[int] = []
    engine.connector.costs.program_over = over.append
    engine.run_turn("a", 100, program="p")
    engine.add("stray", 50, 100, seed=9, program="p", final=True)
    engine.step()
    engine.clock.advance(5.0)
    engine.add("b", engine.next_prompt("a", 20), 100, program="p")
    assert len(engine.side.decider.gaps) == 0, "it is back"
    engine.step()
    engine.abort("b")
    engine.clock.advance(OVER_S + 1)
    engine.run_until_idle()
    engine.run_turn("z", 40, max_tokens=30, program="z", seed=99)
    assert over == []


def test_a_silent_program_is_not_over_before_its_stray_turn_is() -> None:
    engine = AgentEngine(200)
    over: list[int] = []
    engine.connector.costs.program_over = over.append
    engine.run_turn("a", 100, program="p")
    engine.add("stray", 50, 100, seed=9, program="p", final=True)
    engine.clock.advance(OVER_S + 1)
    engine.steps(20)
    assert over == []
    engine.run_until_idle()
    engine.run_turn("z", 40, max_tokens=30, program="z", seed=99)
    assert over == [1]


def test_of_no_more_programs_than_are_remembered_it_is_seen_that_they_are_over() -> None:
    engine = AgentEngine(200, extra_config={"max_programs": 5, "policy": "program_order"})
    over: list[int] = []
    engine.connector.costs.program_over = over.append
    for number in range(12):
        engine.run_turn(f"a{number}", 20, max_tokens=1, program=f"p{number}", seed=number)
    for number in range(9):  # turns of one program are one silence
        engine.run_turn(f"b{number}", 20, max_tokens=1, program="p11", seed=11)
    away = engine.side.decider.away._absences
    assert list(away) == ["job:p7", "job:p8", "job:p9", "job:p10", "job:p11"]
    engine.clock.advance(OVER_S + 1)
    engine.run_turn("z", 100, max_tokens=30, program="z", seed=99)
    assert (over, list(away)) == ([1, 1, 1, 1, 10], ["job:z"])


def test_the_price_rises_while_somebody_finds_no_room_and_falls_after() -> None:
    engine = AgentEngine(60)
    costs = engine.connector.costs
    engine.add("a", 400, program="p", max_tokens=100)
    engine.run_until_idle(until=lambda: engine.num_steps == 10)
    assert costs.price(engine.clock()) == 0
    engine.add("b", 800, program="q", seed=1)
    engine.steps(50)
    high = costs.price(engine.clock())
    assert high > 0
    engine.run_until_idle()
    engine.clock.advance(600)
    assert costs.price(engine.clock()) < high / 2


# --- which pins give way -------------------------------------------------------------------
def crowded(value: float, pinned_at: int = 0, policy: str = "fcfs") -> AgentEngine:
    """p0 is pinned at `value`; `long` runs; `new`, of a younger program, wants the pin's room.
    `pinned_at`: the user's priority of p0's turn, where the others have 5."""
    engine = pinned(80, 0, policy=policy)
    spied(engine, value)
    engine.run_turn("a0", 400, program="p0", priority=pinned_at)
    engine.add("long", 300, program="q", seed=5, max_tokens=400, priority=5)
    engine.steps(5)
    engine.add("new", 700, program="r", seed=6, priority=5)
    engine.steps(5)
    return engine


def test_a_pin_worth_more_than_the_wait_is_left_alone_until_the_wait_is_too_long() -> None:
    engine = crowded(value=1e6)
    assert live(engine) == ["p0"]
    assert "new" not in engine.admissions
    engine.clock.advance(MAX_WAIT_S)
    engine.steps(10)
    assert "new" in engine.admissions
    assert engine.ends() == {"pressure": 1}


@pytest.mark.parametrize(("pinned_at", "gives_way"), [(0, False), (5, False), (9, True)])
def test_no_turn_waits_for_the_pin_of_a_less_urgent_one(pinned_at: int, gives_way: bool) -> None:
    engine = crowded(1e6, pinned_at, policy="priority")
    assert ("new" in engine.admissions) is gives_way
    assert engine.ends().get("pressure", 0) == gives_way


def test_a_pin_that_nobody_priced_gives_way_at_once() -> None:
    engine = crowded(value=0.0)
    assert "new" in engine.admissions
    assert engine.ends() == {"pressure": 1}


@pytest.mark.parametrize(
    ("turns", "name", "params", "gives_way"),
    [
        (1, None, None, True),
        (1, None, TOOLS, False),  # it calls a tool, so somebody goes on
        (1, "p0", None, False),  # it has a name, so there is a program
        (2, None, None, False),  # it has gone on before
    ],
)
def test_no_turn_waits_for_the_pin_of_a_question(
    turns: int, name: str | None, params: dict[str, object] | None, gives_way: bool
) -> None:
    engine = pinned(80, 0)
    spied(engine, 1e6)
    engine.run_turn("a0", 400, program=name, kv_transfer_params=params)
    for number in range(1, turns):
        text = engine.next_prompt(f"a{number - 1}", 20)
        engine.run_turn(f"a{number}", text, program=name, kv_transfer_params=params)
    assert len(live(engine)) == 1
    engine.add("long", 300, program="q", seed=5, max_tokens=400)
    engine.steps(5)
    engine.add("new", 700, program="r", seed=6)
    engine.steps(5)
    assert ("new" in engine.admissions) is gives_way
    assert engine.ends().get("pressure", 0) == gives_way


def test_a_pin_gives_way_to_a_program_that_came_first_and_where_nothing_runs() -> None:
    engine = pinned(80, 0)
    spied(engine, 1e6)
    engine.run_turn("old", 100, program="q", seed=5)
    engine.run_turn("a0", 400, program="p0")
    engine.add("long", 200, program="s", seed=7, max_tokens=300)
    engine.steps(5)
    engine.add("old2", 800, program="q", seed=6)
    engine.steps(10)
    assert "old2" in engine.admissions
    alone = pinned(80, 0)
    spied(alone, 1e6)
    alone.run_turn("a0", 400, program="p0")
    alone.run_turn("new", 1000, program="r", seed=6)
    assert alone.ends()["pressure"] == 1


def test_a_new_user_waits_hardly_longer_than_on_a_stock_server_for_pins_of_other_people() -> None:
    waits = {}
    for policy in ("stock", "adaptive"):
        engine = AgentEngine(
            100, extra_config={"policy": policy}, max_num_batched_tokens=2048, max_num_seqs=4
        )
        know(engine.connector.costs, {"prefill": [0.01, 1e-4, 0.0, 0.0, 0.0]})
        engine.side.decider._reader.read = lambda *_, **__: Asked(Ending.ANSWER)
        for person in range(3):
            engine.run_turn(f"a{person}", 350, seed=person)
        engine.add("running", 100, seed=8, max_tokens=900)
        engine.steps(3)
        engine.add("new", 500, seed=9)
        began = engine.clock()
        engine.run_until_idle(until=lambda engine=engine: "new" in engine.admissions)
        waits[policy] = engine.clock() - began
    assert waits["adaptive"] <= waits["stock"] + 0.03


def test_wishes_for_a_prefix_that_a_running_turn_uses_do_not_hide_the_pressure() -> None:
    engine = AgentEngine(80, max_num_batched_tokens=2048)
    engine.side.decider.policy._max_fraction = 0.9
    engine.add("long", 300, program="q", seed=5, max_tokens=600)
    engine.steps(3)
    for number in range(4):
        wish = {"continuum": {"program": f"w{number}", "ttl_s": 60}}
        engine.add(f"w{number}", 300, seed=5, max_tokens=2, kv_transfer_params=wish)
    engine.steps(10)
    engine.clock.advance(3.0)  # the policy's own 2 s are over
    engine.steps(3)
    assert engine.side.retention.num_wish_blocks > 20
    engine.add("new", 1000, program="r", seed=6)
    engine.steps(60)
    assert engine.connector.costs.price(engine.clock()) > 0


def test_a_prompt_that_goes_another_way_has_lost_nothing() -> None:
    engine = AgentEngine(200)
    engine.run_turn("a", 320, program="p", seed=1)
    kept = engine.side.programs.get("job:p").kept
    assert kept.num_tokens == 320
    hashes = engine.requests["a"].block_hashes
    assert kept.shared(hashes) == 20
    assert 8 <= kept.shared(hashes[:10]) <= 10
    assert kept.shared([b"other"] * 20) == 0


def test_turns_that_went_away_while_they_waited_have_no_footprint() -> None:
    engine = AgentEngine(60)
    engine.run_turn("a", 320, program="p")
    mean = engine.connector.costs.mean_blocks
    engine.add("big", 800, program="q", seed=2, max_tokens=60)
    engine.steps(3)
    for number in range(20):
        engine.add(f"w{number}", 800, program="r", seed=3)
        engine.step()
        engine.abort(f"w{number}")
    assert engine.connector.costs.mean_blocks == mean


def test_a_policy_that_does_not_price_reads_nothing_and_loads_no_tokenizer() -> None:
    engine = AgentEngine(200, extra_config={"policy": "program_order"})
    engine.run_turn("a", 100, program="p")
    assert engine.side.decider._reader._thread is None


def test_in_vllms_own_order_too_it_is_known_how_many_wait() -> None:
    engine = AgentEngine(60, extra_config={"max_head_start_s": 0})
    spy = spied(engine)
    engine.add("a", 700, program="p", max_tokens=5)
    engine.step()
    engine.add("b", 700, program="q", seed=1)
    engine.run_until_idle(until=lambda: bool(spy.seen))
    assert spy.seen[0][1].num_waiting == 1


def test_a_turn_that_was_loaded_does_not_wait_for_pins_while_nothing_runs() -> None:
    extra = {"dram_bytes": "64MiB"}
    engine = AgentEngine(80, extra_config=extra, scheduler_reserve_full_isl=False)
    engine.side.room._max_wait_s = 1000.0
    spied(engine, 1e6)
    engine.run_turn("a", 32, program="p0", seed=1)
    engine.run_turn("r", 32, program="p1", seed=2)
    engine.run_turn("b", 240, program="p2", seed=3)
    engine.run_turn("filler", 1100, program="p3", seed=4, final=True)  # all pins give way
    engine.run_turn("a1", 620, program="p0", seed=5)
    engine.add("r1", 290, program="p1", seed=6, max_tokens=10)
    engine.steps(2)
    engine.add("b1", engine.next_prompt("b", 200), program="p2")
    engine.run_until_idle(until=lambda: "r1" in engine.finish_reasons)
    # b1 was loaded and holds blocks; what it lacks is in pins of older programs.
    assert engine.total("loads", "done") == 1
    ended = engine.clock()
    engine.run_until_idle(until=lambda: "b1" in engine.finish_reasons)
    assert engine.clock() - ended < 2


def test_a_turn_of_another_context_changes_nothing_of_its_programs_pin() -> None:
    engine = pinned(120, 2)
    before = [(pin.program, pin.rank) for pin in engine.side.pins.cheapest_first()]
    engine.add("side", 200, program="p0", seed=77, max_tokens=2)
    engine.step()
    after = [(pin.program, pin.rank) for pin in engine.side.pins.cheapest_first()]
    assert after == before
    assert [program for program, _ in after] == ["job:p1", "job:p0"], "the last to come first"


# --- adaptive ------------------------------------------------------------------------------
def test_where_nothing_is_known_to_cost_anything_nothing_is_kept() -> None:
    engine = AgentEngine(200, extra_config={"policy": "adaptive", "dram_bytes": "64MiB"})
    engine.connector.costs.assume(prefill=(0.0, 0.0, 0.0))
    engine.run_turn("a", 400, program="p", kv_transfer_params=TOOLS)
    assert engine.num_pins() == 0
    assert engine.total("decisions", "free") == 1


def test_where_prefill_costs_and_the_tool_is_short_the_turn_is_pinned() -> None:
    engine = AgentEngine(200, extra_config={"policy": "adaptive"})
    know(engine.connector.costs, SLOW_PREFILL)
    engine.run_turn("a", 400, program="p", kv_transfer_params=TOOLS)
    assert engine.num_pins() == 1
    assert engine.total("decisions", "pin") == 1


def test_a_policy_without_order_leaves_vllms_own() -> None:
    for policy, ordered in (("stock", False), ("program_order", True), ("adaptive", True)):
        assert AgentEngine(extra_config={"policy": policy}).side.orders is ordered


def test_while_others_wait_a_pin_is_worth_less_the_longer_its_program_is_away() -> None:
    engine = AgentEngine(80, extra_config={"policy": "adaptive"}, max_num_batched_tokens=2048)
    know(engine.connector.costs, SLOW_PREFILL)
    engine.run_turn("a", 400, program="p", kv_transfer_params=TOOLS)
    [pin] = engine.side.pins
    engine.clock.advance(30.0)
    engine.add("long", 300, program="q", seed=5, max_tokens=400)
    engine.steps(5)
    assert pin.rank[0] == pin.value  # nobody waits: it does not matter
    engine.add("new", 1100, program="r", seed=6)  # finds no room, with or without the pin
    engine.steps(50)  # for half a second
    assert 0 < pin.rank[0] < pin.value / 3
