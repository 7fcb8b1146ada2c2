"""What the Helm charts make of deploy/helm: the manifests a cluster would get.

Needs `helm` on PATH and, in the environment, HELM_CHARTS: a folder with the charts that
deploy/README.md names, each under its own name and with its dependencies (`helm pull CHART
--untar`). Without them these tests are skipped; test_deploy.py holds the values files to each
other and to the code without any chart.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.memory import parse_bytes
from deploy.tests.test_deploy_security import OURS, RESTRICTED, Pod

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which vLLM brings")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHARTS = Path(os.environ.get("HELM_CHARTS", "HELM_CHARTS"))
STACK, SERVERS = "vllm-stack", "llm-d-modelservice"
STANDALONE, GATEWAY = "llm-d-router-standalone", "llm-d-router-gateway"
VALUES = {
    STACK: DEPLOY / "helm" / "production-stack.yaml",
    SERVERS: DEPLOY / "helm" / "llm-d" / "modelservice.yaml",
    STANDALONE: DEPLOY / "helm" / "llm-d" / "router.yaml",
    GATEWAY: DEPLOY / "helm" / "llm-d" / "router.yaml",
}
GIB = 1 << 30
TOKEN = "automountServiceAccountToken"

Manifest = dict[str, Any]


def helm(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which("helm") is None:
        pytest.skip("no helm on PATH")
    command = ["helm", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def template(chart: str, *flags: str, values: str | None = None) -> str:
    """The chart rendered with our values, or with those given (then a refusal is an answer)."""
    if not (CHARTS / chart / "Chart.yaml").is_file():
        pytest.skip(f"no chart at {CHARTS / chart}: HELM_CHARTS is a folder with it")
    source = "-" if values is not None else str(VALUES[chart])
    done = helm("template", "here", str(CHARTS / chart), "-f", source, *flags, text=values)
    assert values is not None or done.returncode == 0, done.stderr
    return done.stdout if done.returncode == 0 else done.stderr


@functools.cache
def manifests(chart: str, *flags: str) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(template(chart, *flags)) if each]


def of_kind(kind: str, chart: str, *flags: str) -> list[Manifest]:
    return [each for each in manifests(chart, *flags) if each["kind"] == kind]


def pod_with(container: str, chart: str, *flags: str) -> tuple[Manifest, Manifest]:
    """The pod template that has the container, and the container."""
    ((pod, found),) = (
        (deployment["spec"]["template"], each)
        for deployment in of_kind("Deployment", chart, *flags)
        for each in deployment["spec"]["template"]["spec"]["containers"]
        if each["name"] == container
    )
    return pod, found


def words(container: Manifest) -> list[str]:
    return [*container.get("command", []), *container.get("args", [])]


def after(flag: str, container: Manifest) -> str:
    """The value of a flag that is there once; a second one would win silently."""
    line = words(container)
    assert line.count(flag) == 1, f"{flag}: {line.count(flag)} times in {line}"
    return str(line[line.index(flag) + 1])


# --- every line of ours counts ---------------------------------------------------------------
def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path to each scalar; an empty list or mapping is one too."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    if not inside:
        yield path
    for key, each in inside:
        yield from leaves(each, (*path, key))


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return [{"name": "OTHER"}] if value == [] else f"{value}other"


def changed(values: Manifest, path: tuple[str | int, ...]) -> str:
    document: Any = copy.deepcopy(values)
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = other(place[path[-1]])
    return yaml.safe_dump(document)


@pytest.mark.parametrize("chart", VALUES)
def test_every_line_of_our_values_is_read(chart: str) -> None:
    """Helm passes over a key that no template reads, and a misspelt one with it."""
    values = yaml.safe_load(VALUES[chart].read_text())
    as_is = template(chart, values=yaml.safe_dump(values))
    unread = [
        path for path in leaves(values) if template(chart, values=changed(values, path)) == as_is
    ]
    assert unread == []


# --- the servers -----------------------------------------------------------------------------
@pytest.mark.parametrize("chart", [STACK, SERVERS])
def test_the_server_runs_with_the_connector_and_its_tier(chart: str) -> None:
    pod, server = pod_with("vllm", chart)
    transfer = json.loads(after("--kv-transfer-config", server))
    assert transfer == {"kv_connector": "ContinuumConnector"}
    assert json.loads(after("--kv-events-config", server))["enable_kv_cache_events"] is True
    assert "--no-enable-prefix-caching" not in words(server)
    environment = {each["name"]: each.get("value") for each in server["env"]}
    memory = parse_bytes(f"{server['resources']['limits']['memory']}B")
    assert memory >= parse_bytes(environment["CONTINUUM_DRAM_BYTES"]) + 24 * GIB
    assert server["resources"]["limits"] == server["resources"]["requests"]  # class Guaranteed
    mounts = {each["mountPath"]: each["name"] for each in server["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert str(Path(str(environment["CONTINUUM_SWITCH_PATH"])).parent) in mounts


@pytest.mark.parametrize("chart", [STACK, SERVERS])
def test_kubernetes_waits_for_the_server_to_load_to_answer_and_to_end(chart: str) -> None:
    pod, server = pod_with("vllm", chart)
    start = server["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800
    for probe in ("readinessProbe", "livenessProbe"):
        assert server[probe]["timeoutSeconds"] >= 5
        assert server[probe]["httpGet"] == {"path": "/health", "port": 8000}
    grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
    assert int(after("--shutdown-timeout", server)) < grace


@pytest.mark.parametrize(
    ("chart", "container"),
    [(STACK, "vllm"), (STACK, "router-container"), (SERVERS, "vllm")],
)
def test_the_pods_of_our_values_are_granted_nothing_beyond_what_they_need(
    chart: str, container: str
) -> None:
    template, found = pod_with(container, chart)
    spec = dict(template["spec"])
    for account in of_kind("ServiceAccount", chart):
        if account["metadata"]["name"] == spec["serviceAccountName"]:
            spec.setdefault("automountServiceAccountToken", account.get(TOKEN))
    pod = Pod(spec, found, is_server=container == "vllm")
    table = {**RESTRICTED, **(OURS if pod.is_server else {})}
    assert [setting for setting, holds in table.items() if not holds(pod)] == []


@pytest.mark.parametrize("chart", [STACK, SERVERS])
def test_a_policy_of_our_values_is_about_the_servers(chart: str) -> None:
    pod, server = pod_with("vllm", chart)
    labels = pod["metadata"]["labels"].items()
    (policy,) = (
        each
        for each in of_kind("NetworkPolicy", chart)
        if each["spec"]["podSelector"]["matchLabels"].items() <= labels
    )
    events = json.loads(after("--kv-events-config", server))["endpoint"].rpartition(":")[2]
    (rule,) = policy["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [8000, int(events)]


def test_a_policy_of_our_values_is_about_the_router() -> None:
    pod, router = pod_with("router-container", STACK)
    labels = pod["metadata"]["labels"].items()
    (policy,) = (
        each
        for each in of_kind("NetworkPolicy", STACK)
        if each["spec"]["podSelector"]["matchLabels"].items() <= labels
    )
    ports = [port["port"] for port in policy["spec"]["ingress"][0]["ports"]]
    assert ports == [each["containerPort"] for each in router["ports"] if "router" in each["name"]]


@pytest.mark.parametrize("chart", VALUES)
def test_no_pod_waits_for_a_secret_that_neither_the_chart_nor_the_page_makes(chart: str) -> None:
    page = (DEPLOY / "README.md").read_text()
    made = {each["metadata"]["name"] for each in of_kind("Secret", chart)}
    made |= set(re.findall(r"kubectl create secret generic (\S+)", page))
    for deployment in of_kind("Deployment", chart):
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            for variable in container.get("env", []):
                secret = variable.get("valueFrom", {}).get("secretKeyRef")
                assert secret is None or secret["name"] in made or secret.get("optional"), variable


# --- who finds whom --------------------------------------------------------------------------
def test_the_production_stack_routes_by_session_to_pods_that_prometheus_finds() -> None:
    pod, _ = pod_with("vllm", STACK)
    _, router = pod_with("router-container", STACK)
    assert after("--routing-logic", router) == "session"
    assert after("--session-key", router) == "x-session-id"
    labels = pod["metadata"]["labels"].items()
    wanted = after("--k8s-label-selector", router)
    assert dict(each.split("=") for each in wanted.split(",")).items() <= labels
    (service,) = (
        each for each in of_kind("Service", STACK) if "engine" in each["metadata"]["name"]
    )
    assert service["spec"]["selector"].items() <= labels
    (monitor,) = of_kind("ServiceMonitor", STACK)
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    assert selector <= service["metadata"]["labels"].items()
    ports = {each["name"] for each in service["spec"]["ports"]}
    assert {each["port"] for each in monitor["spec"]["endpoints"]} <= ports


def test_llm_d_finds_the_servers_behind_either_chart() -> None:
    pod, server = pod_with("vllm", SERVERS)
    labels = pod["metadata"]["labels"]
    assert labels["llm-d.ai/role"] == "decode"  # decode-filter
    (monitor,) = of_kind("PodMonitor", SERVERS)
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    assert {ports[each["port"]] for each in monitor["spec"]["podMetricsEndpoints"]} == {8000}
    assert int(after("--port", server)) == 8000
    _, picker = pod_with("epp", STANDALONE, "--set", "router.inferencePool.create=false")
    wanted = after("--endpoint-selector", picker)
    assert dict(each.split("=") for each in wanted.split(",")).items() <= labels.items()
    assert after("--endpoint-target-ports", picker) == "8000"
    (pool,) = of_kind("InferencePool", GATEWAY)
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]


@pytest.mark.parametrize("chart", [STANDALONE, GATEWAY])
def test_the_picker_has_our_plugins_and_a_tokenizer_where_they_look(chart: str) -> None:
    _, picker = pod_with("epp", chart)
    (ours,) = (
        each["data"]["continuum.yaml"]
        for each in of_kind("ConfigMap", chart)
        if "continuum.yaml" in each["data"]
    )
    assert after("--config-file", picker) == "/config/continuum.yaml"
    plugins = {each["type"]: each.get("parameters", {}) for each in yaml.safe_load(ours)["plugins"]}
    _, tokenizer = pod_with("vllm-render", chart)
    producer = plugins["token-producer"]
    assert words(tokenizer)[:4] == ["vllm", "launch", "render", producer["modelName"]]
    (port,) = tokenizer["ports"]
    assert producer["vllm"]["url"] == f"http://localhost:{port['containerPort']}"


# --- agreement with the tools ----------------------------------------------------------------
@pytest.mark.parametrize("chart", VALUES)
def test_helm_lints_and_kubernetes_takes_the_manifests(chart: str, tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(template(chart))
    done = helm("lint", str(CHARTS / chart), "-f", str(VALUES[chart]))
    assert done.returncode == 0, done.stdout
    if shutil.which("kubernetes-validate") is None:
        pytest.skip("linted; no kubernetes-validate on PATH")
    command = ["kubernetes-validate", "--strict", "--quiet", str(rendered)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
