"""Written: trajectories of agents, with their texts -> requests (recorded.py), whose tokens are
estimated where none were counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from continuum_connector.tools.analysis.recorded import Lane, Request
from continuum_connector.tools.analysis.source import is_number

CHARS = 4  # of text per token


def _tokens(content: Any) -> int:
    """Of a message's content, its parts or what an event holds."""
    if content is None:
        return 0
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return -(-len(text) // CHARS)


class _Talk(Lane):
    """A context that only grows: what was in it before is common. `at`: seconds of its clock."""

    _tokens = _common = 0
    _seen, _answered = -math.inf, math.inf

    def add(self, num_tokens: int, at: float | None = None) -> None:
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


def swe_agent(documents: list[Any], stem: str) -> Iterator[Request]:
    """A step's response is a turn, its observation what the next one adds."""
    for one in documents:
        talk = _Talk(stem)
        for message in one.get("history") or ():
            if message.get("role") == "assistant":
                break
            talk.add(_tokens(message.get("content")))
        ran_s = 0.0
        for step in one["trajectory"]:
            yield talk.answered(_tokens(step.get("response")), think=ran_s)
            talk.add(_tokens(step.get("observation")))
            ran_s = float(step.get("execution_time") or 0.0)


def messages(documents: list[Any], stem: str) -> Iterator[Request]:
    """mini-swe-agent, and other lists of messages as they are sent."""
    every = documents[0] if isinstance(documents[0], list) else documents
    for index, one in enumerate(every):
        told = one["messages"]
        told = msgspec.json.decode(told) if isinstance(told, str) else told
        name = one.get("instance_id") or one.get("traj_id") or f"{stem}-{index}"
        talk = _Talk(str(name))
        for message in told:
            size = _tokens(message.get("content")) + _tokens(message.get("tool_calls"))
            if message.get("role") == "assistant":
                yield talk.answered(size, _when(message))
            else:
                talk.add(size, _when(message))
        if not talk.num_turns and told:  # it was asked, and the answer is not in the file
            yield talk.answered(1)


def _when(message: Mapping[str, Any]) -> float | None:
    """Seconds of a message's clock."""
    extra = message.get("extra") if isinstance(message.get("extra"), dict) else {}
    found = message.get("timestamp") or extra.get("timestamp")  # type: ignore[union-attr]
    if is_number(found):
        return float(found)  # type: ignore[arg-type]
    try:
        return datetime.fromisoformat(str(found)).timestamp()
    except ValueError:
        return None


def open_hands(documents: list[Any], stem: str) -> Iterator[Request]:
    """An action of the agent is a turn; what others say is what the next one adds."""
    for index, one in enumerate(_runs(documents)):
        name = one.get("instance_id") or f"{stem}-{index}"
        talk, last = _Talk(str(name)), ""
        for event in one["history"]:
            called = event.get("tool_call_metadata") or {}
            answer = called.get("model_response") or {}
            usage, answer_id = answer.get("usage") or {}, str(answer.get("id") or event.get("id"))
            size = sum(_tokens(event.get(key)) for key in ("message", "content", "args"))
            is_turn = event.get("source") == "agent" and "action" in event
            if not is_turn or event.get("action") in ("system", "recall", "condensation"):
                talk.add(size, _when(event))
            elif answer_id != last:  # several actions of one answer are one turn
                out, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
                yield talk.answered(out or size, _when(event), prompt=prompt or 0)
                last = answer_id


def _runs(documents: list[Any]) -> list[Any]:
    """Runs with their events: a list of events is one, as is one event per line."""
    if isinstance(documents[0], list):
        return [{"history": each} for each in documents]
    return documents if "history" in documents[0] else [{"history": documents}]


def is_open_hands(one: Any) -> bool:
    first = one["history"] if isinstance(one, dict) and "history" in one else one
    first = first[0] if isinstance(first, list) and first else first
    return (
        isinstance(first, dict) and "source" in first and bool({"action", "observation"} & {*first})
    )
