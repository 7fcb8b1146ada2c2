"""Plays turns with drafts on vLLM's scheduler, and moves their states as its runner V2 does: with
its own code and Triton kernels, interpreted on a CPU. Prints what was compared, as JSON.

A model is all that is missing: a state after n tokens is the number that the fake worker's KV has
there, and a window of a convolution is the last few of them.

    python -m tests.vllm.interpreted SEED [miscounts]       one draft less counted than accepted
"""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

from continuum_connector.scheduler.kv_groups import KvGroup
from tests.vllm import harness
from tests.vllm.agents import AgentEngine
from tests.vllm.fake_worker import FakeWorker
from tests.vllm.harness import prompt

NUM_DRAFTS, NUM_ROWS, SIZE, CONV = 3, 16, 16, 3  # CONV: tokens that a convolution looks back
CPU = torch.device("cpu")


def _of_rows(fill: int) -> torch.Tensor:
    return torch.full((NUM_ROWS,), fill, dtype=torch.int32)


class ColumnWorker(FakeWorker):
    """Beside the fake's states, which have an oracle of their own, those of vLLM's tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: dict[str, int] = {}
        self.miscounts = False
        self.num_read = self.num_found = 0
        self.wrong_reads: list[tuple[str, int]] = []  # request, tokens before it
        self.wrong_finds: list[tuple[str, int]] = []

    def start(self, cache: Any) -> None:
        """Make the tensors, and vLLM's state of them, as its runner does with a model."""
        groups = cache.kv_cache_groups
        self.ids = [i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, MambaSpec)]
        self.cache, self.temporal, self.conv, layers = cache, {}, {}, {}
        for i in self.ids:
            self.temporal[i] = torch.zeros(cache.num_blocks, 4, dtype=torch.int64)
            self.conv[i] = torch.zeros(cache.num_blocks, CONV + NUM_DRAFTS, 2, dtype=torch.int64)
            for name in groups[i].layer_names:
                layers[name] = SimpleNamespace(kv_cache=[self.conv[i], self.temporal[i]])
        kind = groups[self.ids[0]].kv_cache_spec.mamba_type
        copies = {kind: (get_conv_copy_spec, get_temporal_copy_spec)}
        self.tables = [torch.zeros(NUM_ROWS, 256, dtype=torch.int32) for _ in self.ids]
        state = self.state = object.__new__(MambaHybridModelState)
        state.cache_config = SimpleNamespace(mamba_block_size=SIZE, block_size=SIZE)
        state._align_mode, state.recoverssm = True, None
        state.num_accepted_tokens_gpu = _of_rows(1)
        state._mamba_state_idx_gpu, state._mamba_src_off_gpu = _of_rows(0), _of_rows(0)
        state._mamba_src_col_gpu = _of_rows(-1)
        state._mamba_group_ids, state._mamba_spec = [], None
        state._get_mamba_group_info(cache)
        state._mamba_ctx = MambaSpecDecodeGPUContext.create(
            max_num_reqs=NUM_ROWS,
            kv_cache_config=cache,
            copy_funcs=copies,
            device=CPU,
            make_buffer=lambda n, dtype: CpuGpuBuffer(n, dtype=dtype, device=CPU, pin_memory=False),
        )
        state._mamba_ctx.initialize_from_forward_context(cache, layers, copies, self.tables)

    def _update_requests(self, step: Any) -> None:
        """Give each request a row, as runner V2 does: to one that is resumed a new one."""
        super()._update_requests(step)
        cached = step.scheduled_cached_reqs
        came = [(new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs]
        came += [
            (request_id, cached.num_computed_tokens[i])
            for i, request_id in enumerate(cached.req_ids)
            if request_id in cached.resumed_req_ids
        ]
        gone = {*step.finished_req_ids, *(step.preempted_req_ids or ()), *dict(came)}
        self.rows = {key: row for key, row in self.rows.items() if key not in gone}
        for request_id, num_computed in came:
            row = min(set(range(NUM_ROWS)) - set(self.rows.values()))
            self.rows[request_id] = row
            self.state.num_accepted_tokens_gpu[row] = 1  # add_request
            self.state._mamba_state_idx_gpu[row] = (num_computed - 1) // SIZE
        for request_id, row in self.rows.items():
            for table, index in zip(self.tables, self.ids, strict=True):
                ids = self._requests[request_id].tables[index]
                table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)

    def _step_state(
        self, request_id: str, group: KvGroup, told: tuple[int, int, int], end: int
    ) -> None:
        super()._step_state(request_id, group, told, end)
        (start, known, accepted), row = told, self.rows[request_id]
        mapping = torch.tensor([row], dtype=torch.int32)
        if group.index == self.ids[0]:
            ends = torch.tensor([0, end - start], dtype=torch.int32)
            batch = SimpleNamespace(num_reqs=1, idx_mapping=mapping, query_start_loc=ends)
            self.state.preprocess_state(batch, (), self.cache, _of_rows(start))
        self._compute(request_id, group.index, start, end)
        if group.index == self.ids[-1]:
            samples = end == len(self._requests[request_id].tokens)
            num_sampled = samples * (accepted - known + 1)
            told_sampled = torch.tensor([num_sampled - (self.miscounts and num_sampled > 1)])
            self.state.postprocess_state(mapping, told_sampled.int(), _of_rows(accepted))

    def _compute(self, request_id: str, index: int, start: int, end: int) -> None:
        """Read the state and leave others, as kernels do of a prompt's chunk and of drafts."""
        row, request = self.rows[request_id], self._requests[request_id]
        column = int(self.state._mamba_state_idx_gpu[row])
        table, temporal, conv = request.tables[index], self.temporal[index], self.conv[index]
        is_chunk = start < request.num_prompt_tokens
        ahead = 0 if is_chunk else int(self.state.num_accepted_tokens_gpu[row]) - 1
        if start:
            self.num_read += 1
            held = temporal[table[column + ahead], 0], conv[table[column], ahead : ahead + CONV]
            if not self._is_state(held, request.chain, start):
                self.wrong_reads.append((request_id, start))
        first = end if is_chunk else start + 1  # whose state is in the column
        for i in range(first, end + 1):
            temporal[table[column + i - first]] = request.chain[i - 1]
        for j, n in enumerate(range(first - CONV, end)):
            conv[table[column], j] = request.chain[n] if n >= 0 else 0

    @staticmethod
    def _is_state(held: tuple[Any, Any], chain: list[int], end: int) -> bool:
        window = [chain[n] if n >= 0 else 0 for n in range(end - CONV, end)]
        return int(held[0]) == chain[end - 1] and held[1][:, 0].tolist() == window

    def compare_found(self, pool: Any, tables: Any) -> None:
        """Compare each state that a lookup would find with what it must be."""
        for request_id, request in self._requests.items():
            for index in self.ids:
                for column, block in enumerate(tables(index).get(request_id, ())):
                    end = (column + 1) * SIZE
                    if block.block_hash is None or end > request.num_computed:
                        continue
                    self.num_found += 1
                    n = block.block_id
                    held = self.temporal[index][n, 0], self.conv[index][n, :CONV]
                    if not self._is_state(held, request.chain, end):
                        self.wrong_finds.append((request_id, end))


def play(seed: int, miscounts: bool) -> dict[str, Any]:
    """Two programs beside each other, three turns each; chunks of prompts are short or long."""
    draw = random.Random(seed)
    harness.FakeWorker = ColumnWorker  # type: ignore[misc]
    engine = AgentEngine(
        120,
        groups="state",
        num_drafts=NUM_DRAFTS,
        max_num_batched_tokens=draw.choice([64, 512]),
        async_scheduling=bool(seed % 2),
        extra_config={"ttl_s": 60},
    )
    worker: Any = engine.worker
    worker.start(engine._cache(120))
    worker.miscounts = miscounts
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers

    def step() -> None:
        engine.step()
        worker.compare_found(engine.pool, lambda index: managers[index].req_to_blocks)

    for turn in range(3):
        for p in range(2):
            tokens = prompt(draw.randint(40, 120), seed=p)
            if turn:
                tokens = engine.next_prompt(f"{p}.{turn - 1}", draw.randint(1, 40), seed=turn)
            engine.add(f"{p}.{turn}", tokens, draw.randint(10, 40), program=f"p{p}")
            step()
        while engine.scheduler.has_requests() or engine._queue:
            step()
    return {
        "num_read": worker.num_read,
        "num_found": worker.num_found,
        "num_hit": sum(sum(hit) for hit in engine.cached.values()),
        "num_accepted": worker.num_accepted,
        "wrong_reads": worker.wrong_reads,
        "wrong_finds": worker.wrong_finds,
        "prompts": {key: each.num_prompt_tokens for key, each in engine.requests.items()},
    }


def main() -> None:
    """Play each seed of the command line, and with `miscounts` behind it as it says."""
    for word in sys.argv[1:]:
        print(json.dumps(play(int(word[0]), word[1:] == "miscounts")), flush=True)
