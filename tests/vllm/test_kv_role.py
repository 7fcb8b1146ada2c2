"""kv_role: our connector's name has a default, and nobody else's.

What vLLM loads, and when, is asked in a process of its own: this one has loaded the plugin.
"""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.config
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from bench.sim import versions
from continuum_connector.connector import ContinuumConnector, Mode
from continuum_connector.errors import ConfigError
from continuum_connector.vllm import compat, plugin
from tests.vllm.harness import Engine

OURS = {"kv_connector": "ContinuumConnector"}
TOY = {
    "kv_connector": "ToyConnector",
    "kv_connector_module_path": "tests.vllm.toy_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"world_size": 1},
}


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": list(children)}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def made(transfer: dict[str, Any], usage: UsageContext, model: str = "") -> Any:
    """The config of an `EngineArgs` that was given a dict, as a trainer gives it."""
    model = model or versions.vllm_config(block_size=16).model_config.model
    args: Any = {"model": model, "skip_tokenizer_init": True, "kv_transfer_config": transfer}
    return EngineArgs(**args).create_engine_config(usage).kv_transfer_config


@pytest.fixture(autouse=True)
def _registered() -> None:
    plugin.register()


def in_new_process(code: str, *words: str) -> str:
    """The last line that `code` prints where nothing has loaded our plugin."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_command_everybody_types_is_parsed() -> None:
    """As `vllm serve` does it: the parser loads the plugins, then reads the JSON."""
    code = """
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
print(parser.parse_args(sys.argv[1:]).kv_transfer_config.kv_role)
"""
    assert in_new_process(code, "--kv-transfer-config", json.dumps(OURS)) == "kv_both"
    assert in_new_process(code, "--kv-transfer-config.kv_connector", "ContinuumConnector") == (
        "kv_both"
    )


def test_vllms_engine_arguments_take_a_dict_without_it_but_llm_reads_a_dict_too_early() -> None:
    """docs/configuration.md says so, and docs/rollouts.md which trainer is which."""
    model = versions.vllm_config(block_size=16).model_config.model
    code = """
import sys
from vllm import LLM
from vllm.engine.arg_utils import AsyncEngineArgs
ours = {"kv_connector": "ContinuumConnector"}
try:
    LLM(sys.argv[1], kv_transfer_config=ours)
except ValueError as error:
    assert "Please specify kv_role" in str(error), error
else:
    raise AssertionError("then docs/configuration.md asks for a kv_role that nobody needs")
args = AsyncEngineArgs(sys.argv[1], skip_tokenizer_init=True, kv_transfer_config=ours)
print(args.create_engine_config().kv_transfer_config.kv_role)
"""
    assert in_new_process(code, model) == "kv_both"


@pytest.mark.parametrize("role", [{}, {"kv_role": None}, {"kv_role": "kv_both"}])
def test_however_a_config_is_made_it_has_the_role_and_keeps_it(role: dict[str, Any]) -> None:
    config = KVTransferConfig(**OURS, **role)
    assert config.kv_role == "kv_both"
    assert config.is_kv_transfer_instance
    assert config.engine_id, "vLLM's own __post_init__ has run"
    assert pickle.loads(pickle.dumps(config)).kv_role == "kv_both", "as engines get it"
    assert made({**OURS, **role}, UsageContext.LLM_CLASS).kv_role == "kv_both"


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_connector": "ExampleConnector"},
        {"kv_connector": "Mine"},
        {"kv_connector": "MultiConnector"},
        {"kv_connector": "ContinuumConnector", "kv_role": "both"},
    ],
)
def test_others_have_vllms_own_error_to_the_letter(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="kv_role") as ours:
        KVTransferConfig(**fields)
    stock = getattr(KVTransferConfig.__post_init__, plugin._MARK)
    monkeypatch.setattr(KVTransferConfig, "__post_init__", stock)
    with pytest.raises(ValueError, match="kv_role") as theirs:
        KVTransferConfig(**fields)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    "fields", [{}, {"kv_connector": "ExampleConnector", "kv_role": "kv_consumer"}]
)
def test_a_config_that_does_not_name_us_is_as_it_was_written(fields: dict[str, Any]) -> None:
    config = KVTransferConfig(**fields)
    assert config.kv_role == fields.get("kv_role")


def test_as_a_child_of_a_multi_connector_we_need_none() -> None:
    engine = Engine(
        connector="MultiConnector",
        extra_config={"connectors": [OURS, TOY]},
        async_scheduling=False,
    )
    found = compat.find_ours(engine.connector, ContinuumConnector)
    assert found.mode is not Mode.ASIDE
    assert found._kv_transfer_config.kv_role == "kv_both"


def test_vllms_own_error_stays_for_a_child_that_is_not_ours() -> None:
    child = {**TOY, "kv_role": None}
    with pytest.raises(ValueError, match="Please specify kv_role"):
        Engine(connector="MultiConnector", extra_config={"connectors": [OURS, child]})


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "in a MultiConnector"])
def test_any_other_role_ends_with_one_sentence(role: str, is_alone: bool) -> None:
    ours = {**OURS, "kv_role": role}
    named = KVTransferConfig(**ours if is_alone else multi(ours, TOY))
    said = (
        f"kv_role = '{role}' stops the server, because ContinuumConnector stores KV and loads it "
        "again in the same server; leave kv_role out, or write kv_both"
    )
    args = EngineArgs(model="/no/such/model", kv_transfer_config=named)
    with pytest.raises(SystemExit) as ended:
        args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    assert ended.value.code == f"ContinuumConnector: {said}", "printed, with exit status 1"
    with pytest.raises(ConfigError) as raised:
        args.create_engine_config(UsageContext.LLM_CLASS)
    assert str(raised.value) == said


def test_registering_twice_wraps_once() -> None:
    once = KVTransferConfig.__post_init__
    plugin.register()
    assert KVTransferConfig.__post_init__ is once


class _Frozen:
    """A config whose fields cannot be set, and that asks for a role as vLLM does."""

    kv_connector, kv_role = "ContinuumConnector", property(lambda self: None)

    def __init__(self) -> None:
        self.__post_init__()

    def __post_init__(self) -> None:
        raise ValueError("Please specify kv_role")


@pytest.mark.parametrize(
    "lacks", [SimpleNamespace(), type("Plain", (), {}), _Frozen], ids=["class", "method", "fields"]
)
def test_a_vllm_that_lacks_what_we_touch_asks_for_the_role_itself(
    lacks: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plugin is loaded in every server's process, also where nobody names us."""
    if isinstance(lacks, SimpleNamespace):
        monkeypatch.delattr(vllm.config, "KVTransferConfig")
    else:
        monkeypatch.setattr(vllm.config, "KVTransferConfig", lacks)
    logger = logging.getLogger("vllm.continuum_connector.vllm.plugin")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("WARNING", logger=logger.name):
        plugin.register()
    if lacks is _Frozen:
        with pytest.raises(ValueError, match="Please specify kv_role"):
            _Frozen()
    else:
        (line,) = [r for r in caplog.records if r.name == logger.name]
        assert 'a config that names it needs "kv_role":"kv_both"' in line.getMessage()
