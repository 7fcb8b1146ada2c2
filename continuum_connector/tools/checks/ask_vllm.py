"""What the installed vLLM says about itself; Machine.ask runs this in its own process."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


def look(words: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of `VllmSeen`; "trouble" where vLLM or our plugin cannot be imported. `words`: the
    options of `vllm serve`."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    try:
        from continuum_connector.vllm import about, plugin

        found = about.about_vllm()
    except Exception as error:  # whatever a broken install raises is what the user must read
        return {"is_installed": True, "trouble": f"{type(error).__name__}: {error}"}
    try:
        plugin.register()
    except Exception as error:  # vLLM would only log it
        found["plugin_trouble"] = f"{type(error).__name__}: {error}"
    try:
        found |= about.read_by_vllm(words) if words else {}
    except Exception as error:  # a vLLM that makes its parser in another way
        found["unread"] = f"vLLM's parser cannot be asked, {type(error).__name__}: {error}"
    return {"is_installed": True, **found}


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1:])))
