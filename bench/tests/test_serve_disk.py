"""Arms with a disk: the folder that a server finds and leaves, and what is said without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.serve import kept, results
from bench.serve.ab import cells, prepare, run_all
from bench.tests.fake_server import FakeApi, fake_server
from bench.tests.test_serve_ab import FakeVllm, experiment, sized_model, use

UP = "continuum:tier_up 1\ncontinuum:disk_up 1\n"


class WritingVllm(FakeVllm):
    """Leaves a file on its disk, as a real one does; notes what lay there when it started."""

    found: list[list[str]]

    def __enter__(self) -> FakeVllm:
        folder = Path((self.options.connector or {})["disk_path"])
        WritingVllm.found.append([each.name for each in folder.iterdir()])
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "slab").touch()
        return super().__enter__()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with fake_server() as server:
        use(monkeypatch, server)
        monkeypatch.setattr(WritingVllm, "found", [], raising=False)
        monkeypatch.setattr(kept, "VllmServer", WritingVllm)
        yield server


def with_disk(tmp_path: Path, **fields: Any) -> Any:
    model = sized_model(tmp_path)
    return experiment(model, "continuum-disk", disk=tmp_path / "drive", **fields)


def test_a_server_begins_on_an_empty_disk_and_nothing_of_it_is_left(
    api: FakeApi, tmp_path: Path
) -> None:
    api.metrics = UP
    wanted = with_disk(tmp_path, repeats=2)
    for cell in cells(wanted):
        left = prepare(wanted, cell)[1].disk
        assert left is not None
        left.mkdir(parents=True)
        (left / "by one that was killed").touch()
    run_all({tmp_path / "out": wanted})
    assert [run.run.state for run in results.load(tmp_path / "out")] == ["done", "done"]
    assert WritingVllm.found == [[], []]
    assert not list((tmp_path / "drive").iterdir())


def test_how_much_disk_there_is_makes_another_experiment_and_only_where_it_is_used(
    tmp_path: Path,
) -> None:
    assert with_disk(tmp_path, disk_bytes=2**31).settings()["disk_bytes"] == 2**31
    assert "disk_bytes" not in experiment(tmp_path / "model", "none", "continuum").settings()
