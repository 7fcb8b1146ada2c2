"""One server under one storm: started, fired at, left alone, and asked what it still holds."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.cache import CACHE
from bench.serve.ledger import open_accounts, still_held
from bench.serve.metrics import Metrics, parse_metrics, total
from bench.serve.server import ServerOptions, VllmServer
from bench.storm.agents import Force, Storm
from bench.storm.client import Client, Tally
from bench.storm.plan import MODEL
from bench.storm.processes import resident_bytes

STOCK, OURS = "stock", "continuum"
BLOCK_SIZE = 32
NUM_BLOCKS = 129  # a third of what is alive at a time: preemptions, and pins that give way
DRAM_BLOCKS = 397
MAX_TTL_S = 6.0
MOST_PROGRAMS = 200  # of the table: full early on, so that what grows later is a leak
MAX_MODEL_LEN = 4096
IDLE_S = 60.0  # to let everything go once max_ttl_s is over
SAMPLE_S, SCRAPE_EVERY = 0.5, 4  # RSS twice a second, /metrics every other second
MIDDLEWARE = ("--middleware", "continuum_connector.middleware.ProgramMiddleware")

PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?([A-Z]+ \d\d-\d\d \S+ \[.*?\] ?)?")  # of vLLM's log lines

Say = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """RSS by process, once so many requests were done."""

    t_s: float
    done: int
    rss: dict[str, int]


@dataclass
class ArmRun:
    """What one server did in the storm. `open_accounts`, `held`: of the idle server at the end."""

    name: str
    tally: Tally = field(default_factory=Tally)
    samples: list[Sample] = field(default_factory=list)
    scrapes: list[tuple[int, Metrics]] = field(default_factory=list)  # by requests done
    answers: list[set[str]] = field(default_factory=list)
    wall_s: float = 0.0
    alive: bool = False
    open_accounts: list[str] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    tracebacks: list[str] = field(default_factory=list)  # in the server's log: their last lines

    def as_json(self) -> dict[str, Any]:
        """Everything but the metrics' buckets, for --json."""
        last = self.scrapes[-1][1] if self.scrapes else {}
        return {
            **{name: getattr(self, name) for name in ("name", "wall_s", "alive", "held")},
            **{name: getattr(self, name) for name in ("open_accounts", "tracebacks")},
            "statuses": self.tally.by_status,
            "unexpected": self.tally.unexpected,
            "hits": [[done, *hits(metrics)] for done, metrics in self.scrapes],
            "samples": [asdict(sample) for sample in self.samples],
            "metrics": {
                f"{name} {dict(sorted(labels))}": value
                for (name, labels), value in last.items()
                if not name.endswith("_bucket")
            },
        }


def hits(metrics: Metrics) -> list[float]:
    """Prompt tokens that were found, in each tier, and all."""
    tiers = ("vram", "dram")
    found = [total(metrics, "continuum:hit_tokens_total", tier=tier) for tier in tiers]
    return [*found, total(metrics, "continuum:prompt_tokens_total")]


@contextmanager
def serving(name: str, model: Path, policy: str) -> Iterator[tuple[VllmServer, Path]]:
    """A server of one arm, and the folder in which it may leave files; both are gone after."""
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    try:
        (folder / "scratch").mkdir()
        with VllmServer(model, f"storm-{name}", server_options(name, folder, policy)) as server:
            yield server, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def server_options(name: str, folder: Path, policy: str) -> ServerOptions:
    """How an arm's server is started: the same, but for the connector with all that it may have."""
    options = ServerOptions(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        start_timeout_s=900.0,  # minutes of a storm must not be lost to a machine that is busy
        env={
            "TMPDIR": str(folder / "scratch"),
            # oneDNN keeps what it made for 1,024 shapes of a batch: 600 MiB in 1,000 requests
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
            # else below TMPDIR: a minute of compiling for the first logprobs of every server
            "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # these would be below TMPDIR still
        },
    )
    if name == OURS:
        options.args = MIDDLEWARE
        options.connector = {
            "dram_bytes": DRAM_BLOCKS * BLOCK_SIZE * MODEL.kv_bytes_per_token(),
            "policy": policy,
            "max_ttl_s": MAX_TTL_S,
            "max_programs": MOST_PROGRAMS,
            **{key: str(folder / file) for key, file in FILES.items()},
        }
    return options


FILES = {"trace_path": "trace.jsonl", "state_path": "costs.json", "switch_path": "switch"}


def run_arm(name: str, model: Path, force: Force, say: Say) -> ArmRun:
    """Start the arm's server, fire the storm at it, and see what it holds once it is left alone."""
    say(f"{name}: starting a server")
    with serving(name, model, force.policy) as (server, folder):
        switch = folder / FILES["switch_path"] if name == OURS else None
        run = asyncio.run(_storm(ArmRun(name), server, force, switch, say))
        if run.alive and name == OURS:
            say(f"{name}: idle for max_ttl_s, {MAX_TTL_S:g} s, until nothing is held")
            _let_go(run, server)
        run.alive = server.healthy()
        run.tracebacks = tracebacks(server.log.read_text(errors="replace"))
    return run


async def _storm(
    run: ArmRun, server: VllmServer, force: Force, switch: Path | None, say: Say
) -> ArmRun:
    async with Client(server.url) as client:
        storm = Storm(client, force, switch, run.tally)
        await storm.probe()  # a server's first requests pay for imports
        began = time.monotonic()
        watcher = asyncio.create_task(_watch(run, storm, server.pid, say))
        try:
            await storm.run()
        finally:
            watcher.cancel()
        run.wall_s = time.monotonic() - began
        run.answers = storm.answers
        with suppress(aiohttp.ClientError, OSError):
            await storm.probe()
            run.scrapes.append((storm.done, parse_metrics(await client.get("/metrics"))))
            run.alive = True
    return run


async def _watch(run: ArmRun, storm: Storm, session: int, say: Say) -> None:
    """Sample the server's processes and numbers, and say now and then how far the storm is."""
    began, said = time.monotonic(), 0
    for tick in range(2**31):
        t_s = time.monotonic() - began
        run.samples.append(Sample(t_s, storm.done, resident_bytes(session)))
        if tick % SCRAPE_EVERY == 0:
            with suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
                done = storm.done
                run.scrapes.append((done, parse_metrics(await storm.client.get("/metrics"))))
        if storm.done * 10 // storm.force.requests > said:
            said = storm.done * 10 // storm.force.requests
            sizes = ", ".join(f"{k} {v >> 20} MiB" for k, v in run.samples[-1].rss.items())
            say(f"{run.name}: {storm.done} requests in {t_s:.0f} s; {sizes}")
        await asyncio.sleep(SAMPLE_S)


def _let_go(run: ArmRun, server: VllmServer) -> None:
    """Wait until the idle server holds nothing and its books close, or IDLE_S are over."""
    time.sleep(MAX_TTL_S)
    deadline = time.monotonic() + IDLE_S
    while True:
        samples = server.metrics()
        run.open_accounts, run.held = open_accounts(samples), still_held(samples)
        if not (run.open_accounts or run.held) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    run.scrapes.append((run.samples[-1].done, samples))


def tracebacks(log: str) -> list[str]:
    """The last line of every traceback in a server's log."""
    ends, inside = [], False
    for whole in log.splitlines():
        line = PREFIX.sub("", whole)
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line.startswith((" ", "\t")):
            ends.append(line[:200])
            inside = False
    return ends
