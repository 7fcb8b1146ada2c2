"""Lines on files: the disk tier's folder, its file system and how much is written to it; then the
files that the connector writes, and the one that switches it off."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import PurePath

from continuum_connector.config import SWITCH_PATH
from continuum_connector.epoch_endpoint import EpochEndpoint
from continuum_connector.errors import ConfigError
from continuum_connector.files import MIN_LEFT
from continuum_connector.memory import size
from continuum_connector.program_endpoint import ProgramEndpoint
from continuum_connector.switch_endpoint import MEANINGS, SwitchEndpoint, read_switch
from continuum_connector.tools.checks import Line, error, ok, unseen, warning
from continuum_connector.tools.checks.machine import DiskSeen, Machine
from continuum_connector.tools.checks.plan import Plan

DAY_S = 86_400
MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "lustre", "gpfs", "beegfs")
LAYERED = ("overlay", "aufs")
COPYING = ("btrfs", "zfs", "bcachefs")
ELSEWHERE = "a folder on a local drive, ext4 or xfs"


def lines(machine: Machine, plan: Plan) -> Iterator[Line]:
    """Check only what the config asks for."""
    if plan.config.disk_path:
        yield from _tier_lines(machine, plan, plan.config.disk_path)
    yield from _file_lines(machine, plan)
    yield from _endpoint_lines(machine, plan)


# --- the disk tier ----------------------------------------------------------------------------
def _tier_lines(machine: Machine, plan: Plan, path: str) -> Iterator[Line]:
    """If the folder cannot be used, its line is the only one."""
    seen = machine.see("disk", DiskSeen, str(machine.place(path)))
    if seen.trouble:
        cure = "a folder that the server may make or write to, on a drive that answers"
        yield error("disk", f"{path}: {seen.trouble}, so there is no disk tier", cure)
        return
    if not seen.exists:
        yield ok("disk", f"{path} is not there yet; the server makes it, for itself alone")
    elif seen.mode & 0o022 or not seen.is_ours:
        whose = f"has mode {seen.mode:o}" if seen.is_ours else "belongs to another user"
        text = f"{path} {whose}: others could write its files, so there is no disk tier"
        cure = f"chmod 700 and chown {path}; or name a folder in it, which the server makes"
        yield error("disk", text, cure)
    else:
        yield ok("disk", f"only the server may write to {path}")
    yield _file_system(machine, path, seen.place)
    yield _space(plan, seen)
    yield _writes(plan, seen)


def _file_system(machine: Machine, path: str, place: str) -> Line:
    point, kind = _mount(machine, place)
    said, cure = f"{kind} at {point}", ELSEWHERE
    if not kind:
        return unseen("file system", f"the kernel does not say which file system {path} is on")
    if kind in MEMORY:
        text = f"{said} is memory: what leaves DRAM would be in DRAM again, and lost at a reboot"
        return error("file system", text, f"{ELSEWHERE}; or more dram_bytes")
    if kind in REMOTE or kind.startswith("fuse"):
        text = "is a network or a process: if that hangs, the server cannot end"
    elif kind in LAYERED:
        text = "is the container's own layer, which ends with the container"
        cure = "mount a volume of the node's drive there"
    elif kind in COPYING:
        text = "writes each change to a new place, so room taken at the start is not kept"
    else:
        return ok("file system", said)
    return warning("file system", f"{said} {text}", cure)


def _mount(machine: Machine, place: str) -> tuple[str, str]:
    """Where the file system that holds `place` is mounted, and its kind: the longest path above
    it, the last among equals; "" if the kernel does not say."""
    found = "", ""
    for line in (machine.text("proc/self/mountinfo") or "").splitlines():
        before, _, behind = line.partition(" - ")
        # The kernel writes a space in a name as \040.
        point = re.sub(r"\\([0-7]{3})", lambda it: chr(int(it[1], 8)), before.split()[4])
        if PurePath(place).is_relative_to(point) and len(point) >= len(found[0]):
            found = point, behind.split()[0]
    return found


def _space(plan: Plan, seen: DiskSeen) -> Line:
    wanted, dram_bytes = plan.config.disk_bytes, plan.config.dram_bytes or 0
    servers = f" ({plan.num_servers} servers)" if plan.num_servers > 1 else ""
    left = _left_behind(plan, seen)
    own = sum(num_bytes for name, num_bytes in seen.slabs.items() if name not in left)
    room = max(0, seen.free_bytes + own - int(MIN_LEFT * seen.num_bytes))
    in_all = wanted * plan.num_servers
    text = f"{size(in_all)}{servers} wanted, of {size(room)} that may be used"
    text += f": {size(seen.free_bytes)} free of {size(seen.num_bytes)}"
    text += f", of which {MIN_LEFT:.0%} must stay free"
    text += f", and {size(own)} in files of the tier" if own else ""
    if left:
        files = "files of ranks that this server does not have"
        text += f"; {size(sum(left.values()))} more in {files}"
    delete = f"delete {', '.join(left)}" if left else "free room"
    if in_all > max(room, own):
        text = f"{text}; so there is no disk tier"
        return error("disk space", text, f"less disk_bytes, or {delete}")
    if left:
        return warning("disk space", f"{text}, which nobody removes", delete)
    if wanted < dram_bytes:
        text = f"{size(wanted)} are less than dram_bytes, {size(dram_bytes)}"
        cure = "disk_bytes above dram_bytes: `continuum size --dram` says how much"
        return warning("disk space", f"{text}: most of it would also be in DRAM", cure)
    return ok("disk space", text)


def _left_behind(plan: Plan, seen: DiskSeen) -> dict[str, int]:
    """Files of ranks that the server does not have, as after a smaller --tensor-parallel-size, and
    their bytes. Where engines are on several nodes, nothing says which ranks are here."""
    if plan.nnodes > 1 or plan.node_engines != plan.data_parallel_size:
        return {}
    ranks = range(plan.num_ranks // max(1, plan.data_parallel_size))
    own = {
        f"dp{engine}-rank{rank}.slab" for engine in range(plan.data_parallel_size) for rank in ranks
    }
    return {name: num_bytes for name, num_bytes in sorted(seen.slabs.items()) if name not in own}


def _writes(plan: Plan, seen: DiskSeen) -> Line:
    config = plan.config
    budget = config.disk_bytes if config.disk_write_budget is None else config.disk_write_budget
    per_day = budget * plan.num_servers
    if not per_day:
        text = "disk_write_budget = 0: no bound, so agents may fill the drive several times a day"
        return warning("disk writes", text, "leave it out: disk_bytes per day")
    text = f"{size(per_day)} a day, {per_day / DAY_S / 1e6:.3g} MB/s on average"
    if not seen.num_bytes:  # as some networks say
        return unseen("disk writes", f"{text}; the size of the file system cannot be seen")
    times = per_day / seen.num_bytes
    text += f": {times:.2g} times the file system of {size(seen.num_bytes)}"
    if times > 1:
        cure = "a smaller disk_write_budget, or a drive rated for that many writes a day"
        return warning("disk writes", f"{text}, where most drives are rated for 1 a day", cure)
    return ok("disk writes", text)


# --- other files, and endpoints ---------------------------------------------------------------
def _file_lines(machine: Machine, plan: Plan) -> Iterator[Line]:
    """Can each file that the config names be written or read?"""
    config = plan.config
    if (path := config.trace_path) and machine.can_write(path):
        yield ok("trace_path", f"one line per decision and outcome: {path}")
    elif path:
        text = f"{path} cannot be written, so the server stops at start"
        cure = "name a file in a folder that exists and is writable, or leave it empty"
        yield error("trace_path", text, cure)
    if config.switch_path:
        yield _switch(machine, config.switch_path)


def _switch(machine: Machine, path: str) -> Line:
    folder = os.path.dirname(path) or "."
    if not machine.place(folder).is_dir():
        text = f"{folder} is no folder, so the server stops at start"
        return error("switch_path", text, "make the folder, or leave switch_path empty")
    place = machine.place(path)
    try:
        said = read_switch(place)
    except OSError as why:
        text = f"{path} cannot be read ({why.strerror}), so it would switch nothing"
        return warning("switch_path", text, "name a file that the server may read")
    if said not in MEANINGS:
        text = f"{path} says {said!r}, which is neither on nor off: the server starts switched on"
        return warning("switch_path", text, "write on or off into it")
    if not MEANINGS[said]:
        text = f"{path} says off, so the server starts switched off"
        return warning("switch_path", text, "write on into it, or remove it")
    why_on = "says so" if place.exists() else "is not there, which means on"
    return ok("switch_path", f"on: {path} {why_on}")


def _endpoint_lines(machine: Machine, plan: Plan) -> Iterator[Line]:
    """Does each endpoint have its key?"""
    file = PurePath(machine.environ.get(SWITCH_PATH, ""))
    for subject, kind, does in (
        ("switch endpoint", SwitchEndpoint, f"reads and writes {file}"),
        ("epoch endpoint", EpochEndpoint, "begins an epoch"),
        ("program endpoint", ProgramEndpoint, "ends a program"),
    ):
        if kind.name() in plan.middleware:
            try:
                kind.read_key(machine.environ)
                yield ok(subject, f"{kind.path} {does}, for who has the key")
            except ConfigError as why:
                yield error(subject, *str(why).split("; ", 1))
