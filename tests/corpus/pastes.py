"""Texts of the kinds that people paste into `continuum check`, and what is true of each.

They stand in pastes.txt, and were written for this test in the shape of what is found in guides,
model cards, bug reports and clusters. Most serve {TINY} with an fp8 cache, whose tokens take
4.0 KiB, and 8.0 KiB where that option is lost.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.corpus.cases import ABSENT, ERROR, UNSEEN, Case

SERVE = "vllm serve {TINY} --kv-cache-dtype fp8"
WELL = {"command": ABSENT, "options": ABSENT, "model": "ok:4.0 KiB per token"}
VERDICTS = {
    "well": WELL,
    "partly": WELL | {"options": UNSEEN},  # a part that only a shell, a cluster or a file knows
    "refused": {"options": ERROR},  # by vLLM
    "none": {"command": ERROR},  # no server
}


def _cases() -> list[Case]:
    """`=== NAME -> VERDICT` before each text: one of VERDICTS, or `SUBJECT=VERDICT:PART; ...`."""
    text = Path(__file__).with_suffix(".txt").read_text().replace("{SERVE}", SERVE)
    heads = re.split(r"(?m)^=== (.*) -> (.*)\n", text)[1:]
    return [
        Case(name, body, VERDICTS.get(said) or _verdicts(said))
        for name, said, body in zip(heads[::3], heads[1::3], heads[2::3], strict=True)
    ]


def _verdicts(said: str) -> dict[str, str]:
    pairs = (each.partition("=") for each in said.split("; "))
    return {subject: verdict for subject, _, verdict in pairs}


CASES = _cases()
