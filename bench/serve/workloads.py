"""The loads that can be named: what a program is, how many there are, how they arrive.

README.md has them.
"""

from __future__ import annotations

from pathlib import Path

from bench.common.plans import Added
from bench.common.workloads import SHARED, TURNS
from bench.serve import own, replay
from bench.serve.programs import Defaults, Source, Uniform, WorkloadError

SWEEP = Uniform(
    "sweep",
    "job_",
    TURNS,
    shared_tokens=SHARED,
    defaults=Defaults("poisson:1"),
)

# One request at a time, so that what is kept depends on decisions alone: round robin over more
# contexts than fit is the worst case of LRU. Prompts: 700, 908, 1116, 1324 tokens.
PRESSURE = Uniform(
    "pressure",
    "program_",
    (Added(700, 8), *(Added(200, 8) for _ in range(3))),
    shared_tokens=0,
    defaults=Defaults("turns", programs=6),
    size=6,
)
NAMED: dict[str, Source] = {each.name: each for each in (SWEEP, PRESSURE)}


def find_workload(text: str) -> Source:
    """The workload that `text` names, or whose file it is."""
    if text in NAMED:
        return NAMED[text]
    kind, _, path = text.partition(":")
    if kind == "claude-code" and path:
        return replay.read(path)
    if text.endswith(".toml"):
        return own.read(Path(text))
    if Path(text.partition(",")[0]).exists():
        return replay.read(text, "recorded")
    raise WorkloadError(
        f"--workload {text}: not known; there is {', '.join(NAMED)}, claude-code:FILE, "
        "your own FILE.toml, and a trace that somebody recorded"
    )
