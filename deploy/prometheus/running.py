"""Prometheus: the real one, scraping a server of ours, with the alert rules of deploy/.

    with Prometheus([server.url], scrape_s=1.0) as prometheus:
        ...
        prometheus.query("continuum:pins_live")

Its data lie in a temporary folder and are gone when the block is left.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cache import CACHE
from bench.serve.server import LOGS, ServerError, as_a_child, free_port

RULES = Path(__file__).with_name("rules.yml")
UNPACKED = CACHE / "prometheus" / "usr" / "bin"  # where `make prometheus` puts it
START_S = 120.0  # a second or two, if the cores are free

Series = list[dict[str, Any]]  # {"metric": labels, "value": [time, text]} or "values"


def find(program: str) -> str | None:
    """Path of `prometheus` or `promtool`, from PATH or `make prometheus`; None without it."""
    return shutil.which(program) or shutil.which(program, path=str(UNPACKED))


class Prometheus:
    """A running Prometheus, as a context manager. Entering waits until it answers."""

    def __init__(self, urls: Sequence[str], scrape_s: float = 1.0) -> None:
        """`urls`: servers with a /metrics page, each one target."""
        self._hosts = [urllib.parse.urlparse(url).netloc for url in urls]
        self._scrape_s = scrape_s
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.log = LOGS / "prometheus.log"

    def __enter__(self) -> Prometheus:
        binary = find("prometheus")
        if binary is None:
            raise ServerError("prometheus is neither on PATH nor in .cache: run `make prometheus`")
        self._folder = tempfile.TemporaryDirectory(prefix="prometheus-")
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(self._config()))  # JSON is YAML
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(binary, f"--config.file={folder}/config.json"),
                    *(
                        f"--storage.tsdb.path={folder}/data",
                        f"--web.listen-address=127.0.0.1:{port}",
                    ),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=as_a_child,
            )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def query(self, expr: str, at: float | None = None) -> Series:
        """The series of `expr` now, or `at` that time; raises ServerError with Prometheus' own
        words."""
        return self._series("query", query=expr, time=time.time() if at is None else at)

    def rules(self) -> list[dict[str, Any]]:
        """Every alert rule: name, health, lastError, state."""
        groups = self._get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def num_scrapes(self) -> int:
        """How often every target has been scraped without error, at least."""
        counts = self.query("count_over_time(up[1h]) and up == 1")
        found = [int(series["value"][1]) for series in counts]
        return min(found) if len(found) == len(self._hosts) else 0

    # --- parts ------------------------------------------------------------------------
    def _config(self) -> dict[str, Any]:
        every = f"{self._scrape_s * 1000:.0f}ms"
        targets = [{"targets": self._hosts}]
        return {
            "global": {
                "scrape_interval": every,
                "scrape_timeout": every,
                "evaluation_interval": every,
            },
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "vllm", "static_configs": targets}],
        }

    def _series(self, what: str, **parameters: Any) -> Series:
        result = self._get(what, **parameters)["result"]
        assert isinstance(result, list)
        return result

    def _get(self, what: str, **parameters: Any) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30.0) as answer:
                data = json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ServerError(f"{parameters}: {error.read().decode()}") from error
        assert isinstance(data, dict)
        return data

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=2.0).close()
                return
            time.sleep(0.1)
        raise ServerError(f"prometheus did not start; its log: {self.log.read_text()[-2000:]}")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            process.kill()
            process.wait()
        self._folder.cleanup()
