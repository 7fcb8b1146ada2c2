"""What the native copy engine costs its caller, how soon it copies, and how fast."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from rich.console import Console

from bench.cli import names_of, start, teaching_parser
from bench.common.progress import Progress
from bench.copy_engine.caller import measure_delay, measure_submit
from bench.copy_engine.device import measure_decode, measure_duplex, measure_sweep
from bench.copy_engine.machine import Machine, find_device
from bench.copy_engine.report import Say, Section
from bench.copy_engine.rig import same_cores_afterwards
from bench.copy_engine.sizes import FULL, QUICK, Sizes
from bench.markers import rewrite
from continuum_connector.errors import ToldError, TransferError

README = Path(__file__).with_name("README.md")

TEACH = """\
what happens
  Without a GPU the engine runs over its simulated driver: the lane, its queues, trunks and
  windows are the real ones, a driver call costs nothing, and memcpy stands in for the device's
  copy engines. So these numbers say what OUR code costs, not what a device does.

reading the tables
  submit     time of the calling thread; a lane that sleeps, 50 ms after its last work, has to be
             woken (a system call)
  delay      from the hand-over to the first copy, beside a thread that computes in Python
  with a GPU, also:
  device_submit, device_delay
             the same over the real driver
  sweep      the engine by chunk size, number of blocks and path to the driver
  duplex     the engine kept at work one way and both ways, beside the peak: one large copy each way
  decode     how much kernels slow down beside transfers at full rate, large pieces and small
  PASS and FAIL compare with the aims of the design; the exit status does not depend on them.

examples
  python -m bench.copy_engine.run --quick
  python -m bench.copy_engine.run --only delay,submit --json delay.json
  python -m bench.copy_engine.run --write            refresh the tables in README.md
"""

Measure = Callable[[Machine, Sizes, Say], Section]

CPU_SECTIONS: dict[str, Measure] = {
    "submit": measure_submit,
    "delay": measure_delay,
}
DEVICE_SECTIONS: dict[str, Measure] = {
    "device_submit": measure_submit,
    "device_delay": measure_delay,
    "sweep": measure_sweep,
    "duplex": measure_duplex,
    "decode": measure_decode,
}
ALL_SECTIONS = CPU_SECTIONS | DEVICE_SECTIONS


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write where asked to."""
    options = parse(argv)
    console = Console(stderr=True, highlight=False)
    device = find_device()
    if isinstance(device, str) and options.gpu:
        console.print(f"--gpu: {device}", style="red", markup=False)
        return 2
    try:
        with Progress(console, "copy engine") as progress:
            sections = measure(options, device, progress.say)
    except TransferError as error:
        raise ToldError(str(error)) from None
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    text = render(sections, options.note, device)
    print(text)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in sections]))
    if options.write:
        rewrite(README, {"table": text})
    return 0


def measure(options: argparse.Namespace, device: Machine | str, say: Say) -> list[Section]:
    """The sections asked for; those of a device only where there is one."""
    sizes = QUICK if options.quick else FULL
    sections = []
    for name in options.only:
        machine = Machine() if name in CPU_SECTIONS else device
        if not isinstance(machine, str):
            with same_cores_afterwards():
                section = ALL_SECTIONS[name](machine, sizes, say)
            section.name = name  # the same measurement has another name on a device
            sections.append(section)
    return sections


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = teaching_parser("python -m bench.copy_engine.run", __doc__, TEACH)
    add = parser.add_argument
    names = ", ".join(ALL_SECTIONS)
    add(
        "--only",
        type=names_of(ALL_SECTIONS, "a section"),
        default=list(ALL_SECTIONS),
        help=f"any of: {names}",
    )
    add("--gpu", action="store_true", help="stop if there is no GPU (default: leave those out)")
    add("--quick", action="store_true", help="fewer samples, less memory (half a minute)")
    add("--json", type=Path, metavar="FILE", help="write every sample there")
    add("--write", action="store_true", help="put the tables into this bench's README.md")
    add("--note", default="", help="said of the machine above the tables")
    return parser.parse_args(argv)


def render(sections: Sequence[Section], note: str, device: Machine | str) -> str:
    """Date, machine, tables."""
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    head = f"{date.today()}, Python {python}, {cores} {platform.machine()} cores, "
    head += f"load {os.getloadavg()[0]:.1f} at the end. {note}".rstrip()
    left_out = ", ".join(DEVICE_SECTIONS)
    where = f"no GPU ({device}): {left_out} left out" if isinstance(device, str) else device.name
    return "\n\n".join([head, where, *(each.markdown() for each in sections)])


if __name__ == "__main__":
    start(main, "python -m bench.copy_engine.run")
