"""Recognising a program by its block-hash chain alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.programs.lineage import EARLY, LineageIndex


def chain(*texts: str) -> list[bytes]:
    """One block per letter; each hash stands for the letter and everything before it."""
    text = "".join(texts)
    return [text[:end].encode() for end in range(1, len(text) + 1)]


@pytest.fixture
def index() -> LineageIndex:
    return LineageIndex(1000)


def test_the_next_turn_extends_the_last_one(index: LineageIndex) -> None:
    index.register("A", chain("SSab", "ooo"), 4)
    assert index.match(chain("SSab", "ooo", "tool")) == "A"
    assert index.match(chain("SSab", "ooo")) == "A"


@pytest.mark.parametrize(("kept", "found"), [("oooo", "A"), ("ooo", "A"), ("oo", "A"), ("o", None)])
def test_output_tokenised_again_may_end_two_blocks_early(
    index: LineageIndex, kept: str, found: str | None
) -> None:
    index.register("A", chain("SSab", "oooo"), 4)
    index.match(chain("SSab", "z"))  # the prompt's end alone is shared from here on
    index.match(chain("SSab", "y"))
    assert index.match(chain("SSab", kept, "ttt")) == found


def test_disjoint_and_short_prompts_match_nothing(index: LineageIndex) -> None:
    index.register("A", chain("SSab", "ooo"), 4)
    assert index.match(chain("zzab", "ooo")) is None
    assert index.match([]) is None
    assert index.match(chain("SS")) is None


def test_a_turn_below_one_block_registers_nothing(index: LineageIndex) -> None:
    index.register("A", [], 0)
    assert len(index) == 0


def test_a_newer_turn_replaces_the_older(index: LineageIndex) -> None:
    index.register("A", chain("Sab", "ooo"), 3)
    index.register("A", chain("Sab", "ooo", "tt", "ppp"), 8)
    assert index.match(chain("Sab", "ooo", "tt", "ppp", "u")) == "A"
    assert index.match(chain("Sab", "zz")) is None
    assert index.match(chain("Sab", "ooo", "zz")) == "A", "which only A can have written"


def test_dropped_reasoning_is_recognised_by_the_prompts_end(index: LineageIndex) -> None:
    """The template keeps "oo" of the output "rrroo": the chains part where the output began."""
    index.register("A", chain("SSab", "rrroo"), 4)
    assert index.match(chain("SSab", "oo", "tt")) == "A"
    index.register("A", chain("SSab", "oo", "tt", "rrp"), 8)
    assert index.match(chain("SSab", "oo", "tt", "p", "u")) == "A"


def test_a_shared_system_prompt_identifies_nobody(index: LineageIndex) -> None:
    index.register("A", chain("SSSS", "ooo"), 4)
    index.register("B", chain("SSSS", "ppp"), 4)
    assert index.match(chain("SSSS", "task")) is None
    assert index.match(chain("SSSS", "ooo", "t")) == "A"
    assert index.match(chain("SSSS", "ppp", "t")) == "B"


def test_a_prompts_end_that_two_texts_follow_is_shared_for_good(index: LineageIndex) -> None:
    index.register("A", chain("SSSS", "ooo"), 4)
    index.match(chain("SSSS", "x"))
    assert index.match(chain("SSSS", "y")) is None
    index.register("A", chain("SSSS", "x", "ppp"), 5)
    index.register("C", chain("SSSS", "qqq"), 4)
    assert index.match(chain("SSSS", "y")) is None
    assert index.match(chain("SSSS", "qqq", "y")) == "C"


def test_another_sample_of_the_same_prompt_is_no_next_turn(index: LineageIndex) -> None:
    index.register("A", chain("SSab", "ooo"), 4)
    assert index.match(chain("SSab")) is None
    assert index.match(chain("SSab", "ooo", "t")) == "A"


def test_two_programs_with_equal_output_are_told_apart_by_nothing(index: LineageIndex) -> None:
    index.register("A", chain("SSab", "ooo"), 4)
    index.register("B", chain("SSab", "ooo"), 4)
    assert index.match(chain("SSab", "ooo", "t")) is None


@pytest.mark.parametrize("order", ["parent first", "child first"])
def test_an_end_of_parent_and_child_is_the_parents(index: LineageIndex, order: str) -> None:
    turns = [("P", None), ("C", "P")]
    for program, parent in turns if order == "parent first" else reversed(turns):
        index.register(program, chain("SSab", "ooo"), 4, parent)
    assert index.match(chain("SSab", "ooo", "t")) == "P"
    index.forget("C")
    assert index.match(chain("SSab", "ooo", "t")) == "P"


def test_blocks_of_the_prompt_never_identify_by_themselves(index: LineageIndex) -> None:
    """The output fills one block: the two before it are a system prompt that others use."""
    index.register("A", chain("SSSS", "o"), 4)
    assert index.match(chain("SSS", "task")) is None
    assert index.match(chain("SSSS", "o", "t")) == "A"


def test_a_last_message_that_changes_afterwards_leaves_the_blocks_before_it(
    index: LineageIndex,
) -> None:
    index.register("A", chain("SSab", "ooo"), 4)
    index.register("A", chain("SSab", "ooo", "ttttx", "ppp"), 12)
    assert index.match(chain("SSab", "ooo", "tttty", "qq")) == "A"
    assert index.match(chain("SSab", "ooo", "tt", "reminder")) == "A"
    assert index.match(chain("SSab", "ooo", "u")) == "A", "a fork of the turn before"
    index.register("B", chain("TTab", "ooo"), 4)
    index.register("B", chain("TTab", "uvwxy", "ppp"), 9)
    assert index.match(chain("TTab", "z")) is None, "which anybody may ask after a first prompt"


def test_a_program_whose_answers_are_all_rewritten_is_known_by_its_prompts(
    index: LineageIndex,
) -> None:
    """Each prompt parts from the one before within its last blocks, once in its last message."""
    turns = ["SSab", "SSabuvw", "SSabuvwxy", "SSabuvwmn", "SSabuvwpqr"]
    for prompt in turns:
        assert index.match(chain(prompt)) == (None if prompt == turns[0] else "A")
        index.register("A", chain(prompt, "ooo"), len(prompt))


def test_the_same_prompt_again_is_no_next_turn_in_later_turns_either(index: LineageIndex) -> None:
    index.register("A", chain("SSab", "ooo"), 4)
    index.register("A", chain("SSab", "ooo", "tttt", "ppp"), 11)
    assert index.match(chain("SSab", "ooo", "tttt")) is None
    index.register("B", chain("SSab", "ooo", "tttt", "qqq"), 11)
    assert index.match(chain("SSab", "ooo", "tttt", "ppp", "u")) == "A"
    assert index.match(chain("SSab", "ooo", "tttt", "qqq", "u")) == "B"


def test_a_later_prompt_may_grow_by_less_than_a_block(index: LineageIndex) -> None:
    def register(program: str, prompt: str, num_tokens: int) -> None:
        index.register(program, chain(prompt, "ooo"), len(prompt), None, num_tokens)

    register("A", "SSab", 66)
    assert index.match(chain("SSab"), 70) is None, "of a first prompt that may be anybody's task"
    register("A", "SSabuv", 98)
    assert index.match(chain("SSabuv"), 98) is None, "the same prompt again"
    assert index.match(chain("SSabuv"), 97) is None
    assert index.match(chain("SSabuv"), 105) == "A"
    register("A", "SSabuv", 105)
    assert index.match(chain("SSabuv"), 104) is None
    assert index.match(chain("SSabuvw"), 115) == "A"


def test_a_first_prompt_says_nothing_before_its_end(index: LineageIndex) -> None:
    """Not for a program's first turn, nor for what its client's id begins anew."""
    index.register("A", chain("SSSSx", "ooo"), 5)
    assert index.match(chain("SSSSy")) is None
    index.register("B", chain("TTTT", "ooo"), 4)
    index.match(chain("TTTT", "x"))
    index.match(chain("TTTT", "y"))
    index.register("B", chain("TTTT", "task", "p"), 8)
    assert index.match(chain("TTTT", "tas", "other")) is None


def test_four_contexts_that_one_answer_forks_into_are_known_side_by_side(
    index: LineageIndex,
) -> None:
    """Each is so long that none of its ends is near the fork, where the others would find it."""
    prompts = [chain("SSab", "ooo", each * 4200) for each in "uvwx"]
    index.register("A", prompts[0][:7], 4)
    assert [index.match(prompt) for prompt in prompts] == ["A"] * 4
    for prompt in prompts:
        index.register("A", [*prompt, prompt[-1] + b"p"], len(prompt))
    assert [index.match([*prompt, prompt[-1] + b"p", b"q"]) for prompt in prompts] == ["A"] * 4


def test_four_contexts_of_one_id_that_share_nothing_are_known_side_by_side(
    index: LineageIndex,
) -> None:
    """A client that says its id with some requests only, as with a title's but not with the turn
    after it."""
    prompts = [chain(each * 4200) for each in "uvwx"]
    for prompt in prompts:
        index.register("A", [*prompt, prompt[-1] + b"p"], len(prompt))
    assert [index.match([*prompt, prompt[-1] + b"p", b"q"]) for prompt in prompts] == ["A"] * 4


def test_a_forgotten_program_is_not_recognised(index: LineageIndex) -> None:
    index.register("A", chain("Sab", "ooo"), 3)
    index.forget("A")
    index.forget("never seen")
    assert index.match(chain("Sab", "ooo", "t")) is None


def test_ends_are_bounded_and_the_least_recently_used_goes_first() -> None:
    index = LineageIndex(40)
    index.register("old", chain("old!", "ooo"), 4)
    for number in range(1000):
        index.register(f"p{number}", [f"{number}:{i}".encode() for i in range(9)], 5)
        assert index.match(chain("old!", "ooo", "t")) == "old"
        assert len(index) <= 40
    assert index.match([f"3:{i}".encode() for i in range(20)]) is None
    assert len(index._positions) == len(index._counts) <= 40
    assert len(index._by_program) <= 40


def test_only_known_positions_are_probed() -> None:
    class Counted(list[bytes]):
        num_probes = 0

        def __getitem__(self, position):  # type: ignore[no-untyped-def]
            self.num_probes += 1
            return super().__getitem__(position)

    index = LineageIndex(1000)
    long = [f"{i}".encode() for i in range(6500)]
    index.register("A", long[:6400], 6000)
    prompt = Counted(b"other" + block for block in long)
    assert index.match(prompt) is None
    assert prompt.num_probes == 4 + len(EARLY)


TEXT = st.text("ab", max_size=6)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), TEXT, TEXT, st.sampled_from(["end", "ask", "forget"])),
        max_size=30,
    )
)
def test_bounded_consistent_and_never_wrong_for_disjoint_programs(
    steps: Sequence[tuple[int, str, str, str]],
) -> None:
    """Each program writes in letters of its own, so any name but its own would be wrong."""
    index = LineageIndex(7)
    for number, prompt, output, step in steps:
        name = "ABCD"[number]
        blocks = chain(*(f"{name}{letter}" for letter in prompt + output))
        if step == "end":
            index.register(name, blocks, 2 * len(prompt))
        elif step == "forget":
            index.forget(name)
        assert index.match(blocks) in (None, name)
        check(index)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ABC"), TEXT, st.integers(-1, 9), st.sampled_from([None, "A", "B"])
        ),
        max_size=30,
    )
)
def test_consistent_whatever_is_shared(
    steps: Sequence[tuple[str, str, int, str | None]],
) -> None:
    index = LineageIndex(7)
    for name, text, num_prompt_blocks, parent in steps:
        index.match(chain(text))
        index.register(name, chain(text), num_prompt_blocks, parent)
        index.register(name, [b"same"] * num_prompt_blocks, 1, parent)
        check(index)
    for name in "ABC":
        index.forget(name)
    assert not index._by_program


def check(index: LineageIndex) -> None:
    assert len(index) <= 7
    assert index._positions == sorted(index._counts)
    assert sum(index._counts.values()) == len(index)
    for program, hashes in index._by_program.items():
        assert hashes
        for block_hash in hashes:
            assert index._ends[block_hash].program == program
            assert index._ends[block_hash].live
