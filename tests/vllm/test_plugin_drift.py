"""What vLLM's entry point does on a vLLM that has renamed what it touches: a sentence, no more.

vLLM calls `register` in every process of an environment, catches nothing, and most of these
processes serve without us.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import vllm.config
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector import factory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from bench.sim import versions
from continuum_connector.vllm import plugin
from continuum_connector.vllm.touched import release

NAME = "ContinuumConnector"
FACTORY, ARG_UTILS = factory.__name__, arg_utils.__name__
SENTENCE = f"{NAME}: {release()} lacks what it needs, so "
Patch = pytest.MonkeyPatch


class Odd:
    """Raises whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"odd: {name}")


class OddModule(ModuleType):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"odd: {name}")


def _takes_other_arguments(*, connector: str) -> None: ...


def _refuses(*_: Any) -> None:
    raise ValueError("out-of-tree connectors are not allowed")


# Every name that plugin.py touches, renamed or odd: what is done to vLLM.
NOT_NAMED: dict[str, Callable[[Patch], None]] = {
    "its module": lambda p: p.setitem(sys.modules, FACTORY, None),
    "its module raises": lambda p: p.setitem(sys.modules, FACTORY, OddModule("odd")),
    "KVConnectorFactory": lambda p: p.delattr(factory, "KVConnectorFactory"),
    "KVConnectorFactory is odd": lambda p: p.setattr(factory, "KVConnectorFactory", Odd()),
    "register_connector": lambda p: p.delattr(KVConnectorFactory, "register_connector"),
    "register_connector's arguments": lambda p: p.setattr(
        KVConnectorFactory, "register_connector", _takes_other_arguments
    ),
    "register_connector refuses": lambda p: p.setattr(
        KVConnectorFactory, "register_connector", _refuses
    ),
    "register_connector is None": lambda p: p.setattr(
        KVConnectorFactory, "register_connector", None
    ),
}
NO_ROLE: dict[str, Callable[[Patch], None]] = {
    "vllm.config": lambda p: p.setitem(sys.modules, "vllm.config", None),
    "KVTransferConfig": lambda p: p.delattr(vllm.config, "KVTransferConfig"),
    "KVTransferConfig is odd": lambda p: p.setattr(vllm.config, "KVTransferConfig", Odd()),
    "__post_init__": lambda p: p.setattr(vllm.config, "KVTransferConfig", type("Plain", (), {})),
    "KVTransferConfig is not Python's": lambda p: p.setattr(vllm.config, "KVTransferConfig", int),
}
NOT_ATTACHED: dict[str, Callable[[Patch], None]] = {
    "EngineArgs": lambda p: p.delattr(arg_utils, "EngineArgs"),
    "EngineArgs is odd": lambda p: p.setattr(arg_utils, "EngineArgs", Odd()),
    "create_engine_config": lambda p: p.delattr(EngineArgs, "create_engine_config"),
    "EngineArgs cannot be changed": lambda p: p.setattr(arg_utils, "EngineArgs", object),
}
CASES = [
    *((case, "no config can name it") for case in NOT_NAMED.items()),
    *((case, 'needs "kv_role":"kv_both"') for case in NO_ROLE.items()),
    *((case, "it does not attach to vLLM's scheduler") for case in NOT_ATTACHED.items()),
]


@pytest.fixture(autouse=True)
def _registered() -> None:
    plugin.register()


@pytest.fixture(name="said")
def _said(caplog: pytest.LogCaptureFixture, monkeypatch: Patch) -> Callable[[], list[str]]:
    logger = logging.getLogger(f"vllm.{plugin.__name__}")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("DEBUG", logger=logger.name)
    return lambda: [r.getMessage() for r in caplog.records if r.name == logger.name]


@contextlib.contextmanager
def renamed(rename: Callable[[Patch], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        rename(patch)
        yield


@pytest.mark.parametrize(("case", "consequence"), CASES, ids=lambda each: each[0])
def test_whatever_vllm_renames_register_says_one_sentence(
    case: Any, consequence: str, said: Callable[[], list[str]]
) -> None:
    with renamed(case[1]):
        plugin.register()
    (sentence,) = said()
    assert sentence.startswith(SENTENCE)
    assert consequence in sentence
    assert sentence.endswith("; a server that does not name it is as without it")


def test_where_all_is_well_it_says_nothing(said: Callable[[], list[str]]) -> None:
    plugin.register()
    assert said() == []


def test_everything_at_once_is_one_sentence_too(said: Callable[[], list[str]]) -> None:
    with renamed(NO_ROLE["KVTransferConfig"]), renamed(NOT_ATTACHED["EngineArgs"]):
        plugin.register()
    (sentence,) = said()
    assert "kv_role" in sentence
    assert "does not attach" in sentence


def test_without_the_name_registered_nothing_else_of_vllm_is_changed() -> None:
    """Then nobody can name us, so no config needs a role of ours, or our checks."""
    code = """
import sys
import vllm.distributed.kv_transfer.kv_connector.factory as factory
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
del factory.KVConnectorFactory.register_connector
own = KVTransferConfig.__post_init__, EngineArgs.create_engine_config
from continuum_connector.vllm import plugin
plugin.register()
assert own == (KVTransferConfig.__post_init__, EngineArgs.create_engine_config)
config = KVTransferConfig(kv_connector="ContinuumConnector", kv_role="kv_both")
try:
    factory.KVConnectorFactory.get_connector_class(config)
except ValueError as error:
    print("vLLM says:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "vLLM says: Unsupported connector type: ContinuumConnector" in done.stdout
    told = [line for line in (done.stdout + done.stderr).splitlines() if "so no config can" in line]
    assert len(told) == 1
    assert release() in told[0]


def test_a_module_that_vllm_imports_later_may_lack_it_too(
    said: Callable[[], list[str]], monkeypatch: Patch
) -> None:
    """The import itself must not fail: a server without us needs that module."""
    finder = plugin._AttachOnImport()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    spec = finder.find_spec(ARG_UTILS)
    spec.loader.exec_module = None
    found = SimpleNamespace(loader=SimpleNamespace(exec_module=lambda module: None))
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    finder.find_spec(ARG_UTILS).loader.exec_module(ModuleType("without EngineArgs"))
    (sentence,) = said()
    assert "it does not attach to vLLM's scheduler" in sentence
    assert finder.find_spec("another") is None


# --- who does not name us ----------------------------------------------------------------
FIELDS = {
    "kv_transfer_config of EngineArgs": lambda args, made: delattr(args, "kv_transfer_config"),
    "kv_transfer_config of VllmConfig": lambda args, made: delattr(made, "kv_transfer_config"),
    "scheduler_config": lambda args, made: delattr(made, "scheduler_config"),
    "parallel_config": lambda args, made: delattr(made, "parallel_config"),
    **{
        name: lambda args, made, name=name: delattr(made.kv_transfer_config, name)
        for name in ("kv_connector", "kv_connector_extra_config", "kv_role")
    },
}


def _hidden(config: VllmConfig) -> SimpleNamespace:
    """A config whose fields can be taken away, one by one."""
    hidden = SimpleNamespace(**vars(config))
    if config.kv_transfer_config is not None:
        hidden.kv_transfer_config = SimpleNamespace(**vars(config.kv_transfer_config))
    return hidden


def _config(connector: str | None) -> Any:
    transfer = connector and KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    return _hidden(versions.vllm_config(block_size=16, transfer=transfer or None))


@pytest.mark.parametrize("connector", [None, "ExampleConnector", NAME])
@pytest.mark.parametrize("field", FIELDS)
def test_a_config_that_cannot_be_read_is_served_as_vllm_made_it(
    field: str, connector: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    config = _config(connector)

    class LaterArgs:
        def __init__(self) -> None:
            self.kv_transfer_config = config.kv_transfer_config

        def create_engine_config(self, usage_context: Any = None) -> Any:
            return config

    plugin._attach_to(SimpleNamespace(EngineArgs=LaterArgs))
    args = LaterArgs()
    if not (field.startswith("kv_") and " of " not in field and connector is None):
        FIELDS[field](args, config)
    own = monkeypatch.setattr  # its logger may not pass lines on
    own(logging.getLogger("vllm.continuum_connector.vllm.attach"), "propagate", True)
    assert args.create_engine_config(UsageContext.OPENAI_API_SERVER) is config
    told = [r.getMessage() for r in caplog.records if r.name.endswith("vllm.attach")]
    assert all("cannot read the config of vLLM" in each for each in told)
    if connector != NAME:
        assert not told
        chosen = getattr(config, "scheduler_config", None)
        assert "get_scheduler_cls" not in vars(chosen) if chosen else True
    elif field in ("scheduler_config", "parallel_config"):
        assert told
