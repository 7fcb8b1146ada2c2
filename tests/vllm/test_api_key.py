"""Which paths vLLM's key guards: what deploy/ says of probes, metrics and networks rests on it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def guarded() -> tuple[str, ...]:
    try:
        from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX
    except ImportError:  # where vLLM before 0.29 has it
        from vllm.entrypoints.serve.utils.server_utils import GUARDED_PREFIX
    return tuple(GUARDED_PREFIX)


@pytest.mark.parametrize("path", ["README.md", "kubernetes/networkpolicy.yaml"])
def test_the_documents_name_every_prefix_that_wants_the_key(path: str) -> None:
    text = (DEPLOY / path).read_text()
    assert [prefix for prefix in guarded() if f"{prefix}" not in text] == []


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_and_prometheus_need_no_key(path: str) -> None:
    assert not path.startswith(guarded())
