"""What goes into a check: a Machine, everything that it may look at, so that a test can simulate
any; and what `Machine.ask` learns from vLLM, CUDA, our native library and a disk."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from continuum_connector import memory

ASK_TIMEOUT_S = 180.0  # enough to import vLLM from a cold network disk
KILL_S = 5.0  # a process that is still there waits for a disk, and no signal reaches it
Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Machine:
    """`root`: where /proc and /sys are. `environ`: what the server would inherit. `ask`: runs
    ask.py in a process of its own and returns its answer."""

    root: Path
    environ: Mapping[str, str]
    ask: Callable[..., dict[str, Any]]
    plugins: Mapping[str, str]  # entry points of vllm.general_plugins: name to object

    def see(self, about: str, kind: type[Seen], *words: str) -> Seen:
        """What it answers to `ask`, in one of the structs below."""
        return msgspec.convert(self.ask(about, *words), kind)

    def text(self, path: str) -> str | None:
        """The file's text without the newline at its end; None if it cannot be read."""
        return memory.read_text(self.root / path)

    def number(self, path: str) -> int | None:
        """The one number in a file; None if it holds anything else."""
        return memory.read_number(self.root / path)

    def fields(self, path: str) -> dict[str, str]:
        """What a file of `key: value` lines says."""
        lines = (line.partition(":") for line in (self.text(path) or "").splitlines())
        return {key.strip(): value.strip() for key, _, value in lines}

    def can_write(self, path: str) -> bool:
        """Whether this file may be written, or made: its folder must exist."""
        place = self.place(path)
        return os.access(place if place.exists() else place.parent, os.W_OK)

    def place(self, path: str) -> Path:
        """Where a path of the server's config is on this machine."""
        return self.root / path.lstrip("/") if path.startswith("/") else Path(path)


def this_machine(environ: Mapping[str, str]) -> Machine:
    """The machine that we run on, for a server that starts with `environ`."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    return Machine(
        Path("/"),
        environ,
        lambda about, *words: _ask(about, words, environ),
        {each.name: each.value for each in found},
    )


def _ask(about: str, given: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Run ask.py in a process of its own and return its answer; {"trouble": ...} if there is none.

    The answer is the last JSON object that it prints, for vLLM and others print, too.
    """
    words = [sys.executable, "-m", "continuum_connector.tools.checks.ask", about, *given]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        words, stdout=pipe, stderr=pipe, text=True, env=dict(environ), start_new_session=True
    )
    try:
        told, troubles = process.communicate(timeout=ASK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILL_S)
        return {"trouble": f"no answer within {ASK_TIMEOUT_S:.0f} s"}
    for line in reversed(told.splitlines()):
        if line.startswith("{"):  # what others print at exit comes after it
            with contextlib.suppress(ValueError):  # and may begin with a brace, too
                return dict(json.loads(line))
    said = (troubles.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return {"trouble": said}


class Kv(msgspec.Struct, frozen=True):
    """The KV cache that vLLM makes for a command line, and what our connector says of it there.

    `device`: the GPU that vLLM was told of. `aside`, `no_tier`, `no_disk`: the server's sentences,
    "" where it does not object. `layers`: class of spec, window or chunk, how many; `groups`:
    class, tokens of a block, window or chunk. `block_bytes`: a block of every group takes so much,
    over all `num_ranks` ranks of an engine. `drops_a_block`: drafts make a hit shorter by a block.
    """

    device: str
    architecture: str
    aside: str
    no_tier: str
    no_disk: str
    layers: tuple[tuple[str, int | None, int], ...]
    groups: tuple[tuple[str, int, int | None], ...]
    block_bytes: int
    num_ranks: int
    prefix_caching: bool
    drops_a_block: bool
    server: dict[str, Any]


class VllmSeen(msgspec.Struct, frozen=True):
    """The vLLM of this Python. `trouble`: why it cannot be imported. `tool_parsers`: names for
    --tool-call-parser. `refused`, `unread`: what vLLM itself says of the options. `model`,
    `options`: what it reads in them, None if it was not asked or refuses them. `kv`: what it makes
    of them, None if that is `not_seen`. `lacks_all`, `lacks`: what touched.py says for any server,
    and for some. The rest comes from compat.py."""

    is_installed: bool = False
    trouble: str = ""
    plugin_trouble: str = ""
    version: str = ""
    tested: tuple[str, ...] = ()
    platform: str = ""  # cuda, rocm, cpu, ...; "" where vLLM found no device
    has_layouts: bool = False
    fails_by_request: bool = False
    mends_drafted_states: bool = False
    lacks_all: str = ""
    lacks: tuple[str, ...] = ()
    tool_parsers: tuple[str, ...] = ()
    model: str = ""
    refused: str = ""
    unread: str = ""
    options: dict[str, Any] | None = None
    kv: Kv | None = None
    not_seen: str = ""


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that CUDA shows to this process. `pci_id`: as in /sys/bus/pci/devices."""

    name: str
    pci_id: str
    num_bytes: int = 0


class CudaSeen(msgspec.Struct, frozen=True):
    """libcuda. `version`: that of CUDA, where 12080 is 12.8. `code`: what cuInit returned."""

    has_library: bool = False
    trouble: str = ""
    version: int = 0
    code: int = 0
    gpus: tuple[Gpu, ...] = ()


class NativeSeen(msgspec.Struct, frozen=True):
    """Our native library. `trouble`: why it cannot be loaded or opened."""

    trouble: str = ""
    abi: int = 0


class DiskSeen(msgspec.Struct, frozen=True):
    """The folder of the disk tier. `place`: the folder, or the one above if it does not exist yet.
    `trouble`: why no file can be made there. `exists`, `mode`, `is_ours`: whether it is there, its
    permissions, whether we own it. `num_bytes`, `free_bytes`: size and free space of its file
    system. `slabs`: bytes that each of the tier's own files takes in it."""

    trouble: str = ""
    place: str = ""
    exists: bool = False
    mode: int = 0
    is_ours: bool = True
    num_bytes: int = 0
    free_bytes: int = 0
    slabs: dict[str, int] = msgspec.field(default_factory=dict)
