"""What deploy/ grants: nothing that a server can do without, on any target.

One table of settings, walked over every pod and every compose service; what "restricted" means is
Kubernetes' Pod Security Standards (concepts/security/pod-security-standards), written out here
because no admission controller was at hand. test_deploy_charts.py holds the rendered charts to it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.config import load_config
from continuum_connector.memory import parse_bytes

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which vLLM brings")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
UNIT = DEPLOY / "systemd" / "vllm-continuum.service"
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
KEY = {
    "name": "VLLM_API_KEY",
    "valueFrom": {"secretKeyRef": {"name": "continuum-api-key", "key": "key"}},
}
# Where vLLM, PyTorch, Triton, FlashInfer, the CUDA driver and we write: mounted places.
WRITTEN = {"/dev/shm", "/tmp", "/home/vllm", "/var/lib/continuum"}

Yaml = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod as a manifest or a values file describes it."""

    spec: Yaml  # securityContext, automountServiceAccountToken, volumes
    container: Yaml
    is_server: bool = True

    @property
    def security(self) -> Yaml:
        """The container's settings, which win over the pod's."""
        return {**self.spec.get("securityContext", {}), **self.container["securityContext"]}


def read(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def of_kubernetes() -> Pod:
    spec = read("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return Pod(spec, container)


def of_llm_d() -> Pod:
    decode = read("helm/llm-d/modelservice.yaml")["decode"]
    (container,) = decode["containers"]
    spec = {**decode["extraConfig"], "volumes": decode["volumes"]}
    return Pod(spec, {**container, **container["extraConfig"]})


def of_stack() -> Pod:
    """The engine. The chart has no switch for the token: its service account is one without."""
    values = read("helm/production-stack.yaml")
    engine = values["servingEngineSpec"]
    (model,) = engine["modelSpec"]
    (account,) = (one for one in values["extraObjects"] if one["kind"] == "ServiceAccount")
    assert account["metadata"]["name"] == model["serviceAccountName"]
    secret = {"name": engine["vllmApiKey"]["secretName"], "key": engine["vllmApiKey"]["secretKey"]}
    key = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": secret}}
    shm = [{"name": "shm", "mountPath": "/dev/shm"}] if model["shmSize"] else []
    container = {
        "image": f"{model['repository']}:{model['tag']}",
        "securityContext": engine["containerSecurityContext"],
        "env": [key, *model["env"]],
        "resources": model["resources"],
        "volumeMounts": [*shm, *model["extraVolumeMounts"]],
    }
    token = account["automountServiceAccountToken"]
    spec = {"securityContext": engine["securityContext"], "volumes": model["extraVolumes"]}
    return Pod({**spec, "automountServiceAccountToken": token}, container)


def of_stack_router() -> Pod:
    """It asks Kubernetes where the engines are, with its token."""
    router = read("helm/production-stack.yaml")["routerSpec"]
    spec = {"securityContext": router["securityContext"], "volumes": router["extraVolumes"]}
    return Pod(spec, {**router, "securityContext": router["containerSecurityContext"]}, False)


PODS = {
    "kubernetes": of_kubernetes,
    "production-stack": of_stack,
    "production-stack-router": of_stack_router,
    "llm-d": of_llm_d,
}
SERVERS = [name for name in PODS if PODS[name]().is_server]
# Pod Security "restricted", and the read-only root that it does not ask for.
RESTRICTED = {
    "runAsNonRoot": lambda pod: pod.security.get("runAsNonRoot") is True,
    "runAsUser": lambda pod: pod.security.get("runAsUser", 0) > 0,
    "seccomp": lambda pod: pod.security.get("seccompProfile") == {"type": "RuntimeDefault"},
    "escalation": lambda pod: pod.security.get("allowPrivilegeEscalation") is False,
    "capabilities": lambda pod: pod.security.get("capabilities") == {"drop": ["ALL"]},
    "privileged": lambda pod: not pod.security.get("privileged", False),
    "read-only root": lambda pod: pod.security.get("readOnlyRootFilesystem") is True,
    "host": lambda pod: not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec),
    "volumes": lambda pod: all(
        {"emptyDir", "persistentVolumeClaim"} & set(one) for one in pod.spec["volumes"]
    ),
    "bounded volumes": lambda pod: all(
        "sizeLimit" in one["emptyDir"] for one in pod.spec["volumes"] if "emptyDir" in one
    ),
}
# Of a server, beyond that.
OURS = {
    "token": lambda pod: pod.spec.get("automountServiceAccountToken") is False,
    "image": lambda pod: bool(DIGEST.search(pod.container["image"])),
    "key": lambda pod: KEY in pod.container["env"],
    "written": lambda pod: {one["mountPath"] for one in pod.container["volumeMounts"]} >= WRITTEN,
    "home": lambda pod: {"name": "HOME", "value": "/home/vllm"} in pod.container["env"],
    "owner": lambda pod: pod.security["runAsUser"] == 2000 == pod.security["fsGroup"],
    "ephemeral storage": lambda pod: all(
        "ephemeral-storage" in pod.container["resources"][kind] for kind in ("requests", "limits")
    ),
}


@pytest.mark.parametrize("setting", RESTRICTED)
@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_restricted(name: str, setting: str) -> None:
    assert RESTRICTED[setting](PODS[name]())


@pytest.mark.parametrize("setting", OURS)
@pytest.mark.parametrize("name", SERVERS)
def test_a_server_has_a_key_a_digest_no_token_and_room_for_what_it_writes(
    name: str, setting: str
) -> None:
    assert OURS[setting](PODS[name]())


def test_the_image_runs_as_the_user_of_the_pods_who_owns_what_it_writes() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] == "2000:0"
    text = "\n".join(lines)
    assert "chown 2000:0 /var/lib/continuum /models\n" in text
    assert read("compose/compose.yaml")["services"]["vllm"]["user"] == users[-1]


def policies(path: str) -> list[Yaml]:
    text = (DEPLOY / path).read_text()
    documents = [one for one in yaml.safe_load_all(text) if one]
    inside = [each for one in documents for each in one.get("extraObjects", ())]
    return [one for one in (*documents, *inside) if one.get("kind") == "NetworkPolicy"]


@pytest.mark.parametrize(
    ("path", "labels"),
    [
        ("kubernetes/networkpolicy.yaml", {"app.kubernetes.io/name": "continuum-vllm"}),
        ("helm/production-stack.yaml", {"model": "qwen3"}),
        ("helm/llm-d/modelservice.yaml", {"llm-d.ai/model": "qwen3-8b"}),
    ],
)
def test_a_policy_says_who_may_talk_to_a_server_and_whom_it_may_call(
    path: str, labels: dict[str, str]
) -> None:
    (policy,) = (
        one["spec"] for one in policies(path) if one["spec"]["podSelector"]["matchLabels"] == labels
    )
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert all(rule["from"] and rule["ports"] for rule in policy["ingress"])
    assert all(rule["to"] and rule["ports"] for rule in policy["egress"])
    blocks = [one["ipBlock"] for rule in policy["egress"] for one in rule["to"] if "ipBlock" in one]
    wide = [block for block in blocks if not block["cidr"].endswith("/32")]
    assert any("169.254.0.0/16" in block["except"] for block in wide)  # a cloud's metadata
    (dns,) = (
        {port["port"] for port in rule["ports"]}
        for rule in policy["egress"]
        if {"ipBlock": {"cidr": "169.254.20.10/32"}} in rule["to"]
    )
    assert dns == {53}, "where pods ask the node's own cache, without it no name is found"


# --- kustomize --------------------------------------------------------------------------------
def kustomize(folder: Path) -> list[Yaml]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on PATH")
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def named(kind: str, manifests: list[Yaml]) -> Yaml:
    (found,) = (one for one in manifests if one["kind"] == kind)
    return found


ENFORCE = "pod-security.kubernetes.io/enforce"


def test_kustomize_puts_everything_into_a_namespace_that_refuses_what_is_not_restricted() -> None:
    manifests = kustomize(KUBERNETES)
    space = named("Namespace", manifests)["metadata"]
    assert space["labels"][ENFORCE] == "restricted"
    others = [one["metadata"] for one in manifests if one["kind"] != "Namespace"]
    assert {one["namespace"] for one in others} == {space["name"]}
    listed = read("kubernetes/kustomization.yaml")["resources"]
    assert {*listed, "kustomization.yaml", "monitoring.yaml"} == {
        path.name for path in KUBERNETES.glob("*.yaml")
    }


def kustomize_with(component: str, tmp_path: Path) -> list[Yaml]:
    """As somebody has it who took the comment off."""
    shutil.copytree(KUBERNETES, tmp_path / "all")
    kustomization = tmp_path / "all" / "kustomization.yaml"
    text = kustomization.read_text().replace("# components:", "components:")
    assert f"#   - {component} " in text
    kustomization.write_text(text.replace(f"#   - {component} ", f"  - {component} "))
    return kustomize(kustomization.parent)


def test_a_disk_adds_a_claim_and_two_variables_and_stays_restricted(tmp_path: Path) -> None:
    without, with_it = kustomize(KUBERNETES), kustomize_with("disk", tmp_path)
    assert named("Namespace", with_it) == named("Namespace", without)
    wanted = named("Deployment", without)["spec"]["template"]["spec"]
    (container,) = wanted["containers"]
    disk = {"CONTINUUM_DISK_PATH": "/kv/continuum", "CONTINUUM_DISK_BYTES": "900GiB"}
    container["env"] += [{"name": name, "value": value} for name, value in disk.items()]
    container["volumeMounts"].append({"name": "kv", "mountPath": "/kv"})
    claim = {"name": "kv", "persistentVolumeClaim": {"claimName": "continuum-kv"}}
    wanted["volumes"].append(claim)
    assert named("Deployment", with_it)["spec"]["template"]["spec"] == wanted
    (kv,) = (one for one in with_it if one["metadata"]["name"] == "continuum-kv")
    room = parse_bytes(kv["spec"]["resources"]["requests"]["storage"].replace("Gi", "GiB"))
    config = load_config({"dram_bytes": "1GiB"}, disk)
    assert config.disk_bytes < 0.95 * room, "or the tier is refused"


def test_page_locking_adds_two_capabilities_and_changes_nothing_else(tmp_path: Path) -> None:
    without, with_it = kustomize(KUBERNETES), kustomize_with("page-locking", tmp_path)
    assert named("Namespace", with_it)["metadata"]["labels"][ENFORCE] == "privileged"
    wanted = named("Deployment", without)["spec"]["template"]["spec"]
    wanted["securityContext"].update(runAsNonRoot=False, runAsUser=0)
    added = {"add": ["IPC_LOCK", "SYS_NICE"], "drop": ["ALL"]}
    wanted["containers"][0]["securityContext"]["capabilities"] = added
    assert named("Deployment", with_it)["spec"]["template"]["spec"] == wanted


# --- compose ----------------------------------------------------------------------------------
def services() -> Iterator[tuple[str, Yaml]]:
    yield from read("compose/compose.yaml")["services"].items()


CONFINED = {
    "capabilities": lambda one: one.get("cap_drop") == ["ALL"] and "cap_add" not in one,
    "escalation": lambda one: "no-new-privileges:true" in one.get("security_opt", ()),
    "seccomp": lambda one: not any("unconfined" in opt for opt in one.get("security_opt", ())),
    "privileged": lambda one: not one.get("privileged", False),
    "read-only root": lambda one: one.get("read_only") is True,
    "this machine only": lambda one: all(
        port.startswith(("127.0.0.1:", "${LISTEN:-127.0.0.1}:")) for port in one["ports"]
    ),
    "image": lambda one: "build" in one or bool(DIGEST.search(one["image"])),
    "host": lambda one: not {"network_mode", "pid", "ipc"} & set(one),
}


@pytest.mark.parametrize("setting", CONFINED)
@pytest.mark.parametrize("name", dict(services()))
def test_a_service_of_compose_is_confined(name: str, setting: str) -> None:
    assert CONFINED[setting](dict(services())[name])


def test_compose_has_no_default_for_a_secret_and_room_for_what_a_server_writes() -> None:
    every = dict(services())
    assert every["vllm"]["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
    grafana = every["grafana"]["environment"]
    assert grafana["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    mounts = {volume.split(":")[1] for volume in every["vllm"]["volumes"]}
    assert {"/home/vllm", "/var/lib/continuum", every["vllm"]["environment"]["HF_HOME"]} <= mounts
    (tmp,) = every["vllm"]["tmpfs"]
    assert tmp.startswith("/tmp:exec,"), "PyTorch loads programs that it compiles there"


# --- systemd ----------------------------------------------------------------------------------
def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


HARDENED = {
    "UMask": "0077",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "DevicePolicy": "closed",
    "DeviceAllow": "char-nvidia* rw",
    "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX AF_NETLINK",
    "LimitMEMLOCK": "infinity",
    "LimitCORE": "0",
    "StateDirectoryMode": "0700",
}


@pytest.mark.parametrize("name", HARDENED)
def test_the_unit_is_hardened(name: str) -> None:
    assert settings().get(name) == [HARDENED[name]]


def test_the_unit_reads_its_secrets_from_a_file_that_only_root_may_read() -> None:
    files = settings()["EnvironmentFile"]
    assert files == [
        "/etc/continuum/vllm.env",
        "/etc/continuum/secrets.env",
    ]  # no `-`: it must be there
    assert (
        f'(umask 077 && echo "VLLM_API_KEY=$(openssl rand -hex 32)" > {files[1]})'
        in UNIT.read_text()
    )
    plain = (UNIT.parent / "vllm.env").read_text()
    assert not re.search(r"^(VLLM_API_KEY|HF_TOKEN)=", plain, re.MULTILINE)
    assert "\nHOST=127.0.0.1\n" in plain


def test_systemd_finds_the_unit_little_exposed() -> None:
    """8.5 before it was hardened; 10 is worst. What is left: devices, network, compiled kernels."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on PATH")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd older than 250 looks at no file")
    assert done.returncode == 0, done.stdout[-300:]
