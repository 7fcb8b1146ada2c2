"""Print every table of this folder's README: half an hour, on a quiet machine.

Run from the repository root:

    python -m bench.hook_cost
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date

from bench.cli import start, teaching_parser
from bench.sim.provenance import ROOT, versions

PARTS = ("paired", "queue", "calls", "probe")


def main(argv: Sequence[str] | None = None) -> int:
    """Each part is a process of its own, because a heap that others filled is slower."""
    parser = teaching_parser("python -m bench.hook_cost", str(__doc__).splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; or all")
    parts = parser.parse_args(argv).parts or PARTS
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"{date.today()}, {told}", flush=True)
    for part in parts:
        print(f"\n## {part}, load average {os.getloadavg()[0]:.1f}\n", flush=True)
        module = f"bench.hook_cost.{part}"
        done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    start(main, "python -m bench.hook_cost")
