"""The lab's results, frozen: what a change of the code moved, to the last digit.

    python -m bench.sim.frozen                      all cells: 20 minutes of a core
    python -m bench.sim.frozen --cells 'fast/*'     some of them
    python -m bench.sim.frozen --write              these are the results from now on

The lab is deterministic, so a change that keeps behaviour moves nothing: run it before and after
code moves. Compared is every total of a run, and when each program was done. Frozen are adaptive,
fixed_ttl and continuum with the seeds 1 (to develop on) and 101 (to report on), in frozen.json.
Exit status 1 if something moved, or could not be run.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from bench.cli import start
from bench.common.tables import markdown
from bench.sim.cells import PATH
from bench.sim.job import Result, RunRecord
from bench.sim.matrix import options, ran
from bench.sim.provenance import versions
from continuum_connector.errors import ToldError

FROZEN = PATH.with_name("frozen.json")
ARMS = "adaptive,fixed_ttl,continuum"
SEEDS = "1,101"
WHO = ("vllm", "commit")
DIGITS = 6  # of mean JCT; the digest has all of them


class Run(msgspec.Struct, array_like=True, frozen=True):
    """One run: mean JCT in seconds, and a digest of all that it came to."""

    jct_s: float
    digest: str


class Frozen(msgspec.Struct, frozen=True):
    """`runs`: by "cell: arm, seed"."""

    versions: dict[str, str]
    runs: dict[str, Run]


def main(arguments: Sequence[str]) -> int:
    """Run what is missing, then compare or write; returns the exit code."""
    parser = options("frozen", __doc__, ARMS)
    parser.set_defaults(seeds=SEEDS)
    parser.add_argument("--write", action="store_true", help=f"write {FROZEN.name}")
    said = parser.parse_args(arguments)
    these = ran(parser, said)
    print(these.done, file=sys.stderr)
    now = taken(these.results)
    if these.done.exit_code or not now:
        return these.done.exit_code or 1
    if said.write:
        write(now)
        print(f"Written: {len(now)} runs to {FROZEN.name}.")
        return 0
    frozen = read()
    moved = compare(frozen, now)
    since = f"since commit {frozen.versions.get('commit', '?')} on vLLM {frozen.versions['vllm']}"
    if not moved:
        print(f"{len(now)} runs are equal to the last digit, {since}.")
        return 0
    print(f"{len(moved)} of {len(now)} runs moved, {since}.\n")
    print(markdown(("run", "mean JCT, s", "now", "ratio"), moved))
    return 1


def read(path: Path = FROZEN) -> Frozen:
    """What is frozen. ToldError if it is of another vLLM, whose scheduler plays otherwise."""
    frozen = msgspec.json.decode(path.read_bytes(), type=Frozen)
    here = versions().get("vllm", "")
    if frozen.versions["vllm"] != here:
        raise ToldError(
            f"{path.name} is of vLLM {frozen.versions['vllm']} and here is {here}, whose scheduler "
            "may play otherwise, so nothing can be compared; install that one, or --write anew"
        )
    return frozen


def write(runs: Mapping[str, Run], path: Path = FROZEN) -> None:
    """Freeze these runs; those that are not among them stay as they are."""
    known = msgspec.json.decode(path.read_bytes(), type=Frozen).runs if path.exists() else {}
    here = {name: value for name, value in versions().items() if name in WHO}
    lines = ",\n".join(  # a run per line, so that a difference shows what moved
        f" {msgspec.json.encode(name).decode()}: {msgspec.json.encode(run).decode()}"
        for name, run in sorted({**known, **runs}.items())
    )
    said = msgspec.json.encode(here).decode()
    path.write_text(f'{{"versions": {said}, "runs": {{\n{lines}\n}}}}\n')


def taken(results: Sequence[Result]) -> dict[str, Run]:
    """By name, what each run came to."""
    return {
        f"{each.job.params['cell']}: {each.job.arm}, {each.job.seed}": run_of(each.record)
        for each in results
        if each.record is not None
    }


def run_of(record: RunRecord) -> Run:
    """What is compared: all but single turns, which the totals show, and how long it took."""
    whole = msgspec.structs.replace(record, turns=[], wall_s=0.0, extra={}, note="")
    digest = hashlib.sha256(msgspec.json.encode(whole, order="sorted")).hexdigest()[:12]
    return Run(float(f"{fmean(record.jct_s.values()):.{DIGITS}g}"), digest)


def compare(frozen: Frozen, now: Mapping[str, Run]) -> list[tuple[str, str, str, str]]:
    """Of those that came to something else than what is frozen: the run, its seconds before and now
    and their ratio; what is new first, then the largest change."""
    moved = []
    for name, after in now.items():
        before, is_now = frozen.runs.get(name), f"{after.jct_s:g}"
        if before is None:
            moved.append((math.inf, (name, "-", is_now, "new")))
        elif before.digest != after.digest:
            ratio = after.jct_s / before.jct_s
            told = (name, f"{before.jct_s:g}", is_now, f"{ratio:.4f}")
            moved.append((abs(ratio - 1.0), told))
    moved.sort(key=lambda each: -each[0])
    return [told for _, told in moved]


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]), "python -m bench.sim.frozen")
