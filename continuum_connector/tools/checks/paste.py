"""Paste: what people paste -> the options of the server that it starts.

A shell line or script, `docker run`, a cloud's command, a systemd unit, compose, Kubernetes and
other YAML or JSON, HCL, a program in Python, or options alone. Nothing is run and nothing is asked
of a cluster: what only a shell knows is filled in where the text itself says it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile, pairwise, takewhile
from os.path import basename
from pathlib import Path
from typing import Any

MAX_BYTES = 4 << 20  # of a file
MAX_LISTED = 200_000  # characters in which lists of words are looked for
_CLI = "vllm.entrypoints.cli.main"  # `serve` follows it
_SERVER = re.compile(r"(\S*/)?vllm[./]entrypoints[./](openai[./])?api_server(\.py)?")
_IMAGE = re.compile(r"(^|/)vllm[\w.-]*([:@/]|$)|vllm-(openai|cpu)")
_DOCKER = ("docker", "podman", "nerdctl")
_SHELLS = ("sh", "bash", "zsh", "dash", "ash")
# docker run's options without a value; all others take the next word (docs.docker.com/reference)
_BARE = re.compile(
    r"-[ditPq]+|--(rm|detach|init|interactive|tty|privileged|read-only|publish-all|quiet"
    r"|no-healthcheck|oom-kill-disable|sig-proxy|disable-content-trust|help|replace|tls-verify)"
)
_SINGULARITY = ("apptainer", "singularity")
_TELLS = {"echo", "printf", "grep", "pgrep", "pkill"}  # what they are given, they do not start
_START = re.compile(r"(?m)^[ \t]*(ExecStart=[-@:+!|]*|command=|CMD[ \t]+|ENTRYPOINT[ \t]+)")
_WHOLE = re.compile(r"(?ms)^ENTRYPOINT[ \t]+([^\n]*)\n(.*?)^CMD[ \t]+")
_KEYS = re.compile(r"(?m)^(\w+)=((?:.*\\\n)*.*)$")  # of a unit
# what Make, just, PowerShell and fish assign
_MAKE = re.compile(r"(?m)^(?:export[ \t]+)?(\w+)[ \t]*[:?]=[ \t]*\"?([^\"\n#]*?)\"?[ \t]*(?:#.*)?$")
_SET = re.compile(
    r"(?m)^[ \t]*(?:\$(?:env:)?(\w+)[ \t]*=[ \t]*|(?:set|setenv|ENV) (?:-\w+ )*(\w+) )(\S.*)$"
)
_PERCENT = re.compile(r"%(\w+)%")  # cmd.exe's variables, where it sets some
_BRACED = re.compile(r"(?<!\$)\{\{\s*(\w+)\s*(?:\|[^{}]*)?\}\}")  # just's and Ansible's
_WORDS = re.compile(
    r"""(?s)(?:CMD|ENTRYPOINT)[ \t]+\[\s*(["']).{,8000}?\1\s*\]"""
)  # a Dockerfile's
_FENCED = re.compile(r"(?ms)^[ \t]*```[^\n]*\n(.*?)^[ \t]*```")
_HERE = re.compile(r"(?ms)<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n(.*?)^\s*\1\s*$")
_SETS = re.compile(r"(?m)^[ \t]*(Environment=|ENV[ \t]+)")
_OTHER_KEYS = re.compile(r"(?m)^[ \t]*[A-Z]\w*=.*$|^\[.*\]$")  # of a systemd unit
_YAML = re.compile(
    r"(?m)^\s*(- )?(args|commands?|image|services|apiVersion|kind|entrypoint|run|engine_kwargs"
    r"|modelSpec|tasks|name|runcmd|models):"
)
# the same keys in HCL, whose lists have commas, and in Nix, whose lists have none
_ASSIGNS = re.compile(
    r'(?ms)^\s*(image|command|cmd|args|entrypoint)\s*=\s*("[^"\n]*"|\[.*?\](?=;?$))'
)
_STARTS = re.compile(
    rf"(?s)vllm\b.{{0,99}}\bserve\b|api_server\b|({'|'.join(_DOCKER)})\b.{{0,99}}\brun\b"
)
_IMAGES = ("image", "imageName")
_ARGS = ("args", "dockerArgs", "dockerStartCmd")  # of a pod
_OFF = (None, False, {"enabled": False})
_OF_CHART = ("enableLoRA", "enableTool", "lmcacheConfig", "lmCacheConfig")  # of vLLM's own chart
_ENVIRON = ("--env-vars", "--set-env-vars", "--update-env-vars", "--environment-variables")
# The options behind which a list of `az` ends.
_CLOUDS = re.compile(
    r"(-[gn]|--(command|args|cpu|memory|name|image|ingress|target-port|transport|environment"
    r"|resource-group|location|secrets|registry-\w+|m(in|ax)-replicas|workload-profile-name"
    rf"|system-assigned|user-assigned|revision-suffix|tags))$|{'|'.join(_ENVIRON)}"
)
_OPTIONS = re.compile(r"(#.*\n|---.*\n|\s)*(model|[a-z]+([-_][a-z]+)+)\s*:")  # --config FILE
_LIST = re.compile(r"\s*-\s+['\"]?--?\w")
# variables that this check is about, not how a client finds vLLM; where a text sets one, somehow
_CLIENTS = r"\w*(?:URL|HOST|PORT|ENDPOINT|KEY|MODEL|NAME|IMAGE|VERSION)\b"
_OURS = (
    rf"(?:CONTINUUM_[A-Z_]+|VLLM_(?!{_CLIENTS})[A-Z0-9_]+|LMCACHE_[A-Z_]+"
    r"|PYTORCH_(?:CUDA_)?ALLOC_CONF)\b"
)
_SET_SOMEHOW = re.compile(
    rf"""(?<![\w$.%-])(?<!\$\{{)({_OURS})(?=["']?(?:[ \t]*[:=,\]]|[ \t]+value=|\s*\n[ \t]*value))"""
)
_COMMENT = re.compile(r"(?m)(?:^|\s)(?:#|//).*$")
_USED = re.compile(r"[$%][{(]*\s*(?:env\.)?(\w+)")
_TEMPLATE = re.compile(r"\{\{-?\s*(\.Values|\.Release|\.Chart|include|range|if|end|toYaml|with|\$)")
_NAMES_MODEL = re.compile(r"(--(model|config)(=|$)|serve$)")
_TAKES_A_VALUE = re.compile(r"-(?!-(no|enable|disable|trust|enforce|async)[-_])[^=]*$")
ELSEWHERE = "the model, which something else may name"
TEMPLATE = "it is a template: paste what is made of it, as what `helm template` prints"


class NoServerError(ValueError):
    """No server is started by this text; the message says why."""


@dataclass
class Pasted:
    """One server. `words`: its options; `environ`: what the text sets for it; `unknown`: parts of
    the text that only a shell, a cluster or a file elsewhere could fill in; `is_inside`: it runs in
    a container, whose files are not ours; `mounts`: its folders that are: there, here."""

    words: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    is_inside: bool = False
    mounts: dict[str, str] = field(default_factory=dict)
    name: str = ""


def read(text: str) -> list[Pasted]:
    """Every server that the text starts. Raises NoServerError."""
    text = text.replace(OPEN, "")
    if _TEMPLATE.search(_HERE.sub("", text)):  # not one of Nomad's, which makes a file
        raise NoServerError(TEMPLATE)
    text = "\n".join(_FENCED.findall(text)) or text
    here = _HERE.search(text)
    data = here[2] if here and _YAML.search(here[2]) else text
    found, why = [], None
    if _YAML.search(data) or _LIST.match(data) or _OPTIONS.match(data) or data.lstrip()[:1] in "[{":
        try:
            found = list(_of_yaml(data))
        except NoServerError as error:
            why = error
    commands, is_python = _of_python("" if found else text[:MAX_LISTED])
    found = found or [each for words in commands for each in _of_command(words, {})]
    found = found or list(_of_quadlet(text)) or list(_of_assigned(text))
    try:
        found = found or list(_of_shell("" if is_python else _as_script(text), {}))
        return _some([each for each in found if each.words or not (why or commands)], text)
    except NoServerError as none:
        raise why or none from None


def _some(servers: Iterable[Pasted], text: str) -> list[Pasted]:
    found = [_settled(each, text) for each in servers]
    # Not `docker run -d IMAGE` before it, nor a sidecar with options of its own.
    for is_one in (lambda each: each.words, lambda each: ELSEWHERE not in each.unknown):
        found = list(filter(is_one, found)) or found
    if not found:
        shown = " ".join(text.split())[:200]
        raise NoServerError(f"`{shown}` is not `vllm serve`, so it starts no server that we know")
    known = {word for each in found for name in each.unknown for word in re.findall(r"\w+", name)}
    lost = _lost(text) - known.union(*(each.environ for each in found))
    return [replace(each, unknown=[*each.unknown, *sorted(lost)]) for each in found]


def _lost(text: str) -> set[str]:
    """Variables of ours that a text sets, but not in a shell, of which we know where they go."""
    plain = _COMMENT.sub("", text)
    if not (found := set(_SET_SOMEHOW.findall(plain))):
        return found
    with contextlib.suppress(ValueError):
        found -= read_script(_as_script(text)).assigned
    return found - set(_USED.findall(plain))


def _as_script(text: str) -> str:
    """A unit, a Dockerfile, a Makefile, a list of words, as the shell commands that they mean."""
    is_unit = "[Service]" in text
    text = _SET.sub(r"\1\2=\3", _MAKE.sub(r'\1="\2"', text))
    text = _PERCENT.sub(r"${\1}", text)
    if len(text) < MAX_LISTED:
        text = _WORDS.sub(lambda it: re.sub(r"""(["'])\s*,\s*|[\[\]]\s*""", r"\1 ", it[0]), text)
    text = _SETS.sub("export ", _START.sub("", _WHOLE.sub(r"\2\1 ", text)))
    return _OTHER_KEYS.sub("", text) if is_unit else text


def _of_quadlet(text: str) -> Iterator[Pasted]:
    """The container of a [Container], whose keys stand in any order."""
    keys: dict[str, list[str]] = {}
    for key, value in _KEYS.findall(text.replace("%h", "~")) if "[Container]" in text else ():
        keys.setdefault(key, []).append(value)
    node = {
        "image": keys.get("Image", [""])[-1],
        "entrypoint": re.findall(r'[^\s",\[\]]+', keys.get("Entrypoint", [""])[-1]),
        "command": keys.get("Exec", [""])[-1],
        "environment": [word for each in keys.get("Environment", ()) for word in shlex.split(each)],
        "env_file": [each.lstrip("-") for each in keys.get("EnvironmentFile", ())],
        "volumes": keys.get("Volume", []),
    }
    yield from _container(node, "", {}) if keys else ()


def of_words(words: Sequence[str]) -> list[Pasted]:
    """The servers that these words of a command line start; one word alone is a whole text, a
    file, or `-` for standard input. Raises NoServerError."""
    if len(words) > 1:
        found = list(_of_command(list(words), {})) or list(_bare(words, {}))
        return _some(found, " ".join(words))
    [text] = words
    try:
        if text == "-":
            text = sys.stdin.read(MAX_BYTES)
        elif not any(map(str.isspace, text)) and Path(text).is_file():
            with Path(text).open(errors="replace") as file:
                text = file.read(MAX_BYTES)
    except OSError as why:
        raise NoServerError(f"{text} cannot be read ({why.strerror})") from None
    return read(text)


def _of_shell(text: str, environ: Mapping[str, str]) -> Iterator[Pasted]:
    try:
        script = read_script(_BRACED.sub(r"${\1}", text), environ)
    except ValueError as why:
        raise NoServerError(f"the command cannot be split into words ({why})") from None
    found = [each for words in script.commands for each in _of_command(words, script.known)]
    alone = [each for words in script.commands for each in _bare(words, script.known)]
    for each in found:  # a comment or a space behind a backslash ends a command
        each.unknown += [f"{one.words[0]} ..., on a line of its own" for one in alone]
    yield from found or alone[:1]


def _bare(words: Sequence[str], known: Mapping[str, str]) -> Iterator[Pasted]:
    """The server of options alone, with assignments before them."""
    rest = [word for word in words if not ASSIGNMENT.fullmatch(word)]
    if rest and re.match("--?[a-z]", rest[0]):
        yield Pasted(rest, {**known, **_assigned(words)})


def _of_command(words: list[str], known: Mapping[str, str]) -> Iterator[Pasted]:
    """The server that one command starts, if it does."""
    environ = {**known, **_assigned(words)}
    rest = list(words)
    while rest and (rest[0] in ("env", "export", "exec", "nohup") or ASSIGNMENT.fullmatch(rest[0])):
        rest.pop(0)
    for index, word in enumerate(rest):  # behind `sudo`, say
        if basename(word) in _DOCKER and {"run", "create"} & set(rest[index + 1 : index + 3]):
            yield from _of_docker(rest[index:], environ)
            return
    if rest and basename(rest[0]) == "kubectl" and "--" in rest:
        at = rest.index("--")
        own = _assigned([word.removeprefix("--env=") for word in rest[:at]])
        image = _image_in(rest[:at])
        yield from _of_image(image, rest[at + 1 :], not image, Pasted([], own))
        return
    if rest and basename(rest[0]) in _SINGULARITY and "run" in rest[:3]:
        at = next((i for i, word in enumerate(rest) if re.search(r"\.sif$|://", word)), len(rest))
        behind = rest[at + 1 :][rest[1] == "instance" :]  # which has a name
        for image in rest[at : at + 1]:
            yield from _of_image(image, behind, False, Pasted([], environ))
    elif image := _image_in(rest):
        yield from _of_cloud(rest, image, environ)
    elif not _TELLS & set(rest[:2]):
        yield from _served(rest, environ)


def _image_in(words: Sequence[str]) -> str:
    """The image that a cloud's command names in an option."""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in ("--image", "--imageName"):
            return value if equals else after
    return ""


def _of_cloud(words: list[str], image: str, environ: dict[str, str]) -> Iterator[Pasted]:
    """A container of a cloud's command: --command and --args, a list with commas or one text."""
    given: dict[str, list[str]] = {}
    own: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        ends = (i for i, each in enumerate(words) if i > index and _CLOUDS.match(each))
        behind = [value] if equals else words[index + 1 : next(ends, None)]
        if words[0] != "az" and not (behind and re.match(r"-\S*$", behind[0])):
            behind = behind[:1]  # one text
        if name in _ENVIRON:
            own |= _assigned(",".join(behind).split(","))
        if name not in ("--command", "--args") or not behind:
            continue
        value = behind[0]
        if len(behind) > 1:
            given[name] = behind
            continue
        by = re.match(r"\^(.)\^", value)  # `gcloud topic escaping`
        has_spaces = not by and re.search(r"\s", value)
        parts = value[3:].split(by[1]) if by else value.split(None if has_spaces else ",")
        given.setdefault(name, []).extend(parts)
    entry = given.get("--command", [])
    if not given and (found := list(_served(words, environ | own))):
        yield from found
        return
    words = entry + given.get("--args", [])
    yield from _of_image(image, words, bool(entry), Pasted([], environ | own))


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """Assignments before the server's own words, as in `nohup env A=b vllm serve`."""
    found = {}
    for word in words:
        if word == "serve" or _SERVER.fullmatch(word):
            break
        if match := ASSIGNMENT.fullmatch(word):
            found[match[1]] = match[2]
    return found


def _served(words: list[str], environ: dict[str, str]) -> Iterator[Pasted]:
    """The server whose words these are, or that a script among them starts."""
    for index, word in enumerate(words):
        before = basename(words[index - 1]) if index else ""
        if (word == "serve" and before in ("vllm", _CLI)) or _SERVER.fullmatch(word):
            yield Pasted(words[index + 1 :], environ)
            return
        is_text = re.search(r"[ \t\n]", word) and (before or OPEN not in word)
        if is_text and _STARTS.search(word):
            text = re.sub(r"^--[\w-]+=", "", word).rstrip(",")  # of `sbatch --wrap=`, of Python
            inner = list(_of_shell(text, environ))
            yield from inner
            if inner:
                return


def _of_docker(words: list[str], environ: dict[str, str]) -> Iterator[Pasted]:
    """`docker run [options] IMAGE [words]`."""
    rest = words[next(i for i, word in enumerate(words) if word in ("run", "create")) + 1 :]
    entry: list[str] = []
    base = Pasted([])
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if _BARE.fullmatch(name):
            continue
        if re.fullmatch(r"-[epvulwmh]\S+", name):  # -eA=b
            name, value, equals = name[:2], name[2:] + equals + value, "="
        elif not equals:
            value = rest.pop(0) if rest else ""
        if name in ("-e", "--env"):
            key, has, given = value.partition("=")
            base.environ[key] = given if has else expanded(f"${{{key}}}", environ)
        elif name == "--env-file":
            base.environ.update(_env_file(value, base.unknown))
        elif name in ("-v", "--volume"):
            base.mounts.update(_mount(value))
        elif name == "--entrypoint":
            entry = value.split()
    if rest:
        yield from _of_image(rest[0], entry + rest[1:], bool(entry), base)


def _of_image(image: str, words: list[str], has_entry: bool, base: Pasted) -> Iterator[Pasted]:
    """A container's server: what its words start, or the image's own if these are options. `base`:
    all but its words."""
    unknown = list(base.unknown)
    # Options alone: some image's own entry point takes them.
    takes_them = bool(words) and (words[0].startswith("--") or words[0] == "serve")
    is_known = bool(_IMAGE.search(image))
    is_vllm = not has_entry and (is_known or takes_them)
    if is_vllm and not is_known and not any(map(_NAMES_MODEL.match, words)):
        unknown.append(ELSEWHERE)
    found = list(_served(words, base.environ))
    if not found and is_vllm and not (words and basename(words[0]) in _SHELLS):
        rest = words[1:] if words[:1] == ["serve"] else words
        found = [replace(base, words=rest, unknown=[])]
    for each in found:
        each.unknown = [*unknown, *each.unknown]
        yield replace(each, mounts=base.mounts, name=base.name, is_inside=True)


def _env_file(name: str, unknown: list[str]) -> dict[str, str]:
    """The lines NAME=value of a file, as docker reads them."""
    try:
        lines = Path(name).expanduser().read_text(errors="replace")[:MAX_BYTES].splitlines()
    except OSError:
        unknown.append(f"the file {name}")
        return {}
    pairs = (line.removeprefix("export ").partition("=") for line in map(str.strip, lines))
    return {key: value.strip("'\"") for key, _, value in pairs if key and key[0] != "#" and value}


def _mount(text: str) -> dict[str, str]:
    here, _, there = text.partition(":")
    return {there.partition(":")[0]: here} if here[:1] in "/~." and there else {}


def _loaded(text: str) -> list[Any]:
    """The documents of YAML or of JSON, which is read much faster as such."""
    with contextlib.suppress(ValueError, RecursionError):
        return [json.loads(text)]
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise NoServerError("it looks like YAML, for which PyYAML is not installed here") from None
    try:
        return list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (yaml.YAMLError, RecursionError, ValueError) as why:
        raise NoServerError(f"it is no YAML ({' '.join(str(why).split())[:200]})") from None


def _of_yaml(text: str) -> Iterator[Pasted]:
    is_yaml = text.lstrip()[:1] not in ("[", "{")  # in JSON nobody writes options alone
    for document in _loaded(text):
        found = list(_walk(document, "", {}))
        if found or not is_yaml or not document:
            yield from found
        elif isinstance(document, list) and all(isinstance(each, str | int) for each in document):
            yield Pasted([str(each) for each in document], is_inside=True)
        elif not isinstance(document, dict) or {"services", "kind", "args"} & set(document):
            continue
        elif any(_OPTIONS.match(f"{key}:") for key in document):
            yield Pasted(list(_options(document)))


def _of_assigned(text: str) -> Iterator[Pasted]:
    """Containers of Nomad, Terraform and NixOS: image, command and args, one after the other."""
    node: dict[str, Any] = {}
    for key, value in [*_ASSIGNS.findall(text), ("", "")]:
        key = "command" if key == "cmd" else key
        if not key or key in node:
            yield from _container(node, "", {}) if {"args", "image"} & {*node} else ()
            node = {}
        with contextlib.suppress(NoServerError):
            node[key] = _loaded(re.sub(r'"\s+"', '", "', value))[0] if value else None


def _options(document: Mapping[str, Any]) -> Iterator[str]:
    """The options in a file for --config (vLLM's utils/argparse_utils.py, load_config_file)."""
    for key, value in document.items():
        if value is not False and value is not None:
            yield f"--{key}"
        if isinstance(value, list):
            yield from map(str, value)
        elif isinstance(value, dict):
            yield json.dumps(value)
        elif not isinstance(value, bool) and value is not None:
            yield str(value)


def _walk(node: Any, name: str, around: Mapping[str, str]) -> Iterator[Pasted]:
    """Every server below this node: of a container, of an engine's options, of a script.

    `around`: variables that it inherits."""
    if isinstance(node, str) and "\n" in node and _YAML.search(node):  # a file, as a text
        with contextlib.suppress(NoServerError):
            yield from (each for one in _loaded(node) for each in _walk(one, name, around))
    elif isinstance(node, str) and re.search(r"\s", node) and _STARTS.search(node):
        with contextlib.suppress(NoServerError):
            yield from (replace(each, name=name) for each in _of_shell(_as_script(node), around))
    if isinstance(node, list):
        words = [each for each in node if isinstance(each, str)]
        yield from _of_command(words, around)
        for each in node:
            yield from _walk(each, name, around) if not isinstance(each, str) else ()
    if not isinstance(node, dict):
        return
    meta = node.get("metadata")
    name = str(node.get("name") or (isinstance(meta, dict) and meta.get("name")) or name)
    around = {**around, **_environment(node, [])}
    engine = node.get("engine_kwargs") or node.get("vllmConfig")
    if isinstance(engine := engine or ({"modelURL", "repository"} <= {*node} and {}), dict):
        unknown = [key for key in _OF_CHART if node.get(key) not in _OFF]
        yield Pasted(list(_of_engine(engine, node)), dict(around), unknown, name=name)
    has_command = any(node.get(key) for key in ("command", "entrypoint", *_ARGS))
    is_other = "vllm" not in str(node.get("modelFormat", "vllm")).lower()  # KServe's own server
    if not is_other and (has_command or any(key in node for key in _IMAGES)):
        found = list(_container(node, name, around))
        yield from found
        if any(each.words for each in found):
            return
    for key, value in node.items():
        if key == "containers" and isinstance(value, list):  # of a pod, with its meaning of command
            value = [{"args": None, **each} for each in value if isinstance(each, dict)]
        if key == "cmd" and re.search(r"[^\\]\n\s*-", str(value)):  # llama-swap's, in one line
            value = str(value).replace("\n", " ")
        yield from _walk(value, key if isinstance(value, dict) else name, around)


def _of_engine(engine: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[str]:
    """The options of Ray Serve's `engine_kwargs`, or of `vllmConfig` in vLLM's own chart, which
    turns prefix caching off where it is not said to be on."""
    loading = node.get("model_loading_config") or node.get("model")
    loading = loading if isinstance(loading, dict) else node
    model = next(filter(None, map(loading.get, ("model_source", "model_id", "modelURL"))), None)
    if isinstance(model, str):
        yield from ("--model", model)
    own = {re.sub("(?=[A-Z])", "-", str(key)).lower(): engine[key] for key in engine}
    extra = own.pop("extra-args", None)
    if own and "modelURL" in loading and "raySpec" not in node:
        own.setdefault("enable-prefix-caching", False)
        own = {key: own[key] for key in own if key not in ("v0", "v1", "env")}
    yield from (f"--no-{key}" for key, value in own.items() if value is False)
    yield from _options(own)
    yield from map(str, extra if isinstance(extra, list) else ())


def _container(
    node: Mapping[str, Any], name: str, inherited: Mapping[str, str]
) -> Iterator[Pasted]:
    """compose: `entrypoint` and `command`; Kubernetes: `command` and `args`."""
    base = Pasted([], name=name)
    given = next((node[key] for key in _ARGS if node.get(key)), None)
    is_list = isinstance(node.get("env"), list)
    is_pod = bool(set(_ARGS) & set(node)) or ("entrypoint" not in node and is_list)
    base.environ.update(_environment(node, base.unknown))
    known = {**inherited, **base.environ}
    if "modelCommand" in node and "command" not in node:
        base.unknown.append("the model of modelArtifacts")
    entry = node.get("command") if is_pod else node.get("entrypoint") or node.get("entryPoint")
    args = given if is_pod else node.get("command")
    words = _words(entry, known, is_pod) + _words(args, known, is_pod)
    image = next((node[key] for key in _IMAGES if node.get(key)), None)
    image = image.get("repository") if isinstance(image, dict) else image
    for volume in node.get("volumes") or () if isinstance(node.get("volumes"), list) else ():
        base.mounts.update(_mount(volume) if isinstance(volume, str) else {})
    yield from _of_image(str(image or ""), words, bool(entry), base)


def _words(given: Any, known: Mapping[str, str], is_pod: bool) -> list[str]:
    """A list is taken word by word, and what is known is filled in; a text as a shell would."""
    if isinstance(given, str):
        given = _BRACED.sub(r"${\1}", given if is_pod else given.replace("$$", "$"))
        commands = read_script(given, known).commands
        return [word for words in commands for word in words]
    found = []
    for each in given if isinstance(given, list) else ():
        word = str(each) if is_pod else str(each).replace("$$", "$")
        is_script = re.search(r"\s", _VARIABLE.sub("", word))  # of `sh -c`, which fills them in
        if not is_script and ("$(" if is_pod else "${") in word:
            word = expanded(word, known)
        found.append(_BRACED.sub(lambda one: expanded(f"${{{one[1]}}}", known), word))
    return found


def _environment(node: Mapping[str, Any], unknown: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    files = node.get("env_file") or ()
    for each in [files] if isinstance(files, str) else files:
        found |= _env_file(str(each.get("path") if isinstance(each, dict) else each), unknown)
    given = node.get("env") or node.get("envs") or node.get("environment") or {}
    if isinstance(given, dict):
        given = [{"name": key, "value": value} for key, value in given.items()]
    for each in given if isinstance(given, list) else ():
        if isinstance(each, str):
            key, has, value = each.partition("=")
            found[key] = value if has else f"${{{key}}}"  # of who starts it
        elif isinstance(each, dict):
            key, given = str(each.get("name") or each.get("key")), each.get("value")
            said = str(given).lower() if isinstance(given, bool) else str(given)
            found[key] = f"${{{key}}}" if given is None else said
    return {key: expanded(value, {}) for key, value in found.items()}


def _settled(pasted: Pasted, text: str) -> Pasted:
    """The same with defaults where the text gives them, without options whose values nobody here
    knows, and with paths of this machine. Without --config FILE where the text itself writes the
    file, which is not there yet."""
    words: list[str] = []
    unknown = list(pasted.unknown)
    for each in pasted.words:
        value, names = filled(each)
        unknown += names
        if value is not None:
            words.append(_here(value, pasted.mounts))
        elif each[:1] != "-" and words and _TAKES_A_VALUE.match(words[-1]):
            words.pop()  # the option whose value it is
    for at, (word, name) in enumerate(pairwise(words)):
        written = rf"(>|\btee)\s*['\"]?{re.escape(name)}(?!\S)"
        if word == "--config" and re.search(written, text):
            del words[at : at + 2]
            unknown.append(f"{name}, which it writes")
            break
    environ = {}
    for name, given in pasted.environ.items():
        value, names = filled(given)
        unknown += names if re.fullmatch(_OURS, name) else []
        if value is not None:
            environ[name] = value
    unknown += [ELSEWHERE] if pasted.is_inside and not (words or unknown) else []
    return replace(pasted, words=words, environ=environ, unknown=list(dict.fromkeys(unknown)))


def _here(word: str, mounts: Mapping[str, str]) -> str:
    """A path inside a container as the path of the folder that is mounted there."""
    head, equals, path = word.rpartition("=") if word[:2] == "--" else ("", "", word)
    for there, here in mounts.items():
        if path == there or path.startswith(there.rstrip("/") + "/"):
            local = Path(here).expanduser().joinpath(path[len(there) :].lstrip("/"))
            if local.exists():
                return f"{head}{equals}{local}"
    return word


# --- a shell's words ---------------------------------------------------------------------------
# A script -> its commands, each a list of words. What only a shell knows (variables, `$(...)`) is
# filled in where the text itself says it. Where it does not, a mark stands in the word: `filled`
# takes marks out again.
OPEN = "\0"  # begins a mark: what is written there, and its default, if it has one
MAX_SHOWN = 60  # characters of what is written at a mark
SPLIT = "\4"  # stands where a word of several ends, in what a variable or an array holds
_MARK = re.compile("\0([^\1]*)\1(\3?)([^\2]*)\2")
_BLANK = re.compile("(\0[^\2]*\2)|\\s+|^$")  # ends a word, but not within a mark
# $VAR, ${VAR}, ${VAR:-default}, $(VAR) of Kubernetes; of more than that only the name counts
_VARIABLE = re.compile(
    r"\$(?:(?P<name>\w+)|\{(?P<braced>\w+)(?:\[[@*]\])?(?P<rest>[^}]*)\}"
    r"|\((?P<k8s>[A-Z_][A-Z0-9_]*)\)|\((?:[^()]|\([^()]*\))*\)|[@*#?]|\{[^}]*\})"
)
# Of a variable that a text within the text holds there may be a mark already.
_STANDS = rf"(?P<mark>\x00[^\x02]*\x02)|(?P<filled>{_VARIABLE.pattern}|`[^`]*`)"
# What stands for itself is taken at once, because a word may have a megabyte.
_QUOTED = re.compile(
    rf"""\\(?P<escaped>["\\$`\n]) | (?P<quote>") | {_STANDS} | [^"\\$`\0]+ | .""",
    re.VERBOSE | re.DOTALL,
)
# A place is <your key>, as guides write it: a redirection has a space or a file's end behind it.
# In cmd.exe ^ continues a line, in PowerShell `.
_TOKEN = re.compile(
    rf"""(?P<skipped>[\\^`]\n(?!\Z))
       | (?P<place><[A-Za-z](?:[\w .-]*\w)?>(?=[\s'"/:,)]|$))
       | (?P<redirect>[<>]+&?-? | &(?=>)) | (?P<blank>[ \t\r]+) | (?P<end>[\n;&|()])
       | '(?P<said>[^']*)' | (?P<open>') | (?P<quote>") | \$'(?P<ansi>(?:[^'\\]|\\.)*)'
       | \\(?P<escaped>.?) | {_STANDS} | [^\s;&|()<>\\'"$`^\0]+ | .""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)


@dataclass
class Script:
    """`commands`: each with the words of one. `known`: variables that the text sets, for more than
    one command; `assigned`: names of all that it ever sets; `depth`: of branches around a line;
    `num_left`: characters that variables may still stand for, as a text may double itself."""

    commands: list[list[str]] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)
    depth: int = 0
    num_left: int = MAX_BYTES


def read_script(text: str, environ: Mapping[str, str] | None = None) -> Script:
    """The commands of a script. `environ`: variables that are known beforehand.

    Raises ValueError if a quotation is not closed.
    """
    script = Script(known=dict(environ or {}))
    for words in _split(text.replace("\r\n", "\n"), script):
        script.commands.append(words)
        _assign(words, script)
    return script


def _assign(words: list[str], script: Script) -> None:
    """What a command leaves for those behind it; what stands before a program is its alone."""
    words = [*dropwhile(("then", "do", "else", "{").__contains__, words)] or [""]
    rest = words[1:] if words[0] in ("export", "declare", "set") else words
    found = [match for match in takewhile(bool, map(ASSIGNMENT.fullmatch, rest)) if match]
    script.depth += {"if": 1, "case": 1, "fi": -1, "esac": -1}.get(words[0], 0)
    for match in found if rest is not words or len(found) == len(words) else ():
        adds, before = match[0][len(match[1])] == "+", script.known.pop(match[1], "")
        # Of two values in branches only a shell knows which it takes.
        if adds or not script.depth or match[1] not in script.assigned or before == match[2]:
            script.known[match[1]] = adds * before + match[2]
    script.assigned.update(match[1] for match in found)
    for word in words[1:] if words[0] == "unset" else ():
        script.known.pop(word, None)


def _split(text: str, script: Script) -> Iterator[list[str]]:
    """One pass over the text. A redirection and what it names are left out."""
    words: list[str] = []
    word: str | None = None
    skips = is_quoted = is_array = False  # skips: the next word names a file of a redirection
    at, text = 0, f"{text}\n"
    while at < len(text):
        if text[at] == "#" and not is_quoted and (word is None or word[-1:] == SPLIT):
            at = text.index("\n", at)
        token = (_QUOTED if is_quoted else _TOKEN).match(text, at)
        assert token  # as each character is one
        at, kind, piece = token.end(), token.lastgroup or "", token[0]
        if kind == "skipped":
            continue
        if kind == "open":
            break
        if is_array and kind in ("blank", "end", "redirect"):
            is_array = piece != ")"
            word = f"{word}{SPLIT if piece.isspace() else piece * is_array}"
            continue
        if piece == "(" and kind and word and word[-1] == "=" and ASSIGNMENT.match(word):
            is_array, word = True, word + SPLIT
            continue
        if kind in ("blank", "end", "redirect"):
            is_stream = word is not None and word.isdecimal() and piece[0] in "<>"  # 2>file
            if word is not None and not skips and not is_stream:
                words += _fields(word)
            skips = kind == "redirect" or (skips and word is None)
            word = None
            if kind == "end" and words:
                yield words
                words, skips = [], False
            continue
        if kind == "quote":
            is_quoted, piece = not is_quoted, ""
        elif kind in ("said", "escaped"):
            piece = token[kind] if kind == "said" or not is_quoted else token[kind].strip("\n")
        elif kind == "ansi":
            piece = re.sub(r"(?s)\\(.)", lambda one: _ESCAPES.get(one[1], one[1]), token["ansi"])
        elif kind == "place":
            piece = _mark(piece, None)
        elif kind == "filled":
            piece = _filled(token, script.known)
            script.num_left -= len(piece)
            piece = piece if script.num_left > 0 else _mark(token[0], None)
            if not is_quoted:
                piece = _BLANK.sub(lambda found: found[1] or SPLIT, piece)
        word = (word or "") + piece
    if is_quoted or at < len(text):
        raise ValueError("a quotation is not closed")
    if words:
        yield words


def _fields(word: str) -> list[str]:
    """The words that a word becomes: what is assigned stays one, but for an array."""
    if SPLIT not in word or f"={SPLIT}" in word:
        return [word]
    if ASSIGNMENT.match(word):
        return [word.replace(SPLIT, " ")]
    return [each for each in word.split(SPLIT) if each]


def _filled(found: re.Match[str], known: Mapping[str, str]) -> str:
    """What is known of a variable or a command; a mark if nothing is."""
    name = found["name"] or found["braced"] or found["k8s"]
    if name in known:
        return known[name]
    rest = found["rest"] or ""
    default = rest[2:] if rest[:2] in (":-", ":=") else rest[1:] if rest[:1] == "-" else None
    default = default and re.sub(r"^(['\"])(.*)\1$", r"\2", default)
    is_unknown = default and ("$" in default or OPEN in default)
    return _mark(found[0], None if is_unknown else default)


def _mark(written: str, default: str | None) -> str:
    written = _MARK.sub(r"\1", written)[:MAX_SHOWN]
    return f"{OPEN}{written}\1" + ("" if default is None else f"\3{default}") + "\2"


def expanded(word: str, known: Mapping[str, str]) -> str:
    """A word without quotes, with what is known filled in, and marks for the rest."""
    return _VARIABLE.sub(lambda found: _filled(found, known), word)


def filled(word: str) -> tuple[str | None, list[str]]:
    """The word with defaults in the place of its marks, None if one has none; what stood there."""
    marks = list(_MARK.finditer(word))
    names = [match[1] for match in marks]
    if not all(match[2] for match in marks):
        return None, names
    return _MARK.sub(lambda match: match[3], word), names


# --- a program's ---------------------------------------------------------------------------------
# A program in Python that starts servers -> its commands. Modal's and BentoML's servers stand in
# one, those of notebooks and launchers too. It is not run: a name stands for the text, the number
# or the list that it was given last, and for what only the program knows a mark stands.
_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PLACE = re.compile(r"\{[^{}]*\}|%[sdr]")  # of str.format and of %
_Value = str | list[str] | None  # a text, a list of words; or only the program knows


def _of_python(text: str) -> tuple[list[list[str]], bool]:
    """The commands, none if the text is no Python; and whether it can be nothing else."""
    program = _Program()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(textwrap.dedent(text))
        program.visit(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [], False
    found = [*program.values, *program.known.values()]
    commands = [["eval", each] if isinstance(each, str) else each for each in found if each]
    return commands, any(isinstance(each, _DEFINES) for each in tree.body)


class _Program(ast.NodeVisitor):
    """`known`: what a name stands for; `values`: of what has none, in the program's order."""

    def __init__(self) -> None:
        self.known: dict[str, _Value] = {}
        self.values: list[_Value] = []
        self._num_left = MAX_BYTES  # characters that names may still stand for

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.Expr(ast.Constant()):
                pass  # it explains the program
            case ast.Assign([ast.Name(name), *_], value):
                before = self.known.get(name)  # another's, of the same name
                self._assign(name, value, value)
                self.values.append(before)
            case ast.AugAssign(ast.Name(name) as target, ast.Add(), more) | ast.Call(
                ast.Attribute(ast.Name(name) as target, "extend"), [more]
            ):
                self._assign(name, more, ast.BinOp(target, ast.Add(), more))
            case ast.Call(ast.Attribute(ast.Name(name) as target, "append"), [more]):
                self._assign(name, more, ast.BinOp(target, ast.Add(), ast.List([more])))
            case ast.expr() if not isinstance(node, ast.Name) and (found := self._value(node)):
                self.values.append(found)
            case _:
                self.generic_visit(node)

    def _assign(self, name: str, given: ast.expr, whole: ast.expr) -> None:
        if self._value(given) is None:
            self.visit(given)  # a call, say, that is given a command
        self.known[name] = self._value(whole)

    def _value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Constant(value):
                return str(value)
            case ast.Name(name):
                found = self.known.get(name)
                self._num_left -= len("".join(found or ()))
                return found if self._num_left > 0 else None
            case ast.List(parts) | ast.Tuple(parts):
                return [word for each in parts for word in self._in_list(each)]
            case ast.JoinedStr(parts):
                return "".join(map(self._text, parts))
            case ast.FormattedValue(part) | ast.Call(ast.Name("str"), [part]):
                return self._text(part)
            case ast.BinOp(left, ast.Add(), right):
                one, other = self._value(left), self._value(right)
                words = _words_of(one, left) + _words_of(other, right)
                return words if list in (type(one), type(other)) else "".join(words)
            case ast.BinOp(ast.Constant(str(text)), ast.Mod()) | ast.Call(
                ast.Attribute(ast.Constant(str(text)), "format")
            ):
                return _PLACE.sub(lambda place: _mark(place[0], None), text)
        return None

    def _in_list(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Starred):
            return _words_of(self._value(node.value), node.value)
        return [self._text(node)]

    def _text(self, node: ast.expr) -> str:
        value = self._value(node)
        return value if isinstance(value, str) else _mark(ast.unparse(node), None)


def _words_of(value: _Value, node: ast.expr) -> list[str]:
    if isinstance(value, list):
        return value
    return [_mark(ast.unparse(node), None) if value is None else value]
