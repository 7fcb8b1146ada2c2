"""Foreign: what others record of their agents -> requests, to be played by the lab and `bench`.

Each format is told by what is in the file, never by its name (recorded.py, written.py).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from continuum_connector.tools.analysis.recorded import (
    TOKEN_S,
    Request,
    bailian,
    mooncake,
    of_records,
    original,
    weka,
)
from continuum_connector.tools.analysis.source import Source, SourceError, is_original
from continuum_connector.tools.analysis.written import (
    CHARS,
    is_open_hands,
    messages,
    open_hands,
    swe_agent,
)

MAX_BYTES = 1 << 30  # of a file, unpacked
ENDINGS = (".json", ".jsonl", ".traj", ".gz")
ESTIMATED = f"tokens estimated, {CHARS} characters each"


class Foreign(NamedTuple):
    """`format`: its name; `note`: what the file does not say and was made up."""

    format: str
    requests: list[Request]
    note: str


def read(path: Path) -> Foreign:
    """Every request of a file, or of all files in a folder. SourceError if it is of no known
    format, or not all of one."""
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in ENDINGS)
    found = [_read(each, _name(each, path)) for each in files]
    formats = {each.format: each.note for each in found}
    if len(formats) != 1:
        what = f"has {', '.join(formats)} mixed" if formats else "has no such file"
        raise SourceError(f"{path} {what}; give one of {KNOWN}")
    requests = [request for each in found for request in each.requests]
    if not requests:
        raise SourceError(f"{path} has no request in it, so there is nothing to play")
    [(name, note)] = formats.items()
    return Foreign(name, requests, note)


def of_ours(source: Source) -> Foreign:
    """The requests behind a trace of ours, or of the original recorder."""
    if not (found := list(of_records(source.records()))):
        raise SourceError("the trace has no turn that was admitted, so there is none to play")
    return Foreign("ContinuumConnector", found, "answers of 1 token")


def _name(file: Path, given: Path) -> str:
    """What its programs are called: unique among the files of a folder."""
    return file.stem if file == given else str(file.relative_to(given).with_suffix(""))


def _read(path: Path, called: str) -> Foreign:
    documents = _documents(path)
    for name, note, is_one, requests in FORMATS:
        if documents and is_one(documents[0]):
            try:
                return Foreign(name, list(requests(documents, called)), note)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                why = f"{type(error).__name__}: {error}"
                raise SourceError(
                    f"{path} looks like {name}, but is broken ({why}); nothing is read of it"
                ) from None
    raise SourceError(f"{path} is of no format that is known here; give one of {KNOWN}")


def _documents(path: Path) -> list[Any]:
    """The file's JSON values: one, or one per line."""
    try:
        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{path} cannot be read ({error})") from None
    if len(data) > MAX_BYTES:
        raise SourceError(f"{path} has more than {MAX_BYTES >> 20} MiB, so nothing is read; cut it")
    try:
        return [msgspec.json.decode(data)]
    except (ValueError, RecursionError):
        pass  # a value per line?
    try:
        return [msgspec.json.decode(line) for line in data.split(b"\n") if line.strip()]
    except (ValueError, RecursionError):
        raise SourceError(
            f"{path} is no JSON, and has not one JSON value per line; give one of {KNOWN}"
        ) from None


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda one: isinstance(one, dict) and all(key in one for key in keys)


def _own(documents: list[Any], _: str) -> Iterator[Request]:
    yield from documents


Reader = Callable[[list[Any], str], Iterator[Request]]
FORMATS: tuple[tuple[str, str, Callable[[Any], bool], Reader], ...] = (
    ("requests", "", _has("trace", "lane", "inp", "out"), _own),
    ("Bailian", f"answers at {TOKEN_S} s a token", _has("chat_id", "parent_chat_id"), bailian),
    (
        "Mooncake",
        f"who asked, and answers at {TOKEN_S} s a token",
        _has("timestamp", "input_length", "output_length", "hash_ids"),
        mooncake,
    ),
    ("Weka", "", _has("requests"), weka),
    ("SWE-agent", ESTIMATED, _has("trajectory"), swe_agent),
    ("OpenHands", f"{ESTIMATED}, unless counted", is_open_hands, open_hands),
    (
        "messages",
        ESTIMATED,
        lambda one: _has("messages")(one[0] if isinstance(one, list) and one else one),
        messages,
    ),
    ("scheduler_timestamps", "answers of 1 token", is_original, original),
)
KNOWN = (
    "requests (JSON lines), Mooncake, Bailian, Weka/AgentX, SWE-agent or mini-swe-agent "
    "trajectories, OpenHands events, scheduler_timestamps"
)
