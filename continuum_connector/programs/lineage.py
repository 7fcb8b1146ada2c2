"""Recognise a program that sends no id: its next prompt extends its last turn's block hashes.

What identifies, and what must not:

    turn of A, finished   [ system | task .. ][ output ........ ]
    block                   0 ...        p-1    p  ...       n-1
    strong: blocks n-1, n-2, n-3, from p on: they cover text that only A has generated. Three,
            because output that is tokenised again as a prompt often ends a block or two early.
    weak:   block p-1: covers the prompt only. Needed where the chat template drops reasoning
            from the history, so that the next prompt leaves A's chain right at p. But it may
            be a system prompt that others share: it identifies only while a single program
            ever ended a prompt there and a single text ever followed it. When a second one
            comes, it identifies nobody from then on.
    later:  from the second turn on, the prompt's blocks after the end that identified A follow an
            answer that only A got: then p-1 is strong, and so are p-2, p-4, p-16. Needed where
            the last message changes afterwards: a reminder taken out again, an answer written
            anew and with it the rest of its block. If such a block identified A, it stays.

A block hash covers everything before it (and salt, LoRA, images), so equal hashes mean equal
prefixes. A wrong answer costs order and a pin, never content.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NUM_STRONG = 3
BEFORE = (1, 2, 4, 16)  # blocks back from a prompt's end
NUM_ENDS = NUM_STRONG + len(BEFORE) + 1  # of a program at most


@dataclass(slots=True)
class _End:
    """One block at which a program's turn (or its prompt) ended.

    `live`: it may identify `program`. An end that is no longer live still remembers that the
    program was there. `next_hash` is the block that followed a weak end, b"" before any did.
    """

    program: str
    parent: str | None
    position: int
    weak: bool
    of_prompt: bool
    num_prompt_tokens: int = 0
    live: bool = True
    shared: bool = False
    next_hash: bytes = b""


class LineageIndex:
    """Ends of finished turns, at most `max_ends`; the least recently used leave first."""

    def __init__(self, max_ends: int) -> None:
        self._max_ends = max_ends
        self._ends: OrderedDict[bytes, _End] = OrderedDict()
        self._by_program: dict[str, dict[bytes, None]] = {}  # live ends, in order
        self._counts: dict[int, int] = {}  # position -> ends there
        self._positions: list[int] = []  # the keys of _counts, sorted

    def __len__(self) -> int:
        return len(self._ends)

    def register(
        self,
        program: str,
        block_hashes: Sequence[bytes],
        num_prompt_blocks: int,
        parent: str | None = None,
        num_prompt_tokens: int = 0,
    ) -> None:
        """Recognise `program` by the turn that just ended.

        `block_hashes` cover prompt and output. The first `num_prompt_blocks` of them are the full
        blocks of the prompt alone; `num_prompt_tokens` also counts what is in its last block.
        Replaces the program's earlier turn. Costs a few dictionary operations, whatever the length.
        """
        known = self._last_known(program, block_hashes)
        self.forget(program)
        num_blocks = len(block_hashes)
        prompt_end = min(max(num_prompt_blocks, 0), num_blocks)
        strong = set(range(max(num_blocks - NUM_STRONG, prompt_end), num_blocks))
        if known:
            strong.update(self._of_later_prompt(prompt_end, known))
        for position in sorted(strong | {prompt_end - 1} - {-1}):
            is_weak, of_prompt = position not in strong, position < prompt_end
            end = _End(program, parent, position, is_weak, of_prompt, num_prompt_tokens)
            self._add(block_hashes[position], end)
        while len(self._ends) > self._max_ends:
            self._drop(next(iter(self._ends)))

    def match(self, block_hashes: Sequence[bytes], num_prompt_tokens: int = 0) -> str | None:
        """Return the program whose last turn this prompt continues, or None if unsure.

        The longest known end decides; if that one is shared, nobody is named. Probes only
        positions at which some turn ended, longest first and in C: a next turn is found in
        10 us, a stranger's 6,500 blocks among 10,000 programs of all lengths take 0.4 ms.
        """
        known = bisect_left(self._positions, len(block_hashes))
        probes: Iterable[bytes] = reversed(block_hashes)
        if 2 * known < len(block_hashes):
            probes = map(block_hashes.__getitem__, reversed(self._positions[:known]))
        found = next(filter(self._ends.__contains__, probes), None)
        if found is None:
            return None
        self._ends.move_to_end(found)
        end = self._ends[found]
        # The same prompt again is a retry, or another sample of one task, unless it has grown
        # within its last block; where a first prompt ends, that text may be anybody's.
        has_grown = num_prompt_tokens > end.num_prompt_tokens and not end.weak
        if end.of_prompt and not self._follow(end, block_hashes) and not has_grown:
            return None
        return end.program if end.live and not end.shared else None

    def forget(self, program: str) -> None:
        """Stop recognising `program`; what is known of shared prompts stays."""
        for block_hash in self._by_program.pop(program, ()):
            end = self._ends[block_hash]
            if end.weak or end.shared:
                end.live = False
            else:
                self._remove(block_hash)

    @staticmethod
    def _of_later_prompt(prompt_end: int, known: _End) -> list[int]:
        """Positions in a prompt, given that end, that only the text of its program can reach."""
        found = [prompt_end - back for back in BEFORE if prompt_end - back > known.position]
        if known.of_prompt and not known.weak:
            found.append(known.position)
        return found

    def _last_known(self, program: str, block_hashes: Sequence[bytes]) -> _End | None:
        """The last end in these blocks that names the program."""
        mine = [(each, self._ends[each]) for each in self._by_program.get(program, ())]
        known = (
            end
            for block_hash, end in mine
            if not end.shared
            and end.position < len(block_hashes)
            and block_hashes[end.position] == block_hash
        )
        return max(known, key=lambda end: end.position, default=None)

    def _follow(self, end: _End, block_hashes: Sequence[bytes]) -> bool:
        """Note which block follows an end of a prompt; return whether any does."""
        following = end.position + 1
        if following >= len(block_hashes):
            return False
        if end.weak:
            end.next_hash = end.next_hash or block_hashes[following]
            end.shared |= block_hashes[following] != end.next_hash
        return True

    def _add(self, block_hash: bytes, end: _End) -> None:
        """Enter an end, or mark the one that is there as shared, unless the two are kin."""
        old = self._ends.setdefault(block_hash, end)
        if old is end:
            self._count(end.position, 1)
        else:
            self._ends.move_to_end(block_hash)
            if end.program == old.parent:
                self._unlink(block_hash, old.program)
                old.program, old.parent = end.program, end.parent
            elif end.program != old.program:
                # A child does not take over its parent's end.
                old.shared |= end.parent != old.program
                return
            old.live = True
        self._by_program.setdefault(end.program, {})[block_hash] = None

    def _drop(self, block_hash: bytes) -> None:
        self._unlink(block_hash, self._ends[block_hash].program)
        self._remove(block_hash)

    def _unlink(self, block_hash: bytes, program: str) -> None:
        """Take an end off its program's list; spent ends are on none."""
        mine = self._by_program.get(program, {})
        mine.pop(block_hash, None)
        if not mine:
            self._by_program.pop(program, None)

    def _remove(self, block_hash: bytes) -> None:
        self._count(self._ends.pop(block_hash).position, -1)

    def _count(self, position: int, change: int) -> None:
        count = self._counts.get(position, 0) + change
        if count == 0:
            del self._counts[position]
            del self._positions[bisect_left(self._positions, position)]
            return
        if position not in self._counts:
            insort(self._positions, position)
        self._counts[position] = count
