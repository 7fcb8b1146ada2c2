"""The table of what we touch of vLLM: it is complete, and names nothing that nobody touches."""

from __future__ import annotations

import ast
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.v1.core.sched.scheduler import Scheduler

import continuum_connector
from continuum_connector.connector import ContinuumConnector, Mode
from continuum_connector.vllm import attach, planned, touched
from continuum_connector.vllm.touched import TOUCHED, Part, Touch, release
from tests.vllm import renamed
from tests.vllm.harness import Engine
from tests.vllm.scenarios import SCENARIOS

PACKAGE = Path(continuum_connector.__file__).parent
CORE = "vllm.v1.core"
WATCHED = [
    *(f"{CORE}.sched.{name}" for name in ("scheduler", "request_queue", "output")),
    *(f"{CORE}.{name}" for name in ("kv_cache_manager", "kv_cache_coordinator", "block_pool")),
    *(f"{CORE}.{name}" for name in ("single_type_kv_cache_manager", "kv_cache_utils")),
    *("vllm.v1.request", "vllm.v1.outputs", "vllm.v1.kv_cache_interface", "vllm.lora.request"),
    *("vllm.sampling_params", "vllm.config.vllm", "vllm.config.cache", "vllm.config.scheduler"),
    *("vllm.config.parallel", "vllm.config.model", "vllm.config.kv_transfer", "vllm.config.lora"),
    "vllm.config.kv_events",
]
# Set by us on objects of vLLM's, under names of our own.
OURS = re.compile("_continuum")
# Asked of whatever is on the call stack, or of any spec, so that most of what is asked has none.
LOOKED_FOR = {"input_queue", "kv_cache_manager", "kv_cache_specs", "role", "prefix_cacheable"}
LOOKED_FOR |= {"mamba_cache_mode", "extra_retained_tokens", "sliding_window"}
LOOKED_FOR |= {"attention_chunk_size", "_connectors"}


def touched_while_played() -> dict[tuple[str, str], list[str]]:
    """(class with its bases, name) -> files of ours, over all scenarios; in a child, because the
    classes stay watched."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        found: dict[str, set[str]] = {}

        def note(kind: type, name: str, file: str) -> None:
            kinds = "/".join(f"{k.__module__}:{k.__qualname__}" for k in kind.__mro__[:-1])
            found.setdefault(f"{kinds} {name}", set()).add(file)

        try:
            renamed.record(renamed.classes_of(WATCHED), note)
            for play in SCENARIOS.values():
                play(Engine)
            told = {key: sorted(files) for key, files in found.items()}
        except BaseException as error:
            told = {f"failed {error!r}": []}
        os.write(write, b"")
        with os.fdopen(write, "w") as end:
            end.write(json.dumps(told))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as end:
        told = json.loads(end.read())
    os.waitpid(child, 0)
    return {tuple(key.split(" ", 1)): files for key, files in told.items()}  # type: ignore[misc]


OLD = pytest.mark.skipif(
    vllm.__version__ < "0.32", reason="it has other names, of which the table says which releases"
)


@pytest.fixture(scope="module", name="played")
def _played() -> dict[tuple[str, str], list[str]]:
    return touched_while_played()


def is_listed(kinds: str, name: str) -> bool:
    owners = set(kinds.split("/"))
    modules = {owner.partition(":")[2] for owner in owners}
    return any(
        name in each.any_of and (each.owner in owners or each.owner.partition(":")[2] in modules)
        for each in TOUCHED
    )


@OLD
def test_whatever_the_package_touches_while_it_serves_is_in_the_table(played: Any) -> None:
    assert not [key for key in played if key[0] == "failed"], played
    assert len(played) > 150
    unlisted = {
        f"{kinds.split('/')[0]}.{name}": files
        for (kinds, name), files in played.items()
        if not OURS.match(name) and name not in LOOKED_FOR and not is_listed(kinds, name)
    }
    assert unlisted == {}


# Why no scenario meets them: what they are for is asked by other tests, or the name is not of a
# class that can be watched.
UNMET = {
    Part.WORKER: "workers are fakes here: test_worker_calls.py",
    Part.PLUGIN: "of the entry point: test_plugin_drift.py",
    Part.LOAD: "classes that ours derives from",
    Part.EVENTS: "functions of a module",
    Part.NOTHING: "features of some releases, or of servers that no scenario has",
}
UNMET_NAMES = {
    **dict.fromkeys(("lora_name", "lora_path", "lora_int_id"), "workers are fakes here"),
    "finish_requests": "of streaming sessions that end: test_pin_endings.py",
    **dict.fromkeys(("RequestStatus", "Scheduler", "AsyncScheduler"), "named by imports"),
    "current_platform": "named by imports",
    "resolve_kv_cache_block_sizes": "a function of a module",
    **dict.fromkeys(("schedule", "add_request", "reset_prefix_cache"), "overridden in attach.py"),
    "_preempt_request": "overridden in attach.py",
    **dict.fromkeys(("waiting", "skipped_waiting"), "by getattr and setattr, from a list"),
    "blocks": "of a hit that states need in the very step, which is rare",
    "rank": "workers are fakes here",
    "data_parallel_backend": "asked where vLLM makes its config, which the engine here is spared",
    **dict.fromkeys(("scheduler_cls", "get_scheduler_cls"), "likewise"),
    **dict.fromkeys(("model", "skip_tokenizer_init", "is_hybrid"), "of a server's model"),
    "enable_sleep_mode": "of a server with the default tier",
    "layer_names": "in the worker half",
    "compile_factors": "in the worker half, for a disk",
    "block_size": "CacheConfig's is asked for a layout, by workers",
    **dict.fromkeys(("num_output_tokens", "output_token_ids"), "of servers with a tokenizer"),
    "cached_block_hash_to_block": "asked once VRAM is empty, before a reset: test_epochs.py",
    **dict.fromkeys(("remove_skipped_blocks", "last_state_block_idx"), "states: test_drafts.py"),
    "cached_blocks_this_step": "states found in the very step: test_states.py",
    **dict.fromkeys(("prepend_request", "prepend_requests"), "vLLM calls them, of our queue"),
    **dict.fromkeys(("peek_request", "remove_requests"), "vLLM calls them, of our queue"),
}


def met(touch: Touch, played: Any) -> bool:
    kind = touch.owner.partition(":")[2]
    return any(
        name in touch.any_of and any(k.partition(":")[2] == kind for k in kinds.split("/"))
        for kinds, name in played
    )


@OLD
def test_every_name_of_the_table_is_touched_or_it_is_said_why_not(played: Any) -> None:
    unmet = [
        touch.name
        for touch in TOUCHED
        if touch.needs not in UNMET
        and not any(name in UNMET_NAMES for name in touch.any_of)
        and ":RequestStatus" not in touch.owner
        and not touch.owner.endswith(("KVConnectorBase_V1", "SupportsHMA"))
        and not met(touch, played)
    ]
    assert " ".join(unmet) == ""


def imported() -> Iterator[tuple[str, str, str]]:
    """(file, module of vLLM, name) of each import in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                for alias in node.names:
                    yield path.relative_to(PACKAGE).as_posix(), node.module or "", alias.name


CHECKS_OWN = {  # of `continuum check`, which says what it cannot ask; no server loads them
    *("vllm/planned.py", "vllm/pretend.py"),
}


def test_every_import_of_vllm_is_in_the_table() -> None:
    listed = {(each.owner, name) for each in TOUCHED for name in each.any_of}
    listed |= {tuple(each.owner.split(":")) for each in TOUCHED if ":" in each.owner}  # type: ignore[misc]
    modules = {each.owner.partition(":")[0] for each in TOUCHED}
    unlisted = [
        found
        for found in imported()
        if found[0] not in CHECKS_OWN
        and (found[1], found[2]) not in listed
        and f"{found[1]}.{found[2]}" not in modules
    ]
    assert unlisted == []


def test_each_hook_of_ours_is_in_the_table() -> None:
    named = {
        n for each in TOUCHED if each.owner.endswith("KVConnectorBase_V1") for n in each.any_of
    }
    named |= {"request_finished_all_groups"}
    base = next(b for b in ContinuumConnector.__mro__ if b.__name__ == "KVConnectorBase_V1")
    hooks = {n for n in vars(base) if not n.startswith("_") and callable(getattr(base, n))}
    ours = {
        n
        for k in ContinuumConnector.__mro__
        if k.__module__.startswith("continuum")
        for n in vars(k)
    }
    assert hooks & ours <= named
    assert base.__abstractmethods__ <= named


# --- what is there -----------------------------------------------------------------------
def test_this_vllm_lacks_nothing() -> None:
    assert touched.missing() == ()
    assert touched.why_no_copies() == ""
    assert touched.why_not_loaded() == ""
    assert not touched.why_aside(True, True)
    assert not touched.why_less()


class Plain:
    """What must be seen of a class."""

    of_class = 1
    __slots__ = ("in_a_slot",)

    def method(self, takes: int) -> None: ...

    @property
    def read(self) -> int:
        return 1


class Stores(Plain):
    def __init__(self) -> None:
        self.stored = 1
        self.method(2)

    def later(self) -> None:
        self.stored_later = self.loaded_only  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "takes", "there"),
    [
        *(("of_class", (), True), ("in_a_slot", (), True), ("read", (), True)),
        *(("stored", (), True), ("stored_later", (), True), ("loaded_only", (), False)),
        *(("method", ("takes",), True), ("method", ("other",), False), ("gone", (), False)),
    ],
)
def test_a_name_is_there_if_an_object_of_the_class_would_have_it(
    name: str, takes: tuple[str, ...], there: bool
) -> None:
    touch = Touch(f"{__name__}:Stores", (name,), takes, Part.ALL, "", "")
    assert touched.is_there(touch) is there
    either = touch._replace(any_of=("not_there", name))
    assert touched.is_there(either) is there
    assert not touched.is_there(touch._replace(owner=f"{__name__}:Gone"))
    assert not touched.is_there(touch._replace(owner="no.such.module:Stores"))


def lacking(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
    missing = tuple(
        Touch("vllm.a:Thing", (f"for_{part.value}",), (), part, "", "") for part in parts
    )
    monkeypatch.setattr(touched, "missing", lambda: missing)


def sentences(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = (r for r in caplog.records if "continuum" in r.name and r.levelname == "WARNING")
    return [record.getMessage() for record in ours]


def test_what_several_parts_lack_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking(monkeypatch, Part.ORDER, Part.TIER, Part.PRIORITY, Part.HYBRIDS)
    engine = Engine(extra_config={"dram_bytes": "1MiB"})
    assert sentences(caplog) == [
        f"ContinuumConnector: {release()} lacks Thing.for_order, Thing.for_tier, so turns wait in "
        "vLLM's own order, and there is no DRAM tier"
    ]
    assert engine.connector.mode is Mode.ATTACHED
    assert not engine.connector.side.orders
    assert not engine.connector.side.tier.is_up


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (Part.ALL, {}),
        (Part.PRIORITY, {"policy": "priority"}),
        (Part.HYBRIDS, {"groups": "state"}),
        (Part.HYBRIDS, {"groups": "hybrid"}),
    ],
)
def test_who_needs_what_is_missing_steps_aside_with_one_sentence(
    part: Part,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lacking(monkeypatch, part)
    engine = Engine(**options)
    assert sentences(caplog) == [
        f"ContinuumConnector steps aside: {release()} lacks Thing.for_{part.value}, so turns are "
        "served as stock vLLM serves them"
    ]
    assert engine.connector.mode is Mode.ASIDE
    assert getattr(engine.scheduler, "_continuum", None) is None
    assert Engine().connector.mode is (Mode.ASIDE if part is Part.ALL else Mode.ATTACHED)


def test_who_is_never_bound_says_so_once_and_is_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("bind_kv_cache_manager", "bind_gpu_block_pool"):
        monkeypatch.setattr(ContinuumConnector, name, lambda self, bound: None)
    engine = Engine()
    for each in "ab":
        engine.add(each, 100, 4, program="p")
    engine.run_until_idle()
    assert engine.connector.mode is Mode.ASIDE
    (said,) = sentences(caplog)
    assert f"steps aside: {release()} has bound no block pool to it" in said
    engine.scheduler.shutdown()


@pytest.mark.parametrize("how", ["another name", "another abstract hook"])
def test_where_our_class_could_not_be_built_vllm_is_told_of_no_connector(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "another name":
        lacking(monkeypatch, Part.LOAD)
    else:
        base = touched._owner(touched._CONNECTOR)
        asked = base.__abstractmethods__ | {"begin_step"}
        monkeypatch.setattr(base, "__abstractmethods__", asked)
    monkeypatch.setattr(attach.logger, "propagate", True)
    named = SimpleNamespace(kv_connector="ContinuumConnector")
    theirs = SimpleNamespace(kv_connector="ExampleConnector")
    for transfer, kept in ((named, None), (theirs, theirs), (None, None)):
        args = SimpleNamespace(kv_transfer_config=transfer)
        attach._check_args(args)
        assert args.kv_transfer_config is kept
    (said,) = sentences(caplog)
    assert f"{release()} has another interface of connectors (" in said
    assert "for_load" in said or "begin_step" in said


def test_the_schedulers_methods_that_we_override_are_in_the_table() -> None:
    """`super()` finds them past any watch."""
    ours = {n for n in vars(attach.subclass(Scheduler)) if not n.startswith("__")}
    ours -= {"_continuum", "_abc_impl"}
    named = {n for each in TOUCHED if each.owner.endswith(":Scheduler") for n in each.any_of}
    assert ours <= named


def test_continuum_check_says_of_a_release_what_a_servers_log_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert planned._lacks() == {"lacks_all": "", "lacks": []}
    lacking(monkeypatch, Part.TIER, Part.HYBRIDS)
    lacks = f"{release()} lacks Thing.for_"
    assert planned._lacks()["lacks"] == [
        f"{lacks}tier, so there is no DRAM tier",
        "for models with windows, chunks or states, and with drafts, "
        f"{lacks}hybrids, so turns are served as stock vLLM serves them",
    ]
    lacking(monkeypatch, Part.ALL)
    assert planned._lacks()["lacks_all"].startswith(f"{lacks}all, so turns are served as stock")
