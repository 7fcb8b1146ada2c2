"""The folder of a disk's files: its owner, its lock, its room, whose blocks are in it.

Every call here may take as long as the disk does, so only the thread that opens the disk makes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from continuum_connector.errors import TransferError
from continuum_connector.files import MIN_LEFT

ENDED = "the server ended before its disk was open"
_LOOK_EVERY_S = 0.1
_FACTS_AT, _MAX_FACTS = 8192, 65536  # of a file; csrc/disk_format.h


def make_folder(path: str) -> None:
    """Make the last folder of `path`, for us alone; TransferError if somebody else may write it."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise TransferError(
            f"disk_path = {path!r} lies in no folder that is there, so no file was made; see that "
            "its drive is mounted, or make the folder above it"
        ) from None
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        is_link = stat.S_ISLNK(found.st_mode)
        why = "is a symbolic link, which may be pointed elsewhere" if is_link else "is no folder"
    elif found.st_uid != os.geteuid():
        why = f"belongs to user {found.st_uid}, not to {os.geteuid()} who runs the server"
    elif found.st_mode & 0o022:
        why = f"may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return
    raise TransferError(
        f"disk_path = {path!r} {why}, so what is read from it could be anybody's; name a folder in "
        "it that is not there yet, which is then made for this server alone"
    )


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def only_one(folder: str, is_over: threading.Event) -> Iterator[None]:
    """Let one rank at a time in. So the first reads the weights for all, and each sees how much
    room the others have taken."""
    lock = os.open(
        Path(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        while not _is_locked(lock):
            if is_over.wait(_LOOK_EVERY_S):
                raise TransferError(ENDED)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # also for a fork that has the descriptor, too
        os.close(lock)


def check_room(path: Path, num_bytes: int) -> None:
    """Raise TransferError if a file of `num_bytes` at `path` would leave its file system too full,
    or if something else is there, such as a link to a file elsewhere. A file that has all its room
    already takes none, so a server finds it again however full the rest is."""
    system = os.statvfs(path.parent)
    free, total = (n * system.f_frsize for n in (system.f_bavail, system.f_blocks))
    taken = 0
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise TransferError(f"{path} is no file, so nothing can be kept in it; remove it")
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise TransferError(
                f"{path} may be another user's to write; remove it, and it is made for us alone"
            )
        taken = found.st_blocks * 512
    if num_bytes > taken and free + taken - num_bytes < MIN_LEFT * total:
        raise TransferError(
            f"{path} of {num_bytes} bytes would leave less than {MIN_LEFT:.0%} of its file system, "
            f"which has {total} bytes and {free + taken} free; lower disk_bytes, or remove what is "
            "not needed there, such as the *.slab of ranks that are no more"
        )


def read_facts(path: Path) -> str:
    """The facts that the file's blocks depend on, as whoever made it wrote them; "" if none are
    there."""
    with suppress(OSError), open(path, "rb") as file:
        return (
            os.pread(file.fileno(), _MAX_FACTS, _FACTS_AT).split(b"\0")[0].decode(errors="replace")
        )
    return ""


def why_anew(before: str, facts: str) -> str:
    """Why a file whose facts were `before` is begun anew for `facts`, for the log."""
    if not before:
        return "for the first time"
    try:
        old, new = json.loads(before), json.loads(facts)
        changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    except (ValueError, TypeError, AttributeError):
        return "because what is on it is of another server"
    if not changed:
        return "because its slots had another size, or the last server was reset"
    return f"because of other {', '.join(sorted(changed))}"
