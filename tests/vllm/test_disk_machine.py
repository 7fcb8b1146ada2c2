"""The state machine of machine.py over a DRAM that is always too small, and a disk below it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.vllm.machine import Machine
from tests.vllm.machine_draws import (
    BUS_S,
    COPIES,
    DISK,
    OURS,
    PREFILL_EVERY,
    RARELY,
    SCHEDULING,
)
from tests.vllm.test_machine import NUM_EXAMPLES, SHRINKS


class DiskMachine(Machine):
    """Every finished turn is stored, and all of DRAM is there from the start."""

    @initialize(
        num_blocks=st.sampled_from([60, 150]),
        num_slots=st.sampled_from([16, 40]),
        scheduling=SCHEDULING.map(lambda drawn: drawn | {"ready_slots": None}),
        ours=OURS,
        copies=COPIES,
        disk=DISK.filter(bool),
        bus_s=BUS_S,
        prefill_every=PREFILL_EVERY,
        is_one_program=RARELY,
    )
    def start(self, **drawn: Any) -> None:
        super().start(groups="full", costs=None, **drawn)


DiskMachine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES // 2,
    stateful_step_count=25,
    phases=[phase for phase in Phase if SHRINKS or phase not in (Phase.shrink, Phase.explain)],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestDiskMachine = DiskMachine.TestCase


def test_the_machine_has_read_from_its_disks() -> None:
    """Else it proves nothing of them."""
    if not Machine.num_engines:
        pytest.skip("the machine has not run")
    assert Machine.num_read > 0
