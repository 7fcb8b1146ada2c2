"""bench/storm: what it makes of what it saw, and that nothing bad passes."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.serve.apis import APIS
from bench.serve.ledger import open_accounts, still_held
from bench.serve.metrics import Metrics, parse_metrics
from bench.storm import __main__ as command
from bench.storm.agents import Force, Storm
from bench.storm.arm import OURS, STOCK, ArmRun, Sample, tracebacks
from bench.storm.client import ABORTED, Client, Ended, Tally, read_stream
from bench.storm.garbage import BODIES, PLACES, VALUES, encode, put, spoil
from bench.storm.judge import Finding, Verdict, compare, hit_rate, judge
from bench.storm.kills import Kill, Left, worse
from bench.storm.plan import WHO, draw_agent
from bench.storm.processes import (
    API_SERVER,
    ENGINE,
    WORKER,
    listens,
    processes,
    resident_bytes,
    shared_memory,
)
from bench.storm.slopes import Growth, growth, sparkline, theil_sen

MIB = 2**20
REQUESTS = 20_000


# --- runs that were never run -------------------------------------------------------------
def metrics(done: int, **more: float) -> Metrics:
    """A server's numbers after `done` requests: books that close, half of all tokens found."""
    text = {
        'continuum:transfers_admitted_total{direction="store"}': done / 2,
        'continuum:transfers_admitted_total{direction="load"}': done / 4,
        "continuum:pins_started_total": done / 2,
        "continuum:pins_ended_total": done / 2,
        "continuum:stores_total": done / 2,
        "continuum:loads_total": done / 4,
        "continuum:hit_tokens_total": 50 * done,
        "continuum:prompt_tokens_total": 100 * done,
        "vllm:prefix_cache_hits_total": 50 * done,
        "vllm:prefix_cache_queries_total": 100 * done,
    } | more
    return parse_metrics("\n".join(f"{name} {value}" for name, value in text.items()))


def a_run(name: str = OURS, leak: float = 0.0, requests: int = REQUESTS) -> ArmRun:
    """A storm in which all went well; the EngineCore grows by `leak` bytes per request."""
    run = ArmRun(name, alive=True, answers=[{"yes"}, {"no"}])
    run.tally.by_status.update({"200": requests - 100, "400": 60, ABORTED: 40})
    rng = random.Random(name)
    for done in range(0, requests + 1, requests // 200):
        warm = 60 * MIB * min(1.0, 4 * done / requests)
        rss = {
            role: int(600 * MIB + warm + rng.gauss(0, 1) * MIB + leak * done * (role == ENGINE))
            for role in (API_SERVER, ENGINE, WORKER)
        }
        run.samples.append(Sample(float(done), done, rss))
        run.scrapes.append((done, metrics(done)))
    return run


def wrong(run: ArmRun, stock: ArmRun | None = None, kills: tuple[Kill, ...] = ()) -> list[str]:
    return [f.what for f in judge(run, stock, kills) if f.verdict is Verdict.WRONG]


def found(what: str, findings: list[Finding]) -> Finding:
    return next(finding for finding in findings if finding.what == what)


def test_a_storm_in_which_all_went_well_has_no_finding_against_it() -> None:
    kills = (Kill(OURS, ENGINE, Left(), Left()), Kill(STOCK, ENGINE, Left(), Left()))
    findings = judge(a_run(), a_run(STOCK), kills)
    assert {finding.verdict for finding in findings} == {Verdict.OK}


# --- statuses -----------------------------------------------------------------------------
@pytest.mark.parametrize("status", ["500", "422", "connection broken", "200 without an answer"])
def test_one_unexpected_status_is_enough(status: str) -> None:
    run = a_run()
    run.tally.add(Ended(status, "why"), "what was sent")
    assert wrong(run) == ["statuses"]
    assert run.tally.unexpected == [f"{status}: what was sent: why"]


def test_examples_of_what_was_unexpected_are_bounded() -> None:
    tally = Tally()
    for _ in range(1000):
        tally.add(Ended("500", "x" * 10**5), "hint")
    assert tally.num_unexpected == 1000
    assert len("".join(tally.unexpected)) < 10**4


def test_a_dead_server_an_idle_connector_and_a_wrong_answer_are_found() -> None:
    dead, idle, lying = a_run(), a_run(), a_run()
    dead.alive = False
    idle.scrapes[-1] = (REQUESTS, metrics(REQUESTS, **{"continuum:loads_total": 0.0}))
    assert wrong(dead) == ["server"]
    assert found("ledger", judge(dead, None, ())).verdict is Verdict.UNSEEN
    assert "connector worked" in wrong(idle)
    lying.answers[1].add("maybe")
    assert wrong(lying) == ["answers"]
    other = a_run(STOCK)
    other.answers[0] = {"nay"}
    assert wrong(a_run(), other) == ["answers"]


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


# --- the ledger -----------------------------------------------------------------------------
def test_books_that_do_not_close_are_found_with_their_numbers() -> None:
    assert open_accounts(metrics(8)) == []
    pins = metrics(8, **{"continuum:pins_ended_total": 3.0})
    assert open_accounts(pins) == ["pins: 4 started, 3 ended, 0 live"]
    store = {'continuum:transfers_in_flight{direction="store"}': 1.0}
    assert open_accounts(metrics(8, **store)) == ["stores: 4 admitted, 4 settled, 1 in flight"]
    run = a_run()
    run.open_accounts = open_accounts(pins)
    assert wrong(run) == ["ledger"]


def test_what_an_idle_server_still_holds_is_found() -> None:
    run = a_run()
    run.held = still_held(metrics(8, **{"continuum:held_blocks": 7.0, "continuum:pins_live": 0.0}))
    assert run.held == {"held_blocks": 7.0}
    assert wrong(run) == ["ledger"]


# --- memory -----------------------------------------------------------------------------
def test_a_leak_of_two_kib_a_request_is_noticed_in_its_process() -> None:
    assert wrong(a_run(leak=2048), a_run(STOCK)) == [f"memory, {ENGINE}"]


def test_growth_that_stock_has_too_is_not_ours() -> None:
    assert wrong(a_run(leak=2048), a_run(STOCK, leak=2048)) == []


def test_a_storm_too_short_or_too_noisy_says_that_it_saw_nothing() -> None:
    steady = Growth(600 * MIB, 0.0, 0.1 * MIB, REQUESTS)
    leak = replace(steady, slope=10 * MIB)
    assert compare(ENGINE, leak, steady).verdict is Verdict.WRONG
    noisy = replace(steady, noise=5 * MIB)
    assert compare(ENGINE, leak, noisy).verdict is Verdict.UNSEEN
    assert compare(ENGINE, replace(leak, requests=150), steady).verdict is Verdict.UNSEEN
    findings = judge(a_run(leak=10**5), None, ())
    assert found("memory", findings).verdict is Verdict.UNSEEN


def test_a_third_of_the_points_may_be_anything() -> None:
    x = list(range(90))
    y = [3.0 * i + (10**6 if i % 4 == 0 else 0) for i in x]
    assert theil_sen(x, y) == pytest.approx(3.0, rel=0.05)
    assert theil_sen([5, 5, 5], [1, 2, 3]) == 0.0
    assert theil_sen(range(10_000), [2.0 * i for i in range(10_000)]) == pytest.approx(2.0)


def test_only_the_second_half_counts_and_noise_is_what_wiggles() -> None:
    x = [float(i) for i in range(1001)]
    flat = growth(x, [min(i, 500.0) * MIB for i in x])
    assert (flat.slope, flat.noise, flat.requests) == (0.0, 0.0, 1000)
    rng = random.Random(1)
    slopes = [growth(x, [100 + rng.gauss(0, 5) for _ in x]) for _ in range(20)]
    assert all(abs(each.slope) < each.noise for each in slopes)
    assert growth([], []) == Growth(0.0, 0.0, 0.0, 0)


def test_a_sparkline_goes_from_the_least_to_the_most() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5], 3) == "▁▁▁"
    assert sparkline([]) == ""


# --- hits -----------------------------------------------------------------------------
def test_hits_that_decay_are_found_by_whichever_counter() -> None:
    for name in ("continuum:hit_tokens_total", "vllm:prefix_cache_hits_total"):
        run = a_run()
        most = 50 * REQUESTS * 0.6  # nothing is found after that
        run.scrapes = [
            (done, metrics(done, **{name: min(50.0 * done, most)})) for done, _ in run.scrapes
        ]
        assert wrong(run) == ["hits"]
        early = hit_rate(run, (name,), "vllm:prefix_cache_queries_total")
        assert (early.early, early.late) == (0.5, 0.0)


# --- kill -9 ----------------------------------------------------------------------------
def test_what_stock_leaves_too_is_vllms() -> None:
    left = Left((ENGINE, WORKER), ("/dev/shm/psm_1",), ("socket",), True)
    ours, stock = (Kill(arm, API_SERVER, left, Left()) for arm in (OURS, STOCK))
    assert worse(ours, stock) == []
    assert wrong(a_run(), a_run(STOCK), (ours, stock)) == []


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (Left((WORKER,)), "alone: 1 Worker more than stock"),
        (Left(shared_memory=("/dev/shm/psm_1",)), "alone: 1 shared memory, stock 0"),
        (Left(files=("a.lock",)), "alone: 1 files, stock 0"),
        (Left(listens=True), "alone: the port is taken"),
    ],
)
def test_what_only_ours_leaves_is_found(left: Left, said: str) -> None:
    ours, stock = Kill(OURS, WORKER, left, Left()), Kill(STOCK, WORKER, Left(), Left())
    assert worse(ours, stock) == [said]
    assert wrong(a_run(), a_run(STOCK), (ours, stock)) == [f"kill -9 {WORKER}"]


def test_what_bears_our_name_is_ours_whatever_stock_leaves() -> None:
    left = Left(shared_memory=("/dev/shm/ckv-pool",))
    stock = Kill(STOCK, WORKER, Left(), Left(shared_memory=("/dev/shm/psm_1",)))
    assert worse(Kill(OURS, WORKER, Left(), left), stock) == ["group: /dev/shm/ckv-pool is left"]
    assert worse(Kill(OURS, WORKER, Left(), left), None) == ["group: /dev/shm/ckv-pool is left"]
    unknown = Left((ENGINE,), ("/dev/shm/psm_1",))
    assert worse(Kill(OURS, WORKER, unknown, Left()), None) == []


HOLDER = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
held = mmap.mmap(file, 0)
os.close(file)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_a_servers_processes_and_their_shared_memory_are_found_until_they_are_gone() -> None:
    path = Path(f"/dev/shm/test-storm-{os.getpid()}")
    path.write_bytes(bytes(mmap.PAGESIZE))
    line = [sys.executable, "-c", HOLDER, str(path), f"VLLM::{WORKER}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    try:
        with subprocess.Popen(line, start_new_session=True, **pipes) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert processes(process.pid) == {process.pid: API_SERVER}
            assert resident_bytes(process.pid)[API_SERVER] > MIB
            assert shared_memory([process.pid]) == {str(path)}
            process.kill()
            process.wait()
            assert processes(process.pid) == {}
            assert shared_memory([process.pid]) == set()
    finally:
        path.unlink()


def test_a_port_is_taken_as_long_as_somebody_listens() -> None:
    async def look() -> None:
        server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert listens(port)
        server.close()
        await server.wait_closed()
        assert not listens(port)

    asyncio.run(look())


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


# --- the log, the command -------------------------------------------------------------------
def test_tracebacks_are_told_by_their_last_line() -> None:
    log = """\
INFO:     Started
(APIServer pid=1) ERROR 11-22 13:18:57 [serving.py:929] Traceback (most recent call last):
(APIServer pid=1) ERROR 11-22 13:18:57 [serving.py:929]   File "x.py", line 1, in y
(APIServer pid=1) ERROR 11-22 13:18:57 [serving.py:929] ValueError: one
(EngineCore pid=2) Traceback (most recent call last):
(EngineCore pid=2)   File "x.py", line 1, in y
(EngineCore pid=2) KeyError: 'two'
"""
    assert tracebacks(log) == ["ValueError: one", "KeyError: 'two'"]


@pytest.mark.parametrize(("leak", "status"), [(0, 0), (2048, 1)])
def test_the_exit_status_is_1_if_anything_is_wrong(
    leak: int, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = {OURS: a_run(leak=leak), STOCK: a_run(STOCK)}
    monkeypatch.setattr(command, "make_model", lambda _shape: tmp_path)
    monkeypatch.setattr(command, "run_arm", lambda arm, *_: runs[arm])
    monkeypatch.setattr(command, "kill_each", lambda arm, *_: [Kill(arm, WORKER, Left(), Left())])
    out = tmp_path / "new" / "storm.json"
    assert command.main(["--requests", str(REQUESTS), "--json", str(out)]) == status
    written = json.loads(out.read_text())
    assert [server["name"] for server in written["servers"]] == [OURS, STOCK]
    verdicts = {finding["verdict"] for finding in written["findings"]}
    assert ("WRONG" in verdicts) == bool(status)
