"""Answers: whether a program's next prompt has its last answer as it was, or goes on from the last
prompt's end.

Many clients send an answer back without its thoughts. Blocks of full attention are found up to
there all the same; of windows, chunks and states only that is found which was kept there.
"""

from __future__ import annotations

from collections.abc import Sequence

from continuum_connector.programs.program import Program


class Answers:
    """Learns from each turn that comes back, per program. One that has not come back yet is taken
    to do what was seen last, of whomever; before that, to go on from its answer."""

    def __init__(self, hash_size: int) -> None:
        self._hash_size = hash_size
        self._are_altered = False

    def came_back(self, program: Program, hashes: Sequence[bytes]) -> None:
        """A prompt of these block hashes goes on from the program's last finished turn."""
        marks, prompt = program.kept.marks, program.prompt_end
        if not marks or prompt is None or marks[-1][0] <= prompt[0]:
            return  # no answer of a block
        index, answer = marks[-1]
        if len(hashes) <= prompt[0] or hashes[prompt[0]] != prompt[1]:
            return  # it went another way before
        is_altered = len(hashes) <= index or hashes[index] != answer
        self._are_altered = program.alters_answers = is_altered

    def are_altered(self, program: Program) -> bool:
        """Whether the next prompt is to be expected to go on from the last one's end."""
        known = program.alters_answers
        return self._are_altered if known is None else known

    def finished(self, program: Program, hashes: Sequence[bytes], end: int) -> None:
        """The program's last prompt can be hit up to `end`, in tokens."""
        last = end // self._hash_size - 1
        program.prompt_end = (last, hashes[last]) if 0 <= last < len(hashes) else None
