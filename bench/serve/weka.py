"""Programs as Weka trace files, which other load generators replay (aiperf: `weka-trace`).

One JSON file per program, in the format of github.com/callanjfox/kv-cache-tester: a request per
turn with its tokens (`in`, `out`), the ids of the whole blocks its prompt is made of (`hash_ids`;
equal ids are equal text, within one file), and when it came. Whoever replays it makes up text for
each block, and for the tail that fills none.

What a file cannot say: which tokens were answered. The next prompt has made-up text where the
answer stood, so no server finds there what it generated: its blocks are new, as they would be
where a chat template rewrites what was answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common.plans import ProgramPlan, Span

MODEL = "recorded"  # each file names one; who replays it asks for the model that is served


def trace(plan: ProgramPlan, block: int) -> dict[str, Any]:
    """A program as one trace: each turn comes `gap_s` after the one before it was answered."""
    ids: dict[tuple[Span, ...], int] = {}  # of blocks, by all that stands before them and in them
    requests, now = [], 0.0
    for turn in plan.turns:
        now += turn.gap_s
        requests.append(
            {
                "t": round(now, 3),
                "type": "s",  # the answer is streamed
                "model": MODEL,
                "in": turn.num_prompt_tokens,
                "out": turn.answer.length,
                "hash_ids": [ids.setdefault(each, len(ids)) for each in blocks(turn.prompt, block)],
                "api_time": 0.0,  # so that `t` is made of gaps alone
                "think_time": turn.gap_s,
            }
        )
    head = {"id": plan.name, "models": [MODEL], "block_size": block, "hash_id_scope": "local"}
    return {**head, "requests": requests}


def blocks(prompt: Sequence[Span], block: int) -> Iterator[tuple[Span, ...]]:
    """The whole blocks of a prompt, each as the pieces of streams it is made of."""
    pieces: list[Span] = []
    missing = block
    for span in prompt:
        start, left = span.start, span.length
        while left:
            taken = min(left, missing)
            pieces.append(Span(span.stream, taken, start))
            start, left, missing = start + taken, left - taken, missing - taken
            if not missing:
                yield tuple(pieces)
                pieces, missing = [], block


def write(plans: Iterable[ProgramPlan], folder: Path, block: int) -> int:
    """A file per program, numbered in their order; how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for number, plan in enumerate(plans, 1):
        text = json.dumps(trace(plan, block), separators=(",", ":"))
        (folder / f"{number:05d}.json").write_text(text + "\n")
    return number
