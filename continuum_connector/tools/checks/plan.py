"""Plan: what a pasted command, or the command line of `vllm serve`, says about the planned server.

vLLM's own parser reads it, where there is one; else those options that need no vLLM are read here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from continuum_connector.config import CONNECTOR_NAME, ContinuumConfig, load_config
from continuum_connector.errors import ConfigError
from continuum_connector.named import our_part
from continuum_connector.tools.checks import paste
from continuum_connector.vllm.node import node_ranks
from continuum_connector.vllm.proven import why_replaced

OURS = "continuum_connector.scheduler_cls"
DEFAULT_TRANSFER = {"kv_connector": CONNECTOR_NAME}
_DOTTED = re.compile(r"--kv-transfer-config\.([\w.]+)")
_TEXTS = (
    *("model", "model-tag", "config", "kv-transfer-config", "scheduler-cls", "kv-cache-dtype"),
    "distributed-executor-backend",
)
_SWITCHES = (
    *("enable-prefix-caching", "enable-lora", "enable-cumem-allocator", "enable-sleep-mode"),
    *("enable-auto-tool-choice", "enable-prompt-tokens-details"),
)
_COUNTS = {  # of one or more, with their short names
    "tensor-parallel-size": "-tp",
    "pipeline-parallel-size": "-pp",
    "data-parallel-size": "-dp",
    "prefill-context-parallel-size": "-pcp",
    "decode-context-parallel-size": "-dcp",
    "nnodes": "-n",
}


@dataclass(frozen=True)
class Plan:
    """Options of `vllm serve`. What the user left out has vLLM's default; `transfer` has ours.

    `transfer`: --kv-transfer-config; `names_us`: it has our connector in it. `why_no_config`: why
    it, or our part of it, cannot be read. `why_no_server`: why the given command would not start a
    server. `words`: its options as given. `is_stock`: the user gave a whole command, without
    --kv-transfer-config. `is_inside`: it runs in a container, whose files are not ours. `unknown`:
    what of it only a shell knows. `others`: what the pasted text starts besides.
    """

    model: str = ""
    transfer: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_TRANSFER)
    config: ContinuumConfig = field(default_factory=ContinuumConfig)
    names_us: bool = True
    why_no_config: str = ""
    why_no_server: str = ""
    words: tuple[str, ...] = ()
    is_stock: bool = False
    is_inside: bool = False
    unknown: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    options_file: str = ""  # what --config names, which only vLLM reads
    middleware: tuple[str, ...] = ()
    prefix_caching: bool | None = None  # not given; vLLM's default is on, for states from 0.29
    own_scheduler: str = ""  # what --scheduler-cls names, if it is not ours
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
    calls_tools: bool = False  # --enable-auto-tool-choice
    tool_parser: str = ""
    tool_plugin: str = ""
    tells_cached: bool = False  # --enable-prompt-tokens-details

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
    def hides_its_model(self) -> bool:
        """Whether only a shell knows the model: vLLM reads its own default then."""
        is_said = any(self.model in word or word == "--config" for word in self.words)
        return bool(self.unknown) and not is_said


class UsageError(ValueError):
    """An option that `vllm serve` would refuse, too."""


def planned(command: Sequence[str], model: str) -> tuple[Plan, dict[str, str]]:
    """The plan and the environment of the first server that is pasted, or of one of `model`, which
    counts more than what is pasted. Raises UsageError."""
    given = ["--model", model] if model else []
    environ = dict(os.environ)
    if not command:
        return replace(read_plan(given, environ), words=tuple(given)), environ
    try:
        server, *others = paste.of_words(command)
    except paste.NoServerError as why:
        return replace(read_plan(given, environ), why_no_server=str(why)), environ
    environ |= server.environ
    words = server.words
    if given and words and not words[0].startswith("-"):
        words = words[1:]  # to vLLM, a model without --model counts more
    plan = read_plan([*words, *given], environ)
    plan = replace(
        plan,
        words=(*words, *given),
        is_stock=plan.transfer is DEFAULT_TRANSFER and not plan.options_file,
        is_inside=server.is_inside,
        unknown=tuple(server.unknown),
        others=tuple(each.name or "another" for each in others),
    )
    return plan, environ


def read_plan(words: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Read `[MODEL] [options]` as far as that can be done without vLLM. Raises UsageError."""
    flags, dotted = _normal(words)
    known, rest = _parser().parse_known_args(flags)
    given = vars(known)
    # The model may be the first of the words that are left; options we skip may follow it.
    first = rest[0] if rest and not rest[0].startswith("-") else ""
    given["model"] = known.model_tag or first or known.model
    trouble = ""
    transfer: Mapping[str, Any] = DEFAULT_TRANSFER
    try:
        transfer = _read_transfer(known.kv_transfer_config, dotted)
    except (ValueError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        why = "is too deep to be read" if is_deep else f"cannot be read ({error})"
        trouble = f"--kv-transfer-config {why}, so the server would not start"
    plan = Plan(options_file=known.config or "", **_fields(given, transfer, environ))
    return replace(plan, why_no_config=trouble or plan.why_no_config)


def as_vllm_reads(
    plan: Plan, options: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> Plan:
    """The plan with the options as vLLM's own parser read them (about.py), if it did."""
    if options is None:
        return plan
    transfer = options.get("kv_transfer_config") or DEFAULT_TRANSFER
    is_stock = plan.is_stock and transfer is DEFAULT_TRANSFER
    found = _fields(options, transfer, environ)
    return replace(plan, options_file="", is_stock=is_stock, **found)


def _fields(
    given: Mapping[str, Any], transfer: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """The fields of a plan from options by vLLM's names for them."""
    config, why, names_us = ContinuumConfig(), "", True
    extra, role = transfer.get("kv_connector_extra_config"), transfer.get("kv_role")
    try:
        ours = our_part(transfer.get("kv_connector"), extra, role)
        names_us = ours is not None
        config = load_config(ours, environ)
    except ConfigError as error:
        why = str(error)
    if names_us:
        why = why or why_replaced(given.get("kv_offloading_size"))
    scheduler = given.get("scheduler_cls") or ""
    return {
        "model": given.get("model") or "",
        "transfer": transfer,
        "config": config,
        "names_us": names_us,
        "why_no_config": why,
        "middleware": tuple(given.get("middleware") or ()),
        "prefix_caching": given.get("enable_prefix_caching"),
        "own_scheduler": "" if scheduler == OURS else scheduler,
        "kv_cache_dtype": given.get("kv_cache_dtype") or "auto",
        "tensor_parallel": given.get("tensor_parallel_size") or 1,
        "pipeline_parallel": given.get("pipeline_parallel_size") or 1,
        "prefill_context_parallel": given.get("prefill_context_parallel_size") or 1,
        "context_parallel": given.get("decode_context_parallel_size") or 1,
        "executor": str(given.get("distributed_executor_backend") or "mp"),
        "drafts": bool(given.get("speculative_config") or given.get("spec_method")),
        "lora": bool(given.get("enable_lora")),
        "cumem": bool(given.get("enable_cumem_allocator") or given.get("enable_sleep_mode")),
        "match_unit": given.get("prefix_match_unit") or 0,
        "num_nodes": given.get("nnodes") or 1,
        "calls_tools": bool(given.get("enable_auto_tool_choice")),
        "tool_parser": given.get("tool_call_parser") or "",
        "tool_plugin": given.get("tool_parser_plugin") or "",
        "tells_cached": bool(given.get("enable_prompt_tokens_details")),
        **_engines(given),
    }


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
    return {"num_engines": total, "node_engines": here, "num_servers": 1}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    both = argparse.BooleanOptionalAction
    for name in _TEXTS:
        parser.add_argument(f"--{name}")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action=both)
    for name, short in _COUNTS.items():
        parser.add_argument(f"--{name}", short, type=lambda word: _number(word, 1))
    parser.add_argument("--speculative-config", "-sc")
    parser.add_argument("--kv-offloading-size", type=float)
    parser.add_argument("--middleware", action="append")
    parser.add_argument("--prefix-match-unit", type=_number)
    parser.add_argument("--data-parallel-size-local", "-dpl", type=_number)
    parser.add_argument("--data-parallel-rank", "-dpn", type=_number)
    parser.add_argument("--data-parallel-external-lb", "-dpe", action=both)
    parser.add_argument("--data-parallel-multi-port-external-lb", "-dpm", action="store_true")
    for name in ("--tool-call-parser", "--tool-parser-plugin"):
        parser.add_argument(name, nargs="?")
    return parser


def _number(word: str, least: int = 0) -> int:
    if not word.isdecimal() or len(word) > 6 or int(word) < least:
        raise argparse.ArgumentTypeError(f"{word!r} is no number of ranks; write {least} or more")
    return int(word)


def _normal(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
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
        try:
            at[key] = json.loads(word)
        except ValueError:
            at[key] = word
    return found
