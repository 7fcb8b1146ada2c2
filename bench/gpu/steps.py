"""What is unproven on a GPU, what settles it, and how the result is read. In order of what decides.

Sitting A is about copies and answers, sitting B about who serves agents best. A step of which the
rest depends is a gate: unless it is proven, nothing behind it is begun.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

from bench.copy_engine.report import Target
from bench.serve import results

OURS = "continuum:adaptive"
RATES = (2, 3)  # of the published sweep's programs, per second
WINDOW_S = 20  # seconds in which they arrive
STOCK_LAYOUT = "ab-stock-layout"
SLOWER_AT_MOST = 1.02  # per token, of a block in one run: the noise of a run
BLOCKS = 10_000  # the VRAM pool: 12 contexts at their longest; a whole GPU would evict nothing
DRAM = "26GiB"  # 16 more
MODEL = "{out}/llama-3.1-8b-shape"
PYTHON = ("python", "-m")
BENCH = (*PYTHON, "bench.serve.commands")
COPIES = (*PYTHON, "bench.copy_engine.run")
EQUAL = (*PYTHON, "tests.gpu.serve_equal")
SMALL = ("--dram", "128MiB")  # for a CPU's memory
QUERY = "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"


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
    sitting: str
    decides: str  # what is known once it has run, as a claim
    command: tuple[str, ...]
    limit_s: float
    read: Callable[[Ended], Reading]
    rehearsal: tuple[str, ...] | str  # the same on a CPU, or why there is no such thing
    leaves: str = ""  # a file or folder in the result folder, beside its log
    is_gate: bool = False


def filled(command: tuple[str, ...], out: Path) -> list[str]:
    """What is run."""
    words = [word.replace("{out}", str(out)) for word in command]
    return [sys.executable if word == "python" else word for word in words]


# --- how results are read ---------------------------------------------------------------------
def said(ended: Ended) -> Reading:
    """The exit status was the verdict; its reason is what was said last."""
    return Verdict.PROVEN, ended.last_line


def pieces(ended: Ended) -> Reading:
    """From vLLM 0.29 on a block is one piece with either runner, so the run says nothing new."""
    release = tuple(map(int, version("vllm").split("+")[0].split(".")[:2]))
    if release >= (0, 29):
        return Verdict.NOT_REACHED, f"vLLM {version('vllm')} copies each block in one piece"
    return said(ended)


def machine(ended: Ended) -> Reading:
    """A line per GPU."""
    found = re.findall(r"^(?!name).+,.+$", ended.text, re.M)
    return (Verdict.PROVEN if found else Verdict.FAILED), "; ".join(found)


def tests(name: str) -> Callable[[Ended], Reading]:
    """Of a JUnit file: tests that ran. Where all are skipped nothing is known."""

    def read(ended: Ended) -> Reading:
        suites = ElementTree.parse(ended.out / name).getroot().findall("testsuite")
        num_skipped = sum(int(suite.get("skipped", 0)) for suite in suites)
        num_run = sum(int(suite.get("tests", 0)) for suite in suites) - num_skipped
        verdict = Verdict.PROVEN if num_run else Verdict.NOT_REACHED
        return verdict, f"{num_run} tests passed, {num_skipped} skipped"

    return read


def aims(name: str) -> Callable[[Ended], Reading]:
    """Of bench.copy_engine's file: every aim met. Where there is none, that it was measured."""

    def read(ended: Ended) -> Reading:
        sections = json.loads((ended.out / name).read_text())
        targets = [Target(**each) for section in sections for each in section["targets"]]
        if missed := [str(each) for each in targets if not each.is_met]:
            return Verdict.FAILED, "; ".join(missed)
        num_rows = sum(len(section["rows"]) for section in sections)
        told = f"{len(targets)} aims met" if targets else f"{num_rows} rows measured, no aim"
        return (Verdict.PROVEN if num_rows else Verdict.NOT_REACHED), told

    return read


def sweep(arm: str) -> Callable[[Ended], Reading]:
    """Of `bench ab`: mean JCT at each rate; ours must not be longer than stock vLLM's."""

    def read(ended: Ended) -> Reading:
        told, verdict = [], Verdict.PROVEN
        for rate in RATES:
            found = mean_jct(ended.out / "ab" / f"rate-{rate}")
            for wanted in (arm, *("none",) * (arm == OURS)):
                if wanted not in found:
                    return Verdict.NOT_REACHED, f"rate {rate}: no run of {wanted} is done"
            if arm == OURS and found[arm] > found["none"]:
                verdict = Verdict.FAILED
            seconds = ", ".join(f"{name} {found[name]:.1f} s" for name in found)
            told.append(f"rate {rate}, mean JCT: {seconds}")
        return verdict, "; ".join(told)

    return read


def layout(ended: Ended) -> Reading:
    """Seconds per token with vLLM's own layout, and with the block outermost, at the first rate."""
    folders = (ended.out / STOCK_LAYOUT, ended.out / "ab")
    stock, ours = (mean_tpot(each / f"rate-{RATES[0]}") for each in folders)
    if not (stock and ours):
        return Verdict.NOT_REACHED, "one of the two has no run that is done"
    verdict = Verdict.PROVEN if ours <= SLOWER_AT_MOST * stock else Verdict.FAILED
    return verdict, f"TPOT {1e3 * ours:.2f} ms, with vLLM's own layout {1e3 * stock:.2f} ms"


def mean_tpot(folder: Path) -> float:
    """Of our runs that are done; 0 without one."""
    runs = results.load(folder) if (folder / results.RUNS).is_dir() else []
    ours = [run for run in runs if run.run.state == "done" and run.run.arm == OURS]
    times = [turn.tpot_s for run in ours for turn in run.turns if turn.tpot_s]
    return fmean(times) if times else 0.0


def mean_jct(folder: Path) -> dict[str, float]:
    """By arm, of the runs that are done and of the programs that came to their end."""
    runs = results.load(folder) if (folder / results.RUNS).is_dir() else []
    return {
        run.run.arm: fmean(each.jct_s for each in run.finished)
        for run in runs
        if run.run.state == "done" and run.finished
    }


# --- the steps --------------------------------------------------------------------------------
def _copies(name: str, decides: str, only: str, dry: str, limit_s: float, quick: bool) -> Step:
    """Sections of the copy engine's bench; those of a CPU instead, where there is no GPU."""
    file = f"{name}.json"
    out, sizes = ("--json", f"{{out}}/{file}"), ("--quick",) * quick
    command = (*COPIES, "--gpu", *sizes, "--only", only, *out)
    rehearsal = (*COPIES, "--quick", "--only", dry, *out)
    return Step(name, "A", decides, command, limit_s, aims(file), rehearsal, leaves=file)


def _equal(
    name: str,
    decides: str,
    limit_s: float,
    dry: tuple[str, ...],
    *more: str,
    env: tuple[str, ...] = (),
    read: Callable[[Ended], Reading] = said,
) -> Step:
    """Answers beside stock vLLM's."""
    command = (*env, *EQUAL, *more)
    return Step(name, "A", decides, command, limit_s, read, (*command, *dry))


def _tests(mark: str) -> tuple[str, ...]:
    return (
        *(*PYTHON, "pytest", "tests/gpu", "-q", "-m", mark, "-rs", "-W", "ignore"),
        *("-p", "no:cacheprovider", "--junitxml", "{out}/engine.xml"),
    )


def _ab(arm: str, rates: tuple[int, ...] = RATES, folder: str = "ab") -> tuple[str, ...]:
    serve = "--load-format dummy --gpu-memory-utilization 0.85 --attention-backend FLASH_ATTN"
    return (
        *(*BENCH, "ab", "--arms", arm, "--workload", "sweep"),
        *("--rates", ",".join(map(str, rates)), "--duration", str(WINDOW_S)),
        *("--dram", DRAM, "--out", f"{{out}}/{folder}"),
        *("--model", MODEL, "--dtype", "bfloat16", "--blocks", str(BLOCKS), "--block-size", "16"),
        *("--max-len", "16384", "--batch-tokens", "8192", "--seqs", "1024", "--no-eager"),
        *("--start-timeout", "300", "--server-args", serve),
    )


def _sweep(name: str, arm: str, decides: str, limit_s: float) -> Step:
    ab = _ab(arm)
    return Step(name, "B", decides, ab, limit_s, sweep(arm), (*ab, "--dry-run"), leaves="ab")


WITH_STOCK_LAYOUT = (
    *("env", "CONTINUUM_KV_LAYOUT=stock"),
    *_ab(OURS, RATES[:1], STOCK_LAYOUT),
)
RATE_FOLDERS = tuple(f"{{out}}/ab/rate-{rate}" for rate in RATES)
STEPS = (
    Step(
        name="machine",
        sitting="A",
        decides="There is a GPU, and this is what it is",
        command=("nvidia-smi", QUERY, "--format=csv"),
        limit_s=30.0,
        read=machine,
        rehearsal="there is no GPU to ask",
        is_gate=True,
    ),
    Step(
        name="engine",
        sitting="A",
        decides="The copy engine is right over the real driver: every path, order, growth",
        command=_tests("gpu"),
        limit_s=150.0,
        read=tests("engine.xml"),
        rehearsal=_tests("native"),
        leaves="engine.xml",
        is_gate=True,
    ),
    _copies(
        "aims",
        "It copies at 95 % of the bus, and both ways at once",
        *("peak,duplex", "submit", 120.0, False),
    ),
    _copies(
        "submit",
        "A submit costs a step 20 us, a copy begins within 5 ms, a pool is locked",
        *("device_submit,device_delay,pin", "delay", 140.0, True),
    ),
    _equal(
        "equal",
        "Answers with KV from DRAM are stock vLLM's, token for token (float32)",
        *(150.0, SMALL),
    ),
    _equal(
        "pieces",
        "So they are where each layer is copied for itself (up to 0.28: vLLM's other model runner)",
        *(150.0, ("--dry-run",)),
        env=("env", "VLLM_USE_V2_MODEL_RUNNER=1"),
        read=pieces,
    ),
    _equal(
        "flash",
        "So they are with FlashAttention, bfloat16 and CUDA graphs",
        *(240.0, ("--dry-run",), "--flash"),
    ),
    _equal(
        "overwrite",
        "Wrong bytes in DRAM would be noticed: by that comparison, and by checksums",
        *(240.0, SMALL, "--overwrite"),
    ),
    _copies(
        "beside",
        "What a step pays beside transfers, and the best path by size of a piece",
        *("decode,layout,sweep", "submit", 200.0, True),
    ),
    Step(
        name="shape",
        sitting="B",
        decides="The model of sitting B is there: Llama-3.1-8B without its weights",
        command=(*PYTHON, "bench.serve.gpu.shape", MODEL),
        limit_s=60.0,
        read=said,
        rehearsal=(*PYTHON, "bench.serve.gpu.shape", MODEL),
        is_gate=True,
    ),
    _sweep("none", "none", "What stock vLLM needs for agents that overlap", 480.0),
    _sweep("continuum", OURS, "Agents end no later with the connector", 300.0),
    _sweep("simple", "simple", "What vLLM's own SimpleCPUOffload needs", 420.0),
    Step(
        name="layout",
        sitting="B",
        decides="A block in one run, which is one copy, does not slow decoding",
        command=WITH_STOCK_LAYOUT,
        limit_s=240.0,
        read=layout,
        rehearsal=(*WITH_STOCK_LAYOUT, "--dry-run"),
        leaves=STOCK_LAYOUT,
    ),
    Step(
        name="report",
        sitting="B",
        decides="One page compares them",
        command=(*BENCH, "report", *RATE_FOLDERS, "-o", "{out}/ab.html"),
        limit_s=60.0,
        read=said,
        rehearsal="there are no runs to report on",
        leaves="ab.html",
    ),
)
BY_NAME = {step.name: step for step in STEPS}
SITTINGS = ("A", "B")
