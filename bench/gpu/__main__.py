"""Settle what a GPU must still say: every step of the plan, bounded, resumable, read for you."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from bench.cli import names_of, real, start, teaching_parser
from bench.common.tables import markdown
from bench.gpu.runner import FILE, GRACE_S, Sitting, State, open_state
from bench.gpu.steps import BY_NAME, STEPS, Step, Verdict, filled, fitting, plan
from bench.markers import rewrite
from bench.serve.rivals import FOLDER

COMMITTED = Path(__file__).with_name("result.json")  # of the last GPU that somebody had
ROOT = Path(__file__).resolve().parents[2]
LIMITS, README = ROOT / "docs" / "limits.md", ROOT / "README.md"
MARKER, IN_README = "first half hour", "card said"
TOLD = 160  # letters of a result, on the terminal
NO_CLAIM = {"machine", "shape"}  # others need them

TEACH = """\
what happens
  Steps in order of what they decide, each in a process group of its own and cut off at its bound.
  After each, gpu.json in --out says what is known. What is settled is not run again:
  the same command goes on where a sitting ended. machine, engine and shape are gates: unless one
  is proven nothing behind it is begun. At the end: what is proven, what failed, what was not
  reached. Exit status 0: all asked for is proven. 1: something failed. 2: not all was reached.

how long
  --minutes 10: answers in bfloat16, stock vLLM and ours at two rates, evenness, layout.
  --minutes 28: four rates, SimpleCPUOffload too, pieces, drafts, sleep.
  Without it: all arms, models with states, the machine's own drive, and the copy engine's figures.

examples
  python -m bench.gpu --minutes 10 --list             what there is, with its command and bound
  python -m bench.gpu --dry-run                       without a GPU: each step as far as a CPU goes
  python -m bench.gpu --minutes 28 --seconds 560      the first of three commands of 560 seconds
  python -m bench.gpu --again flash                   one step anew, then on
  python -m bench.gpu --write                         put the list into docs/limits.md
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the list, write where asked to."""
    options = parse(argv)
    if options.list:
        print(listing(options.steps, options.out))
        return 0
    state = open_state(options.out, rehearsal=options.dry_run)
    left_s = options.seconds - GRACE_S if options.seconds else float("inf")
    until = time.monotonic() + left_s
    sitting = Sitting(options.out, state, until=until, rivals=options.rivals)
    for step in sitting.run(options.steps, options.again):
        known = state.of(step)
        told = f"{word(state, known.verdict)} in {known.wall_s:.0f} s: {known.said[:TOLD]}"
        print(f"{step.name}: {told}", flush=True)
    print(f"\n{summary(state, options.steps)}\nWritten: {options.out / FILE}")
    if options.write:
        COMMITTED.write_text((options.out / FILE).read_text())
        rewrite(LIMITS, {MARKER: quoted(state)})
        rewrite(README, {IN_README: in_short(state)})
    return status(state, options.steps)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; `steps` are those to run."""
    parser = teaching_parser("python -m bench.gpu", __doc__, TEACH)
    add, some = parser.add_argument, names_of(tuple(BY_NAME), "a step")
    add("--list", action="store_true", help="print the steps and start nothing")
    add("--minutes", type=real(0), default=float("inf"), help="the plan that fits (all of it)")
    add("--only", type=some, default=[*BY_NAME], help="steps of that plan, with commas")
    add("--again", type=some, default=[], help="run these again though they are settled")
    add("--dry-run", action="store_true", help="rehearse each step on a CPU")
    add("--seconds", type=real(0), default=0.0, help="end everything after so many (0: no end)")
    add("--out", type=Path, help="result folder (runs/gpu; runs/gpu-dry-run)")
    add(
        "--rivals",
        type=Path,
        default=FOLDER,
        help="where LMCache is (python -m bench.serve.rivals)",
    )
    add("--write", action="store_true", help="put the list into docs/limits.md and README.md")
    options = parser.parse_args(argv)
    if options.write and options.dry_run:
        parser.error("--write is for what a GPU said; leave out --dry-run")
    try:
        steps = plan(fitting(options.minutes))
    except ValueError as error:
        parser.error(f"--minutes {options.minutes:g}: {error}")
    options.out = (options.out or Path("runs", "gpu" + "-dry-run" * options.dry_run)).absolute()
    options.steps = [step for step in steps if step.name in options.only]
    return options


def listing(steps: Sequence[Step], out: Path) -> str:
    """Each step: what it decides, its bound, its command and that of its rehearsal."""
    blocks = []
    for step in steps:
        dry = step.rehearsal
        rehearsal = f"none: {dry}" if isinstance(dry, str) else shlex.join(filled(dry, out))
        leaves = f", leaves {step.leaves}" if step.leaves else ""
        gate = ", a gate" if step.is_gate else ""
        head = f"{step.name}, at most {step.limit_s:.0f} s{leaves}{gate}"
        lines = (step.decides, shlex.join(filled(step.command, out)), f"dry run: {rehearsal}")
        blocks.append("\n    ".join((head, *lines)))
    seconds = sum(step.limit_s for step in steps)
    return "\n".join((*blocks, f"{len(steps)} steps, at most {seconds / 60:.0f} minutes"))


def by_verdict(state: State, steps: Sequence[Step]) -> dict[str, list[Step]]:
    """The three lists, each in the plan's order."""
    found: dict[str, list[Step]] = {verdict.value: [] for verdict in Verdict}
    for step in steps:
        found[state.of(step).verdict].append(step)
    return found


def summary(state: State, steps: Sequence[Step]) -> str:
    """What stands at the end of a run."""
    lines = [where(state)]
    for verdict, some in by_verdict(state, steps).items():
        names = ", ".join(step.name for step in some)
        cure = "; mend, then --again" if some and verdict == Verdict.FAILED.value else ""
        lines.append(f"{word(state, verdict)}: {names or 'nothing'}{cure}")
    return "\n".join(lines)


def word(state: State, verdict: str) -> str:
    """A verdict as it is told: a rehearsal proves nothing."""
    return "rehearsed" if state.rehearsal and verdict == Verdict.PROVEN.value else verdict


def where(state: State) -> str:
    """Machine and date, in a sentence."""
    kind = "Dry run on" if state.rehearsal else "On"
    return f"{kind} {state.machine}, {state.date}."


def status(state: State, steps: Sequence[Step]) -> int:
    """Of the command. What cannot be rehearsed is no fault of a rehearsal."""
    lists = by_verdict(state, steps)
    if lists[Verdict.FAILED.value]:
        return 1
    missing = [
        step
        for step in lists[Verdict.NOT_REACHED.value]
        if not (state.rehearsal and isinstance(step.rehearsal, str))
    ]
    return 2 if missing else 0


def quoted(state: State) -> str:
    """The list as docs/limits.md has it."""
    used = ", ".join(f"{name} {version}" for name, version in state.versions.items())
    rows = [(each.decides, _found(state, each)) for each in claims()]
    return f"{where(state)} {used}.\n\n{markdown(('claim', 'found'), rows)}"


def in_short(state: State) -> str:
    """The list in a sentence, for README.md."""
    card, _, _ = state.machine.partition(",")
    found = by_verdict(state, claims())
    told = ", ".join(f"{len(some)} {verdict}" for verdict, some in found.items() if some)
    vllm = state.versions.get("vllm", "")
    link = "[the list](docs/limits.md#what-is-not-proven)"
    return f"On a GPU: {card}, vLLM {vllm}, {state.date}. Of {len(claims())} claims {told}: {link}."


def claims() -> list[Step]:
    """The steps whose result says something."""
    return [step for step in STEPS if step.name not in NO_CLAIM]


def _found(state: State, step: Step) -> str:
    known = state.of(step)
    text = f"**{known.verdict}**" if known.verdict != Verdict.NOT_REACHED.value else known.verdict
    return f"{text}: {known.said}".rstrip(": ").replace("|", "\\|")


if __name__ == "__main__":
    start(main, "python -m bench.gpu")
