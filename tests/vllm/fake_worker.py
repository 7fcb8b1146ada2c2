"""FakeWorker: one rank's model runner and copy engine, with an oracle for the KV it reads.

VRAM and DRAM are dicts. The "KV" of a position is a number that depends on every token up
to it, so a block that was reused, loaded from the wrong slot, read before its load
settled, or overwritten while a copy was in flight cannot hold the right one. Before a
request computes a token, everything its attention would read is compared (`OracleError`).
The sampled token depends on the same numbers only, so the output of a request is the same
for every batching, preemption, prefix hit and load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.sim import versions
from continuum_connector.messages import (
    LoadOrder,
    StepPlan,
    StoreOrder,
    TransferOutcome,
    WorkerReport,
)

_MASK = (1 << 61) - 1
_FIRST_TOKEN, _NUM_TOKENS = 100, 30_000  # sampled ids: clear of the special ones


class OracleError(AssertionError):
    """KV was read, stored or loaded that is not what it must be."""


def extend_chain(chain: list[int], tokens: Iterable[int]) -> None:
    """Append the KV value of each of `tokens`, which follow those already in `chain`."""
    value = chain[-1] if chain else 1
    for token in tokens:
        value = ((value ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
        value ^= value >> 29
        chain.append(value)


def next_token(chain: list[int], num_tokens: int) -> int:
    """Return the token that follows the first `num_tokens` tokens of `chain`."""
    return _FIRST_TOKEN + chain[num_tokens - 1] % _NUM_TOKENS


@dataclass
class Content:
    """What one VRAM block or host slot holds: per position a KV value, None if unwritten."""

    group: int
    values: list[int | None]

    def copy(self) -> Content:
        return Content(self.group, list(self.values))


@dataclass
class _Request:
    """The model runner's own copy of a request, built from scheduler outputs alone."""

    tokens: list[int]
    num_prompt_tokens: int
    tables: list[list[int]]
    num_computed: int
    chain: list[int] = field(default_factory=list)

    def truncate(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:]
        del self.chain[num_tokens:]


@dataclass
class _Transfer:
    order: LoadOrder | StoreOrder
    sources: list[Content]  # content at submission; a copy in flight must not see it change
    before: list[Content] = field(default_factory=list)
    marks: list[Content] = field(default_factory=list)  # loads: what the targets hold meanwhile
    is_cancelled: bool = False


class FakeWorker:
    """Executes scheduler outputs. With `hold` off, a transfer settles in the next step, or, if
    `is_fast`, in its own. With `cancels_late` one that is cancelled goes on until it is settled or
    failed, as with a driver that has it already. With `saves_late` the stores of an empty step
    leave with the next one: vLLM <= 0.30 has no wait_for_save there.
    `windows` has one entry per KV group: tokens of attention, or None for all of them.
    """

    def __init__(
        self,
        block_size: int,
        windows: tuple[int | None, ...],
        wrap_report: Callable[[WorkerReport], Any] | None = None,
        hold: bool = False,
        rank: int = 0,
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.hold = hold
        self.rank = rank
        self.is_fast = False
        self.cancels_late = False
        self._cancels: frozenset[int] = frozenset()  # of this step's plan
        self.saves_late = False
        self.is_down = False  # no tier on this rank: it takes no more orders
        self.num_ready_slots: int | None = None  # of host memory; None: nobody counts
        self.vram: dict[int, Content] = {}
        self.dram: dict[int, Content] = {}
        self.pending: dict[int, _Transfer] = {}
        self.num_blocks_loaded = 0
        self.num_blocks_stored = 0
        self._wrap_report = wrap_report or _connector_metadata
        self._requests: dict[str, _Request] = {}
        self._stores: tuple[StoreOrder, ...] = ()
        self._report = WorkerReport()
        self._received: set[str] = set()
        self._failed_loads: set[str] = set()
        self._invalid_blocks: set[int] = set()

    # -- control of copies in flight ---------------------------------------------------

    def settle(self, transfer_id: int | None = None) -> None:
        """Finish one transfer, or all; the next step reports it."""
        for each in [transfer_id] if transfer_id is not None else list(self.pending):
            transfer = self.pending.pop(each)
            move = self._end_load if isinstance(transfer.order, LoadOrder) else self._end_store
            move(each, transfer)
            num_bytes = len(transfer.order.blocks)
            self._note(transfer, TransferOutcome(num_done=1, num_bytes=num_bytes, seconds=1e-3))

    def fail(self, transfer_id: int | None = None, reason: str = "driver") -> None:
        """End one transfer, or all, without a byte of what it should have brought."""
        for each in [transfer_id] if transfer_id is not None else list(self.pending):
            transfer = self.pending.pop(each)
            if isinstance(transfer.order, LoadOrder):
                self._failed_loads.add(transfer.order.request_id)
                self._invalid_blocks.update(int(block) for block in transfer.order.blocks)
            self._note(transfer, TransferOutcome(num_failed=1, reasons=(reason,)))

    def poison(self, slot: int) -> None:
        """Corrupt a host slot silently, as a bad copy would."""
        self.dram[slot].values = [-1] * self.block_size

    def report_ready(self, num_slots: int) -> None:
        """Say, as a rank does whose pool has grown, that so many slots can be used by now."""
        assert num_slots >= (self.num_ready_slots or 0), "a pool never shrinks"
        self.num_ready_slots = self._report.ready_slots[self.rank] = num_slots

    def report_tier_down(self, why: str) -> None:
        """Say, as a rank does that could not page-lock its host memory, that it has no tier."""
        self.is_down = True
        self._report.tier_down = why

    # -- one step ------------------------------------------------------------------------

    def execute(self, step: Any) -> dict[str, list[int]]:
        """Run one scheduler output; return the sampled token per request, [] mid-prefill."""
        if not self.hold:
            self.settle()
        plan = getattr(step.kv_connector_metadata, "plan", None) or StepPlan()
        self._submit_stores()  # what an empty step left
        self._stores = plan.stores
        for block in step.new_block_ids_to_zero or ():
            self.vram.pop(block, None)
        self._cancels = frozenset(plan.cancels)
        for transfer_id in plan.cancels:
            self._cancel(transfer_id)
        for load in plan.loads:
            self._start_load(load)
        self._update_requests(step)
        for copy in getattr(step, "kv_cache_block_copies", None) or ():
            self.vram[copy.dst_block_id] = self.vram[copy.src_block_id].copy()
        sampled = {
            request_id: self._forward(request_id, num_tokens)
            for request_id, num_tokens in step.num_scheduled_tokens.items()
        }
        if step.total_num_scheduled_tokens or not self.saves_late:
            self._submit_stores()
        return sampled

    def take_connector_output(self) -> dict[str, Any]:
        """Return and forget what settled, as keyword arguments of KVConnectorOutput."""
        if self.is_fast and not self.hold:
            self.settle()
        output: dict[str, Any] = {}
        if self._received:
            output["finished_recving"] = self._received
        # As worker_hooks.py does: by block where there is one group, and by request as well
        # where vLLM asks for that (>= 0.30), which then recomputes all of it.
        if len(self.windows) == 1 and self._invalid_blocks:
            output["invalid_block_ids"] = self._invalid_blocks
        if versions.CAN_FAIL_REQUESTS and self._failed_loads:
            output["failed_recving"] = self._failed_loads
        if not self._report.is_empty:
            output["kv_connector_worker_meta"] = self._wrap_report(self._report)
        self._report = WorkerReport()
        self._received, self._failed_loads, self._invalid_blocks = set(), set(), set()
        return output

    # -- copies ----------------------------------------------------------------------------

    def _cancel(self, transfer_id: int) -> None:
        if transfer_id in self.pending:
            self.pending[transfer_id].is_cancelled = True
            if not self.cancels_late:
                self.fail(transfer_id, "cancelled")

    def _refuses(self, order: LoadOrder | StoreOrder) -> bool:
        """Whether it ends before it begins: without a tier, cancelled in its own plan, or beyond
        the copy engine's pool."""
        reason = "no_tier" if self.is_down else ""
        reason = reason or ("cancelled" if order.transfer_id in self._cancels else "")
        reason = reason or ("refused" if (order.slots < 0).any() else "")
        if reason:
            self._submit(order, _Transfer(order, []))
            self.fail(order.transfer_id, reason)
        return bool(reason)

    def _start_load(self, order: LoadOrder) -> None:
        if self._refuses(order):
            return
        sources = [self._slot(order, int(slot)) for slot in order.slots]
        marks = [Content(-1, [None] * self.block_size) for _ in order.blocks]
        for block, mark in zip(order.blocks, marks, strict=True):
            self.vram[int(block)] = mark
        self._submit(order, _Transfer(order, sources, [c.copy() for c in sources], marks))

    def _end_load(self, transfer_id: int, transfer: _Transfer) -> None:
        moves = zip(transfer.order.blocks, transfer.order.slots, transfer.sources, strict=True)
        for i, (block, slot, source) in enumerate(moves):
            if self.vram.get(int(block)) is not transfer.marks[i]:
                raise OracleError(f"load {transfer_id}: VRAM block {block} was written meanwhile")
            if self.dram.get(int(slot)) is not source:
                raise OracleError(f"load {transfer_id}: slot {slot} was overwritten meanwhile")
            self.vram[int(block)] = source.copy()
        self.num_blocks_loaded += len(transfer.sources)

    def _submit_stores(self) -> None:
        stores, self._stores = self._stores, ()
        for order in stores:
            self._start_store(order)

    def _start_store(self, order: StoreOrder) -> None:
        if self._refuses(order):
            return
        sources = []
        for block, slot in zip(order.blocks, order.slots, strict=True):
            source = self.vram.get(int(block))
            if source is None or None in source.values:
                raise OracleError(f"store {order.transfer_id}: block {block} is not full yet")
            sources.append(source)
            if self.num_ready_slots is not None and slot >= self.num_ready_slots:
                raise OracleError(f"store {order.transfer_id}: slot {slot} is not there yet")
            self.dram[int(slot)] = Content(-1, [None] * self.block_size)
        self._submit(order, _Transfer(order, sources, [c.copy() for c in sources]))

    def _end_store(self, transfer_id: int, transfer: _Transfer) -> None:
        for i, (block, slot) in enumerate(
            zip(transfer.order.blocks, transfer.order.slots, strict=True)
        ):
            now = self.vram.get(int(block))
            if now != transfer.before[i]:
                if transfer.is_cancelled:  # abandoned: the slot holds a mixture, for nobody
                    continue
                raise OracleError(f"store {transfer_id}: block {block} was reused meanwhile")
            self.dram[int(slot)] = transfer.before[i].copy()
        self.num_blocks_stored += len(transfer.sources)

    def _submit(self, order: LoadOrder | StoreOrder, transfer: _Transfer) -> None:
        if order.transfer_id in self.pending:
            raise OracleError(f"transfer id {order.transfer_id} is used twice")
        self.pending[order.transfer_id] = transfer

    def _slot(self, order: LoadOrder, slot: int) -> Content:
        content = self.dram.get(slot)
        if content is None or None in content.values:
            raise OracleError(f"load {order.transfer_id}: slot {slot} holds no finished store")
        return content

    def _note(self, transfer: _Transfer, outcome: TransferOutcome) -> None:
        order = transfer.order
        self._report.outcomes.setdefault(order.transfer_id, TransferOutcome()).add(outcome)
        if isinstance(order, LoadOrder) and not any(
            isinstance(other.order, LoadOrder) and other.order.request_id == order.request_id
            for other in self.pending.values()
        ):
            self._received.add(order.request_id)  # exactly once: vLLM dies of a second time

    # -- model runner ----------------------------------------------------------------------

    def _update_requests(self, step: Any) -> None:
        """Follow the scheduler as vLLM's runner V1 does (`_update_states`)."""
        for request_id in step.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids)
            tables = [list(ids) for ids in new.block_ids]
            self._requests[new.req_id] = _Request(
                tokens, len(tokens), tables, new.num_computed_tokens
            )
        cached = step.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request = self._requests[request_id]
            request.num_computed = cached.num_computed_tokens[i]
            request.truncate(request.num_prompt_tokens + cached.num_output_tokens[i])
            new_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                request.tables = [list(ids) for ids in new_ids]
            elif new_ids is not None:
                for table, ids in zip(request.tables, new_ids, strict=True):
                    table.extend(ids)

    def _forward(self, request_id: str, num_tokens: int) -> list[int]:
        request = self._requests[request_id]
        start, end = request.num_computed, request.num_computed + num_tokens
        extend_chain(request.chain, request.tokens[len(request.chain) : end])
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, start - window + 1)
            self._check(request_id, group, first, start)
            self._write(request, group, start, end)
        if end < len(request.tokens):
            return []
        token = next_token(request.chain, end)
        request.tokens.append(token)
        return [token]

    def _check(self, request_id: str, group: int, first: int, end: int) -> None:
        """Compare what attention reads, positions first to end, with what must be there."""
        request, size = self._requests[request_id], self.block_size
        while first < end:
            index, offset = divmod(first, size)
            stop = min(end, (index + 1) * size)
            block = request.tables[group][index]
            content = self.vram.get(block)
            held = content.values[offset : offset + stop - first] if content else None
            if not content or content.group != group or held != request.chain[first:stop]:
                raise OracleError(
                    f"{request_id} reads wrong KV: group {group}, block {block}, positions "
                    f"{first} to {stop - 1}; it holds {content and (content.group, held)}"
                )
            first = stop

    def _write(self, request: _Request, group: int, first: int, end: int) -> None:
        size = self.block_size
        while first < end:
            index, offset = divmod(first, size)
            stop = min(end, (index + 1) * size)
            block = request.tables[group][index]
            content = self.vram.get(block)
            if content is None or content.group != group:
                content = self.vram[block] = Content(group, [None] * size)
            content.values[offset : offset + stop - first] = request.chain[first:stop]
            first = stop


def _connector_metadata(report: WorkerReport) -> Any:
    from continuum_connector.connector import WorkerMetadata

    return WorkerMetadata(report)
