"""Server: a running OpenAI-compatible vLLM server, as its client sees it.

Scrape: one answer of its /metrics, and what was added since an earlier one. It reads no clock.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from prometheus_client.parser import text_string_to_metric_families

from continuum_connector.errors import shown
from continuum_connector.tools.cli.ending import ToldError, hidden

TIMEOUT_S = 600.0  # for one request: enough for a million tokens on a slow GPU
MAX_BODY = 64 << 20  # bytes; /metrics of many engines takes a few hundred KB
MAX_SAMPLE = 1e18  # the largest value of a metric that we believe; sums of larger ones overflow
MAX_LENGTH = 1 << 27  # tokens of a context
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)


class CommandError(ToldError):
    """Something that the user can fix; the message is all they see."""


class Model(NamedTuple):
    """A served model, by its served name. `root`: the name or path that it was loaded from.
    `max_model_len`: its longest context in tokens, 0 if the server does not say."""

    name: str
    root: str
    max_model_len: int


class Server:
    """One connection, kept open so that no measurement includes its set-up.

    Every method raises CommandError with one sentence, and a cure if there is one.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """`url`: http://HOST:PORT, with or without /v1. `timeout_s`: for one whole request."""
        parts = _address(url)
        port = f":{parts.port}" if parts.port else ""
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        self.url = f"{parts.scheme}://{host}{port}"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise CommandError("the key cannot be sent: a key is of printable ASCII characters")
            self._headers["Authorization"] = f"Bearer {api_key}"
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._timeout_s = timeout_s
        self.host = parts.hostname or ""
        self._connection = kind(self.host, parts.port, timeout=timeout_s)
        self._socket: Any = None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def models(self) -> list[Model]:
        """The served models, including adapters."""
        answer = self._json("GET", "/v1/models")
        try:
            found = [
                (each["id"], each.get("root"), each.get("max_model_len")) for each in answer["data"]
            ]
        except (KeyError, TypeError, AttributeError):
            raise self._no_api("its list of models is none") from None
        if not all(isinstance(name, str) for name, _, _ in found):
            raise self._no_api("its list of models is none")
        return [Model(name, _text(root) or name, _length(length)) for name, root, length in found]

    def first_token_s(self, model: str, tokens: Sequence[int], extra: dict[str, Any]) -> float:
        """Send a prompt of token ids and return the seconds until its first token arrives."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, **extra}
        payload = json.dumps(body)
        began = time.perf_counter()
        self._json("POST", "/v1/completions", payload)
        return time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """Every metric, summed over its labels; empty if the server has no /metrics."""
        status, body = self._request("GET", "/metrics")
        sums: dict[str, float] = {}
        for name, text in _SAMPLE.findall(body.decode("utf-8", "replace")):
            value = sample(text)
            if status == 200 and not name.endswith("_bucket") and value is not None:
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def exposition(self) -> str:
        """The answer of /metrics, unparsed."""
        status, body = self._request("GET", "/metrics")
        if status != 200:
            raise CommandError(f"{self.url}/metrics answers HTTP {status}; is this a vLLM server?")
        return body.decode("utf-8", "replace")

    def _json(self, method: str, path: str, body: str | None = None) -> Any:
        status, content = self._request(method, path, body)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status == 401:
            raise CommandError(f"{self.url} wants a key; give it with --api-key or VLLM_API_KEY")
        if status != 200 or answer is None:
            said = answer.get("error", answer) if isinstance(answer, dict) else None
            message = said.get("message") if isinstance(said, dict) else None
            raise self._no_api(f"{method} {path}: HTTP {status}{f', {message}' if message else ''}")
        return answer

    def _no_api(self, why: str) -> CommandError:
        return CommandError(
            f"{self.url} answers, but not as vLLM's OpenAI API does ({why}); "
            "check host, port and path"
        )

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        """Return status and body. Size and time are bounded, however slowly the bytes arrive."""
        ended = threading.Event()
        clock = threading.Timer(self._timeout_s, self._hang_up, (ended,))
        clock.daemon = True
        try:
            clock.start()
            if self._connection.sock is None:
                self._connection.connect()
            # The connection drops it if an answer has no length, but the reader keeps it.
            self._socket = self._connection.sock
            self._connection.request(method, self._path + path, body, self._headers)
            response = self._connection.getresponse()
            content = response.read(MAX_BODY + 1)
            if ended.is_set():  # a body without a length simply ends when we hang up
                raise TimeoutError
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            why = str(error) or type(error).__name__
            why = f"not whole within {self._timeout_s:g} s" if ended.is_set() else why
            raise CommandError(
                f"no answer from {self.url} ({why}); is the server up, and is this its address?"
            ) from None
        finally:
            clock.cancel()
        if len(content) > MAX_BODY:
            self._connection.close()
            raise self._no_api(f"{method} {path}: more than {MAX_BODY >> 20} MiB")
        return response.status, content

    def _hang_up(self, ended: threading.Event) -> None:
        """Wake up the reader; called on the timer's thread."""
        ended.set()
        with contextlib.suppress(OSError, AttributeError):
            (self._connection.sock or self._socket).shutdown(socket.SHUT_RDWR)


def _address(url: str) -> SplitResult:
    """Split the address; if it is not one, CommandError, without its secrets."""
    wrong = CommandError(
        f"{hidden(url)!r} is no server address; give one like http://localhost:8000"
    )
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port, host = parts.port, parts.hostname or ""
        host.encode("idna")
    except ValueError:  # wrong brackets, port or name
        raise wrong from None
    is_plain = parts.path.isascii() and parts.path.isprintable() and " " not in parts.path
    if parts.scheme not in ("http", "https") or not host or port == 0 or not is_plain:
        raise wrong
    if "@" in parts.netloc or parts.query:
        raise CommandError(
            f"{hidden(url)!r} has a password or more behind the path, which is not sent; give the "
            "bare address, and a key with --api-key or VLLM_API_KEY"
        )
    return parts


def sample(text: str) -> float | None:
    """A metric's value; None if it is not a number that a metric may have."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if -MAX_SAMPLE < value < MAX_SAMPLE else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _length(value: object) -> int:
    return value if isinstance(value, int) and 0 < value <= MAX_LENGTH else 0


MAX_LINE = 16 << 10  # characters; the parser's time grows with their square, because of labels
OF_INTEREST = ("vllm:", "continuum:")

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """Samples by name, each with labels and value. `at`: seconds on any monotonic clock."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def parse(cls, text: str, at: float) -> Scrape:
        """Read the exposition format; CommandError if the text is something else."""
        samples: dict[str, dict[Labels, float]] = {}
        try:
            if any(len(line) > MAX_LINE for line in text.splitlines()):
                raise ValueError(f"a line is longer than {MAX_LINE:,} characters")
            for family in text_string_to_metric_families(text):
                if family.name.startswith(OF_INTEREST):
                    for each in family.samples:
                        if (value := sample(str(each.value))) is not None:
                            labels = frozenset((key, shown(of)) for key, of in each.labels.items())
                            samples.setdefault(each.name, {})[labels] = value
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # what its parser raises
            raise CommandError(
                f"/metrics answers, but not in Prometheus' format ({error}); check host and port"
            ) from None
        return cls(at, samples)

    def since(self, older: Scrape) -> Scrape:
        """What was added between the two. As for Prometheus, a counter that fell has restarted."""
        added = {
            name: {labels: _added(value, older._at(name, labels)) for labels, value in each.items()}
            for name, each in self.samples.items()
        }
        return Scrape(self.at - older.at, added)

    def has(self, prefix: str) -> bool:
        """Whether any name begins with `prefix`."""
        return any(name.startswith(prefix) for name in self.samples)

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples that carry all of `labels`; 0.0 if there is none."""
        wanted = set(labels.items())
        return sum(v for have, v in self.samples.get(name, {}).items() if wanted <= have)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of one label."""
        sums: dict[str, float] = {}
        for have, value in self.samples.get(name, {}).items():
            key = dict(have).get(label)
            if key is not None:
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def values(self, name: str, label: str) -> list[str]:
        """The distinct values of one label, sorted."""
        return sorted({dict(have).get(label, "") for have in self.samples.get(name, {})} - {""})

    def _at(self, name: str, labels: Labels) -> float:
        return self.samples.get(name, {}).get(labels, 0.0)


def _added(value: float, before: float) -> float:
    return value - before if value >= before else value
