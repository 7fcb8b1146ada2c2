"""docs/rollouts.md: what it tells trainers to write arrives where their vLLM takes it.

The names are pinned below as each trainer has them; where one is installed, its own classes read
our lines. They want another Python environment than this one (their own vLLM, Ray):
PYTHONPATH=their folder, and `-m full`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from continuum_connector.config import load_config
from tests.markdown import ROOT, tokens

PAGE = "docs/rollouts.md"
READERS = {"yaml": yaml.safe_load, "toml": tomllib.loads}
# Trainer -> the keys down to the arguments of vLLM's engine, read in the version that PAGE names.
WAY = {
    "verl": ("actor_rollout_ref", "rollout", "engine_kwargs", "vllm"),
    "SkyRL": ("generator", "inference_engine", "engine_init_kwargs"),
    "NeMo-RL": ("policy", "generation", "vllm_kwargs"),
    "prime-rl": ("inference", "vllm"),
}
ARGUMENT = "kv_transfer_config"
# They may hand it to vllm.LLM, which makes the config before it loads plugins, so our default of
# kv_role is not there yet (tests/vllm/test_kv_role.py).
BEFORE_PLUGINS = {"SkyRL", "NeMo-RL"}


def recipe(trainer: str) -> Any:
    """The block of configuration below the trainer's heading."""
    heading = ""
    for before, token in zip(tokens(PAGE), tokens(PAGE)[1:], strict=False):
        if before.type == "heading_open":
            heading = token.content
        if token.type == "fence" and heading == trainer and token.info in READERS:
            return READERS[token.info](token.content)
    raise AssertionError(f"{PAGE} has no configuration below the heading {trainer}")


def engine_arguments(trainer: str) -> dict[str, Any]:
    found = recipe(trainer)
    for key in WAY[trainer]:
        found = found[key]
    return dict(found)


@pytest.mark.parametrize("trainer", WAY)
def test_a_recipe_takes_the_trainers_own_way_to_a_config_that_we_accept(trainer: str) -> None:
    transfer = engine_arguments(trainer)[ARGUMENT]
    extra = transfer.pop("kv_connector_extra_config")
    role = {"kv_role": "kv_both"} if trainer in BEFORE_PLUGINS else {}
    assert transfer == {"kv_connector": "ContinuumConnector"} | role
    assert load_config(extra).dram_bytes > 0


def test_every_trainer_with_a_recipe_is_in_both_tables() -> None:
    text = (ROOT / PAGE).read_text()
    for trainer in WAY:
        rows = re.findall(rf"^\| (?:\[{trainer}\]|{trainer} )", text, re.MULTILINE)
        assert len(rows) == 2, trainer


def dotted(config: dict[str, Any], before: str = "") -> list[str]:
    """The same as overrides on a command line."""
    lines = []
    for key, value in config.items():
        name = f"{before}{key}"
        lines += dotted(value, f"{name}.") if isinstance(value, dict) else [f"{name}={value}"]
    return lines


@pytest.mark.full
def test_verl_hands_the_recipe_to_vllms_parser() -> None:
    verl = pytest.importorskip("verl")
    hydra = pytest.importorskip("hydra")
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config

    theirs = str(Path(verl.__file__).parent / "trainer" / "config")
    ours = [f"++{line}" for line in dotted(recipe("verl"))]
    with hydra.initialize_config_dir(config_dir=theirs, version_base=None):
        config = hydra.compose("ppo_trainer", [*ours, "actor_rollout_ref.rollout.name=vllm"])
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    flag, text = build_cli_args_from_config(rollout.engine_kwargs["vllm"])
    assert flag == f"--{ARGUMENT}"
    assert json.loads(text) == engine_arguments("verl")[ARGUMENT]


@pytest.mark.full
def test_skyrl_keeps_the_recipe_as_it_is() -> None:
    config = pytest.importorskip("skyrl.train.config")
    made = config.SkyRLTrainConfig.from_cli_overrides(dotted(recipe("SkyRL")))
    engine = made.generator.inference_engine
    assert engine.engine_init_kwargs[ARGUMENT] == engine_arguments("SkyRL")[ARGUMENT]
    assert engine.offload_kv_for_weight_sync is False


@pytest.mark.full
def test_prime_rl_hands_the_recipe_to_vllm() -> None:
    inference = pytest.importorskip("prime_rl.configs.inference")
    made = inference.InferenceConfig.model_validate(recipe("prime-rl")["inference"])
    found = vars(made.to_namespace())
    assert {key: found[key] for key in engine_arguments("prime-rl")} == engine_arguments("prime-rl")
