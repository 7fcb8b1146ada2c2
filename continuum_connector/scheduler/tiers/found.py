"""Found: what a restart found on the disks of all ranks.

A slot counts once every rank has found the same block in it: a load needs the block on all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from continuum_connector.messages import OnDisk


class Found:
    """Combines what the ranks found, which arrives in pieces, each rank at its own pace."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._is_open = True
        self._seen: dict[tuple[int, bytes], int] = {}  # (slot, key) -> how many ranks have it

    def on_all(self, found: Mapping[int, Sequence[OnDisk]]) -> list[OnDisk]:
        """Return the entries that all ranks have found by now, each once."""
        if not self._is_open:
            return []
        entries = [each for entries in found.values() for each in entries]
        return [each for each in entries if self._world_size == 1 or self._is_last(each)]

    def close(self) -> None:
        """The disks were reset: what they still report is from before that."""
        self._is_open = False
        self._seen.clear()

    def _is_last(self, entry: OnDisk) -> bool:
        place = entry.slot, entry.key
        number = self._seen.pop(place, 0) + 1
        if number < self._world_size:
            self._seen[place] = number
        return number == self._world_size
