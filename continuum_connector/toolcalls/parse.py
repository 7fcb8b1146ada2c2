"""Parse: what a finished turn's text asks for, in whichever format it is written.

The first marker outside a shell block decides the format: text inside a call, such as a file
about calls, does not count. Without any marker the calls are the shell blocks, else JSON, ReAct's
actions, or Python calls. Everything is linear in the text. A tool that runs a shell is read as the
commands in its script.

What a model says to itself before it acts does not count. In some formats a call ends the thinking
without a closing tag. There vLLM's parsers hand the call to the client (vllm/parser/qwen3.py,
glm47_moe.py, mistral.py, minimax_m2.py, kimi_k2.py, seed_oss.py, deepseek_v4.py). Its other
parsers take all of the text as thinking.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from continuum_connector.toolcalls import special_tokens, tags, unmarked
from continuum_connector.toolcalls.asked import MAX_CALLS, Asked, Ending, RawCall, clean_name
from continuum_connector.toolcalls.shell import SHELLS, commands_that_take_time


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


MAX_CHARS = 4_096  # of the text's end; 512 tokens of ordinary text take half as many
MAX_FALSE_MARKERS = 4  # a text may speak about markers
CUT = Asked(Ending.CUT)
ANSWER = Asked(Ending.ANSWER)

READERS: dict[str, Callable[[str, int], list[RawCall]]] = {
    **tags.READERS,
    **special_tokens.READERS,
}
_MARKER = one_of(READERS)
# What is left of a call that began before the text: its end, or a single fence.
_END_OF_CALL = re.compile(
    r"</tool_call>|</[\w:｜]{0,24}?(?:invoke|function)>|<｜tool▁call▁end｜>|<\|tool_call_end\|>"
    r"|<\|call\|>"
)
_LONE_FENCE = re.compile(r"(?:^|\n)```\s{0,64}(?:<[^>\n]{1,32}>\s{0,8})?\Z")
SCRIPT_KEYS = ("command", "cmd", "script", "keystrokes", "bash_command", "shell_command")
SHELL_TOOLS = {*SHELLS, "shell", "terminal"}  # if their arguments are a text without keys
NO_SHELL_KEYS = {"path", "file_path", "file_text", "old_str"}  # an editor's `command` is no script


def parse(text: str, *, truncated: bool = False, headless: bool = False) -> Asked:
    """Say what a turn's output asks for.

    `truncated`: the output ended at a token limit, so an unfinished call will not run. The answer
    is CUT, unless finished calls come before it. Otherwise the model ended the output, so an
    unfinished call counts if its name is there. `headless`: the text's beginning is missing; a call
    that began there is CALLS without a name.
    """
    if len(text) > MAX_CHARS:
        text, headless = text[-MAX_CHARS:], True
    said = spoken(plain(text))
    aloud, truncated = said.aloud, truncated or said.in_thinking
    if special_tokens.is_thinking(aloud) or not aloud.strip():
        return CUT
    raw = _raw_calls(aloud)
    calls = [call for call in raw[:MAX_CALLS] if call.finished or not truncated]
    if tools := dict.fromkeys(name for call in calls for name in tools_of(call)):
        return Asked(Ending.CALLS, tuple(tools)[:MAX_CALLS])
    if truncated:
        return CUT
    if headless and (_END_OF_CALL.search(aloud) or _LONE_FENCE.search(aloud)):
        return Asked(Ending.CALLS)
    return CUT if raw else ANSWER


def _raw_calls(text: str) -> list[RawCall]:
    blocks: list[RawCall] = []
    begun: list[RawCall] = []  # calls whose name comes after the end of the text
    position = num_false = 0
    marker = _MARKER.search(text)
    block = unmarked.FENCE.search(text)
    while marker is not None or block is not None:
        if block is not None and (marker is None or block.start() < marker.start()):
            call, position = unmarked.read_block(text, block)
            if len(blocks) < MAX_CALLS:
                blocks.append(call)
            block = unmarked.FENCE.search(text, position)
            if marker is not None and marker.start() < position:
                marker = _MARKER.search(text, position)
            continue
        assert marker is not None
        calls = READERS[marker[0]](text, marker.start())
        if any(clean_name(call.name) for call in calls):
            return calls
        begun = begun or [call for call in calls if not call.finished]
        num_false += 1
        marker = None if num_false == MAX_FALSE_MARKERS else _MARKER.search(text, marker.end())
    return blocks or unmarked.read_unmarked(text) or begun


def tools_of(raw: RawCall) -> list[str]:
    """The names of what a call runs; none if it has no name yet."""
    name = clean_name(raw.name)
    script = _script(name, raw.arguments)
    commands = commands_that_take_time(script) if script is not None else []
    return commands or ([name] if name else [])


def _script(name: str, arguments: object) -> str | None:
    """The shell script among the arguments, if there is one."""
    if isinstance(arguments, str):
        return arguments if name.lower() in SHELL_TOOLS else None
    if not isinstance(arguments, dict) or "edit" in name or NO_SHELL_KEYS & arguments.keys():
        return None
    for key in SCRIPT_KEYS:
        value = arguments.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list):  # argv, as Codex sends it: ["bash", "-lc", "pytest -q"]
            words = [word for word in value[:64] if isinstance(word, str)]
            if len(words) > 2 and words[0].rsplit("/", 1)[-1] in SHELLS and words[1][:1] == "-":
                return words[2]
            return " ".join(words)
    return None
