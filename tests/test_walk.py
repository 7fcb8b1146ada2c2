"""docs/walk.md follows a turn through the code: each name that it links to is in that file."""

from __future__ import annotations

import ast
import re

from tests.markdown import ROOT

WALK = ROOT / "docs" / "walk.md"
NAMED = re.compile(r"\[`([\w.]+)`\]\(\.\./(continuum_connector/[\w/]+\.py)\)")


def _names(body: list[ast.stmt], of: str = "") -> set[str]:
    """Classes and functions, also in functions, as `Class.method`; assigned names."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name, *_names(node.body, f"{node.name}.")}
        elif isinstance(node, ast.FunctionDef):
            found |= {f"{of}{node.name}", *_names(node.body)}
    return found


def test_each_step_of_the_walk_is_where_it_says() -> None:
    named = NAMED.findall(WALK.read_text())
    assert len(named) > 40
    for name, path in named:
        assert name in _names(ast.parse((ROOT / path).read_text()).body), f"{name} in {path}"


def test_no_link_of_the_walk_is_left_out() -> None:
    links = re.findall(r"\]\((\.\./continuum_connector/[\w/]+\.py)\)", WALK.read_text())
    told = [f"../{path}" for _, path in NAMED.findall(WALK.read_text())]
    assert len(links) - len(told) <= 1  # "against stock vLLM" is in words
