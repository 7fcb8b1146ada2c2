"""Prompts: prompts that samples share, kept in VRAM by a pin of their group's own, in spare room.

A sample's turn holds the prompt while it runs, and so does the sample's pin while it lasts. Between
these, and for samples that have not come yet, nothing else would hold it: vLLM's prefix cache keeps
it only until a request needs the blocks. So whenever a sample's turn ends, we ask whether to hold
the prompt for the others. Below VRAM the group has a chain of its own (samples.py).
"""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from continuum_connector.policy.base import After, FinishedTurn, Pin, Snapshot
from continuum_connector.policy.hinted import NO_HINTS
from continuum_connector.scheduler.decider import Decider
from continuum_connector.scheduler.decisions import Snapshots
from continuum_connector.scheduler.pins import PinEnd
from continuum_connector.scheduler.records import Records
from continuum_connector.scheduler.retention import Retention
from continuum_connector.scheduler.samples import Prompt
from continuum_connector.toolcalls.asked import UNREAD


class Prompts:
    """Decides, pins and records. Decides anew once half of the last pin's time is over."""

    def __init__(
        self, decider: Decider, snapshots: Snapshots, retention: Retention, records: Records
    ) -> None:
        self._decider = decider
        self._away, self._gaps, self._costs = decider.away, decider.gaps, decider.costs
        self._snapshots = snapshots
        self._retention, self._pins = retention, retention.pins
        self._records = records

    def keep(self, prompt: Prompt, request: Any, now: float) -> None:
        """Hold the prompt for the group's other samples, if the policy finds it worth its room and
        no turn has waited for blocks recently (`price` is 0). This pin gives way before all that
        the policy has priced."""
        key, num_blocks = prompt.group.key, len(prompt.blocks)
        old = self._pins.get(key)
        if old is not None and now - old.started < (old.deadline - old.started) / 2:
            return
        world = self._snapshots.snapshot(now)
        pin = self._decider.choose(self._as_turn(prompt, world), world).decision
        has_room = world.price == 0.0 and num_blocks <= self._retention.budget
        if not (isinstance(pin, Pin) and has_room):
            self._retention.end_of(key, PinEnd.SUPERSEDED, now)
            return
        self._records.happened(
            "prompt",
            now,
            program=key,
            ttl_s=pin.ttl_s,
            blocks=num_blocks,
            others=prompt.num_others,
        )
        # DROP: below VRAM the prompt has a chain already, or found no room. Any other pin is worth
        # more: valued by all samples that share it, this pin would outlive their own pins, and they
        # would compute everything but the prompt again.
        pin = replace(pin, then=After.DROP, value=0.0)
        self._retention.begin(pin, prompt.group, request.block_hashes, prompt.blocks, now)

    def _as_turn(self, prompt: Prompt, world: Snapshot) -> FinishedTurn:
        """The prompt as a finished turn: it is needed when the first of the other samples is back.
        Nobody knows when samples that have not come yet will come, so they count like those that
        are away."""
        gap = self._away.forecast_of(prompt.program) or self._gaps.forecast(UNREAD)
        num_blocks, num_tokens = len(prompt.blocks), prompt.blocks.end
        return FinishedTurn(
            program=prompt.group.key,
            turn=prompt.group.num_begun,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            hints=NO_HINTS,
            gap=gap.first_of(prompt.num_others),
            prefill_s=self._costs.prefill_s(num_tokens),
            load_s=self._costs.load_s(num_blocks) if world.has_tier else math.inf,
        )
