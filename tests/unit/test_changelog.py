"""The changelog is by version, and the newest is the one that the package has."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_newest_version_of_the_changelog_is_the_packages() -> None:
    [package] = re.findall(
        r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    headings = [heading for heading in headings if heading != "Unreleased"]
    assert headings[0].split(" - ")[0] == package
    for heading in headings:
        assert re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", heading), heading
    versions = [tuple(map(int, heading.split(" ")[0].split("."))) for heading in headings]
    assert versions == sorted(versions, reverse=True)
