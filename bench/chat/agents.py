"""Agents that chat through the OpenAI client, messages in and words out, all at once, with notes.

What an agent framework does, template and streaming included; `bench/serve` sends token ids, so
that every way to serve computes exactly the same.

Each one sends its context, streams the answer, runs its tool (a real pause), and sends the
longer context again. `job_id`, `is_last_step` and, where it is told, the tool that runs next travel
in `vllm_xargs`; stock vLLM takes no notice of them, so both arms get the same requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from bench.chat.plan import ProgramPlan, TurnPlan
from bench.serve.server import SERVED_NAME

REQUEST_TIMEOUT_S = 300.0


@dataclass
class TurnRecord:
    """One request as its client saw it. `error` is empty when all went well."""

    program: str
    index: int
    started_s: float
    ttft_s: float = 0.0
    latency_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    answer: str = ""
    error: str = ""


@dataclass
class ProgramRecord:
    """One agent run, from its arrival to the end of its last turn, tools included."""

    program: str
    arrival_s: float
    jct_s: float = 0.0
    turns: list[TurnRecord] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """A program ends at its first error; its JCT says nothing then."""
        return any(turn.error for turn in self.turns)


OnTurn = Callable[[TurnRecord], None]


async def run_agents(
    url: str, plans: Sequence[ProgramPlan], on_turn: OnTurn | None = None, tool: str = ""
) -> list[ProgramRecord]:
    """Run every program at its time; return their records when the last one is done.

    `tool`: said to run after each turn; a random model writes no tool calls that could be read.
    """
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
    ) as client:
        began = time.monotonic()
        runs = (_run_program(client, plan, began, on_turn, tool) for plan in plans)
        return list(await asyncio.gather(*runs))


async def _run_program(
    client: AsyncOpenAI, plan: ProgramPlan, began: float, on_turn: OnTurn | None, tool: str
) -> ProgramRecord:
    await asyncio.sleep(began + plan.arrival_s - time.monotonic())
    arrived = time.monotonic()
    record = ProgramRecord(plan.name, plan.arrival_s)
    messages: list[dict[str, str]] = []
    for index, turn in enumerate(plan.turns):
        await asyncio.sleep(turn.pause_s)
        messages.append({"role": turn.role, "content": turn.text})
        done = TurnRecord(plan.name, index, time.monotonic() - began)
        is_last = index == len(plan.turns) - 1
        hints = {"job_id": plan.name, "is_last_step": int(is_last)}
        if tool and not is_last:
            hints["this_func_call"] = tool
        await _run_turn(client, messages, turn, hints, done)
        record.turns.append(done)
        if on_turn:
            on_turn(done)
        if done.error:
            break
        messages.append({"role": "assistant", "content": done.answer})
    record.jct_s = time.monotonic() - arrived
    return record


async def _run_turn(
    client: AsyncOpenAI,
    messages: list[dict[str, str]],
    turn: TurnPlan,
    hints: dict[str, Any],
    record: TurnRecord,
) -> None:
    began = time.monotonic()
    pieces: list[str] = []
    try:
        create: Any = client.chat.completions.create  # typed by model name; ours is none of them
        stream = await create(
            model=SERVED_NAME,
            messages=list(messages),
            max_tokens=turn.max_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"vllm_xargs": hints},
        )
        async for chunk in stream:
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                if not pieces:
                    record.ttft_s = time.monotonic() - began
                pieces.append(text)
            if chunk.usage is not None:
                _note_usage(record, chunk.usage)
    except OpenAIError as error:
        record.error = f"{type(error).__name__}: {error}"
    record.latency_s = time.monotonic() - began
    record.answer = "".join(pieces)
    if not record.error and record.answer_tokens != turn.max_tokens:
        record.error = f"{record.answer_tokens} of {turn.max_tokens} tokens answered"


def _note_usage(record: TurnRecord, usage: Any) -> None:
    details = usage.prompt_tokens_details
    record.prompt_tokens = usage.prompt_tokens
    record.answer_tokens = usage.completion_tokens
    record.cached_tokens = (details.cached_tokens or 0) if details else 0
