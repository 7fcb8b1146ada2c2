"""Files: what may be used as one, and how one is put in place, whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def no_file(path: str) -> str:
    """What is at `path` instead of a file, such as "a folder"; "" for a file, and for nothing.

    Asked before it is opened: to open a named pipe waits until somebody opens its other end.
    """
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "")
    except OSError:
        return ""


def is_same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether both names are, or would become, one file: through links of either kind too."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def put(path: str | os.PathLike[str], content: bytes, mode: int = 0o666) -> None:
    """Put `content` at `path` at once or not at all; leaves nothing else behind. `mode`: of a file
    that is new, less the umask.

    OSError as well where a device, a pipe or a socket is: root would replace /dev/null for all.
    A symbolic link stays one: others may read what it points to. Mode and owner stay too, for
    others may write the file as well. The name beside it cannot be planted: nobody can guess it,
    and what is there already is not opened.
    """
    path = os.path.realpath(path)
    if (kind := no_file(path)) and not os.path.isdir(path):  # that the system refuses itself
        raise OSError(errno.EINVAL, f"it is {kind}", path)
    beside = os.path.join(os.path.dirname(path), f".continuum-{secrets.token_hex(16)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(beside, flags, mode)
    try:
        with open(descriptor, "wb") as file:
            _keep_rights(path, descriptor)  # before what is in it could be read
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def _keep_rights(old: str, new: int) -> None:
    """Mode, group and owner, as far as the system lets us: no write fails for their sake.

    `new` is open: whoever owns the folder may put a link where its name was, and root is not to
    give him what that points to.
    """
    try:
        had = os.stat(old)
    except OSError:  # there is none yet
        return
    with suppress(OSError):
        os.chmod(new, stat.S_IMODE(had.st_mode))
    for ids in ((-1, had.st_gid), (had.st_uid, -1)):  # the owner last: then it is no longer ours
        with suppress(OSError):
            os.chown(new, *ids)
