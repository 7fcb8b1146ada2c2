"""aiperf as the client of `continuum bench ab`: it replays our programs, and we read its records.

    python -m bench.serve.aiperf        # installs it: a venv of its own, vLLM's stays as it is

Every program becomes a Weka trace file (format: github.com/callanjfox/kv-cache-tester): a request
per turn with its tokens (`in`, `out`), the ids of the whole blocks its prompt is made of
(`hash_ids`; equal ids are equal text, within one file), and when it came. aiperf makes up text for
each block and for the tail that fills none, sends chats, as many programs at a time as `closed:N`
says, and waits out their pauses. README.md says what a file cannot say.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cache import CACHE
from bench.cli import start, teaching_parser
from bench.common.plans import ProgramPlan, Span
from bench.serve.api import Api, ApiError
from bench.serve.load import Client, ClientError, Load
from bench.serve.record import RunFolder
from bench.serve.results import Program, Turn
from bench.serve.server import end_group, spawn

FOLDER = CACHE / "clients" / "aiperf"
PACKAGE = "aiperf==0.13.0"
INSTALL = "python -m bench.serve.aiperf"
TEACH = f"It goes into {FOLDER}, a virtual environment: it needs none of vLLM's packages."
RECORDS, SUMMARY, LOG = "profile_export.jsonl", "profile_export_aiperf.json", "aiperf.log"
# One lane of a recorded session is one program here; nothing is to be split once more.
ENVIRONMENT = {"AIPERF_DATASET_WEKA_SPLIT_FLATTENED_AGENTS": "false"}
MODEL = "recorded"  # each trace names one; aiperf asks for the model that is served
NS = 1e9
STOP_S = 20.0
TOLD = {  # what it says of a whole run -> our names
    "theoretical_prefix_cache_hit": "theory_pct",
    "total_token_throughput": "tokens_per_s",
}


@dataclass(frozen=True)
class Aiperf(Client):
    """Plays loads with the aiperf of a virtual environment."""

    model: Path  # of the servers that it will meet, for its tokenizer
    block_size: int
    folder: Path = FOLDER
    version: str = ""

    @classmethod
    def installed(cls, model: Path, block_size: int, folder: Path = FOLDER) -> Aiperf:
        """ClientError, with the cure, where it is not."""
        found = sorted(folder.glob("lib/python*/site-packages/aiperf-*.dist-info"))
        if not found or not (folder / "bin" / "aiperf").exists():
            raise ClientError(
                f"--client aiperf: there is none in {folder}; install it with: {INSTALL}"
            )
        version = found[-1].name.removeprefix("aiperf-").removesuffix(".dist-info")
        return cls(model, block_size, folder, version)

    def settings(self) -> dict[str, Any]:
        return {"client": f"aiperf {self.version}"}

    def check(self, load: Load) -> None:
        """It plays programs in a closed loop, and sends neither priority nor header."""
        if not load.arrivals.at_once:
            raise ClientError(
                f"--client aiperf: it plays a number of programs at a time, and the arrivals are "
                f"{load.arrivals.text}; give --arrivals closed:N"
            )
        if load.most_programs() is None:
            raise ClientError("--client aiperf: it must know how many programs; give --programs")
        if load.priority:
            raise ClientError("--client aiperf: it sends no priority; leave out none-priority")
        if load.routed:
            raise ClientError(
                "--client aiperf: it sends no X-Session-ID, so the router would know no program; "
                "leave out router+ARM"
            )

    async def drive(self, api: Api, load: Load, folder: RunFolder) -> None:
        """Write the traces, run aiperf to its end, read its records."""
        out, traces = folder.folder / "aiperf", folder.folder / "traces"
        plans = [load.plan(number) for number in range(load.most_programs() or 0)]
        write_traces(plans, traces, self.block_size)
        with (folder.folder / LOG).open("wb") as log:
            command = self.command(api, load, traces, out)
            process = spawn(command, log, env={**os.environ, **ENVIRONMENT})
        try:
            status = await asyncio.to_thread(process.wait)
        finally:
            end_group(process, STOP_S)
        if status or not (out / SUMMARY).exists():
            raise ApiError(f"aiperf ended with status {status}: {_why(folder.folder / LOG)}", False)
        folder.run.told = told(out / SUMMARY)
        planned = {plan.name: len(plan.turns) for plan in plans}
        write_down(out / RECORDS, planned, folder)

    def command(self, api: Api, load: Load, traces: Path, out: Path) -> list[str]:
        """What is run. Records hold no text, so its own tokenizer need not count."""
        line = [str(self.folder / "bin" / "aiperf"), "profile", "--model", load.model]
        line += ["--url", api.url, "--endpoint-type", "chat", "--streaming"]
        line += ["--custom-dataset-type", "weka-trace", "--input-file", str(traces)]
        line += ["--tokenizer", str(self.model.absolute()), "--use-server-token-count"]
        line += ["--concurrency", str(load.arrivals.at_once)]
        line += ["--random-seed", str(load.tokens.seed), "--artifact-dir", str(out)]
        line += ["--extra-inputs", json.dumps({"ignore_eos": True, "temperature": 0})]
        line += ["--request-timeout-seconds", str(api.patience.timeout_s), "--ui", "none"]
        line += ["--workers-max", "2", "--record-processors", "1"]
        line += ["--no-gpu-telemetry", "--no-server-metrics"]
        line += ["--dataset-sampling-strategy", "sequential"]
        return [*line, "--num-conversations", str(load.most_programs())]


def _why(log: Path) -> str:
    """What its log calls an error, first of all."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if "ERROR" in line or "Error" in line]
    return f"{(said or lines[-1:] or [''])[0].strip()[:400]} (log: {log})"


# --- what it plays ---------------------------------------------------------------------------
def trace(plan: ProgramPlan, block: int) -> dict[str, Any]:
    """A program as one trace: each turn comes `gap_s` after the one before it was answered."""
    ids: dict[tuple[Span, ...], int] = {}  # of blocks, by all that stands before them and in them
    requests, now = [], 0.0
    for turn in plan.turns:
        now += turn.gap_s
        requests.append(
            {
                "t": round(now, 3),
                "type": "s",  # the answer is streamed
                "model": MODEL,
                "in": turn.num_prompt_tokens,
                "out": turn.answer.length,
                "hash_ids": [ids.setdefault(each, len(ids)) for each in blocks(turn.prompt, block)],
                "api_time": 0.0,  # so that `t` is made of gaps alone
                "think_time": turn.gap_s,
            }
        )
    head = {"id": plan.name, "models": [MODEL], "block_size": block, "hash_id_scope": "local"}
    return {**head, "requests": requests}


def blocks(prompt: Sequence[Span], block: int) -> Iterator[tuple[Span, ...]]:
    """The whole blocks of a prompt, each as the pieces of streams it is made of."""
    pieces: list[Span] = []
    missing = block
    for span in prompt:
        start, left = span.start, span.length
        while left:
            taken = min(left, missing)
            pieces.append(Span(span.stream, taken, start))
            start, left, missing = start + taken, left - taken, missing - taken
            if not missing:
                yield tuple(pieces)
                pieces, missing = [], block


def write_traces(plans: Iterable[ProgramPlan], folder: Path, block: int) -> None:
    """A file per program, numbered in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, plan in enumerate(plans, 1):
        text = json.dumps(trace(plan, block), separators=(",", ":"))
        (folder / f"{number:05d}.json").write_text(text + "\n")


# --- what it says ----------------------------------------------------------------------------
def told(summary: Path) -> dict[str, float]:
    """What aiperf says of the whole run, by our names."""
    found = json.loads(summary.read_text())
    return {name: float(found[tag]["avg"]) for tag, name in TOLD.items() if tag in found}


def write_down(records: Path, planned: dict[str, int], folder: RunFolder) -> None:
    """Its records as turns and programs. A program that did not run from its first turn to its
    last has turns but no line of its own."""
    lines = map(json.loads, records.read_bytes().splitlines())
    found = [line for line in lines if line["metadata"]["benchmark_phase"] == "profiling"]
    found.sort(key=lambda each: each["metadata"]["request_end_ns"])
    began = min((each["metadata"]["request_start_ns"] for each in found), default=0)
    programs: dict[str, list[Turn]] = {}
    for record in found:
        turn = _turn(record, began)
        folder.turn(turn)
        programs.setdefault(record["metadata"]["x_correlation_id"], []).append(turn)
    for turns in sorted(programs.values(), key=lambda each: each[-1].start_s):
        wanted = planned.get(turns[0].program, 0)
        if len(turns) == wanted or any(turn.error for turn in turns):
            folder.program(_program(turns, wanted))
        folder.run.wall_s = max(folder.run.wall_s, turns[-1].start_s + turns[-1].latency_s)


def _turn(record: dict[str, Any], began: int) -> Turn:
    meta, metrics, error = record["metadata"], record.get("metrics", {}), record.get("error")
    said = f"{error.get('code') or ''} {error.get('message')}".strip()[:300] if error else ""

    def number(name: str) -> float:
        return float(metrics[name]["value"]) if name in metrics else 0.0

    return Turn(
        program=meta["conversation_id"],
        turn=meta["turn_index"],
        start_s=(meta["request_start_ns"] - began) / NS,
        latency_s=(meta["request_end_ns"] - meta["request_start_ns"]) / NS,
        ttft_s=number("time_to_first_token") / 1e3,
        tpot_s=number("inter_token_latency") / 1e3,
        prompt_tokens=int(number("usage_prompt_tokens")),
        cached_tokens=int(number("usage_prompt_cache_read_tokens")),
        answer_tokens=int(number("usage_completion_tokens")),
        failures=[said] if said else [],
        error=said,
    )


def _program(turns: list[Turn], planned: int) -> Program:
    first, last = turns[0], turns[-1]
    jct_s = last.start_s + last.latency_s - first.start_s
    return Program(
        program=first.program,
        arrival_s=first.start_s,
        start_s=first.start_s,
        jct_s=jct_s,
        turns=sum(not turn.error for turn in turns),
        planned_turns=planned,
        tool_s=max(0.0, jct_s - sum(turn.latency_s for turn in turns)),
        error=next((turn.error for turn in turns if turn.error), ""),
    )


def install(folder: Path = FOLDER) -> None:
    """Make its environment; raises if pip fails."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", PACKAGE]
    subprocess.run(pip, check=True)


def main() -> None:
    """Install; `--help` only tells."""
    teaching_parser(INSTALL, "Install aiperf for `bench ab --client aiperf`.", TEACH).parse_args()
    install()


if __name__ == "__main__":
    start(main, INSTALL)
