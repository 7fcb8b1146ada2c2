"""Formats: what a finished turn's text asks for, in whichever format it is written.

FORMATS says what begins a call. Its arguments are read the same way in every format: as a value in
brackets, else as members in tags, else as text; what is in them, such as a file about calls, is no
call. Without a call outside shell blocks the calls are the blocks, else what UNMARKED finds first.
A tool that runs a shell is read as the commands in its script. Everything is linear in the text and
never raises.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

from continuum_connector.toolcalls.shell import MAX_CALLS, clean_name, what_runs

MAX_CHARS = 4_096  # of the text's end; 512 tokens of ordinary text take half as many
MAX_TOKENS = 512  # strings, brackets and words read of one value, members of one call
MAX_DEPTH = 32  # no real call nests deeper, and each level takes time
MAX_TRIES = 4  # beginnings that turn out to be none: a text may speak about formats


class Ending(enum.Enum):
    """How a turn's output ends."""

    CALLS = "calls"  # with tool calls: the program returns when they are done
    LAST = "last"  # with a call by which a public agent says that it is done
    ANSWER = "answer"  # with words to a person, who returns in their own time or never
    CUT = "cut"  # truncated before one could tell
    UNREAD = "unread"  # we did not look: no tokenizer yet, or no time left in this step


@dataclass(frozen=True)
class Asked:
    """What a turn asks for: the names of the tools that it calls, without their arguments.

    A name is that of a tool ("get_weather") or, in a shell, of a command ("pytest"). There are none
    unless `ending` is CALLS or LAST. Gaps are heavy-tailed, so the longest call dominates, whether
    the calls run in parallel or, as in `a && b`, one after another. `in_blocks`: the calls are
    shell blocks, which somebody runs only if the prompt asked for such blocks.
    """

    ending: Ending
    tools: tuple[str, ...] = ()
    in_blocks: bool = field(default=False, compare=False)


UNREAD, CUT, ANSWER = Asked(Ending.UNREAD), Asked(Ending.CUT), Asked(Ending.ANSWER)
WHY_UNREAD = ("no_tokenizer", "no_time", "error")  # the tokenizer raised

Call = tuple[str, object, bool]  # its name, "" for a shell block; its arguments; is it all there?


def _any(*patterns: str) -> re.Pattern[str]:
    """Any of the patterns, grouped by their first letter: the engine looks for it first."""
    groups = groupby(sorted(patterns, key=lambda each: each[0]), key=lambda each: each[0])
    return re.compile("|".join(f"(?:{'|'.join(group)})" for _, group in groups))


# --- the table --------------------------------------------------------------------------------
_S, _ANY, _NAME = r"\s{0,8}", r"[^<>\n]{0,64}?", r"[\"']?([\w.\-:/@+]{1,128})[\"']?"
_PRE = r"(?:\w{1,16}:|｜\w{1,16}｜\s?)?"  # what may come before the name of a tag
_CALL = r"\((?=\s{0,16}(?:\)|\w{1,64}\s{0,16}=))"  # x() or x(a=
_PYTHON = rf"[A-Za-z_][\w.]{{0,127}}{_CALL}"
_VALUE = rf"(?=[\[{{]|{_PYTHON})"  # an object, a list, Python's call
VALUE_MARKERS = (  # names and arguments are in the values that follow
    *("<tool_call>", "[TOOL_CALLS]", "<tool_calls>"),  # Hermes, Qwen; Mistral; Jamba, Hunyuan
    *("<|python_tag|>", "<|python_start|>"),  # Llama 3 and 4
    *("<|tool_call|>", "<function_call>"),  # Granite 3 and 20B
    *("<|action_start|><|plugin|>", "<|tools_prefix|>"),  # InternLM 2; Apertus
    *("<longcat_tool_call>", "<|tool_call_start|>", "<TOOLCALL>"),  # LongCat; LFM2; Nemotron
    *("<|START_ACTION|>", "<|content_invoke_tool_json|>"),  # Cohere; Inkling
    *("<|function_call|>", "<function_calls>"),  # GigaChat 3; Olmo 3
)
_TAGS = "|".join(re.escape(marker[1:]) for marker in VALUE_MARKERS if marker[0] == "<")
DEEPSEEK, KIMI, _SEP = "<｜tool▁call▁begin｜>", "<|tool_call_begin|>", "<｜tool▁sep｜>"
BEGINNINGS = (*VALUE_MARKERS, DEEPSEEK, KIMI, "<|tool_call>call:", "=functions.")
ENDS = ("</tool_call>", "<｜tool▁call▁end｜>", "<|tool_call_end|>")
# attempt_completion and ask_followup_question are left out, because they speak to a person.
AGENT_TOOLS = (
    "execute_command|read_file|write_to_file|replace_in_file|apply_diff|insert_content|"
    "search_and_replace|search_files|list_files|list_code_definition_names|codebase_search|"
    "browser_action|use_mcp_tool|access_mcp_resource|fetch_instructions|new_task|switch_mode|"
    "web_fetch"
)
_NO_TOOL = "(?:self|user|commentary|developer)"  # to whom Muse thinks and speaks
_TO = rf"=(?<=\sto=)(?!{_NO_TOOL}\b){_NAME}(?=(?:\s[^<]{{0,64}})?<)[^<]{{0,64}}"
# What begins a call, with a first letter to look for; and the file of tests/unit/tool_outputs that
# has a witness. If there is a name in it, arguments follow, else values.
FORMATS = {
    rf"<(?:{_TAGS}){_S}{_VALUE}": "other_markers",
    rf"\[TOOL_CALLS\]{_S}{_VALUE}": "mistral",
    rf"functools{_VALUE}": "other_markers",  # Phi-4-mini
    rf"\[TOOL_CALLS\]{_S}{_NAME}(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|{_S}(?={{))": "mistral",
    # V3 and R1, with JSON in a fence, and V3.1
    rf"{DEEPSEEK}(?:function{_SEP}|(?!function<)){_NAME}(?:{_SEP}|\n```json)": "deepseek",
    rf"{re.escape(KIMI)}{_S}{_NAME}<\|tool_call_argument_begin\|>": "kimi",
    rf"<(?:\|tool_call|start_function_call)>call:{_NAME}(?={{)": "agents",  # Gemma, FunctionGemma
    r"<\|(python)_tag\|>": "llama",  # its code interpreter
    # gpt-oss and Muse, whose messages are calls if they have a recipient
    rf"{_TO}(?:<\|(?:channel|constrain)\|>[^<]{{0,64}}){{0,2}}<\|message\|>": "harmony",
    # Qwen3-Coder, Llama 3.1: <function=name>; Anthropic, MiniMax, DeepSeek V3.2: <invoke name="x">
    rf"<{_PRE}(?:(?:function|invoke){_S}name|function){_S}={_S}{_NAME}{_S}>": "xml_invoke",
    rf"<tool_call>{_S}{_NAME}(?={_S}<)": "glm",
    rf"<\|open\|>call{_S}{_ANY}tool={_NAME}{_ANY}<\|sep\|>": "other_markers",  # Kimi K3
    rf"<({AGENT_TOOLS})>(?={_S}<[a-z_]{{1,64}}>)": "agents",  # Cline, Roo Code
}
# Without any of these: JSON at a line's beginning; ReAct; Python calls, and nothing behind them.
_B = r"[ \t*]{0,8}"
UNMARKED = {
    r"\n[ \t]{0,8}(?=[\[{][\s\"{\[])": "llama",
    rf"\n{_B}Action:{_B}{_NAME}{_B}\n{_B}Action Input:{_B}": "agents",
    rf"\n(?<=\A\n)\s{{0,64}}(?=\[{_S}{_PYTHON}|[\w.]+\(\s*\w+\s*=)(?P<only>)": "llama",
}
BLOCK = r"```(?:bash|sh|shell|mswea_bash_command)"
_SCRIPT = r"(?P<script>(?:[^\n]+|\n(?![ \t]{0,8}```))*)(?P<fence>\n)?"
_MARKED = _any(*FORMATS, rf"{BLOCK}[ \t]{{0,8}}(?=\n|\Z){_SCRIPT}")
_UNMARKED = _any(*UNMARKED)
# A member in tags: <parameter=key>, <parameter name="key">; GLM's pairs; Kimi K3's arguments; tags
# that are keys themselves. Or what closes a call; after ReAct's, the model invents what follows.
_PARAMETER, _INVOKE_END = f"{_PRE}param(?:eter)?", f"</{_PRE}(?:invoke|function)>"
_MEMBER = re.compile(
    rf"""<(?: {_PARAMETER}(?:{_S}name)?{_S}={_S} | arg_key> | \|open\|>argument{_S}{_ANY}key=
           | (?=(?!tool_sep)[a-z_]+>) )["']?(?P<key>[^"'<>\n]{{1,128}})["']?
         (?: {_ANY}(?:<\|sep\|)?> | </arg_key>{_S}(?:<arg_type>{_ANY}</arg_type>{_S})?<arg_value> )
         (?P<value>[^<]*(?:<(?!/(?:{_PARAMETER}|arg_value|(?P=key))>|\|close\|>argument<)[^<]*)*)
       | {_INVOKE_END} | </(?:tool_call|{AGENT_TOOLS})> | <\|close\|>call< | \nObservation
       | <\|(?:end|call|return|eo[mt](?:_id)?)\|>""",
    re.VERBOSE,
)
# A call whose name comes after the end of the text; one that began before the text, or its fence.
_BEGUN = _any(*map(re.escape, BEGINNINGS))
_UNNAMED = re.compile(r"\s{0,64}(?:[\[{]|[^\s`]{0,128}\s{0,8}\Z)")
_LONE_FENCE = r"(?P<block>\n```\s{0,64}(?:<[^>\n]{1,32}>\s{0,8})?\Z)"
_ENDED = _any(*map(re.escape, ENDS), _INVOKE_END, r"<\|call\|>", _LONE_FENCE)

# --- what a call is given: JSON as models write it, Python's calls, Gemma's pairs; tags; text ---
_TOKEN = re.compile(
    rf"""(?: (?P<quote>["'])(?P<text>(?:[^"'\\]+|\\.|(?!(?P=quote))["'])*)(?P<end>(?P=quote))?
           | (?P<word>[\w.+\-]+) )(?:\s{{0,8}}(?P<key>[:=])|(?P<call>{_CALL}))?
      | (?P<open>[(\[{{]) | (?P<close>[)\]}}]) | (?P<stop><[/|](?!"))
      | (?:<escape>|<\|"\|>)(?P<raw>.*?)(?:<escape>|<\|"\|>|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_NEXT = re.compile(rf"[\s;,]{{0,64}}{_VALUE}")
NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters", "args")


def read_value(text: str, at: int) -> tuple[Any, int, bool]:
    """The value whose bracket or Python call is at `at`, as much of it as is there, whatever is
    wrong with it; where it ends; and whether it is all there. A Python call becomes an object with
    a name and arguments."""
    root: list[Any] = []
    stack: list[Any] = [root]
    key = ""
    for token in islice(_TOKEN.finditer(text, at), MAX_TOKENS):
        kind, holder, value = token.lastgroup, stack[-1], token["raw"] or token[0]
        if kind == "key":
            key = token["word"] or token["text"]
            continue
        if kind == "stop":
            return root[0], token.start(), False
        if kind == "close":
            stack.pop()
        else:
            if kind in ("open", "call"):
                stack.append([] if value == "[" else {})
                named = {"name": token["word"], "arguments": stack[-1]}
                value = named if kind == "call" else stack[-1]
            elif value in ("null", "None") or (key in NAMES and kind != "end"):
                value = None  # also for half a name
            elif kind in ("end", "text"):
                value = _ESCAPE.sub(lambda each: "\n" if each[1] == "n" else each[1], token["text"])
            holder.setdefault(key, value) if isinstance(holder, dict) else holder.append(value)
        if len(stack) == 1:
            return root[0], token.end(), True
        if len(stack) > MAX_DEPTH:
            return None, len(text), False
        key = ""
    return root[0], len(text), False


def _read_members(text: str, at: int) -> tuple[Any, int, bool]:
    """The members in tags from `at` on, else the text; where it ends; and whether it is closed."""
    found: dict[str, str] = {}
    for each in islice(_MEMBER.finditer(text, at), MAX_TOKENS):
        if each["key"] is None:
            return found or text[at : each.start()], each.end(), True
        found[each["key"]] = each["value"]
    return found or text[at:], len(text), False


def _read(opened: re.Match[str], text: str, sure: bool) -> tuple[list[Call], int]:
    """The calls that begin here, and where they end. `sure`: a marker says that they are calls.
    Without one, an object must have a name and arguments to be one."""
    calls: list[Call] = []
    at = opened.end()
    if name := next(filter(None, opened.groups()), None):
        at = len(text) - len(text[at:].lstrip())
        read = read_value if text.startswith("{", at) else _read_members
        given, at, is_whole = read(text, at)
        return [(name, given, is_whole)], at
    while len(calls) < MAX_CALLS and (begins := _NEXT.match(text, at)):
        value, at, is_whole = read_value(text, begins.end())
        if not (found := _calls_in(value, is_whole, sure)):
            break
        calls += found
    return calls, at


def _calls_in(value: Any, is_whole: bool, sure: bool) -> list[Call]:
    if isinstance(value, list):
        return [call for item in value[:MAX_CALLS] for call in _calls_in(item, is_whole, sure)]
    members = value if isinstance(value, dict) else {}
    if isinstance(members.get("commands"), list):  # typed into Terminal-Bench's terminal
        items = [item for item in members["commands"] if isinstance(item, dict)]
        waits = any(str(item.get("duration"))[:1] in "123456789" for item in items)
        if waits or not (items or members.get("task_complete") == "true"):  # it is left alone
            items.append({"keystrokes": "sleep"})
        return [("", item, is_whole) for item in items]
    name = next((members[key] for key in NAMES if isinstance(members.get(key), str)), None)
    if name is None:  # perhaps {"get_weather": {"city": ...}}, as Apertus writes it
        sole = members.items() if sure and len(members) == 1 else ()
        return [(key, given, is_whole) for key, given in sole if isinstance(given, dict)]
    given = [members[key] for key in ARGUMENTS if key in members] + ([members] if sure else [])
    if given and isinstance(given[0], str) and given[0].lstrip()[:1] == "{":
        given[0] = read_value(given[0], 0)[0]  # OpenAI's are JSON in a string
    return [(name, each, is_whole) for each in given[:1]]


# --- the thinking, which does not count -----------------------------------------------------
THINKING = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    "<|content_thinking|>": "<|content_text|>",
    "<|channel|>analysis<|message|>": "<|end|><|start|>",
}
# A call ends the thinking where it does in vLLM (vllm/parser/qwen3.py, glm47_moe.py, mistral.py,
# minimax_m2.py, kimi_k2.py, seed_oss.py, deepseek_v4.py). Its other parsers go on thinking.
_ENDING_CALL = re.compile(
    r"<(?:minimax:|seed:)?tool_call>|\[TOOL_CALLS\]|<\|tool_calls_section_begin\|>"
    r"|<｜DSML｜(?:tool_| )calls>|<\|content_invoke_tool_json\|>"
)
# Hunyuan writes <tool_call:6124c78e> and <arg_key:6124c78e>, K2 Horizon <ifm|tool_call>.
DECORATED = re.compile(
    r"<(/?)(?:ifm\|(\w{1,16})|(think|tool_calls?|arg_(?:key|value)):[^\s<>]{1,16})>"
)


def spoken(text: str) -> tuple[str, bool]:
    """What follows the thinking, and whether the text ends inside it: then, from the first call on
    that may have ended it, which counts only if it is finished, as the model may only be thinking
    about it. The opening tag is not needed: chat templates often put it into the prompt."""
    closed = [text.rfind(tag) + len(tag) for tag in THINKING.values() if tag in text]
    said = text[max(closed, default=0) :]
    opened = [said.find(tag) + len(tag) for tag in THINKING if tag in said]
    if not opened:
        return said, False
    call = _ENDING_CALL.search(said, min(opened))
    return said[call.start() :] if call else "", True


def asked_of(declared: tuple[str, ...], read: Callable[[], Asked]) -> Asked:
    """What the client says it will run (`hints.tools`), else what `read` finds: a client knows
    better than we can read from its text."""
    names = dict.fromkeys(name for tool in declared if (name := clean_name(tool)))
    return Asked(Ending.CALLS, tuple(names)[:MAX_CALLS]) if names else read()


def parse(text: str, *, truncated: bool = False, headless: bool = False) -> Asked:
    """Say what a turn's output asks for.

    `truncated`: the output ended at a token limit, so an unfinished call will not run. Otherwise
    the model ended the output, so an unfinished call counts if its name is there. `headless`: the
    text's beginning is missing; a call that began there is CALLS without a name.
    """
    if len(text) > MAX_CHARS:
        text, headless = text[-MAX_CHARS:], True
    aloud, in_thinking = spoken(DECORATED.sub(r"<\1\2\3>", text))
    truncated = truncated or in_thinking
    calls, blocks = _calls(aloud)
    calls = calls or blocks or _unmarked("\n" + aloud)
    runs = [what_runs(*c[:2]) for c in calls[:MAX_CALLS] if c[2] or not truncated]
    if tools := dict.fromkeys(name for names, _ in runs for name in names):
        ending = Ending.LAST if any(is_last for _, is_last in runs) else Ending.CALLS
        return Asked(ending, tuple(tools)[:MAX_CALLS], calls is blocks)
    if truncated or calls or not aloud.strip():
        return CUT
    if headless and (end := _ENDED.search(aloud)):
        return Asked(Ending.CALLS, in_blocks=end["block"] is not None)
    begun = [opened.end() for opened in _BEGUN.finditer(aloud)]
    return CUT if begun and _UNNAMED.match(aloud, begun[-1]) else ANSWER


def _calls(text: str) -> tuple[list[Call], list[Call]]:
    """The calls outside shell blocks, and the blocks."""
    calls: list[Call] = []
    blocks: list[Call] = []
    at = num_false = 0
    while len(calls) < MAX_CALLS and num_false < MAX_TRIES and (opened := _MARKED.search(text, at)):
        at = opened.end()
        if opened.lastgroup:
            blocks.append(("", {"command": opened["script"]}, opened.lastgroup == "fence"))
            continue
        found, end = _read(opened, text, sure=True)
        if found:
            calls, at = calls + found, end
        else:
            num_false += 1
    return calls, blocks


def _unmarked(text: str) -> list[Call]:
    """The first of what UNMARKED has: an agent runs no more than one action."""
    at = 0
    for _ in range(MAX_TRIES):
        if (opened := _UNMARKED.search(text, at)) is None:
            break
        calls, at = _read(opened, text, sure=False)
        if calls and (opened.lastgroup is None or text[at:].lstrip()[:1] in ("", "<")):
            return calls
    return []
