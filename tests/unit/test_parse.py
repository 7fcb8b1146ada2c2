"""parse: the corpus, each sample cut everywhere, and anything at all."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector import toolcalls
from continuum_connector.toolcalls import (
    FORMATS,
    MAX_CALLS,
    MAX_CHARS,
    MAX_NAME,
    UNMARKED,
    Asked,
    Ending,
    asked_of,
    parse,
)

tomllib = pytest.importorskip("tomllib")  # Python 3.11

FOLDER = Path(__file__).parent / "tool_outputs"


def corpus() -> Iterator[Any]:
    for path in sorted(FOLDER.glob("*.toml")):
        for sample in tomllib.loads(path.read_text())["sample"]:
            yield pytest.param(sample, id=f"{path.stem}: {sample['name']}")


CORPUS = list(corpus())
TEXTS = [param.values[0]["text"] for param in CORPUS]


def check_bounds(asked: Asked) -> None:
    assert len(asked.tools) <= MAX_CALLS
    assert not asked.tools or asked.ending in (Ending.CALLS, Ending.LAST)
    assert len(set(asked.tools)) == len(asked.tools)
    for name in asked.tools:
        assert 0 < len(name) <= MAX_NAME
        assert name.isprintable()


@pytest.mark.parametrize("sample", CORPUS)
def test_the_corpus(sample: dict[str, Any]) -> None:
    flags = {flag: sample.get(flag, False) for flag in ("truncated", "headless")}
    asked = parse(sample["text"], **flags)
    assert list(asked.tools) == sample.get("tools", [])
    assert asked.ending.value == sample.get("ending", "calls")


@pytest.mark.parametrize(("row", "witness"), [*FORMATS.items(), *UNMARKED.items()])
def test_each_row_of_the_table_has_its_witness(
    row: str, witness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the row, a sample of the file that it names is read wrongly."""
    table = "_MARKED" if row in FORMATS else "_UNMARKED"
    before = getattr(toolcalls, table).pattern
    assert before.count(row) == 1
    monkeypatch.setattr(toolcalls, table, re.compile(before.replace(row, "(?!)")))
    samples = tomllib.loads((FOLDER / f"{witness}.toml").read_text())["sample"]
    assert any(list(parse(each["text"]).tools) != each.get("tools", []) for each in samples)


@pytest.mark.parametrize("sample", CORPUS)
def test_a_sample_may_be_cut_at_every_position(sample: dict[str, Any]) -> None:
    text = sample["text"]
    for at in range(len(text) + 1):
        check_bounds(parse(text[:at]))
        check_bounds(parse(text[at:], headless=True))


@pytest.mark.parametrize("sample", CORPUS)
def test_at_a_token_limit_only_what_was_finished_counts(sample: dict[str, Any]) -> None:
    """Half a name would be a tool of its own in the statistics. Samples think about calling "a"."""
    text = sample["text"]
    names = set(parse(text).tools)
    for at in range(len(text)):
        cut = parse(text[:at], truncated=True)
        check_bounds(cut)
        assert set(cut.tools) <= names | {"a"}, text[:at]


@pytest.mark.parametrize(
    ("opener", "closer"),
    [
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|content_thinking|>", "<|content_text|>"),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>"),
    ],
)
def test_what_is_thought_does_not_count(opener: str, closer: str) -> None:
    call = "<function=a></function>"
    assert parse(call).tools == ("a",)
    assert parse(f"{opener}{call}").ending is Ending.CUT
    for thought in (f"{opener}{call}{closer}", f"{call}{closer}"):
        assert parse(f"{thought}Done.").ending is Ending.ANSWER
        assert parse(f"{thought}{call.replace('a', 'b')}").tools == ("b",)


def test_a_call_within_a_sentence_is_prose() -> None:
    assert parse('get_weather(city="Bonn") is what I would call.').ending is Ending.ANSWER


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>", "<invoke name="),
    *("[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|channel|>", "<|message|>", "<|call|>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>", "<|python_tag|>", " to=x"),
    *(
        "<|tool_call>call:x{",
        '<|"|>',
        "<execute_command>",
        "<command>",
        "\nAction: x",
        "Action Input:",
    ),
    *("```bash\n", "\n```", "<<EOF", "\nEOF\n", "$(", ")", "'", '"', "\\", "`", "|", ";", "&&"),
    *('{"name": "', '", "arguments": ', "{", "}", "[", "]", ":", ",", "\n", " ", "x", "=", "-"),
    *('{"commands": [{"keystrokes": "', "f(a=", "timeout 5 ", "sudo ", "bash -c '", "\0", "\ud800"),
]
PREFIXES = (
    *("", "```bash\n", "<tool_call>{", "<function=x>", "[f(a=", "<|python_tag|>", "{\n"),
    *("<think>", "[TOOL_CALLS]"),
)


@settings(max_examples=300)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=60).map("".join)))
def test_anything_at_all_is_read(text: str) -> None:
    for flag in (False, True):
        check_bounds(parse(text, truncated=flag, headless=flag))


@settings(max_examples=100)
@given(st.sampled_from(TEXTS), st.sampled_from(TEXTS), st.integers(0, 500), st.text(max_size=8))
def test_samples_spliced_into_each_other_are_read(a: str, b: str, at: int, noise: str) -> None:
    check_bounds(parse(a[:at] + noise + b + a[at:]))


@pytest.mark.parametrize("piece", PIECES, ids=repr)
def test_the_time_is_linear_in_the_text(piece: str) -> None:
    """4 KB of one thing: a quadratic search would take a second."""
    text = piece * (MAX_CHARS // len(piece))
    begin_s = time.thread_time()
    for prefix in PREFIXES:
        parse(prefix + text[: MAX_CHARS - len(prefix)])
    assert time.thread_time() - begin_s < 0.04 * len(PREFIXES)


@pytest.mark.parametrize("piece", ["<parameter={}`", "<|open|>call tool={} "])
def test_a_long_word_before_a_missing_end_is_read_once(piece: str) -> None:
    text = "<function=x>" + piece.format("a" * 126) * (MAX_CHARS // 140)
    fastest_s = 1.0
    for _ in range(5):
        begin_s = time.thread_time()
        parse(text)
        fastest_s = min(fastest_s, time.thread_time() - begin_s)
    assert fastest_s < 0.003


def num_python_steps(text: str) -> int:
    """How many functions `parse` calls, Python's and C's: its work, on however busy a machine."""
    num_steps = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_steps
        num_steps += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        parse(text)
    finally:
        sys.setprofile(before)
    return num_steps


@pytest.mark.parametrize("piece", [*PIECES, "{}", "<tool_call>{}", "[ARGS]<tool_call>"], ids=repr)
def test_the_work_has_a_bound_whatever_the_text_repeats(piece: str) -> None:
    """A call costs a tenth of a microsecond or so: 8,000 are about a millisecond."""
    for prefix in PREFIXES:
        for filler in ("", "{}", "x=", "\n"):
            text = prefix + (piece + filler) * MAX_CHARS
            assert num_python_steps(text[:MAX_CHARS]) < 8_000, (prefix, filler)


def test_nesting_has_no_depth_that_hurts() -> None:
    for opening in ("[", '{"function":', '{"tool_calls":[', '{"a":'):
        text = "<tool_call>" + opening * (MAX_CHARS // len(opening))
        assert parse(text[:MAX_CHARS]).ending is Ending.CUT


def test_only_the_end_of_a_long_text_is_read() -> None:
    call = '<tool_call>{"name": "a_tool", "arguments": {}}</tool_call>'
    assert parse("x" * 10**6 + call).tools == ("a_tool",)
    assert parse(call + "x" * 10**6).ending is Ending.ANSWER


def test_what_the_client_declares_wins_and_costs_no_reading() -> None:
    def never() -> Asked:
        raise AssertionError("read although the client declared its tools")

    asked = asked_of(("functions.pytest:0", " ", "pytest", "x" * 99), never)
    assert asked.tools == ("pytest", "x" * MAX_NAME)
    read = Asked(Ending.ANSWER)
    assert asked_of((), lambda: read) is read
    assert asked_of(("\n",), lambda: read) is read
