"""What a folder for the disk tier is like. Machine.ask runs this in its own process, so a disk that
hangs holds up that process and not the check."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import stat
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PAGE = 4096
PIECE = 2 << 20  # what the tier reads at once, if disk_slot_bytes is left alone
MOST = 64 << 20
SECONDS = 0.5  # for writing, and again for reading
THREADS = 8  # as disk_threads


def look(path: str) -> dict[str, Any]:
    """The fields of `DiskSeen`. Makes no folder; its file has no name, so nothing can stay."""
    wanted = Path(path)
    exists = os.path.lexists(wanted)
    place = wanted if exists else wanted.parent  # the server makes the last folder, none above it
    found: dict[str, Any] = {"place": str(place.resolve()), "exists": exists}
    if wanted.is_symlink():
        return found | {"trouble": "it is a symbolic link, which may be pointed elsewhere"}
    if not place.is_dir():
        what = (
            "is no folder" if place.exists() else "is not there, and only the last folder is made"
        )
        return found | {"trouble": f"{'it' if exists else place} {what}"}
    room, rights = os.statvfs(place), place.stat()
    found |= {
        "mode": stat.S_IMODE(rights.st_mode),
        "is_ours": rights.st_uid == os.geteuid(),
        "num_bytes": room.f_blocks * room.f_frsize,
        "free_bytes": room.f_bavail * room.f_frsize,
        "slab_bytes": sum(each.stat().st_blocks * 512 for each in wanted.glob("dp*-rank*.slab")),
    }
    try:
        file = _nameless(place)
    except OSError as why:
        return found | {"trouble": f"no file can be made in {place} ({why.strerror})"}
    try:
        return found | _glance(file)
    finally:
        os.close(file)


def _nameless(folder: Path) -> int:
    """A file that is gone when it is closed, whatever becomes of us."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as why:
        if why.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # NFS and old kernels have none
            raise
    file, name = tempfile.mkstemp(prefix=".continuum-check-", dir=folder)
    os.unlink(name)
    return file


def _glance(file: int) -> dict[str, Any]:
    """Whether O_DIRECT works, and bytes per second read so; {} where there is no room to try."""
    buffer = mmap.mmap(-1, PIECE)  # begins at a page, as O_DIRECT wants it
    buffer.write(os.urandom(PIECE))  # some drives do not store zeros
    if not _goes_direct(file, buffer):
        return {"is_direct": False}
    num = _fill(file, buffer)
    return {"is_direct": True} | (_read(file, num) if num else {})


def _fill(file: int, buffer: mmap.mmap) -> int:
    """How many pieces there are to read back: as far as the time goes, the room, or the quota."""
    num, until = 0, time.monotonic() + SECONDS
    with contextlib.suppress(OSError):
        while num < MOST // PIECE and (not num or time.monotonic() < until):
            if os.pwrite(file, buffer, num * PIECE) < PIECE:
                break
            num += 1
    return num


def _goes_direct(file: int, buffer: mmap.mmap) -> bool:
    """A file system may take the flag and then refuse the reads."""
    try:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        page = memoryview(buffer)[:PAGE]
        os.pwrite(file, page, 0)
        return os.preadv(file, [page], 0) == PAGE
    except OSError as why:
        if why.errno == errno.EINVAL:
            return False
        raise


def _read(file: int, num: int) -> dict[str, Any]:
    """Read `num` pieces, as many at once as the tier would, or as far as the time goes."""
    begin = time.monotonic()

    def read(index: int) -> int:
        if index >= THREADS and time.monotonic() - begin > SECONDS:
            return 0
        return os.preadv(file, [mmap.mmap(-1, PIECE)], index * PIECE)

    with ThreadPoolExecutor(THREADS) as threads:
        num_read = sum(threads.map(read, range(num)))
    return {"read_bytes": num_read, "bytes_per_s": num_read / (time.monotonic() - begin)}


if __name__ == "__main__":
    try:
        print(json.dumps(look(sys.argv[1])))
    except OSError as why:
        print(json.dumps({"trouble": f"{why.strerror or why} ({why.filename or sys.argv[1]})"}))
