"""Text between two markers of a README, `<!-- name -->` and `<!-- /name -->`, made by a command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def replace(text: str, marker: str, table: str) -> str:
    """Return `text` with `table` between its markers; ValueError unless there is one pair."""
    pattern = re.compile(rf"<!-- {marker} -->\n.*?<!-- /{marker} -->", re.DOTALL)
    new, num = pattern.subn(lambda _: f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->", text)
    if num != 1:
        raise ValueError(
            f"{num} places between <!-- {marker} --> and <!-- /{marker} -->, so nothing was "
            "written; there must be one"
        )
    return new


def rewrite(path: Path, tables: Mapping[str, str]) -> None:
    """Put each table between the markers of its name, all of them or none."""
    text = path.read_text()
    for marker, table in tables.items():
        text = replace(text, marker, table)
    path.write_text(text)
