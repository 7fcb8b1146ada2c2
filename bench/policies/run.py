"""Which policy, for which gaps: real `vllm serve`, one table of tokens recomputed and JCT."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chat.agents import pool_blocks, run_agents, touch
from bench.cli import many, names_of, start, teaching_parser, whole
from bench.common.plans import ProgramPlan
from bench.markers import rewrite
from bench.policies import table
from bench.policies.regimes import LEARN, REGIMES, SEEDS, WARM_UP, live_tokens, plans
from bench.serve.metrics import by_label, delta, total
from bench.serve.server import VllmServer
from bench.serve.tiny_model import make_model

README = Path(__file__).with_name("README.md")
POLICIES = ("stock", "program_order", "fixed_ttl", "continuum", "adaptive")
LEARNERS = ("continuum", "adaptive")
PRESSURES = {"pressure": 0.5, "room": 2.5}  # VRAM pool, as a share of live contexts
BLOCK_SIZE = 32
DRAM_SHARE = 1.0  # DRAM, as a share of live contexts: not all fits there either
KV_BYTES = 9216  # of a token, tiny Llama in float32
TOOL = "bash"  # what the agents say they run; its gaps are what is learned

TEACH = """\
what happens
  For each gap regime and pool size a server per policy, all at once; on each a run that is not
  counted (seed 0; 36 programs, 108 gaps, where the policy learns, else one), then the seeds: the
  policies take turns, one works at a time, from an empty prefix cache. So what disturbs the
  machine disturbs all of them. `stock` is vLLM without the connector. What
  was measured is appended to a file, one JSON line per run, so a call that was interrupted goes
  on where it stopped, and several calls with --share and --core fill one file.

examples
  python -m bench.policies.run --write
  python -m bench.policies.run --policies stock,adaptive --regimes coding --seeds 2
  python -m bench.policies.run --share 0/2 --core 0      (and 1/2 on core 1 beside it)
"""


@dataclass(frozen=True)
class Setting:
    """What the servers that are compared have in common."""

    pressure: str
    regime: str


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    index, number = options.share
    settings = [Setting(*each) for each in itertools.product(PRESSURES, options.regimes)]
    mine = settings[index::number]
    for count, setting in enumerate(mine, start=1):
        missing = find_missing(setting, options)
        if missing:
            print(f"{count}/{len(mine)} {setting}", flush=True)
            for record in measure(setting, missing, options.core):
                print(f"  seed {record['seed']} {record['policy']}", flush=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    text = table.render(table.load(options.out))
    print(text)
    if options.write:
        rewrite(README, {"policies": text})
    return 0


def find_missing(setting: Setting, options: argparse.Namespace) -> dict[int, list[str]]:
    """Per seed the policies that have no record yet; each seed begins with another one."""
    done = table.load(options.out)
    missing = {}
    for seed in SEEDS[: options.seeds]:
        first = seed % len(options.policies)
        turns = options.policies[first:] + options.policies[:first]
        todo = [p for p in turns if (setting.pressure, setting.regime, p, seed) not in done]
        if todo:
            missing[seed] = todo
    return missing


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = teaching_parser("python -m bench.policies.run", __doc__, TEACH)
    add = parser.add_argument
    add(
        "--policies",
        type=names_of(POLICIES, "a policy"),
        default=list(POLICIES),
        help="of " + ",".join(POLICIES),
    )
    add(
        "--regimes",
        type=names_of(REGIMES, "a regime"),
        default=list(REGIMES),
        help="of " + ",".join(REGIMES),
    )
    add("--seeds", type=int, choices=SEEDS, default=SEEDS[-1], help="counted runs per server (5)")
    add("--out", type=Path, default=Path("runs/policies.jsonl"), help="where runs are kept")
    add(
        "--share",
        type=_share,
        default=(0, 1),
        metavar="I/N",
        help="every N-th regime and pool from the I-th",
    )
    add("--core", type=many, help="run server and agents on this one core")
    add("--write", action="store_true", help="put the table into this folder's README")
    options = parser.parse_args(argv)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


def measure(
    setting: Setting, missing: Mapping[int, Sequence[str]], core: int | None
) -> Iterator[Mapping[str, Any]]:
    """Start a server per policy, warm all up, and yield a record per seed and policy in turn."""
    regime = REGIMES[setting.regime]
    policies = sorted({policy for each in missing.values() for policy in each})
    with ExitStack() as stack:
        servers = {p: stack.enter_context(_server(setting, p, core)) for p in policies}
        for policy, server in servers.items():
            number = LEARN if policy in LEARNERS else 1
            run_once(server, setting, policy, WARM_UP, plans(regime, WARM_UP, number))
        for seed, turns in missing.items():
            for policy in turns:
                yield run_once(servers[policy], setting, policy, seed, plans(regime, seed))


def _server(setting: Setting, policy: str, core: int | None) -> VllmServer:
    live = live_tokens()
    regime = REGIMES[setting.regime]
    works = plans(regime, WARM_UP, LEARN), *(plans(regime, seed) for seed in SEEDS)
    pool = PRESSURES[setting.pressure] * live
    blocks = pool_blocks(pool, itertools.chain(*works), BLOCK_SIZE)
    connector = None
    if policy != "stock":
        connector = {"policy": policy, "dram_bytes": int(DRAM_SHARE * live * KV_BYTES)}
    env = {} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
    name = f"policies-{setting.pressure}-{setting.regime}-{policy}"
    return VllmServer(make_model(), name, num_blocks=blocks, connector=connector, env=env)


def run_once(
    server: VllmServer, setting: Setting, policy: str, seed: int, work: Sequence[ProgramPlan]
) -> dict[str, Any]:
    """One workload on a running server, from an empty cache."""
    server.post("/reset_prefix_cache")
    touch(server)
    before = server.metrics()
    found = asyncio.run(run_agents(server.url, work, tool=TOOL))
    touch(server)
    added = delta(server.metrics(), before)
    source = by_label(added, "vllm:prompt_tokens_by_source_total", "source")
    return {
        "pressure": setting.pressure,
        "regime": setting.regime,
        "policy": policy,
        "seed": seed,
        "jct_s": [program.jct_s for program in found.finished],
        "ttft_s": [turn.ttft_s for turn in found.turns if not turn.error],
        "failed": len(found.programs) - len(found.finished),
        "answers": {f"{turn.program}/{turn.turn}": turn.text for turn in found.turns},
        "prompt_tokens": sum(source.values()),
        "computed": source.get("local_compute", 0.0),
        "vram": source.get("local_cache_hit", 0.0),
        "dram": source.get("external_kv_transfer", 0.0),
        "preemptions": total(added, "vllm:num_preemptions_total"),
        "decisions": by_label(added, "continuum:decisions_total", "decision"),
        "pins_ended": by_label(added, "continuum:pins_ended_total", "cause"),
        "wall_s": found.run.wall_s,
    }


def _share(text: str) -> tuple[int, int]:
    index, _, number = text.partition("/")
    return whole(0)(index), whole(1)(number)


if __name__ == "__main__":
    start(main, "python -m bench.policies.run")
