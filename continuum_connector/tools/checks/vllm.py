"""Lines on the installed vLLM, and whether it loads our plugin."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from continuum_connector.tools.checks.line import Line, error, ok, unseen, warning
from continuum_connector.tools.checks.machine import Machine, VllmSeen

ENTRY_POINT = "continuum"


def lines(machine: Machine, vllm: VllmSeen) -> Iterator[Line]:
    """Which vLLM, and does it find us?"""
    yield _version(vllm)
    yield plugin(machine, vllm)


def _version(vllm: VllmSeen) -> Line:
    if not vllm.is_installed and not vllm.trouble:
        cure = "run this check with the Python that runs the server, or install vLLM there"
        return error("vLLM", f"not installed in {sys.executable}, so nothing serves", cure)
    if vllm.trouble:
        cure = "reinstall vLLM and the torch it asks for"
        return error("vLLM", f"cannot be imported ({vllm.trouble})", cure)
    here, tested = _release(vllm.version), [_release(each) for each in vllm.tested]
    span = f"{vllm.tested[0]} to {vllm.tested[-1]}"
    if here < tested[0]:
        return error("vLLM", f"{vllm.version} is older than what is tested, {span}", "upgrade vLLM")
    if here > tested[-1]:
        text = (
            f"{vllm.version} is newer than what is tested, {span}; features are asked for by name"
        )
        return warning("vLLM", text, "look at the log for `ContinuumConnector attached`")
    return ok("vLLM", f"{vllm.version}, within what is tested, {span}")


def _release(version: str) -> tuple[int, ...]:
    """(0, 32) of "0.32.0+cpu"; a development build counts as the release it leads to."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])


def plugin(machine: Machine, vllm: VllmSeen) -> Line:
    """Whether a server started here registers the connector."""
    if ENTRY_POINT not in machine.plugins:
        text = "our entry point is not installed, so vLLM would not know the connector's name"
        return error("plugin", text, "pip install . in a clone of ContinuumConnector, beside vLLM")
    allowed = machine.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        text = f"VLLM_PLUGINS={allowed} keeps ours from being loaded"
        wanted = ",".join(filter(None, [allowed, ENTRY_POINT]))
        return error("plugin", text, f"unset VLLM_PLUGINS, or set VLLM_PLUGINS={wanted}")
    if vllm.plugin_trouble:
        text = f"it fails ({vllm.plugin_trouble}), which vLLM would only log"
        return error("plugin", text, "report it with the version of vLLM")
    if not vllm.is_installed or vllm.trouble:
        return unseen("plugin", "its entry point is installed; no vLLM here to load it")
    return ok("plugin", "loads and registers ContinuumConnector")
