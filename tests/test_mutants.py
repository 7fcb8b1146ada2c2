"""The faults of mutants.py still have their places, and the tests that see them their files.

That each is seen takes minutes: `python -m tests.mutants`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, survives


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_has_its_place_and_its_test(mutant: Mutant) -> None:
    assert (ROOT / "continuum_connector" / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert all((ROOT / each).is_file() for each in mutant.tests.split())


def test_a_fault_whose_place_is_gone_counts_as_alive(tmp_path: Path) -> None:
    path = tmp_path / "continuum_connector" / "a.py"
    path.parent.mkdir()
    path.write_text("pass\n")
    mutant = Mutant("a", "a.py", "gone", "new", "")
    assert "is not there" in survives(mutant, tmp_path)
    assert path.read_text() == "pass\n"
