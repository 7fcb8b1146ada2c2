"""Attach: whose scheduler it is, and what happens where we cannot or must not be."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import RequestStatus

from bench.sim import versions
from continuum_connector import build
from continuum_connector.connector import ContinuumConnector, Mode
from continuum_connector.errors import ConfigError
from continuum_connector.scheduler.queue import ProgramQueue
from continuum_connector.vllm import attach, compat, plugin
from continuum_connector.vllm.hooks import KvFirst
from tests.vllm.agents import AgentEngine
from tests.vllm.harness import Engine

MODES = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
BASES = {False: Scheduler, True: AsyncScheduler}


class OwnScheduler(Scheduler):
    """What a user names with --scheduler-cls."""


def sentences(caplog: pytest.LogCaptureFixture, level: str = "WARNING") -> list[str]:
    ours = (r for r in caplog.records if "continuum" in r.name and r.levelname == level)
    return [record.getMessage() for record in ours]


def run_some(engine: Engine) -> dict[str, list[int]]:
    for i in range(3):
        engine.add(f"a{i}", 100 + i, program="p", seed=i)
    engine.run_until_idle()
    engine.add("b", engine.next_prompt("a0", 20), program="p")
    engine.run_until_idle()
    return engine.outputs


def transfer(extra: Any, connector: str = "ContinuumConnector", **more: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra, **more
    )


def in_multi(extra: Any) -> KVTransferConfig:
    """Ours as a child of vLLM's MultiConnector, behind another."""
    toy = {"kv_connector": "ToyConnector", "kv_role": "kv_both"}
    toy["kv_connector_module_path"] = "tests.vllm.toy_connector"
    ours = {"kv_connector": "ContinuumConnector", "kv_role": "kv_both"}
    children = [toy, ours | {"kv_connector_extra_config": extra}]
    return transfer({"connectors": children}, "MultiConnector")


def made(kv_transfer_config: Any, model: str = "", **flags: Any) -> VllmConfig:
    """What vLLM makes of a command line, where it makes it."""
    plugin.register()
    model = model or versions.vllm_config(block_size=16).model_config.model
    args = EngineArgs(
        model=model, skip_tokenizer_init=True, kv_transfer_config=kv_transfer_config, **flags
    )
    return args.create_engine_config(UsageContext.LLM_CLASS)


def test_registering_twice_wraps_once_and_keeps_vllms_signature() -> None:
    plugin.register()
    wrapped = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is wrapped
    assert "usage_context" in inspect.signature(wrapped).parameters


@MODES
def test_vllms_own_answer_is_a_class_whatever_other_servers_this_process_made(
    async_scheduling: bool,
) -> None:
    assert made(transfer({})).scheduler_config.get_scheduler_cls() is not Scheduler
    assert SchedulerConfig.get_scheduler_cls.__module__ == "vllm.config.scheduler"
    config = versions.vllm_config(block_size=16).scheduler_config
    config.async_scheduling = async_scheduling
    assert config.get_scheduler_cls() is BASES[async_scheduling]


@MODES
def test_ours_is_a_class_that_can_be_derived_from_named_and_pickled(async_scheduling: bool) -> None:
    config = made(transfer({}))
    config.scheduler_config.async_scheduling = async_scheduling
    for each in (config, pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        ours: Any = each.scheduler_config.get_scheduler_cls()
        assert issubclass(ours, BASES[async_scheduling])
        assert ours.__name__ == f"Continuum{BASES[async_scheduling].__name__}"
        assert pickle.loads(pickle.dumps(ours)) is ours
        assert issubclass(type("Derived", (ours,), {}), ours)
    each.scheduler_config.async_scheduling = not async_scheduling
    theirs = config.scheduler_config.get_scheduler_cls()
    assert theirs is ours, "a copy asks itself, not the config that it was copied from"


@pytest.mark.parametrize(
    "other",
    [None, transfer({"dram_byte": 1, "connectors": 3}, "ExampleConnector")],
    ids=["no connector", "another connector"],
)
def test_a_config_that_does_not_name_us_is_the_one_that_vllm_makes(
    other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTINUUM_NO_SUCH_KEY", "1")
    config = made(other)
    for part in (config.scheduler_config, config.parallel_config):
        fields = {field for field in vars(part) if not field.startswith("__")}
        assert fields <= set(type(part).__dataclass_fields__)
    assert config.scheduler_config.get_scheduler_cls().__module__.startswith("vllm.")


def test_vllm_copies_our_config_for_a_draft_model_as_it_does_any_other() -> None:
    """Field by field, and it fails at what is no field (DFlash, DSpark and others from 0.30 on)."""
    ours, stock = made(transfer({})), made(None)
    assert replace(ours).scheduler_config.get_scheduler_cls() is not Scheduler
    for field in dataclasses.fields(ours):
        try:
            replace(getattr(stock, field.name))
        except (AttributeError, TypeError, ValueError):  # none is set, or vLLM cannot copy its own
            continue
        replace(getattr(ours, field.name))
    assert replace(ours.parallel_config, rank=3).rank == 3


@pytest.mark.parametrize("named", [transfer({}), in_multi({})])
def test_a_failed_load_is_a_miss_for_whichever_scheduler_reads_the_config(named: Any) -> None:
    named.kv_load_failure_policy = "fail"
    assert made(named).kv_transfer_config.kv_load_failure_policy == "recompute"
    theirs = transfer({}, "ExampleConnector", kv_load_failure_policy="fail")
    assert made(theirs).kv_transfer_config.kv_load_failure_policy == "fail"


@pytest.mark.parametrize("how", ["alone", "in a MultiConnector", "in the environment"])
@pytest.mark.parametrize("usage", [UsageContext.OPENAI_API_SERVER, UsageContext.LLM_CLASS, None])
def test_a_typo_stops_vllm_where_it_makes_its_config_before_it_looks_for_the_model(
    how: str, usage: UsageContext | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {} if how == "in the environment" else {"dram_byte": 1}
    if not extra:
        monkeypatch.setenv("CONTINUUM_DRAM_BYTE", "1")
    plugin.register()
    args = EngineArgs(
        model="/no/such/model",
        kv_transfer_config=in_multi(extra) if "Multi" in how else transfer(extra),
    )
    is_server = usage is UsageContext.OPENAI_API_SERVER
    kind: Any = SystemExit if is_server else ConfigError
    with pytest.raises(kind) as caught:
        args.create_engine_config(usage_context=usage)
    said = str(caught.value)
    assert said.startswith("ContinuumConnector: ") == is_server
    assert "is unknown, so it would have no effect; did you mean" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "named", [transfer({}), in_multi({})], ids=["alone", "in a MultiConnector"]
)
def test_an_option_that_would_replace_us_stops_vllm(named: KVTransferConfig) -> None:
    said = r"--kv-offloading-size 4 .* nothing of ours would run; .*CONTINUUM_DRAM_BYTES=4GiB"
    with pytest.raises(ConfigError, match=said):
        made(named, kv_offloading_size=4)
    theirs = made(transfer({}, "ExampleConnector"), kv_offloading_size=4)
    assert theirs.kv_transfer_config.kv_connector == "OffloadingConnector", "as vLLM replaces it"


@pytest.mark.parametrize("is_inside", [False, True], ids=["two of us", "one inside another"])
def test_a_multi_connector_has_one_of_us_and_no_deeper_than_that(is_inside: bool) -> None:
    """The second would keep the same blocks again; nobody would attach the scheduler to the deeper
    one, or count its ranks."""
    outer = in_multi({}).kv_connector_extra_config["connectors"]
    inner = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    inner |= {"kv_connector_extra_config": {"connectors": outer}}
    children = [outer[0], inner] if is_inside else [*outer, outer[1]]
    with pytest.raises(ConfigError, match="name it once, in the outer one"):
        made(transfer({"connectors": children}, "MultiConnector"))


@pytest.mark.parametrize("named", [None, transfer({})], ids=["without ours", "with ours"])
def test_a_vllm_without_that_option_starts_as_ever(named: KVTransferConfig | None) -> None:
    """Our plugin is in every server's process, also in those that do not name us."""

    class LaterArgs:
        kv_transfer_config = named

        def create_engine_config(self) -> VllmConfig:
            return versions.vllm_config(block_size=16, transfer=named)

    attach.install(LaterArgs)
    assert isinstance(LaterArgs().create_engine_config(), VllmConfig)


@pytest.mark.parametrize("key", ["trace_path", "switch_path"])
def test_a_folder_that_is_not_there_stops_vllm_before_weights_are_loaded(
    key: str, tmp_path: Path
) -> None:
    ours = transfer({key: str(tmp_path / "tpyo" / "file")})
    with pytest.raises(ConfigError, match=f"^{key} = .*tpyo"):
        made(ours)
    away = {"data_parallel_size": 2, "data_parallel_size_local": 0}
    made(ours, **away, data_parallel_address="127.0.0.1")  # its engines are on other nodes
    (tmp_path / "tpyo").mkdir()
    made(ours)
    assert not any((tmp_path / "tpyo").iterdir())


def test_what_is_loaded_before_a_server_names_us() -> None:
    """Engines and workers load the plugin alone; whoever makes configs, what attaches as well."""
    code = """
import json, sys
from continuum_connector.vllm.plugin import register
def ours():
    return sorted(name for name in sys.modules if name.startswith("continuum_connector."))
register()
assert "vllm.engine.arg_utils" not in sys.modules
engine = ours()
import vllm.engine.arg_utils
register()
print(json.dumps([engine, ours()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    engine, api_server = json.loads(done.stdout.splitlines()[-1])
    room = "continuum_connector.vllm"
    assert engine == [room, f"{room}.plugin"]
    assert api_server == [room, f"{room}.attach", f"{room}.plugin"]


def test_who_loads_plugins_before_vllms_arguments_is_served_as_well() -> None:
    """A trainer, or a worker of Ray's: vLLM loads plugins once, and its EngineArgs not again."""
    code = """
import sys
from vllm.plugins import load_general_plugins
def ours():
    modules = [type(each).__module__ for each in sys.meta_path]
    return [each for each in modules if each == "continuum_connector.vllm.plugin"]
load_general_plugins()
from continuum_connector.vllm import attach
from continuum_connector.vllm import plugin
plugin.register()
assert "vllm.engine.arg_utils" not in sys.modules
assert len(ours()) == 1
from vllm.engine.arg_utils import EngineArgs
assert not ours()
assert hasattr(EngineArgs.create_engine_config, attach._MARK)
from vllm.engine import arg_utils
assert arg_utils.__spec__.origin == arg_utils.__file__
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@MODES
def test_a_server_without_our_connector_gets_vllms_own_class(async_scheduling: bool) -> None:
    plugin.register()
    engine = Engine(connector=None, async_scheduling=async_scheduling)
    assert type(engine.scheduler) is BASES[async_scheduling]
    assert "allocate_slots" not in vars(engine.scheduler.kv_cache_manager)


def test_a_server_with_another_connector_gets_vllms_own_class() -> None:
    plugin.register()
    engine = Engine(
        connector="ToyConnector",
        connector_module="tests.vllm.toy_connector",
        extra_config={"world_size": 1},
    )
    assert type(engine.scheduler) is Scheduler


@MODES
@pytest.mark.parametrize(
    "name",
    [None, "continuum_connector.scheduler_cls"],
    ids=["by itself", "--scheduler-cls"],
)
def test_the_scheduler_derives_from_the_one_vllm_would_have_chosen(
    async_scheduling: bool, name: Any
) -> None:
    engine = AgentEngine(async_scheduling=async_scheduling, scheduler_cls=name)
    base = BASES[async_scheduling]
    assert type(engine.scheduler).__mro__[1] is base
    assert type(engine.scheduler).__name__ == f"Continuum{base.__name__}"
    assert engine.vllm_config.scheduler_config.scheduler_cls == name
    engine.run_turn("a", 200, program="p")
    assert engine.num_pins() == 1
    assert engine.reset_prefix_cache()


@MODES
def test_scheduler_cls_without_our_connector_is_vllms_own_class(async_scheduling: bool) -> None:
    engine = Engine(
        connector=None,
        async_scheduling=async_scheduling,
        scheduler_cls="continuum_connector.scheduler_cls",
    )
    assert type(engine.scheduler) is BASES[async_scheduling]


def stock_with_one_sentence(engine: Engine, caplog: pytest.LogCaptureFixture, part: str) -> None:
    """It serves as a server without a connector does, and says why once."""
    stock = Engine(connector=None)
    assert run_some(engine) == run_some(stock)
    assert engine.num_prefill_tokens == stock.num_prefill_tokens
    assert engine.connector.mode is Mode.ASIDE
    assert not engine.foreign_refs()
    assert engine.reset_prefix_cache()
    assert not engine.connector.has_pending_push_work()
    told = [each.kv_connector_stats for each in engine.stats if each.kv_connector_stats]
    assert [each["gauges"]["aside"] for each in told if "gauges" in each] == [1.0]
    engine.scheduler.shutdown()
    (said,) = sentences(caplog)
    assert said.startswith("ContinuumConnector steps aside: ")
    assert part in said


@pytest.mark.parametrize("dram_bytes", [0, "4MiB"])
def test_a_users_own_scheduler_stays_and_we_step_aside(
    dram_bytes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(scheduler_cls=OwnScheduler, extra_config={"dram_bytes": dram_bytes})
    assert type(engine.scheduler) is OwnScheduler
    stock_with_one_sentence(engine, caplog, "OwnScheduler'> is not ours")
    assert build.resolve_config(engine.vllm_config, engine._cache(100))[1], (
        "the workers take no DRAM"
    )


def test_a_scheduler_that_a_user_derives_from_ours_is_ours() -> None:
    base: Any = attach.subclass(Scheduler)
    engine = AgentEngine(scheduler_cls=type("Derived", (base,), {}))
    engine.run_turn("a", 200, program="p")
    assert engine.num_pins() == 1


@pytest.mark.parametrize("dram_bytes", [0, "4MiB"])
def test_where_vllm_loads_no_plugins_we_step_aside(
    dram_bytes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """VLLM_PLUGINS without ours, and the connector named by its module: nobody prepared the
    config."""
    monkeypatch.setattr(versions, "prepare", lambda vllm_config: None)
    engine = Engine(extra_config={"dram_bytes": dram_bytes})
    assert type(engine.scheduler) is Scheduler
    stock_with_one_sentence(engine, caplog, "let VLLM_PLUGINS load `continuum`")


def test_attaching_is_said_once_with_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="vllm"):
        AgentEngine()
    said = [s for s in sentences(caplog, "INFO") if "attached" in s]
    assert said == [
        "ContinuumConnector attached to Scheduler: pins yield, turns wait in program order"
    ]


@MODES
def test_without_prefix_caching_we_step_aside_with_one_sentence(
    async_scheduling: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(enable_prefix_caching=False, async_scheduling=async_scheduling)
    first = engine.connector.get_kv_connector_stats()
    told = {"switched_on": 0.0, "aside": 1.0}
    assert first.data == {"gauges": told}, "or /metrics would say that it is on"
    stock = Engine(enable_prefix_caching=False, async_scheduling=async_scheduling, connector=None)
    assert run_some(engine) == run_some(stock)
    assert engine.num_prefill_tokens == stock.num_prefill_tokens
    assert engine.connector.mode is Mode.ASIDE
    assert engine.usage() == 0
    assert engine.reset_prefix_cache()
    assert not engine.connector.has_pending_push_work()
    engine.scheduler.shutdown()
    said = sentences(caplog)
    assert len(said) == 1
    assert "prefix caching is off" in said[0]
    assert "--enable-prefix-caching" in said[0]


def test_an_unproven_kv_cache_is_left_to_vllm_with_one_sentence() -> None:
    class NewSpec(KVCacheSpec):
        """A kind of attention that a later vLLM might bring."""

    config = versions.kv_cache_config(100, 16, (None,))
    config.kv_cache_groups[0].kv_cache_spec = NewSpec(block_size=16)
    reason = build.reason_to_step_aside(Engine(connector=None).vllm_config, config)
    assert reason == (
        "KV group 0 is NewSpec, which is not proven yet, "
        "so turns of this model are served as stock vLLM serves them"
    )


def test_block_sizes_that_hashes_do_not_divide_are_refused_with_a_sentence() -> None:
    config = versions.kv_cache_config(100, 16, (None, 64))
    object.__setattr__(config.kv_cache_groups[1].kv_cache_spec, "block_size", 24)
    config.hash_block_size = 16
    reason = build.reason_to_step_aside(Engine(connector=None).vllm_config, config)
    assert reason.startswith("block sizes [16, 24] with hashes of 16 are not proven yet")


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ({"dram_byte": 1}, ["`dram_byte` is unknown", "no effect", "did you mean `dram_bytes`?"]),
        ({"dram_bytes": "64 gigs"}, ["'64 gigs'", "cannot be laid out", '"64GiB"']),
        ({"dram_bytes": 100}, ["dram_bytes = 100", "nothing could be kept", '"100GiB"', "or 0"]),
        ({"dram_bytes": 2000}, ["dram_bytes = 2000", "nothing could be offloaded", "or 0"]),
        ({"policy": "ttl"}, ["'ttl'", "server stops", "fixed_ttl"]),
        ({"ttl_s": 100}, ["ttl_s = 100", "no pin would ever", "raise max_ttl_s"]),
        ({"max_pinned_fraction": 2}, ["max_pinned_fraction = 2", "server stops", "Set "]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_config_stops_the_server_with_value_consequence_and_cure(
    extra: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(extra_config=extra)
    for part in parts:
        assert part in str(caught.value)


def test_the_connectors_hooks_are_all_known_to_vllms_base_class() -> None:
    """A hook that vLLM renamed would silently never be called."""
    ours = {"set_clock", "attached", "before_queued", "rank", "make_room", "ensure_bound"}
    ours |= {"begin_epoch", "end_program", "is_on", "let_in", "let_all_in"}
    # vLLM 0.26-0.28 only, or 0.30+ only
    ours |= {"bind_gpu_block_pool", "bind_kv_cache_manager"}
    ours |= {"prefer_cross_layer_blocks", "register_cross_layers_kv_cache"}
    ours |= {"has_pending_block_frees", "get_transfer_results", "get_required_kvcache_layout"}
    ours |= {"requires_kv_delivery", "unregister_kv_caches", "restore_kv_caches"}
    theirs = [base for base in ContinuumConnector.__mro__ if base.__module__.startswith("vllm.")]
    for name in vars(ContinuumConnector):
        if not name.startswith("_") and name not in ours:
            assert any(hasattr(base, name) for base in theirs), name


@MODES
def test_inside_a_multi_connector_we_are_attached_as_alone(
    async_scheduling: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register()
    toy = {
        "kv_connector": "ToyConnector",
        "kv_connector_module_path": "tests.vllm.toy_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"world_size": 1},
    }
    ours = {"kv_connector": "ContinuumConnector", "kv_role": "kv_both"}
    with caplog.at_level("INFO", logger="vllm"):
        engine = Engine(
            connector="MultiConnector",
            extra_config={"connectors": [ours, toy]},
            async_scheduling=async_scheduling,
        )
    assert type(engine.scheduler).__name__ == f"Continuum{BASES[async_scheduling].__name__}"
    assert len([s for s in sentences(caplog, "INFO") if "attached" in s]) == 1
    found = compat.find_ours(engine.connector, ContinuumConnector)
    assert found.mode is not Mode.ASIDE
    assert isinstance(engine.scheduler.waiting, ProgramQueue)


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with a partner"])
def test_vllms_fence_around_freed_blocks_stays_where_a_partner_may_need_it(is_alone: bool) -> None:
    """vLLM frees blocks late where a connector's writes are not ordered behind the
    step in flight. Ours are; what a partner inside a MultiConnector does, we cannot know."""
    ours = {"kv_connector": "ContinuumConnector", "kv_role": "kv_both"}
    partner = {
        "kv_connector": "ToyConnector",
        "kv_connector_module_path": "tests.vllm.toy_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"world_size": 1},
    }
    stock = Engine(connector=None, async_scheduling=True)
    if not hasattr(stock.scheduler, "defer_block_free"):
        pytest.skip("this vLLM has no such fence")
    plugin.register()
    if is_alone:
        engine = Engine(async_scheduling=True)
    else:
        engine = Engine(
            connector="MultiConnector",
            extra_config={"connectors": [ours, partner]},
            async_scheduling=True,
        )
    assert engine.scheduler._continuum is not None
    assert engine.scheduler.defer_block_free is not is_alone


def test_who_waits_with_kv_is_looked_for_once_a_step() -> None:
    """vLLM <= 0.30 asks before each admission, with thousands of skipped requests in line."""
    looks = []

    class Waiting:
        num_computed_tokens = 0

        @property
        def status(self) -> RequestStatus:
            looks.append(self)
            return RequestStatus.WAITING

    loaded, later = (
        SimpleNamespace(status=RequestStatus.WAITING, num_computed_tokens=n) for n in (1, 2)
    )
    queue = [Waiting() for _ in range(500)]
    queue[100:100] = [loaded]
    queue[300:300] = [later]
    scheduler = SimpleNamespace(skipped_waiting=FCFSRequestQueue(queue))
    kv_first = KvFirst(scheduler)
    front: Any = kv_first.front()
    for holder in (loaded, later):
        assert front.peek_request() is front.pop_request() is holder
        assert holder not in scheduler.skipped_waiting
    for _ in range(500):
        assert kv_first.front() is None
    assert len(looks) == 500
    scheduler.skipped_waiting.add_request(loaded)
    kv_first.new_step()
    again: Any = kv_first.front()
    assert again.peek_request() is loaded
