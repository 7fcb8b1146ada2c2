"""What others record of their agents -> requests, and the command that writes them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner, Result

from continuum_connector.errors import ToldError
from continuum_connector.tools.analysis import foreign
from continuum_connector.tools.cli.app import app

Request = dict[str, Any]


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["convert", *words])


def read(path: Path, *values: Any) -> list[Request]:
    """The requests of a file with these JSON values, one per line."""
    path.write_text("\n".join(json.dumps(value) for value in values))
    return foreign.read(path).requests


def brief(requests: list[Request]) -> list[tuple[Any, ...]]:
    keys = ("lane", "turn", "inp", "out", "common_blocks", "think")
    return [tuple(request[key] for key in keys) for request in requests]


def mooncake(at_ms: float, ids: list[int], tokens: int, answer: int = 100) -> Request:
    head = {"timestamp": at_ms, "input_length": tokens, "output_length": answer}
    return head | {"hash_ids": ids}


def test_mooncake(tmp_path: Path) -> None:
    found = read(
        tmp_path / "a.jsonl",
        mooncake(0, [1, 2, 3], 1500),
        mooncake(10, [9], 10),
        mooncake(9000, [1, 2, 4, 5], 2000, 50),
    )
    assert brief(found) == [
        ("main", 0, 1500, 100, 0, 0.0),
        ("main", 1, 2000, 50, 16, 6.0),  # 2 x 512 tokens in common; 9 s less 100 x 0.03 s
        ("main", 0, 10, 100, 0, 0.0),
    ]
    assert [each["trace"] for each in found] == ["chat0", "chat0", "chat1"]
    assert all(each["itypes"] == ["text"] for each in found)


@pytest.mark.parametrize(
    ("one", "part"),
    [
        (mooncake(0, [1], 10) | {"input_length": True}, "input_length is True"),
        (mooncake(0, [1], 10) | {"timestamp": False}, "timestamp is False"),
        (mooncake(0, [1], 10) | {"output_length": "9"}, "output_length is '9'"),
        (mooncake(0, [1, 2], 10_000_000), "10,000,000, far beyond its 2 hash_ids of 512 tokens"),
        (mooncake(0, [1], -5), "-5 tokens are no length"),
        (mooncake(0, [1], 10, 10**14), "100000000000000 tokens are no length"),
        (mooncake(0, [1], 10) | {"input_length": 9.5}, "9.5 tokens are no length"),
        ({"trace": "a", "lane": "b", "inp": "x", "out": 1}, "inp is 'x'"),
        ({"requests": [{"in": True, "out": 1}]}, "in is True"),
        ({"requests": [{"in": 9, "out": 1, "t": True}]}, "t is True"),
    ],
)
def test_what_is_no_length_is_refused(tmp_path: Path, one: Request, part: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(one))
    done = run(str(tmp_path / "a.json"), "--out", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_requests_in_no_order_are_played_by_their_time(tmp_path: Path) -> None:
    first, later = mooncake(0, [1, 2, 3], 1500), mooncake(9000, [1, 2, 4, 5], 2000, 50)
    found = read(tmp_path / "a.jsonl", later, first)
    assert found == read(tmp_path / "a.jsonl", first, later)
    assert {each["trace"] for each in found} == {"chat0"}


def test_formats_in_one_file_are_not_mixed(tmp_path: Path) -> None:
    other = {"chat_id": 5, "parent_chat_id": -1, **mooncake(1, [1, 2], 30)}
    with pytest.raises(ToldError, match="Mooncake, Bailian mixed"):
        read(tmp_path / "a.jsonl", mooncake(0, [1], 10), other)


@pytest.mark.parametrize(
    "packed",
    [
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"[" + data.replace(b"\n", b",") + b"]",
        gzip.compress,
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_is_told_by_its_bytes(
    packed: Callable[[bytes], bytes], name: str, tmp_path: Path
) -> None:
    wanted = read(tmp_path / "in", mooncake(0, [1, 2], 9), mooncake(9, [3, 4], 8))
    (tmp_path / name).write_bytes(packed((tmp_path / "in").read_bytes()))
    assert foreign.read(tmp_path / name).requests == wanted


def test_bailian(tmp_path: Path) -> None:
    common = {"type": "text", "input_length": 64, "output_length": 100}
    first = {"chat_id": 5, "parent_chat_id": -1, "timestamp": 1.0, "hash_ids": [1, 2, 3, 4]}
    later = {"chat_id": 6, "parent_chat_id": 5, "timestamp": 9.0, "hash_ids": [1, 2, 3, 4, 5]}
    found = read(tmp_path / "a.jsonl", common | first | {"turn": 1}, common | later | {"turn": 2})
    assert brief(found) == [("main", 0, 64, 100, 0, 0.0), ("main", 1, 64, 100, 1, 5.0)]
    assert {each["trace"] for each in found} == {"chat0"}


def test_a_sample_that_has_a_few_of_its_ids_is_read(tmp_path: Path) -> None:
    asked = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "type": "text", "turn": 2}
    lengths = {"input_length": 521, "output_length": 132, "hash_ids": [1089, 1090, 6326, 13148]}
    assert brief(read(tmp_path / "a.jsonl", asked | lengths)) == [("main", 0, 521, 132, 0, 0.0)]
    told = foreign.read(tmp_path / "a.jsonl").note
    assert told.endswith("that 1 requests share only what their few hash_ids say")


def test_weka_with_a_sub_agent(tmp_path: Path) -> None:
    requests = [
        {"t": 0.0, "type": "s", "in": 300, "out": 9, "hash_ids": [1, 2, 3], "api_time": 2.0},
        {"type": "subagent", "agent_id": "x", "requests": [{"t": 1.0, "in": 80, "out": 1}]},
        {"t": 5.0, "in": 400, "out": 8, "hash_ids": [1, 2, 3, 4], "think_time": 2.5},
        {"t": 9.0, "in": 100, "out": 7, "hash_ids": [1]},
    ]
    found = read(tmp_path / "a.json", {"id": "p", "block_size": 64, "requests": requests})
    assert brief(found) == [
        ("main", 0, 300, 9, 0, 0.0),
        ("main/x", 0, 80, 1, 0, 0.0),
        ("main", 1, 400, 8, 3, 2.5),
        ("main", 2, 100, 7, 1, 4.0),
    ]


def test_trajectories_of_swe_agent(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s" * 400}
    steps = [
        {"response": "r" * 40, "observation": "o" * 80, "execution_time": 2.5, "action": "ls"},
        {"response": "r" * 20, "observation": "", "execution_time": 0.1},
    ]
    history = [system, {"role": "assistant", "content": "not counted"}]
    found = read(tmp_path / "a.traj", {"trajectory": steps, "history": history, "info": {}})
    assert brief(found) == [("main", 0, 100, 10, 0, 0.0), ("main", 1, 130, 5, 1, 2.5)]
    assert [each["itypes"] for each in found] == [["text"], ["tool_result"]]


def test_messages_of_mini_swe_agent(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s" * 400},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "a" * 40, "extra": {"timestamp": 100.0}},
        {"role": "user", "content": "o" * 40, "extra": {"timestamp": 103.0}},
        {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]},
    ]
    found = read(tmp_path / "a.traj.json", {"info": {"mini_version": "2"}, "messages": messages})
    assert brief(found) == [("main", 0, 107, 10, 0, 0.0), ("main", 1, 127, 3, 1, 3.0)]
    asked = read(tmp_path / "b.json", {"info": {}, "messages": messages[:2]})
    assert brief(asked) == [("main", 0, 107, 1, 0, 0.0)]
    several = [{"messages": json.dumps(messages), "instance_id": name} for name in "xy"]
    assert [each["trace"] for each in read(tmp_path / "c.json", several)] == list("xxyy")


def test_tokens_that_were_counted_are_not_estimated(tmp_path: Path) -> None:
    """Of mini-swe-agent, by the chat and by the Responses API; its clock may be in ms."""
    chat = {"usage": {"prompt_tokens": 500, "completion_tokens": 20}}
    responses = {"usage": {"input_tokens": 600, "output_tokens": 30}}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "extra": {"response": chat, "timestamp": 17e11}},
        {"type": "function_call_output", "output": "o", "timestamp": 17e11 + 4000},
        {"object": "response", "output": [{"type": "message"}]} | responses,
    ]
    found = read(tmp_path / "a.json", {"messages": messages})
    assert brief(found) == [("main", 0, 500, 20, 0, 0.0), ("main", 1, 600, 30, 8, 4.0)]


def test_events_of_open_hands_from_version_1_on(tmp_path: Path) -> None:
    def event(kind: str, source: str, second: int, **rest: Any) -> Request:
        at = f"2026-01-01T00:00:{second:02}"
        return {"id": kind, "kind": kind, "source": source, "timestamp": at} | rest

    events = [
        event("SystemPromptEvent", "agent", 0, system_prompt="s" * 400),
        event("MessageEvent", "user", 1, llm_message="u" * 40),
        event("ActionEvent", "agent", 5, tool_call="a" * 40, llm_response_id="r", action={}),
        event("ActionEvent", "agent", 5, tool_call="a" * 40, llm_response_id="r", action={}),
        event("ObservationEvent", "environment", 9, observation="o" * 80, action_id="x"),
        event("MessageEvent", "agent", 11, llm_message="e" * 20, llm_response_id="q"),
    ]
    wanted = [("main", 0, 110, 10, 0, 0.0), ("main", 1, 140, 5, 1, 4.0)]
    assert brief(read(tmp_path / "a.json", events)) == wanted
    assert brief(read(tmp_path / "b.jsonl", {"instance_id": "i", "history": events})) == wanted
    (tmp_path / "events").mkdir()  # as it keeps them: by a name that is not their order
    for number, one in enumerate(events):
        (tmp_path / f"events/{9 - number}.json").write_text(json.dumps(one))
    assert brief(foreign.read(tmp_path / "events").requests) == wanted


def test_events_of_open_hands(tmp_path: Path) -> None:
    def acts(number: int, answer: str, at: str, **usage: int) -> Request:
        called = {"model_response": {"id": answer, "usage": usage}}
        head = {"id": number, "source": "agent", "action": "run", "args": {"command": "ls"}}
        return head | {"timestamp": at, "tool_call_metadata": called}

    events = [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "x" * 400}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "hi"}},
        acts(2, "r1", "2026-01-01T00:00:00", prompt_tokens=500, completion_tokens=20),
        acts(3, "r1", "2026-01-01T00:00:00", prompt_tokens=500, completion_tokens=20),
        {
            "id": 4,
            "source": "environment",
            "observation": "run",
            "content": "out",
            "timestamp": "2026-01-01T00:00:04",
        },
        acts(5, "r2", "2026-01-01T00:00:09", prompt_tokens=600, completion_tokens=30),
    ]
    wanted = [("main", 0, 500, 20, 0, 0.0), ("main", 1, 600, 30, 8, 4.0)]
    assert brief(read(tmp_path / "a.json", events)) == wanted
    assert brief(read(tmp_path / "b.jsonl", {"instance_id": "i", "history": events})) == wanted
    assert brief(read(tmp_path / "c.jsonl", *events)) == wanted


def test_a_folder_is_read_whole_and_packed_files_too(tmp_path: Path) -> None:
    one = {"requests": [{"in": 10, "out": 1}]}
    for name in ("a/run.json", "b/run.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(one))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps(one).encode()))
    found = foreign.read(tmp_path)
    assert len({each["trace"] for each in found.requests}) == 3
    (tmp_path / "d.jsonl").write_text(json.dumps(mooncake(0, [1], 1)))
    with pytest.raises(ToldError, match="Weka, Mooncake mixed"):
        foreign.read(tmp_path)


def test_what_else_a_folder_of_runs_has_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/a.traj").write_text('{"trajectory": [{"response": "r"}]}')
    (tmp_path / "runs/preds.json").write_text('{"a": {"model_patch": "p"}}')
    done = run(str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    assert done.stdout.startswith("1 requests of SWE-agent, without preds.json (made up:")


FOREIGN = [
    "",
    "\n\n",
    '{"a": [1, 2], "b": 3}',
    '{"messages": [], "object": "list"}',
    '{"architectures": ["X"], "layer_types": ["a"]}',
    "[]",
    "[1, 2]",
    "3",
    "no JSON",
    '{"requests": [{"in": "many"}]}',
    '{"trajectory": 3}',
    '{"chat_id": 1, "parent_chat_id": 2}',
    '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "input_length": 9, "output_length": 1,'
    ' "hash_ids": [[1]]}',
]


@pytest.mark.parametrize("text", FOREIGN)
@pytest.mark.parametrize("forced", [[], ["--force"]])
def test_what_is_no_trace_is_one_sentence_and_nothing_is_replaced(
    text: str, forced: list[str], tmp_path: Path
) -> None:
    (tmp_path / "in").write_text(text)
    (tmp_path / "out").write_text("precious")
    result = run(str(tmp_path / "in"), "--out", str(tmp_path / "out"), *forced)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert (tmp_path / "out").read_text() == "precious"
    analyzed = CliRunner().invoke(app, ["analyze", str(tmp_path / "in")])
    assert (analyzed.exit_code, len(analyzed.stderr.splitlines())) == (1, 1)


def test_a_file_beyond_the_bound_is_not_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    read(trace, *(mooncake(number, [number], 100) for number in range(20)))
    line = trace.read_bytes().index(b"\n")
    monkeypatch.setattr(foreign, "MAX_BYTES", 2 * line + 1)  # two whole lines
    with pytest.raises(ToldError, match="has more than"):
        foreign.read(trace)


def test_bailian_and_weka_are_converted_and_read_again(tmp_path: Path) -> None:
    """By the formats that they document: the first has a request per line, the other a file per
    session. (A test of the lab plays them.)"""
    asked = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "type": "text", "turn": 2}
    lengths = {"input_length": 521, "output_length": 132, "hash_ids": [*range(33)]}
    (tmp_path / "bailian").write_text(json.dumps(asked | lengths) + "\n")
    request = {"t": 0.0, "type": "n", "model": "m", "in": 15818, "out": 154, "stop": "tool_use"}
    known = {"hash_ids": [*range(1, 248)], "input_types": ["text"], "output_types": ["tool_use"]}
    times = {"api_time": 5.23, "think_time": 0.0}
    head = {"id": "trace_1", "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    (tmp_path / "weka").write_text(json.dumps(head | {"requests": [request | known | times]}))
    for name, lengths in {"bailian": (521, 132), "weka": (15818, 154)}.items():
        done = run(str(tmp_path / name), "--out", str(tmp_path / f"{name}.jsonl"))
        assert done.stdout.startswith(f"1 requests of {name.title()}"), done.output
        [one] = foreign.read(tmp_path / f"{name}.jsonl").requests
        assert (one["inp"], one["out"], one["turn"], one["itypes"]) == (*lengths, 0, ["text"])


def test_requests_are_written_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(json.dumps({"requests": [{"in": 10, "out": 1}] * 2}))
    out = tmp_path / "out.jsonl"
    result = run(str(tmp_path / "in"), "--out", str(out))
    assert (result.exit_code, result.stdout) == (0, f"2 requests of Weka written to {out}\n")
    assert foreign.read(out).requests == foreign.read(tmp_path / "in").requests
    again = run(str(tmp_path / "in"), "--out", str(out))
    assert (again.exit_code, "exists and would be lost" in again.stderr) == (1, True)
