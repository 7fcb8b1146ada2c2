"""Node: how many ranks share this node's memory, even for an engine that was told it is alone,
and what the node had to spare.

vLLM makes the engines of a dense data-parallel model independent of one another before it builds
their schedulers and workers (v1/engine/core.py, run_engine_core: data_parallel_size and
data_parallel_size_local become 1, ParallelConfig.reconfigure_for_independent_dp_rank from 0.29 on),
and does not keep how many there are. So the process that starts them counts while the config still
describes all of them, and the count goes with the config into every engine and worker.
"""

from __future__ import annotations

from typing import Any

from continuum_connector.memory import Spare

# An attribute of SchedulerConfig that is no field, so not part of its hash. ParallelConfig cannot
# have it: for a draft model vLLM copies that config field by field (config/utils.py, replace), and
# would fail.
_COUNT = "_continuum_node_ranks"
_SPARE = "_continuum_spare"


def keep_count(vllm_config: Any) -> None:
    """Make the config carry the count, while it still describes all engines of this node."""
    setattr(vllm_config.scheduler_config, _COUNT, _count(vllm_config.parallel_config))


def keep_spare(vllm_config: Any, spare: Spare) -> None:
    """Make the config carry what this node has to spare."""
    setattr(vllm_config.scheduler_config, _SPARE, spare)


def spare(vllm_config: Any) -> Spare | None:
    """What the node had to spare when its server started; None if nobody has looked."""
    return getattr(vllm_config.scheduler_config, _SPARE, None)


def rank(vllm_config: Any) -> int:
    """This worker's rank among those of its engine (v1/worker/worker_base.py sets it).

    No default: slots that two ranks report under one number would never count as usable.
    """
    return int(vllm_config.parallel_config.rank)


def num_node_ranks(vllm_config: Any) -> int:
    """The ranks of all engines that one `vllm serve` has on this node, which share its memory.

    If the config itself says more, that counts: engines can be added (elastic expert parallelism),
    and a dense replica that was made independent says less, never more.
    """
    kept = getattr(vllm_config.scheduler_config, _COUNT, 1)
    return max(_count(vllm_config.parallel_config), kept)


def _count(parallel: Any) -> int:
    return node_ranks(
        parallel.world_size,
        parallel.data_parallel_size_local,
        parallel.data_parallel_size,
        parallel.nnodes,
    )


def node_ranks(engine_ranks: int, node_engines: int, num_engines: int, num_nodes: int) -> int:
    """Ranks on one of `num_nodes` nodes that runs `node_engines` of `num_engines` engines.

    An engine spans nodes only if there are more nodes than the engines need (config/parallel.py,
    nnodes_within_dp). 0 engines: a node that only answers clients.
    """
    num_groups = max(1, num_engines // max(1, node_engines))
    nodes_per_engine = max(1, num_nodes // num_groups)
    return max(1, engine_ranks // nodes_per_engine) * max(1, node_engines)
