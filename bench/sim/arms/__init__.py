"""The lab's arms, by name."""

from bench.common.arms import Role
from bench.sim.arms.arm import Asking, LabArm
from bench.sim.arms.ours import OURS, PARTS
from bench.sim.arms.rivals import INFINITE, RIVALS

ARMS: dict[str, LabArm] = {arm.name: arm for arm in (*RIVALS, *OURS, *PARTS, INFINITE)}


def role_of(name: str) -> Role:
    """Who an arm is to us; one that is not here, as in older results, is a rival."""
    return ARMS[name].role if name in ARMS else Role.RIVAL


__all__ = ["ARMS", "Asking", "LabArm", "role_of"]
