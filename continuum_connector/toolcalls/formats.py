"""Formats: what a finished turn's text asks for, in whichever format it is written.

FORMATS has a row for each: what begins a call, and what reads its arguments. The first call outside
a shell block decides the format: text inside a call, such as a file about calls, does not count.
Without any the calls are the shell blocks, else JSON, ReAct's actions, or Python calls. A tool that
runs a shell is read as the commands in its script. tests/unit/tool_outputs has a witness for each
pattern. Everything is linear in the text and never raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby, islice
from typing import Any, NamedTuple

from continuum_connector.toolcalls.asked import ANSWER, CUT, MAX_CALLS, Asked, Ending, clean_name
from continuum_connector.toolcalls.shell import what_runs

MAX_CHARS = 4_096  # of the text's end; 512 tokens of ordinary text take half as many
MAX_TOKENS = 512  # strings, brackets and words read of one value
MAX_MEMBERS = 64  # read of a call in tags
MAX_DEPTH = 32  # no real call nests deeper, and each level takes time
MAX_TRIES = 4  # beginnings that turn out to be none: a text may speak about formats

Read = Callable[[str, int], tuple[Any, int, bool]]  # a value, the index after it, is it all there?


class Call(NamedTuple):
    """A call as the model wrote it; not `finished` if the text ends inside it."""

    name: str  # "" for a shell block
    arguments: object
    finished: bool


# --- values: JSON as models write it, Python's calls, Gemma's pairs ---------------------------
_CALL = r"\((?=\s{0,16}(?:\)|\w{1,64}\s{0,16}=(?!=)))"  # x() or x(a=
_BEGINS_VALUE = rf"(?=[\[{{]|[A-Za-z_][\w.]{{0,127}}{_CALL})"
_VALUE = re.compile(rf"[\s;,]{{0,64}}{_BEGINS_VALUE}")
_TOKEN = re.compile(
    rf"""(?P<quote>["'])(?P<text>(?:[^"'\\]+|\\.|(?!(?P=quote))["'])*)
         (?P<end>(?P=quote))?\s{{0,8}}(?P<colon>:)?
      | (?P<word>[\w.+\-]+)(?:\s{{0,8}}(?P<key>[:=])|(?P<call>{_CALL}))?
      | (?P<open>[(\[{{]) | (?P<close>[)\]}}]) | (?P<stop><[/|](?!"))
      | (?:<escape>|<\|"\|>)(?P<raw>.*?)(?:<escape>|<\|"\|>|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters", "args")


def read_value(text: str, at: int) -> tuple[Any, int, bool]:
    """The value whose bracket or Python call is at `at`, as much of it as is there, whatever is
    wrong with it. A Python call becomes an object with a name and arguments."""
    root: list[Any] = []
    stack: list[Any] = [root]
    key = ""
    for token in islice(_TOKEN.finditer(text, at), MAX_TOKENS):
        kind, holder, value = token.lastgroup, stack[-1], token["raw"] or token[0]
        if kind in ("colon", "key"):
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


def read_values(text: str, at: int, sure: bool) -> tuple[list[Call], int]:
    """The calls in the values from `at` on, and where they end. `sure`: a marker says that they
    are calls. Without one, an object must have a name and arguments to be one."""
    calls: list[Call] = []
    while len(calls) < MAX_CALLS and (begins := _VALUE.match(text, at)):
        value, at, finished = read_value(text, begins.end())
        if not (found := _calls_in(value, finished, sure)):
            break
        calls += found
    return calls, at


def _calls_in(value: Any, finished: bool, sure: bool) -> list[Call]:
    if isinstance(value, list):
        return [call for item in value[:MAX_CALLS] for call in _calls_in(item, finished, sure)]
    members = value if isinstance(value, dict) else {}
    if isinstance(members.get("commands"), list):
        return _typed(members, finished)
    name = next((members[key] for key in NAMES if isinstance(members.get(key), str)), None)
    key = next((key for key in ARGUMENTS if key in members), None)
    if name is not None:
        given = members[key] if key else members
        if isinstance(given, str) and given.lstrip()[:1] == "{":  # OpenAI's are JSON in a string
            given = read_value(given, 0)[0]
        return [Call(name, given, finished)] if key or sure else []
    if not sure or len(members) != 1:
        return []  # else {"get_weather": {"city": ...}}, as Apertus writes it
    return [Call(*each, finished) for each in members.items() if isinstance(each[1], dict)]


def _typed(members: dict[str, Any], finished: bool) -> list[Call]:
    """What an agent types into Terminal-Bench's terminal; nothing if it says that it is done. While
    it leaves the terminal alone it sleeps, whatever runs there."""
    items = [item for item in members["commands"][:MAX_CALLS] if isinstance(item, dict)]
    typed = [item["keystrokes"] for item in items if isinstance(item.get("keystrokes"), str)]
    calls = [Call("", {"command": keys}, finished) for keys in typed]
    waits = any(str(item.get("duration"))[:1] in "123456789" for item in items)
    if waits or (not items and members.get("task_complete") != "true"):
        calls[MAX_CALLS - 1 :] = [Call("sleep", None, finished)]
    return calls


# --- the table --------------------------------------------------------------------------------
_WORDS = {  # of the table's patterns
    " ": r"\s{0,8}",
    "<|": r"<\|",
    "|>": r"\|>",
    "ANY": r"[^<>\n]{0,64}?",
    "NAME": r"[\"']?([\w.\-:/@+]{1,128})[\"']?",
    "KEY": r"[\"']?(?P<key>[^\"'<>\n]{1,128})[\"']?",
    "PRE": r"(?=[\w｜])(?:\w{1,16}:|｜\w{1,16}｜ ?)?",  # what may come before the name of a tag
}
_WORD = re.compile(rf"(?<!\\)(?:{'|'.join(map(re.escape, _WORDS))})")


def pattern(text: str) -> str:
    """The regular expression that a pattern of the table stands for."""
    return _WORD.sub(lambda word: _WORDS[word[0]], text)


def _one_of(patterns: Iterable[str]) -> str:
    """Any of the patterns, grouped by their first letter: the engine looks for it first."""
    groups = groupby(sorted(patterns, key=lambda each: each[0]), key=lambda each: each[0])
    return "|".join(f"(?:{'|'.join(group)})" for _, group in groups)


def _until(close: str, key: str = "(?!)KEY", value_end: str = "") -> Read:
    """Reads all before `close`: the members, if there are any, that begin with `key` and end
    before `<` and `value_end`, else the text."""
    value = f"(?P<value>[^<]*(?:<(?!{value_end})[^<]*)*)"
    token = re.compile(pattern(f"{key}{value}|(?P<close>{close})"))

    def read(text: str, at: int) -> tuple[Any, int, bool]:
        found: dict[str, str] = {}
        for each in islice(token.finditer(text, at), MAX_MEMBERS):
            if each["close"]:
                return found or text[at : each.start()], each.end(), True
            found[each["key"].strip()] = each["value"]
        return found or text[at:], len(text), False

    return read


DEEPSEEK, KIMI, _SEP = "<｜tool▁call▁begin｜>", "<|tool_call_begin|>", "<｜tool▁sep｜>"
VALUE_MARKERS = (  # names and arguments are in the values that follow
    *("<tool_call>", "[TOOL_CALLS]", "<tool_calls>"),  # Hermes, Qwen; Mistral; Jamba, Hunyuan
    *("<|python_tag|>", "<|python_start|>"),  # Llama 3 and 4
    *("<|tool_call|>", "<function_call>"),  # Granite 3 and 20B
    *("<|action_start|><|plugin|>", "<|tools_prefix|>"),  # InternLM 2; Apertus
    *("<longcat_tool_call>", "<|tool_call_start|>", "<TOOLCALL>"),  # LongCat; LFM2; Nemotron
    *("<|START_ACTION|>", "<|content_invoke_tool_json|>"),  # Cohere; Inkling
    *("<|function_call|>", "<function_calls>"),  # GigaChat 3; Olmo 3
)
ENDS = ("</tool_call>", "<｜tool▁call▁end｜>", "<|tool_call_end|>")
# attempt_completion and ask_followup_question are left out, because they speak to a person.
AGENT_TOOLS = (
    "execute_command|read_file|write_to_file|replace_in_file|apply_diff|insert_content|"
    "search_and_replace|search_files|list_files|list_code_definition_names|codebase_search|"
    "browser_action|use_mcp_tool|access_mcp_resource|fetch_instructions|new_task|switch_mode|"
    "web_fetch"
)
_TAGS = "|".join(re.escape(marker[1:]) for marker in VALUE_MARKERS if marker[0] == "<")
_PARAMETER = ("<PREparam(?:eter)?(?: name)? = KEYANY>", "/PREparam(?:eter)?>")
_ANYTHING = _until("(?!)")
_INVOKE_END, _MESSAGE_END = "</PRE(?:invoke|function)>", "<|(?:end|call|return|eom|eot)|>"
_NO_TOOL = "(?:self|user|commentary|developer)"  # to whom Muse thinks and speaks
_TO = rf"=(?<=\sto=)(?!{_NO_TOOL}\b)NAME(?=(?:\s[^<]{{0,64}})?<)[^<]{{0,64}}"
_CHANNEL = "(?:<|(?:channel|constrain)|>[^<]{0,64}){0,2}"
_PAIR = "<arg_key>KEY</arg_key> (?:<arg_type>ANY</arg_type> )?<arg_value>"
_K3_KEY = "<|open|>argument ANYkey=KEYANY<|sep|>"
# A call's begin, and what reads its arguments if no JSON follows. The engine first looks for a
# row's first letter, so it has one.
FORMATS: dict[str, Read] = {
    f"<(?:{_TAGS}) {_BEGINS_VALUE}": _ANYTHING,
    rf"\[TOOL_CALLS\] {_BEGINS_VALUE}": _ANYTHING,
    f"functools{_BEGINS_VALUE}": _ANYTHING,  # Phi-4-mini
    # Mistral; DeepSeek V3 and R1, with JSON in a fence, and V3.1; Kimi K2; Gemma, FunctionGemma
    r"\[TOOL_CALLS\] NAME(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\]| (?={))": _ANYTHING,
    f"{DEEPSEEK}(?:function{_SEP}|(?!function<))NAME(?:{_SEP}|\n```json)": _ANYTHING,
    f"{KIMI} NAME <|tool_call_argument_begin|>": _ANYTHING,
    r"<(?:\|tool_call|start_function_call)>call:NAME(?={)": _ANYTHING,
    # Llama's code interpreter; gpt-oss and Muse, whose messages are calls if they have a recipient
    "<|(python)_tag|>": _until("<|eo"),
    f"{_TO}{_CHANNEL}<|message|>": _until(_MESSAGE_END, *_PARAMETER),
    # Qwen3-Coder, Llama 3.1: <function=name>; Anthropic, MiniMax, DeepSeek V3.2: <invoke name="x">
    "<PRE(?:function|invoke name|function name) = NAME >": _until(_INVOKE_END, *_PARAMETER),
    # GLM; Kimi K3; Cline, Roo Code
    "<tool_call> NAME(?= <)": _until("</tool_call>", _PAIR, "/arg_value>"),
    "<|open|>call ANYtool=NAMEANY<|sep|>": _until("<|close|>call<", _K3_KEY, r"\|close|>argument<"),
    f"<({AGENT_TOOLS})>(?= <[a-z_]{{1,64}}>)": _until(
        f"</(?:{AGENT_TOOLS})>", "<(?P<key>[a-z_]{1,64})>", "/(?P=key)>"
    ),
}
BEGINNINGS = (*VALUE_MARKERS, DEEPSEEK, KIMI, "<|tool_call>call:", "=functions.")
BLOCK = r"```(?:bash|sh|shell|mswea_bash_command)"
_ROWS = [(re.compile(pattern(row)), read) for row, read in FORMATS.items()]
_OPENED = re.compile(
    _one_of(f"{row.pattern}(?P<row{number}>)" for number, (row, _) in enumerate(_ROWS))
    + rf"|{BLOCK}[ \t]{{0,8}}(?=\n|\Z)(?P<block>)"
)
_BLOCK = _until(r"\n[\t\x20]{0,8}```")
# A call whose name comes after the end of the text; one that began before the text, or its fence.
_BEGUN = re.compile(_one_of(map(re.escape, BEGINNINGS)))
_UNNAMED = re.compile(r"\s{0,64}(?:[\[{]|[^\s`]{0,128}\s{0,8}\Z)")
_LONE_FENCE = r"(?P<block>(?:^|\n)```\s{0,64}(?:<[^>\n]{1,32}>\s{0,8})?\Z)"
_ENDED = re.compile(pattern(f"{'|'.join(ENDS)}|{_INVOKE_END}|<|call|>") + f"|{_LONE_FENCE}")
_JSON = re.compile(r"^[ \t]{0,8}(?=[\[{][\s\"{\[])", re.MULTILINE)
_B, _N = r"[ \t*]{0,8}", r"(?: \d{1,3})?:"
_ACTION = rf"^{_B}Action{_N}{_B}([\w.\-]{{1,128}}){_B}\n{_B}Action Input{_N}{_B}"
_REACT = re.compile(_ACTION, re.MULTILINE)
_OBSERVATION = _until("\nObservation")  # the model invents whatever follows

# --- the thinking, which does not count -----------------------------------------------------
_PAIRS = (
    "<think> </think> <thinking> </thinking> [THINK] [/THINK] <seed:think> </seed:think> "
    "<|START_THINKING|> <|END_THINKING|> <|open|>think<|sep|> <|close|>think<|sep|> "
    "<|content_thinking|> <|content_text|> <|channel|>analysis<|message|> <|end|><|start|>"
)
THINKING = dict(zip(_PAIRS.split()[::2], _PAIRS.split()[1::2], strict=True))
_TAG = re.compile(_one_of(map(re.escape, [*THINKING, *THINKING.values()])))
# A call ends the thinking where it does in vLLM (vllm/parser/qwen3.py, glm47_moe.py, mistral.py,
# minimax_m2.py, kimi_k2.py, seed_oss.py, deepseek_v4.py). Its other parsers go on thinking.
_ENDING_CALL = re.compile(
    r"<(?:minimax:|seed:)?tool_call>|\[TOOL_CALLS\]|<\|tool_calls_section_begin\|>"
    r"|<｜DSML｜(?:tool_| )calls>|<\|content_invoke_tool_json\|>"
)
# Hunyuan writes <tool_call:6124c78e> and <arg_key:6124c78e>, K2 Horizon <ifm|tool_call>.
DECORATED = re.compile(
    r"<(/?)(?:ifm\|(\w{1,16})|(think|tool_(?:calls?|sep)|arg_(?:key|value)):[^\s<>]{1,16})>"
)


def spoken(text: str) -> tuple[str, bool]:
    """What follows the thinking, and whether the text ends inside it: then, from the first call on
    that may have ended it, which counts only if it is finished, as the model may only be thinking
    about it. The opening tag is not needed: chat templates often put it into the prompt."""
    begin, opened = 0, -1
    for tag in _TAG.finditer(text):
        if tag[0] not in THINKING:
            begin, opened = tag.end(), -1
        elif opened < 0:
            opened = tag.end()
    if opened < 0:
        return text[begin:], False
    call = _ENDING_CALL.search(text, opened)
    return text[call.start() :] if call else "", True


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
    calls, in_blocks = _calls(aloud)
    runs = [what_runs(*c[:2]) for c in calls[:MAX_CALLS] if c.finished or not truncated]
    if tools := dict.fromkeys(name for names, _ in runs for name in names):
        ending = Ending.LAST if any(is_last for _, is_last in runs) else Ending.CALLS
        return Asked(ending, tuple(tools)[:MAX_CALLS], in_blocks)
    if truncated or calls or not aloud.strip():
        return CUT
    if headless and (end := _ENDED.search(aloud)):
        return Asked(Ending.CALLS, in_blocks=end["block"] is not None)
    begun = [opened.end() for opened in _BEGUN.finditer(aloud)]
    return CUT if begun and _UNNAMED.match(aloud, begun[-1]) else ANSWER


def _calls(text: str) -> tuple[list[Call], bool]:
    """The calls, and whether they are shell blocks."""
    blocks: list[Call] = []
    at = num_false = 0
    while num_false < MAX_TRIES and (opened := _OPENED.search(text, at)):
        if opened.lastgroup == "block":
            script, at, finished = _BLOCK(text, opened.end())
            blocks.append(Call("", {"command": script}, finished))
            continue
        calls = _calls_of(*_ROWS[int(str(opened.lastgroup)[3:])], text, opened.start())
        if any(clean_name(call.name) for call in calls):
            return calls, False
        at, num_false = opened.end(), num_false + 1
    return (blocks, True) if blocks else (_unmarked(text), False)


def _calls_of(begins: re.Pattern[str], read: Read, text: str, at: int) -> list[Call]:
    """The calls of one format from `at` on."""
    calls: list[Call] = []
    while len(calls) < MAX_CALLS and (opened := begins.search(text, at)):
        if begins.groups:
            call, at = _call(opened, text, read)
            calls.append(call)
            continue
        found, at = read_values(text, opened.end(), sure=True)
        calls += found
        if not found:
            break
    return calls


def _call(opened: re.Match[str], text: str, read: Read) -> tuple[Call, int]:
    at = len(text) - len(text[opened.end() :].lstrip())
    value, end, finished = (read_value if text[at : at + 1] in ("{", "[") else read)(text, at)
    return Call(opened[1], value, finished), end


def _unmarked(text: str) -> list[Call]:
    at = 0
    for _ in range(MAX_TRIES):
        if (begins := _JSON.search(text, at)) is None:
            break
        calls, at = read_values(text, begins.end(), sure=False)
        if calls:
            return calls
    if action := _REACT.search(text):  # an agent runs only the first
        return [_call(action, text, _OBSERVATION)[0]]
    first = text.lstrip()[:1]
    calls, at = read_values(text, 0, sure=False) if first != "{" else ([], 0)
    whole = text[at:].lstrip()[:1] in ("", "<")
    return calls if whole and (first == "[" or all(call.arguments for call in calls)) else []
