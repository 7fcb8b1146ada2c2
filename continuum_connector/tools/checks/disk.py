"""Lines on files: the disk tier's folder, its drive and how much is written to it; then the files
that the connector writes, and the one that switches it off."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from continuum_connector.config import SWITCH_PATH
from continuum_connector.epoch_endpoint import EpochEndpoint
from continuum_connector.errors import ConfigError
from continuum_connector.files import MIN_LEFT
from continuum_connector.memory import size
from continuum_connector.program_endpoint import ProgramEndpoint
from continuum_connector.switch_endpoint import MEANINGS, SwitchEndpoint, read_switch
from continuum_connector.tools.checks.machine import (
    DiskSeen,
    Line,
    Machine,
    error,
    ok,
    unseen,
    warning,
)
from continuum_connector.tools.checks.plan import Plan

SLOW = 0.5e9  # bytes per second; below this, most GPUs compute a prompt faster than a disk reads it
DAY_S = 86_400
MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "lustre", "gpfs", "beegfs")
LAYERED = ("overlay", "aufs")
COPYING = ("btrfs", "zfs", "bcachefs")
ELSEWHERE = "a folder on a local drive, ext4 or xfs"
WRITABLE = "name a file in a folder that exists and is writable"


class Mount(NamedTuple):
    """Where a file system is mounted. `device`: "259:2"; `source`: what was mounted."""

    point: str
    device: str
    kind: str
    source: str


Drive = tuple[int, bool | None]  # bytes, and whether it rotates, if the kernel says so


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
    mount = _find_mount(machine, seen.place)
    drive = _find_drive(machine, mount) if mount else None
    yield _file_system(path, mount)
    yield _space(plan, seen)
    yield _speed(seen, drive)
    yield _writes(plan, drive)


def _file_system(path: str, mount: Mount | None) -> Line:
    if mount is None:
        return unseen("file system", f"the kernel does not say which file system {path} is on")
    said, cure = f"{mount.kind} at {mount.point}", ELSEWHERE
    if mount.kind in MEMORY:
        text = f"{said} is memory: what leaves DRAM would be in DRAM again, and lost at a reboot"
        return error("file system", text, f"{ELSEWHERE}; or more dram_bytes")
    if mount.kind in REMOTE or mount.kind.startswith("fuse"):
        text = "is a network or a process: if that hangs, the server cannot end"
    elif mount.kind in LAYERED:
        text = "is the container's own layer, which ends with the container"
        cure = "mount a volume of the node's drive there"
    elif mount.kind in COPYING:
        text = "writes each change to a new place, so room taken at the start is not kept"
    else:
        return ok("file system", said)
    return warning("file system", f"{said} {text}", cure)


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


def _speed(seen: DiskSeen, drive: Drive | None) -> Line:
    if not seen.is_direct:
        text = "O_DIRECT is refused: the page cache takes memory, and hides the drive's speed"
        return warning("disk speed", text, ELSEWHERE)
    if not seen.bytes_per_s:
        return unseen("disk speed", "no room for a temporary file to read")
    text = f"{seen.bytes_per_s / 1e9:.2g} GB/s: {size(seen.read_bytes)} read back past the page"
    text += " cache (O_DIRECT); only a glance, beside the drive's other work"
    if drive and drive[1]:
        text += "; the kernel says that the drive rotates, as it does for many virtual ones"
    if seen.bytes_per_s < SLOW:
        text += "; computing a prompt is faster on most GPUs, so turns will seldom read"
        return warning("disk speed", text, "an NVMe drive; or no disk tier")
    return ok("disk speed", text)


def _writes(plan: Plan, drive: Drive | None) -> Line:
    config = plan.config
    budget = config.disk_bytes if config.disk_write_budget is None else config.disk_write_budget
    per_day = budget * plan.num_servers
    if not per_day:
        text = "disk_write_budget = 0: no bound, so agents may fill the drive several times a day"
        return warning("disk writes", text, "leave it out: disk_bytes per day")
    text = f"{size(per_day)} a day, {per_day / DAY_S / 1e6:.3g} MB/s on average"
    if drive is None:
        return unseen("disk writes", f"{text}; the size of the drive cannot be seen")
    times = per_day / drive[0]
    text += f": {times:.2g} times the drive of {size(drive[0])}"
    if times > 1:
        cure = "a smaller disk_write_budget, or a drive rated for that many writes a day"
        return warning("disk writes", f"{text}, where most are rated for 1 a day", cure)
    return ok("disk writes", text)


def _find_mount(machine: Machine, place: str) -> Mount | None:
    """The mount that holds `place`: the one with the longest path above it, the last among
    equals."""
    above = {str(each) for each in (PurePath(place), *PurePath(place).parents)}
    best: Mount | None = None
    for line in (machine.text("proc/self/mountinfo") or "").splitlines():
        # The kernel writes a space in a name as \040.
        words = [re.sub(r"\\([0-7]{3})", lambda it: chr(int(it[1], 8)), w) for w in line.split()]
        kinds = words[words.index("-") + 1 :] if "-" in words else []
        if len(words) < 5 or len(kinds) < 2:
            continue
        mount = Mount(words[4], words[2], kinds[0], kinds[1])
        if mount.point in above and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _find_drive(machine: Machine, mount: Mount) -> Drive | None:
    """The whole drive: the one that has this partition, or the only one below a mapped device."""
    at = machine.real(f"sys/dev/block/{mount.device}")
    if machine.number(f"{at}/size") is None:  # btrfs and zfs use device numbers of their own
        name = PurePath(machine.real(mount.source.lstrip("/"))).name
        at = machine.real(f"sys/class/block/{name}")
    for _ in range(8):
        below = machine.names(f"{at}/slaves")
        if machine.text(f"{at}/partition"):
            at = at.rpartition("/")[0]
        elif len(below) == 1:
            at = machine.real(f"{at}/slaves/{below[0]}")
        else:
            break
    sectors = machine.number(f"{at}/size")  # of 512 bytes, whatever the drive's own are
    if not sectors:
        return None
    rotates = machine.number(f"{at}/queue/rotational")
    return sectors * 512, None if rotates is None else bool(rotates)


# --- other files, and endpoints ---------------------------------------------------------------
def _file_lines(machine: Machine, plan: Plan) -> Iterator[Line]:
    """Can each file that the config names be written or read?"""
    config = plan.config
    if (path := config.trace_path) and machine.can_write(path):
        yield ok("trace_path", f"one line per decision and outcome: {path}")
    elif path:
        text = f"{path} cannot be written, so the server stops at start"
        yield error("trace_path", text, f"{WRITABLE}, or leave it empty")
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
    who = "for who has the key"
    file = PurePath(machine.environ.get(SWITCH_PATH, ""))
    switches = f"{SwitchEndpoint.path} reads and writes {file}, {who}"
    for kind, line in (
        (SwitchEndpoint, ok("switch endpoint", switches)),
        (EpochEndpoint, ok("epoch endpoint", f"{EpochEndpoint.path} begins an epoch, {who}")),
        (ProgramEndpoint, ok("program endpoint", f"{ProgramEndpoint.path} ends a program, {who}")),
    ):
        if kind.name() in plan.middleware:
            try:
                kind.read_key(machine.environ)
                yield line
            except ConfigError as why:
                yield error(line.subject, *str(why).split("; ", 1))
