"""Server: a running vLLM server, as its client sees it; what it counts."""

from __future__ import annotations

import contextlib
import http.client
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import SplitResult, urlsplit

from continuum_connector.errors import ToldError, shown
from continuum_connector.tools.cli.ending import hidden

TIMEOUT_S = 5.0  # a server that takes longer to answer counts as gone
MAX_BODY = 64 << 20  # bytes; /metrics of many engines takes a few hundred KB
NO_CONNECTOR = (
    "ContinuumConnector does not run there, so there is nothing to show; to run it, serve with: "
    '--kv-transfer-config \'{"kv_connector":"ContinuumConnector"}\''
)
Labels = frozenset[tuple[str, str]]
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MAX_SAMPLE = 1e18  # the largest value of a metric that we believe; sums of larger ones overflow


class Server:
    """A server's address, and the key to it.

    Every method raises ToldError with one sentence, and a cure if there is one.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """`url`: http://HOST:PORT, with or without /v1. `timeout_s`: for one whole request."""
        parts = _address(url)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if not (api_key.isascii() and api_key.isprintable()):
            raise ToldError("the key cannot be sent: a key is of printable ASCII characters")
        is_open = parts.scheme == "http"
        kind = http.client.HTTPConnection if is_open else http.client.HTTPSConnection
        self._connect = partial(kind, parts.netloc, timeout=timeout_s)
        self._timeout_s = timeout_s

    def scrape(self, now: float) -> Scrape:
        """What it counts `now`, in monotonic seconds. ToldError if it has no connector."""
        status, body = self.get("/metrics")
        if status != 200:
            raise ToldError(f"{self.url}/metrics answers HTTP {status}; is this a vLLM server?")
        found = Scrape.parse(body.decode("utf-8", "replace"), now)
        if not any(name.startswith("continuum:") for name in found.samples):
            raise ToldError(NO_CONNECTOR)
        return found

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body, whose size and time are bounded, however slowly its bytes arrive."""
        until, content = time.monotonic() + self._timeout_s, bytearray()
        with contextlib.closing(self._connect()) as connection:
            try:
                connection.request("GET", self._path + path, headers=self._headers)
                response = connection.getresponse()
                while part := response.read1(1 << 16):
                    content += part
                    if len(content) > MAX_BODY:
                        raise ValueError(f"more than {MAX_BODY >> 20} MiB")
                    if time.monotonic() > until:
                        raise TimeoutError(f"not whole within {self._timeout_s:g} s")
                if response.length:
                    raise http.client.IncompleteRead(bytes(content), response.length)
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = str(error) or type(error).__name__
                raise ToldError(
                    f"no answer from {self.url} ({why}); is the server up, and is this its address?"
                ) from None
        return response.status, bytes(content)


def _address(url: str) -> SplitResult:
    """Split the address; ToldError, without its secrets, if it is none, or if it has a password or
    a query, which would not be sent."""
    with contextlib.suppress(ValueError):  # wrong brackets or port
        parts = urlsplit(url if "//" in url else f"http://{url}")
        is_bare = "@" not in parts.netloc and not parts.query
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and is_bare:
            return parts
    raise ToldError(
        f"{hidden(url)!r} is no server's bare address; give one like http://localhost:8000, and a "
        "key with --api-key or VLLM_API_KEY"
    )


def samples(exposition: str) -> Iterator[tuple[str, Labels, float]]:
    """Name, labels and value of each sample; lines that are none, or whose value no metric may
    have, are left out. A page of 1,100 samples takes 6 ms."""
    for line in exposition.splitlines():
        if match := _SAMPLE.match(line):
            try:
                value = float(match[3])
            except ValueError:
                continue
            if -MAX_SAMPLE < value < MAX_SAMPLE:
                yield match[1], frozenset(_LABEL.findall(match[2] or "")), value


@dataclass(frozen=True)
class Scrape:
    """One answer of /metrics: samples by name, each with labels and value. `at`: seconds on any
    monotonic clock."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def parse(cls, text: str, at: float) -> Scrape:
        """Read the exposition format; ToldError if the text is something else."""
        found: dict[str, dict[Labels, float]] = {}
        for name, labels, value in samples(text):
            if name.startswith(("vllm:", "continuum:")):
                shown_as = frozenset((key, shown(of)) for key, of in labels)
                found.setdefault(name, {})[shown_as] = value
        if not found and not next(samples(text), None):
            raise ToldError("/metrics answers, but not in Prometheus' format; check host and port")
        return cls(at, found)

    def since(self, older: Scrape) -> Scrape:
        """What was added between the two. As for Prometheus, a counter that fell has restarted."""
        added: dict[str, dict[Labels, float]] = {}
        for name, each in self.samples.items():
            before = older.samples.get(name, {})
            grown = {labels: value - before.get(labels, 0.0) for labels, value in each.items()}
            added[name] = {key: new if new >= 0.0 else each[key] for key, new in grown.items()}
        return Scrape(self.at - older.at, added)

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples that carry all of `labels`; 0.0 if there is none."""
        wanted = set(labels.items())
        return sum(v for have, v in self.samples.get(name, {}).items() if wanted <= have)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of one label."""
        sums: dict[str, float] = {}
        for have, value in self.samples.get(name, {}).items():
            if (key := dict(have).get(label)) is not None:
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def each(self, name: str) -> list[float]:
        """The values, one for each engine."""
        return list(self.samples.get(name, {}).values())
