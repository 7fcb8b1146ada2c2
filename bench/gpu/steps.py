"""What a GPU must still say, what settles it, and how the result is read.

A plan is a list of steps in the order of what they decide, cut to the minutes that there are. A
step on which the rest depends is a gate: unless it is proven, nothing behind it is begun. Every
server takes 36 GiB of the card (16 of weights, 20 of KV), one at a time, so cards of 80 and of 140
GB run the same plan.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from bench.common.tables import mean, quantile
from bench.copy_engine.report import Target
from bench.serve import compare, results
from bench.serve.metrics import total
from bench.serve.package import on_cpu
from bench.serve.results import Loaded
from bench.serve.rivals import FOLDER
from bench.serve.summary import BY_KEY, gaps, per_turn

Command = tuple[str, ...]

OURS = "continuum:adaptive"
PLAIN, SIMPLE = "none", "simple"
STOCK_LAYOUT, DISK = "ab-stock-layout", "ab-disk"
SLOWER_AT_MOST = 1.02  # per token, of a block in one run: the noise of a run
HOOKS_MS = 0.5  # of all our hooks, per turn
UNEVEN_AT_MOST = 1.05  # of the gap between tokens that 99 % do not exceed
BLOCKS = 10_000  # the VRAM pool: 12 contexts at their longest; a whole GPU would evict nothing
DRAM, LITTLE_DRAM = "26GiB", "8GiB"  # 16 more; 5 more, so that a disk has something to do
MODEL = "{out}/llama-3.1-8b-shape"
PYTHON = ("python", "-m")
BENCH = (*PYTHON, "bench.serve.commands")
COPIES = (*PYTHON, "bench.copy_engine.run")
EQUAL = (*PYTHON, "tests.gpu.serve_equal")
# A vLLM for GPUs starts no server without one.
CAN_SERVE = on_cpu() or shutil.which("nvidia-smi") is not None
ON_CPU: Command = ("--dram", "128MiB") if CAN_SERVE else ("--dry-run",)  # of answers
QUERY = "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"


@dataclass(frozen=True)
class Size:
    """How much of the published sweep there is time for. At the first rate everything fits."""

    minutes: float  # of all steps of the plan, as long as an H200 took or the lab says
    rates: tuple[int, ...]
    programs: int  # that arrive at each rate
    arms: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Of `bench ab`, in the result folder."""
        return f"ab-{self.programs}"


SHORT = Size(10, (1, 6), 24, (PLAIN, OURS))
MIDDLE = Size(28, (1, 3, 6, 10), 40, (PLAIN, OURS, SIMPLE))
ALL_ARMS = (PLAIN, OURS, SIMPLE, "none-priority", "continuum:fixed_ttl", "lmcache-mp")
LONG = Size(float("inf"), (1, 3, 6, 10), 60, ALL_ARMS)
SIZES = (SHORT, MIDDLE, LONG)


class Verdict(Enum):
    """How a step ended; the words are those of the list."""

    PROVEN = "proven"
    FAILED = "failed"
    NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Ended:
    """A command that ended well: what it printed, and the folder where its file lies."""

    text: str
    out: Path

    @property
    def last_line(self) -> str:
        """What it said last."""
        return ([line for line in self.text.splitlines() if line.strip()] or [""])[-1].strip()


Reading = tuple[Verdict, str]


@dataclass(frozen=True)
class Step:
    """One command. `{out}` in it is the result folder, `python` the one that runs this."""

    name: str
    decides: str  # what is known once it has run, as a claim
    command: Command
    limit_s: float
    read: Callable[[Ended], Reading]
    rehearsal: Command | str  # the same on a CPU, or why there is no such thing
    leaves: str = ""  # a file or folder in the result folder, beside its log
    is_gate: bool = False
    since: tuple[int, int] = (0, 0)  # vLLM before that has it not; then the step does not run


def filled(command: Command, out: Path, rivals: Path = FOLDER) -> list[str]:
    """What is run: `{out}` is the result folder, `{rivals}` where LMCache is."""
    words = [word.replace("{out}", str(out)).replace("{rivals}", str(rivals)) for word in command]
    return [sys.executable if word == "python" else word for word in words]


# --- how results are read ---------------------------------------------------------------------
def said(ended: Ended) -> Reading:
    """The exit status was the verdict; its reason is what was said last."""
    return Verdict.PROVEN, ended.last_line


def machine(ended: Ended) -> Reading:
    """A line per GPU."""
    found = re.findall(r"^(?!name).+,.+$", ended.text, re.M)
    return (Verdict.PROVEN if found else Verdict.FAILED), "; ".join(found)


def tests(name: str, ended: Ended) -> Reading:
    """Of a JUnit file: tests that ran. Where all are skipped nothing is known."""
    suites = ElementTree.parse(ended.out / name).getroot().findall("testsuite")
    num_skipped = sum(int(suite.get("skipped", 0)) for suite in suites)
    num_run = sum(int(suite.get("tests", 0)) for suite in suites) - num_skipped
    verdict = Verdict.PROVEN if num_run else Verdict.NOT_REACHED
    return verdict, f"{num_run} tests passed, {num_skipped} skipped"


def aims(name: str, ended: Ended) -> Reading:
    """Of bench.copy_engine's file: every aim met. Where there is none, that it was measured."""
    sections = json.loads((ended.out / name).read_text())
    targets = [Target(**each) for section in sections for each in section["targets"]]
    if missed := [str(each) for each in targets if not each.is_met]:
        return Verdict.FAILED, "; ".join(missed)
    num_rows = sum(len(section["rows"]) for section in sections)
    told = f"{len(targets)} aims met" if targets else f"{num_rows} rows measured, no aim"
    return (Verdict.PROVEN if num_rows else Verdict.NOT_REACHED), told


def sweep(size: Size, arm: str, ended: Ended) -> Reading:
    """Of `bench ab`: mean and P95 JCT at each rate, first tokens, and whether answers are stock's;
    ours must not be longer than stock vLLM's."""
    told, verdict = [], Verdict.PROVEN
    for rate in size.rates:
        found = by_arm(ended.out / size.folder / f"rate-{rate}")
        if arm not in found or (arm == OURS and PLAIN not in found):
            return Verdict.NOT_REACHED, f"rate {rate}: no run of {arm} or of {PLAIN} is done"
        jct_s = BY_KEY["jct_mean_s"].value
        if arm == OURS and jct_s(found[arm]) > jct_s(found[PLAIN]):
            verdict = Verdict.FAILED
        told.append(f"{rate}/s: {figures(found[arm], found.get(PLAIN))}")
    return verdict, "; ".join(told)


def figures(run: Loaded, plain: Loaded | None) -> str:
    """One arm at one rate: mean and P95 JCT, first tokens of first turns, T8/T1, answers."""
    jct_s = [each.jct_s for each in run.finished]
    first_s = BY_KEY["ttft_first_mean_s"].value(run)
    told = f"JCT {mean(jct_s):.1f} (P95 {quantile(jct_s, 0.95):.1f}) s"
    told += f", first turns {first_s:.2f} s, T8/T1 {last_to_first(run):.2f}"
    if plain is not None and plain is not run:
        same = compare.sameness(_column(plain), _column(run))
        told += f", {same.same} of {same.of} answers as stock"
    return told


def last_to_first(run: Loaded) -> float:
    """How long the last turn takes over the first: 1 where nothing is computed again."""
    turns = list(per_turn(run).values())
    last_s, first_s = (mean([turn.latency_s for turn in turns[at]]) for at in (-1, 0))
    return last_s / first_s


def _column(run: Loaded) -> compare.Column:
    return compare.Column((run.run.arm, 0.0), run.run.arm, {0: run})


def evenness(size: Size, ended: Ended) -> Reading:
    """Gaps between tokens where everything fits, and what our hooks took per turn."""
    found = by_arm(ended.out / size.folder / f"rate-{size.rates[0]}")
    p99 = {arm: BY_KEY["gap_p99_ms"].value(run) for arm, run in found.items()}
    if not {PLAIN, OURS} <= p99.keys():
        return Verdict.NOT_REACHED, f"no run of {PLAIN} or {OURS} is done"
    hooks_ms = BY_KEY["hooks_ms"].value(found[OURS])
    is_even = p99[OURS] <= UNEVEN_AT_MOST * p99[PLAIN] and hooks_ms <= HOOKS_MS
    p50 = {arm: quantile(gaps(run), 0.5) for arm, run in found.items()}
    told = ", ".join(f"{arm} {p50[arm]:.1f} and {p99[arm]:.1f} ms" for arm in p99)
    told = f"gaps of tokens, P50 and P99: {told}; our hooks {hooks_ms:.2f} ms per turn"
    return (Verdict.PROVEN if is_even else Verdict.FAILED), told


def layout(size: Size, ended: Ended) -> Reading:
    """Seconds per token with vLLM's own layout, and with the block outermost, at the first rate."""
    folders = (ended.out / STOCK_LAYOUT, ended.out / size.folder)
    runs = [by_arm(each / f"rate-{size.rates[0]}").get(OURS) for each in folders]
    if None in runs:
        return Verdict.NOT_REACHED, "one of the two has no run that is done"
    stock, ours = (BY_KEY["tpot_mean_s"].value(run) for run in runs if run)
    verdict = Verdict.PROVEN if ours <= SLOWER_AT_MOST * stock else Verdict.FAILED
    return verdict, f"TPOT {1e3 * ours:.2f} ms, with vLLM's own layout {1e3 * stock:.2f} ms"


def disk(ended: Ended) -> Reading:
    """What came back from the drive, where DRAM holds a third of what it held before."""
    found = [*by_arm(ended.out / DISK / "rate-6").values()]
    if not found:
        return Verdict.NOT_REACHED, "no run is done"
    read = total(found[0].added, "continuum:disk_read_bytes_total")
    told = f"{figures(found[0], None)}; {read / 1e9:.1f} GB read from the drive"
    return (Verdict.PROVEN if read else Verdict.FAILED), told


def by_arm(folder: Path) -> dict[str, Loaded]:
    """The runs that are done, and came to an end with some program."""
    runs = results.load(folder) if (folder / results.RUNS).is_dir() else []
    return {run.run.arm: run for run in runs if run.run.state == "done" and run.finished}


# --- the steps --------------------------------------------------------------------------------
def _copies(name: str, decides: str, only: str, dry: str, limit_s: float, quick: bool) -> Step:
    """Sections of the copy engine's bench; those of a CPU instead, where there is no GPU."""
    file = f"{name}.json"
    out, sizes = ("--json", f"{{out}}/{file}"), ("--quick",) * quick
    command = (*COPIES, "--gpu", *sizes, "--only", only, *out)
    rehearsal = (*COPIES, "--quick", "--only", dry, *out)
    return Step(name, decides, command, limit_s, partial(aims, file), rehearsal, leaves=file)


def _equal(
    name: str,
    decides: str,
    limit_s: float,
    dry: Command,
    *more: str,
    env: Command = (),
    serve: Command = (),
    since: tuple[int, int] = (0, 0),
) -> Step:
    """Answers beside stock vLLM's. `serve`: for the servers."""
    end = ("--", *serve) if serve else ()
    rehearsal = (*env, *EQUAL, *more, *dry, *end)
    command = (*env, *EQUAL, *more, *end)
    return Step(name, decides, command, limit_s, said, rehearsal, since=since)


def _tests(mark: str) -> Command:
    return (
        *(*PYTHON, "pytest", "tests/gpu", "-q", "-m", mark, "-rs", "-W", "ignore"),
        *("-p", "no:cacheprovider", "--junitxml", "{out}/engine.xml"),
    )


SERVE = "--load-format dummy --gpu-memory-utilization 0.85 --attention-backend FLASH_ATTN"


def _ab(arm: str, rates: Sequence[int], programs: int, folder: str, dram: str = DRAM) -> Command:
    return (
        *(*BENCH, "ab", "--arms", arm, "--workload", "sweep"),
        *("--rates", ",".join(map(str, rates)), "--programs", str(programs)),
        *("--duration", "600", "--dram", dram, "--out", f"{{out}}/{folder}"),
        *("--model", MODEL, "--dtype", "bfloat16", "--blocks", str(BLOCKS), "--block-size", "16"),
        *("--max-len", "16384", "--batch-tokens", "8192", "--seqs", "1024", "--no-eager"),
        *("--start-timeout", "300", "--rivals", "{rivals}", "--server-args", SERVE),
    )


DECIDES = {
    PLAIN: "What stock vLLM needs for agents that overlap",
    OURS: "Agents end no later with the connector",
    SIMPLE: "What vLLM's own SimpleCPUOffload needs",
    "none-priority": "What stock vLLM needs with programs in their order",
    "continuum:fixed_ttl": "What pins of a fixed time need",
    "lmcache-mp": "What LMCache needs, where it can be installed beside this torch",
}


def plan(size: Size) -> list[Step]:
    """Every step of this size, in order of what it decides."""

    def serving(arm: str) -> Step:
        ab = _ab(arm, size.rates, size.programs, size.folder)
        limit_s = 90.0 + 100.0 * len(size.rates)
        read = partial(sweep, size, arm)
        return Step(arm, DECIDES[arm], ab, limit_s, read, (*ab, "--dry-run"), leaves=size.folder)

    stock, ours, *others = size.arms
    at_first = f"{{out}}/{size.folder}/rate-{size.rates[0]}"
    stock_layout = (
        *("env", "CONTINUUM_KV_LAYOUT=stock"),
        *_ab(OURS, size.rates[:1], size.programs, STOCK_LAYOUT),
    )
    in_one_run = Step(
        "layout",
        "A block in one run, which is one copy, does not slow decoding",
        stock_layout,
        240.0,
        partial(layout, size),
        (*stock_layout, "--dry-run"),
        leaves=STOCK_LAYOUT,
    )
    even = Step(
        "evenness",
        "Tokens come as evenly as from stock vLLM where everything fits, hooks take 0.5 ms",
        (*BENCH, "report", at_first),
        30.0,
        partial(evenness, size),
        "there are no runs to read",
    )
    steps = [MACHINE, ENGINE, FLASH, SHAPE, serving(stock), serving(ours), in_one_run]
    if size is SHORT:
        return [*steps, even]
    steps += [GATHER, even, *map(serving, others)]
    if size is MIDDLE:
        return [*steps, DRAFTS, SLEEP]
    return [*steps, HYBRID, DRAFTS, ON_DRIVE, SLEEP, *ANSWERED]


MACHINE = Step(
    "machine",
    "There is a GPU, and this is what it is",
    ("nvidia-smi", QUERY, "--format=csv"),
    30.0,
    machine,
    "there is no GPU to ask",
    is_gate=True,
)
ENGINE = Step(
    "engine",
    "The copy engine is right over the real driver: every path, order, growth",
    _tests("gpu"),
    150.0,
    partial(tests, "engine.xml"),
    _tests("native"),
    leaves="engine.xml",
    is_gate=True,
)
SHAPE = Step(
    "shape",
    "The model of the sweep is there: Llama-3.1-8B without its weights",
    (*PYTHON, "bench.serve.tiny_model", "--llama-8b", MODEL),
    60.0,
    said,
    (*PYTHON, "bench.serve.tiny_model", "--llama-8b", MODEL),
    is_gate=True,
)
FLASH = _equal(
    "flash",
    "Answers are stock vLLM's with FlashAttention, bfloat16 and CUDA graphs",
    *(240.0, ("--dry-run",), "--flash"),
)
GATHER = _equal(
    "gather",
    "Answers are stock vLLM's where each layer is copied for itself, in pieces",
    *(150.0, ON_CPU),
    env=("env", "CONTINUUM_KV_LAYOUT=stock"),
)
DRAFTS = _equal(
    "drafts",
    "Answers are stock vLLM's with drafts (n-grams)",
    *(180.0, ON_CPU),
    serve=(
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}',
    ),
)
SLEEP = _equal(
    "sleep",
    "Answers are stock vLLM's after the server has slept, its KV cache unmapped",
    *(240.0, ON_CPU, "--sleep"),
)
HYBRID = _equal(
    "hybrid",
    "Answers of a model with states (Mamba2) are stock vLLM's",
    *(240.0, ON_CPU, "--shape", "granite"),
    since=(0, 30),
)
_ON_DRIVE = (
    *_ab("continuum-disk", (6,), 40, DISK, LITTLE_DRAM),
    *("--disk", "64GiB", "--disk-path", "{out}/drive"),
)
ON_DRIVE = Step(
    "disk",
    "What left DRAM comes back from the machine's own drive",
    _ON_DRIVE,
    300.0,
    disk,
    (*_ON_DRIVE, "--dry-run"),
    leaves=DISK,
)
ANSWERED = (  # by an H200, and asked again where there is time
    _copies(
        "aims",
        "It copies at 95 % of the bus, and both ways at once",
        *("duplex", "submit", 120.0, False),
    ),
    _copies(
        "submit",
        "A submit costs a step 20 us, a copy begins within 5 ms",
        *("device_submit,device_delay", "delay", 140.0, True),
    ),
    _equal(
        "equal",
        "Answers with KV from DRAM are stock vLLM's, token for token (float32)",
        *(150.0, ON_CPU),
    ),
    _equal(
        "overwrite",
        "Wrong bytes in DRAM would be noticed: by that comparison, and by checksums",
        *(240.0, ON_CPU, "--overwrite"),
    ),
    _copies(
        "beside",
        "What a step pays beside transfers, and the best path by size of a piece",
        *("decode,sweep", "submit", 200.0, True),
    ),
)
STEPS = tuple(plan(LONG))
BY_NAME = {step.name: step for step in STEPS}


def fitting(minutes: float) -> Size:
    """The largest size for so many minutes; ValueError where there is none."""
    sizes = [size for size in SIZES if size.minutes <= minutes]
    if not sizes:
        least = SHORT.minutes
        raise ValueError(f"{minutes:g} settle nothing; the shortest plan takes {least:g}")
    return sizes[-1]
