"""How many turns does one client core drive? The load generator's own cost, beside openai's.

    python -m bench.serve.capacity [PROGRAMS]

A server that answers at once runs in another process; CPU seconds are the client's own, so a busy
machine does not matter much. Turns have 4,000 prompt tokens and 20 answered ones.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from openai import AsyncOpenAI

from bench.cli import start, teaching_parser, whole
from bench.common.plans import Added
from bench.serve.arrivals import read_arrivals
from bench.serve.fake_api import MODEL
from bench.serve.load import Load
from bench.serve.programs import Defaults, Uniform
from bench.serve.record import RunFolder
from bench.serve.results import Run
from bench.serve.session import Manner, measure, raise_file_limit
from bench.serve.token_ids import Tokens

PROMPT, ANSWER, TURNS = 4000, 20, 2


def main() -> None:
    """Print a line per client."""
    parser = teaching_parser("python -m bench.serve.capacity", __doc__)
    parser.add_argument("programs", nargs="?", type=whole(1, 100_000), default=200, help="at once")
    programs = parser.parse_args().programs
    command = [sys.executable, "-m", "bench.serve.fake_api"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            for name, drive in (("this one (aiohttp)", _ours), ("openai", _openai)):
                began = time.process_time()
                drive(url, programs)
                cpu_s = time.process_time() - began
                turns = programs * TURNS
                print(f"{name}: {cpu_s / turns * 1e3:.2f} ms of CPU per turn, {turns} turns")
        finally:
            server.terminate()


def _ours(url: str, programs: int) -> None:
    turns = tuple(Added(PROMPT // TURNS, ANSWER) for _ in range(TURNS))
    workload = Uniform("capacity", "p", turns, 0, Defaults("closed:1"))
    arrivals = read_arrivals(f"closed:{programs}", 1, 1.0, 0)
    load = Load(workload, arrivals, Tokens(1), MODEL, duration_s=3600.0, programs=programs)
    with (
        tempfile.TemporaryDirectory() as folder,
        RunFolder(Path(folder), Run(name="capacity")) as run,
    ):
        measure(url, load, run, Manner(warm_up=0))


def _openai(url: str, programs: int) -> None:
    async def program(client: AsyncOpenAI, tokens: list[int]) -> None:
        for turn in range(1, TURNS + 1):
            stream = await client.completions.create(
                model=MODEL,
                prompt=tokens[: PROMPT // TURNS * turn],
                max_tokens=ANSWER,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for _ in stream:
                pass

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            prompts = (list(range(n, n + PROMPT)) for n in range(programs))
            await asyncio.gather(*(program(client, tokens) for tokens in prompts))

    raise_file_limit()
    asyncio.run(run())


if __name__ == "__main__":
    start(main, "python -m bench.serve.capacity")
