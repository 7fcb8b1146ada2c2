"""How much DRAM a tier takes if nobody says: the rule, on nodes of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from continuum_connector import memory
from continuum_connector.config import load_config
from continuum_connector.memory import GIB, Spare, Taken, find_room, look, take

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def node(root: Path, total: int, available: int, **cgroup: str) -> Path:
    """A node with so many GiB, as its kernel describes it; `cgroup`: files by their name, where
    `__` stands for a slash and `_dot_` for a dot."""
    files = {"proc/meminfo": f"MemTotal: {total * 2**20} kB\nMemAvailable: {available * 2**20} kB"}
    for name, text in cgroup.items():
        files[name.replace("__", "/").replace("_dot_", ".")] = text
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {"proc__self__cgroup": "0::/pod\n", "sys__fs__cgroup__pod__memory_dot_current": str(2 * GIB)}
V1 = {
    "proc__self__cgroup": "4:cpu,memory:/box\n",
    "sys__fs__cgroup__memory__box__memory_dot_usage_in_bytes": str(2 * GIB),
}
MAX, HIGH = "sys__fs__cgroup__pod__memory_dot_max", "sys__fs__cgroup__pod__memory_dot_high"
LIMIT = "sys__fs__cgroup__memory__box__memory_dot_limit_in_bytes"


@pytest.mark.parametrize(
    ("figures", "cgroup", "environ", "kv_gib", "on_cpu", "gib", "why"),
    [
        # half of what there is, less the reserve of 2 %; or 4 times the KV cache
        ((1000, 900), {}, {}, 500, False, 440, "half of the 880.0 GiB that the machine can"),
        ((1000, 900), {}, {}, 50, False, 200, "4 times the KV cache, which is less than half"),
        ((50, 41), {}, {}, 50, False, 20, "half of the 40.0 GiB that the machine can spare"),
        # a limit counts if it is tighter, less the reserve of 1 GiB, whoever sets it
        ((1000, 900), {**V2, MAX: f"{43 * GIB}"}, {}, 50, False, 20, "that the memory cgroup can"),
        ((1000, 900), {**V2, MAX: f"{43 * GIB}"}, POD, 50, False, 20, "half of the 40.0 GiB that"),
        ((1000, 900), {**V2, MAX: "max", HIGH: f"{23 * GIB}"}, {}, 50, False, 10, "memory cgroup"),
        ((1000, 900), {**V2, MAX: "-1", HIGH: f"{23 * GIB}"}, {}, 50, False, 10, "memory cgroup"),
        (
            (1000, 900),
            {**V1, LIMIT: f"{43 * GIB}"},
            {},
            50,
            False,
            20,
            "that the memory cgroup can",
        ),
        ((50, 3), {**V2, MAX: f"{43 * GIB}"}, {}, 50, False, 1, "half of the 2.0 GiB that the mac"),
        # a pod without a limit, beside others that it does not see
        ((1000, 900), {**V2, MAX: "max"}, POD, 500, False, 220, "a quarter of the 880.0 GiB that"),
        ((1000, 900), {**V2, MAX: "max"}, POD, 50, False, 200, "4 times the KV cache, which is le"),
        # too little for one agent's context, unless the KV cache is as small
        ((50, 2), {}, {}, 50, False, 0, "half of the 1.0 GiB that the machine can spare is less t"),
        ((50, 1), {}, {}, 50, False, 0, "half of the 0.0 KiB that the machine can spare is less t"),
        ((1000, 900), {**V2, MAX: f"{4 * GIB}"}, {}, 50, False, 0, "less than 1.0 GiB, too littl"),
        ((50, 2), {}, {}, 0.125, False, 0.5, "4 times the KV cache, which is less than half of"),
        # the CPU build, whose KV cache and weights are yet to come out of the same memory
        ((50, 41), {}, {}, 4, True, 4, "as much as the KV cache, which is less than a quarter"),
        ((50, 41), {}, {}, 40, True, 10, "a quarter of the 40.0 GiB that the machine can spare"),
    ],
)
def test_what_a_node_can_spare(
    tmp_path: Path,
    figures: tuple[int, int],
    cgroup: dict[str, str],
    environ: dict[str, str],
    kv_gib: float,
    on_cpu: bool,
    gib: float,
    why: str,
) -> None:
    root = node(tmp_path, *figures, **cgroup)
    taken = take(look(environ, root), int(kv_gib * GIB), on_cpu)
    assert (taken.num_bytes / GIB, why in taken.why) == (gib, True), taken


def test_the_engines_and_ranks_of_one_server_share_one_size() -> None:
    """`kv_bytes` is the node's: two engines of two ranks have four KV caches and one DRAM."""
    spare = Spare("the machine", 100 * GIB)
    assert [take(spare, n * 4 * GIB, False).num_bytes // GIB for n in (1, 2, 4)] == [16, 32, 50]


def test_servers_that_start_one_after_another_never_take_everything(tmp_path: Path) -> None:
    """Each takes half of what the others have left; the pool, which leaves to others as much as it
    takes, sees to the rest where they started before any had grown."""
    left, sizes = 801, []
    for number in range(4):
        found = look({}, node(tmp_path / str(number), 50, left))
        sizes.append(take(found, 900 * GIB, False).num_bytes // GIB)
        left -= sizes[-1]
    assert sizes == [400, 200, 100, 50]
    assert left == 51


@pytest.mark.parametrize(
    ("is_shared", "on_cpu", "num_left"), [(False, False, 1), (True, False, 3), (False, True, 3)]
)
def test_a_pool_leaves_the_same_share_to_others(
    is_shared: bool, on_cpu: bool, num_left: int
) -> None:
    for kv_bytes in (GIB, 1000 * GIB):
        taken = take(Spare("the machine", 100 * GIB, is_shared), kv_bytes, on_cpu)
        assert taken.num_left == num_left


def test_a_kernel_that_says_nothing_spares_nothing(tmp_path: Path) -> None:
    assert find_room(tmp_path) is None
    assert not memory.may_take(look({}, tmp_path))
    assert take(look({}, tmp_path), GIB, False).num_bytes == 0


def test_where_nobody_looked_there_is_no_tier() -> None:
    assert not memory.may_take(None)
    assert take(None, GIB, False) == Taken(
        0, "nobody could look how much memory is spare: with Ray, or without plugins"
    )


@pytest.mark.parametrize(
    ("extra", "environ", "tier_bytes"),
    [
        ({}, {}, None),
        ({}, {"CONTINUUM_DRAM_BYTES": "0"}, 0),
        ({}, {"CONTINUUM_DRAM_BYTES": "3GiB"}, 3 * GIB),
        ({"dram_bytes": "2GiB"}, {"CONTINUUM_DRAM_BYTES": "3GiB"}, 2 * GIB),
        ({"dram_bytes": 0}, {"CONTINUUM_DRAM_BYTES": "3GiB"}, 0),
    ],
)
def test_what_is_written_wins(
    extra: dict[str, object], environ: dict[str, str], tier_bytes: int | None
) -> None:
    config = load_config(extra, environ)
    assert config.dram_bytes == tier_bytes
    assert config.tier_bytes == (tier_bytes or 0), "no size yet where none was given"
