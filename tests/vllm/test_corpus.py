"""What `continuum check` and `size` say of the corpus of command lines is what is true of each.

One process imports vLLM and answers for them all: python tests/corpus/run.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.corpus import cases, pastes
from tests.corpus.run import wanted
from tests.vllm.test_check import HAS_PLANNED

ROOT = Path(__file__).parents[2]
COUNTS = ["check: 241 right, 0 wrong, 4 not seen", "size: 17 right, 0 wrong, 4 not seen"]


EVERY = [*cases.CASES, *pastes.CASES, *cases.SIZES]
SOME = EVERY[::5]  # each takes two seconds of vLLM's own
pytestmark = pytest.mark.skipif(not HAS_PLANNED, reason="this vLLM cannot be asked")


def test_some_lines_of_the_corpus_get_the_verdict_that_is_true() -> None:
    _verdicts_are_true(
        SOME, [f"{'check' if hasattr(case, 'wants') else 'size'} {case.name}" for case in SOME]
    )


@pytest.mark.full
@pytest.mark.release
def test_every_line_of_the_corpus_gets_the_verdict_that_is_true() -> None:
    assert _verdicts_are_true(EVERY).splitlines()[-2:] == COUNTS


def _verdicts_are_true(asked: Sequence[Any], names: Sequence[str] = ()) -> str:
    command = [sys.executable, "-W", "ignore", "tests/corpus/run.py", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    told = re.findall(r"(?m)^ *[\d.]+ s +((?:check|size) .*)$", done.stdout)
    assert len(told) == len(asked), done.stderr
    assert [
        line for line, case in zip(told, asked, strict=True) if not line.endswith(wanted(case))
    ] == []
    assert done.returncode == 0
    return done.stdout
