"""The scheduler side on the Python sources of every other supported vLLM: one subprocess each.

A subprocess, because a process can import one vLLM. It keeps one core busy, and
`scripts/test --full` has the server tests beside it. What it runs is the modules of tests/vllm
that have a seam; the installed vLLM runs all of them anyhow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass
from importlib import metadata

import pytest

from tests.versions import sources

pytestmark = [pytest.mark.vllm]

# The modules of tests/vllm that meet what differs from release to release, and where they do.
SEAMS = {
    "adapters": "which turns it passes over for their adapters",
    "answers": "which states and windows a prompt leaves",
    "api_key": "the routes that vLLM's key guards",
    "attach": "its arguments, plugins and scheduler classes",
    "bad_hints": "how a request carries what a client sent",
    "below": "turns that wait for what comes up, and what a load brings them",
    "bus": "turns that are passed over while the bus is busy",
    "check": "its parser, its types of caches",
    "disk": "turns that are passed over while they wait for reads",
    "disk_waiting": "turns that wait for reads unseen by vLLM's scheduler",
    "disk_small_dram": "the whole loop, with reads that go on",
    "drafts": "what a lookup drops for drafts",
    "dram_default": "which config and sizes it hands the worker",
    "engine_dies": "a load that fails: by request, or by block",
    "epochs": "resets, and turns that wait with KV; what loads write to",
    "everything": "the scheduler's whole loop",
    "facts": "what of its config changes what a block holds",
    "families": "which models have which groups",
    "first_turn": "its estimate of what a step computes",
    "foreign_keys": "the config keys of its own connectors",
    "gate": "its waiting queues, and who counts as waiting",
    "harness": "the whole loop, as the other modules drive it",
    "head_start": "its waiting queues, and whom it skips there",
    "invalidate": "resets; adapters and salts in block hashes",
    "kv_events": "the events, and who sends them",
    "kv_role": "where it loads plugins, and makes the configs of connectors",
    "layout": "the tensors of the KV cache",
    "layout_backends": "each attention backend's shapes",
    "layout_families": "the groups and tensors of real models",
    "layout_wish": "which layouts split a block",
    "ledger": "when it hears of workers and asks for numbers",
    "lent": "what a turn has that ended, was preempted or aborted",
    "load_order": "requests that wait for remote KV",
    "machine": "the whole loop, in whatever order",
    "metrics": "its stat loggers",
    "never_stuck": "what it allocates after a load that failed",
    "next_turns": "what its lookup wants of windows, chunks and states",
    "node": "what its config says of ranks and nodes",
    "order": "admission and preemption",
    "other_keys": "adapters, images and salts in block hashes",
    "pause": "when EngineCore takes itself for idle",
    "pin_endings": "how a request ends",
    "pins": "the block pool, the prefix cache",
    "planned": "how it makes config, layers and groups of a command line",
    "parser_names": "its tool parsers by name",
    "plugin_drift": "what its entry point touches",
    "pressure": "allocate_slots",
    "program_over": "what its reset is asked with",
    "quiet_steps": "the hooks of a step without work",
    "rank": "how a worker knows its rank",
    "resets_beside_stock": "what its resets answer, and its own MultiConnector's",
    "shadow": "its coordinator, copied",
    "stages": "whose reports its executors pass on",
    "state_columns": "where its runner V2 keeps states beside drafts",
    "states": "groups with states, chunks and mixed block sizes",
    "step_times": "what a step says that it computes",
    "stock": "the order of its free queue",
    "switch": "its own queues, put back",
    "tier": "hits by token, loads, stores",
    "tier_contract": "the same, of tiers that are not DRAM",
    "tier_failures": "failed and late transfers",
    "tier_given_up": "the worker's hooks",
    "tier_states": "loads of states, chunks and drafts",
    "tool_formats": "its tool parsers, of which each release has more",
    "touched": "every name of it that we touch",
    "turn_ends": "who frees a turn's blocks, and when",
    "upstream": "the faults of its own that docs/upstream.md shows",
    "victims": "preemption while steps are in flight",
    "windows": "groups with sliding windows",
    "worker_calls": "what its worker is asked by name",
    "worker_start": "the layouts it offers the worker",
}
# What the others ask is decided above vLLM, so the installed one is asked alone.
ALIKE = {
    "chat": "how long people wait for pins: a policy",
    "corpus": "only the installed one says what it would make of a line; planned is of others",
    "decider": "what is learned of turns",
    "divergence": "which turns are for nobody: our own chains, and a policy",
    "equal_prompts": "what several samples of a prompt cost others: a policy",
    "disk_slots": "which slots of an order came right, from our own books",
    "disk_told": "what Reading decides and what is told of it, from our own books",
    "disk_machine": "what machine.py draws, with a disk that is always read",
    "floods": "whom we forget first: our own table",
    "hints": "what a wish costs whom",
    "outcomes": "what is told of decisions",
    "policies": "each policy over the same loop",
    "renames": "minutes long, so of the others the newest alone is asked: test_renames_newest.py",
    "policy_controls": "which faults the policy machine sees: the policy's doing",
    "policy_machine": "what agents find: the policy's doing",
    "side_requests": "what the contexts of one id take from each other: our own chains and pins",
    "tier_growth": "how many slots there are",
    "tier_order": "which slot leaves first",
}
# Of SEAMS what takes half of the time: machines over other tiers, a shadow and resets beside stock
# vLLM, and processes that each import vLLM. CI asks the installed one and leaves the others to a
# release.
LONG = {
    *("below", "check", "kv_role", "metrics", "node", "resets_beside_stock", "states", "stock"),
    "tier_contract",
}
TIMEOUT_S = 1800


@dataclass
class Run:
    """What pytest said over one version."""

    fetched: str
    returncode: int
    output: str
    seconds: float

    @property
    def summary(self) -> str:
        lines = [line.strip("= ") for line in self.output.strip().splitlines()]
        return lines[-1] if lines else "no output"

    @property
    def failures(self) -> str:
        """The output from the first failure on; all of it if there is none."""
        return self.output[max(0, self.output.find("= FAILURES =")) :]


def run_version(version: str, modules: Iterable[str] = SEAMS) -> Run:
    """Run these modules of tests/vllm with `import vllm` being `version`."""
    fetched = sources.fetch(version)
    path = [str(sources.source_dir(version)), str(sources.ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_CACHE_ROOT": str(sources.CACHE / f"{version}.run"),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "WARNING",  # whatever a bench that is tested here has set
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        *(f"tests/vllm/test_{name}.py" for name in modules),
        "-m",
        "vllm and not native and not gpu",
    ]
    command += ["-p", "no:cacheprovider", "-o", "addopts=", "--tb=short", "--color=no"]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=sources.ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Run(fetched, done.returncode, done.stdout + done.stderr, time.monotonic() - began)


def installed() -> str:
    """The release that `import vllm` finds here; "" without one."""
    try:
        return metadata.version("vllm").split("+")[0]
    except metadata.PackageNotFoundError:
        return ""


OTHERS = [version for version in sources.VERSIONS if version != installed()]


@pytest.mark.parametrize("version", OTHERS)
def test_scheduler_side(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    _is_green(version, SEAMS.keys() - LONG, capsys)


@pytest.mark.release
@pytest.mark.parametrize("version", OTHERS)
def test_what_takes_longest(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    _is_green(version, LONG, capsys)


def _is_green(version: str, modules: Set[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    try:
        run = run_version(version, sorted(modules))
    except sources.SourcesUnavailableError as error:
        pytest.skip(str(error))
    with capsys.disabled():
        # A process that runs tests beside others has no stdout.
        print(f"\n{run.fetched}; tests/vllm: {run.summary}", file=sys.stderr)
    imported = re.search(r"^vllm: (\S+) from (.*)$", run.output, re.MULTILINE)
    assert imported, run.output[-4000:]
    assert imported[1] == version
    assert imported[2].startswith(str(sources.source_dir(version)))
    assert run.returncode == 0, run.failures[-6000:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, on import
def test_what_is_run_is_what_is_promised() -> None:
    pytest.importorskip("vllm")
    from continuum_connector.vllm.compat import SUPPORTED

    assert tuple(release for release, _ in SUPPORTED) == sources.VERSIONS
    for name in ("README.md", "docs/limits.md"):
        text = (sources.ROOT / name).read_text()
        assert all(release in text for release in sources.VERSIONS), name


def test_of_each_module_it_is_said_whether_releases_differ_in_it() -> None:
    modules = {
        path.stem.removeprefix("test_") for path in (sources.ROOT / "tests/vllm").glob("test_*.py")
    }
    assert modules == SEAMS.keys() | ALIKE.keys(), "name each in SEAMS or in ALIKE, and say why"
    assert not SEAMS.keys() & ALIKE.keys()
    assert SEAMS.keys() > LONG
