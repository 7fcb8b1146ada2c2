"""What the native copy engine costs its caller, how soon it copies, and how fast."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from rich.console import Console

from bench.copy_engine import report
from bench.copy_engine.bandwidth import measure_bandwidth
from bench.copy_engine.delay import measure_delay
from bench.copy_engine.machine import CpuMachine
from bench.copy_engine.progress import Progress
from bench.copy_engine.report import Section
from bench.copy_engine.rig import same_cores_afterwards
from bench.copy_engine.sizes import FULL, QUICK, Sizes
from bench.copy_engine.submit import measure_calls, measure_submit

README = Path(__file__).with_name("README.md")

TEACH = """\
what happens
  Without a GPU the engine runs over its simulated driver: the lane, its queues, trunks and
  windows are the real ones, a driver call costs nothing, and memcpy stands in for the device's
  copy engines. So these numbers say what OUR code costs, not what a device does.

reading the tables
  submit     time of the calling thread; a lane that sleeps has to be woken (a system call)
  delay      from the hand-over to the first copy, beside a thread that computes in Python:
             a Python copy thread needs the GIL for that, the engine does not
  bandwidth  against one large memmove in the same run; shuffled blocks, nothing merges
  PASS and FAIL compare with the aims of the design; the exit status does not depend on them.

examples
  python -m bench.copy_engine.run --quick
  python -m bench.copy_engine.run --only delay,submit --json delay.json
  python -m bench.copy_engine.run --write            refresh the table in README.md
"""

Say = Callable[[str], None]
Measure = Callable[[Sizes, Say], Section]

CPU_SECTIONS: dict[str, Measure] = {
    "submit": lambda sizes, say: measure_submit(CpuMachine(), sizes, say),
    "calls": lambda sizes, say: measure_calls(CpuMachine(), sizes, say),
    "delay": lambda sizes, say: measure_delay(CpuMachine(), sizes, say),
    "bandwidth": measure_bandwidth,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write where asked to."""
    options = parse(argv)
    console = Console(stderr=True, highlight=False)
    progress = Progress(console)
    sizes = QUICK if options.quick else FULL
    sections = []
    try:
        for name in options.only:
            with same_cores_afterwards():
                sections.append(CPU_SECTIONS[name](sizes, progress.say))
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    finally:
        progress.end()
    text = render(sections, options.note)
    print(text)
    if options.json:
        options.json.write_text(json.dumps([each.as_json() for each in sections]))
    if options.write:
        report.write(README, text)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.copy_engine.run",
        description=__doc__,
        epilog=TEACH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--only", type=_names, default=list(CPU_SECTIONS), help="any of: " + ", ".join(CPU_SECTIONS)
    )
    add("--quick", action="store_true", help="fewer samples, less memory (half a minute)")
    add("--json", type=Path, metavar="FILE", help="write every sample there")
    add("--write", action="store_true", help="put the tables into this bench's README.md")
    add("--note", default="", help="said of the machine above the tables")
    return parser.parse_args(argv)


def render(sections: Sequence[Section], note: str) -> str:
    """Date, machine, tables."""
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    head = f"{date.today()}, Python {python}, {cores} {platform.machine()} cores, "
    head += f"load {os.getloadavg()[0]:.1f} at the end. {note}".rstrip()
    return "\n\n".join([head, *(each.markdown() for each in sections)])


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in CPU_SECTIONS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not a section; known: {', '.join(CPU_SECTIONS)}"
            )
    return names


if __name__ == "__main__":
    sys.exit(main())
