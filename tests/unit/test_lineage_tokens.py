"""Recognising programs whose prompts are edited at their end or in their middle."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

import pytest

from continuum_connector.programs.lineage import LineageIndex

Tokens = list[int]
BLOCKS = pytest.mark.parametrize("block", [16, 64, 128])
TAILS = pytest.mark.parametrize("tail", [0, 8, 40, 120, 400])
KNOWN = pytest.mark.parametrize("knows_tokens", [True, False], ids=["tokens", "hashes alone"])


@dataclass
class World:
    """An index, and texts that nobody writes twice."""

    block: int
    knows_tokens: bool = True
    index: LineageIndex = field(default_factory=lambda: LineageIndex(10_000))
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    def text(self, num_tokens: int) -> Tokens:
        return [self.draw.randrange(2**31) for _ in range(num_tokens)]

    def arrives(self, prompt: Tokens) -> str | None:
        tokens = prompt if self.knows_tokens else None
        return self.index.match(self._hashes(prompt), len(prompt), tokens)

    def ends(self, program: str, prompt: Tokens, answer: Tokens) -> None:
        hashes, num_blocks = self._hashes(prompt + answer), len(prompt) // self.block
        known = (prompt, answer) if self.knows_tokens else ()
        self.index.register(program, hashes, num_blocks, None, len(prompt), *known)

    def turn(self, new: str, prompt: Tokens, answer: Tokens) -> str:
        """The name of the program that has this turn: `new` if it is not known."""
        name = self.arrives(prompt) or new
        self.ends(name, prompt, answer)
        return name

    def _hashes(self, tokens: Tokens) -> list[bytes]:
        """As vLLM chains them."""
        hashes, last = [], b""
        for begin in range(0, len(tokens) - len(tokens) % self.block, self.block):
            text = last + str(tokens[begin : begin + self.block]).encode()
            hashes.append(last := hashlib.sha256(text).digest())
        return hashes


def agent(
    world: World, name: str, begin: Tokens, tail: int, answers: int = 200, thinking: int = 0
) -> list[str]:
    """The names of an agent's turns, each of which ends in a message that it never keeps: a
    reminder, the time. `answers`: of how many tokens; `thinking`: how many of each it leaves out.
    """
    kept, names = list(begin), []
    for turn in range(6):
        prompt, answer = kept + world.text(tail), world.text(answers)
        names.append(world.turn(f"{name}{turn}", prompt, answer))
        kept += answer[thinking:] + world.text(3 * answers // 2)
    return names


@pytest.mark.parametrize("tail", [0, 1, 8])
def test_a_turn_that_fills_no_block_more_goes_on_if_it_repeats_the_answer(tail: int) -> None:
    world = World(64)
    begin, answer = world.text(64 * 5 + 10), world.text(20)
    assert world.turn("a", begin + world.text(tail), answer) == "a"
    assert world.arrives(begin + answer + world.text(10)) == "a"
    assert world.arrives(begin + world.text(25)) is None, "another task behind one system prompt"
    assert world.arrives(begin + answer[:11] + world.text(10)) is None, "by chance alike"


@KNOWN
@BLOCKS
@TAILS
def test_an_agent_whose_requests_end_in_a_message_that_is_never_kept(
    block: int, tail: int, knows_tokens: bool
) -> None:
    """By hashes alone the second turn may be anybody's who has the same system prompt; after that
    there are two full blocks that only this agent can have."""
    world = World(block, knows_tokens)
    assert len(set(agent(world, "a", world.text(2000), tail))) <= (1 if knows_tokens else 2)


@BLOCKS
@pytest.mark.parametrize("answer", [1, 4, 11, 40])
@pytest.mark.parametrize("task", [200, 700, 2000])
def test_calls_that_share_a_system_prompt_are_never_one_program(
    block: int, answer: int, task: int
) -> None:
    """As to a classifier: of every length, each longer than some call before it by the few tokens
    that that was answered."""
    for seed in range(2):
        world = World(block, draw=random.Random(seed))
        system = world.text(1000 + 16 * seed)
        for number in range(40):
            prompt = system + world.text(world.draw.randrange(task, 3 * task))
            assert world.turn(f"call{number}", prompt, world.text(answer)) == f"call{number}"


@BLOCKS
@pytest.mark.parametrize("place", ["before the question", "behind the question"])
def test_calls_answered_as_the_examples_in_their_prompts_are_no_program(
    block: int, place: str
) -> None:
    """A batch that grades or labels, each of whose prompts has the same examples: what follows one
    call's blocks in another's prompt is an example of the answer, and no answer to repeat."""
    world = World(block)
    answers = [world.text(14) for _ in range(3)]
    system, examples = world.text(600), Tokens()
    for said in answers:
        examples += said + world.text(40)
    for number in range(60):
        question = world.text(world.draw.randrange(block, 3 * block))
        parts = (examples, question) if place == "before the question" else (question, examples)
        prompt = [*system, *parts[0], *parts[1]]
        assert world.turn(f"call{number}", prompt, world.draw.choice(answers)) == f"call{number}"


@TAILS
@pytest.mark.parametrize("begin", [100, 200, 320])
def test_an_agent_whose_turns_are_shorter_than_such_a_message(begin: int, tail: int) -> None:
    """From its second turn on: a first prompt may be less than what the next one lacks of it."""
    world = World(block=16)
    assert len(set(agent(world, "a", world.text(begin), tail, answers=20)[1:])) == 1


@BLOCKS
@TAILS
def test_agents_that_share_a_system_prompt_and_leave_their_thinking_out(
    block: int, tail: int
) -> None:
    world = World(block)
    system = world.text(3000)
    for number in range(8):
        begin = system + world.text(300)
        names = agent(world, f"agent{number}-", begin, tail, thinking=100)
        assert set(names) == {f"agent{number}-0"}


@KNOWN
@BLOCKS
@pytest.mark.parametrize("task", [20, 100, 400, 1500])
def test_tasks_that_share_only_a_system_prompt_are_never_one_program(
    block: int, task: int, knows_tokens: bool
) -> None:
    """However long it is, whatever the lengths of the tasks, also where one kind of them shares
    more than the others do: today's prompt, with the date in it."""
    if task < block and not knows_tokens:
        pytest.skip("a prompt's last full block may be of the system prompt alone")
    world = World(block, knows_tokens)
    system = world.text(1000)
    days = [system + world.text(4000 + 16 * day) for day in range(4)]
    for number in range(60):
        own = task if knows_tokens else world.draw.randrange(task, task + 100)
        prompt = days[number // 15] + world.text(own)
        assert world.turn(f"task{number}", prompt, world.text(200)) == f"task{number}"


@KNOWN
def test_long_tasks_after_short_ones_that_share_a_system_prompt(knows_tokens: bool) -> None:
    """Each is longer than the last one by more than its answer, as a next turn is."""
    world = World(16, knows_tokens)
    system = world.text(2000)
    for number in range(10):
        prompt = system + world.text(100 + 300 * number)
        assert world.turn(f"task{number}", prompt, world.text(200)) == f"task{number}"


@KNOWN
@BLOCKS
def test_a_block_of_a_system_prompt_does_not_become_an_agents_own(
    block: int, knows_tokens: bool
) -> None:
    """Between the blocks that are looked at there may be the end of the system prompt."""
    world = World(block, knows_tokens)
    system = world.text(2000)
    agent(world, "a", system + world.text(block), tail=400)
    for number in range(20):
        prompt = system + world.text(2 * block + 40 * number)
        assert world.arrives(prompt) is None
        world.ends(f"task{number}", prompt, world.text(100))


@KNOWN
@BLOCKS
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_an_old_tool_result_is_cleared_from_the_context(
    block: int, share: float, knows_tokens: bool
) -> None:
    world = World(block, knows_tokens)
    kept = world.text(1000)
    for turn in range(10):
        answer = world.text(200)
        name = world.turn(f"new{turn}", kept, answer)
        assert name == "new0"
        kept = kept + answer + world.text(600)
    cleared = int(len(kept) * share)
    assert world.arrives([*kept[:cleared], *world.text(5), *kept[cleared + 500 :]]) == "new0"


@KNOWN
@BLOCKS
def test_children_that_are_forked_at_once_are_each_known_by_their_next_turn(
    block: int, knows_tokens: bool
) -> None:
    """Both go on with what their parent has, so they are its turns; what one of them leaves does
    not make the other a stranger."""
    world = World(block, knows_tokens)
    begin, answer = world.text(1000), world.text(300)
    assert world.turn("parent", begin, answer) == "parent"
    children = [begin + answer + world.text(400) for _ in range(3)]
    assert [world.arrives(child) for child in children] == ["parent"] * 3
    for _ in range(12):
        answers = [world.text(300) for _ in children]
        for child, said in zip(children, answers, strict=True):
            world.ends("parent", child, said)
        children = [
            child + said + world.text(400) for child, said in zip(children, answers, strict=True)
        ]
        assert [world.arrives(child) for child in children] == ["parent"] * 3


def test_a_piece_of_an_answer_in_anothers_task_needs_the_same_blocks_before_it() -> None:
    world = World(16)
    system, answer = world.text(1000), world.text(200)
    world.ends("a", system + world.text(100), answer)
    assert world.arrives(world.text(1000) + answer) is None
    assert world.arrives(system + answer) == "a", "it is told what another agent was answered"
    assert world.arrives(system + world.text(100)) is None


def condensed(world: World, name: str, begin: Tokens, num_turns: int = 6) -> list[str]:
    """The names of an agent's turns that condenses its context after every few: what it began with,
    a summary, and its last answer stay."""
    kept, names, answer = list(begin), [], Tokens()
    for number in range(3 * num_turns):
        if number and number % num_turns == 0:
            kept = begin + world.text(150) + answer + world.text(300)
        answer = world.text(200)
        names.append(world.turn(f"{name}{number}", kept, answer))
        kept = kept + answer + world.text(300)
    return names


@BLOCKS
def test_a_context_that_is_condensed_again_and_again_stays_its_agents(block: int) -> None:
    world = World(block)
    assert condensed(world, "a", world.text(1000)) == ["a0"] * 18


@BLOCKS
def test_what_only_begins_as_a_condensed_context_is_another_program(block: int) -> None:
    """A new task with the same first message, or an old context of it sent again."""
    world = World(block)
    begin = world.text(1000)
    answers = [world.text(200) for _ in range(3)]
    kept = list(begin)
    for answer in answers:
        assert world.turn("a", kept, answer) == "a"
        kept = kept + answer + world.text(300)
    assert world.arrives(begin + world.text(500)) is None
    assert world.arrives(begin + world.text(150) + answers[0] + world.text(300)) is None
    assert world.arrives(begin + world.text(150) + answers[-1] + world.text(300)) == "a"


@BLOCKS
def test_of_two_agents_that_begin_alike_none_has_the_others_condensed_context(block: int) -> None:
    world = World(block)
    begin = world.text(1000)
    names = [*condensed(world, "a", begin), *condensed(world, "b", begin)]
    assert not {name[0] for name in names[:18]} - {"a"}
    assert not {name[0] for name in names[18:]} - {"b"}
