"""A small profiler trace of a server with the connector: what a step takes beside copies, and what
our hooks take of it.

python -m bench.gpu.profile --model FOLDER --out FOLDER -- --load-format dummy

vLLM's own torch profiler writes the trace, with its own named ranges around the parts of a step and
ours around our hooks (VLLM_CUSTOM_SCOPES_FOR_PROFILING=1; with VLLM_NVTX_SCOPES_FOR_PROFILING=1 and
Nsight Systems the same ranges are NVTX). The file opens in chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import gzip
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bench.cli import start, teaching_parser
from bench.common.tables import quantile
from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.tiny_model import make_model

FORWARD = "gpu_model_runner: forward"  # vLLM's own name for it
HOOK = "continuum: "
COPIES = ("Memcpy HtoD", "Memcpy DtoH", "gather", "scatter")
WRITE_S = 240.0  # a trace is written after the seconds that it is of
TEACH = """Contexts go round through a pool that holds half of them, so that the traced steps have
stores and loads beside them; a stream that only decodes runs through all of it.
--cpu: a tiny model on vLLM's CPU build, where copies are memcpy: for rehearsals."""


@dataclass(frozen=True)
class Load:
    """Tokens of a context, of an answer, of the stream; contexts; tokens of a block."""

    context: int
    answer: int
    stream: int
    contexts: int
    block: int


GPU, CPU = Load(3000, 16, 200, 12, 16), Load(400, 4, 30, 4, 32)


@dataclass(frozen=True)
class Steps:
    """Milliseconds of forward passes, with and without a copy under way, and of our hooks."""

    alone: list[float]
    beside: list[float]
    hooks: dict[str, list[float]]

    def __str__(self) -> str:
        """Medians, with the 99th percentile of steps."""
        told = []
        for name, values in (("steps alone", self.alone), ("beside copies", self.beside)):
            if values:
                p50, p99 = quantile(values, 0.5), quantile(values, 0.99)
                told.append(f"{name} {p50:.2f} ms (P99 {p99:.2f}, {len(values)} of them)")
        medians = {name: 1e3 * quantile(values, 0.5) for name, values in self.hooks.items()}
        hooks = ", ".join(f"{name} {micros:.0f} us" for name, micros in sorted(medians.items()))
        return "; ".join((*told, f"hooks: {hooks}"))


def main(argv: Sequence[str] | None = None) -> None:
    """Start a server, trace some seconds of it, and say what the trace has."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    load = CPU if options.cpu else GPU
    with server(options, load) as serving:
        for number in range(load.contexts):  # compiles whatever it compiles, and fills DRAM
            turn(serving, number, load.context, load.answer)
        serving.post("/start_profile")
        stream = threading.Thread(target=turn, args=(serving, -1, load.block, load.stream))
        stream.start()
        for number in range(load.contexts):
            turn(serving, number, load.context, load.answer)
        stream.join()
        serving.post("/stop_profile", timeout_s=WRITE_S)
    events = [*chain.from_iterable(map(events_of, traces(options.out)))]
    found = steps(events)
    if not found.hooks:
        raise SystemExit(f"no trace in {options.out} has our hooks; see the server's log there")
    print(found)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what follows `--` goes to `vllm serve`."""
    parser = teaching_parser("python -m bench.gpu.profile", (__doc__ or "").split("\n\n")[0], TEACH)
    parser.add_argument("--model", type=Path, help="folder of a model (the tiny Llama)")
    parser.add_argument("--out", type=Path, required=True, help="where the traces go")
    parser.add_argument("--cpu", action="store_true", help="small enough for two cores")
    parser.add_argument("serve", nargs="*", help="after `--`: more arguments of `vllm serve`")
    options = parser.parse_args(argv)
    options.out = options.out.absolute()
    return options


def server(options: argparse.Namespace, load: Load) -> VllmServer:
    """A server whose VRAM holds half of the contexts."""
    profiler = {"profiler": "torch", "torch_profiler_dir": str(options.out)}
    profiler |= {"torch_profiler_with_stack": False}
    return VllmServer(
        options.model or make_model(),
        "gpu-profile",
        connector={"policy": "lru_offload", "dram_bytes": "1GiB" if options.cpu else "16GiB"},
        num_blocks=load.contexts * load.context // 2 // load.block,
        max_model_len=load.context + load.stream,
        block_size=load.block,
        dtype="float32" if options.cpu else "bfloat16",
        eager=options.cpu,
        args=(*options.serve, "--profiler-config", json.dumps(profiler)),
        env={"VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1"},
    )


def turn(serving: VllmServer, number: int, num_prompt: int, num_answer: int) -> None:
    """An answer to the context of this number."""
    prompt = [10 + (7 * number + 13 * at) % 400 for at in range(num_prompt)]
    body = {"model": SERVED_NAME, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": num_answer, "vllm_xargs": {"job_id": f"program {number}"}}
    serving.post("/v1/completions", body)


def traces(folder: Path) -> list[Path]:
    """What the profiler of each process left."""
    return sorted(folder.rglob("*.json*"))


def events_of(path: Path) -> Iterable[dict[str, Any]]:
    """The events of a trace that have a length."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        told = json.load(file)
    return (e for e in told.get("traceEvents", ()) if e.get("ph") == "X")


def steps(events: Iterable[dict[str, Any]]) -> Steps:
    """Forward passes, as vLLM's own ranges say, apart by whether a copy overlaps them."""
    forwards, copies, hooks = list[tuple[float, float]](), list[tuple[float, float]](), {}
    for event in events:
        name, span = str(event["name"]), (float(event["ts"]), float(event["ts"]) + event["dur"])
        if name == FORWARD and event.get("cat") != "gpu_user_annotation":
            forwards.append(span)
        elif name.startswith(COPIES):
            copies.append(span)
        elif name.startswith(HOOK) and event.get("cat") != "gpu_user_annotation":
            hooks.setdefault(name.removeprefix(HOOK), list[float]()).append(event["dur"] / 1e3)
    apart: dict[bool, list[float]] = {True: [], False: []}
    for begin, end in forwards:
        is_beside = any(start < end and begin < stop for start, stop in copies)
        apart[is_beside].append((end - begin) / 1e3)
    return Steps(apart[False], apart[True], hooks)


if __name__ == "__main__":
    start(main, "python -m bench.gpu.profile")
