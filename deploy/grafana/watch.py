"""Watch: agents on a tiny server, a Prometheus that scrapes it, and the dashboard drawn from that.

    make prometheus dashboard          # or: python -m deploy.grafana.watch [PNG]

Needs no GPU and no Grafana; about four minutes on two cores. The numbers are those of a CPU and a
random model: the picture shows what the panels look like at work, not what a GPU does.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from bench.chat.agents import agents, run_agents
from bench.serve.server import VllmServer
from bench.serve.tiny_model import make_model
from deploy.grafana.render import draw
from deploy.prometheus.running import Prometheus

PNG = Path(__file__).resolve().parents[2] / "docs" / "images" / "dashboard.png"
LOAD = agents(programs=16, turns=6, rate=0.5)
# Half of what the agents need in VRAM and a fifth of it in DRAM: pins give way, and DRAM evicts.
NUM_BLOCKS, DRAM_BYTES = 260, "40MiB"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("png", type=Path, nargs="?", default=PNG)
    options = parser.parse_args(argv)
    connector = {"dram_bytes": DRAM_BYTES, "policy": "adaptive"}
    model = make_model()
    with (
        VllmServer(model, "watched", num_blocks=NUM_BLOCKS, connector=connector) as server,
        Prometheus([server.url]) as prometheus,
    ):
        began = time.time()
        asyncio.run(run_agents(server.url, LOAD))
        options.png.parent.mkdir(parents=True, exist_ok=True)
        draw(prometheus.url, options.png, began, time.time(), "20s")
    print(options.png)


if __name__ == "__main__":
    main()
