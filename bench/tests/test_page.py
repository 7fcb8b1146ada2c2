"""How arms look on every page: ours stands out, and no two are drawn alike."""

from __future__ import annotations

import pytest

from bench.page.document import legend
from bench.page.marks import apart
from bench.page.palette import CODES, looks

HUES = {"mine": "ours", "plain": "stock", "other": "blue", "other-lazy": "blue"}


def test_ours_alone_is_thick_and_has_its_colour() -> None:
    found = looks(["plain", *(f"arm{i}" for i in range(20)), "mine"], HUES)
    assert max(found, key=lambda arm: found[arm].width) == "mine"
    assert [arm for arm, look in found.items() if look.code == CODES["ours"]] == ["mine"]
    assert [arm for arm, look in found.items() if look.is_ours] == ["mine"]


def test_eighteen_other_arms_are_told_apart() -> None:
    found = looks([f"arm{i}" for i in range(18)], {})
    assert len({(look.code, look.line) for look in found.values()}) == 18


def test_arms_of_one_family_have_one_hue_and_differ_in_dashes() -> None:
    found = looks(list(HUES), HUES)
    assert found["other"].code == found["other-lazy"].code == CODES["blue"]
    assert found["other"].line != found["other-lazy"].line


def test_a_hue_that_is_someones_own_is_nobody_elses() -> None:
    found = looks([*HUES, *(f"arm{i}" for i in range(5))], HUES)
    others = [look.code for arm, look in found.items() if arm.startswith("arm")]
    assert CODES["blue"] not in others
    assert len(set(others)) == 5


def test_the_legend_names_every_arm_as_text() -> None:
    drawn = legend(looks(["a<b"], {}))
    assert "a&lt;b" in drawn
    assert "<b" not in drawn


def test_names_beside_lines_stay_in_order_a_step_apart_and_near_their_lines() -> None:
    assert apart([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert apart([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert apart([0.2, 0.98, 0.99], 0.1) == pytest.approx([0.2, 0.9, 1.0])
    assert apart([], 0.1) == []
