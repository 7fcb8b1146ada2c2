"""Where recorded traces lie, and what to do if they do not."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from bench.common.workloads import Line, lines

FOLDER_VARIABLE = "CONTINUUM_TRACES"
COMMITTED = Path(__file__).resolve().parents[1] / "traces"  # parts of them, see README.md there


def records(name: str, source: str, kind: type[Line]) -> list[Line]:
    """Return the records of `name`, from the folder that CONTINUUM_TRACES names or else ours.

    Raises FileNotFoundError that says where to get it.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or COMMITTED)
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(
            f"no trace {path}, so it cannot be replayed. Get it from {source} and set "
            f"{FOLDER_VARIABLE} to the folder it lies in, or unset it to replay the part in "
            f"{COMMITTED}"
        )
    return _read(path, kind)


@functools.cache
def _read(path: Path, kind: type[Line]) -> list[Line]:
    return list(lines(path, kind))
