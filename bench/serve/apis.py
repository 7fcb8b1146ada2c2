"""The four generating APIs: where each is, what it is sent, and where the text is in its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GeneratingApi:
    """One way to ask for text. `body` takes texts of user and assistant in turn, and a length."""

    path: str
    body: Callable[[Sequence[str], int], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]


def _chat(history: Sequence[str]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(history)]


APIS = {
    "chat": GeneratingApi(
        "/v1/chat/completions",
        lambda history, n: {"messages": _chat(history), "max_tokens": n},
        lambda answer: str(answer["choices"][0]["message"]["content"]),
    ),
    "completions": GeneratingApi(
        "/v1/completions",
        lambda history, n: {"prompt": "".join(history), "max_tokens": n},
        lambda answer: str(answer["choices"][0]["text"]),
    ),
    "responses": GeneratingApi(
        "/v1/responses",
        lambda history, n: {"input": _chat(history), "max_output_tokens": n, "store": False},
        lambda answer: str(answer["output"][-1]["content"][0]["text"]),
    ),
    "messages": GeneratingApi(
        "/v1/messages",
        lambda history, n: {"messages": _chat(history), "max_tokens": n},
        lambda answer: str(answer["content"][0]["text"]),
    ),
}
