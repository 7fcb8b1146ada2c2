"""`continuum calibrate` against a small HTTP server that counts prefill time as vLLM does."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from continuum_connector.costs.costs import Costs
from continuum_connector.costs.state_file import StateFile
from continuum_connector.tools.cli import calibrate, measure
from continuum_connector.tools.cli.app import app
from continuum_connector.tools.cli.measure import Point
from continuum_connector.tools.cli.server import CommandError, Server

BASE, TOKEN, PAIR, CHUNK = 0.006, 4e-5, 3e-9, 2048  # pairs dear enough to show at 8K tokens


class FakeVllm(ThreadingHTTPServer):
    """Answers at once, and says in its metrics how long the prefill would have taken."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: Any = {"data": [{"id": "m", "root": "org/M", "max_model_len": 8192}]}
        self.key = ""
        self.caches = True
        self.prompts: list[list[int]] = []
        self.extras: list[Any] = []
        self.metrics = {
            "vllm:request_prefill_time_seconds_sum": 0.0,
            "vllm:request_prefill_time_seconds_count": 0.0,
            "vllm:prefix_cache_hits_total": 0.0,
            "vllm:num_requests_running": 0.0,
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = body["prompt"]
        assert body["max_tokens"] == 1
        known = max((common(prompt, each) for each in self.prompts), default=0)
        cached = min(known, len(prompt) - 1) // 16 * 16 if self.caches else 0
        new = len(prompt) - cached
        seconds = BASE * -(-new // CHUNK) + TOKEN * new + PAIR * new * (cached + new / 2)
        self.metrics["vllm:request_prefill_time_seconds_sum"] += seconds
        self.metrics["vllm:request_prefill_time_seconds_count"] += 1
        self.metrics["vllm:prefix_cache_hits_total"] += cached
        self.prompts.append(prompt)
        self.extras.append(body.get("kv_transfer_params"))
        return 200, {"choices": [{"text": "x"}]}


def common(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FakeVllm

    def do_GET(self) -> None:
        if self.path == "/metrics":
            lines = (f'{k}{{engine="0"}} {v}' for k, v in self.server.metrics.items())
            self._answer(200, "\n".join(["# HELP x y", *lines]))
        else:
            self._answer(200 if self.path == "/v1/models" else 404, self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(*self.server.complete(body))

    def _answer(self, status: int, content: Any) -> None:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            status, content = 401, {"error": "Unauthorized"}
        payload = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm() as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def run(*args: str, expect: int = 0) -> Result:
    result = CliRunner().invoke(
        app, ["calibrate", *args], env={"COLUMNS": "200", "VLLM_API_KEY": ""}
    )
    assert result.exit_code == expect, result.output
    return result


def test_the_file_makes_the_connector_know_what_was_measured(
    server: FakeVllm, tmp_path: Path
) -> None:
    result = run(server.url, "--out", str(tmp_path), "--chunk", str(CHUNK), "--gpu", "Some GPU")
    (path,) = tmp_path.iterdir()
    assert path.name == "continuum-org-M-Some-GPU.json"
    assert "m: medians" in result.stdout
    assert str(path) in result.stdout
    costs, file = Costs(CHUNK), StateFile(str(path))
    file.restore("costs", costs.restore)
    file.close({"costs": costs.state()})
    for new, cached in ((1000, 0), (8000, 0), (1000, 7000), (30_000, 60_000)):
        true = BASE * -(-new // CHUNK) + TOKEN * new + PAIR * new * (cached + new / 2)
        assert costs.prefill_s(new, cached) == pytest.approx(true, rel=0.02)


def test_what_a_server_learned_beside_stays_and_what_is_no_state_file_is_not_replaced(
    server: FakeVllm, tmp_path: Path
) -> None:
    path = tmp_path / "state.json"
    tools = {"bash": [1.5]}
    path.write_text(json.dumps({"version": 1, "state": {"costs": {}, "tool_times": tools}}))
    run(server.url, "--out", str(path))
    state = json.loads(path.read_text())["state"]
    assert state["tool_times"] == tools
    assert state["costs"]
    num = len(server.prompts)
    for content in ('{"now": 1}\n{"now": 2}\n', "[]", '{"version": 2, "state": {}}'):
        path.write_text(content)
        result = run(server.url, "--out", str(path), expect=1)
        assert "is no state file and would be lost; give another --out" in result.stderr
        assert path.read_text() == content
    assert len(server.prompts) == num, "said before anything is measured"


def test_prompts_are_unknown_to_any_cache_but_where_a_prefix_is_meant_to_be_known(
    server: FakeVllm, tmp_path: Path
) -> None:
    run(server.url, "--out", str(tmp_path), "--lengths", "500, 1000,max", "--repeats", "2")
    lengths = [len(prompt) for prompt in server.prompts]
    bare, behind = [500, 500, 1000, 1000, 8190, 8190], [500, 1000, 1000, 7690, 8190, 8190]
    assert lengths == [500, *bare, *behind]  # the first is not counted
    assert len({tuple(prompt) for prompt in server.prompts}) == len(lengths)
    path = next(tmp_path.iterdir())
    measured = json.loads(path.read_text())["measured"]
    assert [(m["num_new"], m["num_cached"]) for m in measured] == [
        *((500, 0), (1000, 0), (8190, 0)),
        *((500, 500), (500, 7690)),
    ]


def test_ctrl_c_keeps_what_was_measured(
    server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, real = 0, Server.first_token_s

    def interrupted(*args: Any) -> float:
        nonlocal sent
        sent += 1
        if sent == 12:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(Server, "first_token_s", interrupted)
    result = run(server.url, "--out", str(tmp_path), expect=130)
    assert "Stopped: 3 of 7 measured" in result.stdout
    assert len(json.loads(next(tmp_path.iterdir()).read_text())["measured"]) == 3


def test_ctrl_c_before_there_is_enough_writes_nothing(
    server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "first_token_s", interrupted)
    result = run(server.url, "--out", str(tmp_path), expect=1)
    assert "nothing was written" in result.stderr
    assert not list(tmp_path.iterdir())


def test_without_prefix_caching_only_bare_prompts_count(server: FakeVllm, tmp_path: Path) -> None:
    server.caches = False
    result = run(server.url, "--out", str(tmp_path))
    assert "Is prefix caching on" in result.stdout
    measured = json.loads(next(tmp_path.iterdir()).read_text())["measured"]
    assert all(point["num_cached"] == 0 for point in measured)


def test_figures_of_dram_come_from_the_connector(server: FakeVllm, tmp_path: Path) -> None:
    server.metrics |= {
        "continuum:programs": 1.0,
        "continuum:loaded_blocks_total": 2000.0,
        "continuum:load_seconds_sum": 0.1,
        "continuum:load_seconds_count": 20.0,
    }
    result = run(server.url, "--out", str(tmp_path / "new" / "file.json"), expect=1)
    assert "there is no folder" in result.stderr
    result = run(server.url, "--out", str(tmp_path / "file.json"))
    assert "A block from DRAM 50 us" in result.stdout
    state = json.loads((tmp_path / "file.json").read_text())["state"]["costs"]
    assert state["load"] == [0.0, pytest.approx(5e-5)]
    hints = [extra["continuum"] for extra in server.extras]
    assert all(hint == {**hints[0], "ttl_s": 0} for hint in hints)


def test_without_the_connector_requests_are_stock_and_others_are_named(
    server: FakeVllm, tmp_path: Path
) -> None:
    server.metrics["vllm:num_requests_running"] = 3.0
    result = run(server.url, "--out", str(tmp_path))
    assert server.extras == [None] * len(server.extras)
    assert "ContinuumConnector does not run there" in result.stdout
    assert "3 requests of others are running" in result.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "x"), "no model 'x' is served here; there is: m"),
        (("--lengths", "1000,many"), "'many' is no number of tokens"),
        (("--lengths", "1000,9000"), "32 to 8190 tokens, not 9000"),
        (("--lengths", "5,1000"), "not 5"),
        (("--lengths", "1000"), "a fit takes 3"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    server: FakeVllm, tmp_path: Path, args: tuple[str, ...], said: str
) -> None:
    result = run(server.url, "--out", str(tmp_path), *args, expect=1)
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://host:port", "http://host:99999"])
def test_a_url_that_is_none_is_one_sentence(url: str) -> None:
    result = run(url, expect=1)
    assert "is no server address" in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_server_is_one_sentence() -> None:
    with FakeVllm() as gone:
        url = gone.url
    result = run(url, expect=1)
    assert f"no answer from {url}" in result.stderr
    assert result.stderr.count("\n") == 1


def test_another_kind_of_server_is_one_sentence(server: FakeVllm) -> None:
    server.models = "<html>"
    assert "not as vLLM's OpenAI API does" in run(server.url, expect=1).stderr
    server.models = {"data": [{"name": "m"}]}
    assert "its list of models is none" in run(server.url, expect=1).stderr
    assert "HTTP 404" in run(f"{server.url}/elsewhere", expect=1).stderr


def test_a_key_is_sent_and_asked_for(server: FakeVllm, tmp_path: Path) -> None:
    server.key = "secret"
    assert "--api-key" in run(server.url, expect=1).stderr
    run(f"{server.url}/v1/", "--api-key", "secret", "--out", str(tmp_path))


def test_several_models_must_be_chosen_from(server: FakeVllm, tmp_path: Path) -> None:
    server.models["data"].append({"id": "lora"})
    assert "choose by --model: m, lora" in run(server.url, expect=1).stderr
    run(server.url, "--model", "m", "--out", str(tmp_path))


def test_default_lengths_double_and_fit() -> None:
    assert measure.default_lengths(8192) == [1000, 2000, 4000, 8000]
    assert measure.default_lengths(1024) == [127, 254, 508, 1016]
    assert measure.default_lengths(0)[-1] == 32_000


def test_without_the_engines_figure_the_ttft_counts() -> None:
    point = Point(100, 0, ttft_s=[3.0, 1.0, 2.0])
    assert point.seconds == 2.0
    point.prefill_s = [0.5, 0.7, 0.6]
    assert point.seconds == 0.6


def test_a_gpu_is_only_asked_for_where_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate.shutil, "which", lambda name: "/bin/echo")
    assert calibrate.find_gpu("far.away") == "unknown"
    assert calibrate.find_gpu("localhost") == "--query-gpu=name --format=csv,noheader"
    monkeypatch.setattr(calibrate.shutil, "which", lambda name: None)
    assert calibrate.find_gpu("localhost") == "unknown"


def test_the_command_starts_without_vllm_and_torch() -> None:
    code = (
        "import sys; from continuum_connector.tools.cli.app import app\n"
        "print({'vllm', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "from continuum_connector.tools.cli.entry import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install '.[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_errors_are_for_people() -> None:
    with pytest.raises(CommandError, match="give one like"):
        Server("ws://x")
