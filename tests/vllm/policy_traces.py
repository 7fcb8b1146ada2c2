"""Traces that the policy machine plays: who says what after how long, in how small a world.

A trace is data, and prints as the Python that makes it again. Everybody is a conversation: an
agent, a side request under an agent's id, a one-shot. All tokens follow from the trace, because
the fake model answers a prompt always the same; so every engine is asked the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from zlib import crc32

from continuum_connector.toolcalls import Asked, Ending
from tests.vllm.harness import prompt
from tests.vllm.tiering import BLOCK, reference

# How long a tool takes that agents call here, in seconds: about as long as the seeds of
# forecast.py say, so that an agent comes back when it is expected.
TOOLS = {"curl": 2.0, "run": 3.0, "pip": 8.0, "make": 10.0}


class _Brief:
    """Prints only what is not as by default."""

    def __repr__(self) -> str:
        said = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]  # type: ignore[arg-type]
        given = (f"{name}={value!r}" for name, value, default in said if value != default)
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class World(_Brief):
    """`blocks` of VRAM, `slots` of DRAM (0: no tier), `disk` slots of `per_slot` blocks below it
    (0: no disk); `programs` that are remembered; `priorities`: vLLM's policy of that name."""

    blocks: int = 60
    slots: int = 0
    disk: int = 0
    per_slot: int = 1
    programs: int = 10_000
    priorities: bool = False


@dataclass(frozen=True, repr=False)
class Turn(_Brief):
    """A turn of the conversation `who`, a CLIENT.CHAT, `after_s` seconds after all turns before it
    ended; 0: together with the one before.

    Its prompt is what the conversation has, `new` tokens, and a `tail` that the next turn lacks.
    A first turn begins with the system prompt, whose length is `head`, or, as a fork, with all
    that the conversation `of` has. `cut`: a compaction, only so many tokens of the conversation
    stay. `copies` of it come at once. The `answer` has so many tokens; `tool`: what it calls, None:
    it is for a person. `stopped`: its client interrupts it after so many tokens, and goes on with
    these. The fields in FIELDS are what its client says about it.
    """

    who: str
    new: int = 32
    after_s: float = 1.0
    tail: int = 0
    of: str | None = None
    head: int = 0
    cut: int | None = None
    copies: int = 1
    answer: int = 4
    stopped: int | None = None
    tool: str | None = None
    name: str | None = None
    final: bool | None = None
    ttl_s: float | None = None
    priority: int = 0

    @property
    def client(self) -> str:
        return self.who.partition(".")[0]

    @property
    def asked(self) -> Asked:
        return Asked(Ending.CALLS, (self.tool,)) if self.tool else Asked(Ending.ANSWER)

    @property
    def has_hints(self) -> bool:
        return (self.final, self.ttl_s) != (None, None)


FIELDS = {"name": None, "final": None, "ttl_s": None, "priority": 0}


@dataclass(frozen=True)
class Trace:
    """`suspect`: the client of whom it is asked what its fields cost the others."""

    world: World
    turns: tuple[Turn, ...]
    suspect: str = ""

    def __repr__(self) -> str:
        turns = "".join(f"        {turn!r},\n" for turn in self.turns)
        return f"Trace(\n    {self.world!r},\n    (\n{turns}    ),\n    {self.suspect!r},\n)"

    @property
    def kinds(self) -> set[str]:
        """Of its clients."""
        return {turn.client.rstrip("0123456789") for turn in self.turns}

    def without(self, first: int, number: int) -> Trace:
        """The trace without so many turns; whoever follows comes as late as before."""
        turns, gone = list(self.turns), self.turns[first : first + number]
        if first + number < len(turns):
            after_s = turns[first + number].after_s + sum(turn.after_s for turn in gone)
            turns[first + number] = replace(turns[first + number], after_s=after_s)
        del turns[first : first + number]
        return replace(self, turns=tuple(turns))


def bursts(turns: Sequence[Turn]) -> Iterator[list[int]]:
    """The numbers of the turns that come together."""
    together: list[int] = []
    for number, turn in enumerate(turns):
        if together and turn.after_s:
            yield together
            together = []
        together.append(number)
    if together:
        yield together


@dataclass(frozen=True)
class Text:
    """A turn's tokens, and its full blocks, each named by what it and all before it hold."""

    prompt: list[int]
    answer: list[int]
    asked_blocks: list[int]
    blocks: list[int]


def texts(turns: Sequence[Turn]) -> list[Text]:
    """What each turn says and hears."""
    has: dict[str, list[int]] = {}
    made = []
    for number, turn in enumerate(turns):
        before = has.get(turn.who)
        if before is None:
            before = has.get(turn.of or "", prompt(turn.head))
        before = before[: turn.cut]
        kept = before + prompt(turn.new, crc32(f"{turn.who} {number}".encode()))
        asked = kept + prompt(turn.tail, 10**10 + number)
        answer = reference(asked, turn.stopped or turn.answer)
        has[turn.who] = kept + answer
        made.append(Text(asked, answer, _blocks(asked), _blocks(asked + answer)))
    return made


def _blocks(tokens: list[int]) -> list[int]:
    """The last token has no KV."""
    found, last = [], 0
    for start in range(0, (len(tokens) - 1) // BLOCK * BLOCK, BLOCK):
        last = hash((last, *tokens[start : start + BLOCK]))
        found.append(last)
    return found
