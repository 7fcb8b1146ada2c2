"""The three kinds of failure, which never mix.

A user error stops the server at start and says value, consequence, cure. A failed
transfer is an expected condition: it becomes a miss and a counter. A broken
invariant is a bug of this package and names ids and states.
"""


class ConfigError(ValueError):
    """The user asked for something that cannot work; the text says what to change."""


class TransferError(RuntimeError):
    """A copy between VRAM and DRAM did not happen; the caller turns it into a miss."""


class InvariantError(AssertionError):
    """A promise of this package was broken by this package."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}. This is a bug in continuum_connector.")
