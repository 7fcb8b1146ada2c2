"""Rollouts: a trainer gives a serving model other weights, again and again, and wants its memory.

Every prompt is fixed, so weights have one answer to it, and a server that never had others says
which. KV of others changes it: a server whose epochs do not end shows that this would be seen.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.tiny_model import LLAMA, make_model
from tests.server.altered import transfer_config
from tests.server.conftest import NUM_BLOCKS
from tests.server.disks import BLOCK_BYTES as BYTES
from tests.server.disks import NUM_DRAM, disk_hits, is_up, on_disk, quiet, with_disk
from tests.server.helpers import (
    administer,
    dram_hits,
    eventually,
    find_mapping,
    in_flight,
    ledger_closes,
    log_of,
    pids_of,
    tokens_of,
)

KEY = "the-trainers-own"
ENDPOINT = ("--middleware", "continuum_connector.epoch_endpoint.EpochEndpoint")
MAX_TOKENS = 12
NUM_UPDATES = 20
# Six prompts of about 20 blocks, of which VRAM has 128: together with FILLERS they push one
# another out, and what is asked again comes from below.
PROMPTS = [tokens_of(620 + 9 * i, f"rollout {i}") for i in range(6)]
FILLERS = [tokens_of(2000, f"filler {i}") for i in range(2)]

Answers = list[list[int]]


def answer(server: VllmServer, prompt: Sequence[int], **fields: Any) -> tuple[list[int], str]:
    """Token ids, and why it ended."""
    body = {"model": SERVED_NAME, "prompt": list(prompt), "max_tokens": MAX_TOKENS}
    asked = {**body, "temperature": 0, "return_token_ids": True, "ignore_eos": True, **fields}
    choice = server.post("/v1/completions", asked)["choices"][0]
    return list(choice["token_ids"] or ()), choice["finish_reason"]


def answers(server: VllmServer, **fields: Any) -> Answers:
    return [answer(server, prompt, **fields)[0] for prompt in PROMPTS]


def idle(server: VllmServer) -> None:
    eventually(lambda: in_flight(server) == 0)


def push_out(server: VllmServer, until: Callable[[VllmServer], None] = idle) -> None:
    """Let other prompts have all of VRAM; `until` waits for copies, of what is there and of them.

    What leaves DRAM before it was saved is lost, and a fast server has the fillers at once.
    """
    until(server)
    for number, filler in enumerate(FILLERS):
        answer(server, filler, cache_salt=f"filler {number}", max_tokens=1)
    until(server)


def load_weights(server: VllmServer, model: Path) -> None:
    """As trainers do that write checkpoints."""
    kwargs = {"weights_path": str(model)}
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})


def epoch(server: VllmServer) -> float:
    return server.metric("continuum:epoch")


def stale(server: VllmServer) -> float:
    """Loads that the worker refused, for they were of other weights."""
    return server.metric("continuum:transfer_failures_total", reason="stale")


@dataclass
class Weights:
    """Two sets of them, and what each answers on a server that never had others."""

    old: Path
    new: Path
    of_old: Answers = field(default_factory=list)
    of_new: Answers = field(default_factory=list)


@pytest.fixture(scope="module")
def models(tiny_model: Path) -> Weights:
    """What the old answer, the first server with them says."""
    return Weights(tiny_model, make_model(replace(LLAMA, seed=LLAMA.seed + 1)))


@pytest.fixture(scope="module")
def weights(models: Weights) -> Weights:
    with VllmServer(models.new, "test-rollouts-fresh", num_blocks=NUM_BLOCKS) as fresh:
        models.of_new = answers(fresh)
    return models


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, no epoch ends."""
    return tmp_path_factory.mktemp("fault") / "timeless"


def learn(server: VllmServer, weights: Weights) -> None:
    """What the old weights answer, of a server that has had no others yet."""
    weights.of_old = weights.of_old or answers(server, cache_salt="cold")


def served(name: str, model: Path, fault: Path, options: dict[str, Any]) -> VllmServer:
    env = {"TEST_FAULT_FILE": str(fault), "CONTINUUM_ADMIN_KEY": KEY}
    return VllmServer(model, name, env=env, **options)


@pytest.fixture(scope="module")
def rollouts(models: Weights, fault: Path) -> Iterator[VllmServer]:
    """Turns leave for DRAM at once; it has room for all of them."""
    keys = {"policy": "fixed_ttl", "ttl_s": 0, "dram_bytes": 600 * BYTES}
    config = transfer_config("timeless", keys)
    options = {"num_blocks": NUM_BLOCKS, "kv_transfer_config": config, "args": ENDPOINT}
    with served("test-rollouts", models.old, fault, options) as server:
        learn(server, models)
        yield server


@pytest.fixture(scope="module")
def on_a_disk(
    models: Weights, fault: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """DRAM takes half of the prompts, and goes to the trainer while vLLM sleeps."""
    options = with_disk(tmp_path_factory.mktemp("disk") / "kv", "timeless", sleep_dram="release")
    with served("test-rollouts-disk", models.old, fault, options) as server:
        eventually(lambda: is_up(server))
        learn(server, models)
        yield server


@pytest.fixture
def old_kv(rollouts: VllmServer, weights: Weights) -> Iterator[VllmServer]:
    """The server with the old weights; their KV of all prompts is in DRAM, nowhere else."""
    assert weights.of_old != weights.of_new
    assert answers(rollouts) == weights.of_old
    push_out(rollouts)
    known = dram_hits(rollouts)
    assert answers(rollouts) == weights.of_old
    assert dram_hits(rollouts) > known, "DRAM is of use while the weights stay"
    push_out(rollouts)
    yield rollouts
    load_weights(rollouts, weights.old)
    rollouts.post("/reset_prefix_cache")


def test_after_new_weights_and_nothing_else_what_dram_has_of_the_old_is_not_read(
    old_kv: VllmServer, weights: Weights
) -> None:
    before, known = epoch(old_kv), stale(old_kv)
    load_weights(old_kv, weights.new)
    assert answers(old_kv) == weights.of_new
    assert epoch(old_kv) == before + 1
    assert stale(old_kv) == known + 1, "the worker refuses what was ordered before it could tell"
    assert old_kv.metric("continuum:epochs_total", cause="weights") >= 1
    push_out(old_kv)
    hits = dram_hits(old_kv)
    assert answers(old_kv) == weights.of_new
    assert dram_hits(old_kv) > hits, "the new epoch fills it anew"


def test_without_epochs_the_old_would_be_read(
    old_kv: VllmServer, weights: Weights, fault: Path
) -> None:
    known = dram_hits(old_kv)
    fault.touch()
    try:
        load_weights(old_kv, weights.new)
        found = answers(old_kv)
    finally:
        fault.unlink()
    assert dram_hits(old_kv) > known
    assert found != weights.of_new


class Load:
    """Turns of many prompts, as fast as they are answered, until it is left."""

    def __init__(self, server: VllmServer, num_threads: int) -> None:
        self.ends: list[str] = []
        self._server = server
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(num_threads)
        self._running = [self._threads.submit(self._ask, i) for i in range(num_threads)]

    def _ask(self, number: int) -> None:
        for turn in itertools.count():
            if self._is_over.is_set():
                return
            prompt = tokens_of(300, f"load {number}") + tokens_of(60 * (turn % 5), f"{number}")
            _, end = answer(self._server, prompt, vllm_xargs={"job_id": f"load-{number}"})
            self.ends.append(end)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for each in self._running:
            each.result()
        self._threads.shutdown()


def test_twenty_updates_under_load_serve_what_each_weights_answer(
    rollouts: VllmServer, weights: Weights
) -> None:
    began, known = epoch(rollouts), dram_hits(rollouts)
    modes = itertools.cycle(["abort", "wait", "keep"])
    sets = itertools.cycle([(weights.new, weights.of_new), (weights.old, weights.of_old)])
    with Load(rollouts, 3) as load:
        for mode, (model, expected), i in zip(modes, sets, range(NUM_UPDATES), strict=False):
            rollouts.post(f"/pause?mode={mode}")
            load_weights(rollouts, model)
            rollouts.post("/resume")
            at = i % len(PROMPTS)
            assert answer(rollouts, PROMPTS[at])[0] == expected[at], f"update {i}, {mode}"
        eventually(lambda: "length" in load.ends[-3:])
    assert set(load.ends) <= {"length", "abort"}
    assert load.ends.count("length") > NUM_UPDATES
    idle(rollouts)
    eventually(lambda: rollouts.metric("vllm:kv_cache_usage_perc") == 0)
    assert ledger_closes(rollouts.metrics())
    assert epoch(rollouts) >= began + NUM_UPDATES
    assert dram_hits(rollouts) >= known
    assert rollouts.metric("continuum:tier_up") == 1
    assert "Traceback" not in log_of(rollouts)


def say(server: VllmServer, name: str, key: str = KEY) -> dict[str, Any]:
    """The weights of that name serve from now on."""
    return administer(server, "epoch", key, json.dumps({"name": name}))


def test_an_epoch_that_a_trainer_begins_finds_nothing_of_the_one_before(
    rollouts: VllmServer,
) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        say(rollouts, "policy-1", key="somebody-elses")
    for name in ("policy-1", "policy-2"):
        idle(rollouts)
        began, known = epoch(rollouts), dram_hits(rollouts)
        assert say(rollouts, name) == {"name": name, "vram_emptied": True}
        answers(rollouts)
        assert epoch(rollouts) == began + 1
        assert dram_hits(rollouts) == known
    assert rollouts.metric("continuum:epochs_total", cause="reset") >= 2


def test_after_new_weights_what_the_disk_has_of_the_old_is_not_read(
    on_a_disk: VllmServer, weights: Weights
) -> None:
    assert answers(on_a_disk) == weights.of_old
    push_out(on_a_disk, quiet)
    assert on_disk(on_a_disk) > 0
    known = disk_hits(on_a_disk)
    assert answers(on_a_disk) == weights.of_old
    assert disk_hits(on_a_disk) > known, "the disk is of use while the weights stay"
    push_out(on_a_disk, quiet)
    load_weights(on_a_disk, weights.new)
    assert answers(on_a_disk) == weights.of_new
    push_out(on_a_disk, quiet)
    known = disk_hits(on_a_disk)
    assert answers(on_a_disk) == weights.of_new
    assert disk_hits(on_a_disk) > known, "the new epoch writes it anew"
    assert is_up(on_a_disk)


def resident_bytes(server: VllmServer, num_bytes: int) -> int:
    """Of the worker's mapping of that length, what is there."""
    (pid,) = pids_of(server, "Worker") or pids_of(server, "EngineCore")
    begin = f"{find_mapping(pid, num_bytes):x}-"
    text = Path(f"/proc/{pid}/smaps").read_text()
    found = re.search(rf"^{begin}.*?^Rss:\s+(\d+) kB", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_dram_is_the_trainers_while_vllm_sleeps_and_ours_afterwards(
    on_a_disk: VllmServer, models: Weights
) -> None:
    load_weights(on_a_disk, models.old)
    on_a_disk.post("/reset_prefix_cache")  # of VRAM's own nobody else thinks
    assert answers(on_a_disk) == models.of_old
    quiet(on_a_disk)
    pool = NUM_DRAM * BYTES
    assert resident_bytes(on_a_disk, pool) > pool // 2
    on_a_disk.post("/sleep?level=1")
    assert resident_bytes(on_a_disk, pool) == 0
    on_a_disk.post("/wake_up")
    known = disk_hits(on_a_disk)
    assert answers(on_a_disk) == models.of_old
    push_out(on_a_disk, quiet)
    assert answers(on_a_disk) == models.of_old
    assert disk_hits(on_a_disk) > known, "by way of DRAM"
    assert on_a_disk.metric("continuum:tier_up") == 1
    assert is_up(on_a_disk)
    quiet(on_a_disk)
    assert ledger_closes(on_a_disk.metrics())
