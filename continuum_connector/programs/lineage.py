"""Recognise a program that sends no id: its next prompt extends its last turn's block hashes.

What identifies, and what must not:

    turn of A, finished   [ system | task .. ][ output ........ ]
    block                   0 ...        p-1    p  ...       n-1
    strong: blocks n-1, n-2, n-3, from p on: they cover text that only A has generated. Three,
            because output that is tokenised again as a prompt often ends a block or two early.
    weak:   block p-1: covers the prompt only. Needed where the chat template drops reasoning from
            the history, so that the next prompt leaves A's chain right at p. But it may
            be a system prompt that others share: it identifies only while a single program
            ever ended a prompt there and a single text ever followed it. When a second one
            comes, it identifies nobody from then on. A piece of A's answer must follow, or, as
            a client may write its answers anew, so much text as makes up for half of it.
    later:  from the second turn on, the prompt's blocks after the first that covers text of A's own
            follow an answer that only A got: then p-1 is strong, and so are those of BACK before
            it, and the first of them all. Needed where the last message changes afterwards: a
            reminder taken out again, an answer written anew and with it the rest of its block; or
            where an old tool result is cleared from the context.
    early:  blocks of EARLY before p of a first prompt. Needed where a request ends in a message
            that the next one lacks. They may be a system prompt that others share, however
            long, so they identify only with a proof:
            - a piece of A's answer follows in the prompt, one that A's own prompt did not have, as
              examples of answers are; or, where the tokens are not known,
            - another program's prompt is known to part from A's, this one goes on with A's for at
              least two blocks more, and it is longer by A's answer.
            From the second turn on, the block before A's own text is one: a context that was
            condensed or cleared has what it began with, and repeats the answer behind other text.

A program may have NUM_CHAINS chains, as where it forks: what a turn does not continue stays.

A block hash covers everything before it (and salt, LoRA, images), so equal hashes mean equal
prefixes. A wrong answer costs order and a pin, never content.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

NUM_STRONG = 3
EARLY = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # blocks back from a prompt's end
BACK = (1, *EARLY, 64, 128, 256, 512, 1024, 2048, 4096)
NUM_ENDS = NUM_STRONG + len(BACK) + 2  # of a chain at most
NUM_CHAINS = 4  # of a program
NUM_OWN = 2  # blocks
PIECE, NUM_PIECES = 12, 8  # tokens of an answer
MAX_FOUND = 64  # ends of a prompt that are looked at
LOOK = 8192  # tokens of a prompt that are searched for them


@dataclass(slots=True)
class _End:
    """One block at which a program's turn (or its prompt) ended.

    `live`: it may identify `program`. An end that is no longer live still remembers that the
    program was there. `next_hash` is the block that followed a weak end, b"" before any did.
    `early`: it identifies only with a proof, which was found once if it `is_proven`.
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
    early: bool = False
    is_proven: bool = False


@dataclass(slots=True)
class _Known:
    """What is known of a program. `own`: position and hash of the first block that covers text of
    its own. `parted`: the last position that another program's prompt is known to share, -1 if
    there is none. `pieces`: of its last answer. `num_answer_tokens`: of its full blocks."""

    own: tuple[int, bytes] | None = None
    parted: int = -1
    pieces: tuple[bytes, ...] = ()
    num_answer_tokens: int = 0


class LineageIndex:
    """Ends of finished turns, at most `max_ends`; the least recently used leave first."""

    def __init__(self, max_ends: int) -> None:
        self._max_ends = max_ends
        self._ends: OrderedDict[bytes, _End] = OrderedDict()
        self._by_program: dict[str, dict[bytes, None]] = {}  # live ends, in order
        self._known: dict[str, _Known] = {}  # of programs with live ends
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
        prompt: Sequence[int] = (),
        answer: Sequence[int] = (),
    ) -> None:
        """Recognise `program` by the turn that just ended.

        `block_hashes` cover prompt and output. The first `num_prompt_blocks` of them are the full
        blocks of the prompt alone; `num_prompt_tokens` also counts what is in its last block.
        `prompt`, `answer`: their tokens, if they are known. Replaces what the turn continues. Costs
        a few dictionary operations, and a first turn a search of LOOK tokens, whatever the length.
        """
        known = self._known.get(program, _Known())
        last = self._last_known(program, block_hashes)
        if last is None:
            known.parted = max(known.parted, self._parts_at(program, block_hashes))
        following = self._own_from(program, last)
        self._forget_continued(program, block_hashes)
        num_blocks = len(block_hashes)
        prompt_end = min(max(num_prompt_blocks, 0), num_blocks)
        strong = set(range(max(num_blocks - NUM_STRONG, prompt_end), num_blocks))
        own, early = prompt_end, set[int]()
        if last is None:
            early = {prompt_end - back for back in EARLY if prompt_end >= back} - strong
        else:
            own = following
            if known.own is not None and has_block(block_hashes, *known.own):
                own = min(following, known.own[0])
            places = (own, *(prompt_end - back for back in BACK))
            strong |= {place for place in places if own <= place < prompt_end}
            early = {own - 1} - {-1}
        for position in sorted(early | strong | {prompt_end - 1} - {-1}):
            is_weak, of_prompt = position not in strong, position < prompt_end
            end = _End(program, parent, position, is_weak, of_prompt, num_prompt_tokens)
            end.early = position in early
            self._add(block_hashes[position], end)
        if program in self._by_program:
            per_block = num_prompt_tokens // prompt_end if prompt_end else 0
            num_answer_tokens = per_block * (num_blocks - prompt_end)
            first = (own, block_hashes[own]) if own < num_blocks else None
            # Only a first prompt is known by blocks that examples of answers may follow.
            pieces = pieces_of(answer, prompt if last is None else ())
            self._known[program] = _Known(first, known.parted, pieces, num_answer_tokens)
        while len(self._ends) > self._max_ends:
            oldest = next(iter(self._ends))
            self._unlink(oldest, self._ends[oldest].program)
            self._remove(oldest)

    def match(
        self,
        block_hashes: Sequence[bytes],
        num_prompt_tokens: int = 0,
        tokens: Sequence[int] | None = None,
    ) -> str | None:
        """Return the program whose last turn this prompt continues, or None if unsure.

        The longest known end decides; if that one is shared, nobody is named. Early ends without a
        proof do not count. `tokens`: the prompt's, if they are known. Probes only positions at
        which some turn ended, longest first and in C.
        """
        is_proven = repeats = False
        for found in self._found(block_hashes):
            end = self._ends[found]
            if end.live and end.weak and not end.shared:
                known = self._known[end.program]
                repeats = _repeats(known, end, block_hashes, tokens)
                is_proven = repeats or _is_proof(known, end, num_prompt_tokens, tokens)
                if end.early and is_proven:
                    end.is_proven = True
                    self._ends.move_to_end(found)
                    return end.program
                if not is_proven:
                    known.parted = max(known.parted, end.position)
            if not end.early:
                break
        else:
            return None
        self._ends.move_to_end(found)
        # The same prompt again is a retry, or another sample of one task, unless it has grown
        # within its last block; where a first prompt ends, that text may be anybody's, unless it
        # repeats the answer.
        is_own = repeats or not end.weak
        has_grown = num_prompt_tokens > end.num_prompt_tokens and is_own
        if end.of_prompt and not self._follow(end, block_hashes) and not has_grown:
            return None
        is_sure = is_proven or not end.weak
        return end.program if is_sure and end.live and not end.shared else None

    def forget(self, program: str) -> None:
        """Stop recognising `program`; what is known of shared prompts stays."""
        for block_hash in list(self._by_program.get(program, ())):
            self._retire(block_hash)

    def _forget_continued(self, program: str, block_hashes: Sequence[bytes]) -> None:
        """Forget the ends that a turn of the program continues, and of the others the oldest."""
        mine = self._by_program.get(program, {})
        for block_hash in list(mine):
            if has_block(block_hashes, self._ends[block_hash].position, block_hash):
                self._retire(block_hash)
        for block_hash in list(mine)[: max(0, len(mine) - (NUM_CHAINS - 1) * NUM_ENDS)]:
            self._retire(block_hash)

    def _retire(self, block_hash: bytes) -> None:
        end = self._ends[block_hash]
        self._unlink(block_hash, end.program)
        if (end.weak or end.shared) and not end.early:
            end.live = False
        else:
            self._remove(block_hash)

    def _found(self, block_hashes: Sequence[bytes]) -> Iterator[bytes]:
        """The known ends in these blocks, the longest first."""
        known = bisect_left(self._positions, len(block_hashes))
        probes: Iterable[bytes] = reversed(block_hashes)
        if 2 * known < len(block_hashes):
            probes = map(block_hashes.__getitem__, reversed(self._positions[:known]))
        return islice(filter(self._ends.__contains__, probes), MAX_FOUND)

    def _parts_at(self, program: str, block_hashes: Sequence[bytes]) -> int:
        """The last end in these blocks that another program was at; -1 if there is none."""
        ends = (self._ends[each] for each in self._found(block_hashes))
        return next((end.position for end in ends if end.program != program), -1)

    def _own_from(self, program: str, last: _End | None) -> int:
        """From which block on a turn has text of its program's own, if `last` is the last end in it
        that names the program. After an early end, what both prompts have may go on up to the next
        end."""
        if last is None:
            return 0
        if not last.early:
            return last.position + 1
        ends = (self._ends[each].position for each in self._by_program[program])
        return min((each for each in ends if each > last.position), default=last.position + 1)

    def _last_known(self, program: str, block_hashes: Sequence[bytes]) -> _End | None:
        """The last end in these blocks that names the program."""
        mine = [(each, self._ends[each]) for each in self._by_program.get(program, ())]
        known = (
            end
            for block_hash, end in mine
            if not end.shared
            and end.early <= end.is_proven
            and has_block(block_hashes, end.position, block_hash)
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
        if old.early and not end.early:
            end.shared = end.weak and old.program != end.program
            self._unlink(block_hash, old.program)
            self._ends[block_hash] = end
        elif old is end:
            self._count(end.position, 1)
        elif end.early and (old.live or old.shared or old.program != end.program):
            # A fork of another program, or a prompt that begins as another's does.
            old.shared |= old.early and old.program != end.program
            return
        elif end.early:
            self._ends[block_hash] = end
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

    def _unlink(self, block_hash: bytes, program: str) -> None:
        """Take an end off its program's list; spent ends are on none."""
        mine = self._by_program.get(program, {})
        mine.pop(block_hash, None)
        if not mine:
            self._by_program.pop(program, None)
            self._known.pop(program, None)

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


def has_block(block_hashes: Sequence[bytes], position: int, block_hash: bytes) -> bool:
    """Whether that block is in these, and so all before it, which a hash covers."""
    return position < len(block_hashes) and block_hashes[position] == block_hash


def _repeats(
    known: _Known, end: _End, block_hashes: Sequence[bytes], tokens: Sequence[int] | None
) -> bool:
    """Whether a piece of its program's answer follows a weak end in a prompt."""
    if tokens is None or not known.pieces:
        return False
    # The blocks are at least so long, because the last is not full.
    begin = len(tokens) * (end.position + 1) // (len(block_hashes) + 1)
    text = as_bytes(tokens[begin : begin + LOOK])
    return any(piece in text for piece in known.pieces)


def _is_proof(
    known: _Known, end: _End, num_prompt_tokens: int, tokens: Sequence[int] | None
) -> bool:
    """Whether a prompt that has this weak end goes on with its program's conversation, by what its
    length and other prompts say."""
    num_more = num_prompt_tokens - end.num_prompt_tokens
    if not end.early:
        return not num_prompt_tokens or 2 * num_more > known.num_answer_tokens
    num_own = end.position - known.parted if known.parted >= 0 else 0
    has_own = num_own >= NUM_OWN and num_more > known.num_answer_tokens
    return has_own and tokens is None


def pieces_of(answer: Sequence[int], given: Sequence[int] = ()) -> tuple[bytes, ...]:
    """What of an answer a prompt repeats, also if its thinking is left out or its calls are written
    anew: pieces from its beginning to its end, except those in what was `given`."""
    last = len(answer) - PIECE
    if last < 0:
        return ()
    text, size = as_bytes(answer[:]), array("q").itemsize
    starts = {last * number // (NUM_PIECES - 1) * size for number in range(NUM_PIECES)}
    pieces = {text[start : start + PIECE * size] for start in starts}
    before = as_bytes(given[-LOOK:])
    return tuple(piece for piece in pieces if piece not in before)


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes that can be searched. Eight each, so a piece is hardly ever found
    between two tokens."""
    return array("q", tokens).tobytes()
