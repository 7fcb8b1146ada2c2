"""Trace, answer, `explain` and `analyze` say why a turn did not get what a disk had for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.scheduler.tiers.traffic import Kind
from continuum_connector.tools.analysis.source import Source
from continuum_connector.tools.analysis.summary import Summary, rows
from continuum_connector.tools.analysis.words import NOT_READ, told
from tests.vllm.harness import Engine
from tests.vllm.tiering import (
    Costs,
    answers_as_without_a_tier,
    come_to_rest,
    in_flight,
    on_disk,
    park,
    run_turn,
)

TOKENS = 13 * 16  # that the disk has of what `a` left


class Told:
    """`b` goes on from what is on disk alone; its reads stay under way until `go_on`."""

    def __init__(self, path: Path, **options: Any) -> None:
        config = {"trace_path": str(path), **options.pop("config", {})}
        refuses_with = options.pop("refuses_with", "")
        self.path, self.engine = path, on_disk(config=config, **options)
        self.engine.worker.disk.refuses_with = refuses_with
        self.engine.idle(0.5)  # the disk opens
        if "disk_write_budget" in config:  # of which the first to come takes all
            run_turn(self.engine, "z", 200, seed=9, program="z")
            come_to_rest(self.engine)
        run_turn(self.engine, "a", 200, program="a")
        park(self.engine)
        for number in range(5):
            run_turn(self.engine, f"o{number}", 200, seed=10 + number, program=f"o{number}")
            park(self.engine)
            come_to_rest(self.engine)
        self.hold(True)

    def hold(self, on: bool) -> None:
        for worker in self.engine.workers:
            worker.disk.is_held = on

    def come_back(self, num_steps: int = 2) -> Engine:
        self.engine.add("b", self.engine.next_prompt("a", 20), program="a")
        for _ in range(num_steps):
            self.engine.step()
        return self.engine

    def says(self) -> tuple[Any, str, dict[str, Any]]:
        """What the answer to `b` says of the disk, what explain says, what analyze counts."""
        self.engine.run_until_idle(until=lambda: "b" in self.engine.finish_reasons)
        self.hold(False)
        self.engine.run_until_idle()
        assert answers_as_without_a_tier(self.engine)
        answer = self.engine.kv_transfer_params["b"]["continuum"].get("disk")
        self.engine.connector.shutdown()
        records = list(Source(self.path).records())
        admit = [each for each in records if _is_of_a(each)][-1]
        assert admit.get("disk") == json.loads(json.dumps(answer))
        summary = Summary()
        for record in records:
            summary.add(record)
        summary.finish()
        every = (row for group in rows(summary).values() for row in group.items())
        counted = {name: row.value for name, row in every if "not read" in name}
        said = [line.text for line in [*told([admit])][1:] if not line.text.startswith("of these")]
        return answer, "; ".join(said), counted


def _is_of_a(record: dict[str, Any]) -> bool:
    return record["event"] == "admit" and record["program"].split(":")[-1] in ("a", "x")


def test_what_was_read_in_time_needs_no_reason(tmp_path: Path) -> None:
    case = Told(tmp_path / "trace")
    case.hold(False)
    case.come_back()
    assert case.says() == ({"tokens": TOKENS}, "", {})
    assert case.engine.cached["b"] == (0, TOKENS)


def test_what_a_prefill_brings_sooner_is_told_with_both_seconds(tmp_path: Path) -> None:
    case = Told(tmp_path / "trace", costs=Costs(read=0.25))
    case.engine.connector.side.tier.below.reading.began = case.engine.clock()  # no probe
    case.come_back()
    answer, text, counted = case.says()
    assert answer["tokens"] == TOKENS
    assert answer["not_read"] == "prefill"
    assert answer["read_s"] == pytest.approx(13 * 0.25 + 13 * 1e-5)
    assert answer["prefill_s"] == pytest.approx(TOKENS * 1e-2)
    had = f"disk had {TOKENS} of {len(case.engine.requests['b'].prompt_token_ids)} tokens"
    why = "2.08 s of prefill, for all who wait for it, is cheaper than 3.25 s"
    assert text == f"{had}; not read in full: {why}"
    assert counted == {
        "turns, not read as a prefill is cheaper": 1,
        "tokens, not read as a prefill is cheaper": TOKENS,
    }


def _wait(case: Told) -> None:
    case.come_back()
    assert in_flight(case.engine, Kind.READ)


def _deadline(case: Told) -> None:
    _wait(case)
    case.engine.clock.advance(5.0)


def _failed(case: Told) -> None:
    case.engine.worker.disk.slots.clear()
    case.hold(False)
    case.come_back()


def _cleared(case: Told) -> None:
    _wait(case)
    case.engine.worker.report_disk_down("it was pulled out")


def _down(case: Told) -> None:
    case.engine.worker.report_disk_down("it was pulled out")
    case.engine.idle(1.0)
    case.come_back()


def _stuck(case: Told) -> None:
    case.engine.add("c", case.engine.next_prompt("o0", 20), program="o0")
    case.engine.step()
    case.engine.step()
    assert in_flight(case.engine, Kind.READ)
    case.engine.worker.cancels_late = True
    case.engine.clock.advance(6.0)
    case.engine.step()
    case.come_back()


def _room(case: Told) -> None:
    index = case.engine.connector.side.tier.index
    own = index.reserve
    index.reserve = lambda *args, **kwargs: own(*args, **kwargs)[:0]
    case.come_back()
    index.reserve = own


@pytest.mark.parametrize(
    ("happens", "why", "tokens"),
    [
        (_deadline, "deadline", TOKENS),
        (_failed, "failed", TOKENS),
        (_cleared, "cleared", TOKENS),
        (_down, "down", 0),
        (_stuck, "stuck", 0),
        (_room, "room", TOKENS),
    ],
)
def test_each_reason_is_told_and_counted(
    tmp_path: Path, happens: Any, why: str, tokens: int
) -> None:
    case = Told(tmp_path / "trace")
    happens(case)
    answer, text, counted = case.says()
    assert answer == {"tokens": tokens, "not_read": why}
    assert text.startswith("" if not tokens else f"disk had {tokens} of ")
    assert "not read in full: " in text
    assert counted[f"turns, not read as {NOT_READ[why]}"] == 1
    assert counted[f"tokens, not read as {NOT_READ[why]}"] == tokens
    assert case.engine.cached["b"] == (0, 0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"refuses_with": "driver"}, "unsaved"),
        ({"config": {"disk_write_budget": 1}}, "budget"),
    ],
)
def test_what_was_lost_before_a_disk_had_it_is_told_with_the_reason(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    case = Told(tmp_path / "trace", **options)
    case.come_back()
    answer, text, counted = case.says()
    assert answer == {"tokens": 0, "not_read": why}
    assert text.endswith(f"not read in full: {NOT_READ[why]}")
    assert counted[f"turns, not read as {NOT_READ[why]}"] == 1
    assert case.engine.cached["b"] == (0, 0)


def test_what_was_lost_once_and_is_there_again_is_not_told(tmp_path: Path) -> None:
    case = Told(tmp_path / "trace", refuses_with="driver")
    case.hold(False)
    tokens = case.engine.next_prompt("a", 20)
    run_turn(case.engine, "again", tokens, program="a")
    run_turn(case.engine, "b", case.engine.next_prompt("again", 20), program="a")
    answer, text, counted = case.says()
    assert (answer, text) == (None, "")
    assert sorted(counted.values()) == [0, 1], "of the turn before"


def test_what_a_reset_took_away_was_not_lost_for_room(tmp_path: Path) -> None:
    case = Told(tmp_path / "trace", refuses_with="driver")
    case.hold(False)
    assert case.engine.reset_prefix_cache(reset_connector=True)
    case.come_back()
    assert case.says() == (None, "", {})


def test_what_is_in_vram_or_dram_is_no_matter_of_the_disk(tmp_path: Path) -> None:
    case = Told(tmp_path / "trace")
    case.hold(False)
    run_turn(case.engine, "x", 100, seed=50, program="x")
    run_turn(case.engine, "b", case.engine.next_prompt("x", 20), program="x")
    assert case.says() == (None, "", {})
