"""Several ways to serve under the same load: one server after the other, in alternating order.

Every arm gets the same model, VRAM pool, DRAM and requests; repeat by repeat another seed. Odd
repeats go through the arms forwards, even ones backwards, so that a machine that grows slower
favours nobody. An arm that cannot run is written down with its reason, and the others go on. A
result folder that is there already is gone on with: what is done stays. Of several loads each has
a folder of its own, and an arm's server serves all of them, one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.cache import CACHE
from bench.serve import package, results
from bench.serve.api import ApiError, Patience
from bench.serve.arms import CannotRunError, Place, ServerArm
from bench.serve.arrivals import read_arrivals
from bench.serve.kept import Kept, Prepared, check_tier
from bench.serve.live import kv_bytes_per_token, live, longest_context
from bench.serve.load import Client, ClientError, Load
from bench.serve.programs import Source
from bench.serve.record import RunFolder, machine, versions
from bench.serve.results import Dram, ResultError, Run, State
from bench.serve.rivals import FOLDER
from bench.serve.server import SERVED_NAME, ServerError, ServerOptions
from bench.serve.session import Manner, measure
from bench.serve.token_ids import Tokens

EXPERIMENT = "experiment.json"
DISK = CACHE / "disk"
WARM_UP = 1  # its tokens stay in the tiers as those of any finished program would


@dataclass(frozen=True)
class Experiment:
    """What is compared, and under what load. `pressures`: live KV / DRAM, one set of runs each."""

    arms: tuple[ServerArm, ...]
    workload: Source
    model: Path
    pressures: tuple[float, ...] = (2.0,)
    repeats: int = 1
    seed: int = 42
    arrivals: str = ""  # empty: the workload's
    duration_s: float = 0.0  # 0: the workload's
    programs: int = 0  # 0: the workload's
    dram_bytes: int = 0  # if not 0: what there is, whatever the pressure
    server: ServerOptions = field(default_factory=ServerOptions)
    shims: Path | None = None
    rivals: Path = FOLDER
    disk: Path = DISK  # folders of servers that use one go below it
    disk_bytes: int = 4 * 2**30
    patience: Patience = field(default_factory=Patience)
    client: Client = field(default_factory=Client)

    def load(self, arm: ServerArm, repeat: int) -> Load:
        """The load of one run."""
        defaults = self.workload.defaults
        duration_s = self.duration_s or defaults.duration_s
        programs = self.programs or defaults.programs
        seed = self.seed + repeat
        text = self.arrivals or defaults.arrivals
        return Load(
            workload=self.workload,
            arrivals=read_arrivals(text, seed, duration_s, programs),
            tokens=Tokens(seed),
            model=SERVED_NAME,
            duration_s=duration_s,
            programs=programs,
            priority=arm.priority,
            routed=arm.routed,
        )

    def drams(self) -> list[Dram]:
        """How much DRAM there is at each pressure; what is alive is the first repeat's."""
        found = live(self.load(self.arms[0], 0))
        if found is None:
            raise ResultError(
                "how much KV is alive is not known without a number of programs; give --programs"
            )
        size = found * kv_bytes_per_token(self.model, self.server.dtype)
        wanted = [self.dram_bytes or int(size / each) for each in self.pressures]
        return [Dram(bytes=each, live_bytes=size) for each in wanted]

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
        disk = any(arm.uses_disk for arm in self.arms)
        return {
            **({"disk_bytes": self.disk_bytes} if disk else {}),
            "workload": self.workload.name,
            "arrivals": load.arrivals.text,
            "duration_s": load.duration_s,
            "programs": load.programs,
            "seed": self.seed,
            "model": self.model.name,
            "blocks": self.server.num_blocks,
            "block_size": self.server.block_size,
            "dtype": self.server.dtype,
            "max_len": self.server.context_tokens,
            "batch_tokens": self.server.max_num_batched_tokens,
            "seqs": self.server.max_num_seqs,
            "eager": self.server.eager,
            "server_args": list(self.server.args),
            **self.client.settings(),
        }


@dataclass(frozen=True)
class Cell:
    """One run to be made."""

    arm: ServerArm
    repeat: int
    dram: Dram | None

    @property
    def name(self) -> str:
        """Of its folder."""
        dram = f"-{self.dram.pressure:.3g}x" if self.dram else ""
        return f"{self.repeat + 1:02d}-{re.sub(r'[^A-Za-z0-9.+=_-]', '-', self.arm.name)}{dram}"

    def __str__(self) -> str:
        dram = f", {self.dram.bytes / 2**20:,.0f} MiB DRAM" if self.dram else ""
        return f"{self.arm.title}, repeat {self.repeat + 1}{dram}"


def cells(experiment: Experiment) -> list[Cell]:
    """Every run in its order; an arm that uses no DRAM runs once per repeat."""
    drams = experiment.drams()
    experiment.client.check(experiment.load(experiment.arms[0], 0))
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


Tell = Callable[[str], None]


def run_all(loads: Mapping[Path, Experiment], tell: Tell = lambda line: None) -> State:
    """Make every run that is missing in the folder of its load; `interrupted` after Ctrl-C.

    Loads differ in their arrivals only, so each cell of one is a cell of all. Its server serves one
    after the other and forgets in between all it has cached, or is another one where it cannot.
    """
    planned = [cells(experiment) for experiment in loads.values()]
    for out, experiment in loads.items():
        check_folder(experiment, out)
        out.mkdir(parents=True, exist_ok=True)
        (out / EXPERIMENT).write_text(json.dumps(experiment.settings(), indent=1) + "\n")
    numbers, most = itertools.count(1), sum(map(len, planned))
    for same_cell in zip(*planned, strict=True):
        with Kept() as kept:
            for cell, (out, experiment) in zip(same_cell, loads.items(), strict=True):
                number, folder = next(numbers), out / results.RUNS / cell.name
                if is_done(folder):
                    continue
                if not cell.arm.forgets:
                    kept.stop()
                shutil.rmtree(folder, ignore_errors=True)
                load = experiment.arrivals
                tell(f"{number}/{most} {cell}{load and f', {load}'}")
                run = _run(experiment, cell, out, kept)
                seconds = f" in {run.wall_s:.1f} s, start {run.server_start_s:.0f} s"
                reason = f": {run.reason}" if run.reason else ""
                tell(f"    {run.state}{seconds if run.wall_s else ''}{reason}")
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
    other = [key for key in {**wanted, **have} if have.get(key) != wanted.get(key)]
    if other:
        raise ResultError(
            f"{out} holds runs of another experiment ({', '.join(other)} differ); give "
            "another --out"
        )


def prepare(experiment: Experiment, cell: Cell) -> Prepared:
    """What this run starts; CannotRunError where its arm does not run here."""
    place = Place(
        dram_bytes=cell.dram.bytes if cell.dram else 0,
        block_size=experiment.server.block_size,
        on_cpu=package.on_cpu(),
        rivals=experiment.rivals,
        vram_tokens=max(0, experiment.server.num_blocks - 1) * experiment.server.block_size,
        shims=experiment.shims,
        disk=experiment.disk / f"{cell.name}-{os.getpid()}" if cell.arm.uses_disk else None,
        disk_bytes=experiment.disk_bytes,
    )
    setup = cell.arm.setup(place)
    options = replace(
        experiment.server,
        connector=setup.connector,
        kv_transfer_config=setup.kv_transfer_config,
        args=(*experiment.server.args, *setup.args),
        env={**experiment.server.env, **setup.env},
    )
    return options, setup


def _run(experiment: Experiment, cell: Cell, out: Path, kept: Kept) -> Run:
    """Have the arm's server, measure. Only bugs raise."""
    load = experiment.load(cell.arm, cell.repeat)
    run = Run(
        name=cell.name,
        arm=cell.arm.name,
        title=cell.arm.title,
        repeat=cell.repeat,
        order=_next_order(out),
        workload=experiment.workload.name,
        settings=experiment.settings(),
        seed=load.tokens.seed,
        dram=cell.dram,
        model=experiment.model.name,
        versions=versions(),
        machine=machine(),
        planned_programs=load.most_programs() or 0,
    )
    with RunFolder(out / results.RUNS / cell.name, run) as folder:
        try:
            experiment.client.check(load)
            _serve(experiment, prepare(experiment, cell), load, folder, kept)
        except (CannotRunError, ClientError, ServerError, ApiError) as error:
            folder.close("cannot_run", _short(error))
        except KeyboardInterrupt:
            folder.close("interrupted", "stopped while the server was starting")
    return run


def _serve(
    experiment: Experiment, prepared: Prepared, load: Load, out: RunFolder, kept: Kept
) -> None:
    options, _ = prepared
    out.run.versions = versions(options.env.get("PYTHONPATH", ""))
    server, is_used = kept.serving(prepared, experiment.model, out)
    out.run.url, out.run.command = server.url, options.command(experiment.model, server.port)
    front = kept.front
    manner = Manner(
        experiment.patience,
        WARM_UP,
        reset=is_used,
        client=experiment.client,
        front=front.url if front else "",
    )
    try:
        measure(server.url, load, out, manner)
    except ApiError:
        if server.healthy() and (front is None or front.alive()):
            raise
    if out.run.state != "interrupted" and not server.healthy():
        out.close("died", server.cause() or f"its log does not say why: {server.log}")
    elif out.run.state != "interrupted" and front and not front.alive():
        out.close("died", f"the router ended: {front.last_words()}")
    if out.run.state == "done":
        check_tier(options, out.folder)


def _short(error: Exception) -> str:
    """The first two lines: a ServerError carries its log's last lines, which are kept anyway."""
    return " ".join(str(error).splitlines()[:2])[:600]
