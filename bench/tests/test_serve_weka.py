"""Weka trace files: what of a program is kept, and what equal blocks stand for."""

from __future__ import annotations

import json
from pathlib import Path

from bench.common.plans import Added, ProgramPlan, Streams, Talk, grown
from bench.serve import weka

GROWING = grown("p", [Added(70, 10), Added(40, 5, 1.5), Added(30, 5, 2.0)])


def test_each_turn_keeps_its_lengths_and_comes_its_pause_after_the_one_before() -> None:
    found = weka.trace(GROWING, 32)
    told = [(each["t"], each["in"], each["out"], each["think_time"]) for each in found["requests"]]
    assert told == [(0.0, 70, 10, 0.0), (1.5, 120, 5, 1.5), (3.5, 155, 5, 2.0)]
    assert (found["id"], found["block_size"], found["hash_id_scope"]) == ("p", 32, "local")


def test_a_prompt_is_its_whole_blocks_and_begins_as_the_one_before() -> None:
    ids = [each["hash_ids"] for each in weka.trace(GROWING, 32)["requests"]]
    assert ids == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    whole = list(weka.blocks(GROWING.turns[-1].prompt, 32))
    assert [sum(span.length for span in block) for block in whole] == [32] * 4


def test_what_was_said_before_a_cut_is_common_and_what_comes_after_it_is_new() -> None:
    talk = Talk(Streams())
    talk.turn(100, 10)
    talk.forget(40)
    talk.turn(60, 10)
    first, second = weka.trace(ProgramPlan("p", talk.turns()), 32)["requests"]
    assert first["hash_ids"] == [0, 1, 2]
    assert second["hash_ids"] == [0, 3, 4]  # the second block is cut within


def test_text_that_all_programs_begin_with_counts_within_one_file_only() -> None:
    shared = [grown(name, [Added(64, 4)], shared=32) for name in "ab"]
    assert [weka.trace(plan, 32)["requests"][0]["hash_ids"] for plan in shared] == [[0, 1]] * 2


def test_there_is_a_file_per_program(tmp_path: Path) -> None:
    assert weka.write([GROWING, GROWING], tmp_path / "traces", 16) == 2
    assert [path.name for path in sorted((tmp_path / "traces").iterdir())] == [
        "00001.json",
        "00002.json",
    ]
    assert json.loads((tmp_path / "traces/00002.json").read_text())["id"] == "p"
