"""VllmServer: a real `vllm serve` on CPU, started, watched, measured and stopped for you.

    with VllmServer(make_model(), num_blocks=400, connector={"dram_bytes": "512MiB"}) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        ...
        server.metric("vllm:prefix_cache_hits_total")

The server runs in its own process group; the group is gone when the block is left, whether by
its end, an exception or Ctrl-C, and also when the Python that started it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from bench.cache import CACHE
from bench.serve.metrics import Metrics, parse_metrics, total
from bench.serve.package import python_path
from continuum_connector.errors import ToldError

LOGS = CACHE / "logs"
SERVED_NAME = "tiny"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ServerError(ToldError):
    """The server did not start, or died; the message ends with the last lines of its log."""


@dataclass
class ServerOptions:
    """How to start the server. `connector` None is stock vLLM, {} the connector's defaults
    without a DRAM tier, {"dram_bytes": None} all of its defaults."""

    num_blocks: int = 400  # the VRAM pool, in blocks of block_size tokens; 0: all there is
    block_size: int = 32  # vLLM's CPU attention wants a multiple of 32
    max_model_len: int = 0  # 0: what the pool holds, 8192 at most
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024
    dtype: str = "float32"
    eager: bool = True  # CUDA graphs cost start-up time
    connector: Mapping[str, Any] | None = None
    kv_transfer_config: Mapping[str, Any] | None = None  # the whole JSON, instead of `connector`
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 420.0  # a tiny model: 25 s alone; minutes when every core is taken

    @property
    def context_tokens(self) -> int:
        """The longest context. vLLM refuses one that the pool, less its null block, cannot hold."""
        fits = min(8192, (self.num_blocks - 1) * self.block_size) if self.num_blocks else 8192
        return self.max_model_len or fits

    def transfer_config(self) -> dict[str, Any] | None:
        """The value of --kv-transfer-config, or None for stock vLLM."""
        if self.kv_transfer_config is not None:
            return dict(self.kv_transfer_config)
        if self.connector is None:
            return None
        config: dict[str, Any] = {"kv_connector": "ContinuumConnector"}
        # What a machine can spare differs from run to run; None stands for that default.
        extra = {"dram_bytes": 0, **self.connector}
        if extra["dram_bytes"] is None:
            del extra["dram_bytes"]
        if extra:
            config["kv_connector_extra_config"] = extra
        return config

    def command(self, model: Path, port: int) -> list[str]:
        """The command line; flags that only cost start-up time are turned off."""
        model = model.absolute() if model.exists() else model  # the server runs elsewhere
        line = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        line += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
        line += ["--dtype", self.dtype, "--disable-uvicorn-access-log"]
        line += ["--block-size", str(self.block_size), *["--enforce-eager"] * self.eager]
        if self.num_blocks:
            line += ["--num-gpu-blocks-override", str(self.num_blocks)]
        line += ["--max-model-len", str(self.context_tokens)]
        line += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        line += ["--max-num-seqs", str(self.max_num_seqs), "--enable-prompt-tokens-details"]
        config = self.transfer_config()
        if config is not None:
            line += ["--kv-transfer-config", json.dumps(config)]
        return [*line, *self.args]

    def environment(self) -> dict[str, str]:
        """The caller's environment, offline and quiet; `env` wins. See package.py for its path."""
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",  # the log says what was attached and why
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # vLLM reserves one more core where a connector is configured: same cores for both.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "TOKENIZERS_PARALLELISM": "false",
        }
        found = {**os.environ, **quiet, **self.env}
        return {**found, "PYTHONPATH": python_path(found.get("PYTHONPATH", ""))}


class Companion:
    """A process beside an arm's server, as a context manager. Entering waits until it answers.

    `name`: what errors call it; `command`; `url`: answers once it works; `env`: beside the
    caller's. `log`: where to keep what it says, set before entering.
    """

    def __init__(
        self, name: str, command: list[str], url: str, timeout_s: float, log: Path
    ) -> None:
        self.name = name
        self.command = command
        self.start_timeout_s = timeout_s
        self.log = log
        self.env: dict[str, str] = {}
        self.cwd: Path | None = None
        self._answers_at = url
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and return when it answers; raises ServerError with what its log says.

        Call it from the thread that lives longest: on Linux the process ends with that thread.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            log.write(os.fsencode(" ".join(self.command) + "\n"))
            log.flush()
            self._process = spawn(self.command, log, self.cwd, {**os.environ, **self.env})
        try:
            wait_for(self._process, self._answers_at, self.start_timeout_s)
        except ServerError as error:
            self.stop()
            raise ServerError(f"{self.name} {error}{self.why()}") from None
        except BaseException:
            self.stop()
            raise

    def stop(self, grace_s: float = 10.0) -> None:
        """End the whole process group: SIGINT, then SIGKILL to what is left."""
        process, self._process = self._process, None
        if process is not None:
            end_group(process, grace_s)

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process is not None and self._process.poll() is None

    def why(self) -> str:
        """What its log says of its end, behind an error's first words."""
        return f": {self.last_words()}"

    def last_words(self) -> str:
        """The end of its log, and where that is."""
        return f"{self.log_tail(1)} (log: {self.log})"

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class VllmServer(Companion):
    """A running `vllm serve`. `options`: fields of ServerOptions."""

    def __init__(
        self, model: Path, name: str = "server", log: Path | None = None, **options: Any
    ) -> None:
        self.model = model
        self.options = ServerOptions(**options)
        log = log or LOGS / f"{name}-{os.getpid()}.log"
        super().__init__(name, [], "", self.options.start_timeout_s, log)
        self.port = 0
        self.start_s = 0.0
        self.cwd = self.log.parent  # not a checkout: `-m` imports from there first

    @property
    def url(self) -> str:
        """Address without a path; the OpenAI API is below `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the API server, which is also the id of its process group."""
        return self._running().pid

    def start(self) -> None:
        """Start it anew, on another port."""
        self.port = free_port()
        self.start_s = 0.0
        self.command = self.options.command(self.model, self.port)
        self.env = self.options.environment()
        self._answers_at = f"{self.url}/health"
        began = time.monotonic()
        super().start()
        self.start_s = time.monotonic() - began

    def stop(self, grace_s: float = 15.0) -> None:
        """As any; one that is still importing has nothing to put in order."""
        super().stop(grace_s if self.start_s else min(grace_s, 1.0))

    def why(self) -> str:
        """The first error in its log, and the log's last lines."""
        return f"{f'. {self.cause()}'.rstrip()}\nLog: {self.log}\n{self.log_tail()}"

    def exit_code(self) -> int | None:
        """How the API server process ended; None while it runs."""
        return self._running().poll()

    def healthy(self) -> bool:
        """Whether it runs and its engine does: the API outlives a dead engine for a moment."""
        with contextlib.suppress(OSError):
            return self.alive() and self.get("/health", timeout_s=30.0) is not None
        return False

    def get(self, path: str, timeout_s: float = 60.0) -> str:
        """GET a path and return its body."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return str(answer.read().decode())

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> Any:
        """POST JSON and return the answer's JSON, or its text where it is none."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def metrics(self) -> Metrics:
        """Every sample of /metrics: (name, labels) -> value."""
        return parse_metrics(self.get("/metrics"))

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` with these labels; 0.0 if there is none yet."""
        return total(self.metrics(), name, **labels)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError(f"{self.name} is not running")
        return self._process

    def cause(self) -> str:
        """The first error in the log: vLLM repeats its wrapper's errors many lines below it."""
        text = self.log.read_text(errors="replace")
        match = re.search(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?((?:\w+\.)*\w*Error: .*)$", text, re.M)
        return match[1] if match else ""


PORTS = range(20_000, 32_000)  # below those that Linux gives to whoever asks for any
_dice = random.SystemRandom()


def free_port() -> int:
    """A TCP port nobody listens on at this moment, nor is given by chance until a server that has
    first to import everything binds to it."""
    for port in _dice.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"of 100 ports between {PORTS.start} and {PORTS.stop} none is free")


def spawn(
    command: Sequence[str],
    log: BinaryIO,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that leads its group and says everything to its log."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=env,
        start_new_session=True,
        preexec_fn=as_a_child,
    )


def wait_for(process: subprocess.Popen[bytes], url: str, timeout_s: float) -> None:
    """Until it answers; ServerError if it ends before, or takes longer."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"ended with status {process.returncode} while starting")
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(url, timeout=2.0)
            return
        time.sleep(0.2)
    raise ServerError(f"did not answer within {timeout_s:.0f} s")


def end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process that leads its group: SIGINT, then SIGKILL to what is left of the group."""
    _signal_group(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    # Workers may outlive the process that started them; the group holds them all.
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def as_a_child() -> None:
    """A started process ends by SIGINT, also below a script's background job, which ignores it;
    on Linux it ends with its starter, even by SIGKILL."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
