"""Where each turn's blocks were when it came, and why not where they could have been.

    python -m bench.disk.turns
    python -m bench.disk.turns --slot-blocks 7 --delay 10

The load `pressure` of `continuum bench ab` with a disk, one request at a time, on vLLM's real
scheduler and our scheduler half; model, copies and time are made up. VRAM of 64 blocks, DRAM of 62:
one and a half of the six contexts. A block that is nowhere was `refused` by DRAM, left it
`unsaved`, was in a `tail` that fills no disk slot, or was `dropped`: nobody stored it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.cli import start, teaching_parser, whole
from continuum_connector.scheduler.tiers.wanted import block_keys
from tests.vllm.fake_worker import OF_DISK
from tests.vllm.harness import Engine, prompt

BLOCK, BLOCK_BYTES = 32, 8192  # of the harness' model
LENGTHS = (700, 908, 1116, 1324)
NUM_PROGRAMS, NUM_ANSWERED = 6, 8
NUM_VRAM, NUM_DRAM, NUM_DISK = 65, 62, 2000
TOKEN_S, STEP_S = 1.5e-4, 5e-3
PLACES = ("vram", "dram", "disk")


@dataclass(frozen=True)
class Turn:
    """One turn: tokens of its prompt, tokens that an earlier turn left; of their blocks how many
    were where when it came, `gone` by reason; and how many tokens each memory had in the end."""

    program: int
    number: int
    num_tokens: int
    num_wanted: int
    there: Counter[str]
    gone: Counter[str]
    found: dict[str, int] = field(default_factory=dict)

    @property
    def num_computed(self) -> int:
        return self.num_tokens - sum(self.found.values())


class Timed(Engine):
    """Steps take as long as what they compute, so that there is something to save; a copy of the
    disk so many steps."""

    delay = 1

    def _update(self) -> None:
        scheduled = self._queue[-1][0].num_scheduled_tokens.values() if self._queue else ()
        self.clock.advance(TOKEN_S * sum(scheduled))
        super()._update()

    def hold_copies(self) -> None:
        ages: Counter[int] = Counter()
        worker = self.worker

        def settle_due() -> None:
            for each, transfer in list(worker.pending.items()):
                ages[each] += 1
                if not isinstance(transfer.order, OF_DISK) or ages[each] >= self.delay:
                    worker.settle(each)

        worker._settle_due = settle_due  # type: ignore[method-assign]


class Watch:
    """Why blocks are nowhere."""

    def __init__(self, engine: Engine) -> None:
        side = engine.connector.side
        self._tier, self._pool, self._why = side.tier, engine.pool, dict[bytes, str]()
        index = self._tier.dram.index
        left, reserve = index.marks.left, index.reserve

        def watched_left(numbers: Any, program: str) -> int:
            for number, key in zip(numbers.tolist(), index.keys_at(numbers), strict=True):
                if not index.marks.is_saved[number]:
                    self._why[key] = "unsaved"
            return int(left(numbers, program))

        def watched_reserve(keys: Sequence[bytes], *args: Any, **more: Any) -> Any:
            tickets = reserve(keys, *args, **more)
            self._why.update((key, "refused") for key in keys if key not in index)
            return tickets

        index.marks.left, index.reserve = watched_left, watched_reserve

    def look(self, hashes: Sequence[bytes]) -> tuple[Counter[str], Counter[str]]:
        """Of these blocks, how many are where, and how many nowhere for which reason."""
        there, gone = Counter[str](), Counter[str]()
        length, keys = self._tier.ahead._plan.slot_blocks, block_keys(hashes)
        names = keys[length - 1 :: length]
        on_disk = np.repeat(self._tier.disk.find(names) >= 0, length)
        for place, key in enumerate(keys):
            if self._pool.get_cached_block(hashes[place], [0]) is not None:
                there["vram"] += 1
            elif self._tier.dram.index.is_ready(key):
                there["dram"] += 1
            elif place < len(on_disk) and on_disk[place]:
                there["disk"] += 1
            else:
                why = "dropped" if place < len(on_disk) else "tail"
                gone[self._why.get(key, why)] += 1
        return there, gone


def small(slot_blocks: int = 0, delay: int = 1) -> Timed:
    """The engine; `slot_blocks`: of a disk slot, 0: as the connector would have it."""
    keys: dict[str, Any] = {"disk_path": "/disk", "disk_bytes": "1GiB", "policy": "adaptive"}
    keys |= {"disk_slot_bytes": slot_blocks * BLOCK_BYTES} if slot_blocks else {}
    keys |= {"dram_bytes": NUM_DRAM * BLOCK_BYTES}
    engine = Timed(
        *(NUM_VRAM,),
        block_size=BLOCK,
        max_num_batched_tokens=2048,
        extra_config=keys,
        step_s=STEP_S,
    )
    engine.delay = delay
    engine.hold_copies()
    engine.worker.report_disk(NUM_DISK)
    engine.idle(10.0)
    for number in range(2):  # now it is known what a prompt costs
        engine.add(f"warm{number}", prompt(700, 1000 + number), NUM_ANSWERED, final=True)
        engine.run_until_idle()
    return engine


def play(engine: Engine) -> Iterator[Turn]:
    """Every program's first turn, then every second one; the next comes when one is answered."""
    watch = Watch(engine)
    for number, length in enumerate(LENGTHS):
        for program in range(NUM_PROGRAMS):
            request, is_last = f"p{program}.{number}", number == len(LENGTHS) - 1
            tokens, left = prompt(length, seed=program), list[int]()
            if number:
                left = list(engine.requests[f"p{program}.{number - 1}"].all_token_ids)
                tokens = left + prompt(length - len(left), seed=100 * number + program)
            asked = engine.add(request, tokens, NUM_ANSWERED, program=f"p{program}", final=is_last)
            num_wanted = max(0, len(left) - 1) // BLOCK * BLOCK
            there, gone = watch.look(asked.block_hashes[: num_wanted // BLOCK])
            engine.run_until_idle(until=lambda asked=request: asked in engine.finish_reasons)
            told = engine.kv_transfer_params[request]["continuum"]["cached_tokens"]
            yield Turn(program, number, len(tokens), num_wanted, there, gone, told)


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__
    parser = teaching_parser("python -m bench.disk.turns", __doc__)
    parser.add_argument("--slot-blocks", type=whole(0, 64), default=0, help="0: as if left out")
    parser.add_argument("--delay", type=whole(1, 1000), default=1, help="steps of a copy")
    options: argparse.Namespace = parser.parse_args(argv)
    turns, gone = list[Turn](), Counter[str]()
    print("turn   prompt  wanted  vram dram disk  gone              found  computed")
    for turn in play(small(options.slot_blocks, options.delay)):
        turns.append(turn)
        gone += turn.gone
        there = " ".join(f"{turn.there[place]:4}" for place in PLACES)
        why = ", ".join(f"{number} {name}" for name, number in turn.gone.items()) or "-"
        found, computed = sum(turn.found.values()), turn.num_computed
        name = f"p{turn.program}.{turn.number}"
        numbers = f"{turn.num_tokens:6}  {turn.num_wanted:6}  {there}"
        print(f"{name}  {numbers}  {why:16}  {found:5}  {computed:8}")
    total = sum(turn.num_computed for turn in turns)
    least = total - sum(turn.num_wanted - sum(turn.found.values()) for turn in turns)
    print(f"computed: {total:,}; new are {least:,}; blocks gone: {dict(gone) or 'none'}")
    return 0


if __name__ == "__main__":
    start(main, "python -m bench.disk.turns")
