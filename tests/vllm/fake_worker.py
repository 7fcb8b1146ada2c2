"""FakeWorker: one rank's model runner and copy engine, with an oracle for the KV it reads.

VRAM and DRAM are dicts. The "KV" of a position is a number that depends on every token up
to it, so a block that was reused, loaded from the wrong slot, read before its load
settled, or overwritten while a copy was in flight cannot hold the right one. The state after
n tokens is that of the last of them. Before a request computes a token, everything its layers
would read is compared (`OracleError`).
The sampled token depends on the same numbers only, so the output of a request is the same
for every batching, preemption, prefix hit and load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.sim import versions
from continuum_connector.messages import (
    DiskSpent,
    LoadOrder,
    OnDisk,
    ReadOrder,
    StepPlan,
    StoreOrder,
    TransferOutcome,
    WorkerReport,
    WriteOrder,
)
from continuum_connector.scheduler.kv_groups import CHUNKED, FULL, STATE, KvGroup

_MASK = (1 << 61) - 1
_FIRST_TOKEN, _NUM_TOKENS = 100, 30_000  # sampled ids: clear of the special ones
_WRONG = 1  # a draft that the model never says


class OracleError(AssertionError):
    """KV was read, stored or loaded that is not what it must be."""


def extend_chain(chain: list[int], tokens: Iterable[int], weights: int = 0) -> None:
    """Append the KV value of each of `tokens`, which follow those already in `chain`."""
    value, of_weights = chain[-1] if chain else 1, weights << 32
    for token in tokens:
        value = ((value ^ (token + 1) ^ of_weights) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
        value ^= value >> 29
        chain.append(value)


def next_token(chain: list[int], num_tokens: int) -> int:
    """Return the token that follows the first `num_tokens` tokens of `chain`."""
    return _FIRST_TOKEN + chain[num_tokens - 1] % _NUM_TOKENS


@dataclass
class Content:
    """What one VRAM block or host slot holds: per position a KV value, None if unwritten; of a
    group of states one value."""

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
    weights: int
    chain: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # guessed for the next step
    states: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By group of states: the column of its running state, and how many drafts behind that the
    newest accepted one stands (vLLM: mamba_state_idx, num_accepted_tokens - 1)."""

    def truncate(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:]
        del self.chain[num_tokens:]


Order = LoadOrder | StoreOrder | ReadOrder | WriteOrder
OF_DISK = (ReadOrder, WriteOrder)


@dataclass
class _Transfer:
    order: Order
    sources: list[Content]  # content at submission; a copy in flight must not see it change
    before: list[Content] = field(default_factory=list)
    marks: list[Content] = field(default_factory=list)  # loads: what the targets hold meanwhile
    is_cancelled: bool = False


class FakeDisk:
    """One rank's file: of each disk slot the name and what its blocks held. `fails_with`, for
    writes `refuses_with`: how they end, `after` so many of their slots; `bad`: how what comes to
    a slot ends; `is_held`: they stay under way until somebody ends them."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[bytes, list[Content]]] = {}
        self.depths: dict[int, int] = {}
        self.fails_with = self.refuses_with = ""
        self.spent: list[int] = []  # of the write budget, as the scheduler side said it
        self.after = 0
        self.bad: dict[int, str] = {}
        self.is_held = False
        self.num_resets = self.num_read = self.num_written = 0  # blocks of the latter two

    def found(self) -> list[OnDisk]:
        """What a restart reports."""
        return [
            OnDisk(slot, number, self.depths[slot], key)
            for number, (slot, (key, _)) in enumerate(self.slots.items())
        ]

    def reset(self) -> None:
        self.slots.clear()
        self.num_resets += 1


class FakeWorker:
    """Executes scheduler outputs. With `hold` off, a transfer settles in the next step, or, if
    `is_fast`, in its own. With `cancels_late` one that is cancelled goes on until it is settled or
    failed, as with a driver that has it already. With `saves_late` the stores of an empty step
    leave with the next one: vLLM <= 0.30 has no wait_for_save there. With `keeps_tails` blocks of
    which only the first tokens are written may be stored and loaded.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        wrap_report: Callable[[WorkerReport], Any] | None = None,
        hold: bool = False,
        rank: int = 0,
    ) -> None:
        self.groups = tuple(groups)
        self.hold = hold
        self.rank = rank
        self.is_fast = False
        self.cancels_late = False
        self._cancels: frozenset[int] = frozenset()  # of this step's plan
        self._is_stale = False  # this step's plan
        self.saves_late = False
        self.keeps_tails = False
        self.is_down = False  # no tier on this rank: it takes no more orders
        self.weights = 0  # all KV depends on them
        self._epoch = 0  # the newest that a plan has told
        self._spoilt: set[int] = set()  # under way since before the weights changed
        self._stale = -1  # loads and reads of this epoch or an older one bring foreign KV
        self.num_ready_slots: int | None = None  # of host memory; None: nobody counts
        self._is_again = False  # they were given back: what orders those that are away, is refused
        self.vram: dict[int, Content] = {}
        self.dram: dict[int, Content] = {}
        self.pending: dict[int, _Transfer] = {}
        self.num_blocks_loaded = 0
        self.num_blocks_stored = 0
        self.num_drafts = 0  # that it guesses behind each token it samples
        self.num_drafted = self.num_accepted = 0  # of them so far
        self.spoils_drafted_states = False  # what a step with drafts leaves for good is wrong
        self.disk = FakeDisk()
        self._wrap_report = wrap_report or _connector_metadata
        self._requests: dict[str, _Request] = {}
        self._stores: tuple[StoreOrder, ...] = ()
        self._writes: tuple[WriteOrder, ...] = ()  # submitted behind the stores
        self._report = WorkerReport()
        self._received: set[str] = set()
        self._failed_loads: set[str] = set()
        self._invalid_blocks: set[int] = set()

    # -- control of copies in flight ---------------------------------------------------

    def settle(self, transfer_id: int | None = None) -> None:
        """Finish one transfer, or all; the next step reports it."""
        for each in [transfer_id] if transfer_id is not None else list(self.pending):
            transfer = self.pending.pop(each)
            if isinstance(transfer.order, OF_DISK):
                self._end_disk(transfer)
                continue
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
        self.dram[slot].values = [-1] * len(self.dram[slot].values)

    def give_back(self) -> None:
        """Sleep and wake, with `sleep_dram = release`: DRAM is empty, and not there yet. What an
        empty step left to be submitted ends, as worker.py ends it."""
        self.fail(reason="cancelled")
        for order in (*self._stores, *self._writes):
            self._submit(order, _Transfer(order, []))
            self.fail(order.transfer_id, "asleep")
        self._stores, self._writes = (), ()
        self.dram.clear()
        self.disk.reset()
        self.change_weights("sleep")
        self.weights -= 1
        self.num_ready_slots = self._report.ready_slots[self.rank] = 0
        self._is_again = True

    def report_ready(self, num_slots: int) -> None:
        """Say, as a rank does whose pool has grown, that so many slots can be used by now."""
        assert num_slots >= (self.num_ready_slots or 0), "a pool shrinks by give_back alone"
        self.num_ready_slots = self._report.ready_slots[self.rank] = num_slots

    def report_disk(self, num_slots: int) -> None:
        """Say that this rank's disk is open, and what was found there."""
        self._report.disk_slots[self.rank] = num_slots
        self._report.disk_scanned.add(self.rank)
        if self.disk.slots:
            self._report.found[self.rank] = self.disk.found()
        if self.disk.spent:
            self._report.disk_spent[self.rank] = DiskSpent(self.disk.spent[-1], 0.0)

    def report_disk_down(self, why: str) -> None:
        """Say that this rank has no disk."""
        self._report.disk_down = why

    def report_tier_down(self, why: str) -> None:
        """Say, as a rank does that could not page-lock its host memory, that it has no tier."""
        self.is_down = True
        self._report.tier_down = why

    def change_weights(self, way: str = "update_weights") -> None:
        """Other weights serve from now on; with no `way` nobody on this rank has seen it. What is
        under way goes on, and has failed however it ends."""
        self.weights += 1
        if way:
            self._spoilt.update(self.pending)
            self.disk.slots.clear()
            self._report.new_weights, self._report.changed_in = way, self._epoch
            self._stale = self._epoch

    # -- one step ------------------------------------------------------------------------

    def execute(self, step: Any) -> dict[str, list[int]]:
        """Run one scheduler output; return the sampled token per request, [] mid-prefill."""
        self._settle_due()
        plan = getattr(step.kv_connector_metadata, "plan", None) or StepPlan()
        self._submit_stores()  # what an empty step left
        self._stores = plan.stores
        for block in step.new_block_ids_to_zero or ():
            self.vram.pop(block, None)
        self._epoch = max(self._epoch, plan.epoch)
        self._is_stale = plan.epoch <= self._stale
        self._cancels = frozenset(plan.cancels)
        for transfer_id in plan.cancels:
            self._cancel(transfer_id)
        if plan.resets_disk:
            self.disk.reset()
        for load in plan.loads:
            self._start_load(load)
        for read in plan.reads:
            self._start_read(read)
        self._writes += plan.writes
        if plan.disk_spent is not None:
            self.disk.spent.append(plan.disk_spent)
        self._update_requests(step)
        for copy in getattr(step, "kv_cache_block_copies", None) or ():
            self.vram[copy.dst_block_id] = self.vram[copy.src_block_id].copy()
        drafts = step.scheduled_spec_decode_tokens
        sampled = {
            request_id: self._forward(request_id, num_tokens, drafts.get(request_id, ()))
            for request_id, num_tokens in step.num_scheduled_tokens.items()
        }
        if step.total_num_scheduled_tokens or not self.saves_late:
            self._submit_stores()
        return sampled

    def take_connector_output(self) -> dict[str, Any]:
        """Return and forget what settled, as keyword arguments of KVConnectorOutput."""
        if self.is_fast:
            self._settle_due()
        output: dict[str, Any] = {}
        if self._received:
            output["finished_recving"] = self._received
        # As connector.py does: by block where there is one group, and by request as well
        # where vLLM asks for that (>= 0.30), which then recomputes all of it.
        if len(self.groups) == 1 and self._invalid_blocks:
            output["invalid_block_ids"] = self._invalid_blocks
        if versions.CAN_FAIL_REQUESTS and self._failed_loads:
            output["failed_recving"] = self._failed_loads
        if not self._report.is_empty:
            output["kv_connector_worker_meta"] = self._wrap_report(self._report)
        self._report = WorkerReport()
        self._received, self._failed_loads, self._invalid_blocks = set(), set(), set()
        return output

    def _settle_due(self) -> None:
        for each, transfer in list(self.pending.items()):
            if not self.hold and not (self.disk.is_held and isinstance(transfer.order, OF_DISK)):
                self.settle(each)

    # -- copies ----------------------------------------------------------------------------

    def _cancel(self, transfer_id: int) -> None:
        if transfer_id in self.pending:
            self.pending[transfer_id].is_cancelled = True
            if self.cancels_late:
                return
            if isinstance(self.pending[transfer_id].order, OF_DISK):
                self._end_disk(self.pending.pop(transfer_id), most=self.disk.after)
            else:
                self.fail(transfer_id, "cancelled")

    def _refuses(self, order: Order) -> bool:
        """Whether it ends before it begins: without a tier, cancelled in its own plan, or beyond
        the copy engine's pool."""
        reason = "no_tier" if self.is_down else ""
        reason = reason or ("cancelled" if order.transfer_id in self._cancels else "")
        is_refused = (order.slots < 0).any() and not isinstance(order, ReadOrder)
        reason = reason or ("refused" if is_refused else "")
        if self._is_stale:
            reason = reason or "stale"
        if self._is_again and order.slots.max() >= (self.num_ready_slots or 0):
            reason = reason or "asleep"
        if reason:
            self._submit(order, _Transfer(order, []))
            self.fail(order.transfer_id, reason)
        return bool(reason)

    def _start_load(self, order: LoadOrder) -> None:
        if self._refuses(order):
            return
        sources = [self._slot(order, int(slot)) for slot in order.slots]
        marks = [Content(-1, [None]) for _ in order.blocks]
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
        writes, self._writes = self._writes, ()
        for write in writes:
            self._start_write(write)

    def _start_write(self, order: WriteOrder) -> None:
        if not self._refuses(order):
            sources = [self._slot(order, int(slot)) for slot in order.slots]
            self._submit(order, _Transfer(order, sources, [c.copy() for c in sources]))

    def _start_read(self, order: ReadOrder) -> None:
        if not self._refuses(order):
            marks = [Content(-1, [None]) for _ in order.slots]
            for slot, mark in zip(order.slots, marks, strict=True):
                if slot >= 0:
                    self.dram[int(slot)] = mark
            self._submit(order, _Transfer(order, [], marks=marks))

    def _why_bad(self, order: ReadOrder | WriteOrder, i: int) -> str:
        """How the i-th disk slot of an order fails, or ""."""
        disk, slot, is_read = self.disk, int(order.disk_slots[i]), isinstance(order, ReadOrder)
        reason = disk.fails_with if is_read else disk.refuses_with
        if reason and i >= disk.after:
            return reason
        is_missing = is_read and disk.slots.get(slot, (b"", []))[0] != order.keys[i]
        return disk.bad.get(slot, "missing" if is_missing else "")

    def _end_disk(self, transfer: _Transfer, most: int | None = None) -> None:
        """As a disk does it: the first slot that fails ends the order, or, if it is cancelled, the
        first after `most`. What came before that is there."""
        order = transfer.order
        assert isinstance(order, OF_DISK)
        for i in range(len(order.keys)):
            reason = "cancelled" if i == most else self._why_bad(order, i)
            if reason:
                outcome = TransferOutcome(num_failed=1, reasons=(reason,))
                outcome.copied = frozenset(range(i))
                if reason in ("eio", "corrupt", "missing"):
                    outcome.bad[reason] = frozenset([i])
                self._note(transfer, outcome)
                return
            self._move_slot(transfer, i)
        num_bytes = int((order.slots >= 0).sum())
        self._note(transfer, TransferOutcome(num_done=1, num_bytes=num_bytes, seconds=1e-3))

    def _move_slot(self, transfer: _Transfer, i: int) -> None:
        order, disk = transfer.order, self.disk
        assert isinstance(order, OF_DISK)
        length, slot = len(order.slots) // len(order.keys), int(order.disk_slots[i])
        part = slice(i * length, (i + 1) * length)
        if isinstance(order, WriteOrder):
            self._end_write(order, transfer, part)
            contents = [each.copy() for each in transfer.before[part]]
            disk.slots[slot], disk.depths[slot] = (order.keys[i], contents), order.depths[i]
        else:
            self._end_read(order, transfer, part, disk.slots[slot][1])

    def _end_write(self, order: WriteOrder, transfer: _Transfer, part: slice) -> None:
        pairs = zip(order.slots[part], transfer.sources[part], strict=True)
        for slot, source in pairs:
            if self.dram.get(int(slot)) is not source and not transfer.is_cancelled:
                raise OracleError(f"write {order.transfer_id}: slot {slot} was overwritten")
        self.disk.num_written += len(order.slots[part])

    def _end_read(
        self, order: ReadOrder, transfer: _Transfer, part: slice, contents: list[Content]
    ) -> None:
        marks = transfer.marks[part]
        for slot, mark, content in zip(order.slots[part], marks, contents, strict=True):
            if slot < 0:
                continue
            if self.dram.get(int(slot)) is not mark:
                raise OracleError(f"read {order.transfer_id}: slot {slot} was written meanwhile")
            self.dram[int(slot)] = content.copy()
            self.disk.num_read += 1

    def _start_store(self, order: StoreOrder) -> None:
        if self._refuses(order):
            return
        sources = []
        for block, slot in zip(order.blocks, order.slots, strict=True):
            source = self.vram.get(int(block))
            if source is None or (None in source.values and not self.keeps_tails):
                raise OracleError(f"store {order.transfer_id}: block {block} is not full yet")
            sources.append(source)
            if self.num_ready_slots is not None and slot >= self.num_ready_slots:
                raise OracleError(f"store {order.transfer_id}: slot {slot} is not there yet")
            self.dram[int(slot)] = Content(-1, [None])
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

    def _submit(self, order: Order, transfer: _Transfer) -> None:
        if order.transfer_id in self.pending:
            raise OracleError(f"transfer id {order.transfer_id} is used twice")
        self.pending[order.transfer_id] = transfer

    def _slot(self, order: LoadOrder | WriteOrder, slot: int) -> Content:
        content = self.dram.get(slot)
        if (
            content is None
            or content.group < 0
            or (None in content.values and not self.keeps_tails)
        ):
            raise OracleError(f"{order.transfer_id}: slot {slot} holds no finished store")
        return content

    def _note(self, transfer: _Transfer, outcome: TransferOutcome) -> None:
        order = transfer.order
        if order.transfer_id in self._spoilt:
            self._spoilt.discard(order.transfer_id)
            outcome = TransferOutcome(num_failed=1, reasons=("stale",))
            if isinstance(order, LoadOrder):
                self._failed_loads.add(order.request_id)
                self._invalid_blocks.update(int(block) for block in order.blocks)
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
                tokens, len(tokens), tables, new.num_computed_tokens, self.weights
            )
        cached = step.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request = self._requests[request_id]
            told = cached.num_computed_tokens[i]
            if request_id in cached.resumed_req_ids:
                request.num_computed = told
                request.drafts.clear()
            else:  # under asynchronous scheduling it counts drafts that were not accepted
                request.num_computed = min(request.num_computed, told)
            request.truncate(request.num_prompt_tokens + cached.num_output_tokens[i])
            new_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                request.tables = [list(ids) for ids in new_ids]
                request.states.clear()
                if request.weights != self.weights:  # all of it is computed again
                    request.weights = self.weights
                    request.chain.clear()
            elif new_ids is not None:
                for table, ids in zip(request.tables, new_ids, strict=True):
                    table.extend(ids)

    def _forward(self, request_id: str, num_tokens: int, drafts: Sequence[int]) -> list[int]:
        """`drafts` stand behind the known tokens, with KV like any; what follows the first that the
        model would not have said is wrong, and states do not go on from it. -1 stands for what was
        guessed here; of a request that has just come nothing was."""
        request = self._requests[request_id]
        start, end = request.num_computed, request.num_computed + num_tokens
        if -1 in drafts:
            drafts = (request.drafts + [_WRONG] * len(drafts))[: len(drafts)]
        request.tokens += drafts
        extend_chain(request.chain, request.tokens[len(request.chain) : end], self.weights)
        sampled, stop = [], end - len(drafts)
        if end == len(request.tokens):
            sampled.append(next_token(request.chain, stop))
            while stop < end and request.tokens[stop] == sampled[-1]:
                stop += 1
                sampled.append(next_token(request.chain, stop))
        for group in self.groups:
            if group.kind == STATE:
                self._step_state(request_id, group, (start, end - len(drafts), stop), end)
                continue
            self._check(request_id, group, _first_read(group, start), start)
            self._write(request_id, group, start, end)
        request.num_computed = stop
        if sampled:
            request.truncate(stop)
            request.tokens.append(sampled[-1])
            request.drafts = self._guess(request)
            self.num_drafted += len(drafts)
            self.num_accepted += len(sampled) - 1
        return sampled

    def _guess(self, request: _Request) -> list[int]:
        """What the model will say next; how many are right changes from step to step."""
        chain, guessed = request.chain.copy(), request.tokens[-1:]
        for _ in range(self.num_drafts):
            extend_chain(chain, guessed[-1:], self.weights)
            guessed.append(next_token(chain, len(chain)))
        num_right = len(request.tokens) % (self.num_drafts + 1)
        return guessed[1 : 1 + num_right] + [_WRONG] * (self.num_drafts - num_right)

    def take_drafts(self) -> dict[str, list[int]]:
        """Return what was guessed behind each sampled token."""
        return {key: list(each.drafts) for key, each in self._requests.items() if each.drafts}

    def _step_state(
        self, request_id: str, group: KvGroup, told: tuple[int, int, int], end: int
    ) -> None:
        """Go on from one state to the next, as v1/worker/mamba_utils.py does in mode `align`.

        `told`: tokens computed before the step, known without drafts, and accepted after it; `end`:
        all that it computes. The running state lies in the column of `end`, the state after each
        draft in one of its own behind that. Once it is known which are accepted, the state at a
        block's end that they passed is copied to its column; nothing else leaves one for good.
        """
        start, known, accepted = told
        request, size = self._requests[request_id], group.block_size
        column, ahead = request.states.get(group.index, ((start - 1) // size, 0))
        if start:  # read from there, or copied from there to where the step begins
            self._compare(request_id, group, column + ahead, slice(0, 1), start - 1, start)
        column = -(-end // size) - 1
        for i in range(known, end + 1):
            self._keep_state(request_id, group, column + i - known, i)
        ahead, passed = accepted - known, accepted // size * size
        if passed >= known:
            wrong = self.spoils_drafted_states and end > known
            self._keep_state(request_id, group, passed // size - 1, passed - wrong)
            ahead = 0 if passed // size - 1 == column else ahead
        request.states[group.index] = column, ahead

    def _keep_state(self, request_id: str, group: KvGroup, column: int, num_tokens: int) -> None:
        request = self._requests[request_id]
        block = request.tables[group.index][column]
        self._content(request_id, block, group, 1).values[0] = request.chain[num_tokens - 1]

    def _check(self, request_id: str, group: KvGroup, first: int, end: int) -> None:
        """Compare what attention reads, positions first to end, with what must be there."""
        size = group.block_size
        while first < end:
            index, offset = divmod(first, size)
            stop = min(end, (index + 1) * size)
            self._compare(
                request_id, group, index, slice(offset, offset + stop - first), first, stop
            )
            first = stop

    def _compare(
        self, request_id: str, group: KvGroup, index: int, part: slice, first: int, stop: int
    ) -> None:
        """Raise unless that part of the block at `index` is what positions first to stop left."""
        request = self._requests[request_id]
        block = request.tables[group.index][index]
        content = self.vram.get(block)
        held = content.values[part] if content else None
        if not content or content.group != group.index or held != request.chain[first:stop]:
            raise OracleError(
                f"{request_id} reads wrong KV: group {group.index}, block {block}, positions "
                f"{first} to {stop - 1}; it holds {content and (content.group, held)}"
            )

    def _write(self, request_id: str, group: KvGroup, first: int, end: int) -> None:
        request, size = self._requests[request_id], group.block_size
        while first < end:
            index, offset = divmod(first, size)
            stop = min(end, (index + 1) * size)
            block = request.tables[group.index][index]
            content = self._content(request_id, block, group, size)
            content.values[offset : offset + stop - first] = request.chain[first:stop]
            first = stop

    def _content(self, request_id: str, block: int, group: KvGroup, size: int) -> Content:
        """What a block is written into, of this group from now on."""
        if not block:
            raise OracleError(f"{request_id} writes to the null block in group {group.index}")
        content = self.vram.get(block)
        if content is None or content.group != group.index:
            content = self.vram[block] = Content(group.index, [None] * size)
        return content


def _first_read(group: KvGroup, start: int) -> int:
    """The first position that the token after `start` ones attends to."""
    if group.kind == FULL or group.window is None:
        return 0
    if group.kind == CHUNKED:
        return start // group.window * group.window
    return max(0, start - group.window + 1)


def _connector_metadata(report: WorkerReport) -> Any:
    from continuum_connector.connector import WorkerMetadata

    return WorkerMetadata(report)
