"""Files: what the paths in the config may name; how a file is put in place, whole or not at all.

Each check_ refuses with a ConfigError, before anything is opened or made. It does not refuse what
may be different at the next start, such as a drive that is full or mounted read-only: the server
must come up without it.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress

from continuum_connector.errors import ConfigError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


_OPEN_FILES = "/proc/self/fd"


def no_file(path: str) -> str:
    """What is at `path` instead of a file, such as "a folder"; "" for a file, and for nothing.

    Call it before opening: to open a named pipe waits until somebody opens its other end.
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
    """Put `content` at `path` at once or not at all, and leave nothing else behind. `mode`: of a
    new file, less the umask.

    A device, a pipe or a socket at `path` is an OSError, too: root would replace /dev/null for all.
    A symbolic link stays one, because others may read what it points to. Mode and owner stay, too,
    because others may also write the file. Until it is whole, the new file has no name where the
    file system can do that, so whoever is killed while the disk is slow leaves none behind. Nobody
    can plant a file under the temporary name: it cannot be guessed, and a file that is there
    already is not opened.
    """
    path = os.path.realpath(path)
    if (kind := no_file(path)) and not os.path.isdir(path):  # the system itself refuses a folder
        raise OSError(errno.EINVAL, f"it is {kind}", path)
    beside = os.path.join(os.path.dirname(path), f".continuum-{secrets.token_hex(16)}")
    descriptor, has_name = _open_new(beside, mode)
    try:
        with open(descriptor, "wb") as file:
            _keep_rights(path, descriptor)  # before its content could be read
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            if not has_name:
                # Only with a folder, which a whole path does not need, does Python have the system
                # follow the link to the open file.
                os.link(f"{_OPEN_FILES}/{descriptor}", beside, src_dir_fd=descriptor)
                has_name = True
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            if has_name:
                os.unlink(beside)
        raise


def _open_new(name: str, mode: int) -> tuple[int, bool]:
    """Open a new file, and say whether it has its name already."""
    with suppress(OSError):  # not NFS; and containers may lack /proc
        if os.path.isdir(_OPEN_FILES):
            flags = os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC
            return os.open(os.path.dirname(name), flags, mode), False
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, mode), True


def _keep_rights(old: str, new: int) -> None:
    """Keep mode, group and owner as far as the system lets us; no write fails because of them.

    `new` is an open file: the folder's owner may put a link where its name was, and root must not
    give that owner what the link points to.
    """
    try:
        had = os.stat(old)
    except OSError:  # there is none yet
        return
    with suppress(OSError):
        os.chmod(new, stat.S_IMODE(had.st_mode))
    for ids in ((-1, had.st_gid), (had.st_uid, -1)):  # the owner last, for it is not ours then
        with suppress(OSError):
            os.chown(new, *ids)


MIN_LEFT = 0.05  # of a file system, beside the disk tier: with less left it becomes slow


def check_names(paths: Mapping[str, str]) -> None:
    """Refuse what no file can be named; `paths`: by key."""
    for key, path in paths.items():
        if "\0" in path:
            raise ConfigError(
                f"{key} = {path!r} has a NUL in it, which no file's name may have, so the server "
                "stops; write the path without it"
            )
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise ConfigError(
                f"{key} = {path!r} has half of a surrogate pair in it, which no file's name may "
                "have, so the server stops; write whole characters"
            ) from None


def check_files(named: Mapping[str, str], moves_trace: bool) -> None:
    """Refuse what exists and is not a file of its own, before a pipe makes the start wait.

    `named`: by key, none empty; `moves_trace`: the trace moves to other names when it is full.
    """
    for key, path in named.items():
        if kind := no_file(path):
            raise ConfigError(
                f"{key} = {path!r} is {kind}, which cannot serve as a file, so the server stops; "
                "name a file, or leave it empty"
            )
    for (key, path), (other, its) in itertools.combinations(named.items(), 2):
        if is_same(path, its):
            raise ConfigError(
                f"{key} = {path!r} and {other} = {its!r} are one file, which each would destroy "
                "for the other; name two"
            )
    for key, path in named.items():
        if moves_trace and key != "trace_path" and "trace_path" in named:
            _check_apart(key, path, named["trace_path"])


def _check_apart(key: str, path: str, trace_path: str) -> None:
    """Refuse the names that a full trace moves to, over whatever is there."""
    moved = os.path.realpath(path).removeprefix(f"{os.path.realpath(trace_path)}.")
    if moved.isascii() and moved.isdigit():
        raise ConfigError(
            f"{key} = {path!r} is what trace_path = {trace_path!r} becomes when it is full, which "
            "would destroy it; name another file"
        )


def check_drive(key: str, path: str, size_key: str, num_bytes: int) -> None:
    """Refuse a `path` that cannot be our folder for `num_bytes`, the value of `size_key`.

    A folder that is not there is made when it is first used, but none above it: without its drive,
    a mount point is an ordinary folder on another drive.
    """
    if not os.path.isabs(path):
        raise ConfigError(
            f"{key} = {path!r} is relative, so each process could mean another folder; write the "
            "whole path, from / on"
        )
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):
        kind = no_file(path) or "a file"
        raise ConfigError(
            f"{key} = {path!r} is {kind}, which cannot serve as a folder, so the server stops; "
            "name a folder, or leave it empty"
        )
    try:
        system = os.statvfs(path)
    except OSError:  # a drive that fails: the server comes up without it
        return
    if not os.access(path, os.W_OK | os.X_OK) and not system.f_flag & os.ST_RDONLY:
        raise ConfigError(
            f"{key} = {path!r} is not ours to write in, so nothing could be kept there; give the "
            "folder to the user who runs the server"
        )
    total = system.f_blocks * system.f_frsize
    if num_bytes > (1 - MIN_LEFT) * total:
        raise ConfigError(
            f"{size_key} = {num_bytes} leaves less than {MIN_LEFT:.0%} of the file system at "
            f"{key} = {path!r}, which has {total} bytes and would become slow; set "
            f"{int((1 - MIN_LEFT) * total)} or less"
        )


def check_endpoint(path: str, environ: Mapping[str, str], variable: str, key: str) -> None:
    """Refuse a `switch_path` that the switch endpoint does not know: it sees the environment
    alone, where `variable` must name the file that we read. `key`: the variable that turns it on.
    """
    written = environ.get(variable, "")
    if written and written != path:
        raise ConfigError(
            f"switch_path = {path!r}, but /continuum/switch writes {variable} = {written!r}, so it "
            f"would switch nothing; leave switch_path out of kv_connector_extra_config, or unset "
            f"{key}"
        )
