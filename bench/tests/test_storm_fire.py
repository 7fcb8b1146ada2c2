"""bench/storm: what it fires, how a request ends, and which processes a server has."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bench.serve.apis import APIS
from bench.storm.agents import Force, Storm
from bench.storm.client import ABORTED, RESET_REFUSED, Client, Ended, is_expected, read_stream
from bench.storm.garbage import BODIES, PLACES, VALUES, encode, put, spoil
from bench.storm.plan import WHO, draw_agent
from bench.storm.processes import (
    API_SERVER,
    WORKER,
    processes,
    resident_bytes,
)

MIB = 2**20


# --- what is sent -----------------------------------------------------------------------
def test_equal_seeds_fire_equal_agents_and_every_kind_of_them_comes() -> None:
    agents = [draw_agent(1, number) for number in range(400)]
    assert agents == [draw_agent(1, number) for number in range(400)]
    assert agents[0] != draw_agent(2, 0)
    assert {agent.api for agent in agents} == set(APIS)
    assert {agent.who for agent in agents} == set(WHO)
    turns = [turn for agent in agents for turn in agent.turns]
    for kind in ("forks", "compacts", "abort_s", "spoiled", "hints"):
        assert any(getattr(turn, kind) for turn in turns)
    for name in ("stream", "n", "stop", "prompt_logprobs"):
        assert any(name in turn.fields for turn in turns)
    assert all(0.02 <= turn.abort_s <= 0.5 for turn in turns if turn.abort_s)


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_any_value_can_be_put_into_any_place(place: tuple[str, ...]) -> None:
    for value in VALUES.values():
        body = {"model": "m", "kv_transfer_params": {"continuum": {"program": "p"}}}
        whole = json.dumps(body)
        changed = dict(body)
        put(changed, place, value)
        assert json.loads(encode(changed))["model"] == "m"
        assert json.dumps(body) == whole  # the agent's next turn is not spoiled


def test_what_was_spoiled_is_said_in_few_words() -> None:
    for seed in range(300):
        body: dict[str, object] = {}
        headers: dict[str, str] = {}
        said = spoil(random.Random(seed), body, headers)
        assert said
        assert body or headers
        assert len("".join(said)) < 400
    assert all(isinstance(body, bytes) for body in BODIES.values())


def test_resets_and_switches_fall_evenly_on_the_storms_quarters() -> None:
    storm = Storm(Client(""), Force(400), Path("switch"))
    halves = [sum(low <= at < low + 100 for at, _ in storm._events) for low in (0, 100, 200, 300)]
    assert len(set(halves)) == 1
    assert not [1 for at, _ in storm._events if at >= 400]


# --- the storm at servers that are none ------------------------------------------------------
Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def fire(reply: Reply, force: Force) -> Storm:
    """The storm at a server that answers every connection so."""

    async def run() -> Storm:
        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}") as client:
            storm = Storm(client, force, sleep=lambda _seconds: asyncio.sleep(0))
            await storm.run()
        server.close()
        return storm

    return asyncio.run(run())


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """400 to everything."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
    await reader.readexactly(int(length.split(b":")[1]))
    writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
    writer.close()


def test_a_server_that_is_gone_ends_the_storm_and_every_request_is_told() -> None:
    storm = fire(hang_up, Force(10**6, concurrency=200))
    assert set(storm.tally.by_status) <= {"connection broken", ABORTED}
    assert storm.tally.num_unexpected >= 100
    assert storm.done < 1000


def test_a_server_that_refuses_everything_gets_as_many_requests_as_were_asked_for() -> None:
    storm = fire(refuse, Force(300, concurrency=100))
    assert storm.done >= 300
    assert set(storm.tally.by_status) <= {"400", ABORTED}
    assert storm.answers == [set()] * len(storm.answers)


def test_a_fault_of_the_storms_own_is_raised_wherever_it_was() -> None:
    storm = Storm(Client(""), Force(1))

    async def fault() -> None:
        raise ZeroDivisionError

    async def run() -> None:
        storm.sent = 1  # over before it began
        storm._start(fault())
        await asyncio.sleep(0)
        await storm.run()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())


async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the client hangs up
    writer.close()


def test_we_hang_up_in_time_and_say_so() -> None:
    async def run() -> Ended:
        server = await asyncio.start_server(never, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}") as client:
            ended = await client.generate("chat", b"{}", {}, abort_s=0.02)
        server.close()
        return ended

    assert asyncio.run(run()) == Ended(ABORTED)


@pytest.mark.parametrize(
    ("said", "status"),
    [("Failed to reset KV cache even when ...", RESET_REFUSED), ("a bug of ours", "500")],
)
def test_only_vllms_own_refusal_of_a_reset_is_expected(said: str, status: str) -> None:
    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 500 Oh\r\nContent-Length: {len(said)}\r\nConnection: close\r\n\r\n"
        writer.write((head + said).encode())
        writer.close()

    async def run() -> Ended:
        server = await asyncio.start_server(fail, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}") as client:
            ended = await client.reset("?reset_running_requests=true")
        server.close()
        return ended

    ended = asyncio.run(run())
    assert ended.status == status
    assert is_expected(status) == (status == RESET_REFUSED)


# --- how a request ended -----
def test_an_error_inside_a_stream_is_no_answer() -> None:
    fine = 'data: {"choices": [{"text": " ba"}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n'
    assert read_stream(fine) == Ended("200", " ba")
    for event in ({"error": {"code": 500}}, {"type": "error"}):
        ended = read_stream(f"{fine}\ndata: {json.dumps(event)}\n")
        assert ended.status == "200 with an error in its stream"


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"index": 0, "delta": {"content": " ba"}}, {"index": 1, "delta": {}}]},
        {"choices": [{"index": 0, "text": " ba"}]},
        {"type": "response.output_text.delta", "delta": " ba"},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": " ba"}},
    ],
)
def test_the_text_of_each_apis_stream_is_read(event: dict[str, object]) -> None:
    second = {"choices": [{"index": 1, "text": " not ours"}]}
    lines = [f"data: {json.dumps(each)}" for each in (event, second, {"type": "message_stop"})]
    assert read_stream("\n".join(lines)) == Ended("200", " ba")


# --- processes ----
def test_a_servers_processes_and_what_they_hold_are_found_until_they_are_gone() -> None:
    line = [sys.executable, "-c", "print('ready', flush=True); input()", f"VLLM::{WORKER}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(line, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert processes(process.pid) == {process.pid: API_SERVER}
        assert resident_bytes(process.pid)[API_SERVER] > MIB
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not yet collected
        assert processes(process.pid) == {}
