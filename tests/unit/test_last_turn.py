"""Last turns of public agents, as their models write them."""

from __future__ import annotations

import json

import pytest

from continuum_connector.toolcalls import Ending, parse

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def call(name: str, **arguments: str) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def block(script: str) -> str:
    return f"THOUGHT: so be it.\n\n```bash\n{script}\n```"


@pytest.mark.parametrize(
    "text",
    [
        *(block(SUBMIT), block(f"{SUBMIT} && git add -A && git diff --cached")),
        block(f"git diff > p.txt && {SUBMIT} && cat p.txt"),
        *(block("echo 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'"), call("bash", command=SUBMIT)),
        *(call("finish", message="done"), call("finish")),
    ],
)
def test_what_no_turn_follows(text: str) -> None:
    assert parse(text).ending is Ending.LAST


@pytest.mark.parametrize(
    "text",
    [
        block("grep -r COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT ."),
        block("echo 'say COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT at the end'"),
        block("pytest -q; echo finish"),
        *(call("finish_step"), call("bash", command="finish"), call("bash", command="echo done")),
    ],
)
def test_what_only_looks_like_it(text: str) -> None:
    assert parse(text).ending is Ending.CALLS


def test_to_speak_of_it_or_to_be_cut_short_ends_nothing() -> None:
    assert parse(f"I will run {SUBMIT} then.").ending is not Ending.LAST
    assert parse("<think>I could call finish</think>Not yet.").ending is Ending.ANSWER
    assert parse('<tool_call>{"name": "finish", "argum', truncated=True).ending is Ending.CUT
