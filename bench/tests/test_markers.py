"""What a command writes into a README goes between its markers, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.markers import rewrite

TEXT = "above\n<!-- a -->\nold\n<!-- /a -->\nbetween\n<!-- b -->\n<!-- /b -->\nbelow\n"


def test_tables_go_between_their_markers_and_nothing_else_changes(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(TEXT)
    for a, b in (("new \\1", "x"), ("newer", "y")):
        rewrite(readme, {"a": a, "b": b})
        assert readme.read_text() == (
            f"above\n<!-- a -->\n{a}\n<!-- /a -->\nbetween\n<!-- b -->\n{b}\n<!-- /b -->\nbelow\n"
        )


@pytest.mark.parametrize("marker", ["c", "twice"])
def test_without_one_pair_of_markers_nothing_is_written(tmp_path: Path, marker: str) -> None:
    readme = tmp_path / "README.md"
    text = TEXT + 2 * "<!-- twice -->\n<!-- /twice -->\n"
    readme.write_text(text)
    with pytest.raises(ValueError, match="nothing was written"):
        rewrite(readme, {"a": "new", marker: "new"})
    assert readme.read_text() == text
