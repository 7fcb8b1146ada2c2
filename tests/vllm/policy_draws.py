"""What the policy machine draws: a small world, one to three agents, and neighbours of each kind.

A kind is a function that yields (second, turn) of one client. `draw` lays all clients' turns on one
clock, in ticks: what falls into one tick comes together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.vllm.policy_traces import TOOLS, Trace, Turn, World, texts
from tests.vllm.tiering import BLOCK

Plan = Iterator[tuple[float, Turn]]
TICK_S = 0.5
LONG = 20  # tokens of an answer that fills a block, so that it tells whose it is


def agent(dice: random.Random, client: str, **habits: Any) -> Plan:
    """It works with one tool, then it answers. `habits`: what the other kinds have it do."""
    name = client if habits.get("is_named", dice.random() < 0.5) else None
    now, chat, tool = dice.uniform(0, 3), f"{client}.main", dice.choice(list(TOOLS))
    length = dice.choice([100, 200, 320])
    for number in range(dice.randint(3, 6)):
        new = dice.choice([16, 32, 60]) if number else length
        turn = Turn(
            chat,
            new,
            name=name,
            tool=tool,
            tail=habits.get("tail", 0),
            answer=habits.get("answer", 4),
        )
        if number and dice.random() < 0.4:
            turn = replace(turn, cut=habits.get("cut"), copies=habits.get("copies", 1))
        yield now, turn
        if habits.get("forks") and dice.random() < 0.4:
            for child in ("x", "y"):
                who, its = (
                    f"{client}.{child}{number}",
                    name and dice.choice([name, f"{name}{child}"]),
                )
                yield now + TICK_S, Turn(who, of=chat, name=its, tool=tool, answer=LONG)
                yield now + 1.5 + dice.random(), Turn(who, name=its)
        if habits.get("aside"):
            yield now + TICK_S, Turn(f"{client}.aside{number}", habits["aside"], name=name)
        now += TOOLS[tool] * dice.uniform(0.3, 1.5)
    if not habits.get("vanishes"):
        yield now, Turn(chat, 16, name=name, final=dice.choice([None, None, True]))


def asides(dice: random.Random, client: str) -> Plan:
    """A title, a summary: another context under the agent's id after each turn."""
    return agent(dice, client, is_named=True, aside=dice.choice([40, 70, 120]))


def forks(dice: random.Random, client: str) -> Plan:
    """Two children at once go on from what the agent has, under its id or ids of their own."""
    return agent(dice, client, forks=True, answer=LONG)


def compactions(dice: random.Random, client: str) -> Plan:
    return agent(dice, client, cut=dice.choice([32, 64]), answer=LONG)


def tails(dice: random.Random, client: str) -> Plan:
    """Each request ends in a reminder that the next one lacks."""
    return agent(dice, client, tail=dice.choice([8, 24, 60, 120]), answer=LONG)


def parallel(dice: random.Random, client: str) -> Plan:
    """Some of its turns are asked for several times at once (n > 1)."""
    return agent(dice, client, copies=dice.choice([2, 4]))


def vanishes(dice: random.Random, client: str) -> Plan:
    """It calls a tool, and never comes back."""
    return agent(dice, client, vanishes=True, answer=LONG)


def shared_key(dice: random.Random, client: str) -> Plan:
    """Conversations that know nothing of one another, under one id."""
    for chat in range(dice.randint(2, 6)):
        now, tool = dice.uniform(0, 4), dice.choice([None, "run"])
        length = dice.choice([100, 200, 320])
        for number in range(dice.randint(2, 4)):
            turn = Turn(f"{client}.chat{chat}", 32 if number else length, tool=tool, name=client)
            yield now, turn
            now += dice.uniform(2, 6) if tool else dice.uniform(5, 60)


def begin_alike(dice: random.Random, client: str) -> Plan:
    """Conversations that know nothing of one another, under one id; long answers follow a system
    prompt and a short question."""
    question, answer = dice.choice([8, 12, 16]), dice.choice([200, 250])
    for chat in range(dice.randint(5, 10)):
        now, num_turns = dice.uniform(0, 8), dice.randint(3, 5)
        for number in range(num_turns):
            new = dice.choice([16, 40]) if number else question + dice.choice([0, 16])
            tool = "run" if number < num_turns - 1 else None
            yield now, Turn(f"{client}.chat{chat}", new, answer=answer, tool=tool, name=client)
            now += dice.uniform(2, 6)


def samples(dice: random.Random, client: str) -> Plan:
    """A prompt several times at once, and never again."""
    copies, length = dice.choice([2, 4]), dice.choice([100, 400])
    for number in range(dice.randint(2, 8)):
        yield dice.uniform(0, 20), Turn(f"{client}.{number}", length, copies=copies)


def one_shots(dice: random.Random, client: str) -> Plan:
    for number in range(dice.randint(5, 25)):
        length = dice.choice([60, 100, 190, 400])
        yield dice.uniform(0, 20), Turn(f"{client}.{number}", length)


def flood(dice: random.Random, client: str) -> Plan:
    """Many in a hurry, each with a name of its own, or with none."""
    now, length, is_named = dice.uniform(0, 10), dice.choice([20, 100]), dice.random() < 0.5
    for number in range(dice.randint(15, 30)):
        yield (
            now,
            Turn(f"{client}.{number}", length, name=f"{client}-{number}" if is_named else None),
        )
        now += dice.uniform(0.2, 1.2)


def says_final(dice: random.Random, client: str) -> Plan:
    """Says that each turn is its last one, and comes back."""
    for now, turn in agent(dice, client):
        yield now, replace(turn, final=dice.choice([True, True, None]))


def hints(dice: random.Random, client: str) -> Plan:
    """Asks for its KV to be kept for long, whether it comes back or not."""
    said = dice.choice([{"ttl_s": 60.0}, {"ttl_s": 300.0}, {"ttl_s": 3600.0}])
    plan = dice.choice([agent, vanishes, shared_key, one_shots])
    for now, turn in plan(dice, client):
        yield now, replace(turn, **said)


KINDS: dict[str, Callable[[random.Random, str], Plan]] = {
    each.__name__: each
    for each in (
        *(asides, forks, compactions, tails, parallel, vanishes),
        *(shared_key, samples, one_shots, flood, says_final, hints),
    )
}


def draw(seed: int) -> Trace:
    """The trace of that seed."""
    dice = random.Random(seed)
    slots, per_slot = dice.choice([0, 40, 60, 120, 200]), dice.choice([1, 3, 8])
    disk = slots * dice.choice([0, 0, 0, 2, 8]) // (2 * per_slot)
    head = dice.choice([0, 0, 32, 64])
    world = World(
        blocks=dice.choice([50, 60, 90]),
        slots=slots,
        disk=disk,
        per_slot=per_slot if disk else 1,
        programs=dice.choice([8, 10_000, 10_000]),
        priorities=dice.random() < 0.15,
    )
    cast = ["agent"] * dice.randint(1, 3)
    cast += [dice.choice(list(KINDS)) for _ in range(dice.randint(1, 3))]
    plans = [[*KINDS.get(name, agent)(dice, f"{name}{at}")] for at, name in enumerate(cast)]
    return _trace(dice, world, plans, head, suspect=f"{cast[-1]}{len(cast) - 1}")


def draw_interrupted(seed: int) -> Trace:
    """The trace of that seed, but clients interrupt answers: all, or some of them, of one chat."""
    dice, of = random.Random(f"interrupted {seed}"), draw(seed)
    chats = sorted({turn.who for turn in of.turns if turn.copies == 1})
    habits = {who: dice.choice([0.0, 0.5, 1.0, 1.0]) for who in chats}
    turns = []
    for turn in of.turns:
        if turn.copies == 1 and dice.random() < habits.get(turn.who, 0.0):
            turn = replace(turn, answer=40, stopped=dice.choice([4, 12, 24]))
        turns.append(turn)
    return _that_fits(replace(of, turns=tuple(turns)))


def draw_alike(seed: int) -> Trace:
    """Another: conversations of one id that begin with one long system prompt, among one-shots."""
    dice = random.Random(f"alike {seed}")
    world = World(blocks=dice.choice([100, 150]), slots=dice.choice([0, 60, 120]))
    plans = [[(0.0, Turn("before.main", 60))], [*begin_alike(dice, "app")]]
    plans += [[*one_shots(dice, f"shots{number}")] for number in range(dice.randint(1, 3))]
    return _trace(dice, world, plans, head=160, suspect="app")


def vary(seed: int, traces: Sequence[Trace]) -> Trace:
    """One of the traces, a little different: in another world, slower or faster, longer, without a
    client, under other names, or with somebody beside it.

    What is drawn by chance alone rarely has a fault's place: of the nine faults of
    test_policy_controls.py 40 such traces find three, 40 of these seven, and 100 all (by hand at
    25a38822)."""
    dice = random.Random(f"vary {seed}")
    of = dice.choice(traces)
    world = replace(
        of.world,
        blocks=round(of.world.blocks * dice.choice([1, 1, 1.2, 1.5])),
        slots=round(of.world.slots * dice.choice([0.8, 1, 1, 1.25])),
        programs=dice.choice([of.world.programs, of.world.programs, 8]),
        priorities=dice.random() < 0.15,
    )
    clients = sorted({turn.client for turn in of.turns})
    gone = dice.choice([*clients, *[None] * 4 * len(clients)])
    names = {each: dice.choice([None, each, "as it was", "as it was"]) for each in clients}
    pace, more = dice.choice([0.7, 1, 1, 1.3]), dice.choice([0, 0, 0, 16, 48])
    plans: list[list[tuple[float, Turn]]] = [[]]
    now = 0.0
    for turn in of.turns:
        now += turn.after_s * pace * dice.uniform(0.9, 1.1)
        if turn.client != gone:
            name = names[turn.client]
            name = turn.name if name == "as it was" else name
            new = turn.new + (more if turn.new > BLOCK else 0)
            plans[0].append((now, replace(turn, name=name, new=new)))
    if dice.random() < 0.5:
        plans.append([*KINDS[dice.choice(list(KINDS))](dice, "beside")])
    return _trace(dice, world, plans, of.turns[0].head, of.suspect)


def _trace(
    dice: random.Random,
    world: World,
    plans: list[list[tuple[float, Turn]]],
    head: int,
    suspect: str,
) -> Trace:
    """All clients' turns on one clock."""
    timed = [(now // TICK_S, turn) for plan in plans for now, turn in plan]
    turns, last = [], 0.0
    for tick, turn in sorted(timed, key=lambda each: each[0]):
        priority = dice.randint(0, 2) if world.priorities else 0
        after_s = (tick - last) * TICK_S
        turns.append(replace(turn, after_s=after_s, head=head, priority=priority))
        last = tick
    return _that_fits(Trace(world, tuple(turns), suspect))


def _that_fits(trace: Trace) -> Trace:
    """Without what is longer than VRAM, which vLLM would refuse, as `--max-model-len` says."""
    while too_long := [
        number
        for number, text in enumerate(texts(trace.turns))
        if len(text.prompt) + len(text.answer) > (trace.world.blocks - 1) * BLOCK
    ]:
        trace = trace.without(too_long[0], 1)
    return trace
