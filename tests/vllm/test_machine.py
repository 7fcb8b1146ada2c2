"""A state machine over the real scheduler: whatever happens in whatever order, books close.

Each rule is something that clients, time, copies or operators do. After each one every
block, pin, slot and transfer is accounted for, and the oracle has compared all KV that was
read. In the end everything has finished with the model's own output and nothing is held.

MACHINE_EXAMPLES=2000 makes a long run of it; MACHINE_SHRINK=1 makes a failure short, in minutes.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from bench.sim import versions
from tests.vllm import tiering
from tests.vllm.harness import Engine, prompt
from tests.vllm.tiering import BLOCK, reference, tiered

NUM_EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "60"))
SHRINKS = "MACHINE_SHRINK" in os.environ
PROGRAMS = st.sampled_from([None, "a", "b", "c", "d"])
OUTPUTS = st.sampled_from([1, 5, 17, 33])
STEPS = st.sampled_from([0, 1, 3, 40])
RARELY = st.integers(0, 3).map(lambda dice: dice == 3)
TOOLS = st.sampled_from([None, None, "fast", "slow"])
# Prefill (base, per token, pair, decode, context) and load (latency, per block) in seconds, under
# which `adaptive` pins and stores, pins without a store, stores without a pin, keeps nothing.
COSTS: dict[str, Any] = {
    "both": {"prefill": [0.01, 1e-2, 0.0, 0.0, 0.0], "load": [0.01, 1e-3]},
    "pins": {"prefill": [0.01, 1e-2, 0.0, 0.0, 0.0], "load": [9.0, 1.0]},
    "stores": {"prefill": [0.01, 1e-2, 0.0, 0.0, 0.0], "load": [0.0, 1e-9]},
    "nothing": {"prefill": [0.0, 1e-12, 0.0, 0.0, 0.0], "load": [0.0, 1.0]},
}


class Machine(RuleBasedStateMachine):
    """Programs on one engine. `done` are requests whose next turn may come."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine = None  # type: ignore[assignment]
        self.done: list[str] = []
        self.aborted: set[str] = set()

    @initialize(
        is_async=st.booleans(),
        groups=st.sampled_from(["full", "hybrid"] if versions.CAN_FAIL_REQUESTS else ["full"]),
        num_blocks=st.sampled_from([30, 60, 150]),
        num_slots=st.sampled_from([400, 400, 40, 7, 0]),
        world_size=st.sampled_from([1, 1, 2]),
        held=st.booleans(),
        order=st.booleans(),
        fraction=st.sampled_from([0.3, 0.9]),
        policy=st.sampled_from(["fcfs", "priority"]),
        costs=st.sampled_from([None, *COSTS]),
        max_wait_s=st.sampled_from([0.0, 0.05, 1.0]),
    )
    def start(
        self, is_async: bool, groups: str, num_blocks: int, num_slots: int, held: bool, **kw: Any
    ) -> None:
        config = {"order": kw["order"], "max_pinned_fraction": kw["fraction"]}
        config |= {"policy": "adaptive" if kw["costs"] else "fixed_ttl", "ttl_s": 0.5}
        self.engine = tiered(
            num_blocks,
            num_slots,
            groups=groups,
            async_scheduling=is_async,
            hold_transfers=held,
            policy=kw["policy"],
            world_size=kw["world_size"],
            max_num_batched_tokens=128,
            config=config | {"max_wait_s": kw["max_wait_s"], "load_timeout_s": 2.0},
        )
        if kw["costs"]:
            assert self.engine.connector.costs.restore(COSTS[kw["costs"]]) == 0
        # What certainly fits when nothing else is there.
        self.capacity = (num_blocks - 4) // len(self.engine.windows) * BLOCK

    # -- clients -----------------------------------------------------------------------
    def add(
        self, tokens: list[int], num_outputs: int, num_steps: int, *who: Any, **said: Any
    ) -> None:
        """Queue a request of `who` (a program or None), cut to what fits, and take some steps."""
        tokens = tokens[: self.capacity - num_outputs]
        request_id = f"r{len(self.engine.requests)}"
        tool = said.pop("tool", None)
        hints = {"continuum": {"tools": [tool]}} if tool else None
        self.engine.add(
            request_id, tokens, num_outputs, program=who[0], kv_transfer_params=hints, **said
        )
        self.step(num_steps)

    @rule(
        program=PROGRAMS,
        length=st.integers(1, 200),
        seed=st.integers(0, 2),
        num_outputs=OUTPUTS,
        num_steps=STEPS,
        tool=TOOLS,
    )
    def arrive(self, program: str | None, length: int, seed: int, tool: Any, **then: int) -> None:
        self.add(prompt(length, seed), then["num_outputs"], then["num_steps"], program, tool=tool)

    @precondition(lambda self: self.done)
    @rule(
        data=st.data(),
        program=st.sampled_from(["same", "same", "a", "b", None]),
        num_new=st.integers(0, 60),
        num_cut=st.sampled_from([0, 0, 0, 1, 20, 70]),
        final=st.sampled_from([None, None, False, True]),
        tool=TOOLS,
        num_outputs=OUTPUTS,
        num_steps=STEPS,
    )
    def come_back(
        self, data: Any, program: str | None, num_new: int, num_cut: int, **then: Any
    ) -> None:
        """The next turn of a program, a fork, or a turn that diverges before the end."""
        before = data.draw(st.sampled_from(self.done[-4:]))
        self.return_from(before, program, num_new, num_cut, **then)

    def return_from(
        self, before: str, program: str | None, num_new: int, num_cut: int, **then: Any
    ) -> None:
        tokens = self.engine.next_prompt(before, 0)
        tokens = tokens[: max(1, len(tokens) - num_cut)] + prompt(num_new, seed=num_cut + 5)
        if program == "same":
            program = (self.engine.requests[before].sampling_params.extra_args or {}).get("job_id")
        num_outputs, num_steps = then.pop("num_outputs"), then.pop("num_steps")
        self.add(tokens, num_outputs, num_steps, program, **then)

    @precondition(lambda self: self.done)
    @rule(data=st.data(), num_new=st.integers(0, 60), num_outputs=OUTPUTS, num_steps=STEPS)
    def come_back_late(self, data: Any, num_new: int, **then: int) -> None:
        """A turn whose KV left VRAM while its tool ran: what there is of it is in DRAM."""
        before = data.draw(
            st.sampled_from([i for i in self.done if i not in self.aborted] or ["r0"])
        )
        self.wait(0.6)  # the pin has expired by then
        self.step(40)
        self.engine.settle()
        self.press(1, 40, final=True)
        self.return_from(before, "same", num_new, 0, **then)

    @rule(num_outputs=OUTPUTS, num_steps=STEPS, final=st.booleans())
    def press(self, num_outputs: int, num_steps: int, final: bool) -> None:
        """A request as large as fits: everything else must give way to it."""
        seed = 10 + len(self.engine.requests)
        self.add(prompt(self.capacity, seed), num_outputs, num_steps, None, final=final)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data(), really=RARELY)
    def abort(self, data: Any, really: bool) -> None:
        if not really:
            return
        request_id = data.draw(st.sampled_from(self.unfinished()))
        self.aborted.add(request_id)
        self.engine.abort(request_id)

    # -- time --------------------------------------------------------------------------
    @rule(num_steps=STEPS)
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()
            tiering.check(self.engine)

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0]))
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

    # -- operators ---------------------------------------------------------------------
    @precondition(lambda self: self.done)
    @rule(really=RARELY)
    def reset(self, really: bool) -> None:
        if not really:
            return
        done = self.engine.reset_prefix_cache()
        # What is held now is held by requests, or by the step in flight: not by us.
        assert not self.engine.foreign_refs()
        assert done == (self.engine.usage() == 0)

    @rule(is_on=st.booleans(), really=RARELY)
    def switch(self, is_on: bool, really: bool) -> None:
        if really:
            self.engine.connector.switch.is_on = is_on

    @precondition(lambda self: not self.engine.worker._report.tier_down)
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

    @invariant()
    def books_close(self) -> None:
        if self.engine is None:
            return
        self.done = [i for i, r in self.engine.requests.items() if r.is_finished()]
        tiering.check(self.engine)

    def teardown(self) -> None:
        if self.engine is None:
            return
        tiering.hold(self.engine, False)
        self.engine.run_until_idle()
        self.engine.clock.advance(100.0)
        self.engine.connector.has_pending_push_work()
        self.engine.run_until_idle()
        tiering.assert_drained(self.engine)
        for request_id, request in self.engine.requests.items():
            outputs = self.engine.outputs[request_id]
            assert outputs == reference(list(request.prompt_token_ids), len(outputs))
            if request_id not in self.aborted:
                assert len(outputs) == request.max_tokens
        assert set(self.engine.finish_reasons.values()) <= {"length", "abort"}


Machine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=25,
    deadline=None,
    phases=[phase for phase in Phase if SHRINKS or phase not in (Phase.shrink, Phase.explain)],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestMachine = Machine.TestCase
