"""The ways to serve that are compared: what each needs, and how its server is started.

README.md has the table of them.

LMCache comes from a folder of its own (`python -m bench.serve.rivals`), so that its pinned
dependencies do not touch vLLM's. `lmcache-v1`, `simple` and `offloading` copy with CUDA: on a CPU
they need shims for that layer alone, given as a folder with cpu_lmcache_v1.py and
cpu_native_shim.py; what they decide is their own, what their copies cost is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.arms import Arm, Role
from bench.serve import router
from bench.serve.rivals import LMCACHE_ENV, LmcacheServer, missing
from continuum_connector.config import POLICIES, load_config
from continuum_connector.errors import ConfigError

ROUTER = "router"  # in front of any other, with a capacity in tokens behind a colon
OURS = ("continuum", "continuum-disk")  # each with a policy behind a colon, keys behind +
PLACES = {"policy", "dram_bytes", "disk_path", "disk_bytes"}  # which the runner sets for each arm
CHUNK = 256  # tokens; LMCache's default. On a CPU it must be a multiple of 128.


class CannotRunError(Exception):
    """This arm does not run here; the message says why and what to do."""


@dataclass(frozen=True)
class Place:
    """Where the arms run, the same for all of them."""

    dram_bytes: int
    block_size: int
    on_cpu: bool
    rivals: Path  # where LMCache is
    vram_tokens: int = 0  # that the servers' pool holds; 0: as the server finds
    shims: Path | None = None
    disk: Path | None = None  # where a folder of this server's own may be made
    disk_bytes: int = 0

    def chunk(self) -> int:
        """LMCache's chunk in tokens: small where contexts are."""
        chunk = 128 if self.on_cpu else CHUNK
        if chunk % self.block_size:
            raise CannotRunError(
                f"LMCache's chunk of {chunk} tokens is no multiple of --block-size "
                f"{self.block_size}"
            )
        return chunk

    def folder(self) -> Path:
        """Of a drive, for one server."""
        if self.disk is None:
            raise CannotRunError("it needs a folder on a drive; name one with --disk-path")
        return self.disk.absolute()


@dataclass
class Setup:
    """What differs from one arm's server to the next."""

    connector: dict[str, Any] | None = None  # ContinuumConnector's config
    kv_transfer_config: dict[str, Any] | None = None  # of another connector
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    side: LmcacheServer | None = None  # a process that must be there first
    front: tuple[str, ...] = ()  # the options of vLLM's router before it; without any there is none
    disk: Path | None = None  # a folder that is empty when the server starts and goes with it


@dataclass(frozen=True)
class ServerArm(Arm):
    """One way to serve. `uses_dram`: whether its size matters. `forgets`: whether a reset of
    vLLM's caches empties its DRAM too, and its disk (`reset_cache` of its connector)."""

    setup: Callable[[Place], Setup]
    uses_dram: bool = True
    priority: bool = False  # clients send the program's number
    forgets: bool = True
    uses_disk: bool = False
    routed: bool = False  # clients name their program in a header, for the router


def find_arm(name: str) -> ServerArm:
    """The arm of this name.

    Raises KeyError if there is none, ConfigError if a key of ours has a value it cannot have.
    """
    kind, *added = name.split("+")
    if kind.partition(":")[0] == ROUTER:
        return _routed(name)
    kind, _, policy = kind.partition(":")
    if kind not in OURS:
        return ARMS[name]
    policy = policy or "adaptive"
    if policy not in POLICIES:
        raise KeyError(name)
    keys, uses_disk = _keys(added), kind == "continuum-disk"
    return ServerArm(
        "+".join([f"{kind}:{policy}", *added]),
        ", ".join([f"Continuum {policy}", *["disk"] * uses_disk, *added]),
        partial(_continuum, {"policy": policy, **keys}, uses_disk),
        role=Role.OURS if policy == "adaptive" and not keys else Role.RELATED,
        uses_disk=uses_disk,
    )


def _routed(name: str) -> ServerArm:
    """`router+ARM`, `router:TOKENS+ARM`. It remembers programs, so each load gets a new one."""
    front, _, behind = name.partition("+")
    text, arm = front.partition(":")[2], find_arm(behind)
    if arm.routed or (":" in front and not (text.isdecimal() and int(text))):
        raise KeyError(name)

    def setup(place: Place) -> Setup:
        if not router.installed():
            raise CannotRunError(
                f"vLLM's router is not installed, and {name} has it in front; install it with: "
                f"pip install {router.PACKAGE} (its wheel is for Linux on x86-64)"
            )
        if not (tokens := int(text or place.vram_tokens)):
            raise CannotRunError(
                "with --blocks 0 nobody knows before the start what VRAM holds, and the router "
                f"must be told; write it: {ROUTER}:TOKENS+{behind}"
            )
        return replace(arm.setup(place), front=router.scheduling(tokens))

    return replace(
        arm,
        name=f"{front}+{arm.name}",
        title=f"{arm.title} behind the router{text and f' ({int(text):,} tokens)'}",
        role=Role.RIVAL if arm.role is Role.RIVAL else Role.RELATED,
        setup=setup,
        forgets=False,
        routed=True,
    )


def _keys(added: list[str]) -> dict[str, str]:
    """`KEY=VALUE`, each as the connector reads it; what is the same for all arms is no arm's."""
    keys = dict(text.partition("=")[::2] for text in added)
    for key in PLACES & keys.keys():
        raise ConfigError(
            f"{key} = {keys[key]} is one arm's alone, and all arms have the same; "
            "say it with --dram, --disk, --disk-path, or :POLICY"
        )
    load_config(keys, environ={})
    return keys


def _continuum(config: dict[str, Any], has_disk: bool, place: Place) -> Setup:
    disk = place.folder() if has_disk else None
    config = {**config, "dram_bytes": place.dram_bytes}
    if disk is not None:
        config |= {"disk_path": str(disk), "disk_bytes": place.disk_bytes}
    return Setup(connector=config, disk=disk)


def _lmcache_mp(place: Place, is_lazy: bool = False, has_disk: bool = False) -> Setup:
    env, folder = _lmcache(place), place.folder() if has_disk else None
    side = LmcacheServer(place.dram_bytes, place.chunk(), place.on_cpu, env)
    if folder is not None:
        side.add_disk(folder, place.disk_bytes)
    extra: dict[str, Any] = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": side.port}
    if is_lazy:
        extra["lmcache.mp.lazy_offload"] = True
    config = _config("LMCacheMPConnector", extra)
    return Setup(kv_transfer_config=config, env=env, side=side, disk=folder)


def _lmcache_v1(place: Place) -> Setup:
    env = _lmcache(place) | {
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{place.dram_bytes / 2**30:.9f}",
        "LMCACHE_CHUNK_SIZE": str(place.chunk()),
    }
    made = _shimmed(place, "LMCacheConnectorV1", "cpu_lmcache_v1", {}, env)
    return replace(made, args=("--disable-hybrid-kv-cache-manager",))


def _vllm(place: Place, connector: str, **extra: Any) -> Setup:
    """One of the connectors that vLLM brings."""
    options = {"cpu_bytes_to_use": place.dram_bytes, **extra}
    return _shimmed(place, connector, "cpu_native_shim", options, {})


def _tiering(place: Place) -> Setup:
    """vLLM's tiering; its `fs` tier has no bound, so disk_bytes say nothing to it."""
    folder = place.folder()
    tiers = [{"type": "fs", "root_dir": str(folder)}]
    made = OFFLOADING(place, spec_name="TieringOffloadingSpec", secondary_tiers=tiers)
    return replace(made, disk=folder)


def _shimmed(
    place: Place, connector: str, module: str, extra: dict[str, Any], env: dict[str, str]
) -> Setup:
    """With this connector; on a CPU with its shim, the shims on the path."""
    if not place.on_cpu:
        return Setup(kv_transfer_config=_config(connector, extra), env=env)
    if place.shims is None or not (place.shims / f"{module}.py").exists():
        raise CannotRunError(
            f"{connector} copies with CUDA, and there is none here; give --shims a folder "
            f"with {module}.py"
        )
    config = {**_config(f"{connector}Cpu", extra), "kv_connector_module_path": module}
    return Setup(kv_transfer_config=config, env={**env, "PYTHONPATH": _path(place.shims, env)})


def _lmcache(place: Place) -> dict[str, str]:
    if lacking := missing(place.rivals, place.on_cpu):
        raise CannotRunError(
            f"LMCache is not ready in {place.rivals}, which lacks {', '.join(lacking)}; install "
            "it with: python -m bench.serve.rivals, or say with --rivals in which folder you "
            "have it"
        )
    return {**LMCACHE_ENV, "PYTHONPATH": _path(place.rivals, {})}


def _path(first: Path, env: dict[str, str]) -> str:
    rest = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, (str(first), rest)))


def _config(connector: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


SIMPLE = partial(_vllm, connector="SimpleCPUOffloadConnector")
OFFLOADING = partial(_vllm, connector="OffloadingConnector")
_KNOWN = (
    ServerArm("none", "vLLM", lambda place: Setup(), uses_dram=False),
    ServerArm(
        "none-priority",
        "vLLM, program priority",
        lambda place: Setup(args=("--scheduling-policy", "priority")),
        uses_dram=False,
        priority=True,
    ),
    ServerArm("lmcache-mp", "LMCache MP", _lmcache_mp, forgets=False),
    ServerArm(
        "lmcache-mp-lazy", "LMCache MP lazy", partial(_lmcache_mp, is_lazy=True), forgets=False
    ),
    ServerArm("lmcache-v1", "LMCache V1", _lmcache_v1, forgets=False),
    ServerArm("simple", "SimpleCPUOffload", SIMPLE),
    ServerArm("simple-lazy", "SimpleCPUOffload lazy", partial(SIMPLE, lazy_offload=True)),
    ServerArm("offloading-lru", "Offloading LRU", partial(OFFLOADING, eviction_policy="lru")),
    ServerArm("offloading-arc", "Offloading ARC", partial(OFFLOADING, eviction_policy="arc")),
    ServerArm(
        "lmcache-mp-disk",
        "LMCache MP, disk",
        partial(_lmcache_mp, has_disk=True),
        forgets=False,
        uses_disk=True,
    ),
    ServerArm("offloading-fs", "Offloading LRU, fs", _tiering, forgets=False, uses_disk=True),
)
ARMS = {arm.name: arm for arm in _KNOWN}
DEFAULT = (
    *("none", "none-priority", "continuum:adaptive"),
    *(name for name, arm in list(ARMS.items())[2:] if not arm.uses_disk),
)
