"""The state machine of machine.py, for as long as a test may take.

MACHINE_EXAMPLES=2000 makes a long run of it; MACHINE_SHRINK=1 makes a failure short, in minutes.
`python -m tests.vllm.long_machine` takes a number of engine steps, seed by seed.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

from tests.vllm.machine import Machine

NUM_EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "60"))
SHRINKS = "MACHINE_SHRINK" in os.environ

Machine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=25,
    phases=[phase for phase in Phase if SHRINKS or phase not in (Phase.shrink, Phase.explain)],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestMachine = Machine.TestCase
