"""A server that has just started, default policy, nothing learned: it keeps a program from its
first turn on, as its metrics show in each pause, and nothing of it after the last.

So whoever looks at /metrics between an agent's turns sees what is kept: the check of an execution
note on Continuum's own code, which pins from the first turn on, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.serve.metrics import total
from bench.serve.server import VllmServer
from tests.server.conftest import DRAM_BYTES, MIDDLEWARE, NUM_BLOCKS, ServerFactory
from tests.server.helpers import BLOCK, ask, eventually, read_trace, text_of, usage

NUM_TURNS = 4
# A prompt of one step: two would be measured before the first turn ends.
NUM_WORDS, NUM_MORE, NUM_ANSWERED = 400, 100, 8


def as_field(is_last: bool) -> dict[str, Any]:
    """As Continuum's own clients do it, which the middleware understands."""
    return {"job_id": "agent", "is_last_step": is_last}


def as_xargs(is_last: bool) -> dict[str, Any]:
    """Without the middleware."""
    return {"vllm_xargs": {"job_id": "agent", "is_last_step": int(is_last)}}


def kept(server: VllmServer) -> tuple[float, float]:
    """Blocks of VRAM that are pinned, and blocks in DRAM, at one look."""
    samples = server.metrics()
    in_dram = total(samples, "continuum:dram_blocks", state="ready")
    return total(samples, "continuum:pinned_blocks"), in_dram


@pytest.mark.parametrize(
    ("name", "dram_bytes", "fields"),
    [("pins alone", 0, as_xargs), ("with DRAM", DRAM_BYTES, as_field)],
)
def test_a_fresh_server_keeps_every_turn_but_the_last(
    server_factory: ServerFactory,
    tmp_path: Path,
    name: str,
    dram_bytes: int,
    fields: Callable[[bool], dict[str, Any]],
) -> None:
    trace = tmp_path / "trace.jsonl"
    server = server_factory(
        name,
        num_blocks=NUM_BLOCKS,
        connector={"dram_bytes": dram_bytes, "trace_path": str(trace)},
        args=MIDDLEWARE,
    )
    assert server.metric("continuum:costs_known", cost="prefill") == 0
    history = [text_of(NUM_WORDS, name)]
    for turn in range(NUM_TURNS):
        is_last = turn == NUM_TURNS - 1
        answer = ask(server, "chat", history, NUM_ANSWERED, **fields(is_last))
        said = answer["choices"][0]["message"]["content"]
        history += [said, text_of(NUM_MORE, turn)]
        if not is_last:
            pinned, in_dram = eventually(lambda: any(found := kept(server)) and found)
            print(f"\n{name}: after turn {turn + 1}, {pinned:g} pinned, {in_dram:g} in DRAM")
            num_full = answer["usage"]["total_tokens"] - 1  # the last has no KV yet
            assert max(pinned, in_dram) >= num_full // BLOCK - 1
    eventually(lambda: usage(server) == 0.0)
    assert kept(server)[0] == 0
    print(f"{name}: after turn {NUM_TURNS}, {kept(server)} in VRAM and DRAM")

    def decisions() -> list[dict[str, Any]]:
        return [each for each in read_trace(trace) if each["event"] == "decision"]

    eventually(lambda: len(decisions()) == NUM_TURNS)
    first, *others = decisions()
    print(first["why"])
    assert first["decision"] in ("pin", "offload")
    assert first["why"].endswith(", from a prior")
    assert others[-1]["decision"] == "free"
    server_factory.stop(name)
