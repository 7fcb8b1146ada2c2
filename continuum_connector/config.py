"""ContinuumConfig: every knob, with unit, bound, default and reason.

A key is set in `kv_connector_extra_config` or in the environment as `CONTINUUM_<KEY>`; the extra
config wins. Both are parsed once, when the server starts, and a bad value stops the server. Below
them: our part of vLLM's kv_transfer_config, and what to say of the keys of other connectors in it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from continuum_connector import files
from continuum_connector.errors import ConfigError, shown
from continuum_connector.memory import Taken, check_units, parse_bytes

CONNECTOR_NAME = "ContinuumConnector"
ENV_PREFIX = "CONTINUUM_"
SWITCH_PATH = ENV_PREFIX + "SWITCH_PATH"
ID_HEADERS = ENV_PREFIX + "ID_HEADERS"
ADMIN_KEY = ENV_PREFIX + "ADMIN_KEY"  # for an Endpoint; not a knob, because vLLM logs those

MIN_TRACE_BYTES = 2**20
FIRST_BYTES = 2**30  # of a rank's DRAM, before its worker is ready; the rest grows later

# Kubernetes sets these in every pod beside a service called `continuum` or `continuum-...`
_SERVICE_LINK = re.compile(
    r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Every = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

POLICIES = (  # those of policy/baselines.py
    *("adaptive", "continuum", "released", "fixed_ttl", "lru_offload", "program_order", "stock"),
)
KV_LAYOUTS = ("auto", "stock", "BLHNC", "BLNHC", "BHLNC")
SLEEPS = ("keep", "release")

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]{1,128}")  # RFC 9110, token
MAX_ID_HEADERS = 16

SIZES = {"dram_bytes": "DRAM tier", "trace_bytes": "trace's files", "disk_bytes": "disk tier"}
SIZES |= {"disk_write_budget": "disk tier"}
PATHS = ("trace_path", "switch_path")


class ContinuumConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything an operator can set. `KNOBS` becomes a table in docs/configuration.md."""

    dram_bytes: Bytes | None = None
    sleep_dram: str = "keep"
    disk_path: str = ""
    disk_bytes: Bytes = 0
    disk_write_budget: Bytes | None = None
    disk_timeout_s: Seconds = 5.0
    numa: bool = True
    policy: str = "adaptive"
    ttl_s: Seconds = 2.0
    max_ttl_s: Seconds = 60.0
    max_pinned_fraction: Fraction = 0.9
    max_head_start_s: Seconds = 300.0
    gate_wait_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0  # may be infinite
    kv_layout: str = "auto"
    checksum_every: Every = 64
    max_programs: Count = 10_000
    trace_path: str = ""
    trace_bytes: Bytes = 256 * 2**20
    trace_hashed: bool = False
    switch_path: str = ""
    id_headers: str | tuple[str, ...] = ""
    echo: bool = True
    dram: Taken | None = None  # no knob: what a `dram_bytes` left out means on this server

    @property
    def tier_bytes(self) -> int:
        """Bytes of the DRAM tier on this node; 0 for none, or if that is not known yet."""
        return self.dram.num_bytes if self.dram else self.dram_bytes or 0


KNOBS: dict[str, str] = {
    "dram_bytes": 'host memory for stored blocks per node, split over ranks ("64GiB" or bytes); '
    "left out: a share of what the node can spare, at most 4 times the KV cache; 0: no tier",
    "sleep_dram": "DRAM while vLLM sleeps: keep, or release (to the system; it grows again after)",
    "disk_path": "folder on a local drive for what leaves DRAM; empty: no disk tier",
    "disk_bytes": "disk space per node, split over ranks; taken whole when the server starts",
    "disk_write_budget": "bytes written to the disk per day and node; left out: disk_bytes, so a "
    "drive used whole is written once a day; 0: no bound",
    "disk_timeout_s": "longest that a turn waits for the disk before it is computed, in seconds",
    "numa": "take DRAM on the NUMA node of the rank's GPU; 0: let the system choose",
    "policy": "what decides between pin, offload and free: " + ", ".join(POLICIES),
    "ttl_s": "how long `fixed_ttl` pins a finished turn, in seconds",
    "max_ttl_s": "longest life of a pin, whatever a policy or a client asks, in seconds",
    "max_pinned_fraction": "of VRAM blocks, for all pins; above it the cheapest pin goes first",
    "max_head_start_s": "how far before its own arrival a turn may stand in the queue, in seconds, "
    "because its program came earlier; a pin counts for half of it; 0: vLLM's order",
    "gate_wait_s": "how long to hold a program's first turn, in seconds, while its start would "
    "push out what others come back for; 0: hold nobody; inf: as long as it takes",
    "kv_layout": f"KV cache layout to ask vLLM for: {', '.join(KV_LAYOUTS)} (auto: BLHNC when the "
    "tier is on)",
    "checksum_every": "every n-th stored block gets a checksum, compared when the block is loaded; "
    "a block that differs is computed again; 0: none, 1: all",
    "max_programs": "programs remembered; those that never came back are forgotten first",
    "trace_path": "file that gets one JSON line per decision and outcome; empty: no trace",
    "trace_bytes": "size at which the trace moves to trace_path.1 and begins anew, at least 1 MiB; "
    "8 such files are kept; 0: it grows without end",
    "trace_hashed": "1 writes programs and requests as digests whose key ends with the process",
    "switch_path": "file that switches the connector off and on while the server runs: with off in "
    "it, every engine that reads it serves as stock within about a second; empty: none",
    "id_headers": "your own headers that name a program, strongest first, separated by commas; "
    "needs the middleware",
    "echo": "answer the decision in non-streamed responses (kv_transfer_params.continuum)",
}

# Keys that once were: what to do instead, after "was removed: ".
REMOVED: dict[str, str] = {
    "objective": "program order serves batches within 1 % as well; leave it out, and for batches "
    "that take longer than five minutes raise max_head_start_s",
    "scheduler": "without our scheduler nothing of ours runs; leave it out, for stock vLLM set "
    "switch_path or leave --kv-transfer-config out",
    "order": "max_head_start_s = 0 keeps vLLM's order of waiting turns",
    "trace_steps_s": "free and pinned blocks, waiting turns and time of our hooks are on /metrics "
    "and the dashboard; leave it out",
    "driver": "it follows from the device that the KV cache lies on; leave it out",
    "staged": "the first GiB of a rank's DRAM serves, and the rest follows; leave it out",
    "dram_shortage": "if the system gives less, the tier is smaller; leave it out",
    "trace_files": "8 files of trace_bytes are kept; leave it out",
    "load_timeout_s": "a copy that takes more than 30 s is cancelled; leave it out",
    "max_hinted_fraction": "pins that clients make longer than the policy get a fifth of VRAM, and "
    "give way first; leave it out",
    "max_wait_s": "a waiting turn spares pins for at most 10 s; leave it out",
    "disk_slot_bytes": "a read or write is of 2 MiB, or a 64th of the rank's DRAM if that is less; "
    "leave it out",
    "disk_keep": "a restart finds what the same model left on the disk; leave it out, and to begin "
    "anew delete the disk's files",
    "disk_threads": "a rank reads and writes with 8 threads; leave it out",
    "huge_pages": "huge pages are asked for, and the kernel may refuse them; leave it out",
    "trunk_bytes": "a copy is at most 4 MiB a driver call; leave it out",
    "window_bytes": "at most 16 MiB a direction are under way; leave it out",
    "state_path": "a server learns tool times and costs anew within minutes; leave it out",
    "keep_epochs": "KV of weights that serve no more is forgotten, whatever their name; leave it "
    "out",
}


def load_config(
    extra: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None
) -> ContinuumConfig:
    """Merge environment and extra config (which wins), check both, return the result.

    Raises ConfigError with value, consequence and cure.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for name, raw in environ.items():
        if name.startswith(ENV_PREFIX) and name != ADMIN_KEY and not _SERVICE_LINK.fullmatch(name):
            key = name.removeprefix(ENV_PREFIX).lower()
            _known(key, f"environment variable {name}", environment=True)
            values[key] = _read(key, raw, name)
    for name, raw in (extra or {}).items():
        key = str(name)  # YAML and Python have keys that are no text
        if theirs := instead_of(key):
            said = shown(repr(raw))[:100]
            raise ConfigError(f"kv_connector_extra_config.{key} = {said} {theirs}")
        _known(key, f"kv_connector_extra_config key `{key}`")
        values[key] = _read(key, raw, f"kv_connector_extra_config.{key}")
    config = _convert(values)
    _check(config)
    if environ.get(ADMIN_KEY):
        files.check_endpoint(config.switch_path, environ, SWITCH_PATH, ADMIN_KEY)
    return config


def _known(key: str, where: str, environment: bool = False) -> None:
    if key in KNOBS:
        return
    if key in REMOVED:
        raise ConfigError(f"{shown(where)} was removed: {REMOVED[key]}")
    names = {known: ENV_PREFIX + known.upper() if environment else known for known in KNOBS}
    like = key.lower().removeprefix(ENV_PREFIX.lower())
    close = difflib.get_close_matches(like, KNOBS, n=1)
    close += [known for known in KNOBS if known.startswith(f"{key}_")]  # `dram` for `dram_bytes`
    known = ", ".join(sorted(names.values()))
    cure = f"did you mean `{names[close[0]]}`?" if close else f"known keys: {known}"
    raise ConfigError(f"{shown(where)} is unknown, so it would have no effect; {cure}")


def _read(key: str, raw: Any, where: str) -> Any:
    """Turn env text and human sizes into typed values; leave the rest to msgspec."""
    if key in SIZES and isinstance(raw, str):
        try:
            return parse_bytes(raw)
        except ValueError as error:
            raise ConfigError(
                f"{where} = {raw!r} is not a size, so the {SIZES[key]} cannot be laid out; "
                f'write bytes or a size such as "{"64GiB" if key == "dram_bytes" else "4MiB"}"'
            ) from error
    if isinstance(raw, str) and key not in (*PATHS, "disk_path"):
        raw = raw.encode(errors="backslashreplace").decode()  # a variable may hold any bytes
    default = ContinuumConfig.__struct_defaults__[ContinuumConfig.__struct_fields__.index(key)]
    if isinstance(raw, str) and isinstance(default, bool):
        flags = {"1": True, "true": True, "on": True, "yes": True}
        flags |= {"0": False, "false": False, "off": False, "no": False}
        if raw.strip().lower() not in flags:
            raise ConfigError(
                f"{where} = {raw!r} is neither on nor off, so the server stops; write 1 or 0"
            )
        return flags[raw.strip().lower()]
    return raw


def _convert(values: dict[str, Any]) -> ContinuumConfig:
    try:
        return msgspec.convert(values, ContinuumConfig, strict=False)
    except msgspec.ValidationError as error:
        path = re.search(r"`\$\.(\w+)", str(error))  # a list's item is `$.id_headers[...]`
        key = path[1] if path else "?"
        text = str(error).split(" - at ")[0]
        raise ConfigError(
            f"{key} = {values.get(key)!r} does not fit ({text}), so the server stops. "
            f"It means: {KNOBS.get(key, '')}. Set kv_connector_extra_config.{key} or "
            f"{ENV_PREFIX}{key.upper()} accordingly."
        ) from error


def _check(config: ContinuumConfig) -> None:
    _check_choices(config)
    files.check_names({key: getattr(config, key) for key in (*PATHS, "disk_path")})
    named = {key: path for key in PATHS if (path := getattr(config, key))}
    files.check_files(named, moves_trace=config.trace_bytes > 0)
    check_units(dram_bytes=config.dram_bytes or 0, disk_bytes=config.disk_bytes)
    _check_disk(config)
    header_names(config.id_headers)
    if config.ttl_s > config.max_ttl_s:
        raise ConfigError(
            f"ttl_s = {config.ttl_s:g} is above max_ttl_s = {config.max_ttl_s:g}, "
            "so no pin would ever last that long; raise max_ttl_s or lower ttl_s"
        )
    if 0 < config.trace_bytes < MIN_TRACE_BYTES:
        raise ConfigError(
            f"trace_bytes = {config.trace_bytes} is below 1 MiB, so little of a trace would be "
            "kept; raise it, or set 0 to let the trace grow"
        )


def header_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """The headers that `id_headers` names, in lower case. ConfigError if one cannot be a name."""
    said = value.split(",") if isinstance(value, str) else value
    names = tuple(name.strip().lower() for name in said if name.strip())
    if len(names) > MAX_ID_HEADERS or not all(map(_HEADER.fullmatch, names)):
        raise ConfigError(
            f"id_headers = {value!r} is no list of at most {MAX_ID_HEADERS} header names, so the "
            'server stops; write such as "X-Run-Id, X-Agent-Id"'
        )
    return names


def _check_disk(config: ContinuumConfig) -> None:
    path, num_bytes = config.disk_path, config.disk_bytes
    if bool(path) != bool(num_bytes):
        said, left_out = ("disk_path", "disk_bytes") if path else ("disk_bytes", "disk_path")
        raise ConfigError(
            f"{said} = {getattr(config, said)!r} without {left_out} means no disk tier; "
            f"set {left_out} too, or leave both out"
        )
    if not path:
        return
    if config.dram_bytes == 0:
        raise ConfigError(
            f"disk_path = {path!r} with dram_bytes = 0 would never be used, since blocks reach the "
            "disk through DRAM alone; set dram_bytes, or leave disk_path out"
        )
    if config.disk_timeout_s == 0:
        raise ConfigError(
            "disk_timeout_s = 0 would wait for no read, so the disk would be written and never "
            "read; set some seconds, or leave disk_path out"
        )
    files.check_drive("disk_path", path, "disk_bytes", num_bytes)


def _check_choices(config: ContinuumConfig) -> None:
    choices = {"policy": POLICIES, "kv_layout": KV_LAYOUTS, "sleep_dram": SLEEPS}
    for key, allowed in choices.items():
        value = getattr(config, key)
        if value not in allowed:
            names = {choice.lower(): choice for choice in allowed}
            close = difflib.get_close_matches(value.lower(), names, n=1)
            hint = f"did you mean `{names[close[0]]}`? " if close else ""
            raise ConfigError(
                f"{key} = {value!r} does not exist, so the server stops; "
                f"{hint}choose one of {', '.join(allowed)}"
            )


# --- our part of vLLM's kv_transfer_config ------------------------------------------------
def our_part(connector: Any, extra: Any, role: Any = None) -> dict[str, Any] | None:
    """Our extra config, also inside a MultiConnector's; None if we are not named.

    `connector`, `extra`, `role`: `kv_connector`, `kv_connector_extra_config` and `kv_role` of
    vLLM's config; None for a role that was checked before. Raises ConfigError if our own extra
    config is no JSON object, our role is not `kv_both`, or we are named twice, or inside an inner
    one.
    """
    if connector == CONNECTOR_NAME:
        return _object(extra, role)
    ours = [each for each in _children(extra) if each[1].get("kv_connector") == CONNECTOR_NAME]
    if len(ours) > 1 or any(depth > 1 for depth, _ in ours):
        raise ConfigError(
            f"kv_connector_extra_config.connectors names {CONNECTOR_NAME} twice, or inside another "
            "MultiConnector, where nothing would find it; name it once, in the outer one"
        )
    if not ours:
        return None
    _, child = ours[0]
    return _object(child.get("kv_connector_extra_config"), child.get("kv_role"))


def own_headers(scope: Mapping[str, Any]) -> tuple[str, ...]:
    """The headers that `id_headers` names, from an ASGI scope of vLLM's API server, which has its
    config, else from the environment. A config that cannot work has stopped the server before."""
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    transfer = getattr(getattr(client, "vllm_config", None), "kv_transfer_config", None)
    extra: Mapping[str, Any] | None = None
    try:
        if transfer is not None:
            extra = our_part(transfer.kv_connector, transfer.kv_connector_extra_config)
        return header_names((extra or {}).get("id_headers", os.environ.get(ID_HEADERS, "")))
    except ConfigError:
        return ()


def _children(extra: Any, depth: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    """The connectors that a MultiConnector's extra config names, with their depth, at any depth."""
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    for child in children if isinstance(children, list) else ():
        if isinstance(child, dict):
            yield depth, child
            yield from _children(child.get("kv_connector_extra_config"), depth + 1)


def _object(extra: Any, role: Any) -> dict[str, Any]:
    if role not in (None, "kv_both"):  # None: vllm/plugin.py makes it kv_both
        raise ConfigError(
            f"kv_role = {str(role)[:100]!r} stops the server, because {CONNECTOR_NAME} stores KV "
            "and loads it again in the same server; leave kv_role out, or write kv_both"
        )
    if extra is None or isinstance(extra, Mapping):
        return dict(extra or {})
    raise ConfigError(
        f"kv_connector_extra_config = {extra!r} is no JSON object, so its keys cannot be read; "
        'write one without quotes around it, such as {"dram_bytes": "64GiB"}'
    )


# --- keys of other KV connectors, and what to write here instead --------------------------
# Whoever moves from one of them to ours pastes its config. Sources: vLLM 0.33
# (simple_cpu_offload_connector.py, v1/offloading/, v1/kv_offload/), LMCache 0.5.6 (v1/config.py).

_OFFLOADING = "vLLM's own offloading"
_LMCACHE = "LMCache"
_ALL_RANKS = "bytes per node, for all its ranks and engines together"
_POLICY = "leave it out; here `policy` decides what is stored and what leaves first"
_NOT_HERE = "leave it out; there is no such choice here"
_BEHIND = "leave it out, or put that connector behind ours in a MultiConnector"

OF_OFFLOADING = {
    "cpu_bytes_to_use": f"set `dram_bytes` ({_ALL_RANKS})",
    "cpu_bytes_to_use_per_rank": f"set `dram_bytes` ({_ALL_RANKS}: this times the ranks)",
    "num_cpu_blocks": f"set `dram_bytes` ({_ALL_RANKS})",
    "disk_capacity_bytes": f"set `disk_bytes` ({_ALL_RANKS}) beside `disk_path`",
    "kv_offload_backend": "leave it out; `disk_path` and `disk_bytes` add a disk below DRAM",
    "secondary_tiers": "set `disk_path` and `disk_bytes` for a local drive; for anything remote, "
    "put that connector behind ours in a MultiConnector",
    "block_size": "leave it out; here a block is vLLM's own (`--block-size`)",
    **dict.fromkeys(("eviction_policy", "store_threshold", "lazy_offload"), _POLICY),
    **dict.fromkeys(("offload_prompt_only", "max_tracker_size"), _POLICY),
    **dict.fromkeys(("cache_policy_module_path", "spec_name", "spec_module_path"), _NOT_HERE),
    **dict.fromkeys(("blocks_per_chunk", "canonical_layout", "disk_buffer_slots"), _NOT_HERE),
    **dict.fromkeys(("use_page_cache", "self_describing_kv_events"), _NOT_HERE),
    **dict.fromkeys(("backpressure", "tier_poll_interval_s", "enable_telemetry"), _NOT_HERE),
    "sync_load_budget_bytes": _NOT_HERE,
}
OF_LMCACHE = {
    "max_local_cpu_size": f"set `dram_bytes` ({_ALL_RANKS}; LMCache counts in GiB)",
    "local_disk": "set `disk_path`",
    "max_local_disk_size": f"set `disk_bytes` ({_ALL_RANKS}; LMCache counts in GiB)",
    "chunk_size": "leave it out; here a block is vLLM's own (`--block-size`)",
}


def instead_of(key: str) -> str:
    """Say whose key this is, what follows, and what to write; "" if we know nobody who has it.

    It continues a sentence that begins with the key.
    """
    if key == "connectors":
        return (
            "is one of MultiConnector, so the connectors in it would not run; "
            "write MultiConnector as kv_connector, with ours as the first in its list"
        )
    owner, cure = _OFFLOADING, OF_OFFLOADING.get(key)
    if key.startswith("lmcache."):
        owner, cure = _LMCACHE, OF_LMCACHE.get(key.removeprefix("lmcache."), _BEHIND)
    return f"is one of {owner}, so it would have no effect here; {cure}" if cure else ""
