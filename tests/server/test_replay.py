"""The lab against a real server: the same arrivals, the same decisions.

A short run on `vllm serve` is recorded and played in virtual time, by the product's class over
vLLM's scheduler in both. What is compared does not hang on how fast this machine is: every gap
is far from every TTL, and turns of different programs hardly meet.
"""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path

import pytest

from bench.serve.server import VllmServer
from bench.sim.hardware import Gpu, Machine, Model
from bench.sim.replay import Recording, recorded, recording
from tests.server.conftest import ServerFactory
from tests.server.helpers import ask, eventually, in_flight, read_trace, terminate, text_of

with warnings.catch_warnings():  # warnings are errors, but not those of others' imports
    warnings.simplefilter("ignore")
    from bench.sim.arms.ours import ours
    from bench.sim.lab import Lab

NUM_BLOCKS = 57  # of 32 tokens: two programs in the end, of five
NUM_SLOTS = 160
TTL_S = 3.0
# Programs start a second apart. Gaps before each turn: well within the TTL, or well beyond it.
GAPS = {
    "p0": (0.0, 0.5, 0.5, 6.0),
    "p1": (1.0, 0.5, 6.0, 0.5),
    "p2": (2.0, 6.0, 0.5, 0.5),
    "p3": (3.0, 0.5, 0.5, 0.5),
    "p4": (4.0, 6.0, 6.0, 0.5),
}
TASK, TOOL, ANSWER = 380, 150, 12  # tokens
TOO_SLOW_S = 2.5  # a turn that took so long may have met another one


def agent(server: VllmServer, name: str) -> None:
    """One program: a completion per turn, each prompt the last one, its answer and more."""
    history: list[str] = []
    for number, gap_s in enumerate(GAPS[name]):
        time.sleep(gap_s)  # the tool, not a wait for the server
        history.append(text_of(TASK if not number else TOOL, f"{name} {number}"))
        is_final = number == len(GAPS[name]) - 1
        says = {"continuum": {"program": name, "final": is_final}}
        answer = ask(
            server, "completions", history, ANSWER, kv_transfer_params=says, ignore_eos=True
        )
        history.append(answer["choices"][0]["text"])


@pytest.fixture(scope="module")
def trace(server_factory: ServerFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "trace.jsonl"
    server = server_factory(
        "recorded",
        num_blocks=NUM_BLOCKS,
        connector={
            "policy": "fixed_ttl",
            "ttl_s": TTL_S,
            "dram_bytes": NUM_SLOTS * 32 * 9216,
            "trace_path": str(path),
        },
        args=("--shutdown-timeout", "60"),
    )
    threads = [threading.Thread(target=agent, args=(server, name)) for name in GAPS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: in_flight(server) == 0)
    terminate(server)
    return path


@pytest.fixture(scope="module")
def real(trace: Path) -> Recording:
    return recorded(trace)


@pytest.fixture(scope="module")
def played(real: Recording, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The recorded arrivals in the lab, on a machine as fast as this one is, give or take."""
    return play(real, tmp_path_factory.mktemp("lab") / "trace.jsonl", ttl_s=TTL_S)


def play(real: Recording, path: Path, **options: float) -> Recording:
    start = real.start
    cpu = Gpu("CPU", 0, 1.0, 1e12, 1e9, 1e9, 1.0, 5e-3, chunk=2048, max_num_seqs=128)
    tiny = Model("tiny", 0.0, 0.2e-3, 0.0, start["block_bytes"] // start["block_size"])
    machine = Machine(
        cpu,
        tiny,
        kv_tokens=start["vram_blocks"] * start["block_size"],
        dram_bytes=start["dram_blocks"] * start["block_bytes"],
        block_size=start["block_size"],
    )
    arm = ours(start["policy"], "as recorded", trace_path=str(path), **options)
    lab = Lab(machine, arm, real.workload)
    lab.play()
    lab.engine.connector.shutdown()
    return recording(read_trace(path))


def slowest_turn_s(trace: Path) -> float:
    began: dict[tuple[str, int], float] = {}
    slowest = 0.0
    for record in read_trace(trace):
        if record["event"] in ("arrive", "return"):
            began[record["program"], record["turn"]] = record["now"]
        elif record["event"] == "decision":
            slowest = max(slowest, record["now"] - began[record["program"], record["turn"]])
    return slowest


def test_the_lab_finds_and_decides_what_the_server_found_and_decided(
    trace: Path, real: Recording, played: Recording
) -> None:
    if (seconds := slowest_turn_s(trace)) > TOO_SLOW_S:
        pytest.skip(f"the machine is too busy to compare: a turn took {seconds:.1f} s")
    assert played.start["vram_blocks"] == real.start["vram_blocks"]
    assert played.start["dram_blocks"] == real.start["dram_blocks"]
    assert played.decided == real.decided
    assert played.pin_ends == real.pin_ends


def test_the_run_was_worth_comparing(real: Recording) -> None:
    """Both tiers are hit, something was computed again, pins end in every way they can."""
    assert len(real.decided) == sum(len(gaps) for gaps in GAPS.values())
    assert any(each.vram for each in real.decided.values())
    assert any(each.dram for each in real.decided.values())
    ends = {cause for causes in real.pin_ends.values() for cause in causes}
    assert ends >= {"returned", "expired", "pressure"}


def test_another_ttl_would_be_noticed(real: Recording, tmp_path: Path) -> None:
    """Negative control: a lab that decides otherwise does not agree."""
    assert play(real, tmp_path / "trace.jsonl", ttl_s=0.2).pin_ends != real.pin_ends
