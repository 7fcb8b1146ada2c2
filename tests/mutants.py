"""Faults, some per room, and the test that must see each.

    python -m tests.mutants              put each in, in a copy of the tree, and run its test
    python -m tests.mutants pins dram    those whose name begins so

Run it before and after code moves: a fault that no test sees is a net with a hole. Exit status 1 if
one survives, or if its place is no longer there. Four minutes of a core.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("continuum_connector", "tests", "bench", "conftest.py", "pyproject.toml")
# The checkout is installed so that Python imports it wherever it is started; here the copy counts.
RUN = """
import sys
sys.meta_path = [each for each in sys.meta_path if "editable" not in type(each).__module__]
sys.path.insert(0, ".")
import continuum_connector, pytest
assert continuum_connector.__file__.startswith(sys.argv[1]), continuum_connector.__file__
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", *sys.argv[2:]]))
"""
FAILED = 1  # pytest's status


class Mutant(NamedTuple):
    """`new` instead of `old`, which stands once in the file, and what must then be red."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "pins: one that has expired is kept",
        "scheduler/pins.py",
        "            if pin.deadline > now:\n",
        "            if pin.deadline > now - 1.0:\n",
        "tests/vllm/test_pins.py",
    ),
    Mutant(
        "pins: a trial that failed gives up its blocks",
        "scheduler/pins.py",
        "                self._holds.restore(pin.hold)\n            self._hopeless = state\n",
        "                pass\n            self._hopeless = state\n",
        "tests/vllm/test_pressure.py",
    ),
    Mutant(
        "calls that are over: what a sampled prompt has is taken for what several begin with",
        "scheduler/decisions.py",
        "        if 0 < num_found < bisect_right(blocks.ends, request.num_prompt_tokens - 1):\n",
        "        if num_found:\n",
        "tests/vllm/test_equal_prompts.py",
    ),
    Mutant(
        "calls that are over: each adds to what its name's own turns left",
        "scheduler/decisions.py",
        "        if turn.number == 1 and isinstance(choice.decision, Free) and",
        "        if isinstance(choice.decision, Free) and",
        "tests/vllm/test_equal_prompts.py",
    ),
    Mutant(
        "pins: those that freed too little end beside the one that sufficed",
        "scheduler/pins.py",
        "                self._holds.restore(pin.hold)\n                spared.append(pin)\n",
        "                pass\n",
        "tests/unit/test_room.py",
    ),
    Mutant(
        "pins: those worth less than a turn's wait stay beside the one that sufficed",
        "scheduler/pins.py",
        "            if pin.rank[0] > price and self._pool",
        "            if self._pool",
        "tests/unit/test_room.py",
    ),
    Mutant(
        "disk: DRAM gives up first what a small disk loses before it is wanted",
        "scheduler/tiers/disk.py",
        "        return not self.index.outlasts(",
        "        return self.index.num_slots < 0 and not self.index.outlasts(",
        "tests/vllm/test_disk_small_dram.py",
    ),
    Mutant(
        "disk: who is done takes what others share",
        "scheduler/tiers/disk_index.py",
        "        numbers = numbers[self.claims.num_of[numbers] == 0]\n",
        "",
        "tests/vllm/test_disk.py",
    ),
    Mutant(
        "below: KV of older weights comes up",
        "scheduler/tiers/dram.py",
        "        over = self.below.reset() + self.traffic.abandon(self._owner)\n",
        "        over = self.traffic.abandon(self._owner)\n",
        "tests/vllm/test_below.py",
    ),
    Mutant(
        "below: who waits for what comes up is admitted without",
        "scheduler/waits.py",
        "        turn.awaits_below = self._below.awaits(turn.request_id, now)\n",
        "        turn.awaits_below = False\n",
        "tests/vllm/test_below.py",
    ),
    Mutant(
        "loads: turns load that have no place to run",
        "scheduler/waits.py",
        "        if self._turns.num_with_kv + num_turns >= self._max_with_kv:\n",
        "        if False:\n",
        "tests/vllm/test_bus.py",
    ),
    Mutant(
        "loads: who wants what comes already loads it, too",
        "scheduler/waits.py",
        "        turn.awaits_load = first if self._tier.is_coming(first) else None\n",
        "        turn.awaits_load = None\n",
        "tests/vllm/test_same_load.py",
    ),
    Mutant(
        "loads: whoever waits for one waits on when the tier is down",
        "scheduler/tiers/dram.py",
        "        return self.is_up and block_hash in self._brings.values()\n",
        "        return block_hash in self._brings.values()\n",
        "tests/vllm/test_same_load.py",
    ),
    Mutant(
        "turns: an interrupted answer leaves nothing, whoever came back to one",
        "scheduler/scheduler.py",
        "        if is_cut and self._interruptions.are_resumed(program):\n",
        "        if False:\n",
        "tests/vllm/test_side_requests.py",
    ),
    Mutant(
        "pins: a patient turn takes whatever it likes",
        "scheduler/pins.py",
        "        return self.worth_now(pin) <= self.price\n",
        "        return True\n",
        "tests/unit/test_room.py",
    ),
    Mutant(
        "pins: who calls a tool is taken for one that only asked",
        "scheduler/turns.py",
        "        return gap is not None and gap.asked.ending is not Ending.CALLS\n",
        "        return gap is not None\n",
        "tests/vllm/test_decider.py",
    ),
    Mutant(
        "pins: turns wait for the room of a call that is over",
        "scheduler/decisions.py",
        "        if not is_awaited or self.away.is_question(pin.program, pin.started):\n",
        "        if not is_awaited:\n",
        "tests/vllm/test_decider.py",
    ),
    Mutant(
        "holds: a block that two pins share counts twice",
        "scheduler/holds.py",
        "        self.num_blocks += len(_become(self._refs, hold.ids, 1, 1))\n",
        "        self.num_blocks += len(hold.ids) + 0 * len(_become(self._refs, hold.ids, 1, 1))\n",
        "tests/vllm/test_pins.py",
    ),
    Mutant(
        "dram: where a prompt departs from what DRAM has, vLLM keeps no state",
        "scheduler/tiers/dram.py",
        "        if known.full > known.hit:\n",
        "        if known.full < known.hit:\n",
        "tests/vllm/test_states.py",
    ),
    Mutant(
        "kv_groups: a chain is gone on from though vLLM forgot a block of it",
        "scheduler/kv_groups.py",
        "        return first == known.blocks and tuple(map(self._key_of, first)) == known.keys\n",
        "        return first == known.blocks\n",
        "tests/unit/test_kv_groups.py",
    ),
    Mutant(
        "turns: blocks of a turn that is loading are taken from vLLM",
        "scheduler/turns.py",
        "BY_ITSELF = (TurnEnd.STOP, TurnEnd.LENGTH)",
        "BY_ITSELF = (*TurnEnd,)",
        "tests/vllm/test_turn_ends.py",
    ),
    Mutant(
        "scheduler: turns with older KV give their blocks to us",
        "scheduler/scheduler.py",
        "        is_mixed = self._epochs.found_older is not None\n",
        "        is_mixed = False\n",
        "tests/vllm/test_epochs.py",
    ),
    Mutant(
        "index: a chain's slots are taken for its own after they were lost",
        "scheduler/tiers/index.py",
        "        if not 0 < num <= len(keys) or not self._table.are_there(tickets).all():\n",
        "        if not 0 < num <= len(keys):\n",
        "tests/unit/test_host_index.py",
    ),
    Mutant(
        "queue: a skipped turn is not put back where it may be hidden",
        "scheduler/queue.py",
        "        if self._hides is not None and self._hides(request):\n",
        "        if self._hides is not None and not self._hides(request):\n",
        "tests/vllm/test_disk_waiting.py",
    ),
    Mutant(
        "epochs: KV of older weights is found in DRAM",
        "scheduler/epochs.py",
        "        for transfer in self._tier.reset():\n",
        "        for transfer in ():\n",
        "tests/vllm/test_epochs.py",
    ),
    Mutant(
        "epochs: a turn on older KV counts as new",
        "scheduler/epochs.py",
        "        return self._vram_since if num_tokens else self.number\n",
        "        return self.number\n",
        "tests/vllm/test_epochs.py",
    ),
    Mutant(
        "dram: what is still being written is read",
        "scheduler/tiers/index.py",
        "        return self._table.tickets[numbers[: _first(self._table.is_writing[numbers])]]\n",
        "        return self._table.tickets[numbers]\n",
        "tests/unit/test_host_index.py",
    ),
    Mutant(
        "dram: a read slot is used anew",
        "scheduler/tiers/index.py",
        "        self._table.num_readers[numbers_of(tickets)] += 1\n",
        "        pass\n",
        "tests/unit/test_host_index.py",
    ),
    Mutant(
        "dram: the chain that was used last leaves first",
        "scheduler/tiers/chains.py",
        "            self._live.move_to_end(chain)\n",
        "            self._live.move_to_end(chain, last=False)\n",
        "tests/unit/test_host_index_order.py",
    ),
    Mutant(
        "dram: what a busy program no longer knows counts as in use",
        "scheduler/decisions.py",
        "gap is None and is_known and program",
        "gap is None and program",
        "tests/unit/test_dram_worth.py",
    ),
    Mutant(
        "programs: by its blocks a system prompt is the end of any prompt",
        "programs/continuation.py",
        "        is_sure = self.is_prompt_own or text is None or text.goes_on_from(self)\n",
        "        is_sure = True\n",
        "tests/vllm/test_side_requests.py",
    ),
    Mutant(
        "programs: conversations that begin alike are taken for edits again and again",
        "programs/program.py",
        "            self.begin_alike = True\n",
        "",
        "tests/vllm/test_side_requests.py",
    ),
    Mutant(
        "programs: a second edit of a context says that it is no edit",
        "programs/program.py",
        "        if since in self.edited and not is_edit:\n",
        "        if since in self.edited:\n",
        "tests/vllm/test_side_requests.py",
    ),
    Mutant(
        "programs: blocks alone say that what was edited is continued",
        "programs/program.py",
        "(hashes, text) and _is_sure(edited.kept, hashes, text):",
        "(hashes, text):",
        "tests/vllm/test_side_requests.py",
    ),
    Mutant(
        "gaps: who edits in each turn teaches nothing",
        "scheduler/turns.py",
        "        if len(held) > MAX_HELD:\n",
        "        if False:\n",
        "tests/vllm/test_side_requests.py",
    ),
    Mutant(
        "gaps: a pause is learned that may have been none",
        "scheduler/decisions.py",
        "        if since is not None and turn.may_begin_alike:\n",
        "        if False:\n",
        "tests/vllm/test_side_requests.py",
    ),
    Mutant(
        "programs: of two turns that end at once one is forgotten",
        "scheduler/scheduler.py",
        "        while now in turn.program.left:",
        "        while False:",
        "tests/vllm/test_side_requests.py",
    ),
    Mutant(
        "hints: a final that has a system prompt in common ends the program",
        "scheduler/turns.py",
        "kept.goes_on_in(hashes) and text.repeats(kept)",
        "kept.goes_on_in(hashes)",
        "tests/vllm/test_side_requests.py",
    ),
    Mutant(
        "copies: one rank's word is enough",
        "scheduler/tiers/traffic.py",
        "            if transfer.outcome.num_ranks == self._world_size:\n",
        "            if transfer.outcome.num_ranks >= 1:\n",
        "tests/unit/test_transfers.py",
    ),
    Mutant(
        "copies: a failed one is done",
        "scheduler/tiers/traffic.py",
        "            done = outcome.num_failed == 0\n",
        "            done = True\n",
        "tests/vllm/test_tier_failures.py",
    ),
    Mutant(
        "lineage: the same prompt again is the program's next turn",
        "programs/lineage.py",
        "        if end.of_prompt and not self._follow(end, block_hashes) and not has_grown:\n",
        "        if False:\n",
        "tests/unit/test_lineage.py",
    ),
    Mutant(
        "lineage: an example in the prompt is an answer that it repeats",
        "programs/lineage.py",
        "    return tuple(piece for piece in pieces if piece not in before)\n",
        "    return tuple(pieces)\n",
        "tests/unit/test_lineage_tokens.py",
    ),
    Mutant(
        "lineage: a program has one chain",
        "programs/lineage.py",
        "NUM_CHAINS = 4  # of a program\n",
        "NUM_CHAINS = 1\n",
        "tests/unit/test_lineage.py",
    ),
    Mutant(
        "lineage: a shared system prompt names a program",
        "programs/lineage.py",
        "            early = {prompt_end - back for back in EARLY if prompt_end >= back}",
        "            strong |= {prompt_end - back for back in EARLY if prompt_end >= back}",
        "tests/unit/test_lineage.py",
    ),
    Mutant(
        "programs: ids that name requests are believed",
        "programs/program.py",
        "        return self._num_in_vain[sender] > self.NUM_IN_VAIN\n",
        "        return False\n",
        "tests/vllm/test_side_requests.py",
    ),
    Mutant(
        "divergence: what else continues under its id hides a clock",
        "programs/program.py",
        "        if surest > UNKNOWN or (surest and not any",
        "        if surest > 0 or (surest and not any",
        "tests/vllm/test_divergence.py",
    ),
    Mutant(
        "room: an urgent turn waits for pins of less urgent ones",
        "scheduler/pins.py",
        "        if pin.priority > self.priority:\n",
        "        if False:\n",
        "tests/vllm/test_decider.py",
    ),
    Mutant(
        "divergence: every prompt repeats its conversation",
        "programs/continuation.py",
        "        if kept.is_told_again(hashes, num_tokens, text):\n",
        "        if kept.marks:\n",
        "tests/vllm/test_divergence.py",
    ),
    Mutant(
        "identity: an id is the same with another salt",
        "programs/identify.py",
        "    key = program_key(named.namespace + name, salt)\n",
        "    key = program_key(named.namespace + name, None)\n",
        "tests/unit/test_identify.py",
    ),
    Mutant(
        "reader: an answer that was cut off asks for nothing",
        "toolcalls.py",
        "            return parse(text, truncated=truncated and not is_cut, headless=headless)\n",
        "            return parse(text, truncated=False, headless=headless)\n",
        "tests/unit/test_tool_reader.py",
    ),
    Mutant(
        "shadow: a block that stock gave away is still its own",
        "scheduler/stock.py",
        "        return num_tokens if self._has_displaced else max(num_tokens, num_vram_tokens)\n",
        "        return max(num_tokens, num_vram_tokens)\n",
        "tests/vllm/test_stock.py",
    ),
    Mutant(
        "shadow: stock finds the newest of copies",
        "scheduler/stock.py",
        "            stretch, num = copies[0], num_same\n",
        "            stretch, num = copies[-1], num_same\n",
        "tests/vllm/test_stock.py",
    ),
    Mutant(
        "shadow: pins go on while they lose",
        "scheduler/scheduler.py",
        "        if self._heeds_stock and self._balance.lost(num_lost, now):\n",
        "        if False:\n",
        "tests/vllm/test_stock.py",
    ),
    Mutant(
        "shadow: what pins won pays for whatever they lose",
        "scheduler/stock.py",
        "min(max(self._lately(now) + num_tokens, -self._most), 2 * self._most)\n",
        "min(self._lately(now) + num_tokens, 2 * self._most)\n",
        "tests/vllm/test_stock.py",
    ),
    Mutant(
        "policy: pins are made while they lose",
        "policy/adaptive.py",
        "        if snapshot.pins_lose:\n            return 0.0, False\n",
        "",
        "tests/unit/test_policy_adaptive.py",
    ),
    Mutant(
        "policy: nothing that is pinned costs others anything",
        "policy/adaptive.py",
        "        cost=max(snapshot.price * turn.num_blocks, FORESEEN * weight),\n",
        "        cost=0.0,\n",
        "tests/unit/test_policy_adaptive.py",
    ),
    Mutant(
        "policy: a client's wish has no price",
        "policy/adaptive.py",
        "        longest = longest_pin(turn.gap, stake, min(hint, self._max_ttl_s))\n",
        "        longest = min(hint, self._max_ttl_s)\n",
        "tests/unit/test_policy_adaptive.py",
    ),
    Mutant(
        "worker: a step passes by what is in flight",
        "worker/worker.py",
        "if self._in_flight or self._loads.finished or",
        "if self._loads.finished or",
        "tests/unit/test_worker.py",
    ),
    Mutant(
        "worker: a disk without orders is not looked at",
        "worker/disk.py",
        "return not self._is_scanned or self._clock() - self._looked >= LOOK_EVERY_S",
        "return not self._is_scanned",
        "tests/unit/test_worker_disk.py",
    ),
    Mutant(
        "worker: a request is told of before its last load",
        "worker/worker.py",
        "        if self._waiting[request_id]:\n            return\n",
        "",
        "tests/unit/test_worker.py",
    ),
    Mutant(
        "worker: an order of other weights is begun",
        "worker/worker.py",
        "self._plan.epoch <= self._stale_epoch",
        "self._plan.epoch < self._stale_epoch",
        "tests/unit/test_worker_sleep.py",
    ),
)


def survives(mutant: Mutant, tree: Path) -> str:
    """Why the test is no use against it; "" if it is red."""
    path = tree / "continuum_connector" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return f"its place in {mutant.file} is not there, or not once"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        command = [sys.executable, "-W", "ignore", "-c", RUN, str(tree), *mutant.tests.split()]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    finally:
        path.write_text(text)
    if done.returncode == FAILED:
        return ""
    return f"{mutant.tests} ends with status {done.returncode}: {done.stdout[-300:]}"


def main() -> int:
    """Play those that are asked for; a line for each."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="how the names begin of those to play; else all")
    names = tuple(parser.parse_args().names)
    picked = [each for each in MUTANTS if not names or each.name.startswith(names)]
    num_alive = 0
    with tempfile.TemporaryDirectory() as made:
        tree = Path(made).resolve()
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        for mutant in picked:
            began = time.monotonic()
            why = survives(mutant, tree)
            num_alive += bool(why)
            told = f"SURVIVES: {why}" if why else "red"
            print(f"{time.monotonic() - began:5.1f} s  {mutant.name}: {told}", flush=True)
    print(f"{len(picked) - num_alive} of {len(picked)} faults are seen")
    return int(num_alive > 0 or not picked)


if __name__ == "__main__":
    sys.exit(main())
