"""The engine's steps in the trace (trace_steps_s): what a record says, and what it costs others."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from continuum_connector.observe import account
from tests.markdown import ROOT
from tests.vllm.agents import AgentEngine, others_take_the_pool
from tests.vllm.tiering import MODES, SLOT_BYTES

HOOK_S = 0.5  # what each of our hooks takes
MOST = ("pinned_blocks", "waiting", "running", "store_blocks", "load_blocks", "hook_max_s")


@pytest.fixture(autouse=True)
def every_hook_takes_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(step=HOOK_S)
    monkeypatch.setattr(account, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))


def traced(path: Path, every_s: float, **kwargs: Any) -> AgentEngine:
    """An engine whose steps take a quarter of a second."""
    config = {"policy": kwargs.pop("policy", "fixed_ttl"), "ttl_s": 30, "trace_steps_s": every_s}
    config |= {"dram_bytes": 400 * SLOT_BYTES, "trace_path": str(path)}
    return AgentEngine(100, extra_config=config, step_s=0.25, max_num_batched_tokens=2048, **kwargs)


def play(engine: AgentEngine) -> None:
    """Two programs, one of which comes back after a pause; only one turn runs at a time."""
    engine.add("a", 100, 3, program="p", seed=1)
    engine.add("b", 200, 3, program="q", seed=2, final=True)
    engine.run_until_idle()
    engine.clock.advance(10.0)
    engine.run_turn("c", engine.next_prompt("a", 20), max_tokens=2, program="p")
    engine.connector.shutdown()


def of_steps(path: Path) -> list[dict[str, Any]]:
    records = map(json.loads, path.read_text().splitlines())
    return [each for each in records if each["event"] == "steps"]


def test_a_record_says_what_its_step_left(tmp_path: Path) -> None:
    """Of 99 blocks: `a` has 7 and leaves 6 full ones, `b` has 13, `c` goes on with 2 more."""
    path = tmp_path / "t"
    play(traced(path, 0.001, max_num_seqs=1))
    records = of_steps(path)
    names = ("now", "free_blocks", "pinned_blocks", "waiting", "running", "store_blocks", "hook_s")
    assert [tuple(each[name] for name in names) for each in records] == [
        (1000.25, 92, 0, 1, 1, 0, 2.5),  # two arrive; of `a` three hooks, with that of the plan
        (1000.5, 92, 0, 1, 1, 0, 1.0),  # the worker is ready, so there is a plan again
        (1000.75, 92, 0, 1, 1, 0, 0.5),  # as long as nothing happens, every 0.05 s
        (1001.0, 80, 6, 0, 1, 6, 2.0),  # `a` ends, `b` begins
        (1001.25, 80, 6, 0, 1, 6, 0.5),
        (1001.5, 80, 6, 0, 1, 0, 1.0),  # its store has settled
        (1001.75, 93, 6, 0, 0, 0, 1.0),  # `b` was its program's last
        (1012.0, 91, 0, 0, 1, 0, 2.0),  # `c` has taken the pin over
        (1012.25, 91, 0, 0, 1, 0, 0.5),
        (1012.5, 92, 7, 0, 0, 1, 1.0),
        (1012.75, 92, 7, 0, 0, 1, 0.5),
    ]
    assert all(each["steps"] == 1 and each["hook_max_s"] == each["hook_s"] for each in records)
    (shown,) = re.findall(r'\{"event": "steps".*\}', (ROOT / "docs/explain.md").read_text())
    assert json.loads(shown).keys() == records[0].keys() - {"t"}


@MODES
@pytest.mark.parametrize("every_s", [0.5, 0.75, 100.0])
def test_a_record_of_several_steps_has_their_extremes(
    tmp_path: Path, async_scheduling: bool, every_s: float
) -> None:
    fine, coarse = tmp_path / "fine", tmp_path / "coarse"
    play(traced(fine, 0.001, async_scheduling=async_scheduling))
    play(traced(coarse, every_s, async_scheduling=async_scheduling))
    steps, records = iter(of_steps(fine)), of_steps(coarse)
    for record in records:
        some = list(itertools.islice(steps, record["steps"]))
        assert record["now"] == some[-1]["now"]
        assert record["now"] - some[0]["now"] < every_s, "a pause is in no record"
        assert record["free_blocks"] == min(each["free_blocks"] for each in some)
        assert {n: record[n] for n in MOST} == {n: max(each[n] for each in some) for n in MOST}
        assert record["hook_s"] == sum(each["hook_s"] for each in some)
    assert not list(steps), "the last are written when the server stops"
    assert 1 < len(records) < len(of_steps(fine))


def test_copies_are_as_the_books_have_them(tmp_path: Path) -> None:
    path = tmp_path / "t"
    engine = traced(path, 0.001, policy="lru_offload")
    traffic, steps = engine.side.traffic, engine.connector._step_trace
    seen, add = [], steps.add

    def watched(num_running: int, now: float) -> None:
        seen.append((traffic.num_held, traffic.num_load_blocks))
        add(num_running, now)

    steps.add = watched
    engine.run_turn("a", 400, program="p", seed=1)
    others_take_the_pool(engine)
    engine.run_turn("b", engine.next_prompt("a", 20), program="p")
    engine.connector.shutdown()
    assert [(each["store_blocks"], each["load_blocks"]) for each in of_steps(path)] == seen
    stores, loads = (max(way) for way in zip(*seen, strict=True))
    assert stores == 56  # of 901 tokens
    assert loads == 25  # of 415


def test_off_the_switch_steps_are_told_but_nobody_is_known_to_wait(tmp_path: Path) -> None:
    path = tmp_path / "t"
    engine = traced(path, 0.001, max_num_seqs=1)
    engine.connector.switch.is_on = False
    engine.step()
    engine.add("a", 100, 3, seed=1)
    engine.add("b", 100, 3, seed=2)
    engine.run_until_idle()
    engine.connector.shutdown()
    records = of_steps(path)
    assert {each["waiting"] for each in records} == {0}
    assert min(each["free_blocks"] for each in records) == 92
    assert max(each["running"] for each in records) == 1


@pytest.mark.parametrize("what", ["add", "record"])
def test_what_fails_ends_the_steps_trace_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, what: str
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("nothing works")

    path = tmp_path / "t"
    engine = traced(path, 0.001)
    with monkeypatch.context() as broken:
        target = engine.connector._step_trace if what == "add" else engine.side.records
        broken.setattr(target, "add" if what == "add" else "happened", fails)
        engine.step()
        engine.add("x", 100, 3, program="p", seed=1)
        engine.step()
    play(engine)
    assert engine.finish_reasons.keys() == {"x", "a", "b", "c"}
    assert of_steps(path) == []
    assert caplog.text.count("steps are traced no more") == 1


def called(engine: AgentEngine) -> Counter[str]:
    """How often each function of ours is called while the engine plays, but by StepTrace.add."""
    found: Counter[str] = Counter()
    adding = 0

    def note(frame: Any, event: str, arg: object) -> None:
        nonlocal adding
        code = frame.f_code
        if "/continuum_connector/" not in code.co_filename or event not in ("call", "return"):
            return
        name = code.co_qualname
        adding -= (name, event) == ("StepTrace.add", "return")
        found[name] += event == "call" and not adding
        adding += (name, event) == ("StepTrace.add", "call")

    sys.setprofile(note)
    try:
        play(engine)
    finally:
        sys.setprofile(None)
    return found


def test_turned_off_nothing_of_it_is_called_and_nothing_written(tmp_path: Path) -> None:
    off, on = traced(tmp_path / "off", 0.0), traced(tmp_path / "on", 0.001)
    assert "build_connector_meta" not in vars(off.connector)
    without, calls = called(off), called(on)
    num = len(of_steps(tmp_path / "on"))
    own = dict.fromkeys(("ContinuumConnector._traced_meta", "StepTrace.add"), num)
    assert calls == without + Counter(own)
    assert not any(without[name] for name in own)
    assert of_steps(tmp_path / "off") == []
    assert num > 5
