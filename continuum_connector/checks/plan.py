"""Plan: the server that somebody means to start, as far as it was told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from continuum_connector.config import CONNECTOR_NAME, ContinuumConfig, load_config, our_part
from continuum_connector.errors import ConfigError
from continuum_connector.node import node_ranks

DEFAULT_TRANSFER = {"kv_connector": CONNECTOR_NAME, "kv_role": "kv_both"}


@dataclass(frozen=True)
class Plan:
    """Options of `vllm serve`; what was not said has vLLM's default, `transfer` ours.

    `transfer`: --kv-transfer-config; `why_no_config`: why it, or our part of it, cannot be read;
    `why_no_server`: why the command that was told would start none.
    """

    model: str = ""
    transfer: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_TRANSFER)
    config: ContinuumConfig = field(default_factory=ContinuumConfig)
    why_no_config: str = ""
    why_no_server: str = ""
    options_file: str = ""  # of --config, which is not read here
    middleware: tuple[str, ...] = ()
    prefix_caching: bool = True
    scheduler_cls: str | None = None
    scheduling_policy: str = "fcfs"
    hybrid_manager: bool = True
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    prefill_context_parallel: int = 1
    context_parallel: int = 1
    num_engines: int = 1
    node_engines: int = 1
    num_nodes: int = 1
    num_servers: int = 1  # on this node, of one command: each takes `dram_bytes` of its own

    @property
    def num_ranks(self) -> int:
        """GPUs of this node that share one `dram_bytes`, as compat.num_ranks counts them."""
        ranks = self.tensor_parallel * self.pipeline_parallel * self.prefill_context_parallel
        return node_ranks(ranks, self.node_engines, self.num_engines, self.num_nodes)

    @property
    def num_gpus(self) -> int:
        """GPUs of this node, of all servers that the command starts there."""
        return self.num_ranks * self.num_servers

    @property
    def names_us(self) -> bool:
        """Whether --kv-transfer-config has our connector in it."""
        try:
            return _our_part(self.transfer) is not None
        except ConfigError:  # named, and then given what is no config: `why_no_config` says it
            return True


def read_config(
    transfer: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[ContinuumConfig, str]:
    """Our config as the server will read it, and ""; or the defaults, and why it cannot."""
    try:
        return load_config(_our_part(transfer), environ), ""
    except ConfigError as error:
        return ContinuumConfig(), str(error)


def _our_part(transfer: Mapping[str, Any]) -> dict[str, Any] | None:
    return our_part(transfer.get("kv_connector"), transfer.get("kv_connector_extra_config"))
