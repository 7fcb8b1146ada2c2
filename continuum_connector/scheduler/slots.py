"""Slot and Chain: one block's place in host memory, and what one turn keeps there."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

Key = bytes  # vLLM's BlockHashWithGroupId: block hash, then the KV group in 4 bytes

_GROUP_BYTES = 4


class SlotState(enum.Enum):
    WRITING = "writing"
    READY = "ready"


@dataclass(eq=False, slots=True)
class Slot:
    """One block's place; FREE slots have no object.

    `num_chains`: how many chains claim it; it leaves when the last of them lets go.
    `is_forgotten`: nobody finds it any more; it is FREE once nobody writes or reads it.
    """

    number: int
    key: Key
    state: SlotState = SlotState.WRITING
    num_readers: int = 0
    num_chains: int = 0
    is_forgotten: bool = False

    @property
    def is_busy(self) -> bool:
        return self.state is SlotState.WRITING or self.num_readers > 0


@dataclass(eq=False, slots=True)
class Chain:
    """The blocks of one turn that are in DRAM, head first; it leaves tail first.

    Two chains with a common prefix claim the same slots. `last_used`: when its program last
    stored or loaded, monotonic seconds.
    """

    program: str
    last_used: float
    slots: list[Slot] = field(default_factory=list)

    @property
    def is_stuck(self) -> bool:
        """Whether its tail can leave neither now nor by letting go of the claim."""
        tail = self.slots[-1] if self.slots else None
        return tail is not None and tail.num_chains == 1 and tail.is_busy and not tail.is_forgotten

    def continues(self, older: Chain) -> bool:
        """Whether this is `older` and more. A block's hash covers all before it, so one common
        block at the tip, of any KV group, is enough: windows may have moved on."""
        tip = older.slots[-1].key[:-_GROUP_BYTES] if older.slots else b""
        keys = {slot.key for slot in self.slots}
        for slot in reversed(older.slots):
            if slot.key[:-_GROUP_BYTES] != tip:
                return False
            if slot.key in keys:
                return True
        return True
