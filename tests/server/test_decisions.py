"""The default policy on a real server: it reads tool calls, learns gaps and costs, then pins.

The tiny model speaks in made-up words; a regular expression makes it end with a tool call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.serve.metrics import total
from bench.serve.server import VllmServer
from tests.server.conftest import DRAM_BYTES, MIDDLEWARE, NUM_BLOCKS, ServerFactory, Stock
from tests.server.helpers import (
    PROGRAMS,
    ask,
    count_by,
    eventually,
    last,
    ledger_closes,
    play,
    read_trace,
    reset,
    text_of,
    told,
)

WORDS = "( [a-z]{4}){3}\n"  # the model's own choice
SHELL = "```bash\npytest -q\n```"
JSON = '<tool_call>\n\\{"name": "grep", "arguments": \\{"pattern": "word"\\}\\}\n</tool_call>'
SAYS = "Done\\."
TURNS = (SHELL,) * 14 + (JSON,) * 3 + (SAYS,)  # more steps than a fit asks for


class Agent:
    """A program that is played turn by turn, each of which ends as told."""

    def __init__(self, server: VllmServer, name: str) -> None:
        self.server, self.name = server, name
        self.history = [f"Answer with one ```bash block. {text_of(300, name)}"]
        self.num_turns = 0

    def turn(self, ending: str) -> dict[str, Any]:
        """What its answer says of it."""
        wanted = {"regex": WORDS + ending}
        answer = ask(
            self.server, "chat", self.history, 200, job_id=self.name, structured_outputs=wanted
        )
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(WORDS + ending, choice["message"]["content"])
        tool = text_of(20 + 15 * self.num_turns % 100, f"tool {self.num_turns}")
        self.history += [choice["message"]["content"], tool]
        self.num_turns += 1
        return told(answer)

    def turn_is_read(self, ending: str) -> bool:
        """Play one; whether its output was read, which it is within the budget of a step alone."""
        before = endings(self.server)
        self.turn(ending)
        eventually(lambda: sum(endings(self.server).values()) > sum(before.values()))
        return endings(self.server)["unread"] == before["unread"]


def agent(server: VllmServer, name: str, ends: tuple[str, ...]) -> list[dict[str, Any]]:
    """Play a program whose turns end as told; return what each answer says of it."""
    played = Agent(server, name)
    return [played.turn(ending) for ending in ends]


def endings(server: VllmServer) -> dict[str, float]:
    """How many turns ended how."""
    samples = server.metrics()
    each = ("calls", "answer", "cut", "unread")
    return {name: total(samples, "continuum:endings_total", ending=name) for name in each}


def learn(server: VllmServer) -> int:
    """Play TURNS, each until it is read, once there is a tokenizer; how many were played."""
    eventually(lambda: Agent(server, "waits").turn_is_read(JSON))
    learns = Agent(server, "learns")
    for ending in TURNS:
        eventually(lambda ending=ending: learns.turn_is_read(ending))
    return learns.num_turns


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decisions")


def start(server_factory: ServerFactory, name: str, folder: Path) -> VllmServer:
    """A server whose policy is the default one, and which is given time to shut down."""
    return server_factory(
        name,
        num_blocks=NUM_BLOCKS,
        connector={"dram_bytes": DRAM_BYTES, "trace_path": str(folder / f"{name}.jsonl")},
        args=(*MIDDLEWARE, "--shutdown-timeout", "60"),
    )


@dataclass(frozen=True)
class Played:
    """A server that has seen one program of many short turns, and some of many blocks."""

    server: VllmServer
    num_learnt: int  # turns of that program
    answers: list[list[list[int]]]


@pytest.fixture(scope="module")
def played(server_factory: ServerFactory, folder: Path) -> Played:
    server = start(server_factory, "decides", folder)
    num_learnt = learn(server)
    reset(server)

    def press() -> None:
        """A last turn as long as VRAM: what the programs come back for then is in DRAM."""
        ask(server, "completions", [text_of(4000, "press")], 1, **last())

    return Played(server, num_learnt, play(server, PROGRAMS, before_last=press))


@pytest.fixture(scope="module")
def server(played: Played) -> VllmServer:
    return played.server


def decisions(folder: Path, name: str, program: str, number: int) -> list[dict[str, Any]]:
    """The program's decisions as traced, once there are `number`."""

    def found() -> list[dict[str, Any]]:
        records = read_trace(folder / f"{name}.jsonl")
        return [r for r in records if r["event"] == "decision" and r["program"] == program]

    eventually(lambda: len(found()) >= number)
    return found()


def test_how_turns_end_is_read_from_their_output(played: Played, folder: Path) -> None:
    made = decisions(folder, "decides", "job:learns", played.num_learnt)
    seen = [each["known"] for each in made]
    assert [(k["ending"], k["tools"]) for k in seen if k["ending"] != "unread"] == [
        *[("calls", ["pytest"])] * 14,
        *[("calls", ["grep"])] * 3,
        ("answer", []),
    ]

    def traced() -> dict[str, float]:
        records = [r for r in read_trace(folder / "decides.jsonl") if r["event"] == "decision"]
        return {each: sum(r["known"]["ending"] == each for r in records) for each in shown}

    shown = endings(played.server)
    eventually(lambda: traced() == shown)  # the trace is written behind


def test_gaps_are_learned_by_tool(played: Played, folder: Path) -> None:
    made = decisions(folder, "decides", "job:learns", played.num_learnt)
    records = read_trace(folder / "decides.jsonl")
    arrivals = [r for r in records if r["event"] in ("arrive", "return")]
    gaps = [r["gap_s"] for r in arrivals if r["program"] == "job:learns"]
    assert gaps[0] is None
    assert all(0.0 < gap < 60.0 for gap in gaps[1:])
    known = [each["known"] for each in made if each["known"]["tools"] == ["pytest"]]
    assert known[0]["gaps_seen"] == 0
    assert known[-1]["gaps_seen"] > 8
    # What it knows of the tool is of all its programs, and some may have come at a busier time.
    of_all = [each["gap_s"] for each in arrivals if each["gap_s"] is not None]
    assert known[-1]["gap_p50"] < max(of_all) * 1.5


def test_answers_are_those_of_a_stock_server(played: Played, stock: Stock) -> None:
    assert played.answers == stock.answers


def test_once_prefills_and_loads_are_measured_turns_are_pinned(
    server: VllmServer, folder: Path
) -> None:
    for cost in ("prefill", "load"):  # four loads are enough
        assert server.metric("continuum:costs_known", cost=cost) == 1.0
    returned = server.metric("continuum:pins_ended_total", cause="returned")
    said = agent(server, "later", (SHELL,) * 5)
    assert {each["decision"] for each in said} == {"pin"}
    assert all(each["ttl_s"] > 0 for each in said)
    # A TTL may be half a second, and a slow machine take longer to ask again.
    assert server.metric("continuum:pins_ended_total", cause="returned") > returned
    for made in decisions(folder, "decides", "job:later", 5):
        assert re.fullmatch(
            r"\d+% of such pauses end within .* s; .*: saves .* s, costs \S+ s", made["why"]
        )
        values, known = made["values"], made["known"]
        assert max(values, key=values.__getitem__) in ("pin", "pin_store")
        assert known["prefill"] > known["load"] > 0
        assert 0 < known["p_in_time"] <= 1


def test_what_decisions_rest_on_is_shown(server: VllmServer, folder: Path) -> None:
    shown = server.metrics()
    names = {name for name, _ in shown}
    assert {"continuum:queueing_seconds", "continuum:block_second_price"} <= names
    assert server.metric("continuum:prefill_seconds_per_token", cached_tokens="0") > 0
    assert server.metric("continuum:load_seconds_per_block") > 0
    eventually(lambda: ledger_closes(server.metrics()))
    counted = count_by(read_trace(folder / "decides.jsonl"), "decision", "decision")
    assert counted["pin"] == server.metric("continuum:decisions_total", decision="pin")
