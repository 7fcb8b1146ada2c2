"""Tool calls: what a finished turn's text asks for, in whichever format it is written.

FORMATS says what begins a call. Its arguments are read the same way in every format: as a value in
brackets, else as members in tags, else as text; what is in them, such as a file about calls, is no
call. Without a call outside shell blocks the calls are the blocks, else what UNMARKED finds first.
A tool that runs a shell is read as the commands in its script. Everything is linear in the text and
never raises.

ToolReader reads that from a turn's last output tokens.
"""

from __future__ import annotations

import enum
import logging
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")

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
BEGINNINGS = (
    *(*VALUE_MARKERS, DEEPSEEK, KIMI, "=functions."),
    *("<|tool_call>", "<start_function_call>", "<minimax:tool_call>", "<seed:tool_call>"),
)
ENDS = ("</tool_call>", "<｜tool▁call▁end｜>", "<|tool_call_end|>")
# attempt_completion and ask_followup_question are left out, because they speak to a person.
AGENT_TOOLS = (
    "execute_command|read_file|write_to_file|replace_in_file|apply_diff|insert_content|"
    "search_and_replace|search_files|list_files|list_code_definition_names|codebase_search|"
    "browser_action|use_mcp_tool|access_mcp_resource|fetch_instructions|new_task|switch_mode|"
    "web_fetch|update_todo_list|generate_image|edit_file"
)
_NO_TOOL = "(?:self|user|commentary|developer|assistant)"  # to whom Muse thinks and speaks
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
    rf"{re.escape(KIMI)}{_S}{_NAME}{_S}<\|tool_call_argument_begin\|>": "kimi",
    rf"<(?:\|tool_call|start_function_call)>(?:call)?:{_NAME}(?={{)": "agents",  # Gemma
    r"<\|(python)_tag\|>": "llama",  # its code interpreter
    # gpt-oss and Muse, whose messages are calls if they have a recipient
    rf"{_TO}(?:<\|(?:channel|constrain)\|>[^<]{{0,64}}){{0,2}}<\|message\|>": "harmony",
    # Qwen3-Coder, Llama 3.1: <function=name>; Anthropic, MiniMax, DeepSeek V3.2: <invoke name="x">
    rf"<{_PRE}(?:(?:function|invoke){_S}name|function){_S}={_S}{_NAME}{_S}>": "xml_invoke",
    rf"<tool_call>{_S}{_NAME}(?={_S}<(?:arg_key|tool_sep|/tool_call)>)": "glm",
    rf"<\|open\|>call{_S}{_ANY}tool={_NAME}(?=[\s<]){_ANY}<\|sep\|>": "other_markers",  # Kimi K3
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
           | (?=(?!tool_sep)[a-z_]+>) )["']?(?P<key>[^"'<>\n]{{1,128}}(?=["'<>]))["']?
         (?: {_ANY}(?:<\|sep\|)?> | </arg_key>{_S}(?:<arg_type>{_ANY}</arg_type>{_S})?<arg_value> )
         (?P<value>[^<]*(?:<(?!/(?:{_PARAMETER}|arg_value|(?P=key))>|\|close\|>argument<)[^<]*)*)
       | {_INVOKE_END} | </(?:tool_call|{AGENT_TOOLS})> | <\|close\|>call< | \nObservation
       | <\|(?:end|call|return|eo[mt](?:_id)?)\|>""",
    re.VERBOSE,
)
# A call whose name comes after the end of the text; one that began before the text, or its fence.
_BEGUN = _any(*map(re.escape, BEGINNINGS))
_UNNAMED = re.compile(r"\s{0,64}(?:[\[{][^\]}]*|[^\s`]{0,128}\s{0,8})\Z")
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
NAMES = ("name", "tool_name", "action")  # LangChain's
ARGUMENTS = ("arguments", "parameters", "args", "action_input")


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
    items = members.get("commands")  # typed into Terminal-Bench's terminal
    if isinstance(items, list) and all(isinstance(item, dict) for item in items):
        waits = any(str(item.get("duration"))[:1] in "123456789" for item in items)
        if waits or not (items or members.get("task_complete") == "true"):  # it is left alone
            items.append({"keystrokes": "sleep"})
        return [("", item, is_whole) for item in items]
    name = next(filter(clean_name, map(members.get, NAMES)), None)
    if name is None:  # perhaps {"get_weather": {"city": ...}}, as Apertus writes it
        sole = members.items() if sure and len(members) == 1 else ()
        return [(key, given, is_whole) for key, given in sole if isinstance(given, dict)]
    given = [members[key] for key in ARGUMENTS if not isinstance(members.get(key, []), list)]
    given += [members] if sure else []
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
    "to=self<|message|>": "<|eom|><|start|>",
}
# A call ends the thinking where it does in vLLM (vllm/parser/qwen3.py, glm47_moe.py, mistral.py,
# minimax_m2.py, kimi_k2.py, seed_oss.py, deepseek_v4.py). Its other parsers go on thinking.
_ENDING_CALL = re.compile(
    r"<(?:minimax:|seed:)?tool_call>|\[TOOL_CALLS\]|<\|tool_calls_section_begin\|>"
    r"|<｜DSML｜(?:tool_| )calls>|<\|content_invoke_tool_json\|>"
)
# Hunyuan writes <tool_call:6124c78e> and <arg_key:6124c78e>, K2 Horizon <ifm|tool_call>, MiniMax M3
# <mm:think> and ]<]minimax[>[<tool_call>.
DECORATED = re.compile(
    r"<(/?)(?:(?:ifm\||mm:)(\w{1,16})|(think|tool_calls?|arg_(?:key|value)):[^\s<>]{1,16})>"
)


def _begins_before(text: str, at: int) -> bool:
    return (first := _MARKED.search(text)) is not None and first.start() < at


def spoken(text: str) -> tuple[str, bool]:
    """What follows the thinking, and whether the text ends inside it: then, from the first call on
    that may have ended it, which counts only if it is finished, as the model may only be thinking
    about it. The opening tag is not needed: chat templates often put it into the prompt."""
    said, end = text, len(text)
    for _ in range(MAX_TRIES):
        closed = [(text.rfind(tag, 0, end), tag) for tag in THINKING.values() if tag in text]
        begin = max([at + len(tag) for at, tag in closed if at >= 0], default=0)
        said, end = text[begin:], begin - 1
        ended = _ENDED.search(said) if begin else None
        if ended is None or ended.lastgroup or _begins_before(said, ended.start()):
            break  # else the tag is in the arguments of a call that ends behind it
    opened = [said.find(tag) + len(tag) for tag in THINKING if tag in said]
    if not opened or _begins_before(said, min(opened)):
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
    aloud, in_thinking = spoken(DECORATED.sub(r"<\1\2\3>", text.replace("]<]minimax[>[", "")))
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


# --- what a call runs --------------------------------------------------------------------
# Its tool, or, if that runs a shell, the commands that take time, by name. `cd`, assignments and
# the like are dropped if there is another command. Wrappers (`sudo`, `timeout 60`, `uv run`,
# `bash -c "..."`) count as what they run. Filters after a pipe do not count, because they take as
# long as what feeds them. A script is split in one linear pass that respects quotes and heredocs.
# Nothing here raises: what bash would refuse is read as far as possible.
MAX_CALLS = 8  # per turn; the longest call counts, and it is hardly ever the ninth
MAX_NAME = 64  # characters
MAX_SHELLS = 3  # of bash -c "bash -c ..."
MAX_COMMANDS, MAX_HEREDOCS = 32, 4  # read of one script, of one line
MAX_WORDS = 256  # words, redirections and separators; each costs a microsecond
# Such as functions.bash:0.
_TOOL_NAME = re.compile(r"(?:functions?[.:])?([A-Za-z_./][\w.+\-/@:]*?)(?::\d+)?")
_WORD = (  # $((1 + 2)) and ((1 < 2)), all=(a b)
    r"""(?:[^\s'"\\;&|<>()`$]+|\$(?!\()|\$?\(\([^()]*\)\)|(?<==)\([^()]*\)"""
    r"""|'[^']*'?|"(?:[^"\\]+|\\.)*"?|\\.)+"""
)
_SHELL_TOKEN = re.compile(
    rf"""(?:[ \t\r]+|\\\n|\#[^\n]*)*
         (?: <<-?[ \t]*['"\\]?(?P<heredoc>[\w.\-]+)['"]?
           | [\d&]?(?:<<<|[<>]>?[&|]?)[ \t]*(?:{_WORD})?  # a redirection and its target
           | (?P<word>{_WORD})
           | (?P<end>[\n;&()`]|\|[|&]?)
           | . | \Z )""",
    re.VERBOSE | re.DOTALL,
)
_QUOTES = re.compile(r"'([^']*)'?|\"((?:[^\"\\]+|\\.)*)\"?|\\(.)", re.DOTALL)

_SHELLS = "bash|sh|zsh|dash|ash"
_RUNNERS = "uv|poetry|pipenv|pdm|hatch|rye|conda|(?:micro)?mamba|bundle"  # uv run x
_WRAPPERS = (
    "sudo|doas|env|g?timeout|time|nice|ionice|taskset|stdbuf|unbuffer|xargs|nohup|setsid|command|"
    "builtin|exec|npx|bunx|uvx"
)
_WITH_VALUE = (  # those of their options whose value may be no number
    "-[ugCUsSkfoIda]|--(?:signal|kill-after|package|from|with|name|python|extra|group|project)"
)
_INSTANT = (
    r"cd|pushd|popd|source|\.|export|set|unset|shopt|alias|true|false|:|ulimit|umask|trap|local|"
    "declare|readonly|read|let|echo|printf|test|exit|return|break|continue|mkdir|touch|pwd|clear"
)
# After a pipe, these take as long as what feeds them.
_FILTERS = "head|tail|[ef]?grep|rg|sed|awk|sort|uniq|wc|cut|tr|tee|cat|less|more|jq"
# A command, a NUL behind each of its words: what may come before its name, then what it runs.
_COMMAND = re.compile(
    rf"""(?: (?:if|then|else|elif|while|until|do|!|{{)\0
           | [A-Za-z_]\w*=[^\0]*\0
           | (?:[^\0]*/)?(?P<wrapper>{_WRAPPERS}|(?P<runner>{_RUNNERS})\0(?:run|exec))\0
             (?:(?:{_WITH_VALUE}|(?(runner)-[np]|(?!)))\0[^\0]*\0|[-$\d][^\0]*\0)* )*
         (?: (?P<instead>for|case|select|fi|done|esac|function)\0
           | (?:[^\0]*/)?(?:eval|(?:{_SHELLS})\0(?:[^\0]*\0){{0,2}}?-[a-z]*c)\0(?P<script>[^\0]+)
           | (?:(?:[^\0]*/)?python[\d.]*\0(?:-[WX]\0[^\0]*\0|-[^\0]*\0)*?-m\0)?(?:[^\0]*/)?
             (?P<name> (?P<instant>{_INSTANT})(?=\0) | (?P<filter>{_FILTERS})(?=\0)
                     | (?:python|pip|pypy)(?=[\d.]+\0) | [^\0]* ) )""",
    re.VERBOSE,
)
SCRIPT_KEYS = ("command", "cmd", "script", "keystrokes", "bash_command", "shell_command")
NO_SHELL_KEYS = {"path", "file_path", "file_text", "old_str"}  # of an editor's `command`
# Calls by which public agents say that they are done: OpenHands', mini-swe-agent's.
LAST_TOOL = "finish"
LAST_WORDS = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # echoed


def what_runs(name: str, arguments: object) -> tuple[list[str], bool]:
    """The names of what a call runs, none if it has no name yet; and whether an agent says with it
    that it is done, so that no turn follows. A shell block has no name itself."""
    name, script = clean_name(name), None
    if isinstance(arguments, dict):
        if name == "use_mcp_tool":  # Cline
            name = clean_name(arguments.get("tool_name"))
        if not re.search("edit|track", name) and not NO_SHELL_KEYS & arguments.keys():
            script = next((arguments[key] for key in SCRIPT_KEYS if key in arguments), None)
    elif re.fullmatch(f"{_SHELLS}|shell|terminal", name.lower()):
        script = arguments
    if isinstance(script, list):  # argv, as Codex sends it: ["bash", "-lc", "pytest -q"]
        script = shlex.join(word for word in script if isinstance(word, str))
    own = [name] if name else []
    if not isinstance(script, str):
        return own, name == LAST_TOOL
    last = f"echo\0{LAST_WORDS}\0" if LAST_WORDS in script else None  # most scripts are split once
    is_last = last is not None and any(line == last for line, _ in _commands(script))
    return _slow_commands(script) or own, is_last


def _slow_commands(script: str, depth: int = 0) -> list[str]:
    """Names of the commands that take time, each once, in order; the last command if none does, as
    it is what the script is for: `export A=1; echo $A`."""
    slow: dict[str, None] = {}
    quick = ""
    for line, is_piped in islice(_commands(script), MAX_COMMANDS):
        command = _COMMAND.match(line)
        if command is None or command["instead"]:  # a keyword that no command follows
            continue
        if command["script"] and depth < MAX_SHELLS:
            slow |= dict.fromkeys(_slow_commands(command["script"], depth + 1))
            continue
        wrapper = (command["wrapper"] or "").partition("\0")[0]
        name = clean_name(command["name"] or wrapper)
        if command["instant"] or (command["filter"] and is_piped and not wrapper):
            quick = name or quick
        elif name:
            slow[name] = None
    return list(slow)[:MAX_CALLS] or ([quick] if quick else [])


def _commands(script: str) -> Iterator[tuple[str, bool]]:
    """Each simple command, its words with a NUL behind each, and whether it reads the output of
    another one, in order."""
    line, heredocs = "", list[str]()
    at, is_piped = 0, False
    for _ in range(MAX_WORDS):
        if at == len(script) or (token := _SHELL_TOKEN.match(script, at)) is None:
            break
        at, kind, text = token.end(), token.lastgroup, token[token.lastgroup or 0]
        if kind == "word":
            line += _QUOTES.sub(lambda each: each[1] or each[2] or each[3] or "", text) + "\0"
        elif kind == "heredoc":
            heredocs.append(re.escape(text))
        elif kind == "end":
            if line:
                yield line, is_piped
            # What comes behind `)` is no command: ")" has no name.
            line, is_piped = ")\0" if text == ")" else "", text in ("|", "|&")
            for mark in heredocs[:MAX_HEREDOCS] if text == "\n" else ():
                end = re.compile(rf"^\t*{mark}(?:\n|\Z)", re.MULTILINE).search(script, at)
                at, heredocs = end.end() if end else len(script), []
    yield line, is_piped


def clean_name(name: object) -> str:
    """A tool's name as the statistics have it, without namespace and index; "" if it is no name."""
    if not isinstance(name, str):
        return ""
    match = _TOOL_NAME.fullmatch(name[: 2 * MAX_NAME].strip().strip("\"'`"))
    return match[1][:MAX_NAME] if match else ""


# --- from tokens, in the engine's step -----------------------------------------------------
TAIL_TOKENS = 512  # calls are short
HEAD_TOKENS = 128  # read of a call that began before the tail: its name, and most of its keys
LOOK_BACK_TOKENS = 4096  # how far back we search for its beginning, by token id
PROMPT_TOKENS = 1024  # of a prompt's beginning, where agents say what they want
STOP_TOKENS = 64  # stop strings are short; async scheduling adds a few tokens after them
BUDGET_S = 0.75e-3  # per step


class ToolReader:
    """Reads what turns said. For each whose tool calls it does not read, it reports the reason.

    Decoding and parsing happen in the scheduler's step: no reading begins there once they have
    taken BUDGET_S, and on a machine where one would take longer, fewer tokens are read. The
    server's tokenizer is loaded by a thread when somebody needs it. That takes seconds and hundreds
    of MB, so it happens once and nobody waits for it.
    """

    def __init__(
        self, load: Callable[[], Any], timer: Callable[[], float], not_read: Callable[[str], None]
    ) -> None:
        """`load` returns the tokenizer, or None if the server runs without one. `timer`:
        time.perf_counter, or a fake. `not_read`: called with a reason of WHY_UNREAD."""
        self._load = load
        self._timer = timer
        self._told = not_read
        self._thread: threading.Thread | None = None
        self._tokenizer: Any = None  # None until it is loaded, or if it cannot be
        self._spent_s = 0.0  # in this step
        self._num_tail = TAIL_TOKENS
        self._kinds: Mapping[int, str] = {}  # the first letter of each, by id

    def start(self) -> None:
        """Begin to load the tokenizer, once; call it when the first turn arrives that is to be
        read."""
        if self._thread is None:
            name = "continuum-tokenizer"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for the tokenizer; for callers that have the time, after `start`."""
        assert self._thread is not None
        self._thread.join()

    def new_step(self) -> None:
        """A step of the engine begins."""
        self._spent_s = 0.0

    def read(self, output_token_ids: Sequence[int], *, truncated: bool = False) -> Asked:
        """Say what the turn with this output asks for. It never raises.

        `truncated`: the turn ended at its token limit or at the model's.
        """
        if self._tokenizer is None:
            return self._not_read("no_tokenizer")
        if not output_token_ids:
            return CUT
        if self._spent_s >= BUDGET_S:
            return self._not_read("no_time")
        begin_s = self._timer()
        try:
            token_ids, is_cut, headless = self._choose(output_token_ids)
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
            return parse(text, truncated=truncated and not is_cut, headless=headless)
        except Exception:  # a tokenizer may raise on any id; the step must go on
            return self._not_read("error")
        finally:
            self._spent_s += self._timer() - begin_s

    def asks_for_blocks(self, prompt_token_ids: Sequence[int] | None) -> bool:
        """Whether a prompt's beginning speaks of shell blocks, as the instructions of agents that
        run them do, and a person's question does not. It never raises."""
        begin_s = self._timer()
        try:
            text = self._tokenizer.decode(list((prompt_token_ids or ())[:PROMPT_TOKENS]))
        except Exception:
            return False
        finally:
            self._spent_s += self._timer() - begin_s
        return re.search(rf"{BLOCK}\b", text) is not None

    # --- turns with stop strings ------------------------------------------------------------
    # vLLM matches them in the API server, which then aborts the request: for the scheduler it ends
    # as FINISHED_ABORTED, as when its client goes away (v1/engine/output_processor.py). The text
    # tells one from the other.
    def arrived(self, request: Any) -> None:
        """A turn arrives; if it has stop strings, begin to load the tokenizer."""
        if _stop_strings(request):
            self.start()

    def went_away(self, request: Any) -> bool:
        """Whether an aborted turn's client is gone.

        If the turn has no stop strings, it is. Otherwise the text decides. While the tokenizer is
        not loaded, the turn counts as ended, because a pin is a preference and expires by itself.
        """
        stops = _stop_strings(request)
        if not stops or not request.num_output_tokens:
            return True
        try:
            text = self._tokenizer.decode(list(request.output_token_ids[-STOP_TOKENS:]))
        except Exception:  # there is none, or it raises; the step must go on
            return False
        return not any(stop in text for stop in stops)

    # --- parts ---------------------------------------------------------------------------
    def _choose(self, output_token_ids: Sequence[int]) -> tuple[list[int], bool, bool]:
        """Choose the tokens to decode: those after the thinking, from the first call on. Thinking
        that does not end is decoded with its opening tag, as a call may have ended it.

        Also return whether the end of a call is left out, and whether the beginning is missing.
        """
        tail, kinds = list(output_token_ids[-self._num_tail :]), self._kinds
        marks = "".join([kinds.get(token, ".") for token in tail])
        begin = max(marks.rfind("m"), *(each.end() for each in _SPOKE.finditer(marks)), 0)
        if first := re.compile("[tc]").search(marks, begin):
            return tail[first.start() :], False, False
        is_longer = len(output_token_ids) > len(tail)
        ends = "e" in marks[begin:]
        earlier = list(output_token_ids[-LOOK_BACK_TOKENS : -len(tail)]) if is_longer else []
        # A call that begins before the tail, and ends in it or, as Mistral's, with the turn.
        if (ends or not begin) and not kinds.keys().isdisjoint(earlier):
            before = "".join([kinds.get(token, ".") for token in earlier])
            call = before.rfind("c")
            if call >= 0 and (ends or not re.search("[tsem]", before[call:])):
                return (earlier[call:] + tail)[:HEAD_TOKENS], ends, False
        return tail[begin:], False, is_longer and begin == 0

    def _not_read(self, reason: str) -> Asked:
        self._told(reason)
        return UNREAD

    def _run(self) -> None:
        try:
            tokenizer = self._load()
            if tokenizer is not None:
                self._warm_up(tokenizer)
            self._tokenizer = tokenizer
        except Exception as error:
            logger.warning(
                "ContinuumConnector cannot load the tokenizer (%s), so tool calls stay unread "
                "and a client that disconnects looks like a stop string: such turns are kept "
                "until their TTL; let --tokenizer name one that this process can read, or "
                "declare `tools` in each request",
                error,
            )

    def _warm_up(self, tokenizer: Any) -> None:
        """Learn the markers, and how many tokens the budget allows."""
        self._kinds = {token: kind[0] for token, kind in kinds_of(tokenizer).items()}
        durations_s = []
        with suppress(Exception):  # the vocabulary is smaller
            for _ in range(3):  # the first is slow, and one may be interrupted
                begin_s = self._timer()
                parse(tokenizer.decode(list(range(TAIL_TOKENS)), skip_special_tokens=False))
                durations_s.append(self._timer() - begin_s)
            affordable = TAIL_TOKENS * BUDGET_S / max(min(durations_s), 1e-9)
            self._num_tail = int(min(TAIL_TOKENS, max(HEAD_TOKENS, affordable)))


KINDS = {"call": BEGINNINGS, "end": ENDS, "think": THINKING, "speak": THINKING.values()}
_SPOKE = re.compile("s(?![^c]*e)")  # not in a call's arguments
MESSAGE, CHANNEL = "<|start|>", "<|channel|>"  # harmony's messages begin; only it has both


def kinds_of(tokenizer: Any) -> dict[int, str]:
    """What the markers in a tokenizer's vocabulary are, by id; vLLM's tokenizers keep a copy. A
    marker that is spelled out in several tokens has no id."""
    try:
        vocabulary = tokenizer.get_vocab()
    except Exception:  # no tokenizer of vLLM's; its texts are then read from their end
        return {}
    kinds = [(kind, [each for each in KINDS[kind] if each[0] in "<["]) for kind in KINDS]
    kinds.append(("message", [MESSAGE] if CHANNEL in vocabulary else []))
    return {vocabulary[each]: kind for kind, all_ in kinds for each in all_ if each in vocabulary}


def _stop_strings(request: Any) -> list[str]:
    params = request.sampling_params
    stop = params.stop if params is not None else None
    return [stop] if isinstance(stop, str) else list(stop or ())
