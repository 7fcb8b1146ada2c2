"""What the documents quote from the log, the code says: word for word, but for `...`.

An operator searches the log for it, so it must be what is printed.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.grafana.dashboard import load, panels
from tests.markdown import ROOT, documents, tokens

# What else is written like this beside a quoted line: a command, an option, a variable, a key.
ELSE = re.compile(
    r"(cat|continuum|df|dmesg|docker|findmnt|free|fsfreeze|kubectl|lsof|numactl|nvidia-smi|nvme|pip"
    r"|python|smartctl|systemctl|ulimit) |-|[A-Z_]+=|\w+ = "
)
NOT_OURS = {"Application startup complete"}  # of vLLM's web server
LEGENDS = {target["legendFormat"] for panel in panels(load()) for target in panel["targets"]}
ABOUT_A_LOG = re.compile(r"\blogs?\b")
_C_STRINGS = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*')
_PLACEHOLDER = re.compile(r"%[-.\d]*[sdifgr]")


def quotes(path: str) -> Iterator[tuple[int, str]]:
    """Line and text of each quoted line of the log: of several words, in a paragraph about a log or
    anywhere in the runbook."""
    for token in tokens(path):
        if not (path.endswith("runbook.md") or ABOUT_A_LOG.search(token.content)):
            continue
        for child in token.children or ():
            if child.type == "code_inline" and is_quote(child.content):
                yield token.map[0] + 1 if token.map else 0, child.content


def is_quote(text: str) -> bool:
    return " " in text and not ELSE.match(text) and text not in NOT_OURS | LEGENDS


@functools.cache
def messages() -> frozenset[tuple[str, ...]]:
    """Every string in the code, as what stands between its placeholders."""
    found: set[tuple[str, ...]] = set()
    for file in (ROOT / "continuum_connector").rglob("*.py"):
        tree = ast.parse(file.read_text())
        docstrings = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    each.value if isinstance(each, ast.Constant) else "%s" for each in node.values
                ]
                found.add(pieces("".join(map(str, parts))))
            elif isinstance(node, ast.Constant) and id(node) not in docstrings:
                found.add(pieces(str(node.value)))
    for file in (ROOT / "csrc").glob("*.[ch]*"):
        for match in _C_STRINGS.finditer(file.read_text()):
            text = "".join(each[1:-1] for each in re.findall(r'"(?:[^"\\\n]|\\.)*"', match[0]))
            found.add((text, ""))  # joined with others by `+`
    return frozenset(found)


def pieces(message: str) -> tuple[str, ...]:
    return tuple(_PLACEHOLDER.split(message))


def is_said(quote: str) -> bool:
    """Whether the code says each part of the quote; `...` stands for what it fills in."""
    parts = [part.strip() for part in quote.split("...")]
    return any(len(part.split()) > 1 for part in parts) and all(map(is_part, filter(None, parts)))


def is_part(text: str) -> bool:
    """Whether one message says this, or one that goes on with another."""
    if any(text in piece for message in messages() for piece in message):
        return True
    ends = (piece for message in messages() for piece in message[:-1] if len(piece.strip()) > 2)
    return any(text.startswith(end) and begins(text.removeprefix(end)) for end in ends)


def begins(text: str) -> bool:
    return len(text) > 2 and any(message[0].startswith(text) for message in messages())


QUOTES = [
    pytest.param(text, id=f"{path}:{line} {text}")
    for path in documents()
    if Path(path).parts[0] in ("README.md", "docs", "deploy")
    for line, text in quotes(path)
]


@pytest.mark.parametrize("text", QUOTES)
def test_the_code_says_what_the_documents_quote(text: str) -> None:
    assert is_said(text), "the code says no such thing; if it is a command, ELSE lacks it"


def test_the_documents_quote_many_lines() -> None:
    assert len([each for each in QUOTES if "runbook" in str(each.id)]) >= 15


@pytest.mark.parametrize(
    "text",
    [
        "The DRAM tier is smaller for today: ...",
        "No disk tier: read 7 hangs ...",  # a number that only one log has
        "... until it does, this process cannot end",
        "the disk takes no reads",
        "...",
        "7: ...",
    ],
)
def test_what_the_code_does_not_say_is_found(text: str) -> None:
    assert is_quote(text) or text == "..."
    assert not is_said(text)


@pytest.mark.parametrize(
    "text",
    [
        "The DRAM tier is smaller for now: ...",
        "No disk tier: ... hangs: begun ... s ago",
        "The disk is full, or may only be read",  # one message within another
        "page-locking stopped at ...; RLIMIT_MEMLOCK is ...",  # csrc
    ],
)
def test_what_the_code_says_is_found(text: str) -> None:
    assert is_said(text)
