"""ToolReader: what it decodes, what that may cost, and what it does without a tokenizer."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from continuum_connector.toolcalls import (
    BUDGET_S,
    HEAD_TOKENS,
    PROMPT_TOKENS,
    TAIL_TOKENS,
    UNREAD,
    Ending,
    ToolReader,
    kinds_of,
)

OPEN, CLOSE, THINK, SPEAK = 9001, 9002, 9003, 9004
SPECIAL = {"<tool_call>": OPEN, "</tool_call>": CLOSE, "<think>": THINK, "</think>": SPEAK}
HARMONY = {"<|start|>": 9005, "<|channel|>": 9006}


class Letters:
    """A tokenizer with one character per token, and some markers. Decoding takes its time."""

    def __init__(self, special: dict[str, int], seconds_per_token: float = 1e-6) -> None:
        self.special = special
        self.seconds_per_token = seconds_per_token
        self.now = 0.0
        self.num_decoded: list[int] = []
        self.not_read: list[str] = []  # by its reader

    def timer(self) -> float:
        return self.now

    def get_vocab(self) -> dict[str, int]:
        return {**self.special, "a": 97}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded.append(len(token_ids))
        self.now += self.seconds_per_token * len(token_ids)
        names = {i: name for name, i in self.special.items()}
        return "".join(names.get(i) or chr(i) for i in token_ids)

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        while text:
            name = next((n for n in self.special if text.startswith(n)), text[0])
            found.append(self.special.get(name, ord(text[0])))
            text = text[len(name) :]
        return found


def loaded(tokenizer: Letters) -> ToolReader:
    reader = ToolReader(lambda: tokenizer, tokenizer.timer, tokenizer.not_read.append)
    reader.start()
    reader.join()
    tokenizer.num_decoded.clear()
    return reader


CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
ROME = ("get_weather",)


@pytest.mark.parametrize("special", [{}, SPECIAL])
def test_a_call_is_read_with_or_without_ids_for_its_marker(special: dict[str, int]) -> None:
    tokenizer = Letters(special)
    reader = loaded(tokenizer)
    asked = reader.read(tokenizer.encode(f"<think>{CALL}</think>Let me see. {CALL}"))
    assert (asked.ending, asked.tools) == (Ending.CALLS, ROME)
    assert tokenizer.not_read == []


def test_by_ids_only_the_call_is_decoded() -> None:
    tokenizer = Letters(SPECIAL)
    reader = loaded(tokenizer)
    call = tokenizer.encode(CALL)
    reader.read(tokenizer.encode("x" * 400) + call)
    assert tokenizer.num_decoded == [len(call)]


@pytest.mark.parametrize("special", [{}, SPECIAL])
def test_a_call_that_ends_the_thinking_is_read(special: dict[str, int]) -> None:
    tokenizer = Letters(special)
    reader = loaded(tokenizer)
    said = f"I think. <think>{CALL}</think>No: <think>so {CALL[:-20]}"
    assert reader.read(tokenizer.encode(said)).ending is Ending.CUT
    asked = reader.read(tokenizer.encode(said + CALL[-20:]))
    assert (asked.ending, asked.tools) == (Ending.CALLS, ROME)


def test_by_ids_only_the_thinking_that_does_not_end_is_decoded() -> None:
    tokenizer = Letters(SPECIAL)
    reader = loaded(tokenizer)
    thought = tokenizer.encode("<think>so <think>or")
    assert reader.read(tokenizer.encode("x" * 400) + thought).ending is Ending.CUT
    assert tokenizer.num_decoded == [len(thought)]


def test_only_the_tail_is_decoded() -> None:
    tokenizer = Letters({})
    reader = loaded(tokenizer)
    assert reader.read(tokenizer.encode("x" * 10_000)).ending is Ending.ANSWER
    assert tokenizer.num_decoded == [TAIL_TOKENS]


def test_a_call_that_began_before_the_tail_is_found_by_its_id() -> None:
    tokenizer = Letters(SPECIAL)
    reader = loaded(tokenizer)
    long = f'<tool_call>{{"name": "write", "arguments": {{"text": "{"x" * 3000}"}}}}</tool_call>'
    asked = reader.read(tokenizer.encode("Let me write. " + long))
    assert asked.tools == ("write",)
    assert tokenizer.num_decoded == [HEAD_TOKENS]
    endless = long.replace("x" * 3000, "x" * 9000)
    assert reader.read(tokenizer.encode(endless)) == type(asked)(Ending.CALLS)


@pytest.mark.parametrize(
    ("marker", "begins", "ends"),
    [
        ("[TOOL_CALLS]", '[TOOL_CALLS]write[ARGS]{"text": "', '"}</s>'),
        ("<|tool_call>", '<|tool_call>call:write{text:<|"|>', '<|"|>}<tool_call|>'),
        ("<|START_ACTION|>", '<|START_ACTION|>[{"tool_name": "write", "args": {"a": "', '"}}]'),
        ("<seed:tool_call>", "<seed:tool_call><function=write><parameter=text>", "</parameter>"),
    ],
)
def test_a_call_whose_end_has_no_id_is_found_before_the_tail(
    marker: str, begins: str, ends: str
) -> None:
    tokenizer = Letters({**SPECIAL, marker: 9007})
    reader = loaded(tokenizer)
    long = f"<think>{CALL}</think>Let me write. {begins}{'x' * 3000}{ends}"
    assert reader.read(tokenizer.encode(long)).tools == ("write",)
    assert reader.read(tokenizer.encode(long), truncated=True).ending is Ending.CUT
    answer = f"<think>{long}</think>{'x' * 3000}"
    assert reader.read(tokenizer.encode(answer)).ending is Ending.ANSWER


def test_by_ids_the_end_of_thinking_in_the_arguments_is_none() -> None:
    tokenizer = Letters(SPECIAL)
    reader = loaded(tokenizer)
    for size in (10, 3000):
        text = f"{'x' * size}</think>"
        call = f'<tool_call>{{"name": "write", "arguments": {{"text": "{text}"}}}}</tool_call>'
        said = f"<think>so {CALL}</think>{call}"
        assert reader.read(tokenizer.encode(said)).tools == ("write",)


def test_a_long_call_that_was_only_thought_of_is_none() -> None:
    tokenizer = Letters(SPECIAL)
    reader = loaded(tokenizer)
    long = f'<tool_call>{{"name": "write", "arguments": {{"text": "{"x" * 3000}"}}}}</tool_call>'
    asked = reader.read(tokenizer.encode(f"<think>{long}</think>Done."))
    assert asked.ending is Ending.ANSWER
    assert tokenizer.num_decoded == [len("Done.")]


def test_a_harmony_message_begins_at_its_start() -> None:
    tokenizer = Letters(HARMONY)
    reader = loaded(tokenizer)
    call = "<|start|>assistant<|channel|>commentary to=functions.x <|message|>{}<|call|>"
    asked = reader.read(tokenizer.encode("<|channel|>analysis<|message|>hm<|end|>" + call))
    assert asked.tools == ("x",)
    assert tokenizer.num_decoded == [len(tokenizer.encode(call))]


def test_a_turn_at_its_token_limit_is_cut() -> None:
    tokenizer = Letters(SPECIAL)
    reader = loaded(tokenizer)
    assert reader.read(tokenizer.encode(CALL[:-20]), truncated=True).ending is Ending.CUT
    assert reader.read(tokenizer.encode(CALL[:-20])).tools[0] == "get_weather"
    assert reader.read([], truncated=True).ending is Ending.CUT


def test_no_reading_begins_in_a_step_that_has_spent_its_budget() -> None:
    tokenizer = Letters({}, seconds_per_token=1e-6)
    reader = loaded(tokenizer)
    token_ids = tokenizer.encode("x" * TAIL_TOKENS)
    begin_s = tokenizer.now
    endings = [reader.read(token_ids).ending for _ in range(9)]
    assert BUDGET_S <= tokenizer.now - begin_s < 2 * BUDGET_S
    assert tokenizer.num_decoded == [TAIL_TOKENS] * 2
    assert endings[2:] == [Ending.UNREAD] * 7
    assert tokenizer.not_read == ["no_time"] * 7
    reader.new_step()
    assert reader.read(token_ids).ending is Ending.ANSWER


def test_what_a_prompt_costs_counts() -> None:
    tokenizer = Letters({}, seconds_per_token=1e-6)
    reader = loaded(tokenizer)
    reader.asks_for_blocks(tokenizer.encode("x" * PROMPT_TOKENS))
    assert reader.read(tokenizer.encode("x")) is UNREAD


@pytest.mark.parametrize("microseconds", [0.0, 1.0, 3.0, 5.0, 1000.0])
def test_with_a_slow_tokenizer_fewer_tokens_are_read(microseconds: float) -> None:
    tokenizer = Letters({}, seconds_per_token=microseconds * 1e-6)
    reader = loaded(tokenizer)
    reader.read(tokenizer.encode("x" * TAIL_TOKENS))
    (num_decoded,) = tokenizer.num_decoded
    assert HEAD_TOKENS <= num_decoded <= TAIL_TOKENS
    cost_s = num_decoded * tokenizer.seconds_per_token
    assert num_decoded == HEAD_TOKENS or cost_s <= BUDGET_S
    assert num_decoded == TAIL_TOKENS or cost_s > 0.95 * BUDGET_S


def test_a_step_that_is_interrupted_costs_no_other_step_anything() -> None:
    tokenizer = Letters({})
    reader = loaded(tokenizer)
    token_ids = tokenizer.encode("x" * TAIL_TOKENS)
    for seconds_per_token in (1.0, 1e-6, 1e-6):
        tokenizer.seconds_per_token = seconds_per_token
        reader.new_step()
        assert reader.read(token_ids).ending is Ending.ANSWER


@pytest.mark.parametrize(
    ("prompt", "asks"),
    [
        ("Your response must contain one block:\n```mswea_bash_command\nls\n```", True),
        ("sh shell scripts should be provided in ```sh code blocks", True),
        ("Say which command to run, in a ```bash block", True),
        ("How do I list files? In ```python", False),
        ("I have a ```shellfish", False),
        ("x" * PROMPT_TOKENS + "```bash\n", False),
        ("", False),
    ],
)
def test_who_runs_shell_blocks_says_so_in_the_prompt(prompt: str, asks: bool) -> None:
    tokenizer = Letters({})
    reader = loaded(tokenizer)
    assert reader.asks_for_blocks(tokenizer.encode(prompt)) is asks
    assert len(tokenizer.encode(prompt)) > PROMPT_TOKENS or tokenizer.num_decoded == [len(prompt)]


def test_a_prompt_that_cannot_be_read_asks_for_nothing() -> None:
    reader = loaded(Letters({}))
    assert not reader.asks_for_blocks([-1])
    assert not reader.asks_for_blocks(None)  # embeddings


def test_a_tokenizer_that_raises_is_counted_and_no_more() -> None:
    tokenizer = Letters({})
    reader = loaded(tokenizer)
    assert reader.read([-1]) is UNREAD  # chr(-1)
    assert tokenizer.not_read == ["error"]


def test_without_a_tokenizer_nothing_is_read_and_one_line_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load() -> Any:
        raise OSError("no such file")

    not_read: list[str] = []
    reader = ToolReader(load, lambda: 0.0, not_read.append)
    assert reader.read([1]) is UNREAD
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reader.start()
            reader.join()
    assert reader.read([1]) is UNREAD
    assert not_read == ["no_tokenizer"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "ContinuumConnector cannot load the tokenizer (no such file), so tool calls stay unread "
        "and a client that disconnects looks like a stop string: such turns are kept until "
        "their TTL; let --tokenizer name one that this process can read, or declare `tools` "
        "in each request"
    ]


def test_a_server_without_a_tokenizer_is_no_error() -> None:
    not_read: list[str] = []
    reader = ToolReader(lambda: None, lambda: 0.0, not_read.append)
    reader.start()
    reader.join()
    assert reader.read([1]) is UNREAD
    assert not_read == ["no_tokenizer"]


def test_markers_are_those_that_are_one_token() -> None:
    assert kinds_of(object()) == {}
    kinds = kinds_of(Letters({**SPECIAL, **HARMONY, " to=": 9007, "functools": 9008}))
    assert kinds == {OPEN: "call", CLOSE: "end", THINK: "think", SPEAK: "speak", 9005: "message"}
    assert "message" not in kinds_of(Letters({"<|start|>": 9005})).values()


@pytest.mark.parametrize(
    ("text", "decoded"),
    [
        (f"a{CALL}</think>b{CALL}c{CALL}", f"{CALL}c{CALL}"),
        ("a</think>b", "b"),
        ("a</tool_call>", "a</tool_call>"),
        (f"a</tool_call><think>{CALL}<think>", f"<think>{CALL}<think>"),
    ],
)
def test_what_follows_the_thinking_is_decoded_from_the_first_call_on(
    text: str, decoded: str
) -> None:
    tokenizer = Letters(SPECIAL)
    reader = loaded(tokenizer)
    reader.read(tokenizer.encode(text))
    assert tokenizer.num_decoded == [len(tokenizer.encode(decoded))]
