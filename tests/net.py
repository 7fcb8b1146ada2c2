"""The net below a change that keeps behaviour: everything that would notice if it did not.

    python -m tests.net                  all of it, one after the other: hours of two cores
    python -m tests.net --quick          a part of each: some forty minutes
    python -m tests.net lab mutants      those whose name begins so

    lab       every cell's results equal to the last digit (bench/sim/frozen.py)
    machine   the state machine over vLLM's scheduler: nothing wrong, nothing stuck, on each release
    policy    random traffic: nobody finds less than with stock vLLM or without a name
    storm     100,000 requests of which some are spoiled: books closed, nothing grows
    renames   each name of vLLM's that we touch, gone: the server serves as stock
    mutants   faults that tests must see

A line for each part: how it ended and how long it took; what it printed is in a file beside it.
Exit status 1 if one failed. Tests themselves are `make test`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.versions.sources import ROOT, VERSIONS, fetch

OUT = ROOT / "runs" / "net"
STEPS, QUICK_STEPS = 170_000, 3_000  # of the state machine per release; six releases, 10^6 steps
TRACES, QUICK_TRACES = 10_000, 200
RENAMES = ("tests/vllm/test_renames.py", "tests/versions/test_renames_newest.py")


class Part(NamedTuple):
    """One command of the net; its name begins with what it is called by."""

    name: str
    command: Sequence[str]


def parts(is_quick: bool) -> list[Part]:
    """All of it, cheapest first."""
    steps, traces = (QUICK_STEPS, QUICK_TRACES) if is_quick else (STEPS, TRACES)
    machines = [
        Part(f"machine {each}", module("tests.vllm.long_machine", steps=steps, version=each))
        for each in VERSIONS
    ]
    cells = ["--cells", "fast/*,claude_code/*"] if is_quick else []
    return [
        Part("mutants", module("tests.mutants")),
        Part("lab", [*module("bench.sim.frozen"), *cells]),
        Part("storm", module("bench.storm", requests=2_000 if is_quick else 100_000)),
        Part("renames", [*module("pytest"), "-q", *RENAMES[: 1 if is_quick else None]]),
        *machines,
        Part("policy", module("tests.vllm.long_policy", traces=traces)),
    ]


def module(name: str, **options: object) -> list[str]:
    """The command that runs a module with these options."""
    said = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", name, *said]


def run(part: Part, out: Path) -> bool:
    """Run it to its end; whether it ended well, which is printed."""
    began = time.monotonic()
    path = out / f"{part.name.replace(' ', '-')}.txt"
    with path.open("w") as file:
        print(f"        {part.name} ...", end="\r", flush=True)
        status = subprocess.run(part.command, cwd=ROOT, stdout=file, stderr=file).returncode
    last = next((line for line in reversed(path.read_text().splitlines()) if line.strip()), "")
    how = "ok" if status == 0 else f"FAILED ({status}), see {path}"
    print(f"{time.monotonic() - began:6.0f} s  {part.name}: {how}; {last[:100]}", flush=True)
    return status == 0


def main(arguments: Sequence[str]) -> int:
    """Run those that are asked for; the exit status."""
    parser = argparse.ArgumentParser("python -m tests.net", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="how the names begin of those to run; else all")
    parser.add_argument("--quick", action="store_true", help="a part of each")
    said = parser.parse_args(arguments)
    names = tuple(said.names)
    picked = [each for each in parts(said.quick) if not names or each.name.startswith(names)]
    if not picked:
        parser.error(f"nothing is called {' or '.join(names)}; --help lists the parts")
    OUT.mkdir(parents=True, exist_ok=True)
    if any(each.name.startswith(("machine", "renames")) for each in picked):
        for version in VERSIONS:
            print(fetch(version), flush=True)
    ended = [run(each, OUT) for each in picked]
    print(f"{sum(ended)} of {len(picked)} parts hold")
    return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
