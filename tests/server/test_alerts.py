"""Each alert of deploy/ fires on a real server's samples, alone, and ends with its trouble.

A server that is well, then one in trouble, then well again. What a sound server on a CPU cannot do
is written into its samples; test_disk_faults, test_dram_tier and test_poison have servers that
fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.serve.metrics import Metrics, parse_metrics
from bench.serve.server import VllmServer
from tests.server.alerts import (
    AFTER_MIN,
    ALERTS,
    BEFORE_MIN,
    TROUBLE_MIN,
    Stretch,
    firing_after_each,
)
from tests.server.conftest import NUM_BLOCKS
from tests.server.helpers import (
    BLOCK,
    PROGRAMS,
    ask,
    eventually,
    in_flight,
    last,
    play,
    reset,
    text_of,
)

WORKING_DISK = "disk_up 1\ndisk_writable 1\ndisk_wanted_bytes 1e9\ndisk_budget_fill 1\n"


@dataclass(frozen=True)
class Trouble:
    """What an hour or two of a server had, beside agents at work. The texts are samples as on
    /metrics, our own without `continuum:`, all without the labels that all have."""

    fires: str  # alerts
    traffic: str = "agents"  # which of the traffics below
    once: str = ""  # added to counters in its first minute
    each_minute: str = ""  # added to counters
    shows: str = ""  # gauges
    restart: bool = False  # it ends with one, and so the counters begin anew
    is_gone: bool = False  # no scrape is answered


TROUBLES = (
    Trouble("ContinuumServerGone", is_gone=True, restart=True),
    Trouble("ContinuumAside", shows="switched_on 0\naside 1", restart=True),
    Trouble("ContinuumOverload", shows="vllm:num_requests_waiting 9\nvllm:num_requests_running 4"),
    Trouble("ContinuumHitCollapse ContinuumPinsUnderPressure ContinuumThrash", traffic="newcomers"),
    Trouble("ContinuumProgramsUnknown", traffic="one-shot requests"),
    Trouble(
        "ContinuumTransfersStuck",
        once='transfers_admitted_total{direction="load"} 1',
        shows='transfers_in_flight{direction="load"} 1',
        restart=True,
    ),
    Trouble("ContinuumLedgerOpen", once="pins_started_total 1", restart=True),
    Trouble("ContinuumLedgerOpen", shows="held_blocks 3", restart=True),
    Trouble("ContinuumTierDown", shows="tier_up 0\ndram_capacity_blocks 0", restart=True),
    Trouble("ContinuumTierShort", shows="dram_capacity_blocks 300"),
    Trouble("ContinuumCorruptBlocks", once='transfer_failures_total{reason="corrupt"} 1'),
    Trouble("ContinuumTransfersFailing", each_minute='transfer_failures_total{reason="driver"} 1'),
    Trouble("ContinuumDiskDown", shows="disk_wanted_bytes 1e9", restart=True),
    Trouble("ContinuumDiskHangs", shows=f"{WORKING_DISK}disk_oldest_op_seconds 31"),
    Trouble("ContinuumDiskErrors", once='disk_failures_total{reason="eio"} 1', shows=WORKING_DISK),
    Trouble("ContinuumDiskReadOnly", shows=f"{WORKING_DISK}disk_writable 0"),
    Trouble(
        "ContinuumDiskBudgetSpent",
        each_minute='disk_refused_blocks_total{because="budget"} 5',
        shows=f"{WORKING_DISK}disk_budget_fill 0.01",
    ),
    Trouble("ContinuumHooksSlow", each_minute='hook_seconds_sum{hook="allocate_slots"} 7'),
)


def test_the_table_has_every_alert() -> None:
    assert {name for trouble in TROUBLES for name in trouble.fires.split()} == set(ALERTS)


def agents_at_work(server: VllmServer) -> None:
    play(server, PROGRAMS[:2])  # both fit


def newcomers(server: VllmServer, wave: str) -> None:
    """More than VRAM holds, and most of DRAM; the last one takes all of VRAM, and leaves no pin."""
    for name in (f"{wave} newcomer {n}" for n in range(12)):
        ask(server, "completions", [text_of(900, name)], vllm_xargs={"job_id": name})
    ask(server, "completions", [text_of((NUM_BLOCKS - 1) * BLOCK - 8, wave)], **last())


def one_shot_requests(server: VllmServer) -> None:
    for n in range(5):
        ask(server, "completions", [text_of(400, f"one-shot {n}")])


def counted(server: VllmServer, play_it: Callable[[], None]) -> Stretch:
    """What this adds to the server's samples, as if in a minute."""
    before = server.metrics()
    play_it()
    eventually(lambda: in_flight(server) == 0)
    return Stretch(1, before, server.metrics())


@pytest.fixture(scope="module")
def traffics(agents: VllmServer) -> dict[str, Stretch]:
    """What a real server counts in a minute of each traffic."""

    def with_reset(traffic: Callable[[VllmServer], None]) -> None:
        traffic(agents)
        reset(agents)  # no pin is left

    reset(agents)
    found = {
        "agents": counted(agents, lambda: with_reset(agents_at_work)),
        "one-shot requests": counted(agents, lambda: with_reset(one_shot_requests)),
    }
    newcomers(agents, "first")  # DRAM is full from here on
    eventually(lambda: in_flight(agents) == 0)
    return {**found, "newcomers": counted(agents, lambda: newcomers(agents, "second"))}


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.fires)
def test_an_alert_fires_in_its_trouble_and_ends_with_it(
    trouble: Trouble, traffics: dict[str, Stretch], tmp_path: Path
) -> None:
    well, bad = traffics["agents"], traffics[trouble.traffic]
    shown = {**bad.after, **samples(bad.after, trouble.shows)}
    stretches = [
        Stretch(BEFORE_MIN, well.before, well.after),
        Stretch(1, bad.before, plus(shown, trouble.once), is_gone=trouble.is_gone),
        Stretch(TROUBLE_MIN, bad.before, plus(shown, trouble.each_minute), is_gone=trouble.is_gone),
        Stretch(AFTER_MIN, well.before, well.after, restarted=trouble.restart),
    ]
    silent, _, fired, ended = firing_after_each(stretches, tmp_path)
    assert (silent, fired, ended) == (set(), set(trouble.fires.split()), set())


def plus(server: Metrics, text: str) -> Metrics:
    return server | {key: server[key] + value for key, value in samples(server, text).items()}


def samples(server: Metrics, text: str) -> Metrics:
    """These samples with all the labels that the server gives them; it must publish them all."""
    found: Metrics = {}
    for line in text.splitlines():
        prefix = "" if line.startswith("vllm:") else "continuum:"
        [((name, labels), value)] = parse_metrics(prefix + line).items()
        keys = [key for key in server if key[0] == name and labels <= key[1]]
        assert len(keys) == 1, f"{line}: the server publishes {keys}"
        found[keys[0]] = value
    return found


def test_the_trouble_is_what_fires(traffics: dict[str, Stretch], tmp_path: Path) -> None:
    """Agents at work for all this time set off nothing, and neither does an idle night."""
    well = traffics["agents"]
    idle = Stretch(AFTER_MIN, well.after, well.after)
    work = Stretch(BEFORE_MIN, well.before, well.after)
    assert firing_after_each([work, idle, work, idle], tmp_path) == [set()] * 4
