"""Job: one run of the lab as plain data; the record of what it says; and the lines of the file that
results are kept in."""

from __future__ import annotations

from typing import Any

import msgspec

Plain = str | int | float | bool | None | list[Any]


class Job(msgspec.Struct, frozen=True):
    """One arm, one workload, one machine. `params`: the workload's, without its seed; `machine`:
    arguments of `hardware.machine`. Whatever is left out is what those functions default to."""

    arm: str
    workload: str
    params: dict[str, Plain] = {}
    machine: dict[str, Plain] = {}
    seed: int = 42

    @property
    def key(self) -> str:
        """What tells it from others, in every process."""
        return msgspec.json.encode(self, order="sorted").decode()

    def __str__(self) -> str:
        said = {**self.machine, **self.params, "seed": self.seed}
        return " ".join((self.arm, self.workload, *(f"{k}={v}" for k, v in said.items())))


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
    from a disk; `extra`: what else was counted; `note`: the workload's."""

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


class Start(msgspec.Struct, frozen=True, tag="start"):
    """One call that wrote to the file. `versions`: of what decides the results."""

    command: str
    versions: dict[str, str]


class Result(msgspec.Struct, frozen=True, tag="result", omit_defaults=True):
    """What became of a job: a record, or the `error` that it ended with. `code`: by which code
    (provenance.code_mark)."""

    job: Job
    record: RunRecord | None = None
    error: str = ""
    code: str = ""

    def is_done(self, code: str) -> bool:
        """Whether it need not be played again by that code."""
        return not self.error and self.code == code


Line = Start | Result
