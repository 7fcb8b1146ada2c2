"""The lab's arms, by name."""

from bench.sim.arms.arm import Asking, LabArm
from bench.sim.arms.ours import OURS, PARTS
from bench.sim.arms.rivals import INFINITE, RIVALS

ARMS: dict[str, LabArm] = {arm.name: arm for arm in (*RIVALS, *OURS, *PARTS, INFINITE)}

__all__ = ["ARMS", "Asking", "LabArm"]
