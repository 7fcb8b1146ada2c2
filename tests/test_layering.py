"""The rooms of the package: who may import whom.

Read from the source, so that nothing has to be importable here.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "continuum_connector"
FILES = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

# Objects of the scheduler half that do something. None is to be asked through another.
PARTS = {
    *("ours", "side", "steps", "decider", "policy", "away", "gaps", "costs"),
    *(
        "retention",
        "pins",
        "holds",
        "room",
        "records",
        "snapshots",
        "turns",
        "programs",
    ),
    *("tier", "traffic", "index", "ledger", "pool"),
}

# Attributes of an object that are assigned outside the module of its class would be collaborators
# planted after construction, and state with a second owner. What vLLM, Python or C have no other
# way for:
NOT_OURS = {
    "tools/checks/ask.py": "os.environ",
    "vllm/attach.py": "ContinuumScheduler.__name__ ContinuumScheduler.__qualname__ "
    "config.get_scheduler_cls config.scheduler_cls engine_args.kv_transfer_config "
    "engine_args_class.create_engine_config",
    "vllm/compat.py": "request.status scheduler.defer_block_free scheduler.has_mamba_layers "
    "scheduler.prefill_capacity_bound vllm_config.kv_transfer_config.kv_load_failure_policy",
    "vllm/coordinator.py": "_coordinator.single_type_managers "
    "coordinator.find_longest_cache_hit_per_group coordinator.remove_skipped_blocks "
    "each.block_pool request.shared_prefix_boundary",
    "vllm/hooks.py": "_manager.allocate_slots",
    "vllm/planned.py": "DEVICE.capability args.kv_transfer_config args.load_format "
    "config.cache_config.block_size config.cache_config.num_gpu_blocks "
    "config.compilation_config.mode found.hash_block_size options.model",
    "vllm/plugin.py": "KVTransferConfig.__post_init__ loader.exec_module",
    "vllm/pretend.py": "accelerator.current_device_index accelerator.device_count "
    "accelerator.set_device_index cuda.Event cuda.Stream cuda.current_device cuda.current_stream "
    "cuda.default_stream cuda.device_count cuda.get_device_capability cuda.get_device_properties "
    "cuda.is_available cuda.set_device namespace.__getattr__ "
    "platforms._current_platform platforms.vllm_version_matches_substr "
    "registry._run_in_subprocess socket.socket.connect torch.library.register_fake",
    "vllm/resets.py": "_manager.free pool.get_num_free_blocks request.num_computed_tokens",
    "worker/abi.py": "function.argtypes function.restype",
}
# A turn is the one record of a request. Of its fields turns.py writes `state`, and `identity` once
# its program is over; what else becomes of it is written where it is seen, each field in one place:
TURN_IS_WRITTEN_IN = {
    "scheduler/pins.py": "came_for taken",
    "scheduler/scheduler.py": "epoch hit_tokens is_stray stock_tokens vram_tokens",
    "scheduler/waits.py": "adapter awaits_below awaits_load below held_s is_let_in num_wanted "
    "was_tried",
}
# Functions whose names ask, and which act: vLLM's names. It peeks into a queue only where `bool` of
# it says so, so that is where those are hidden that must be passed over.
ASKS_AND_ACTS = {
    "connector.py": {"get_kv_connector_stats", "get_num_new_matched_tokens"},
    "scheduler/queue.py": {"__bool__"},
}
ASKS = re.compile(r"_?(is|has|are|was|can|get)_|__(bool|len|contains)__$")
MUTATES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end"),
    *("pop", "popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update"),
}

LEAVES = {"errors", "messages", "files", "memory"}
MAY_IMPORT = {  # what each room, a folder or a file, may import besides itself and `errors`
    "errors": set(),
    "messages": set(),
    "files": set(),
    "memory": set(),
    "config": {"memory", "files"},
    "programs": set(),
    "toolcalls": set(),
    "observe/trace": {"config"},
    "observe/account": {"programs", "toolcalls"},
    "observe/metrics": {"observe/account"},
    "middleware": {"config", "programs", "observe/account"},
    "switch_endpoint": {"files", "config", "middleware"},
    "epoch_endpoint": {"middleware"},
    "program_endpoint": {"middleware", "vllm/attach"},
    "costs": set(),
    "forecast": {"toolcalls"},
    "policy": {"programs", "toolcalls", "forecast", "costs"},
    "scheduler/kv_groups": {"messages"},
    "scheduler/holds": {"messages"},
    "scheduler/tiers": {
        *("messages", "observe/account"),
        *("scheduler/holds", "scheduler/kv_groups"),
    },
    "scheduler/tiers/disk": {  # and disk_index, disk_reading, disk_saving
        *("messages", "observe/account"),
        *("scheduler/kv_groups", "scheduler/tiers"),
    },
    "scheduler": {
        *("scheduler/holds", "scheduler/kv_groups", "scheduler/tiers"),
        *("policy", "programs", "toolcalls", "forecast", "costs", "messages", "config"),
        "observe/account",
    },
    "worker": {"messages", "config", "files"},
    "vllm/proven": {"scheduler/kv_groups"},
    "vllm/touched": set(),
    "vllm/coordinator": {"scheduler", "scheduler/kv_groups", "vllm/compat"},
    "vllm/served": {
        *("config", "memory", "costs", "scheduler/kv_groups"),
        *("vllm/compat", "vllm/proven"),
    },
    "vllm/facts": {"worker", "files"},
    "vllm/worker_calls": {"vllm/compat"},
    "vllm/compat": {"scheduler", "costs", "config"},
    "vllm/pretend": set(),
    "vllm/planned": {
        *("build", "config"),
        *("vllm/attach", "vllm/compat", "vllm/pretend", "vllm/proven", "vllm/served"),
        "vllm/touched",
    },
    "vllm/resets": {"vllm/compat", "vllm/touched"},
    "build": {
        "memory",
        *("scheduler", "worker", "policy", "toolcalls", "forecast", "costs", "config"),
        *("scheduler/holds", "scheduler/kv_groups", "scheduler/tiers", "scheduler/tiers/disk"),
        *("observe/account", "observe/trace"),
        *("vllm/compat", "vllm/proven", "vllm/coordinator"),
        *("vllm/served", "vllm/facts"),
        *("vllm/touched", "vllm/resets"),
    },
    "connector": {
        *("build", "config", "messages", "scheduler", "worker", "costs", "switch_endpoint"),
        *("observe/account", "observe/metrics"),
        *("vllm/compat", "vllm/coordinator", "vllm/served", "vllm/touched", "vllm/worker_calls"),
    },
    "vllm/hooks": {
        *("scheduler", "scheduler/kv_groups", "vllm/compat", "vllm/resets"),
        "vllm/touched",
    },
    "vllm/attach": {
        *("connector", "config", "vllm/compat", "vllm/hooks", "vllm/served"),
        "vllm/touched",
        *("vllm/proven", "switch_endpoint", "observe/trace", "memory"),
    },
    "vllm/plugin": {"vllm/attach", "vllm/touched"},
    "tools/analysis": {"observe/trace", "memory", "files"},
    "tools/checks": {
        *("vllm/plugin", "vllm/proven", "vllm/pretend"),
        *("vllm/planned", "scheduler/kv_groups"),
        *("config", "files", "worker", "memory"),
        *("switch_endpoint", "epoch_endpoint", "program_endpoint"),
    },
    "tools/cli": {
        *("tools/analysis", "tools/checks"),
        *("files", "memory"),
    },
    "": {"connector", "vllm/attach"},  # __init__: the public names
}
VLLM_IN = {"connector.py", "observe/metrics.py"}
VLLM_IN |= {
    f"vllm/{name}.py"
    for name in (
        "compat",
        "plugin",
        "served",
        "facts",
        "planned",
        "pretend",
        "resets",
        "hooks",
    )
}
VLLM_IN.add("vllm/worker_calls.py")
TORCH_IN = {"vllm/planned.py", "vllm/pretend.py"}  # besides worker/: only for `continuum check`
CLOCK_IN = {  # who may ask what time it is
    "connector.py",
    "build.py",  # the trace's start
    "observe/account.py",
    "observe/trace.py",
    "scheduler/waker.py",
    "tools/analysis/foreign.py",  # it reads dates that others wrote
    "tools/cli/server.py",  # it waits no longer than it may
    "tools/cli/top.py",
}


def room(name: str) -> str:
    """The room of a file: that of its rule, the longest that fits; "" for the package itself."""
    path = name.removesuffix(".py").removesuffix("__init__").rstrip("/")
    fitting = [each for each in MAY_IMPORT if f"{path}/".startswith((f"{each}/", f"{each}_"))]
    return max(fitting, key=len, default=path)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            module = node.module or ""
            if (ROOT / module.replace(".", "/")).is_dir():
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def ours(tree: ast.AST) -> set[str]:
    """The rooms a file imports."""
    here = "continuum_connector."
    paths = {m.removeprefix(here).replace(".", "/") for m in imports(tree) if m.startswith(here)}
    return {room(path if f"{path}.py" in FILES else path.rpartition("/")[0]) for path in paths}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down_only(name: str) -> None:
    here = room(name)
    if name.endswith("/__init__.py") and not ours(TREES[name]):
        return
    assert here in MAY_IMPORT, f"{name}: say in MAY_IMPORT what it may import"
    allowed = MAY_IMPORT[here] | {here, "errors"}
    assert ours(TREES[name]) <= allowed


def test_the_rules_allow_no_circle() -> None:
    below: dict[str, set[str]] = {}

    def visit(here: str, above: tuple[str, ...]) -> set[str]:
        assert here not in above, f"circle: {above} -> {here}"
        if here not in below:
            below[here] = set()
            for each in MAY_IMPORT[here] - {""}:
                below[here] |= {each} | visit(each, (*above, here))
        return below[here]

    for each in MAY_IMPORT:
        visit(each, ())
    assert "worker" not in below["scheduler"]
    assert "scheduler" not in below["worker"]
    assert all(not MAY_IMPORT[leaf] for leaf in LEAVES)


def test_the_scheduler_half_has_six_floors() -> None:
    """As many files import each other in a row: who reads one climbs no further down."""
    half = {name: imports(tree) for name, tree in TREES.items() if name.startswith("scheduler/")}
    below = {
        name: {m.removeprefix("continuum_connector.").replace(".", "/") + ".py" for m in found}
        for name, found in half.items()
    }

    def floor(name: str) -> int:
        return 1 + max((floor(each) for each in below[name] if each in below), default=0)

    assert max(map(floor, below)) == floor("scheduler/scheduler.py") == 6


@pytest.mark.parametrize("name", FILES)
def test_vllm_and_torch_stay_where_they_belong(name: str) -> None:
    tops = {module.split(".")[0] for module in imports(TREES[name])}
    assert "vllm" not in tops or name in VLLM_IN
    assert "torch" not in tops or room(name) == "worker" or name in TORCH_IN


@pytest.mark.parametrize(
    "path",
    [
        p
        for room in ("tests/unit", "bench/tests", "deploy/tests")
        for p in (ROOT / room).glob("*.py")
    ],
    ids=lambda p: p.name,
)
def test_unit_tests_need_neither_vllm_nor_torch(path: Path) -> None:
    tops = {module.split(".")[0] for module in imports(ast.parse(path.read_text()))}
    assert not tops & {"vllm", "torch"}


@pytest.mark.parametrize("name", FILES)
def test_time_is_passed_in(name: str) -> None:
    modules = set(imports(TREES[name]))
    assert not modules & {"time", "datetime"} or name in CLOCK_IN


def test_only_holds_touches_block_references() -> None:
    calls = r"\.(touch|free_blocks)\("
    found = {name for name, path in FILES.items() if re.search(calls, path.read_text())}
    assert found == {"scheduler/holds.py"}


def test_nothing_outside_tiers_knows_which_there_are_or_how_many() -> None:
    """Who is not in scheduler/tiers/ asks the contract and the ledger; build.py makes the tiers."""
    tiers = "continuum_connector.scheduler.tiers."
    outside = {name: tree for name, tree in TREES.items() if "scheduler/tiers/" not in name}
    asked = {
        name: {m.removeprefix(tiers) for m in imports(tree) if m.startswith(tiers)}
        for name, tree in outside.items()
    }
    made = {"dram", "index", "disk", "disk_reading"}
    assert asked.pop("build.py") == {"base", "traffic"} | made
    del outside["build.py"]
    assert set().union(*asked.values()) == {"base", "traffic"}
    named = re.compile(r"DramTier|tier\.names\[|len\(\S*tier\.names")
    assert [name for name in outside if named.search(FILES[name].read_text())] == []


def test_the_core_knows_of_no_disk() -> None:
    """The scheduler half says what it wants of any memory below DRAM (Below). Only build.py knows
    that it is a disk; by name one may be metrics, records of the trace, fields of messages."""
    own = "scheduler/tiers/disk"
    core = [n for n in FILES if n.startswith("scheduler/") and not n.startswith(own)]
    words = re.compile(r"disk|shel(f|ves)|read[_-]?ahead", re.IGNORECASE)
    for name in core:
        assert "scheduler/tiers/disk" not in ours(TREES[name])
        nodes = list(ast.walk(TREES[name]))
        said = {getattr(node, of, None) for of in ("id", "attr", "arg", "name") for node in nodes}
        assert not {each for each in said if isinstance(each, str) and words.search(each)}, name


def test_the_contract_of_a_tier_is_what_is_asked_of_it() -> None:
    """No more is asked than base.py promises, and nothing promised that nobody asks for."""
    contract = next(n for n in TREES["scheduler/tiers/base.py"].body if isinstance(n, ast.ClassDef))
    promised = {f.name for f in functions(contract)}
    promised |= {n.target.id for n in contract.body if isinstance(n, ast.AnnAssign)}
    outside = "".join(p.read_text() for name, p in FILES.items() if "tiers/" not in name)
    assert set(re.findall(r"\b_?tier\.(\w+)", outside)) == promised


def test_every_logger_is_below_vllms_own() -> None:
    """vLLM sets up handlers and levels for `vllm.*` alone: other names are not in its log."""
    asked = re.compile(r"(?:getLogger|init_logger)\((.*)\)")
    good = {'f"vllm.{__name__}"'}
    paths = [*FILES.values(), *sorted((ROOT / "bench").rglob("*.py"))]
    found = {(path.name, how) for path in paths for how in asked.findall(path.read_text())}
    assert {how for _, how in found} <= good
    assert not {
        path.name for path in paths if re.search(r"getLogger\(__name__\)", path.read_text())
    }


def reaches(tree: ast.AST) -> Iterator[str]:
    """What is read or called through two parts, as `self.side.tier.load`, wiring in constructors
    apart."""
    wiring = [f for f in functions(tree) if f.name == "__init__"]
    wired = {id(node) for f in wiring for node in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in wired:
            names = [name.lstrip("_") for name in ast.unparse(node).split(".")[:-1]]
            if any({a, b} <= PARTS for a, b in itertools.pairwise(names)):
                yield ast.unparse(node)


def test_nobody_reaches_through_two_objects() -> None:
    """build.py apart, which puts them together. No allowance is unused."""
    rooms = {"connector", "scheduler", "vllm"}
    trees = {n: tree for n, tree in TREES.items() if n.removesuffix(".py").split("/")[0] in rooms}
    found = {name: set(reaches(tree)) for name, tree in trees.items()}
    assert {name: chains for name, chains in found.items() if chains} == {}


def _stored(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, augmented or deleted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def _declared(tree: ast.AST) -> Iterator[str]:
    """Attributes of the classes of a module: their fields, and what their methods assign."""
    for one in ast.walk(tree):
        if isinstance(one, ast.ClassDef):
            yield from (ast.unparse(n.target) for n in one.body if isinstance(n, ast.AnnAssign))
            yield from (n.attr for n in _stored(one) if ast.unparse(n.value) == "self")


def planted(tree: ast.AST) -> set[str]:
    own = {*_declared(tree)}
    found = [n for n in _stored(tree) if ast.unparse(n.value) not in ("self", "cls")]
    return {ast.unparse(n).removeprefix("self.") for n in found if n.attr not in own}


def test_nobody_plants_in_anothers_object() -> None:
    """An object gets its collaborators when it is made, and one module writes its state. No
    allowance is unused."""
    found = {name: planted(tree) for name, tree in TREES.items()}
    allowed = {name: {*targets.split()} for name, targets in NOT_OURS.items()}
    for name, fields in TURN_IS_WRITTEN_IN.items():
        allowed[name] = {f"turn.{field}" for field in fields.split()}
    assert {name: targets for name, targets in found.items() if targets} == allowed


def test_each_field_of_a_turn_is_written_in_one_place() -> None:
    fields = [field for own in TURN_IS_WRITTEN_IN.values() for field in own.split()]
    assert len(fields) == len(set(fields))
    own = {n.attr for n in _stored(TREES["scheduler/turns.py"]) if ast.unparse(n.value) == "turn"}
    assert own == {"identity", "state"}


def _acts(function: ast.AST, by_name: dict[str, ast.AST], seen: frozenset[str]) -> bool:
    """Whether it assigns to an attribute or a part of one, calls what changes one, or calls a
    method of its class that does."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if isinstance(node, ast.Attribute) or "." in ast.unparse(node.value):
                return True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of, name = ast.unparse(node.func.value), node.func.attr
            if name in MUTATES and "." in of:
                return True
            called = by_name.get(name) if of == "self" and name not in seen else None
            if called is not None and _acts(called, by_name, seen | {name}):
                return True
    return False


def asks_and_acts(tree: ast.AST) -> Iterator[str]:
    """Predicates, properties and getters that change something."""
    of_class = {f: one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) for f in one.body}
    for each in functions(tree):
        marks = {ast.unparse(mark) for mark in each.decorator_list}
        if ASKS.match(each.name) or marks & {"property", "cached_property"}:
            own = functions(of_class[each]) if each in of_class else ()
            if _acts(each, {f.name: f for f in own}, frozenset({each.name})):
                yield each.name


def test_who_asks_changes_nothing() -> None:
    """Functions named is_, has_, get_, ..., `__bool__` and properties. No allowance is unused."""
    found = {name: {*asks_and_acts(tree)} for name, tree in TREES.items()}
    assert {name: names for name, names in found.items() if names} == ASKS_AND_ACTS


def test_each_file_says_in_its_first_line_what_it_is() -> None:
    """That is the map of the files; continuum_connector/README.md is one screen."""
    for name, tree in TREES.items():
        if not name.endswith("__init__.py"):
            assert (ast.get_docstring(tree) or "").splitlines()[0].strip(), name
    assert len((PACKAGE / "README.md").read_text().splitlines()) <= 50


def test_no_allowance_is_unused() -> None:
    used: dict[str, set[str]] = {each: set() for each in MAY_IMPORT}
    for name, tree in TREES.items():
        if (here := room(name)) in used:
            used[here] |= ours(tree) - {here, "errors"}
    assert used == MAY_IMPORT
    tops = {n: {m.split(".")[0] for m in imports(tree)} for n, tree in TREES.items()}
    assert {name for name, found in tops.items() if "vllm" in found} == VLLM_IN
    clocks = {n for n, tree in TREES.items() if {"time", "datetime"} & set(imports(tree))}
    assert clocks == CLOCK_IN


def test_every_place_for_something_new_is_there() -> None:
    """docs/contributing.md: where a new policy, tier, check, ... goes."""
    text = (ROOT / "docs" / "contributing.md").read_text()
    rows = re.search(r"\| A new .*?\n\n", text, re.DOTALL)
    assert rows
    places = re.findall(r"`([\w/.]+)`", rows[0])
    assert len(places) > 15
    assert [place for place in places if not (ROOT / place).exists()] == []
