"""Foreign: what others record of their agents -> requests, to be played by the lab and `bench`.

Each format is told by what is in the file, never by its name. A request is a mapping with the
fields of `Request` in bench/common/workloads.py, in which bench keeps its own recordings: `trace`,
`lane`, `turn`, `inp` and `out` (tokens), `common_blocks` (of 64 tokens, in common with the lane's
request before), `think` (seconds since that was answered), `itypes` (a tool's result, or a person's
words).
"""

from __future__ import annotations

import gzip
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from continuum_connector.errors import ToldError
from continuum_connector.tools.analysis.source import is_number, reading

MAX_BYTES = 1 << 30  # of a file, unpacked
SHORTENED = 64  # a sample in a guide has a few of its ids; what none tells is text of its own
MOST = 1 << 30  # tokens of a prompt, and of an answer
ENDINGS = (".json", ".jsonl", ".traj", ".gz")
CHARS = 4  # of text per token
BLOCK = 64  # tokens of `common_blocks`
TOKEN_S = 0.03  # made up: what an answer's token took, where only arrivals are recorded
ESTIMATED = f"tokens estimated, {CHARS} characters each"
KNOWN = (
    "requests (JSON lines), Mooncake, Bailian, Weka/AgentX, SWE-agent or mini-swe-agent "
    "trajectories, OpenHands events"
)
Request = dict[str, Any]
Conversation = list[dict[str, Any]]


class Foreign(NamedTuple):
    """`format`: its name; `note`: what the file does not say and was made up; `chats`: what one
    file's requests are of, where equal text is told from other."""

    format: str
    requests: list[Request]
    note: str
    chats: Chats | None = None


class Chats(NamedTuple):
    """Conversations as they are recorded: equal `hash_ids` are equal text, whoever's it is.
    `block`: tokens of an id; `second`: of their clock."""

    talks: list[Conversation]
    block: int
    second: float


Reader = Callable[[list[Any], str], Iterable[Request] | Chats]
# Its name, what is made up, whether a file's value is of it, and who reads all of them.
Format = tuple[str, str, Callable[[Any], bool], Reader]


def read(path: Path) -> Foreign:
    """Every request of a file, or of all files in a folder. ToldError if it is of no known
    format, or not all of one."""
    named = {path: path.stem}
    if path.is_dir():  # names that are unique among its files
        files = sorted(each for each in path.rglob("*") if each.suffix in ENDINGS)
        named = {each: str(each.relative_to(path).with_suffix("")) for each in files}
    formats: dict[Format, None] = {}
    requests: list[Request] = []
    left: list[str] = []
    made_up, chats = "", None
    for file, name, documents in _conversations(named):
        kinds = (next((each for each in FORMATS if each[2](one)), None) for one in documents)
        if not (known := dict.fromkeys(each for each in kinds if each)):
            left.append(file.name)
        formats |= known
        if not known or len(formats) > 1:
            continue
        [(called, made_up, _, reads)] = formats
        try:
            found = reads(documents, name)
            if isinstance(found, Chats):
                chats, (found, untold) = found, _talks(found)
                made_up += untold
            requests += found
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ToldError(
                f"{file} looks like {called}, but is broken ({why}); nothing is read of it"
            ) from None
    if len(formats) != 1:
        mixed = f"has {', '.join(each[0] for each in formats)} mixed"
        what = mixed if formats else "is of no format that is known here"
        raise ToldError(f"{path} {what}; give one of {KNOWN}")
    if not requests:
        raise ToldError(f"{path} has no request in it, so there is nothing to play")
    without = f", without {', '.join(left)[:200]}" if left else ""
    return Foreign(called + without, requests, made_up, chats if len(named) == 1 else None)


def _conversations(named: Mapping[Path, str]) -> Iterator[tuple[Path, str, list[Any]]]:
    """Each file, its name and its values; events that have a file each are one, by their folder."""
    parts: dict[Path, tuple[str, list[Any]]] = {}
    for each, name in named.items():
        documents = _documents(each)
        if len(named) > 1 and len(documents) == 1 and _is_event(documents[0]):
            parts.setdefault(each.parent, (name, []))[1].extend(documents)
        else:
            yield each, name, documents
    for each, (name, events) in parts.items():
        yield each, name, sorted(events, key=lambda event: str(event.get("timestamp")))


def _documents(path: Path) -> list[Any]:
    """The file's JSON values: one after another, or those of a list."""
    with reading(path), path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        opened: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        data = opened.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ToldError(f"{path} has more than {MAX_BYTES >> 20} MiB, so nothing is read; cut it")
    try:
        found = msgspec.json.Decoder().decode_lines(data.removeprefix(b"\xef\xbb\xbf"))
        return found[0] if len(found) == 1 and isinstance(found[0], list) else found
    except (ValueError, RecursionError):
        raise ToldError(
            f"{path} is no JSON, and has not one JSON value per line; give one of {KNOWN}"
        ) from None


# --- an agent's requests ----------------------------------------------------------------------
class Lane:
    """One agent. Who knows what each request has in common with the one before gives its `turn`s;
    otherwise its context only grows, by what is `add`ed and `answered`."""

    def __init__(self, trace: str, lane: str = "main") -> None:
        self.trace, self.lane, self.num_turns = trace, lane, 0
        self._tokens = self._common = 0
        self._seen, self._answered = -math.inf, math.inf  # seconds of its clock

    def turn(
        self, inp: int, out: int, common: int, think: float, t: float | None = None
    ) -> Request:
        """Its next turn. `common`: tokens in common with the one before. Only the first comes from
        a person."""
        for length in (inp, out):
            if not 0 <= length <= MOST or length % 1:
                raise ValueError(f"{length} tokens are no length")
        numbers = {"turn": self.num_turns, "inp": max(1, int(inp)), "out": max(1, int(out))}
        at = {"common_blocks": common // BLOCK, "think": max(0.0, think)}
        at |= {} if t is None else {"t": t}
        kinds = ["tool_result" if self.num_turns else "text"]
        self.num_turns += 1
        return {"trace": self.trace, "lane": self.lane, **numbers, "itypes": kinds, **at}

    def add(self, num_tokens: int, at: float | None = None) -> None:
        """What others say. `at`: when, if a clock says it."""
        self._tokens += num_tokens
        self._seen = self._seen if at is None else at

    def answered(
        self, num_tokens: int, at: float | None = None, think: float = 0.0, prompt: int = 0
    ) -> Request:
        """The request for an answer of so many tokens. `prompt`: its length, if recorded; `think`:
        the gap before it, if no clock says it."""
        inp, common = prompt or self._tokens, self._common
        think = think or max(0.0, self._seen - self._answered)
        self._tokens = self._common = inp + num_tokens
        self._answered = math.inf if at is None else at
        return self.turn(inp, num_tokens, common, think)


def _numbers(one: dict[str, Any], *keys: str) -> list[Any]:
    """These fields. Raises ValueError if one is no number, or a bool."""
    for key in keys:
        if not is_number(one[key]):
            raise ValueError(f"{key} is {one[key]!r}, which is no number")
    return [one[key] for key in keys]


# --- lengths are recorded: Mooncake, Bailian, Weka. Equal hash ids are equal text -------------
def conversations(requests: Iterable[dict[str, Any]]) -> list[Conversation]:
    """Chains of requests of which each begins with the one before, but for its last block; in
    the order of their first."""

    def ends(request: dict[str, Any]) -> Iterator[Any]:
        ids = request["hash_ids"]
        return ((count, ids[count - 1]) for count in range(len(ids), 1, -1))

    def end(request: dict[str, Any]) -> Any:
        ids = request["hash_ids"]  # the last block is not full: its id is that of its text so far
        return (len(ids) - 1, ids[-2]) if len(ids) > 2 else None

    return _chains(requests, ends, end)


def _chains(
    requests: Iterable[dict[str, Any]],
    begins: Callable[[dict[str, Any]], Iterable[Any]],
    end: Callable[[dict[str, Any]], Any],
) -> list[Conversation]:
    """Each request behind the one whose `end` is the first open one of what it may begin with."""
    open_ends: dict[Any, Conversation] = {}
    found: list[Conversation] = []
    for request in requests:
        talk = next((open_ends.pop(each) for each in begins(request) if each in open_ends), None)
        if talk is None:
            talk = []
            found.append(talk)
        talk.append(request)
        if (last := end(request)) is not None:
            open_ends[last] = talk
    return found


def _talks(chats: Chats) -> tuple[list[Request], str]:
    """Their requests; and what is made up of those whose ids stand for less than half of their
    tokens, as in a sample, or in a file of larger blocks."""
    requests, num_short = [], 0
    for index, talk in enumerate(chats.talks):
        lane, before = Lane(f"chat{index}"), None
        for one in talk:
            think, common, ids = 0.0, 0, one["hash_ids"]
            at, inp, out = _numbers(one, "timestamp", "input_length", "output_length")
            if inp > SHORTENED * chats.block * (1 + len(ids)):
                of = f"its {len(ids)} hash_ids of {chats.block} tokens"
                raise ValueError(f"input_length is {inp:,}, far beyond {of}")
            num_short += inp > 2 * chats.block * (1 + len(ids))
            if before is not None:
                away_s = (at - before["timestamp"]) / chats.second
                think = max(0.0, away_s - before["output_length"] * TOKEN_S)
                common = _shared(before["hash_ids"], ids) * chats.block
            hash(tuple(ids))  # a TypeError, where one is no id
            made = lane.turn(inp, out, common, think, at / chats.second)
            requests.append(made | {"itypes": ["text"]})
            before = one
    short = f", that {num_short:,} requests share only what their few hash_ids say"
    return requests, short if num_short else ""


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two lists begin with in common."""
    same = (a == b for a, b in zip(one, other, strict=False))
    return sum(itertools.takewhile(bool, same))


def _bailian(documents: list[Any], _: str) -> Chats:
    """Each request names the one that it goes on from."""
    asked = sorted(documents, key=lambda one: one["timestamp"])
    talks = _chains(asked, lambda one: [one["parent_chat_id"]], lambda one: one["chat_id"])
    return Chats(talks, 16, 1.0)


def _mooncake(documents: list[Any], _: str) -> Chats:
    return Chats(conversations(sorted(documents, key=lambda one: one["timestamp"])), 512, 1e3)


def _requests(documents: list[Any], _: str) -> Iterator[Request]:
    for one in documents:
        _numbers(one, "inp", "out")
        yield one


def _weka(documents: list[Any], stem: str) -> Iterator[Request]:
    for index, one in enumerate(documents):
        lane = Lane(str(one.get("id") or f"{stem}{index}"))
        yield from _agent(lane, one["requests"], int(one.get("block_size", BLOCK)))


def _agent(lane: Lane, requests: list[Any], block: int) -> Iterator[Request]:
    """A sub-agent stands among its parent's requests, with requests of its own."""
    before: dict[str, Any] = {}
    for index, one in enumerate(requests):
        if isinstance(one.get("requests"), list):
            name = f"{lane.lane}/{one.get('agent_id') or one.get('id') or index}"
            yield from _agent(Lane(lane.trace, name), one["requests"], block)
            continue
        times = [key for key in ("t", "think_time", "api_time") if one.get(key) is not None]
        inp, out, *_ = _numbers(one, "in", "out", *times)
        shared = _shared(before.get("hash_ids") or (), one.get("hash_ids") or ())
        ended = before.get("t", 0.0) + (before.get("api_time") or 0.0)
        think = one.get("think_time")
        if think is None:
            think = max(0.0, one.get("t", ended) - ended) if before else 0.0
        made = lane.turn(inp, out, shared * block, think, one.get("t", 0.0))
        kinds = one.get("input_types")
        yield made | ({"itypes": kinds} if isinstance(kinds, list) else {})
        before = one


# --- texts are recorded: their tokens are estimated where none were counted -------------------
def _tokens(content: Any) -> int:
    """Of a message's content, its parts or what an event holds."""
    if content is None:
        return 0
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return -(-len(text) // CHARS)


def _when(message: Mapping[str, Any]) -> float | None:
    """Seconds of a message's clock."""
    extra = message.get("extra")
    found = message.get("timestamp") or (extra.get("timestamp") if isinstance(extra, dict) else "")
    if is_number(found):
        return float(found) / (1e3 if found > 1e11 else 1.0)  # type: ignore[arg-type,operator]
    try:
        return datetime.fromisoformat(str(found)).timestamp()
    except ValueError:
        return None


def _swe_agent(documents: list[Any], stem: str) -> Iterator[Request]:
    """A step's response is a turn, its observation what the next one adds."""
    for one in documents:
        lane, ran_s = Lane(stem), 0.0
        asked = itertools.takewhile(
            lambda message: message.get("role") != "assistant", one.get("history") or ()
        )
        lane.add(sum(_tokens(message.get("content")) for message in asked))
        for step in one["trajectory"]:
            yield lane.answered(_tokens(step.get("response")), think=ran_s)
            lane.add(_tokens(step.get("observation")))
            ran_s = float(step.get("execution_time") or 0.0)


def _messages(documents: list[Any], stem: str) -> Iterator[Request]:
    """mini-swe-agent, and other lists of messages as they are sent; of the Responses API, too."""
    for index, one in enumerate(documents):
        told = one["messages"]
        told = msgspec.json.decode(told) if isinstance(told, str) else told
        lane = Lane(str(one.get("instance_id") or one.get("traj_id") or f"{stem}-{index}"))
        for message in told:
            size = sum(_tokens(message.get(key)) for key in ("content", "tool_calls", "output"))
            is_response = message.get("object") == "response"
            if message.get("role") == "assistant" or is_response:
                told_by = message if is_response else (message.get("extra") or {}).get("response")
                usage = (told_by or {}).get("usage") or {}
                out = usage.get("completion_tokens") or usage.get("output_tokens")
                prompt = usage.get("prompt_tokens") or usage.get("input_tokens")
                yield lane.answered(out or size, _when(message), prompt=prompt or 0)
            else:
                lane.add(size, _when(message))
        if not lane.num_turns and told:  # it was asked, and the answer is not in the file
            yield lane.answered(1)


_V0_TEXTS = ("message", "content", "args")
_V1_TEXTS = (
    *("system_prompt", "tools", "llm_message", "thought", "reasoning_content", "tool_call"),
    *("observation", "error"),
)


def _open_hands(documents: list[Any], stem: str) -> Iterator[Request]:
    """An action of the agent is a turn; what others say is what the next one adds."""
    runs = documents if "history" in documents[0] else [{"history": documents}]
    for index, one in enumerate(runs):
        lane, last = Lane(str(one.get("instance_id") or f"{stem}-{index}")), ""
        for event in one["history"]:
            called = event.get("tool_call_metadata") or {}
            answer = called.get("model_response") or {}
            usage = answer.get("usage") or {}
            answer_id = str(event.get("llm_response_id") or answer.get("id") or event.get("id"))
            kind = event.get("kind")  # from version 1 on
            size = sum(_tokens(event.get(key)) for key in (_V1_TEXTS if kind else _V0_TEXTS))
            is_turn = "action" in event or kind == "MessageEvent"
            is_turn = is_turn and event.get("source") == "agent"
            if not is_turn or event.get("action") in ("system", "recall", "condensation"):
                lane.add(size, _when(event))
            elif answer_id != last:  # several actions of one answer are one turn
                out, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
                yield lane.answered(out or size, _when(event), prompt=prompt or 0)
                last = answer_id


def _is_event(one: Any) -> bool:
    is_one = isinstance(one, dict) and "source" in one
    return is_one and bool({"action", "observation", "kind"} & {*one})


def _is_open_hands(one: Any) -> bool:
    told = one.get("history") if isinstance(one, dict) else None
    return _is_event(told[0] if isinstance(told, list) and told else one)


# --- which is which ----------------------------------------------------------------------------
def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda one: isinstance(one, dict) and all(key in one for key in keys)


_ASKED = ("timestamp", "input_length", "output_length", "hash_ids")
_ANSWERED = f"answers at {TOKEN_S} s a token"
FORMATS: tuple[Format, ...] = (
    ("requests", "", _has("trace", "lane", "inp", "out"), _requests),
    ("Bailian", _ANSWERED, _has("chat_id", "parent_chat_id"), _bailian),
    ("Mooncake", f"who asked, and {_ANSWERED}", _has(*_ASKED), _mooncake),
    ("Weka", "", _has("requests"), _weka),
    ("SWE-agent", ESTIMATED, _has("trajectory"), _swe_agent),
    ("OpenHands", f"{ESTIMATED}, unless counted", _is_open_hands, _open_hands),
    ("messages", f"{ESTIMATED}, unless counted", _has("messages"), _messages),
)
