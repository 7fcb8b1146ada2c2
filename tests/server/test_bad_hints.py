"""Hints of any JSON type and size over HTTP: 200 or 400, and the server goes on as before."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

import pytest

from bench.serve.server import SERVED_NAME, VllmServer
from tests.server.conftest import ServerFactory
from tests.server.helpers import ask, eventually, in_flight, ledger_closes, text_of, told
from tests.server.nasty import bodies

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Stock vLLM 0.32 answers these with 500: what it cannot write as MessagePack, or looks into as if
# it were an object. Without the middleware nothing of us is in their way.
VLLMS_OWN = {
    *("a lone surrogate as name", "a lone surrogate as member", "1,000 tools of every kind"),
    *("session_id: lone surrogate", "xargs: params as text", "xargs: params as list"),
}


def statuses(server: VllmServer, api: str) -> dict[str, int]:
    """The status of each body's answer."""
    found = {}
    for name, body in bodies(api, SERVED_NAME).items():
        line = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        line.request("POST", PATHS[api], body, {"Content-Type": "application/json"})
        answer = line.getresponse()
        answer.read()
        line.close()
        found[name] = answer.status
    return found


def goes_on(server: VllmServer) -> None:
    """It answers, knows who asked, and its books close."""
    answer = ask(server, "completions", [text_of(50, "after")], 4, vllm_xargs={"job_id": "after"})
    assert told(answer)["program"] == "job:after"
    eventually(lambda: in_flight(server) == 0)
    eventually(lambda: ledger_closes(server.metrics()))
    assert server.metric("vllm:num_requests_running") == 0


@pytest.mark.parametrize("api", PATHS)
def test_with_the_middleware_no_hint_is_answered_with_500(agents: VllmServer, api: str) -> None:
    found = statuses(agents, api)
    assert {name: status for name, status in found.items() if status not in (200, 400)} == {}
    assert {found[name] for name in VLLMS_OWN} == {400}
    goes_on(agents)


def test_without_the_middleware_only_vllms_own_faults_are(server_factory: ServerFactory) -> None:
    server = server_factory("no-middleware", num_blocks=129, connector={"dram_bytes": "16MiB"})
    for api in PATHS:
        found = statuses(server, api)
        assert {name for name, status in found.items() if status not in (200, 400)} <= VLLMS_OWN
    goes_on(server)
