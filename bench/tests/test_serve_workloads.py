"""What the load generator will send, before any server: arrivals, lengths, ids, live KV."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.common.plans import Added, ProgramPlan, grown
from bench.serve import own
from bench.serve.arrivals import Arrivals, poisson, read_arrivals
from bench.serve.live import live
from bench.serve.load import Load
from bench.serve.programs import Defaults, Source, WorkloadError
from bench.serve.token_ids import Tokens
from bench.serve.workloads import PRESSURE, SWEEP, find_workload
from continuum_connector.errors import ToldError


def prompts(plan: ProgramPlan) -> list[int]:
    return [turn.num_prompt_tokens for turn in plan.turns]


@pytest.mark.parametrize(("rate", "jobs"), [(1, 54), (3, 133), (6, 255), (10, 433), (15, 665)])
def test_poisson_arrivals_are_those_of_the_sweep(rate: float, jobs: int) -> None:
    times = list(poisson(rate, 45.0, seed=42))
    assert len(times) == jobs
    assert times == sorted(times)
    assert times[-1] < 45


def test_the_sweeps_prompts_have_the_documented_lengths() -> None:
    program = SWEEP.program(0, seed=42)
    assert prompts(program) == [92, 1840, 3449, 6025, 7454, 10299, 12333, 13193]
    assert {turn.answer.length for turn in program.turns} == {20}
    assert [turn.gap_s for turn in program.turns] == [0.0] + [0.5] * 7


def test_the_pressure_workload_is_six_programs_of_four_turns() -> None:
    assert PRESSURE.size == 6
    assert prompts(PRESSURE.program(5, seed=1)) == [700, 908, 1116, 1324]


def test_tokens_are_the_same_each_time_and_shared_only_where_the_plan_says() -> None:
    first, second = SWEEP.program(0, 42), SWEEP.program(1, 42)
    tokens = Tokens(42)
    assert tokens.of_turn(first, 0) == Tokens(42).of_turn(first, 0)
    assert tokens.of_turn(first, 0)[:80] == tokens.of_turn(second, 0)[:80]
    assert tokens.of_turn(first, 0)[80:] != tokens.of_turn(second, 0)[80:]
    assert tokens.of_turn(first, 1)[:16] != tokens.of_turn(second, 1)[:16]
    assert tokens.of_turn(first, 1)[:16] != tokens.of_turn(first, 2)[:16]
    assert Tokens(43).of_turn(first, 1) != tokens.of_turn(first, 1)
    assert all(1000 <= token < 2000 for token in tokens.of_turn(first, 1))


@pytest.mark.parametrize(
    "text", ["", "poisson", "poisson:0", "poisson:nan", "closed:1.5", "closed:0", "trace:/file"]
)
def test_arrivals_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ToldError, match="--arrivals"):
        read_arrivals(text, 1, 45.0, 0)


def test_nothing_arriving_is_refused() -> None:
    with pytest.raises(ToldError, match="longer --duration"):
        read_arrivals("poisson:0.001", 1, 1.0, 0)


OWN = """
name = "mine"
shared_tokens = 20
turns = [2, 4]
first_tokens = [50, 60]
tool_tokens = 30
answer_tokens = 5
pause_s = { median = 0.9, sigma = 0.4, most = 1.0 }
"""


def test_an_own_workload_is_drawn_within_its_ranges(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    workload = find_workload(str(path))
    plans = [workload.program(number, seed=1) for number in range(50)]
    assert {len(plan.turns) for plan in plans} == {2, 3, 4}
    assert all(50 <= plan.num_new(0) <= 60 for plan in plans)
    later = [turn for plan in plans for turn in plan.turns[1:]]
    assert {plan.num_new(i) for plan in plans for i in range(1, len(plan.turns))} == {30}
    assert all(0 < turn.gap_s <= 1.0 for turn in later)
    assert plans[3] == workload.program(3, seed=1) != workload.program(3, seed=2)


def test_an_own_workload_may_spell_its_turns_out(tmp_path: Path) -> None:
    path = tmp_path / "three.toml"
    turns = "[[turn]]\nnew_tokens = 9\nanswer_tokens = 2\n" * 2 + "pause_s = 1.5\n"
    path.write_text(f'name = "three"\n{turns}')
    plan = find_workload(str(path)).program(0, seed=1)
    assert prompts(plan) == [9, 20]
    assert plan.turns[1].gap_s == 1.5


def test_the_crowd_is_agents_and_every_fourth_a_question() -> None:
    found = own.read(Path(own.__file__).with_name("crowd.toml"))
    plans = [found.program(number, 1) for number in range(8)]
    assert [plan.name for plan in plans if len(plan.turns) == 1] == ["chat_0003", "chat_0007"]
    assert prompts(plans[3]) == [100]
    assert prompts(plans[0]) == [600, 748, 896, 1044, 1192, 1340]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "x"\n[chat]\nevery = 0\ntokens = 9\nanswer_tokens = 1', "every"),
        ('name = "x"\nturn_count = 3', "turn_count"),
        ('name = "x"\nturns = 0', "turns"),
        ("turns = 3", "name"),
        ("name = ", "value"),
    ],
)
def test_a_wrong_own_workload_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=says):
        find_workload(str(path))


def test_an_unknown_workload_lists_the_known_ones() -> None:
    with pytest.raises(WorkloadError, match="sweep, pressure"):
        find_workload("swep")


def record(turn: int, inp: int, out: int, common: int, think: float | None = None) -> str:
    lane = {"trace": "t", "lane": "main", "turn": turn, "model": "m"}
    return json.dumps({**lane, "inp": inp, "out": out, "common_blocks": common, "think": think})


def test_a_replayed_session_grows_is_cut_and_ends_where_the_record_does(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl.gz"
    lines = [
        record(0, 650, 40, 0),
        record(1, 1000, 30, 10, think=8.0),  # the whole prompt before: 10 blocks of 64
        record(2, 900, 30, 5, think=4.0),  # compacted: only 320 tokens are the same
        record(3, 9000, 30, 14),  # longer than we want
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    workload = find_workload(f"claude-code:{path},pauses=4,longest=2000")
    plan = workload.program(0, seed=1)
    assert workload.size == 1
    assert plan.name == "t/main"
    assert prompts(plan) == [650, 1000, 900]
    assert [plan.num_new(index) for index in range(3)] == [650, 1000 - 690, 900 - 320]
    assert [turn.gap_s for turn in plan.turns] == [0.0, 2.0, 1.0]


def test_a_replay_is_scaled_down(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(record(0, 6500, 400, 0) + "\n" + record(1, 10000, 300, 101))
    workload = find_workload(f"claude-code:{path},scale=10")
    assert workload.name == "claude-code,scale=10"  # a result says what was scaled
    plan = workload.program(0, seed=1)
    assert prompts(plan) == [650, 1000]
    assert plan.num_new(1) == 1000 - 690


@pytest.mark.parametrize("options", ["scale=0", "size=3", "longest=10"])
def test_a_replay_that_cannot_be_is_refused(tmp_path: Path, options: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(record(0, 6500, 400, 0))
    with pytest.raises(WorkloadError):
        find_workload(f"claude-code:{path},{options}")


def test_a_trace_of_any_known_format_is_a_workload(tmp_path: Path) -> None:
    steps = [{"response": "r" * 40, "observation": "o" * 400, "execution_time": 2.0}] * 2
    history = [{"role": "system", "content": "s" * 400}]
    path = tmp_path / "run.traj"
    path.write_text(json.dumps({"trajectory": steps, "history": history}))
    workload = find_workload(f"{path},pauses=4")
    assert (workload.name, workload.size) == ("recorded,pauses=4", 1)
    turns = workload.program(0, seed=1).turns
    assert [turn.num_prompt_tokens for turn in turns] == [100, 210]
    assert [turn.gap_s for turn in turns] == [0.0, 0.5]
    path.write_text("{}")
    with pytest.raises(WorkloadError, match="of no format that is known"):
        find_workload(str(path))


# --- how much KV is alive at a time ----------------------------------------------------------
class Growing:
    """Program n holds 100 (n + 1) tokens, and its tool takes two seconds."""

    name, defaults, size = "growing", Defaults("turns"), None

    def program(self, number: int, seed: int) -> ProgramPlan:
        tokens = 50 * (number + 1)
        return grown(f"p{number}", (Added(tokens - 5, 5), Added(tokens - 5, 5, 2.0)))


def load(arrivals: Arrivals | str, programs: int = 5, workload: Source | None = None) -> Load:
    if isinstance(arrivals, str):
        arrivals = read_arrivals(arrivals, 42, 45.0, programs)
    return Load(workload or Growing(), arrivals, Tokens(42), "m", programs=programs)


def test_turn_by_turn_all_programs_are_alive() -> None:
    assert live(load("turns")) == 1500
    assert live(load("turns", 6, PRESSURE)) == 6 * 1332


def test_a_closed_loop_has_as_many_alive_as_work_at_once_at_worst_the_largest() -> None:
    assert live(load("closed:2")) == 900
    assert live(load("closed:9")) == 1500


@pytest.mark.parametrize(
    ("times_s", "tokens"),
    [
        ((0.0, 10.0, 20.0), 300),  # one after the other: the largest
        ((0.0, 1.0, 1.5), 600),
        ((0.0, 1.0, 2.5), 500),  # the first has gone when the third comes
        ((0.0, 2.0, 2.0), 600),  # at that very moment it is still there
    ],
)
def test_in_an_open_loop_those_are_alive_that_overlap(
    times_s: tuple[float, ...], tokens: int
) -> None:
    assert live(load(Arrivals("poisson:1", times_s=times_s), 0)) == tokens


def test_nobody_knows_where_only_time_ends_a_closed_loop() -> None:
    assert live(load("closed:2", 0)) is None
