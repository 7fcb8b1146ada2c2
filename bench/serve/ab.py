"""Several ways to serve under the same load: one server after the other, in alternating order.

Every arm gets the same model, VRAM pool, DRAM and requests; repeat by repeat another seed. Odd
repeats go through the arms forwards, even ones backwards, so that a machine that grows slower
favours nobody. An arm that cannot run is written down with its reason, and the others go on. A
result folder that is there already is gone on with: what is done stays.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.serve import package, results
from bench.serve.api import ApiError, Patience
from bench.serve.arms import Arm, CannotRunError, Place
from bench.serve.arrivals import read_arrivals
from bench.serve.live import kv_bytes_per_token, live, longest_context
from bench.serve.load import Load
from bench.serve.metrics import parse_metrics, total
from bench.serve.plans import Tokens
from bench.serve.record import RunFolder, machine, versions
from bench.serve.results import Dram, ResultError, Run, State, Turn
from bench.serve.rivals import FOLDER, LmcacheServer
from bench.serve.server import SERVED_NAME, ServerError, ServerOptions, VllmServer
from bench.serve.session import Manner, measure
from bench.serve.workloads import Workload

EXPERIMENT = "experiment.json"
WHY_NO_TIER = re.compile(r"No DRAM tier on this rank: .*|ContinuumConnector steps aside: .*")
WARM_UP = 1  # its tokens stay in the tiers as those of any finished program would


@dataclass(frozen=True)
class Experiment:
    """What is compared, and under what load. `pressures`: live KV / DRAM, one set of runs each."""

    arms: tuple[Arm, ...]
    workload: Workload
    model: Path
    pressures: tuple[float, ...] = (2.0,)
    repeats: int = 1
    seed: int = 42
    arrivals: str = ""  # empty: the workload's
    duration_s: float = 0.0  # 0: the workload's
    programs: int = 0  # 0: the workload's
    dram_bytes: int = 0  # if not 0: what there is, whatever the pressure
    vocab: tuple[int, int] = (1000, 30_000)
    server: ServerOptions = field(default_factory=ServerOptions)
    shims: Path | None = None
    rivals: Path = FOLDER
    patience: Patience = field(default_factory=Patience)
    sample_s: float = 1.0

    def load(self, arm: Arm, repeat: int) -> Load:
        """The load of one run."""
        defaults = self.workload.defaults
        duration_s = self.duration_s or defaults.duration_s
        programs = self.programs or defaults.programs
        seed = self.seed + repeat
        text = self.arrivals or defaults.arrivals
        return Load(
            workload=self.workload,
            arrivals=read_arrivals(text, seed, duration_s, programs),
            tokens=Tokens(seed, *self.vocab),
            model=SERVED_NAME,
            duration_s=duration_s,
            programs=programs,
            priority=arm.priority,
        )

    def drams(self) -> list[Dram]:
        """How much DRAM there is at each pressure; what is alive is the first repeat's."""
        found = live(self.load(self.arms[0], 0))
        if found is None:
            raise ResultError(
                "how much KV is alive is not known without a number of programs; give --programs"
            )
        size = found.tokens * kv_bytes_per_token(self.model, self.server.dtype)
        wanted = [self.dram_bytes or int(size / each) for each in self.pressures]
        return [Dram(bytes=each, live_bytes=size, whose=found.whose) for each in wanted]

    def check_length(self) -> None:
        """ResultError if contexts of this load do not fit: their programs would fail half-way."""
        longest, fits = longest_context(self.load(self.arms[0], 0)), self.server.context_tokens
        if longest > fits:
            raise ResultError(
                f"the longest context of this load has {longest:,} tokens and the server takes "
                f"{fits:,}; give --max-len {longest} or more, and --blocks that hold it or 0 for "
                "all there are; a recorded load can be cut with ,longest="
            )

    def settings(self) -> dict[str, Any]:
        """What two runs must have in common to be in one folder."""
        load = self.load(self.arms[0], 0)
        return {
            "workload": self.workload.name,
            "arrivals": load.arrivals.text,
            "duration_s": load.duration_s,
            "programs": load.programs,
            "seed": self.seed,
            "vocab": f"{self.vocab[0]}:{self.vocab[1]}",
            "model": self.model.name,
            "blocks": self.server.num_blocks,
            "block_size": self.server.block_size,
            "dtype": self.server.dtype,
            "max_len": self.server.context_tokens,
            "batch_tokens": self.server.max_num_batched_tokens,
            "seqs": self.server.max_num_seqs,
            "eager": self.server.eager,
            "server_args": list(self.server.args),
        }


@dataclass(frozen=True)
class Cell:
    """One run to be made."""

    arm: Arm
    repeat: int
    dram: Dram | None

    @property
    def name(self) -> str:
        """Of its folder."""
        dram = f"-{self.dram.pressure:.3g}x" if self.dram else ""
        return f"{self.repeat + 1:02d}-{self.arm.name.replace(':', '-')}{dram}"


def cells(experiment: Experiment) -> list[Cell]:
    """Every run in its order; an arm that uses no DRAM runs once per repeat."""
    drams = experiment.drams()
    experiment.check_length()
    planned: list[Cell] = []
    for repeat in range(experiment.repeats):
        arms = experiment.arms[:: -1 if repeat % 2 else 1]
        for number, dram in enumerate(drams):
            planned += [
                Cell(arm, repeat, dram if arm.uses_dram else None)
                for arm in arms
                if arm.uses_dram or not number
            ]
    return planned


@dataclass
class Watcher:
    """Whom the runner tells; both do nothing unless set."""

    began: Callable[[Cell, int, int], None] = lambda cell, number, of: None
    ended: Callable[[Run], None] = lambda run: None
    turn: Callable[[Turn], None] = lambda turn: None


def run_all(experiment: Experiment, out: Path, watcher: Watcher) -> State:
    """Make every run that is missing in `out`; `interrupted` after Ctrl-C."""
    planned = cells(experiment)
    check_folder(experiment, out)
    out.mkdir(parents=True, exist_ok=True)
    (out / EXPERIMENT).write_text(json.dumps(experiment.settings(), indent=1) + "\n")
    for number, cell in enumerate(planned):
        folder = out / results.RUNS / cell.name
        if is_done(folder):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        watcher.began(cell, number, len(planned))
        run = _run(experiment, cell, _next_order(out), folder, watcher)
        watcher.ended(run)
        if run.state == "interrupted":
            return "interrupted"
    return "done"


def _next_order(out: Path) -> int:
    """After all runs that are there, also those of a call with other arms."""
    folders = (path.parent for path in (out / results.RUNS).glob(f"*/{results.RUN}"))
    return 1 + max((results.read_run(folder).order for folder in folders), default=-1)


def is_done(folder: Path) -> bool:
    """Whether a run need not be made again."""
    with contextlib.suppress(ResultError):
        return results.read_run(folder).state == "done"
    return False


def check_folder(experiment: Experiment, out: Path) -> None:
    """ResultError if `out` holds runs of another experiment."""
    path, wanted = out / EXPERIMENT, experiment.settings()
    try:
        have = dict(json.loads(path.read_text())) if path.exists() else wanted
    except (ValueError, TypeError, RecursionError) as error:
        raise ResultError(f"{path} is no experiment ({error}); give another --out") from None
    other = [key for key in wanted if have.get(key) != wanted[key]]
    if other:
        raise ResultError(
            f"{out} holds runs of another experiment ({', '.join(other)} differ); give "
            "another --out"
        )


@dataclass(frozen=True)
class Prepared:
    """What a run starts: vLLM's server, and the one that must be there before it."""

    options: ServerOptions
    side: LmcacheServer | None


def prepare(experiment: Experiment, cell: Cell) -> Prepared:
    """What this run starts; CannotRunError where its arm does not run here."""
    place = Place(
        dram_bytes=cell.dram.bytes if cell.dram else 0,
        block_size=experiment.server.block_size,
        on_cpu=package.on_cpu(),
        rivals=experiment.rivals,
        shims=experiment.shims,
    )
    setup = cell.arm.setup(place)
    options = replace(
        experiment.server,
        connector=setup.connector,
        kv_transfer_config=setup.kv_transfer_config,
        args=(*experiment.server.args, *setup.args),
        env={**experiment.server.env, **setup.env},
    )
    return Prepared(options, setup.side)


def _run(experiment: Experiment, cell: Cell, order: int, folder: Path, watcher: Watcher) -> Run:
    """Start the arm's server, measure, stop it. Only bugs raise."""
    load = experiment.load(cell.arm, cell.repeat)
    run = Run(
        name=cell.name,
        arm=cell.arm.name,
        title=cell.arm.title,
        repeat=cell.repeat,
        order=order,
        workload=experiment.workload.name,
        settings=experiment.settings(),
        seed=load.tokens.seed,
        dram=cell.dram,
        model=experiment.model.name,
        versions=versions(),
        machine=machine(),
        planned_programs=load.most_programs() or 0,
    )
    with RunFolder(folder, run) as out:
        try:
            _serve(experiment, prepare(experiment, cell), load, out, watcher)
        except (CannotRunError, ServerError, ApiError) as error:
            out.close("cannot_run", _short(error))
        except KeyboardInterrupt:
            out.close("interrupted", "stopped while the server was starting")
    return run


def _serve(
    experiment: Experiment, prepared: Prepared, load: Load, out: RunFolder, watcher: Watcher
) -> None:
    options, side = prepared.options, prepared.side
    server = VllmServer(experiment.model, out.run.name, options, log=out.folder / results.LOG)
    out.run.versions = versions(options.env.get("PYTHONPATH", ""))
    with contextlib.ExitStack() as stack:
        if side is not None:
            side.log, side.start_timeout_s = out.folder / "lmcache.log", options.start_timeout_s
            stack.enter_context(side)
        stack.enter_context(server)
        out.run.url, out.run.server_start_s = server.url, server.start_s
        out.run.command = options.command(experiment.model, server.port)
        manner = Manner(experiment.patience, WARM_UP, experiment.sample_s)
        try:
            measure(server.url, load, out, manner, watcher.turn)
        except ApiError:
            if server.healthy():
                raise
        if out.run.state != "interrupted" and not server.healthy():
            out.close("died", server.cause() or f"its log does not say why: {server.log}")
        if out.run.state == "done":
            _check_tier(options, out.folder)


def _check_tier(options: ServerOptions, folder: Path) -> None:
    """Raise CannotRunError if our server served without the DRAM that it was given.

    It serves on without, so nothing fails; the last metrics are the first that surely say so.
    """
    metrics, log = folder / results.AFTER, folder / results.LOG
    if not (options.connector or {}).get("dram_bytes") or not metrics.exists():
        return
    if total(parse_metrics(metrics.read_text()), "continuum:tier_up"):
        return
    said = WHY_NO_TIER.search(log.read_text(errors="replace"))
    why = said[0] if said else f"the log should say why: {log}"
    raise CannotRunError(f"it served without its DRAM tier (continuum:tier_up is 0). {why}")


def _short(error: Exception) -> str:
    """The first two lines: a ServerError carries its log's last lines, which are kept anyway."""
    return " ".join(str(error).splitlines()[:2])[:600]
