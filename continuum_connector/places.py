"""Places: what the paths in the config may name, asked before anything is opened or made.

Each refusal is a ConfigError. What may be otherwise at the next start is not refused here, such as
a drive that is full or was mounted read-only: the server must come up without it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

from continuum_connector import files
from continuum_connector.errors import ConfigError

MIN_LEFT = 0.05  # of a file system, beside the disk tier: with less of it they become slow


def check_names(paths: Mapping[str, str]) -> None:
    """Whether each is a name at all; `paths`: by key."""
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
    """What is there already must be a file of its own, before a pipe makes the start wait.

    `named`: by key, none empty; `moves_trace`: the trace moves to other names when it is full.
    """
    for key, path in named.items():
        kind = files.no_file(path)
        if kind and (key, kind) != ("state_path", "a folder"):
            raise ConfigError(
                f"{key} = {path!r} is {kind}, which cannot serve as a file, so the server stops; "
                "name a file, or leave it empty"
            )
    for (key, path), (other, its) in itertools.combinations(named.items(), 2):
        if files.is_same(path, its):
            raise ConfigError(
                f"{key} = {path!r} and {other} = {its!r} are one file, which each would destroy "
                "for the other; name two"
            )
    for key, path in named.items():
        if moves_trace and key != "trace_path" and "trace_path" in named:
            _check_apart(key, path, named["trace_path"])


def _check_apart(key: str, path: str, trace_path: str) -> None:
    """A full trace moves to names of its own, over whatever is there."""
    moved = os.path.realpath(path).removeprefix(f"{os.path.realpath(trace_path)}.")
    if moved.isascii() and moved.isdigit():
        raise ConfigError(
            f"{key} = {path!r} is what trace_path = {trace_path!r} becomes when it is full, which "
            "would destroy it; name another file"
        )


def check_drive(key: str, path: str, size_key: str, num_bytes: int) -> None:
    """Whether `path` may be a folder of ours that takes `num_bytes`, which `size_key` says.

    One that is not there is made when it is first used, but none above it: without its drive, a
    mount point is an ordinary folder on another one.
    """
    if not os.path.isabs(path):
        raise ConfigError(
            f"{key} = {path!r} is relative, so each process could mean another folder; write the "
            "whole path, from / on"
        )
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):
        kind = files.no_file(path) or "a file"
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
