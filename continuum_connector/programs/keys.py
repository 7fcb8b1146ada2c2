"""A program's key: the name its client gave it, in a namespace that only such clients can write.

    job:run-17                             named without a `cache_salt`
    salted:<digest of the salt>:job:run-17 named with one: in reach of requests with that salt
    anonymous:<random>                     named by nobody: in reach of its own lineage alone

No text of a client becomes a key of the lower two kinds, for `program_key` puts a colon before
one that begins like them; so it does not matter who has read such a key. The digests have a key
of their own per process: whoever can guess a salt cannot tell from a digest that he has guessed
right. Nothing that outlives the process may be found by a key.
"""

from __future__ import annotations

import hashlib
import secrets

MAX_KEY_CHARS = 200

_SALTED, _ANONYMOUS = "salted:", "anonymous:"  # analysis/summary.py knows the second
_DIGEST_BYTES = 16
_SECRET = secrets.token_bytes(32)


def program_key(name: str, salt: str | None) -> str:
    """Return the printable, bounded key of the program that requests of this salt call `name`."""
    if salt:
        space = f"{_SALTED}{_digest(salt, b'salt')}:"
        return space + _bounded(name, MAX_KEY_CHARS - len(space))
    if name.startswith((_SALTED, _ANONYMOUS)):
        name = f":{name}"
    return _bounded(name, MAX_KEY_CHARS)


def anonymous_key() -> str:
    """Return a new key for a program without a name: random, for a count would tell any client
    how many requests of others came since its last one."""
    return f"{_ANONYMOUS}{secrets.token_hex(_DIGEST_BYTES)}"


def printable(text: str) -> str:
    """Return `text`, or its escaped form if a log or a terminal would not show it as it is."""
    if text.isprintable():
        return text
    return text.encode("unicode_escape").decode("ascii")  # covers lone surrogates, newlines


def _bounded(name: str, room: int) -> str:
    """Shorten what is too long to its beginning and a digest of the whole."""
    shown = printable(name[: room + 1])
    if len(shown) <= room:
        return shown
    end = f"~{_digest(name, b'name')}"
    return shown[: room - len(end)] + end


def _digest(text: str, use: bytes) -> str:
    raw = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=_DIGEST_BYTES, key=_SECRET, person=use).hexdigest()
