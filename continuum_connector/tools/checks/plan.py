"""Plan: what the command line of `vllm serve` says about the planned server.

Options that no check needs are skipped.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os.path import basename
from typing import Any, NoReturn

from continuum_connector.config import CONNECTOR_NAME, ContinuumConfig, load_config
from continuum_connector.errors import ConfigError
from continuum_connector.named import our_part
from continuum_connector.vllm.node import node_ranks
from continuum_connector.vllm.proven import why_replaced

OURS = "continuum_connector.scheduler_cls"
DEFAULT_TRANSFER = {"kv_connector": CONNECTOR_NAME}


@dataclass(frozen=True)
class Plan:
    """Options of `vllm serve`. What the user left out has vLLM's default; `transfer` has ours.

    `transfer`: --kv-transfer-config. `why_no_config`: why it, or our part of it, cannot be read.
    `why_no_server`: why the given command would not start a server. `words`: its options as given.
    `is_stock`: the user gave a whole command, without --kv-transfer-config.
    """

    model: str = ""
    transfer: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_TRANSFER)
    config: ContinuumConfig = field(default_factory=ContinuumConfig)
    why_no_config: str = ""
    why_no_server: str = ""
    words: tuple[str, ...] = ()
    is_stock: bool = False
    options_file: str = ""  # what --config names; we do not read it
    middleware: tuple[str, ...] = ()
    prefix_caching: bool | None = (
        None  # None: not given; vLLM's default is on, for states from 0.29
    )
    scheduler_cls: str | None = None
    scheduling_policy: str = "fcfs"
    hybrid_manager: bool = True
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    prefill_context_parallel: int = 1
    context_parallel: int = 1
    executor: str = "mp"
    speculative: str = ""  # --speculative-config
    lora: bool = False
    cumem: bool = False  # vLLM's own allocator, which sleep mode brings along
    match_unit: int = 0
    ssm_dtype: str = "auto"
    num_engines: int = 1
    node_engines: int = 1
    num_nodes: int = 1
    num_servers: int = 1  # that one command starts on this node; each takes its own `dram_bytes`

    @property
    def num_ranks(self) -> int:
        """GPUs of this node that share one `dram_bytes`, counted as in node.num_ranks."""
        ranks = self.tensor_parallel * self.pipeline_parallel * self.prefill_context_parallel
        return node_ranks(ranks, self.node_engines, self.num_engines, self.num_nodes)

    @property
    def num_gpus(self) -> int:
        """GPUs of this node, over all servers that the command starts on it."""
        return self.num_ranks * self.num_servers

    @property
    def is_attached(self) -> bool:
        """Whether vLLM's scheduler is our subclass of it."""
        return self.config.scheduler and self.scheduler_cls in (None, OURS)

    @property
    def names_us(self) -> bool:
        """Whether --kv-transfer-config has our connector in it."""
        return _names_us(self.transfer)


def read_config(
    transfer: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[ContinuumConfig, str]:
    """Return our config as the server will read it, and ""; or the defaults, and what is wrong."""
    try:
        return load_config(_our_part(transfer), environ), ""
    except ConfigError as error:
        return ContinuumConfig(), str(error)


def _names_us(transfer: Mapping[str, Any]) -> bool:
    try:
        return _our_part(transfer) is not None
    except ConfigError:  # it names us but gives no valid config; `why_no_config` says why
        return True


def _our_part(transfer: Mapping[str, Any]) -> dict[str, Any] | None:
    role = transfer.get("kv_role")
    return our_part(transfer.get("kv_connector"), transfer.get("kv_connector_extra_config"), role)


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SPACE = re.compile(r"\s")
_SHELL = re.compile(r"(\d*|&)[<>].*|&&?|\|[|&]?|;", re.DOTALL)
_DOTTED = re.compile(r"--kv-transfer-config\.([\w.]+)")


class UsageError(ValueError):
    """An option that `vllm serve` would refuse, too."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def split_environment(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Cut `NAME=value ...` off the front of a command, as a shell or `env` would. Assignments
    further on, before the server's words (`nohup env A=b`, `docker run -e A=b`), are read but left
    in place."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and (rest[0] == "env" or _ASSIGNMENT.fullmatch(rest[0])):
        if match := _ASSIGNMENT.fullmatch(rest.pop(0)):
            found[match[1]] = match[2]
    for word in rest[: len(rest) - len(after_serve(rest))]:
        if match := _ASSIGNMENT.fullmatch(re.sub(r"^(--env=|-e(?=\w))", "", word)):
            found[match[1]] = match[2]
    return found, rest


def split_pasted(words: Sequence[str]) -> list[str]:
    """The words of a pasted command. If it was pasted as one quoted string, cut off what a shell
    would take for itself: everything from the first `>`, `|` or `&` after the server's name."""
    if len(words) != 1 or not _SPACE.search(words[0]):
        return list(words)
    try:
        found = shlex.split(words[0].replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"the command cannot be split into words ({error})") from None
    behind = len(found) - len(after_serve(found))
    for index in range(behind, len(found)):
        if _SHELL.fullmatch(found[index]):
            return found[:index]
    return found


def why_no_server(words: Sequence[str]) -> str:
    """Why this command does not start vLLM's server; "" if it does, with `vllm serve` or the module
    behind it anywhere in the line."""
    if any((basename(one), two) == ("vllm", "serve") for one, two in pairwise(words)):
        return ""
    if "serve" in words if _CLI in words else any(map(words.__contains__, _SERVERS)):
        return ""
    return f"`{shlex.join(words)[:200]}` is not `vllm serve`, so it starts no server that we know"


def read_plan(words: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Read `[vllm] [serve] [MODEL] [options]`, or the options alone. Raises UsageError."""
    flags, dotted = normal(after_serve(words))
    known, rest = _parser().parse_known_args(flags)
    model = known.model or known.model_tag or _first_word(rest)
    transfer, trouble = _transfer(known.kv_transfer_config, dotted)
    config, why = read_config(transfer, environ)
    if _names_us(transfer):
        why = why or why_replaced(known.kv_offloading_size)
    return Plan(
        model=model,
        transfer=transfer,
        config=config,
        why_no_config=trouble or why,
        options_file=known.config,
        middleware=tuple(known.middleware),
        prefix_caching=known.enable_prefix_caching,
        scheduler_cls=known.scheduler_cls,
        scheduling_policy=known.scheduling_policy,
        hybrid_manager=not known.disable_hybrid_kv_cache_manager,
        kv_cache_dtype=known.kv_cache_dtype,
        dtype=known.dtype,
        tensor_parallel=known.tensor_parallel_size,
        pipeline_parallel=known.pipeline_parallel_size,
        prefill_context_parallel=known.prefill_context_parallel_size,
        context_parallel=known.decode_context_parallel_size,
        executor=known.distributed_executor_backend,
        speculative=known.speculative_config or "",
        lora=known.enable_lora,
        cumem=known.enable_cumem_allocator or known.enable_sleep_mode,
        match_unit=known.prefix_match_unit,
        ssm_dtype=known.mamba_ssm_cache_dtype,
        num_nodes=known.nnodes,
        **_engines(known),  # type: ignore[arg-type]
    )


def _engines(known: argparse.Namespace) -> dict[str, int]:
    """How many engines there are, and how many are on this node (vLLM's engine/arg_utils.py)."""
    total, here = known.data_parallel_size, known.data_parallel_size_local
    if known.data_parallel_multi_port_external_lb:  # dp_supervisor.py: a server for each engine
        return {"num_engines": total, "node_engines": 1, "num_servers": here or 1}
    if known.data_parallel_external_lb or known.data_parallel_rank is not None:
        here = 1
    elif here is None:
        here = max(1, total // known.nnodes)
    return {"num_engines": total, "node_engines": here}


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default="")
    parser.add_argument("--model-tag", default="")
    parser.add_argument("--config", default="")
    parser.add_argument("--kv-transfer-config")
    parser.add_argument("--kv-offloading-size", type=float)
    parser.add_argument("--middleware", action="append", default=[])
    both = argparse.BooleanOptionalAction
    parser.add_argument("--enable-prefix-caching", action=both)
    parser.add_argument("--disable-hybrid-kv-cache-manager", action=both, default=False)
    parser.add_argument("--scheduler-cls")
    parser.add_argument("--scheduling-policy", default="fcfs")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--distributed-executor-backend", default="mp")
    parser.add_argument("--speculative-config", "-sc")
    for flag in ("--enable-lora", "--enable-cumem-allocator", "--enable-sleep-mode"):
        parser.add_argument(flag, action=both, default=False)
    parser.add_argument("--prefix-match-unit", type=_number, default=0)
    parser.add_argument("--mamba-ssm-cache-dtype", default="auto")
    for long, short in (
        ("tensor-parallel-size", "tp"),
        ("pipeline-parallel-size", "pp"),
        ("data-parallel-size", "dp"),
        ("prefill-context-parallel-size", "pcp"),
        ("decode-context-parallel-size", "dcp"),
    ):
        parser.add_argument(f"--{long}", f"-{short}", type=_count, default=1)
    parser.add_argument("--data-parallel-size-local", "-dpl", type=_number)
    parser.add_argument("--data-parallel-rank", "-dpn", type=_number)
    parser.add_argument("--data-parallel-external-lb", "-dpe", action=both, default=False)
    parser.add_argument("--data-parallel-multi-port-external-lb", "-dpm", action="store_true")
    parser.add_argument("--nnodes", type=_count, default=1)
    return parser


def _count(word: str) -> int:
    return _number(word, 1)


def _number(word: str, least: int = 0) -> int:
    if not word.isdecimal() or len(word) > 6 or int(word) < least:
        raise argparse.ArgumentTypeError(f"{word!r} is no number of ranks; write {least} or more")
    return int(word)


def after_serve(words: Sequence[str]) -> list[str]:
    """The words after `vllm serve` or a module of vLLM; all words if there is neither."""
    for index, word in enumerate(words):
        if word == "serve" or (word.startswith("vllm.entrypoints") and word != _CLI):
            return list(words[index + 1 :])
    return list(words)


_CLI = "vllm.entrypoints.cli.main"  # `serve` follows it
_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")


def normal(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Write names with dashes, as vLLM takes both forms; split off `--kv-transfer-config.KEY
    VALUE`."""
    flags: list[str] = []
    dotted: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            flags.append(word)
            continue
        head, dot, tail = name.partition(".")
        name = head.replace("_", "-") + dot + tail
        if match := _DOTTED.fullmatch(name):
            dotted[match[1]] = value if equals else next(rest, "")
        else:
            flags.append(name + equals + value)
    return flags, dotted


def _first_word(rest: Sequence[str]) -> str:
    """The model, if it is the first of the words that are left; options we skip may follow it."""
    return rest[0] if rest and not rest[0].startswith("-") else ""


def _transfer(text: str | None, dotted: Mapping[str, str]) -> tuple[Mapping[str, Any], str]:
    """What --kv-transfer-config says, and ""; or ours, and why it cannot be read."""
    try:
        return _read_transfer(text, dotted), ""
    except ValueError as error:
        why = f"--kv-transfer-config cannot be read ({error}), so the server would not start"
    except RecursionError:
        why = "--kv-transfer-config is too deep to be read, so the server would not start"
    return DEFAULT_TRANSFER, why


def _read_transfer(text: str | None, dotted: Mapping[str, str]) -> Mapping[str, Any]:
    """The JSON of --kv-transfer-config, where dotted parts win; ours if neither is given."""
    if text is None and not dotted:
        return DEFAULT_TRANSFER
    # vLLM joins the dotted parts into one more --kv-transfer-config, after all others.
    found = {} if dotted else json.loads(text or "")
    if not isinstance(found, dict):
        raise ValueError(f"{text} is no JSON object")
    for path, word in dotted.items():
        *folders, key = path.split(".")
        at = found
        for folder in folders:
            at = at.setdefault(folder, {})
            if not isinstance(at, dict):
                raise ValueError(f"{folder} is no JSON object, so it cannot have {path}")
        at[key] = _value(word)
    return found


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
