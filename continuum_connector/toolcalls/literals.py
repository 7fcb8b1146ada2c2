"""One regular expression for many literal texts, fast where most of them begin alike."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby


def one_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that finds any of the texts, the longest of those that fit.

    Grouped by their first character: the regular expression engine looks only into the group
    that fits, instead of trying each of forty markers at every `<`.
    """
    groups = groupby(sorted(texts, reverse=True), key=lambda text: text[:1])
    return re.compile("|".join(f"(?:{'|'.join(map(re.escape, group))})" for _, group in groups))
