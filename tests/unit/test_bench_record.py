"""What a run writes down of where it ran: packages as its server finds them, and the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serve.page import words
from bench.serve.record import machine, versions
from bench.serve.results import load_run
from tests.unit.ab_results import measured, run_of


def smi(folder: Path, script: str) -> None:
    """An nvidia-smi that does what is said."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_versions_are_those_that_the_server_finds(tmp_path: Path) -> None:
    info = tmp_path / "lmcache-7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 7\n")
    assert versions(str(tmp_path))["lmcache"] == "7"


def test_the_gpu_is_named_and_shown_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    smi(tmp_path, "echo 'NVIDIA H100, 570.1, 81559 MiB'")
    told = machine()
    assert told["gpu"] == "NVIDIA H100, 570.1, 81559 MiB"
    run = load_run(measured(tmp_path, run_of("none", machine=told), 1.0))
    assert words._machine(run).endswith("cores, NVIDIA H100, 570.1, 81559 MiB")


@pytest.mark.parametrize("script", ["", "echo no devices; exit 6"])
def test_where_no_gpu_is_seen_none_is_named(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        smi(tmp_path, script)
    assert "gpu" not in machine()
