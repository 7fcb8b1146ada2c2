"""Kept: one published table, with where it is from; a JSON file of a few kB in this folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from continuum_connector.errors import ToldError

FOLDER = Path(__file__).parent
Cell = str | float | None


class Found(msgspec.Struct):
    """A table without its origin. `cited`: its numbers, by the names that the front page asks for;
    `is_simulated`: in virtual time, so no machine made it faster or slower."""

    columns: list[str]
    rows: list[list[Cell]]
    versions: dict[str, str]
    cited: dict[str, float] = {}
    is_simulated: bool = False


class Kept(Found, kw_only=True, forbid_unknown_fields=True):
    """The same with its origin, and what people say of it."""

    command: str
    commit: str
    machine: str
    date: str
    place: int = 99  # on the page
    question: str = ""
    notes: list[str] = []

    @property
    def origin(self) -> str:
        """One line: what, where, when."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        how = "simulated, in virtual time" if self.is_simulated else self.machine
        return f"`{self.command}`, commit {self.commit}, {self.date}; {how}; {versions}."


def read(name: str) -> Kept:
    """The table of that name; ToldError if it is none."""
    path = FOLDER / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError) as error:
        raise ToldError(f"{path} cannot be read: {error}") from None


def read_all() -> dict[str, Kept]:
    """Every table, as they stand on the page."""
    found = {path.stem: read(path.stem) for path in FOLDER.glob("*.json")}
    return dict(sorted(found.items(), key=lambda each: (each[1].place, each[0])))


def write(name: str, kept: Kept) -> None:
    """Keep it. Where one of that name was, its question, notes and place stay."""
    path = FOLDER / f"{name}.json"
    if path.exists():
        before = read(name)
        kept.question, kept.notes, kept.place = before.question, before.notes, before.place
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
