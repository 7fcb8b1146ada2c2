"""Store: results in a JSON-lines file, a line per job, in the order in which they were done."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from bench.sim.job import Line, Result, RunRecord, Start
from continuum_connector import files
from continuum_connector.errors import ToldError

_DECODER = msgspec.json.Decoder(Line)


def read(path: Path) -> Iterator[Line]:
    """Yield the file's lines; one that was cut off at the end is left out.

    Raises ToldError if a line in between is no result.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                raise ToldError(
                    f"{path}, line {number} is no result of the lab ({error}); "
                    "write to another file, or remove the line"
                ) from None


def results(path: Path) -> dict[str, Result]:
    """By key, the last result of each job: a job that failed may have been tried again."""
    return {line.job.key: line for line in read(path) if isinstance(line, Result)}


def by_cell(results: Iterable[Result]) -> dict[str, dict[str, dict[int, RunRecord]]]:
    """The runs of the matrix that were done, by cell, arm and seed."""
    found: dict[str, dict[str, dict[int, RunRecord]]] = {}
    for each in results:
        if each.record is not None and "cell" in each.job.params:
            arms = found.setdefault(str(each.job.params["cell"]), {})
            arms.setdefault(each.job.arm, {})[each.job.seed] = each.record
    return found


def starts(path: Path) -> list[Start]:
    """Each call that wrote to the file."""
    return [line for line in read(path) if isinstance(line, Start)]


class Store:
    """The file, open for more. Each line is on its way to the disk when `append` returns.

    Raises ToldError if another process has it open, or if it is something else.
    """

    def __init__(self, path: Path) -> None:
        if kind := files.no_file(str(path)):  # of a device every byte would be read, for ever
            raise ToldError(f"{path} is {kind}, which keeps no results; name a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as failed:
            self._file = failed.enter_context(path.open("a+b"))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ToldError(
                    f"{path} is being written by another run; wait for it, or name another file"
                ) from None
            self._drop_half_line()
            self.known = results(path)
            failed.pop_all()

    def _drop_half_line(self) -> None:
        """Whoever wrote it was stopped within a line: cut it off."""
        self._file.seek(0)
        rest, newline, _ = self._file.read().rpartition(b"\n")
        self._file.truncate(len(rest) + len(newline))

    def append(self, line: Line) -> None:
        """Write one line; whole, unless the machine goes down."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        if isinstance(line, Result):
            self.known[line.job.key] = line

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *ended: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
