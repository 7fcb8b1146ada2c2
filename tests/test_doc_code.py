"""Code in the documents that is not a command can at least be read by its language."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.markdown import documents, tokens

READERS: dict[str, Callable[[str], Any]] = {
    "python": ast.parse,
    "json": json.loads,
    "yaml": yaml.safe_load,
}
CODE = [
    pytest.param(token.info, token.content, id=f"{path}:{token.map[0] + 1 if token.map else 0}")
    for path in documents()
    for token in tokens(path)
    if token.type == "fence" and token.info in READERS
]


@pytest.mark.parametrize(("language", "text"), CODE)
def test_code_can_be_read(language: str, text: str) -> None:
    READERS[language](text)
