"""A state machine over the real scheduler: whatever happens in whatever order, books close.

Each rule is something that clients, time, copies or operators do. After each one every
block, pin, slot and transfer is accounted for, the oracle has compared all KV that was read, nobody
who hears KV events believes in a block that is not there, and somebody has run where somebody
waited. In the end everything has finished with the model's own output and nothing is held.
"""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.core.sched.interface import PauseState

from bench.common.known_costs import know
from continuum_connector.costs import Work
from tests.vllm import tiering
from tests.vllm.drafts import HAS_RIGHT_STATES
from tests.vllm.fake_worker import LoadOrder
from tests.vllm.harness import Engine, adapter_named, prompt
from tests.vllm.machine_draws import (
    ADAPTERS,
    BUS_S,
    COPIES,
    COSTS,
    DISK,
    DRAFTS,
    GROUPS,
    OURS,
    PREFILL_EVERY,
    PROGRAMS,
    RARELY,
    REQUEST,
    SALTS,
    SCHEDULING,
    STEPS,
)
from tests.vllm.subscriber import Subscriber
from tests.vllm.tiering import BLOCK, on_disk, reference, store_all, tiered

# Longer than a batch is in flight, than pins that cannot help are left untried (room.RETRY_STEPS).
MAX_IDLE_STEPS = 20
# Twenty prompts of 2,300 tokens, 16 of them in a step, one prompt after the other: 2,900 steps.
MAX_DRAIN_STEPS = 10_000


class Machine(RuleBasedStateMachine):
    """Programs on one engine. `done` are requests whose next turn may come."""

    num_steps = num_engines = 0  # of all examples so far, for long_machine.py
    num_read = 0  # blocks from disks
    may_have_disk = True  # not below tiers that are not ours

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine = None  # type: ignore[assignment]
        self.subscriber: Subscriber = None  # type: ignore[assignment]
        self.done: list[str] = []
        self.aborted: set[str] = set()
        self.skipping: set[str] = set()
        self.num_idle_steps = self.num_over = 0
        self.weights_at: dict[str, int] = {}  # when each request came

    @initialize(
        groups=GROUPS,
        num_blocks=st.sampled_from([30, 60, 150]),
        num_slots=st.sampled_from([400, 400, 40, 24, 24, 14, 7, 0]),
        costs=st.sampled_from([None, *COSTS]),
        scheduling=SCHEDULING,
        ours=OURS,
        copies=COPIES,
        disk=DISK,
        drafts=DRAFTS,
        bus_s=BUS_S,
        prefill_every=PREFILL_EVERY,
        is_one_program=RARELY,
        stores_all=st.booleans(),
    )
    def start(self, groups: str, num_blocks: int, num_slots: int, costs: Any, **drawn: Any) -> None:
        config = {"policy": "adaptive" if costs else "fixed_ttl", "ttl_s": 0.5}
        max_wait_s = drawn["ours"]["max_wait_s"]
        config |= drawn["ours"]
        del config["max_wait_s"]  # it is no key
        is_wanted = self.may_have_disk and bool(drawn["disk"])
        self.has_disk = is_wanted and groups == "full" and num_slots > 0
        built = drawn["scheduling"] | (drawn["disk"] if self.has_disk else {})
        if self.has_disk or drawn["prefill_every"] > 1:
            # We have no disk below adapters. A prompt that vLLM throttles does not count among its
            # step's adapters, so others take its place, and vLLM's own assertion fails.
            built |= {"max_loras": 0}
        is_right = groups != "state" or HAS_RIGHT_STATES
        if groups != "chunked" and not self.has_disk and is_right:  # vLLM, or we, have not both
            built |= drawn["drafts"]
            if groups == "state" and drawn["drafts"]:  # no draft model has states
                built["draft_group"] = 0
        self.engine = (on_disk if self.has_disk else tiered)(
            *(num_blocks, num_slots),
            skips=False,
            groups=groups,
            config=config,
            publishes=True,
            timeout_s=2.0,
            **built,
        )
        self.engine.connector.side.room._max_wait_s = max_wait_s
        self.subscriber = Subscriber(self.engine)
        for worker in self.engine.workers:
            vars(worker).update(drawn["copies"])
        if costs:
            know(self.engine.connector.costs, COSTS[costs])
            if drawn["stores_all"]:  # or DRAM is seldom full of what returns, and lends nothing
                store_all(self.engine)
        if drawn["bus_s"]:
            taught = self.engine.connector.costs
            taught.step(Work(num_new=100), self.engine.step_s)
            for _ in range(4):
                taught.loaded(5, drawn["bus_s"], drawn["bus_s"])
        self.engine.prefill_every = drawn["prefill_every"]
        self.has_adapters = built["max_loras"] > 0
        self.num_slots = num_slots
        self.is_one_program = drawn["is_one_program"]
        # What certainly fits when nothing else is there.
        self.capacity = self.tokens_in(num_blocks - 4)

    # -- clients -----------------------------------------------------------------------
    def add(self, tokens: list[int], program: str | None, **said: Any) -> None:
        """Queue a request, cut to what fits, and take some steps. `said`: as REQUEST has it."""
        request_id = f"r{len(self.engine.requests)}"
        self.weights_at[request_id] = self.engine.worker.weights
        num_steps, tool, num_outputs = (said.pop(k) for k in ("num_steps", "tool", "max_tokens"))
        hints = {"tools": [tool]} if tool else {}
        if said.pop("skips_cache"):
            self.skipping.add(request_id)
            said["prompt_logprobs"] = 1
        self.engine.add(
            request_id,
            tokens[: self.capacity - num_outputs],
            num_outputs,
            program="one" if program and self.is_one_program else program,
            kv_transfer_params={"continuum": hints} if hints else None,
            **said,
        )
        self.step(num_steps)

    @rule(
        program=PROGRAMS,
        length=st.one_of(st.integers(1, 200), st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1])),
        seed=st.integers(0, 2),
        salt=SALTS,
        adapter=ADAPTERS,
        said=REQUEST,
    )
    def arrive(
        self, program: str | None, length: int, seed: int, salt: Any, adapter: Any, said: Any
    ) -> None:
        lora = adapter_named(adapter) if adapter and self.has_adapters else None
        self.add(prompt(length, seed), program, cache_salt=salt, lora_request=lora, **said)

    @rule(
        number=st.sampled_from([2, 3, 20]),
        length=st.sampled_from([BLOCK, 60, 110]),
        salt=SALTS,
        said=REQUEST,
    )
    def sample(self, number: int, length: int, salt: Any, said: Any) -> None:
        """One prompt several times, each by a program of its own, as a trainer sends it."""
        for _ in range(number):
            name = f"sample{len(self.engine.requests)}"
            self.add(prompt(length, 9), name, cache_salt=salt, **said)

    @precondition(lambda self: self.done)
    @rule(
        data=st.data(),
        program=st.sampled_from(["same", "same", "a", "b", None]),
        num_new=st.integers(0, 60),
        num_cut=st.sampled_from([0, 0, 0, 1, 20, 70]),
        said=REQUEST,
    )
    def come_back(self, data: Any, program: str | None, num_new: int, **then: Any) -> None:
        """The next turn of a program, a fork, or a turn that diverges before the end."""
        before = data.draw(st.sampled_from(self.done[-4:]))
        self.return_from(before, program, num_new, **then)

    @precondition(lambda self: self.unfinished())
    @rule(
        data=st.data(), num_new=st.integers(0, 60), num_cut=st.sampled_from([0, 20]), said=REQUEST
    )
    def overlap(self, data: Any, num_new: int, num_cut: int, said: Any) -> None:
        """A turn of a program comes while an earlier one runs, with what that has so far."""
        before = data.draw(st.sampled_from(self.unfinished()))
        self.return_from(before, "same", num_new, num_cut, said)

    def return_from(
        self, before: str, program: str | None, num_new: int, num_cut: int, said: Any
    ) -> None:
        tokens = self.engine.next_prompt(before, 0)
        tokens = tokens[: max(1, len(tokens) - num_cut)] + prompt(num_new, seed=num_cut + 5)
        program = self.program_of(before) if program == "same" else program
        known = self.engine.requests[before]
        same = {"cache_salt": known.cache_salt, "lora_request": known.lora_request}
        self.add(tokens, program, **same, **said)

    @rule(
        names=st.sampled_from(["ab", "abc", "abcd"]),
        rounds=st.integers(2, 4),
        length=st.sampled_from([60, 110, 170]),
        num_new=st.integers(0, 60),
        said=REQUEST,
    )
    def take_turns(
        self, names: str, rounds: int, length: int, num_new: int, said: dict[str, Any]
    ) -> None:
        """Agents at work: each goes on from its answer, while others run, store and load."""
        said = said | {"final": None, "skips_cache": False}
        last: dict[str, str] = {}
        for name in names * rounds:
            before, last[name] = last.get(name), f"r{len(self.engine.requests)}"
            if before is None:
                self.add(prompt(length, ord(name)), name, **said)
                continue
            self.step(40 if before in self.unfinished() else 0)
            self.return_from(before, name, num_new, 0, said)

    @precondition(lambda self: self.done)
    @rule(
        data=st.data(),
        num_new=st.integers(0, 60),
        num_warm=st.sampled_from([0, 0, 17, 40, 100]),
        held=st.booleans(),
        said=REQUEST,
    )
    def come_back_late(self, data: Any, num_warm: int, held: bool, **then: Any) -> None:
        """A turn whose KV left VRAM while its tool ran: what there is of it is in DRAM, but for
        the first `num_warm` tokens, which another request has computed meanwhile. Its load is
        `held` until somebody ends it."""
        whole = [i for i in self.done if i not in self.aborted] or ["r0"]
        before = data.draw(st.sampled_from(whole))
        tokens, known = self.engine.next_prompt(before, 0), self.engine.requests[before]
        self.wait(0.6)  # the pin has expired by then
        self.step(40)
        self.engine.settle()
        self.press(1, 40, final=True)
        if num_warm:
            same = {"cache_salt": known.cache_salt, "lora_request": known.lora_request}
            self.send(tokens[:num_warm], 1, 3, final=True, **same)
        self.hold_copies(held)
        self.return_from(before, "same", num_cut=0, **then)

    @precondition(lambda self: self.has_disk and self.engine.connector.is_on)
    @rule(
        length=st.sampled_from([60, 110, 170]),
        num_new=st.integers(0, 60),
        held=st.booleans(),
        said=REQUEST,
    )
    def come_back_from_disk(self, length: int, num_new: int, held: bool, said: Any) -> None:
        """A turn whose KV has left DRAM, too: others have filled that meanwhile."""
        self.hold_copies(False)
        before = f"r{len(self.engine.requests)}"
        quietly = {"tool": "slow", "skips_cache": False, "num_steps": 40, "max_tokens": 1}
        num_left, tokens = self.num_slots, prompt(length, len(self.engine.requests))
        while num_left > 0:
            self.add(tokens, f"full{len(self.engine.requests)}", **quietly)
            self.wait(3.0)
            self.engine.idle(1.0)  # it is written meanwhile
            num_left -= len(tokens) // BLOCK
            tokens = prompt(300, 100 + len(self.engine.requests))
        self.press(1, 40, final=True)
        for worker in self.engine.workers:
            worker.disk.is_held = held
        self.return_from(before, "same", num_new, 0, said)

    @rule(num_outputs=st.sampled_from([1, 5, 17, 33]), num_steps=STEPS, final=st.booleans())
    def press(self, num_outputs: int, num_steps: int, final: bool) -> None:
        """A request as large as fits: everything else must give way to it."""
        tokens = prompt(self.capacity, 10 + len(self.engine.requests))
        self.send(tokens, num_outputs, num_steps, final=final)

    @precondition(lambda self: self.done)
    @rule(data=st.data(), num_left=st.integers(1, 4), num_spare=st.integers(0, 15))
    def outgrow(self, data: Any, num_left: int, num_spare: int) -> None:
        """A new program's prompt, chunk by chunk, leaves `num_left` blocks; a program that came
        before it takes those but for `num_spare` tokens, and goes on: the two outgrow the pool."""
        program = self.program_of(data.draw(st.sampled_from(self.done[-4:]))) or "a"
        new = f"new{len(self.engine.requests)}"
        quietly = {"tool": None, "skips_cache": False, "num_steps": 1}
        tokens = prompt(max(1, self.num_free() - num_left * BLOCK), len(self.engine.requests))
        self.add(tokens, new, max_tokens=5, priority=1, **quietly)
        tokens = prompt(num_left * BLOCK - num_spare, 5000 + len(self.engine.requests))
        self.add(tokens, program, max_tokens=33, **quietly)
        self.step(40)

    @precondition(lambda self: self.loading())
    @rule(num_left=st.integers(0, 3))
    def fail_loads_in_a_full_pool(self, num_left: int) -> None:
        """What a load left of the pool another program's pin takes, and then the load fails."""
        tokens = prompt(max(1, self.num_free() - num_left * BLOCK), 10 + len(self.engine.requests))
        quietly = {"tool": None, "skips_cache": False, "num_steps": 3}
        self.add(tokens, f"new{len(self.engine.requests)}", max_tokens=1, **quietly)
        for rank, transfer_id in self.loading():
            self.engine.workers[rank].fail(transfer_id)
        self.step(40)

    def send(self, tokens: list[int], num_outputs: int, num_steps: int, **said: Any) -> None:
        """A request of nobody's that says nothing."""
        said |= {"max_tokens": num_outputs, "num_steps": num_steps}
        self.add(tokens, None, tool=None, skips_cache=False, **said)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data(), really=RARELY)
    def abort(self, data: Any, really: bool) -> None:
        """A client goes away, or a stop string came; every phase is as likely as another."""
        if not really:
            return
        phases: dict[str, list[str]] = {}
        for request_id in self.unfinished():
            request = self.engine.requests[request_id]
            phase = f"{request.status.name} {bool(request.num_computed_tokens)}"
            phases.setdefault(phase, []).append(request_id)
        request_id = data.draw(st.sampled_from(phases[data.draw(st.sampled_from(sorted(phases)))]))
        self.aborted.add(request_id)
        self.engine.abort(request_id)

    # -- time --------------------------------------------------------------------------
    @rule(num_steps=STEPS)
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()
            tiering.check(self.engine)
            self.stands_still()
        if num_steps:  # vLLM publishes with a step; until then nobody has heard of a reset
            self.subscriber.check()

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.6, 0.6, 3.0, 3.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.engine.clock.advance(seconds)

    # -- copies ------------------------------------------------------------------------
    @precondition(lambda self: self.pending())
    @rule(data=st.data(), ends=st.sampled_from(["settle", "settle", "fail"]))
    def end_copy(self, data: Any, ends: str) -> None:
        rank, transfer_id = data.draw(st.sampled_from(self.pending()))
        getattr(self.engine.workers[rank], ends)(transfer_id)

    @rule(held=st.booleans())
    def hold_copies(self, held: bool) -> None:
        tiering.hold(self.engine, held)

    @precondition(lambda self: self.engine.worker.num_ready_slots not in (None, self.num_slots))
    @rule(data=st.data(), num_new=st.sampled_from([1, 20, 400]))
    def grow(self, data: Any, num_new: int) -> None:
        """The pool of a rank comes along."""
        worker = data.draw(st.sampled_from(self.engine.workers))
        worker.report_ready(min(self.num_slots, worker.num_ready_slots + num_new))

    # -- the disk ----------------------------------------------------------------------
    @precondition(lambda self: self.has_disk)
    @rule(
        data=st.data(),
        fails_with=st.sampled_from(["", "", "", "eio", "enospc", "corrupt", "missing"]),
        after=st.integers(0, 3),
        is_held=st.booleans(),
        really=RARELY,
    )
    def mistreat_disk(
        self, data: Any, fails_with: str, after: int, is_held: bool, really: bool
    ) -> None:
        """One rank's disk fails, is slow, or loses a slot that the others keep."""
        disk = data.draw(st.sampled_from(self.engine.workers)).disk
        disk.is_held, disk.after = is_held, after
        disk.fails_with = disk.refuses_with = fails_with if really else ""
        if really and disk.slots:
            del disk.slots[data.draw(st.sampled_from(sorted(disk.slots)))]

    # -- operators ---------------------------------------------------------------------
    @precondition(lambda self: self.done)
    @rule(really=RARELY, resets_connector=st.booleans())
    def reset(self, really: bool, resets_connector: bool) -> None:
        if not really:
            return
        done = self.engine.reset_prefix_cache(reset_connector=resets_connector)
        # What is used now requests have, or the step in flight, or loads that are not over yet.
        in_use = len(self.engine.pool.blocks) - 1 - self.engine.free_blocks()
        assert done == (in_use == len(self.engine.foreign_refs()))

    @precondition(lambda self: self.done)
    @rule(really=RARELY, resets_connector=st.booleans(), is_seen=st.booleans())
    def update_weights(self, really: bool, resets_connector: bool, is_seen: bool) -> None:
        """Whatever runs begins anew, with other weights: KV of before is wrong from here on.
        `is_seen`: the worker half tells of it, a step later."""
        if not really:
            return
        while self.engine._queue:  # vLLM's callers pause first: no step is under way
            self.engine._update()
        for worker in self.engine.workers:
            worker.change_weights("update_weights" if is_seen else "")
        assert self.engine.reset_prefix_cache(
            reset_running_requests=True, reset_connector=resets_connector
        )

    @precondition(lambda self: self.num_slots and not any(w.is_down for w in self.engine.workers))
    @rule(really=RARELY, num_slots=st.sampled_from([0, 5, 400]))
    def sleep(self, really: bool, num_slots: int) -> None:
        """And wake: DRAM was somebody else's meanwhile, and so much of it is there again."""
        if not really:
            return
        while self.engine._queue:
            self.engine._update()
        assert self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        for worker in self.engine.workers:
            worker.give_back()
            worker.report_ready(min(self.num_slots, num_slots))

    @precondition(lambda self: self.done)
    @rule(state=st.sampled_from(["UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"]), really=RARELY)
    def pause(self, state: str, really: bool) -> None:
        """Nobody new begins, or nobody runs on, until an operator resumes."""
        if really:
            self.engine.scheduler.set_pause_state(PauseState[state])

    def check_outputs(self, tokens: list[int], outputs: list[int], weights: int) -> None:
        """Each token is what the weights of some time say, none of them older than before."""
        while outputs:
            said = reference(tokens, len(outputs), weights)
            num_same = sum(
                1 for _ in itertools.takewhile(_are_equal, zip(said, outputs, strict=True))
            )
            tokens, outputs, weights = tokens + outputs[:num_same], outputs[num_same:], weights + 1
            assert weights <= self.engine.worker.weights + 1, "nobody's answer"

    @rule(is_on=st.booleans(), really=RARELY)
    def switch(self, is_on: bool, really: bool) -> None:
        if really:
            self.engine.connector.switch.is_on = is_on

    @precondition(lambda self: not self.engine.workers[-1].is_down)
    @rule(dice=st.integers(0, 40))
    def lose_tier(self, dice: int) -> None:
        if dice == 17:
            self.engine.workers[-1].report_tier_down("the host memory is gone")

    # -- what must be true -------------------------------------------------------------
    def unfinished(self) -> list[str]:
        requests = self.engine.requests
        return [i for i, r in requests.items() if not r.is_finished() and i not in self.aborted]

    def pending(self) -> list[tuple[int, int]]:
        return [(rank, i) for rank, w in enumerate(self.engine.workers) for i in sorted(w.pending)]

    def loading(self) -> list[tuple[int, int]]:
        workers = self.engine.workers
        return [
            each
            for each in self.pending()
            if isinstance(workers[each[0]].pending[each[1]].order, LoadOrder)
        ]

    def program_of(self, request_id: str) -> str | None:
        """The name its client gave."""
        said = self.engine.requests[request_id].sampling_params.extra_args or {}
        return said.get("job_id")

    def num_free(self) -> int:
        """Tokens for which there is room now, pins left alone."""
        return self.tokens_in(self.engine.free_blocks())

    def tokens_in(self, num_blocks: int) -> int:
        """How many tokens of one request so many blocks hold, whole in each group."""
        per_token = sum(BLOCK // 2 / group.block_size for group in self.engine.groups)
        return int(num_blocks / (2 * per_token)) * BLOCK

    def stands_still(self) -> bool:
        """Never True. Law 1: whatever pins and estimates say, somebody runs soon if nobody does,
        somebody waits and no copy is under way that it may wait for. Whoever has one token to say
        runs and ends within a step."""
        scheduler = self.engine.scheduler
        stands = bool(scheduler.get_num_unfinished_requests()) and not scheduler.running
        stands = stands and not len(self.engine.connector.side.traffic.ledger)
        num_over, self.num_over = self.num_over, len(self.engine.finish_reasons)
        stands = stands and num_over == self.num_over
        self.num_idle_steps = self.num_idle_steps + 1 if stands else 0
        assert self.num_idle_steps <= MAX_IDLE_STEPS, f"stands still: {self.engine.describe()}"
        return False

    @invariant()
    def books_close(self) -> None:
        if self.engine is None:
            return
        self.done = [i for i, r in self.engine.requests.items() if r.is_finished()]
        tiering.check(self.engine)

    def teardown(self) -> None:
        if self.engine is None:
            return
        try:
            self.drain()
        finally:
            Machine.num_steps += self.engine.num_steps
            Machine.num_engines += 1
            Machine.num_read += sum(worker.disk.num_read for worker in self.engine.workers)

    def drain(self) -> None:
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        tiering.hold(self.engine, False)
        for worker in self.engine.workers:
            worker.disk.is_held = False
        self.engine.run_until_idle(MAX_DRAIN_STEPS, until=self.stands_still)
        self.engine.clock.advance(100.0)
        self.engine.connector.has_pending_push_work()
        self.engine.run_until_idle()
        tiering.come_to_rest(self.engine)
        tiering.assert_drained(self.engine)
        for request_id, request in self.engine.requests.items():
            outputs = self.engine.outputs[request_id]
            self.check_outputs(list(request.prompt_token_ids), outputs, self.weights_at[request_id])
            if request_id not in self.aborted:
                assert len(outputs) == request.max_tokens
            if request_id in self.skipping:
                assert self.engine.cached.get(request_id, (0, 0)) == (0, 0), "read the cache"
        assert set(self.engine.finish_reasons.values()) <= {"length", "abort"}


def _are_equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def run_briefly() -> None:
    """A few short runs: of what a test has put in the place of something."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=25,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
