"""Whether a narrow terminal cut something off."""

from __future__ import annotations


def last_words(output: str) -> list[str]:
    """The last word of each line but those on which a long name goes on."""
    words = [line.split()[-1] for line in output.splitlines() if line.strip()]
    return [word for word in words if word != "│" and not word.startswith("━")]
