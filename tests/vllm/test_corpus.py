"""What `continuum check` and `size` say of the corpus of command lines is what is true of each.

One process imports vLLM and answers for them all: python tests/corpus/run.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpus import cases, pastes
from tests.corpus.run import wanted
from tests.vllm.test_check import HAS_PLANNED

ROOT = Path(__file__).parents[2]
COUNTS = ["check: 213 right, 0 wrong, 4 not seen", "size: 17 right, 0 wrong, 4 not seen"]


@pytest.mark.skipif(not HAS_PLANNED, reason="this vLLM cannot be asked")
def test_every_line_of_the_corpus_gets_the_verdict_that_is_true() -> None:
    command = [sys.executable, "-W", "ignore", "tests/corpus/run.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    told = re.findall(r"(?m)^ *[\d.]+ s +((?:check|size) .*)$", done.stdout)
    assert len(told) == len(cases.CASES) + len(pastes.CASES) + len(cases.SIZES), done.stderr
    every = [*cases.CASES, *pastes.CASES, *cases.SIZES]
    assert [
        line for line, case in zip(told, every, strict=True) if not line.endswith(wanted(case))
    ] == []
    assert done.returncode == 0
    assert done.stdout.splitlines()[-2:] == COUNTS
