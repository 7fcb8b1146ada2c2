"""Answers: whether programs send their answers back unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from continuum_connector.programs.program import Program


class Answers:
    """Whether a program's next prompt repeats its last answer unchanged, or continues from the last
    prompt's end.

    Many clients send an answer back without its thinking. Such a prompt still finds all blocks of
    full attention up to that point. Of windows, chunks and states it finds only what was kept for a
    hit that ends there.

    Learns from each returning turn, per program. A program that has not returned yet is expected
    to do what the last program that returned did. Before any has returned, programs are expected to
    continue from their answers."""

    def __init__(self, hash_size: int) -> None:
        self._hash_size = hash_size
        self._are_altered = False

    def came_back(self, program: Program, hashes: Sequence[bytes]) -> None:
        """A prompt of these block hashes continues from the program's last finished turn."""
        marks, prompt = program.kept.marks, program.prompt_end
        if not marks or prompt is None or marks[-1][0] <= prompt[0]:
            return  # the answer did not fill a block
        index, answer = marks[-1]
        if len(hashes) <= prompt[0] or hashes[prompt[0]] != prompt[1]:
            return  # the prompt already differs before the answer
        is_altered = len(hashes) <= index or hashes[index] != answer
        self._are_altered = is_altered
        program.sends_back(is_altered)

    def are_altered(self, program: Program) -> bool:
        """Whether we expect the next prompt to continue from the end of the last prompt."""
        known = program.alters_answers
        return self._are_altered if known is None else known

    def finished(self, program: Program, hashes: Sequence[bytes], end: int) -> None:
        """The program's last prompt can be hit up to `end`, in tokens."""
        last = end // self._hash_size - 1
        program.prompt_ended((last, hashes[last]) if 0 <= last < len(hashes) else None)
