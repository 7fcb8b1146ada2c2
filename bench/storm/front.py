"""vLLM's API server, as far as it decides what its engine is asked: bodies in, requests out.

Real: the schemas of the four APIs, what they refuse, the sampling parameters they make, our
middleware in front. Not here: HTTP, streams, chat templates; a made-up word is a token, as in the
tiny models' vocabulary.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import HTTPException
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from bench.serve import tokenizer
from bench.serve.apis import APIS
from bench.storm.plan import MODEL, words
from continuum_connector.middleware import ProgramMiddleware

SCHEMAS = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": AnthropicMessagesRequest,
}


class RefusedError(ValueError):
    """The client's mistake, which vLLM answers with 400."""


@dataclass(frozen=True)
class Asked:
    """What an engine is asked: a prompt, its tenant's salt, how to go on."""

    tokens: list[int]
    salt: str | None
    params: SamplingParams

    def answers(self) -> list[list[int]]:
        """What a model says, one for each answer that is wanted: equal for equal prompts."""
        num, first = self.params.max_tokens, tokenizer.FIRST_WORD
        seed = zlib.crc32(repr(self.tokens[-400:]).encode())
        return [
            random.Random(f"{seed}:{number}").choices(range(first, MODEL.vocab), k=num)
            for number in range(self.params.n)
        ]

    def num_said(self, answer: Sequence[int]) -> int:
        """Tokens until a stop string is complete; all of them if none ever is."""
        stops = self.params.stop or ()
        for number, token in enumerate(answer, 1) if stops else ():
            if any(stop in text_of([token]) for stop in stops):
                return number
        return len(answer)

    def text(self, answer: Sequence[int]) -> str:
        """An answer without its stop string."""
        said = text_of(answer)
        places = [said.find(stop) for stop in self.params.stop or () if stop in said]
        return said[: min(places)] if places else said


async def read(api: str, payload: bytes, headers: Mapping[str, str], most_tokens: int) -> Asked:
    """What the engine is asked, behind our middleware; RefusedError if the answer is 400."""
    body = await _through_middleware(APIS[api].path, payload, headers)
    try:
        parsed = SCHEMAS[api].model_validate(json.loads(body))
        if api == "messages":
            parsed = AnthropicServingMessages.to_chat_completion_request(parsed)
        prompt = parsed.input if api == "responses" else getattr(parsed, "messages", None)
        tokens = _completion(parsed.prompt) if prompt is None else _chat(prompt)
        # Of a chat it is deprecated: to ask the model for it warns.
        most = vars(parsed)["max_output_tokens" if api == "responses" else "max_tokens"]
        if len(tokens) + most > most_tokens:
            raise RefusedError(f"{len(tokens)} tokens and {most} to say: more than {most_tokens}")
        return Asked(tokens, parsed.cache_salt, parsed.to_sampling_params(most, {}))
    except (ValueError, VLLMValidationError) as error:  # of the parser, of pydantic, of vLLM
        raise RefusedError(str(error)) from None


async def _through_middleware(path: str, payload: bytes, headers: Mapping[str, str]) -> bytes:
    """The body as vLLM gets it."""
    sent = {"content-type": "application/json", **headers}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    bodies: list[bytes] = []

    async def application(_scope: Any, receive: Any, _send: Any) -> None:
        bodies.append((await receive())["body"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": payload, "more_body": False}

    async def send(_message: Any) -> None:
        raise AssertionError("nobody answers here")

    try:
        await ProgramMiddleware(application)(scope, receive, send)
    except HTTPException as error:
        raise RefusedError(error.detail) from None
    return bodies[0]


# --- text and tokens ----------------------------------------------------------------------
def _completion(text: str) -> list[int]:
    return [tokenizer.BOS, *tokens_of(text)]


def _chat(messages: Sequence[Any]) -> list[int]:
    """As the tiny models' chat template has it."""
    found = [tokenizer.BOS]
    for each in messages:
        found += [_ROLES[each["role"]], *tokens_of(each["content"])]
    return [*found, _ROLES["assistant"]]


_ROLES = {
    role: tokenizer.SPECIALS.index(f"<|{role}|>")
    for role in ("system", "user", "assistant", "tool")
}


@cache
def _ids() -> dict[str, int]:
    return {word: tokenizer.FIRST_WORD + number for number, word in enumerate(words())}


def tokens_of(text: str) -> list[int]:
    """Made-up words; of anything else, such as a word that a stop string cut, its bytes."""
    known, found = _ids(), []
    for word in text.split(" "):
        token = known.get(word)
        found += [token] if token else [len(tokenizer.SPECIALS) + byte for byte in word.encode()]
    return found


def text_of(tokens: Sequence[int]) -> str:
    """Tokens of an answer, which are words."""
    return "".join(f" {words()[token - tokenizer.FIRST_WORD]}" for token in tokens)
