"""Plan: what the command line of `vllm serve` says about the planned server.

vLLM's own parser reads it, where there is one; else those options that need no vLLM are read here.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    `is_stock`: the user gave a whole command, without --kv-transfer-config. `is_inside`: it runs in
    a container, whose files are not ours. `unknown`: what of it only a shell knows. `others`: what
    the pasted text starts besides.
    """

    model: str = ""
    transfer: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_TRANSFER)
    config: ContinuumConfig = field(default_factory=ContinuumConfig)
    why_no_config: str = ""
    why_no_server: str = ""
    words: tuple[str, ...] = ()
    is_stock: bool = False
    is_inside: bool = False
    unknown: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    options_file: str = ""  # what --config names, which only vLLM reads
    middleware: tuple[str, ...] = ()
    prefix_caching: bool | None = (
        None  # None: not given; vLLM's default is on, for states from 0.29
    )
    scheduler_cls: str | None = None
    scheduling_policy: str = "fcfs"
    kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    prefill_context_parallel: int = 1
    context_parallel: int = 1
    executor: str = "mp"
    drafts: bool = False  # speculative decoding of any kind
    lora: bool = False
    cumem: bool = False  # vLLM's own allocator, which sleep mode brings along
    match_unit: int = 0
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
    def own_scheduler(self) -> str:
        """The scheduler that --scheduler-cls names, if it is not ours, or ""."""
        return "" if self.scheduler_cls == OURS else self.scheduler_cls or ""

    @property
    def hides_its_model(self) -> bool:
        """Whether only a shell knows the model: vLLM reads its own default then."""
        is_said = any(self.model in word or word == "--config" for word in self.words)
        return bool(self.unknown) and not is_said

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


_DOTTED = re.compile(r"--kv-transfer-config\.([\w.]+)")


class UsageError(ValueError):
    """An option that `vllm serve` would refuse, too."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def read_plan(words: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Read `[MODEL] [options]` as far as that can be done without vLLM. Raises UsageError."""
    flags, dotted = normal(words)
    known, rest = _parser().parse_known_args(flags)
    given = vars(known)
    given["model"] = known.model_tag or _first_word(rest) or known.model
    transfer, trouble = _transfer(known.kv_transfer_config, dotted)
    found = _plan(given, transfer, environ)
    return replace(found, options_file=known.config, why_no_config=trouble or found.why_no_config)


def as_vllm_reads(
    plan: Plan, options: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> Plan:
    """The plan with the options as vLLM's own parser read them (about.py), if it did."""
    if options is None:
        return plan
    transfer = options.get("kv_transfer_config") or DEFAULT_TRANSFER
    found = _plan(options, transfer, environ)
    kept = ("words", "why_no_server", "is_inside", "unknown", "others")
    is_stock = plan.is_stock and transfer is DEFAULT_TRANSFER
    return replace(found, is_stock=is_stock, **{name: getattr(plan, name) for name in kept})


def _plan(
    given: Mapping[str, Any], transfer: Mapping[str, Any], environ: Mapping[str, str]
) -> Plan:
    """A plan from options by vLLM's names for them."""
    config, why = read_config(transfer, environ)
    if _names_us(transfer):
        why = why or why_replaced(given.get("kv_offloading_size"))
    scheduler_cls = given.get("scheduler_cls")
    return Plan(
        model=given.get("model") or "",
        transfer=transfer,
        config=config,
        why_no_config=why,
        middleware=tuple(given.get("middleware") or ()),
        prefix_caching=given.get("enable_prefix_caching"),
        scheduler_cls=scheduler_cls,
        scheduling_policy=given.get("scheduling_policy") or "fcfs",
        kv_cache_dtype=given.get("kv_cache_dtype") or "auto",
        tensor_parallel=given.get("tensor_parallel_size") or 1,
        pipeline_parallel=given.get("pipeline_parallel_size") or 1,
        prefill_context_parallel=given.get("prefill_context_parallel_size") or 1,
        context_parallel=given.get("decode_context_parallel_size") or 1,
        executor=str(given.get("distributed_executor_backend") or "mp"),
        drafts=bool(given.get("speculative_config") or given.get("spec_method")),
        lora=bool(given.get("enable_lora")),
        cumem=bool(given.get("enable_cumem_allocator") or given.get("enable_sleep_mode")),
        match_unit=given.get("prefix_match_unit") or 0,
        num_nodes=given.get("nnodes") or 1,
        **_engines(given),  # type: ignore[arg-type]
    )


def _engines(given: Mapping[str, Any]) -> dict[str, int]:
    """How many engines there are, and how many are on this node (vLLM's engine/arg_utils.py)."""
    total, here = given.get("data_parallel_size") or 1, given.get("data_parallel_size_local")
    if given.get("data_parallel_multi_port_external_lb"):
        # dp_supervisor.py: a server for each engine
        return {"num_engines": total, "node_engines": 1, "num_servers": here or 1}
    if given.get("data_parallel_external_lb") or given.get("data_parallel_rank") is not None:
        here = 1
    elif here is None:
        here = max(1, total // (given.get("nnodes") or 1))
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
    parser.add_argument("--scheduler-cls")
    parser.add_argument("--scheduling-policy", default="fcfs")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--distributed-executor-backend", default="mp")
    parser.add_argument("--speculative-config", "-sc")
    for flag in ("--enable-lora", "--enable-cumem-allocator", "--enable-sleep-mode"):
        parser.add_argument(flag, action=both, default=False)
    parser.add_argument("--prefix-match-unit", type=_number, default=0)
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
