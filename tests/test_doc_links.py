"""No link within the repository is broken, nor the anchor it names."""

from __future__ import annotations

import os
from urllib.parse import unquote

import pytest

from tests.markdown import ROOT, anchors, documents, links


@pytest.mark.parametrize("path", documents())
def test_links_lead_somewhere(path: str) -> None:
    broken = []
    for link in links(path):
        name, _, anchor = unquote(link.target).partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
        if not (ROOT / target).exists():
            broken.append(f"{link}: no such file")
        elif (ROOT / target).is_dir():
            broken.append(f"{link}: a folder, which a site cannot show; link a file in it")
        elif anchor and target.endswith(".md") and anchor not in anchors(target):
            broken.append(f"{link}: no such heading")
    assert not broken, "\n".join(broken)


def test_every_page_of_the_docs_is_reached_from_their_index() -> None:
    pages = {path for path in documents() if path.startswith("docs/")} - {"docs/index.md"}
    linked = {
        os.path.normpath(os.path.join("docs", unquote(link.target).partition("#")[0]))
        for link in links("docs/index.md")
    }
    assert pages <= linked, f"docs/index.md does not link {sorted(pages - linked)}"
