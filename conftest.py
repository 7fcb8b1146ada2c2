"""What every test shares: its marks, and this checkout's `bench` for servers that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from continuum_connector.worker import disk
from tests.versions.sources import VERSIONS

ROOT = Path(__file__).resolve().parent
# A run tells of the change it tests: what hypothesis draws is the same each time, and no clock
# decides. Looking for what nobody has drawn yet is the work of tests/vllm/long_machine.py.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

MARKS = {"vllm", "native", "server"}  # a folder of that name, wherever it lies

# Server tests of minutes each, whose parts other tests cover: CI has no time for them.
BEFORE_A_RELEASE = {
    "bench_ab": "each arm of the A/B; what it does is in bench/tests",
    "bench_agents": "the same of one server",
    "clients": "other makers', pinned; what they send is in tests/unit/test_middleware.py",
    "data_parallel": "three servers; the books of ranks are in tests/vllm/test_node.py",
    "decisions": "six servers; each decision is in tests/vllm/test_outcomes.py",
    "demo_smoke": "the demo",
    "disk_faults": "faults that a file system makes; in tests/vllm/test_disk.py by a fake",
    "disk_restarts": "ten servers; in tests/unit/test_worker_disk.py and tests/vllm by fakes",
    "ladder": "families of models; their bytes are in tests/vllm/test_layout_families.py",
    "lifetime": "slow copies under ThreadSanitizer, of which tests/native have each part",
    "replicas": "two servers behind a router",
    "rollouts": "epochs; in tests/vllm/test_epochs.py",
    "router": "what a router hears; in tests/vllm/test_kv_events.py",
    "shapes": "ranks, hybrids, async scheduling; each in tests/vllm",
    "windows": "sliding windows; in tests/vllm/test_windows.py",
}

_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if str(ROOT) not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, _paths)])


def waits_for_test_all(item: pytest.Item) -> bool:
    """What `make test` leaves to `make test-all`: other vLLMs than the installed one, names of vLLM
    renamed, the C++ under sanitizers, and servers with other flags than the one that most server
    tests share."""
    where = item.path.relative_to(ROOT).as_posix()
    uses = set(getattr(item, "fixturenames", ()))
    if where.startswith("tests/server/"):
        return "agents" not in uses or "server_factory" in uses
    if where.startswith("tests/versions/"):
        return "version" in uses
    return where in (
        "tests/native/test_sanitizers.py",
        "tests/vllm/test_renames.py",  # minutes: each name that we touch, renamed
    )


def waits_for_a_release(item: pytest.Item) -> bool:
    """What only `make test-all` runs, and CI leaves out: BEFORE_A_RELEASE, of the other vLLMs all
    but the oldest and the newest, and names renamed in other vLLMs than the installed one."""
    where = item.path.relative_to(ROOT).as_posix()
    if where.startswith("tests/versions/"):
        version = getattr(item, "callspec").params["version"]  # noqa: B009  mypy: not of all items
        is_end = version in (VERSIONS[0], VERSIONS[-1])
        return not is_end or item.path.stem == "test_renames_newest"
    name = item.path.stem.removeprefix("test_")
    return where.startswith("tests/server/") and name in BEFORE_A_RELEASE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in MARKS.intersection(item.path.relative_to(ROOT).parts):
            item.add_marker(name)
        if waits_for_test_all(item):
            item.add_marker("full")
            if waits_for_a_release(item):
                item.add_marker("release")
        if item.get_closest_marker("vllm"):
            for package in ("torch", "vllm", "transformers"):
                ignore = f"ignore::DeprecationWarning:{package}.*"
                item.add_marker(pytest.mark.filterwarnings(ignore))


@pytest.fixture(autouse=True)
def _any_drive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's drive may be nearly full, and then there would be no disk tier."""
    if not request.node.get_closest_marker("min_left"):
        monkeypatch.setattr(disk, "MIN_LEFT", 0.0)
