"""What a run says: one record, as it lies in a JSON-lines file."""

from __future__ import annotations

import msgspec


class TurnRecord(msgspec.Struct, frozen=True, array_like=True):
    """One turn; times in virtual seconds since the run began."""

    program: str
    index: int
    arrived: float
    first_token: float
    finished: float
    num_prompt: int
    num_local: int  # prompt tokens hit in VRAM
    num_external: int  # brought from DRAM


class RunRecord(msgspec.Struct, frozen=True):
    """One arm on one workload and machine. `jct_s`: per program, from its first arrival to its
    last answer; `stored_bytes`, `loaded_bytes`: over PCIe; `written_bytes`, `read_bytes`: to and
    from a disk; `extra`: what the arm counted; `note`:
    the workload's."""

    arm: str
    workload: str
    machine: str
    seed: int
    jct_s: dict[str, float]
    turns: list[TurnRecord]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_local_tokens: int
    num_external_tokens: int
    stored_bytes: float
    loaded_bytes: float
    num_preemptions: int
    num_steps: int
    busy_s: float
    span_s: float
    wall_s: float  # real seconds that the simulation took
    written_bytes: float = 0.0
    read_bytes: float = 0.0
    extra: dict[str, float] = {}
    note: str = ""
