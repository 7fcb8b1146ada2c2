"""Made-up results of the lab, for tests of what is made of them."""

from __future__ import annotations

from bench.sim.job import RunRecord, TurnRecord

NUM_PROMPT, NUM_LOCAL, NUM_EXTERNAL = 100, 50, 20


def record(arm: str, factor: float = 1.0, programs: int = 5, turns: int = 3) -> RunRecord:
    """Program i arrives at i; each of its turns takes i + 1 seconds times `factor`."""
    records, jct_s = [], {}
    for i in range(programs):
        lasts = factor * (i + 1)
        for index in range(turns):
            at = i + index * lasts
            records.append(
                TurnRecord(
                    f"p{i}", index, at, at + lasts / 2, at + lasts,
                    NUM_PROMPT, NUM_LOCAL, NUM_EXTERNAL,
                )
            )  # fmt: skip
        jct_s[f"p{i}"] = turns * lasts
    number = len(records)
    return RunRecord(
        arm, "fake", "H100", 1, jct_s, records,
        num_prompt_tokens=number * NUM_PROMPT,
        num_computed_tokens=number * (NUM_PROMPT - NUM_LOCAL - NUM_EXTERNAL),
        num_local_tokens=number * NUM_LOCAL,
        num_external_tokens=number * NUM_EXTERNAL,
        stored_bytes=20e9, loaded_bytes=30e9, num_preemptions=0, num_steps=9,
        busy_s=5.0, span_s=10.0, wall_s=0.1, note="made up <here>",
    )  # fmt: skip
