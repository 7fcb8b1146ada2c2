"""The arms, by name."""

from bench.sim.arms.arm import Arm, Asking
from bench.sim.arms.oracles import ORACLES
from bench.sim.arms.ours import OURS
from bench.sim.arms.rivals import RIVALS

ARMS: dict[str, Arm] = {arm.name: arm for arm in (*RIVALS, *OURS, *ORACLES)}

__all__ = ["ARMS", "Arm", "Asking"]
