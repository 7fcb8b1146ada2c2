"""Plan: what a pasted command, or the command line of `vllm serve`, says about the planned server.

vLLM's own parser reads it, where there is one; else those options that need no vLLM are read here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NoReturn

from continuum_connector.config import CONNECTOR_NAME, ContinuumConfig, load_config, our_part
from continuum_connector.errors import ConfigError, ToldError
from continuum_connector.memory import node_ranks
from continuum_connector.tools.checks import paste
from continuum_connector.vllm.proven import why_replaced

DEFAULT_TRANSFER = {"kv_connector": CONNECTOR_NAME}
DOTTED = "--kv-transfer-config."  # what vLLM puts together to one more --kv-transfer-config


def _short(name: str, default: Any) -> Any:
    """An option that has a short name, too."""
    return field(default=default, metadata={"short": name})


@dataclass(frozen=True)
class Options:
    """Options of `vllm serve` by vLLM's names. What the user left out has vLLM's default."""

    model: str = ""
    middleware: tuple[str, ...] = ()
    enable_prefix_caching: bool | None = None  # vLLM's default is on, for states from 0.29
    scheduler_cls: str = ""
    kv_cache_dtype: str = "auto"
    kv_offloading_size: float | None = None
    tensor_parallel_size: int = _short("-tp", 1)
    pipeline_parallel_size: int = _short("-pp", 1)
    prefill_context_parallel_size: int = _short("-pcp", 1)
    decode_context_parallel_size: int = _short("-dcp", 1)
    data_parallel_size: int = _short("-dp", 1)
    data_parallel_size_local: int | None = _short("-dpl", None)
    data_parallel_rank: int | None = _short("-dpn", None)
    data_parallel_external_lb: bool = _short("-dpe", False)
    data_parallel_multi_port_external_lb: bool = _short("-dpm", False)
    nnodes: int = _short("-n", 1)
    distributed_executor_backend: str = "mp"
    speculative_config: Any = field(default=None, metadata={"short": "-sc"})
    spec_method: str = ""
    enable_lora: bool = False
    enable_cumem_allocator: bool = False
    enable_sleep_mode: bool = False
    prefix_match_unit: int = 0
    enable_auto_tool_choice: bool = False
    tool_call_parser: str = ""
    tool_parser_plugin: str = ""
    enable_prompt_tokens_details: bool = False


@dataclass(frozen=True)
class Plan(Options):
    """The options, and what else is known of the server.

    `transfer`: --kv-transfer-config, ours by default; `names_us`: it has our connector in it.
    `why_no_config`: why it, or our part of it, cannot be read. `why_no_server`: why the given
    command would not start a server. `words`: its options as given. `is_stock`: the user gave a
    whole command, without --kv-transfer-config. `is_inside`: it runs in a container, whose files
    are not ours. `unknown`: what of it only a shell knows. `others`: what the pasted text starts
    besides. `only_vllm_reads`: what --config names, and dotted options.
    """

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
    only_vllm_reads: str = ""

    @property
    def num_servers(self) -> int:
        """Servers that one command starts on this node (vLLM's dp_supervisor.py): one for each
        engine, and each takes its own `dram_bytes`."""
        is_many = self.data_parallel_multi_port_external_lb
        return (self.data_parallel_size_local or 1) if is_many else 1

    @property
    def node_engines(self) -> int:
        """Engines of a server on this node (vLLM's engine/arg_utils.py)."""
        is_alone = self.data_parallel_external_lb or self.data_parallel_rank is not None
        if is_alone or self.data_parallel_multi_port_external_lb:
            return 1
        if self.data_parallel_size_local is not None:
            return self.data_parallel_size_local
        return max(1, self.data_parallel_size // self.nnodes)

    @property
    def num_ranks(self) -> int:
        """GPUs of this node that share one `dram_bytes`, counted as in served.num_node_ranks."""
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        ranks *= self.prefill_context_parallel_size
        return node_ranks(ranks, self.node_engines, self.data_parallel_size, self.nnodes)

    @property
    def num_gpus(self) -> int:
        """GPUs of this node, over all servers that the command starts on it."""
        return self.num_ranks * self.num_servers

    @property
    def drafts(self) -> bool:
        """Whether there is speculative decoding of any kind."""
        return bool(self.speculative_config or self.spec_method)

    @property
    def hides_its_model(self) -> bool:
        """Whether only a shell knows the model: vLLM reads its own default then."""
        is_said = any(self.model in word or word == "--config" for word in self.words)
        return bool(self.unknown) and not is_said


def planned(command: Sequence[str], model: str) -> tuple[Plan, dict[str, str]]:
    """The plan and the environment of the first server that is pasted, or of one of `model`, which
    counts more than what is pasted. Raises ToldError."""
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
        is_stock=plan.transfer is DEFAULT_TRANSFER and not plan.only_vllm_reads,
        is_inside=server.is_inside,
        unknown=tuple(server.unknown),
        others=tuple(each.name or "another" for each in others),
    )
    return plan, environ


def read_plan(words: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Read `[MODEL] [options]` as far as that can be done without vLLM. Raises ToldError."""
    # vLLM takes names with dashes and with underscores.
    flags = [re.sub("^--[^=.]+", lambda it: it[0].replace("_", "-"), word) for word in words]
    known, rest = _parser().parse_known_args(flags)
    given = vars(known)
    # The model may be the first of the words that are left; options we skip may follow it.
    first = rest[0] if rest and not rest[0].startswith("-") else ""
    given["model"] = known.model_tag or first or known.model or ""
    trouble = ""
    transfer: Mapping[str, Any] = DEFAULT_TRANSFER
    try:
        transfer = _read_transfer(known.kv_transfer_config)
    except (ValueError, RecursionError) as why:
        trouble = f"--kv-transfer-config cannot be read ({why}), so the server would not start"
    unread = [word.partition("=")[0] for word in rest if word.startswith(DOTTED)]
    unread += [known.config] if known.config else []
    plan = Plan(only_vllm_reads=", ".join(unread), **_fields(given, transfer, environ))
    return replace(plan, why_no_config=trouble or plan.why_no_config)


def as_vllm_reads(
    plan: Plan, options: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> Plan:
    """The plan with the options as vLLM's own parser read them (planned.py), if it did."""
    if options is None:
        return plan
    transfer = options.get("kv_transfer_config") or DEFAULT_TRANSFER
    is_stock = plan.is_stock and transfer is DEFAULT_TRANSFER
    found = _fields(options, transfer, environ)
    return replace(plan, only_vllm_reads="", is_stock=is_stock, **found)


def _fields(
    given: Mapping[str, Any], transfer: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """The fields of a plan from options by vLLM's names for them."""
    config, why, names_us = ContinuumConfig(), "", True
    extra, role = transfer.get("kv_connector_extra_config"), transfer.get("kv_role")
    try:
        part = our_part(transfer.get("kv_connector"), extra, role)
        names_us = part is not None
        config = load_config(part, environ)
    except ConfigError as error:
        why = str(error)
    if names_us:
        why = why or why_replaced(given.get("kv_offloading_size"))
    found: dict[str, Any] = {each.name: each.default for each in fields(Options)}
    found |= {name: given[name] for name in found if given.get(name) is not None}
    found["middleware"] = tuple(found["middleware"])
    ours = {"transfer": transfer, "config": config, "names_us": names_us, "why_no_config": why}
    return found | ours


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ToldError(message)


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("--model-tag", "--config", "--kv-transfer-config"):
        parser.add_argument(name)
    for each in fields(Options):
        names = [f"--{each.name.replace('_', '-')}", *each.metadata.values()]
        how: dict[str, Any] = {}
        if each.name == "middleware":
            how["action"] = "append"
        elif "bool" in str(each.type):
            how["action"] = argparse.BooleanOptionalAction
        elif "int" in str(each.type):
            how["type"] = partial(_number, least=1 if each.default == 1 else 0)
        elif "float" in str(each.type):
            how["type"] = float
        parser.add_argument(*names, **how)
    return parser


def _number(word: str, least: int) -> int:
    if not word.isdecimal() or len(word) > 6 or int(word) < least:
        raise argparse.ArgumentTypeError(f"{word!r} is no number of ranks; write {least} or more")
    return int(word)


def _read_transfer(text: str | None) -> Mapping[str, Any]:
    """The JSON of --kv-transfer-config; ours if it is not given."""
    if text is None:
        return DEFAULT_TRANSFER
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text} is no JSON object")
    return found
