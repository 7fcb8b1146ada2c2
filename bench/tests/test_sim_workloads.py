"""The lab's workloads: lengths, what prompts have in common, gaps, who waits for whom."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.common.plans import Span, Streams, Talk, Workload
from bench.common.workloads import Request
from bench.sim.load import Seen
from bench.sim.workloads.recorded import FOLDER_VARIABLE, NAME, records
from bench.sim.workloads.registry import NAMES, build
from bench.sim.workloads.shape import Gaps
from continuum_connector.tools.analysis.foreign import conversations


def common(first: list[int], second: list[int]) -> int:
    """Tokens that two prompts have in common from their beginning."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_its_seed_s_and_whole(name: str) -> None:
    """Names differ, the last turn and no other is final; whoever is waited for exists, and does not
    wait for whoever waits."""
    made = build(name, {"programs": 12, "seed": 5})
    assert made == build(name, {"programs": 12, "seed": 5})
    assert made.programs != build(name, {"programs": 12, "seed": 6}).programs
    programs = {plan.name: plan for plan in made.programs}
    assert len(programs) == len(made.programs)
    for plan in made.programs:
        assert [turn.is_final for turn in plan.turns].index(True) == len(plan.turns) - 1
        assert all(turn.num_prompt_tokens and turn.answer.length for turn in plan.turns)
        if plan.after is not None:
            parent, index = plan.after
            assert plan.parent == parent
            assert plan.name in programs[parent].turns[index + 1].joins
        for turn in plan.turns:
            assert all(programs[other].after for other in turn.joins)


def test_a_prompt_of_an_agent_begins_with_the_one_before_and_its_answer() -> None:
    for plan in build("agents", {"programs": 5}).programs:
        for before, turn in zip(plan.turns, plan.turns[1:], strict=False):
            said = before.tokens() + list(before.answer.tokens())
            assert turn.tokens()[: len(said)] == said


def test_agents_share_the_system_prompt_and_nothing_else() -> None:
    first, second = build("agents", {"programs": 2, "shared": 700}).programs
    assert common(first.turns[-1].tokens(), second.turns[-1].tokens()) == 700


def test_sizes_are_what_the_shape_says_on_average() -> None:
    programs = build("agents", {"programs": 800, "turns": 8, "context": 9_000}).programs
    turns = [len(plan.turns) for plan in programs]
    contexts = [plan.turns[-1].num_prompt_tokens for plan in programs]
    assert sum(turns) / len(turns) == pytest.approx(8, rel=0.05)
    assert sum(contexts) / len(contexts) == pytest.approx(9_000, rel=0.05)


def test_single_requests_have_not_a_token_in_common() -> None:
    prompts = [plan.turns[0].tokens() for plan in build("no_reuse", {"programs": 20}).programs]
    assert len({token for prompt in prompts for token in prompt}) == sum(map(len, prompts))


def test_forks_of_a_task_share_half_of_the_context() -> None:
    programs = build("forks", {"programs": 8, "context": 8_000, "shared": 500}).programs
    prompts = {plan.name: plan.turns[-1].tokens() for plan in programs}
    assert common(prompts["fork0.0"], prompts["fork0.3"]) == 4_500
    assert common(prompts["fork0.0"], prompts["fork1.0"]) == 500


def test_a_compaction_keeps_the_system_prompt_and_is_shorter() -> None:
    for plan in build("compactions", {"programs": 5, "shared": 300}).programs:
        pairs = zip(plan.turns, plan.turns[1:], strict=False)
        breaks = [
            (before, turn)
            for before, turn in pairs
            if common(before.tokens(), turn.tokens()) < before.num_prompt_tokens
        ]
        assert len(breaks) == 1
        before, turn = breaks[0]
        assert common(before.tokens(), turn.tokens()) == 300
        assert turn.num_prompt_tokens < before.num_prompt_tokens


@pytest.mark.parametrize(
    ("name", "median", "p90"),
    [("coding", 9, 72), ("person", 127, 1543), ("swe", 0.233, 1.96), ("memoryless", 6.93, 23.0)],
)
def test_gaps_have_the_quantiles_of_their_curve(name: str, median: float, p90: float) -> None:
    rng, drawn = random.Random(1), Gaps(name, longest_s=1e9)
    seconds = sorted(drawn.draw(rng)[0] for _ in range(20_000))
    assert seconds[10_000] == pytest.approx(median, rel=0.05)
    assert seconds[18_000] == pytest.approx(p90, rel=0.1)


def test_gaps_are_scaled_and_end_at_the_longest() -> None:
    rng, drawn = random.Random(1), Gaps("person", scale=0.1, longest_s=20.0)
    seconds = sorted(drawn.draw(rng)[0] for _ in range(5_000))
    assert seconds[2_500] == pytest.approx(12.7, rel=0.1)
    assert seconds[-1] == 20.0


def test_of_parallel_tools_the_slowest_is_waited_for() -> None:
    one, many = random.Random(1), random.Random(1)
    alone = sorted(Gaps("coding").draw(one)[0] for _ in range(4_000))
    together = sorted(Gaps("coding", parallel=4).draw(many)[0] for _ in range(4_000))
    # the median of the longest of one to four: where q + q^2 + q^3 + q^4 = 2
    assert together[2_000] == pytest.approx(Gaps("coding").at(0.713), rel=0.1)
    assert together[2_000] > alone[2_000]


def test_a_tool_s_name_tells_how_long_it_takes() -> None:
    rng = random.Random(1)
    drawn = [Gaps("coding").draw(rng) for _ in range(5_000)]
    fast = [seconds for seconds, tool in drawn if tool == "read"]
    slow = [seconds for seconds, tool in drawn if tool == "test"]
    assert sum(fast) / len(fast) < sum(slow) / len(slow) / 4


def test_forgetting_keeps_the_beginning_of_what_was_said() -> None:
    streams = Streams()
    talk = Talk(streams, (Span(streams.new(), 10),))
    talk.turn(20, 5)
    talk.forget(keep=18)
    talk.turn(4, 5)
    talk.forget(keep=3)
    talk.turn(1, 5)
    first, second, third = talk.turns()
    assert common(first.tokens(), second.tokens()) == 18
    assert second.num_prompt_tokens == 22
    assert common(second.tokens(), third.tokens()) == 3


# --- traces ---------------------------------------------------------------------------------
def turns_of(workload: Workload) -> int:
    return sum(len(plan.turns) for plan in workload.programs)


def test_recorded_sessions_are_as_long_as_recorded_but_for_the_scale() -> None:
    whole = build("claude_code", {"programs": 20, "scale": 1.0})
    scaled = build("claude_code", {"programs": 20, "scale": 0.125})
    assert turns_of(whole) == turns_of(scaled)
    for one, other in zip(whole.programs, scaled.programs, strict=True):
        a, b = one.turns[-1].num_prompt_tokens, other.turns[-1].num_prompt_tokens
        assert b == pytest.approx(a / 8, abs=20)


def test_a_break_in_a_recorded_session_keeps_what_the_record_says() -> None:
    requests = records(NAME, "", Request)
    plans = {p.name: p for p in build("claude_code", {"programs": 400, "scale": 1 / 64}).programs}
    breaks = 0
    for plan in plans.values():
        for before, turn in zip(plan.turns, plan.turns[1:], strict=False):
            breaks += common(before.tokens(), turn.tokens()) < before.num_prompt_tokens - 1
    assert 0 < breaks < 0.1 * len(requests)
    assert len([p for p in plans.values() if p.parent]) >= 12


def test_requests_that_go_on_with_another_are_one_conversation() -> None:
    first = {"hash_ids": [0, 1, 2, 3]}  # 3 is the part of a block
    other = {"hash_ids": [0, 7, 8, 9]}
    second = {"hash_ids": [0, 1, 2, 4, 5]}
    third = {"hash_ids": [0, 1, 2, 4, 6]}
    assert conversations([first, other, second, third]) == [[first, second, third], [other]]


def test_equal_hash_ids_are_equal_text() -> None:
    workload = build("mooncake", {"programs": 300, "scale": 0.25})
    prompts = [plan.turns[0].tokens() for plan in workload.programs]
    assert len({tuple(prompt[:128]) for prompt in prompts}) == 1  # a system prompt, as recorded
    longer = [plan for plan in workload.programs if len(plan.turns) > 1]
    assert longer
    spans = [each for plan in workload.programs for turn in plan.turns for each in turn.said]
    assert max(span.tokens()[-1] for span in spans) < 2**63, "as any token that vLLM takes"
    for plan in longer:
        before, turn = plan.turns[0].tokens(), plan.turns[1].tokens()
        assert common(before, turn) >= len(before) - 2 * 128


def test_a_missing_trace_says_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"kv-cache-tester.*CONTINUUM_TRACES"):
        build("claude_code", {})


def test_what_a_workload_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match="agents has no turn; it has programs, turns"):
        build("agents", {"turn": 3})
    with pytest.raises(ValueError, match="no workload 'agent'; there are agents"):
        build("agent", {})


def test_a_trace_of_ones_own_is_a_workload(tmp_path: Path) -> None:
    requests = [
        {"in": 8000, "out": 80, "hash_ids": [*range(125)], "think_time": 0.0},
        {"in": 9600, "out": 40, "hash_ids": [*range(150)], "think_time": 4.0},
    ]
    (tmp_path / "a.json").write_text(json.dumps({"id": "mine", "requests": requests}))
    workload = build("recorded", {"file": str(tmp_path), "scale": 0.25, "says_final": False})
    [plan] = workload.programs
    assert plan.name == "mine"
    assert [turn.num_prompt_tokens for turn in plan.turns] == [2000, 2400]
    assert [turn.gap_s for turn in plan.turns] == [0.0, 4.0]
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match="of no format that is known"):
        build("recorded", {"file": str(tmp_path / "b.json")})


def test_what_chats_have_in_common_is_common_text(tmp_path: Path) -> None:
    def asked(chat: int, parent: int, at: float, tokens: int, ids: list[int]) -> str:
        lengths = {"input_length": tokens, "output_length": 20}
        head = {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "type": "text"}
        return json.dumps(head | lengths | {"hash_ids": ids})

    system = [1 << 60, 7]  # ids may be any numbers
    file = tmp_path / "bailian.jsonl"
    file.write_text(
        "\n".join(
            (
                asked(6, -1, 2.0, 50, [*system, 3, 4]),
                asked(5, -1, 0.0, 64, [*system, 8, 9]),
                asked(9, 5, 4.0, 100, [*system, 8, 9, 11, 12]),
            )
        )
    )
    workload = build("recorded", {"file": str(file), "scale": 1.0})
    first, second = workload.programs
    assert [plan.arrival_s for plan in (first, second)] == pytest.approx([0.0, 1.0], abs=1e-3)
    assert [turn.num_prompt_tokens for turn in first.turns] == [64, 100]
    assert [turn.gap_s for turn in first.turns] == pytest.approx([0.0, 3.4])
    assert common(first.turns[0].tokens(), second.turns[0].tokens()) == 32
    assert common(first.turns[0].tokens(), first.turns[1].tokens()) == 64


# --- loads that others publish --------------------------------------------------------------
def test_in_slots_a_program_follows_the_end_of_the_one_before() -> None:
    programs = build("swe", {"programs": 7, "slots": 3, "scale": 0.1}).programs
    assert [plan.after is None for plan in programs] == [True] * 3 + [False] * 4
    for before, plan in zip(programs, programs[3:], strict=False):
        assert plan.after == (before.name, len(before.turns) - 1)
        assert (plan.arrival_s, plan.parent) == (0.0, "")


def test_trajectories_are_played_whole_and_have_no_text_in_common() -> None:
    programs = build("swe", {"programs": 30, "turns": 200, "scale": 1.0}).programs
    assert {len(plan.turns) for plan in programs} == {21, 24, 32}
    lengths = {plan.turns[-1].num_prompt_tokens for plan in programs}
    assert lengths <= {12743, 9962, 34098, 16618, 25286}
    prompts = [plan.turns[0].tokens() for plan in programs]
    assert len({token for prompt in prompts for token in prompt}) == sum(map(len, prompts))
    pauses = [turn.gap_s for plan in programs for turn in plan.turns[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(0.925, rel=0.3)


def test_a_memory_without_bounds_finds_of_api_calls_what_was_measured() -> None:
    programs = build("api_calls", {"programs": 1200, "context": 4800}).programs
    seen = Seen(1)
    found = 0
    for turn in (plan.turns[0] for plan in programs):
        found += seen.known(turn)
        seen.add(turn)
    asked = sum(plan.turns[0].num_prompt_tokens for plan in programs)
    assert found / asked == pytest.approx(0.54, abs=0.02)
