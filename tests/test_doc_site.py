"""The documents build as a site, without a warning."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.markdown import ROOT, documents

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs is not installed: pip install '.[docs]'",
)


def test_mkdocs_build_strict_makes_a_page_of_every_document(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    for name in documents():
        page = (
            Path(name).parent if Path(name).name in ("README.md", "index.md") else Path(name[:-3])
        )
        assert (tmp_path / page / "index.html").exists(), name


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)\n")
    config = (ROOT / "mkdocs.yml").read_text()
    kept = [part for part in config.split("\n") if not part.startswith(("hooks", "nav"))]
    text = "\n".join(kept[: next(i for i, p in enumerate(kept) if p.startswith("  - Start"))])
    (tmp_path / "mkdocs.yml").write_text(text + "\n")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
