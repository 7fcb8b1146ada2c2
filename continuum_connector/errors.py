"""The three kinds of failure, which never mix.

A user error stops the server at start, or ends a command, and says value, consequence, cure. A
failed transfer is an expected condition: it becomes a miss and a counter. A broken invariant is a
bug of this package and names ids and states.
"""


class ConfigError(ValueError):
    """The user asked for something that cannot work; the text says what to change."""


class ToldError(Exception):
    """The user of a command asked for something that cannot work, or a file or a server is not
    what it should be; the text is all they see."""


class TransferError(RuntimeError):
    """A copy between VRAM and DRAM did not happen; the caller turns it into a miss."""


class InvariantError(AssertionError):
    """A promise of this package was broken by this package."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}. This is a bug in continuum_connector.")


def shown(text: str) -> str:
    """A name as it may stand in a sentence or on a terminal: what cannot be printed is written
    as Python would write it (\\x1b, \\n, \\u202e), so it moves no cursor and forges no line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
