"""Each name that we touch, renamed: a server passes, or is stock vLLM there and says so once.

docs/versions.md has a row for each; `python -m tests.vllm.renames --write` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import vllm

from continuum_connector.vllm.compat import SUPPORTED
from continuum_connector.vllm.touched import TOUCHED, Touch
from tests.vllm import renames

# docs/versions.md is what this one says; of others, which lack other features, rows may differ.
IS_INSTALLED = vllm.__version__.split("+")[0] == next(
    release for release, run in SUPPORTED if "server" in run
)


def written() -> list[str]:
    text = renames.DOCS.read_text()
    return [line for line in text.splitlines() if line.startswith("| `")]


def _numbers() -> Iterator[Any]:
    """CI renames every third name, in two minutes, and leaves the others to a release."""
    for number, touch in enumerate(TOUCHED):
        waits = pytest.mark.release if number % 3 else ()
        yield pytest.param(number, id=touch.name, marks=waits)


@pytest.mark.parametrize("number", list(_numbers()))
def test_a_renamed_name_ends_nothing_and_is_told(number: int) -> None:
    touch = TOUCHED[number]
    if not renames.touched.is_there(touch):
        pytest.skip("this vLLM has no such name")
    told = renames.row(touch)
    assert told in renames.TOLD
    if IS_INSTALLED:
        assert written()[number].endswith(f"| {told} |"), "python -m tests.vllm.renames --write"


def test_the_table_in_the_docs_is_the_one_in_the_code() -> None:
    rows = written()
    assert len(rows) == len(TOUCHED)
    for touch, row in zip(TOUCHED, rows, strict=True):
        assert row.startswith(renames.static_row(touch)), "python -m tests.vllm.renames --write"


def test_a_name_that_we_do_without_in_silence_is_found_out() -> None:
    """What the rows above would see if the probe did not ask for a name that we need."""
    [touch] = (each for each in TOUCHED if each.name == "Scheduler.failed_recving_kv_req_ids")
    harmless = touch._replace(needs=renames.Part.NOTHING)
    unasked = _without(touch)
    told = unasked(harmless)
    assert told.startswith("ends ")


def _without(touch: Touch):  # type: ignore[no-untyped-def]
    def row(other: Touch) -> str:
        listed = renames.touched.TOUCHED
        renames.touched.TOUCHED = tuple(each for each in listed if each != touch)
        try:
            return renames.row(other)
        finally:
            renames.touched.TOUCHED = listed

    return row
