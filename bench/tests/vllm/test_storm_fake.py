"""bench/storm at its fake engine: what it is made of, and that nothing bad passes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.sim.clock import Clock
from bench.storm import __main__ as command
from bench.storm import front, virtual
from bench.storm.fake import FakeServer, StuckError
from bench.storm.judge import ABORTED, Ended, Verdict
from bench.storm.plan import STOPS
from bench.storm.run import fire
from continuum_connector.scheduler.turns import Turns

SAID = {"model": "tiny", "prompt": " baba bibi bubu", "max_tokens": 8}


# --- the storm ----------------------------------------------------------------------------
def test_a_small_storm_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "storm.json"
    status = command.main(["--requests", "250", "--json", str(out)])
    assert status == 0, capsys.readouterr().out
    written = json.loads(out.read_text())
    verdicts = {what: verdict for what, verdict, _ in written["findings"]}
    assert {verdicts[name] for name in ("statuses", "connector", "ledger")} == {Verdict.OK.value}
    assert {"200", "400", ABORTED} <= set(written["statuses"])
    assert sum(written["statuses"].values()) >= 250
    assert written["virtual_s"] > 5


def test_equal_storms_end_equal() -> None:
    one, other = (fire(80, 3, lambda text: None) for _ in range(2))
    assert one.tally == other.tally
    assert one.virtual_s == other.virtual_s
    for mine, theirs in zip(one.looks, other.looks, strict=True):
        assert (mine.num_steps, mine.metrics) == (theirs.num_steps, theirs.metrics)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    one = FakeServer(tmp_path)
    yield one
    one.close()


def play(server: FakeServer, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return virtual.run(server.clock, server.go_on, work())


def ask(server: FakeServer, abort_s: float = 0.0, **fields: Any) -> Coroutine[Any, Any, Ended]:
    return server.generate("completions", json.dumps(SAID | fields).encode(), {}, abort_s)


def test_who_hangs_up_leaves_nothing_in_the_engine(server: FakeServer) -> None:
    async def work() -> Ended:
        ended = await ask(server, abort_s=0.05, n=2, temperature=0.8, max_tokens=32)
        await asyncio.sleep(10.0)
        return ended

    assert play(server, work) == Ended(ABORTED)
    assert server.held() == {}


def test_two_answers_are_two_requests_and_the_first_is_told(server: FakeServer) -> None:
    async def work() -> tuple[Ended, Ended]:
        one = await ask(server)
        return one, await ask(server, n=2, temperature=0.8)

    one, two = play(server, work)
    assert one.status == two.status == "200"
    assert one.text == two.text
    assert server.metrics()["vllm:prefix_cache_queries_total", frozenset()] == 3 * 4


def test_an_answer_ends_with_its_stop_string(server: FakeServer) -> None:
    async def timed(**fields: Any) -> tuple[str, float]:
        began = server.clock.now
        return (await ask(server, max_tokens=32, **fields)).text, server.clock.now - began

    async def work() -> list[tuple[str, float]]:
        return [await timed(), await timed(stop=STOPS)]

    (whole, whole_s), (cut, cut_s) = play(server, work)
    assert whole.startswith(cut)
    assert any(whole[len(cut) :].startswith(stop) for stop in STOPS)
    assert cut_s < whole_s - 0.1, "the engine went on"


def test_a_block_that_nobody_gives_back_is_told(server: FakeServer) -> None:
    async def work() -> None:
        await ask(server)
        pool = server.engine.scheduler.kv_cache_manager.block_pool
        pool.touch([pool.blocks[7]])
        await asyncio.sleep(30.0)

    play(server, work)
    assert server.held() == {"VRAM blocks": 1.0}


def test_a_request_that_the_engine_loses_ends_the_storm(server: FakeServer) -> None:
    async def work() -> None:
        asyncio.get_running_loop().call_later(0.03, server.engine.scheduler.running.clear)
        await server._ask("completions", json.dumps(SAID).encode(), {})

    server.engine.scheduler.has_unfinished_requests = lambda: bool(server.engine.scheduler.running)
    with pytest.raises(StuckError, match="completions-0"):
        play(server, work)


def test_the_switch_is_looked_at_in_virtual_time(server: FakeServer) -> None:
    async def work() -> list[bool]:
        server.switch.write_text("off\n")
        before = server.engine.connector.is_on
        await asyncio.sleep(1.5)
        await ask(server)
        return [before, server.engine.connector.is_on]

    assert play(server, work) == [True, False]


def test_a_table_of_ours_that_is_never_emptied_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    begin = Turns.begin

    def leak(self: Turns, *given: object) -> object:
        self.leaked = kept  # type: ignore[attr-defined]
        kept.append(object())
        return begin(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Turns, "begin", leak)
    run = fire(100, 1, lambda text: None)
    assert run.looks[-1].tables["Turns.leaked"] == len(kept) > 50


# --- what clients send --------------------------------------------------------------------
def read(api: str, headers: dict[str, str] | None = None, **body: Any) -> front.Asked:
    payload = json.dumps({"model": "tiny", **body}).encode()
    return asyncio.run(front.read(api, payload, headers or {}, 4096))


def test_the_four_apis_ask_an_engine_for_the_same() -> None:
    said = [{"role": "user", "content": " baba bibi"}]
    asked = [
        read("chat", messages=said, max_tokens=4),
        read("responses", input=said, max_output_tokens=4),
        read("messages", messages=said, max_tokens=4),
    ]
    assert [each.tokens for each in asked] == [asked[0].tokens] * 3
    assert {each.params.max_tokens for each in asked} == {4}
    completion = read("completions", prompt=" baba bibi", max_tokens=4)
    assert completion.tokens[1:] == asked[0].tokens[2:-1]
    assert front.text_of(completion.tokens[1:]) == " baba bibi"


def test_what_only_a_header_says_comes_through_the_middleware() -> None:
    asked = read("completions", {"X-Session-ID": "me"}, prompt=" baba", max_tokens=1)
    said = asked.params.extra_args["kv_transfer_params"]["continuum"]
    assert "me" in json.dumps(said)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "prompt": " baba", "max_tokens": 4, "cache_salt": ""}',
        b'{"model": "tiny", "prompt": " baba", "max_tokens": 4, "kv_transfer_params": "text"}',
        b'{"model": "tiny", "prompt": "%s", "max_tokens": 4}' % (b" baba" * 5000),
        *(b"", b"[1, 2, 3]", b"\xff\xfe"),
    ],
)
def test_what_vllm_refuses_is_refused(body: bytes) -> None:
    with pytest.raises(front.RefusedError):
        asyncio.run(front.read("completions", body, {}, 4096))


def test_a_tenants_prompt_carries_its_salt() -> None:
    assert read("completions", prompt=" baba", max_tokens=4, cache_salt="red").salt == "red"


# --- virtual time -------------------------------------------------------------------------
def test_sleep_and_deadlines_take_virtual_time() -> None:
    clock = Clock()

    def go_on(until_next_s: float) -> None:
        clock.now += until_next_s

    async def work() -> float:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.sleep(1e6), 100.0)
        await asyncio.sleep(23.0)
        return asyncio.get_running_loop().time()

    assert virtual.run(clock, go_on, work()) == pytest.approx(123.0)
