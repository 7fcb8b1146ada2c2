"""The load generator against a small API in another thread: what it sends, counts and keeps."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.chat.agents import agents, run_agents
from bench.common.plans import Added, ProgramPlan, Streams, Talk
from bench.serve import results
from bench.serve.api import ApiError, Patience
from bench.serve.arrivals import read_arrivals
from bench.serve.load import Load
from bench.serve.programs import Defaults, Uniform
from bench.serve.record import RunFolder
from bench.serve.results import Loaded, Run
from bench.serve.session import Manner, measure
from bench.serve.token_ids import Tokens
from bench.serve.workloads import PRESSURE
from bench.tests.fake_server import MODEL, FakeApi, Gate, Trouble, fake_server

AT_ONCE = Patience(timeout_s=30.0, retries=2, backoff_s=0.0)
THREE = Uniform("three", "p", tuple(Added(10, 4) for _ in range(3)), 0, Defaults("turns"))


def run_load(
    server: FakeApi,
    folder: Path,
    workload: Any = THREE,
    programs: int = 2,
    warm_up: int = 0,
    **fields: Any,
) -> Loaded:
    """Measure, and read back what is in the folder."""
    patience = fields.pop("patience", AT_ONCE)
    arrivals = read_arrivals(fields.pop("arrivals", "turns"), 42, 45.0, programs)
    load = Load(workload, arrivals, Tokens(42), MODEL, programs=programs, **fields)
    manner = Manner(patience, warm_up, settle_s=0.0)
    with RunFolder(folder, Run(name="r")) as out:
        measure(server.url, load, out, manner)
    return results.load_run(folder)


def refuse(how: Trouble, most: int) -> Gate:
    """Trouble for the first `most` tries of each program's requests."""
    times = Counter[str]()

    async def gate(body: dict[str, Any]) -> Trouble | None:
        times[body["vllm_xargs"]["job_id"]] += 1
        return how if times[body["vllm_xargs"]["job_id"]] <= most else None

    return gate


def test_a_context_grows_by_what_was_answered_and_returned(tmp_path: Path) -> None:
    with fake_server() as server:
        run = run_load(server, tmp_path)
    assert [turn.prompt_tokens for turn in run.turns] == [10, 10, 24, 24, 38, 38]
    assert server.prompts[2][10:14] == run.turns[0].answer
    assert server.prompts[4][:24] == server.prompts[2]
    assert [(t.program, t.turn) for t in run.turns[:3]] == [
        ("p0000", 0),
        ("p0001", 0),
        ("p0000", 1),
    ]
    assert all(len(turn.answer) == turn.answer_tokens == 4 for turn in run.turns)
    assert [turn.cached_tokens for turn in run.turns][:3] == [5, 5, 12]
    assert all(0 < turn.ttft_s <= turn.latency_s for turn in run.turns)
    assert [p.turns for p in run.programs] == [3, 3]
    assert run.run.state == "done"
    assert run.added["vllm:generation_tokens_total", frozenset()] == 24 + 1  # and a last step


def test_requests_say_program_last_turn_and_exact_lengths(tmp_path: Path) -> None:
    with fake_server() as server:
        run_load(server, tmp_path, priority=True)
    turns = server.requests[:-1]  # the last one only makes the server take a step
    assert [r["vllm_xargs"] for r in turns[::2]] == [
        {"job_id": "p0000", "is_last_step": last} for last in (0, 0, 1)
    ]
    assert [r["priority"] for r in turns] == [0, 1] * 3
    assert all(r["min_tokens"] == r["max_tokens"] == 4 and r["ignore_eos"] for r in turns)
    assert all(r["temperature"] == 0 for r in turns)


def test_one_request_at_a_time_means_one(tmp_path: Path) -> None:
    with fake_server() as server:
        run_load(server, tmp_path, PRESSURE, programs=6)
    assert server.most_at_once == 1
    lengths = [len(prompt) for prompt in server.prompts[:24]]
    assert lengths == [n for n in (700, 908, 1116, 1324) for _ in range(6)]


def test_a_failed_try_is_made_again_and_counted(tmp_path: Path) -> None:
    with fake_server(refuse(Trouble(status=503), most=2)) as server:
        run = run_load(server, tmp_path, programs=1)
    assert [turn.tries for turn in run.turns] == [3, 1, 1]
    assert run.turns[0].failures == ['HTTP 503: {"error": {"message": "not now"}}'] * 2
    assert run.turns[0].error == ""
    assert run.programs[0].error == ""


@pytest.mark.parametrize("politely", [False, True])
def test_an_answer_that_breaks_off_is_asked_for_again_and_not_mixed_up(
    tmp_path: Path, politely: bool
) -> None:
    with fake_server(refuse(Trouble(tokens=2, politely=politely), most=1)) as server:
        run = run_load(server, tmp_path, programs=1)
    assert run.turns[0].tries == 2
    assert len(run.turns[0].answer) == 4


@pytest.mark.parametrize(("status", "tries"), [(500, 3), (400, 1)])  # which will not pass
def test_a_program_ends_at_its_first_failed_turn(tmp_path: Path, status: int, tries: int) -> None:
    with fake_server(refuse(Trouble(status=status), most=3)) as server:
        run = run_load(server, tmp_path, programs=2)
    assert [turn.tries for turn in run.turns] == [tries] * 2
    assert all(turn.error.startswith(f"HTTP {status}") for turn in run.turns)
    assert [(p.turns, p.error[:8]) for p in run.programs] == [(0, f"HTTP {status}")] * 2
    assert run.finished == []
    assert run.run.reason == "2 turns failed"


def test_timeouts_are_told(tmp_path: Path) -> None:
    async def never(body: dict[str, Any]) -> None:
        if "vllm_xargs" in body:
            await asyncio.Event().wait()

    with fake_server(never) as server:
        run = run_load(server, tmp_path, programs=1, patience=Patience(0.05, 1, 0.0))
    assert run.turns[0].failures == ["timeout after 0.05 s"] * 2
    assert run.turns[0].tries == 2


@pytest.mark.parametrize(("at_once", "programs"), [(3, 7), (2000, 2000)])
def test_a_closed_loop_keeps_so_many_at_work_from_one_thread(
    tmp_path: Path, at_once: int, programs: int
) -> None:
    """The server answers nobody until so many have asked."""
    all_here = asyncio.Event()

    async def gate(body: dict[str, Any]) -> None:
        if server.at_once == at_once:
            all_here.set()
        await all_here.wait()

    one = Uniform("one", "p", (Added(8, 2),), 0, Defaults(f"closed:{at_once}"))
    asked = {"programs": programs, "arrivals": f"closed:{at_once}", "patience": Patience(60.0)}
    with fake_server(gate) as server:
        run = run_load(server, tmp_path, one, **asked)
    assert server.most_at_once == at_once
    assert len(run.finished) == programs
    assert not [turn for turn in run.turns if turn.failures]


def test_a_closed_loop_ends_with_its_time(tmp_path: Path) -> None:
    with fake_server() as server:
        run = run_load(server, tmp_path, arrivals="closed:2", programs=0, duration_s=1e-9)
    assert run.programs == []


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    async def gate(body: dict[str, Any]) -> None:
        if len(server.requests) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    with fake_server(gate) as server:
        run = run_load(server, tmp_path, programs=2)
    assert run.run.state == "interrupted"
    assert len(run.turns) == 4
    assert run.programs == []
    assert run.added  # the server was read once more


def test_warm_up_is_not_written_down_and_shares_no_tokens(tmp_path: Path) -> None:
    with fake_server() as server:
        run = run_load(server, tmp_path, programs=1, warm_up=3)
    assert len(run.turns) == 3
    assert [len(prompt) for prompt in server.prompts] == [10, 10, 10, 10, 24, 38, 1]
    assert not any(prompt[:5] == server.prompts[3][:5] for prompt in server.prompts[:3])


def test_a_server_that_refuses_the_warm_up_says_why(tmp_path: Path) -> None:
    async def gate(body: dict[str, Any]) -> Trouble:
        return Trouble(status=400)

    with fake_server(gate) as server, pytest.raises(ApiError, match="not now"):
        run_load(server, tmp_path, warm_up=4)
    run = results.load_run(tmp_path).run
    assert (run.state, run.reason[:8]) == ("cannot_run", "HTTP 400")


def test_plans_with_cuts_send_the_shorter_context(tmp_path: Path) -> None:
    class Cut:
        name, defaults, size = "cut", Defaults("turns"), 1

        def program(self, number: int, seed: int) -> ProgramPlan:
            talk = Talk(Streams())
            talk.turn(10, 4)
            talk.forget(keep=7)
            talk.turn(6, 4)
            return ProgramPlan("p", talk.turns())

    with fake_server() as server:
        run = run_load(server, tmp_path, Cut(), programs=1)
    assert [turn.prompt_tokens for turn in run.turns] == [10, 13]


def test_a_plan_with_words_is_sent_as_messages_and_its_answers_go_on_in_the_next(
    tmp_path: Path,
) -> None:
    work = agents(programs=2, turns=3, rate=1e6, pause_s=0.0)
    plans = [work.program(number, seed=1) for number in range(2)]
    with fake_server() as server:
        found = asyncio.run(run_agents(server.url, work, seed=1))
    assert [len(found.turns), len(found.finished)] == [6, 2]
    assert not any(turn.error for turn in found.turns)
    sent = [body for body in server.requests if body["vllm_xargs"]["job_id"] == plans[0].name]
    said = [turn for turn in found.turns if turn.program == plans[0].name]
    words = [turn.text for turn in plans[0].turns]
    assert sent[2]["messages"] == [
        {"role": "user", "content": words[0]},
        {"role": "assistant", "content": said[0].text},
        {"role": "tool", "content": words[1]},
        {"role": "assistant", "content": said[1].text},
        {"role": "tool", "content": words[2]},
    ]
    assert [turn.prompt_tokens for turn in said] == [t.num_prompt_tokens for t in plans[0].turns]
    assert all(len(turn.text.split()) == turn.answer_tokens and not turn.answer for turn in said)
