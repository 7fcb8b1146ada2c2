"""What stock vLLM would have found: the shadow beside a scheduler that is stock says what it found,
turn by turn."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.vllm.agents import AgentEngine
from tests.vllm.harness import prompt
from tests.vllm.test_everything import Agents
from tests.vllm.tiering import BLOCK, MODES

STOCK = {"policy": "stock", "order": False}


class Beside:
    """Notes at each admission, also after a preemption, what VRAM had and what the shadow says."""

    def __init__(self, engine: AgentEngine) -> None:
        self.found: list[tuple[str, int, int]] = []  # request, tokens in VRAM, tokens in the shadow
        self.num_resumed = 0
        side, stock = engine.side, engine.side._stock
        self.stock = stock
        match, admitted = side.match, stock.admitted
        looked_up: dict[str, int] = {}

        def noting_match(request: Any, num_vram_tokens: int, now: float) -> Any:
            looked_up[request.request_id] = num_vram_tokens
            return match(request, num_vram_tokens, now)

        def noting_admitted(request: Any, num_vram_tokens: int) -> Any:
            in_vram = looked_up[request.request_id]
            in_stock = admitted(request, 0)  # without help from what VRAM really had
            self.num_resumed += any(name == request.request_id for name, _, _ in self.found)
            self.found.append((request.request_id, in_vram, in_stock))
            return in_stock

        side.match, stock.admitted = noting_match, noting_admitted

    def differing(self) -> list[tuple[str, int, int]]:
        return [each for each in self.found if each[1] != each[2]]

    def error(self) -> float:
        """By how many tokens the shadow is off, as a share of those that VRAM had."""
        off = sum(abs(in_vram - in_stock) for _, in_vram, in_stock in self.found)
        return off / sum(in_vram for _, in_vram, _ in self.found)


def check(stock: Any) -> None:
    """Its books close, and it has no more entries than VRAM has blocks."""
    queued, named = stock._queue, stock._by_first.values()
    assert sum(each.size for each in queued) == len(stock) <= stock._num_blocks
    assert all(each.hashes == [] or len(each.hashes) == each.size > 0 for each in queued)
    assert all(stock._by_first[first] is each for first, each in stock._by_first.items())
    assert all(first == each.hashes[0] for first, each in stock._by_first.items())
    assert all((each in queued) == (each.refs == 0) for each in named)
    assert stock._num_shared == sum(max(0, each.refs - 1) * each.size for each in named)


@MODES
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_blocks", [52, 70])
def test_beside_stock_the_shadow_says_what_stock_found(
    num_blocks: int, async_scheduling: bool, seed: int
) -> None:
    """Forks, aborts, preemptions, prompts in chunks, turns that go on from running ones."""
    engine = AgentEngine(
        num_blocks,
        max_num_seqs=5,
        max_num_batched_tokens=[512, 64][seed % 2],
        async_scheduling=async_scheduling,
        extra_config=dict(STOCK),
    )
    beside = Beside(engine)
    Agents(engine, seed).run(num_turns=60)
    assert beside.differing() == []
    assert beside.num_resumed > 3
    assert sum(in_vram for _, in_vram, _ in beside.found) > 3000
    check(beside.stock)
    assert not beside.stock._uses
    assert not beside.stock._growing
    assert not beside.stock._ends


@MODES
@pytest.mark.parametrize("seed", range(3))
def test_copies_of_one_prompt_and_turns_that_read_no_cache(
    async_scheduling: bool, seed: int
) -> None:
    """A prompt of whole blocks is found but for its last block, which is computed beside a copy;
    with prompt_logprobs all of it is. Two that begin in one step share what fits a chunk. Of two
    copies the shadow does not know which one is found, so the other may leave too early."""
    engine = AgentEngine(
        80,
        max_num_seqs=5,
        max_num_batched_tokens=64,
        async_scheduling=async_scheduling,
        extra_config=dict(STOCK),
    )
    beside, draw = Beside(engine), random.Random(seed)
    for number in range(80):
        length = draw.choice([3, 6, 10]) * BLOCK + draw.choice([0, 0, 5])
        engine.add(
            str(number),
            prompt(length, seed=draw.randrange(4)),
            max_tokens=draw.randrange(1, 40),
            prompt_logprobs=1 if draw.random() < 0.2 else None,
        )
        engine.steps(draw.choice([0, 0, 1, 7]))
        check(beside.stock)
    engine.run_until_idle()
    assert beside.error() < 0.05
    assert sum(in_vram > 0 for _, in_vram, _ in beside.found) > 20


def test_drafts_drop_a_block_of_every_hit() -> None:
    engine = AgentEngine(60, num_drafts=2, max_num_seqs=4, extra_config=dict(STOCK))
    beside = Beside(engine)
    Agents(engine, seed=3).run(num_turns=40)
    assert beside.error() < 0.05  # each hit leaves a copy of the block that it drops
    assert sum(in_vram for _, in_vram, _ in beside.found) > 1000


def test_a_reset_empties_it() -> None:
    engine = AgentEngine(100, extra_config=dict(STOCK))
    beside = Beside(engine)
    engine.run_turn("a", 100)
    engine.run_turn("b", 100)
    assert engine.reset_prefix_cache()
    assert len(beside.stock) == 0
    engine.run_turn("c", 100)
    assert [each[1:] for each in beside.found] == [(0, 0), (96, 96), (0, 0)]
