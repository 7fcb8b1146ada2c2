"""The head start: how far one turn may pass another in the queue, and that nobody waits for more.

THE BOUND. Let B = max_head_start_s and let a turn arrive at time t. Among turns of one user
priority that were never admitted before, and but for those that vLLM itself skips (a grammar, a
LoRA adapter, a transfer that it waits for):

1. No turn that arrived later than t + B is admitted before it.
2. From t + B + MAX_WAIT_S on, neither it nor any turn before it leaves a pin alone.

So it waits for those whom vLLM's own order would let pass a turn that came B later, and for no
others. Where one turn computes at a time and takes as long in any order, it starts no later than
that turn would: its wait is at most B more than a wait in vLLM's own order.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from continuum_connector.programs.program import OVER_S
from tests.vllm.agents import AgentEngine
from tests.vllm.harness import Engine

STEP_S = 1 / 64  # exact in binary, so that places are compared as they are meant
Plan = list[tuple[int, int, int, bool]]  # steps since the last arrival, program, tokens, goes on


def queue_of(bound: float, **kwargs: Any) -> AgentEngine:
    extra = {"ttl_s": 30, "max_head_start_s": bound, **kwargs.pop("extra_config", {})}
    kwargs = {"max_num_seqs": 1, "step_s": STEP_S, **kwargs}
    return AgentEngine(kwargs.pop("num_blocks", 200), extra_config=extra, **kwargs)


def served_before(engine: AgentEngine, name: str, program: str, most: int = 400) -> int:
    """How many turns of `program`, of which four always wait, are served before `name` is."""
    number = 0
    while name not in engine.finish_reasons and number < most:
        waiting = engine.side.turns.num_waiting
        for _ in range(5 - waiting):
            number += 1
            engine.add(f"o{number}", 64, 4, seed=100 + number, program=program)
        engine.step()
    assert name in engine.finish_reasons, f"{number} others went before it"
    return sum(1 for done in engine.finish_reasons if done.startswith("o"))


def waiting(engine: Engine) -> list[str]:
    return [request.request_id for request in engine.scheduler.waiting]


def busy(engine: AgentEngine) -> None:
    """Occupy the only place, so that what comes now waits."""
    engine.add("busy", 20, 500, seed=999, program="busy", final=True)
    engine.steps(2)


def test_a_session_id_that_all_clients_share_passes_a_newcomer_for_the_bound_and_no_longer() -> (
    None
):
    engine = queue_of(2.0)
    engine.run_turn("first", 64, program="default-session", seed=1)
    engine.clock.advance(60)
    busy(engine)
    engine.add("newcomer", 64, 4, seed=2, program="someone-else")
    arrived = engine.clock()
    engine.abort("busy")
    passed = served_before(engine, "newcomer", "default-session")
    waited = engine.clock() - arrived
    assert 2.0 - 0.3 <= waited <= 2.0 + 0.5  # four that came in time are served before it
    assert 20 < passed < 40


def test_a_program_that_was_silent_for_long_passes_nobody_who_waits_when_it_returns() -> None:
    engine = queue_of(36_000.0)
    engine.run_turn("a", 64, program="old", seed=1)
    engine.clock.advance(OVER_S + 10)
    busy(engine)
    engine.add("newcomer", 64, 4, seed=2, program="new")
    engine.clock.advance(1)
    engine.add("b", 64, 4, seed=3, program="old")
    assert waiting(engine) == ["newcomer", "b"]


def test_a_program_whose_turn_is_under_way_is_not_silent() -> None:
    engine = queue_of(3600.0)
    engine.add("long", 64, 500, seed=1, program="old")
    engine.steps(3)
    engine.add("new1", 64, 4, seed=2, program="new")
    engine.clock.advance(OVER_S + 1)
    engine.add("old2", 64, 4, seed=3, program="old")
    assert waiting(engine) == ["old2", "new1"]


def test_of_many_turns_under_one_id_each_passes_only_those_that_came_within_the_bound() -> None:
    engine = queue_of(4.5)
    engine.run_turn("a", 20, program="shared", seed=1, max_tokens=1)
    engine.clock.advance(100)
    busy(engine)
    for number in range(6):  # every two seconds one of each
        engine.add(f"n{number}", 20, 1, seed=10 + number, program=f"new{number}")
        engine.add(f"s{number}", 20, 1, seed=30 + number, program="shared")
        engine.clock.advance(2)
    assert waiting(engine) == [
        "s0",
        "s1",
        "s2",
        "n0",
        "s3",
        "n1",
        "s4",
        "n2",
        "s5",
        "n3",
        "n4",
        "n5",
    ]


def test_a_pin_moves_its_turn_by_the_bound_and_no_further() -> None:
    engine = queue_of(8.0)
    engine.run_turn("a", 64, program="agent", seed=1, max_tokens=2)
    engine.clock.advance(20)
    busy(engine)
    engine.add("early", 20, 1, seed=2, program="early")
    engine.clock.advance(3)
    engine.add("late", 20, 1, seed=3, program="late")
    engine.clock.advance(5.5)
    engine.add("back", engine.next_prompt("a", 20), 1, program="agent")
    assert [turn.request_id for pin in engine.side.pins for turn in pin.waiting] == ["back"]
    assert waiting(engine) == ["early", "back", "late"]


def test_a_head_start_of_nothing_is_vllms_order() -> None:
    engine = queue_of(0.0)
    engine.run_turn("a", 64, program="agent", seed=1, max_tokens=2)
    busy(engine)
    engine.add("new", 20, 1, seed=2, program="new")
    engine.clock.advance(0.1)
    engine.add("back", engine.next_prompt("a", 20), 1, program="agent")
    assert waiting(engine) == ["new", "back"]


def test_a_short_prompt_behind_a_wall_of_long_ones_waits_no_longer_than_the_bound() -> None:
    """Each of the wall is of an old program, and more of it comes all the time."""
    engine = queue_of(2.0, num_blocks=120, max_num_seqs=4)
    engine.side.room._max_wait_s = 0.5
    for number in range(4):
        engine.run_turn(f"a{number}", 20, program=f"wall{number}", seed=number)
    engine.clock.advance(60)
    number = 0

    def wall() -> None:
        nonlocal number
        while engine.side.turns.num_waiting < 6:
            engine.add(f"w{number}", 800, 4, seed=number, program=f"wall{number % 4}")
            number += 1

    wall()
    engine.steps(3)
    engine.add("short", 20, 1, seed=7, program="short")
    arrived = engine.clock()
    while "short" not in engine.admissions:
        wall()
        engine.step()
        assert engine.clock() - arrived < 2.0 + 0.5 + 1.0
    assert engine.clock() - arrived > 0.5, "there was no wall"


def test_users_priorities_stand_before_any_head_start() -> None:
    engine = queue_of(60.0, policy="priority")
    engine.run_turn("a", 64, program="old", seed=1, max_tokens=2, priority=5)
    engine.add("busy", 20, 500, seed=999, program="busy", priority=0)
    engine.steps(2)
    engine.add("new", 20, 1, seed=2, program="new", priority=5)
    engine.add("urgent", 20, 1, seed=3, program="newer", priority=1)
    engine.clock.advance(0.1)
    engine.add("old2", 20, 1, seed=4, program="old", priority=5)
    engine.add("idle", 20, 1, seed=5, program="old", priority=6)
    assert waiting(engine) == ["urgent", "old2", "new", "idle"]


# --- many turns by one pin ------------------------------------------------------------------
def crowd(number: int) -> AgentEngine:
    """One pin, and `number` turns that all continue it."""
    engine = queue_of(60.0)
    engine.run_turn("a", 64, program="shared", seed=1, max_tokens=2)
    busy(engine)
    for index in range(number):
        engine.clock.advance(0.01)
        engine.add(f"b{index}", engine.next_prompt("a", 20, seed=index), 1, program="shared")
    return engine


def test_of_all_who_came_back_for_a_pin_one_stands_by_it_and_then_the_next() -> None:
    engine = crowd(3)
    [pin] = engine.side.pins
    ranks = [engine.side.rank(engine.requests[f"b{i}"], False)[1] for i in range(3)]
    assert ranks[0] < ranks[1] == ranks[2]
    engine.abort("b0")
    assert pin.first_waiting is engine.side.turns.get("b1")
    assert engine.scheduler.waiting.peek_rank()[2] == ranks[0]
    engine.abort("b2")
    assert pin.first_waiting is engine.side.turns.get("b1")
    engine.connector.reset_cache()
    assert engine.scheduler.waiting.peek_rank()[2] == ranks[1]


def test_what_happens_to_a_pin_moves_one_turn_however_many_wait_for_it() -> None:
    engine = crowd(300)
    queue = engine.scheduler.waiting
    asked: list[str] = []
    rank = queue._rank
    queue._rank = lambda request: (asked.append(request.request_id), rank(request))[1]
    engine.abort("b0")
    engine.side.retention.give_up_cheapest(engine.clock())
    assert asked == ["b1", "b1"]


def test_a_step_ranks_no_turn_that_it_does_not_move() -> None:
    """All of one program, each with a context of its own: every turn that ends leaves a pin."""
    engine = queue_of(60.0, max_num_seqs=4, num_blocks=400)
    for index in range(300):
        engine.add(f"r{index}", 32, 2, seed=index, program="one")
    queue = engine.scheduler.waiting
    num_asked = 0
    rank = queue._rank

    def counted(request: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return rank(request)

    queue._rank = counted
    engine.steps(40)
    assert engine.total("pins_started") > 40
    assert num_asked == 0


# --- streaming sessions ---------------------------------------------------------------------
def test_a_session_that_gets_more_input_keeps_its_place() -> None:
    """vLLM writes each update's own arrival, of another clock, into the session's request."""
    engine = queue_of(60.0)
    session = engine.add("session", 20, 1, seed=1, program="old", resumable=True)
    engine.run_until_idle(until=lambda: session.status.name == "WAITING_FOR_STREAMING_REQ")
    place = engine.side.rank(session, False)
    engine.clock.advance(10)
    engine.scheduler.add_request(_update("session", engine))
    assert session.status.name == "WAITING"
    assert session.arrival_time > 1e9
    assert engine.side.rank(session, False) == place


def _update(request_id: str, engine: Engine) -> Any:
    """What a client sends on: vLLM's wall clock is in it."""
    known = engine.requests[request_id]
    return type(known)(
        request_id, [7, 8, 9], known.sampling_params, None, arrival_time=1.7e9, resumable=True
    )


# --- the bound ------------------------------------------------------------------------------
PLANS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 24), st.booleans()),
    min_size=16,  # or there is no queue to pass anybody in
    max_size=24,
)
SETTINGS = settings(
    max_examples=25,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to make it short takes minutes
    suppress_health_check=list(HealthCheck),
)


def play(engine: Engine, plan: Plan, num_prompt: int) -> tuple[dict[str, int], dict[str, int]]:
    """Run a plan; in which step each turn arrived, and in which it ended. A turn that goes on
    continues what its program said last, if it has said something."""
    arrived: dict[str, int] = {}
    ended: dict[str, int] = {}
    last: dict[int, str] = {}
    due, step = 0, 0
    todo = []
    for index, (gap, program, num_tokens, goes_on) in enumerate(plan):
        due += gap
        todo.append((due, f"t{index}", program, num_tokens, goes_on))
    while len(ended) < len(plan):
        while todo and todo[0][0] <= step:
            _, name, program, num_tokens, goes_on = todo.pop(0)
            before = last.get(program) if goes_on else None
            tokens = engine.next_prompt(before, 5) if before else num_prompt
            engine.add(name, tokens, num_tokens, seed=len(arrived), program=f"p{program}")
            arrived[name] = step
        if not engine.step():
            engine.clock.advance(engine.step_s)
        step += 1
        for name in engine.finish_reasons.keys() - ended.keys():
            ended[name] = step
            last[int(name[1:]) and plan[int(name[1:])][1]] = name
        assert step < 5000, engine.describe()
    return arrived, ended


@given(plan=PLANS, num_seqs=st.integers(1, 3), bound=st.integers(0, 30), wait=st.integers(0, 30))
@SETTINGS
def test_nobody_is_passed_by_a_turn_that_came_more_than_the_bound_later(
    plan: Plan, num_seqs: int, bound: int, wait: int
) -> None:
    """1 and 2 of the bound, with pins, pressure, preemptions and overlapping turns."""
    extra = {"ttl_s": 1.0}
    engine = queue_of(bound * STEP_S, num_blocks=24, max_num_seqs=num_seqs, extra_config=extra)
    engine.side.room._max_wait_s = wait * STEP_S
    admitted: list[Any] = []
    engine.side.records.admitted = lambda request, turn, now: admitted.append(turn)
    claim = engine.side.room._claim
    patient: list[tuple[Any, float]] = []

    def spied(turn: Any, can_wait: bool, priority: int, now: float) -> Any:
        made = claim(turn, can_wait, priority, now)
        patient.extend([(turn, now)] if made.is_patient else [])
        return made

    engine.side.room._claim = spied
    play(engine, plan, num_prompt=40)
    assert len(admitted) == len(plan)
    for position, turn in enumerate(admitted):
        last = turn.arrival + bound * STEP_S
        before = admitted[:position]
        assert all(other.arrival <= last for other in before)
        for other, now in patient:
            assert other not in before or now <= last + wait * STEP_S


@given(plan=PLANS, bound=st.integers(0, 30))
@SETTINGS
def test_nobody_waits_for_more_than_the_bound_beyond_a_wait_in_vllms_order(
    plan: Plan, bound: int
) -> None:
    """Prompts of less than a block, one at a time: each turn takes as long in any order."""
    plan = [(gap, program, num_tokens, False) for gap, program, num_tokens, _ in plan]
    ours = queue_of(bound * STEP_S)
    arrived, ended = play(ours, plan, num_prompt=10)
    stock = Engine(200, connector=None, max_num_seqs=1, step_s=STEP_S)
    came, in_turn = play(stock, plan, num_prompt=10)
    assert came == arrived
    for name, since in arrived.items():
        num_tokens = plan[int(name[1:])][2]
        later = since + bound  # a turn that came then, and for whom stock serves all before it
        start = max([later, *(in_turn[other] for other in came if came[other] <= later)])
        assert ended[name] - num_tokens <= start
