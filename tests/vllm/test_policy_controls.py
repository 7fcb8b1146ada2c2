"""Each rule of the policy machine can fail: a small trace on which it holds, and one fault of the
product that breaks it, and no other rule. Where a fault was real once, its name says which."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from continuum_connector.policy.base import Pin
from continuum_connector.programs import lineage
from continuum_connector.programs.continuation import TO_ITS_END, Kept
from continuum_connector.programs.program import Interruptions, ProgramTable
from continuum_connector.scheduler.decisions import Decider, DramWorth
from continuum_connector.scheduler.stock import Balance
from continuum_connector.scheduler.tiers.chains import SlotClaims
from continuum_connector.scheduler.tiers.disk_saving import Saving
from continuum_connector.scheduler.tiers.slots import numbers_of
from continuum_connector.scheduler.turns import Away
from continuum_connector.toolcalls import Ending
from tests.vllm.policy_machine import RULES, broken
from tests.vllm.policy_traces import Trace, Turn, World

Patch = pytest.MonkeyPatch


# -- faults ------------------------------------------------------------------------------------
def pins_go_on_while_they_lose(patch: Patch) -> None:
    """Whatever stock vLLM would have found."""
    patch.setattr(Balance, "lost", lambda *_: False)


def what_people_were_told_stays(patch: Patch) -> None:
    """Pins of answers to people end last, those of questions too, and never by time, nor because
    they lose."""
    pins_go_on_while_they_lose(patch)
    worth_most_is_what_people_were_told(patch)


def worth_most_is_what_people_were_told(patch: Patch) -> None:
    patch.setattr(Away, "is_question", lambda *_: False)
    choose = Decider.choose

    def worth_most(self: Any, finished: Any, snapshot: Any) -> Any:
        choice = choose(self, finished, snapshot)
        if finished.asked.ending is Ending.ANSWER and isinstance(choice.decision, Pin):
            return replace(choice, decision=replace(choice.decision, ttl_s=1e6, value=math.inf))
        return choice

    patch.setattr(Decider, "choose", worth_most)


def a_turn_supersedes_its_program(patch: Patch) -> None:
    """Side requests and conversations under one id, before law 8."""
    patch.setattr(SlotClaims, "_continued", lambda self, current, _: list(current))
    patch.setattr(Kept, "continued", lambda *_: TO_ITS_END)


def a_last_turn_ends_what_it_shares(patch: Patch) -> None:
    """`final` demotes every chain that has a block of the turn's, whoever left it."""

    def demote(self: Any, program: Any, numbers: Any, num_prompt: Any) -> Any:
        its = set(numbers.tolist())
        live = list(self.order.queues[-2])
        self.order.demote([c for c in live if its & set(numbers_of(c.tickets).tolist())])

    patch.setattr(SlotClaims, "demote", demote)


def ranks(patch: Patch, worth: Callable[[DramWorth, str], float | None]) -> None:
    """Some programs have that worth in DRAM."""
    rank_at = DramWorth.rank_at

    def broken_rank_at(self: Any, now: Any) -> Any:
        rank = rank_at(self, now)

        def broken_rank(key: str, last_used: float) -> float:
            own = worth(self, key)
            return rank(key, last_used) if own is None else own

        return broken_rank

    patch.setattr(DramWorth, "rank_at", broken_rank_at)


def what_is_asked_for_waits(patch: Patch) -> None:
    """Groups of one's own (`group_size`): whoever asks for it ranks as a turn that waits."""
    asked, end_turn = set(), ProgramTable.end_turn

    def note(self: Any, program: Any, hints: Any, *rest: Any, **more: Any) -> Any:
        asked.update({program.key} if hints.ttl_s else ())
        end_turn(self, program, hints, *rest, **more)

    patch.setattr(ProgramTable, "end_turn", note)
    ranks(patch, lambda _, key: 0.0 if key in asked else None)


def samples_wait(patch: Patch) -> None:
    """Groups by equal prompts (n > 1): they rank as turns that wait, though all have ended."""

    def worth(self: DramWorth, key: str) -> float | None:
        came = Counter(each.arrival for each in self._programs._programs.values())
        program = self._programs.get(key)
        return 0.0 if program is not None and came[program.arrival] > 1 else None

    ranks(patch, worth)


def a_flood_ends_who_is_forgotten(patch: Patch) -> None:
    """The least recently seen is forgotten first, and its blocks leave DRAM first."""

    def shrink(self: Any) -> None:
        idle = (key for key, each in list(self._programs.items()) if not each.num_active)
        while len(self._programs) > self._max_programs and (key := next(idle, None)):
            self._once[self._programs.pop(key).is_named].pop(key, None)

    patch.setattr(ProgramTable, "_shrink", shrink)
    ranks(patch, lambda self, key: -math.inf if self._programs.get(key) is None else None)


def an_idle_server_writes_on(patch: Patch) -> None:
    """A disk slot is written again as often as another displaces it."""
    patch.setattr(Saving, "_may_displace", lambda self, numbers, is_cold: numbers >= 0)


def an_end_that_changes_is_not_known(patch: Patch) -> None:
    """Lineage by the very end of a prompt alone."""
    patch.setattr(lineage, "EARLY", ())
    patch.setattr(lineage, "BACK", ())


def an_answer_that_is_stopped_is_over(patch: Patch) -> None:
    """Whoever interrupts one has gone away, whatever came after it before."""
    patch.setattr(Interruptions, "are_resumed", lambda *_: False)


# -- traces ------------------------------------------------------------------------------------
def rounds(number: int, turns_of: Callable[[int], Iterable[Turn]], **world: int) -> Trace:
    turns = [turn for each in range(number) for turn in turns_of(each)]
    return Trace(World(**world), tuple(turns), "liar")


def goes_on(who: str, number: int, first: int, **said: Any) -> Turn:
    """Turn `number` of a conversation that begins with `first` tokens."""
    return Turn(who, 16 if number else first, **said)


def beside_chats(num_agents: int, length: int, num_rounds: int) -> Trace:
    """Agents, three chats with people, of which one goes on in each round, and questions."""

    def turns(number: int) -> Iterator[Turn]:
        for chat in [number % 3] if number else range(3):
            yield goes_on(f"chat.{chat}", number, 208)
        for each in range(num_agents):
            final = number == num_rounds - 1 or None
            yield goes_on(f"agent{each}.main", number, length, tool="run", final=final)
        yield Turn(f"question.{number}", 200, final=True)

    return rounds(num_rounds, turns)


def one_id(number: int) -> Iterator[Turn]:
    for chat in range(4):
        yield goes_on(f"app.chat{chat}", number, 320, name="app", after_s=2.0)


def beside_a_liar(lie: Callable[[int], list[Turn]], head: int = 0) -> Trace:
    """Agents that DRAM holds, and questions that sweep VRAM."""

    def turns(number: int) -> Iterator[Turn]:
        for each in "xyz":
            yield goes_on(f"agent{each}.main", number, 300, head=head, tool="run")
        yield from (Turn(f"question.{number}{each}", 600, after_s=0.5) for each in "pq")
        yield from lie(number)

    return rounds(6, turns, blocks=50, slots=120)


def asks_for_much(number: int) -> list[Turn]:
    asks = range(0 if number else 4)
    return [Turn(f"liar.{n}", 352, name=f"liar{n}", ttl_s=300.0, after_s=0.5) for n in asks]


def says_it_is_over(number: int) -> list[Turn]:
    return [Turn(f"liar.{number}", 16, head=160, name=f"liar{number}", final=True, after_s=0.5)]


def beside_samples(number: int) -> Iterator[Turn]:
    for each in "xy":
        yield goes_on(f"agent{each}.main", number, 300, tool="make", after_s=3.0)
    yield from (Turn(f"question.{number}{each}", 200, after_s=0.5) for each in "pq")
    if not number:
        yield from (Turn(f"samples.{each}", 352, copies=4, after_s=0.5) for each in "pq")


def beside_a_flood(number: int) -> Iterator[Turn]:
    yield goes_on("agent.main", number, 320, tool="make")
    yield from (Turn(f"flood.{number}.{each}", 100, after_s=0.5) for each in range(12))


def with_a_reminder(number: int) -> Iterator[Turn]:
    yield goes_on("agent.main", number, 100, tail=24, answer=20, tool="run")


def who_interrupts(number: int) -> Iterator[Turn]:
    for chat in "xy":
        yield goes_on(f"app.{chat}", number, 200, answer=40, stopped=24, name=chat)
        yield Turn(f"question.{number}{chat}", 160)


def that_share_a_disk_slot(number: int) -> Iterator[Turn]:
    yield Turn(f"agent{number}.main", 66, head=64, answer=1, tool="make")


CONTROLS: list[tuple[str, Callable[[Patch], None], Trace]] = [
    ("as_stock", what_people_were_told_stays, beside_chats(3, 90, 3)),
    ("each_as_stock", what_people_were_told_stays, beside_chats(1, 200, 7)),
    ("as_nameless", a_turn_supersedes_its_program, rounds(3, one_id)),
    ("costs_its_room", what_is_asked_for_waits, beside_a_liar(asks_for_much)),
    ("costs_its_room", a_last_turn_ends_what_it_shares, beside_a_liar(says_it_is_over, head=160)),
    (
        *("idle_is_quiet", an_idle_server_writes_on),
        rounds(8, that_share_a_disk_slot, slots=44, disk=6, per_slot=8),
    ),
    ("finds_its_own", samples_wait, rounds(6, beside_samples, blocks=50, slots=90)),
    (
        *("finds_its_own", a_flood_ends_who_is_forgotten),
        rounds(3, beside_a_flood, slots=80, programs=8),
    ),
    ("is_known", an_end_that_changes_is_not_known, rounds(2, with_a_reminder)),
]
TRACES = [trace for *_, trace in CONTROLS]


@pytest.mark.parametrize(
    ("rule", "fault", "trace"),
    [pytest.param(*each, id=f"{each[0]}-{each[1].__name__}") for each in CONTROLS],
)
def test_a_rule_is_red_where_the_product_has_its_fault(
    rule: str, fault: Callable[[Patch], None], trace: Trace, monkeypatch: Patch
) -> None:
    assert not broken(trace)
    fault(monkeypatch)
    assert broken(trace).keys() == {rule}


@pytest.mark.parametrize("trace", [trace for rule, _, trace in CONTROLS if rule.endswith("stock")])
def test_what_a_wrong_forecast_loses_is_bounded(trace: Trace, monkeypatch: Patch) -> None:
    """With this fault alone pins lose until they end."""
    worth_most_is_what_people_were_told(monkeypatch)
    assert not broken(trace)


def test_an_interrupted_answer_that_is_let_go_breaks_two_rules(monkeypatch: Patch) -> None:
    trace = rounds(6, who_interrupts)
    assert not broken(trace)
    an_answer_that_is_stopped_is_over(monkeypatch)
    pins_go_on_while_they_lose(monkeypatch)
    assert broken(trace).keys() == {"as_stock", "each_as_stock"}


def test_each_rule_has_its_control() -> None:
    assert {rule for rule, *_ in CONTROLS} == set(RULES)
