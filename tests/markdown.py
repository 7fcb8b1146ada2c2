"""The project's Markdown as markdown-it reads it: commands and their marks, links, anchors."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
SHELL = ("bash", "console", "sh", "shell")
# What an indented block begins with if it is one of commands: those must be fenced.
_COMMANDS = re.compile(
    r"\s*(\$ |[A-Z_]+=\S+ )?"
    r"(pip|vllm|vllm-router|continuum|python3?|make|cmake|scripts/\w+|docker|kubectl|helm|curl)\s"
)
_MARK = re.compile(r"<!--\s*(run|gpu|test|long)(?::\s*(.*?))?\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of commands: where, what it says, and the mark in front of it."""

    path: str
    line: int
    text: str
    mark: str  # run, gpu, test, long; empty: none
    argument: str  # what follows the mark's colon
    fenced: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Link:
    """A link as it is written: where, and to what."""

    path: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} -> {self.target}"


def documents() -> list[str]:
    """Every Markdown file of the repository, as a path from its root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def tokens(path: str) -> list[Token]:
    parser = MarkdownIt("commonmark").enable("table")
    return parser.parse((ROOT / path).read_text())


def blocks(path: str) -> Iterator[Block]:
    """The file's blocks of commands, fenced or not."""
    mark = argument = ""
    for token in tokens(path):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            found = _MARK.fullmatch(token.content.strip())
            mark, argument = (found[1], found[2] or "") if found else ("", "")
            continue
        fenced = token.type == "fence" and token.info.split(" ")[0] in SHELL
        if fenced or (token.type == "code_block" and _COMMANDS.match(token.content)):
            yield Block(path, line, token.content, mark, argument, fenced)
        mark = argument = ""


def links(path: str) -> Iterator[Link]:
    """The file's links and images, less those that leave the repository."""
    for token in tokens(path):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target and not re.match(r"[a-z]+:", str(target)):
                yield Link(path, token.map[0] + 1 if token.map else 0, str(target))


def anchors(path: str) -> set[str]:
    """The ids that GitHub gives to the file's headings."""
    found: dict[str, int] = {}
    all_tokens = tokens(path)
    for opening, inline in pairwise(all_tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
    return {slug if not i else f"{slug}-{i}" for slug, n in found.items() for i in range(n + 1)}
