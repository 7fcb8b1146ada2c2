"""Thinking: what a model says to itself before it acts. Calls in it do not count.

In some formats a call ends the thinking without a closing tag. There vLLM's parsers hand the
call to the client (vllm/parser/qwen3.py, glm47_moe.py, mistral.py, minimax_m2.py, kimi_k2.py,
seed_oss.py, deepseek_v4.py). Its other parsers take all of the text as thinking.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


def one_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that finds any of the texts, the longest of those that fit.

    Grouped by their first character: the regular expression engine looks only into the group
    that fits, instead of trying each of forty markers at every `<`.
    """
    groups = groupby(sorted(texts, reverse=True), key=lambda text: text[:1])
    return re.compile("|".join(f"(?:{'|'.join(map(re.escape, group))})" for _, group in groups))


OPENERS = (
    "<think>",
    "<thinking>",
    "[THINK]",
    "<seed:think>",
    *("<|START_THINKING|>", "<|open|>think<|sep|>", "<|content_thinking|>"),
)
CLOSERS = (
    "</think>",
    "</thinking>",
    "[/THINK]",
    "</seed:think>",
    *("<|END_THINKING|>", "<|close|>think<|sep|>", "<|content_text|>"),
)
ENDING_CALLS = (
    *("<tool_call>", "[TOOL_CALLS]", "<minimax:tool_call>", "<|tool_calls_section_begin|>"),
    *(
        "<seed:tool_call>",
        "<｜DSML｜tool_calls>",
        "<｜DSML｜ calls>",
        "<|content_invoke_tool_json|>",
    ),
)
# Hunyuan writes <tool_call:6124c78e>, K2 Horizon <ifm|tool_call>.
_DECORATED = re.compile(
    r"<(/?)(?:ifm\|(\w{1,16})|(think|tool_(?:calls?|sep)|arg_(?:key|value)):[^\s<>]{1,16})>"
)
_TAG = one_of((*OPENERS, *CLOSERS))
_ENDING_CALL = one_of(ENDING_CALLS)


@dataclass(frozen=True)
class Spoken:
    """The part of a text that counts. `in_thinking`: the text ends inside the thinking.

    `aloud` is then the text from the first call on that may have ended the thinking, or "". Such a
    call counts only if the model has finished it, because the model may only be thinking about it.
    """

    aloud: str
    in_thinking: bool = False


def spoken(text: str) -> Spoken:
    """Leave the thinking out.

    A closing tag without an opening one also ends thinking, because chat templates often put the
    opening tag into the prompt.
    """
    aloud: list[str] = []
    begin, is_open = 0, False
    for tag in _TAG.finditer(text):
        if tag[0] in CLOSERS:
            begin, is_open = tag.end(), False
        elif not is_open:
            aloud.append(text[begin : tag.start()])
            begin, is_open = tag.end(), True
    if not is_open:
        return Spoken("".join([*aloud, text[begin:]]))
    call = _ENDING_CALL.search(text, begin)
    return Spoken(text[call.start() :] if call else "", in_thinking=True)


def plain(text: str) -> str:
    """The text with <tool_call>, <arg_key> and the like in their usual spelling."""
    return _DECORATED.sub(r"<\1\2\3>", text)
