"""The policy machine: whatever agents and their neighbours do, agents find what they should.

The state machine of machine.py proves that nothing is wrong or stuck. This one plays a trace
(policy_traces.py) on several real schedulers: stock vLLM's; ours; ours, but nobody says a name;
ours, but one client says nothing. It compares what their turns find. `RULES` are what must be true,
each with its slack and the reason for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from bench.common.known_costs import know
from continuum_connector.programs.lineage import NUM_CHAINS
from continuum_connector.toolcalls import UNREAD
from tests.vllm.harness import Engine
from tests.vllm.policy_traces import FIELDS, TOOLS, Text, Trace, Turn, World, bursts, texts
from tests.vllm.tiering import BLOCK, on_disk, tiered

# To compute a prompt is slow, to load it fast: whatever may come back is worth a store and a pin.
COSTS = {"prefill": [0.0, 1e-2, 0.0, 0.0, 0.0], "load": [0.0, 1e-6]}
FRESH_S = 2.0
TICK_S = 0.25  # in which an engine at rest is asked whether it wants a step


class Played:
    """A trace on one engine. `found`: of each turn, tokens of its prompts that were not computed.
    `programs`: of each turn, the key of its program as the client is told; "" on stock vLLM."""

    def __init__(
        self, world: World, turns: Sequence[Turn], said: Sequence[Text], is_ours: bool = True
    ) -> None:
        self.world, self.turns, self._said = world, turns, said
        self.engine = self._ours() if is_ours else self._stock()
        self.engine.check = dict  # type: ignore[method-assign]  # books are for machine.py
        self.programs = [""] * len(turns)
        for together in bursts(turns):
            self.rest(turns[together[0]].after_s)
            for number in together:
                self._send(number)
            self._run({number for number in together if turns[number].stopped})
        self.found = [0] * len(turns)
        for name, cached in self.engine.cached.items():
            self.found[int(name.partition(".")[0])] += sum(cached)
        for number in range(len(turns)):
            told = self.engine.kv_transfer_params.get(f"{number}.0") or {}
            self.programs[number] = told.get("continuum", {}).get("program", self.programs[number])

    def _stock(self) -> Engine:
        return Engine(self.world.blocks, connector=None, **self._options())

    def _ours(self) -> Engine:
        world, config = self.world, {"policy": "adaptive", "max_programs": self.world.programs}
        options = self._options() | {"config": config}
        if world.disk and world.slots:
            options |= {"disk_slots": world.disk, "per_slot": world.per_slot}
        engine = (on_disk if "disk_slots" in options else tiered)(
            world.blocks, world.slots, **options
        )
        know(engine.connector.costs, COSTS)
        turns = zip(self._said, self.turns, strict=True)
        asked = {tuple(said.answer): turn.asked for said, turn in turns}
        reader = engine.connector.side.decider._reader
        reader.read = lambda tokens, **_: asked.get(tuple(tokens), UNREAD)
        return engine

    def _options(self) -> dict[str, Any]:
        policy = "priority" if self.world.priorities else "fcfs"
        return {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "policy": policy}

    def _send(self, number: int) -> None:
        turn, said = self.turns[number], self._said[number]
        hints = {"ttl_s": turn.ttl_s}
        hints = {name: value for name, value in hints.items() if value is not None}
        for copy in range(turn.copies):
            self.engine.add(
                f"{number}.{copy}",
                said.prompt,
                turn.answer,
                program=turn.name,
                final=turn.final,
                priority=turn.priority,
                kv_transfer_params={"continuum": hints} if hints else None,
            )

    def _run(self, stopped: set[int]) -> None:
        """Until all are answered, or interrupted."""
        said, connector = self.engine.outputs, self.engine.connector

        def due() -> list[int]:
            return [n for n in stopped if len(said[f"{n}.0"]) == self.turns[n].stopped]

        while stopped:
            self.engine.run_until_idle(until=lambda: bool(due()))
            assert due(), self.engine.describe()
            for number in due():
                if connector is not None:  # who goes away is told nothing
                    self.programs[number] = connector.side.turns.get(f"{number}.0").program.key
                self.engine.abort(f"{number}.0")
                stopped.remove(number)
        self.engine.run_until_idle()

    def rest(self, seconds: float) -> None:
        """Let time pass in which nobody asks for anything."""
        end = self.engine.clock() + seconds
        while self.engine.clock() < end:
            if not self.engine.step():
                self.engine.clock.advance(min(TICK_S, end - self.engine.clock()))


class Case:
    """A trace, what it was played on, each when it is first asked for, and what hindsight knows."""

    def __init__(self, trace: Trace) -> None:
        self.world, self.turns, self.suspect = trace.world, trace.turns, trace.suspect
        self.said = texts(trace.turns)
        self.blocks = [each.blocks for each in self.said]

    # -- played on -----------------------------------------------------------------------
    @cached_property
    def stock(self) -> Played:
        return Played(self.world, self.turns, self.said, is_ours=False)

    @cached_property
    def ours(self) -> Played:
        return Played(self.world, self.turns, self.said)

    @cached_property
    def nameless(self) -> Played:
        turns = [replace(turn, name=None) for turn in self.turns]
        return self._played(turns)

    @cached_property
    def unsuspected(self) -> Played:
        """Ours, where the suspect asks the same, but says nothing about it."""
        turns = [replace(t, **FIELDS) if t.client == self.suspect else t for t in self.turns]
        return self._played(turns)

    def _played(self, turns: list[Turn]) -> Played:
        """Ours, where they are said to be something else: the tokens stay the same."""
        is_same = turns == list(self.turns)
        return self.ours if is_same else Played(self.world, turns, self.said)

    # -- hindsight -----------------------------------------------------------------------
    @cached_property
    def most(self) -> list[int]:
        """Of each turn, as many tokens as any engine could find: of the blocks that its prompts
        begin with, those that somebody had before, or has at the same time. A rule that holds
        against that needs no other engine."""
        most, had = [0] * len(self.turns), set[int]()
        for together in bursts(self.turns):
            has = Counter(
                b for n in together for b in self.blocks[n] for _ in range(self.turns[n].copies)
            )
            for number in together:
                asked = self.said[number].asked_blocks
                new = (at for at, b in enumerate(asked) if b not in had and has[b] == 1)
                most[number] = BLOCK * next(new, len(asked)) * self.turns[number].copies
            had.update(has)
        return most

    def by_client(self, tokens: Sequence[int]) -> Counter[str]:
        """Of each turn, summed."""
        summed = Counter[str]()
        for turn, number in zip(self.turns, tokens, strict=True):
            summed[turn.client] += number
        return summed

    def before(self, number: int) -> int | None:
        """The turn that this one goes on from."""
        turn = self.turns[number]
        mine = [i for i in range(number) if self.turns[i].who == turn.who]
        mine = mine or [i for i in range(number) if self.turns[i].who == turn.of]
        return mine[-1] if mine else None

    def goes_on(self, number: int) -> bool:
        """Whether it goes on from an answer of its own that tells whose it is."""
        last, turn = self.before(number), self.turns[number]
        if last is None or self.turns[last].who != turn.who or turn.cut is not None:
            return False
        return len(self.said[last].answer) >= BLOCK + 4 and not self.turns[last].final

    def comes_back(self, number: int) -> bool:
        who = self.turns[number].who
        return any(who in (turn.who, turn.of) for turn in self.turns[number + 1 :])

    def seems_to(self, number: int) -> bool:
        """Whether the turn, or its client, says that the next one comes."""
        turn = self.turns[number]
        says_so = turn.final is False or turn.ttl_s is not None
        return says_so or (turn.tool is not None and not turn.final)

    def tokens(self, numbers: Iterable[int]) -> int:
        """Of the blocks of those turns, each block once."""
        return BLOCK * len({block for number in numbers for block in self.blocks[number]})

    def lost_bets(self) -> int:
        """Tokens of what turns left that seemed to come back, and no later turn asked for."""
        asked, lost = set[int](), set[int]()
        for number in reversed(range(len(self.turns))):
            lost.update(set(self.blocks[number]) - asked if self.seems_to(number) else ())
            asked.update(self.said[number].asked_blocks)
        return BLOCK * len(lost)

    def lies(self, client: str) -> int:
        """Tokens of its turns that it said were its last ones, and went on from."""
        pairs = enumerate(self.turns)
        final = (n for n, turn in pairs if turn.client == client and turn.final)
        return self.tokens(filter(self.comes_back, final))

    def largest(self) -> int:
        """Tokens of the longest turn."""
        return BLOCK * max(map(len, self.blocks), default=0)

    def wanted(self, since: int, until: int) -> int:
        """How many blocks somebody may want from the end of turn `since` to turn `until`: those of
        turns that seem to come back, or do; what else is under the name of such a turn; and of the
        last seconds everything, because whoever comes back at once is worth most."""
        numbers = range(len(self.turns))
        mays = {n for n in numbers if self.seems_to(n) or self.comes_back(n)}
        if any(self.turns[n].tool is None for n in numbers if self.comes_back(n)):
            mays.update(n for n in numbers if self.turns[n].tool is None)  # people seem to, then
        names = {self.turns[n].name for n in mays} - {None}
        newest: dict[str, int] = {}
        wanted: set[int] = set()
        for number in range(until + 1):
            turn = self.turns[number]
            if turn.cut is not None and turn.who in newest:  # nobody says that this is over
                wanted.update(self.blocks[newest[turn.who]])
            newest.pop(turn.who, None)
            if (number in mays and not turn.final) or turn.name in names:
                newest[turn.who] = number
            if number >= since:
                wanted.update(*(self.blocks[each] for each in newest.values()))
        return len(wanted) + max(self._fresh(number) for number in range(since, until + 1))

    def _fresh(self, number: int) -> int:
        """Blocks of the turns of the last FRESH_S when that one ended."""
        fresh, age_s = 0, 0.0
        for each in reversed(range(number + 1)):
            if age_s > FRESH_S:
                break
            fresh += len(self.blocks[each])
            age_s += self.turns[each].after_s
        return fresh

    def is_due(self, number: int) -> bool:
        """Whether the agent is back as early as its tool lets expect, and DRAM had room for all
        that anybody may have wanted meanwhile."""
        last = self.before(number)
        if last is None or self.turns[last].tool is None or self.turns[last].has_hints:
            return False
        if self.turns[last].stopped:  # the first time nobody knows that its client goes on
            return False
        away_s = sum(turn.after_s for turn in self.turns[last + 1 : number + 1])
        if away_s > 1.5 * TOOLS[self.turns[last].tool]:
            return False
        return self.wanted(last, number) <= self.world.slots


# -- what must be true -------------------------------------------------------------------------
def as_stock(case: Case) -> Iterator[str]:
    """In sum agents find what they find on stock vLLM.

    Slack: what was kept for turns that seemed to come back and did not, once; and the longest
    turn, because bets on who comes first are lost now and then.
    """
    ours, slack = sum(case.ours.found), case.lost_bets() + case.largest()
    if ours < sum(case.most) - slack and ours < (stock := sum(case.stock.found)) - slack:
        yield f"all find {ours} tokens, on stock vLLM {stock}, slack {slack}"


def each_as_stock(case: Case) -> Iterator[str]:
    """So does each client.

    Slack: as above, and what it said was over.
    """
    most = case.by_client(case.most)
    for client, ours in case.by_client(case.ours.found).items():
        slack = case.lost_bets() + case.largest() + case.lies(client)
        if ours >= most[client] - slack:
            continue
        stock = case.by_client(case.stock.found)[client]
        if ours < stock - slack:
            yield f"{client} finds {ours} tokens, stock {stock}, slack {slack}"


def as_nameless(case: Case) -> Iterator[str]:
    """A name never makes it worse.

    Slack: as above: what has one name is as old as the first of it, so other bets are lost.
    """
    ours, slack = sum(case.ours.found), case.lost_bets() + case.largest()
    if ours < sum(case.most) - slack and ours < (nameless := sum(case.nameless.found)) - slack:
        yield f"all find {ours} tokens, without names {nameless}, slack {slack}"


def costs_its_room(case: Case) -> Iterator[str]:
    """What a client says costs all others no more than the room of its own blocks.

    Slack: that room, whenever it takes it: with each token that is computed for it.
    """
    room = sum(
        BLOCK * len(case.blocks[number]) * turn.copies
        for number, turn in enumerate(case.turns)
        if turn.client == case.suspect
    )
    slack = room - case.by_client(case.ours.found)[case.suspect]

    def beside(found: Sequence[int]) -> int:
        return sum(found) - case.by_client(found)[case.suspect]

    said = beside(case.ours.found)
    if (
        said < beside(case.most) - slack
        and said < (unsaid := beside(case.unsuspected.found)) - slack
    ):
        found = f"beside {case.suspect} others find {said} tokens"
        yield f"{found}, {unsaid} if it says nothing, slack {slack}"


def idle_is_quiet(case: Case) -> Iterator[str]:
    """Without requests a server writes at most what DRAM holds, and then nothing.

    Slack: the last of that content may share a disk slot with what is there already; what a pin
    keeps is written when the pin ends.
    """
    if not case.world.disk:
        return
    written = case.ours.engine.worker.disk
    start = written.num_written
    case.ours.rest(60.0)
    then = written.num_written
    pinned = sum(len(pin.blocks) for pin in case.ours.engine.connector.side.pins)
    case.ours.rest(120.0)
    slack = case.world.per_slot
    if then - start > case.world.slots * slack or written.num_written > then + pinned * slack:
        later = written.num_written - then
        yield f"idle, it wrote {then - start} blocks in a minute, then {later}"


def finds_its_own(case: Case) -> Iterator[str]:
    """Who comes back in time finds its context, if there was room for all who may want theirs.

    Slack: above a disk, a last block that fills no disk slot.
    """
    slack = (case.world.per_slot - 1) * BLOCK if case.world.disk else 0
    for number in filter(case.is_due, range(len(case.turns))):
        turn, had = case.turns[number], set(case.blocks[case.before(number) or 0])
        due = BLOCK * sum(block in had for block in case.said[number].asked_blocks)
        found = case.ours.found[number]
        if found < (due - slack) * turn.copies:
            yield f"turn {number} of {turn.who} finds {found} tokens of {due}, slack {slack}"


def is_known(case: Case) -> Iterator[str]:
    """Who goes on from its own answer is taken for no new program, though nobody says a name.

    Slack: an answer that fills no block tells nobody whose it is; of two that go on from one
    answer, either may be taken for the other; what a compaction leaves may be a system prompt; and
    a table forgets that is full, of programs or of their chains.
    """
    going_on = [n for n in range(len(case.turns)) if case.goes_on(n)]
    programs = case.nameless.programs if going_on else []
    if NUM_CHAINS * len(set(programs)) > case.world.programs:
        return
    for number in going_on:
        if programs[number] not in programs[:number]:
            yield f"turn {number} of {case.turns[number].who} is taken for a new program"


Rule = Callable[[Case], Iterator[str]]
RULES: dict[str, Rule] = {
    each.__name__: each
    for each in (
        *(as_stock, each_as_stock, as_nameless, costs_its_room),
        *(idle_is_quiet, finds_its_own, is_known),
    )
}


def broken(trace: Trace, rules: Sequence[str] = ()) -> dict[str, str]:
    """Which of the rules, or of all, the trace breaks, and how."""
    case = Case(trace)
    said = {name: "; ".join(RULES[name](case)) for name in rules or RULES}
    return {name: how for name, how in said.items() if how}
