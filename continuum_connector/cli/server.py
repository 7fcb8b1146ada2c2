"""Server: a running OpenAI-compatible vLLM server, as its client sees it."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 600.0  # of one request: a million tokens on a slow GPU
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)


class CommandError(Exception):
    """Something the user can mend; the message is all they see."""


class Model(NamedTuple):
    """A model by the name it is served under. `root`: the name or path it was loaded from;
    `max_model_len`: its longest context in tokens, 0 if not said."""

    name: str
    root: str
    max_model_len: int


class Server:
    """One connection, kept open so that its set-up is in no measurement.

    Every method raises CommandError with one sentence, and a cure where there is one.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """`url`: http://HOST:PORT, with or without /v1. `timeout_s`: of one request."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise CommandError(f"{url!r} is no server address; give one like http://localhost:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(parts.hostname, port, timeout=timeout_s)
        self.host = parts.hostname

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def models(self) -> list[Model]:
        """The served models, adapters among them."""
        answer = self._json("GET", "/v1/models")
        try:
            return [
                Model(
                    each["id"], each.get("root") or each["id"], int(each.get("max_model_len") or 0)
                )
                for each in answer["data"]
            ]
        except (KeyError, TypeError, ValueError):
            raise self._no_api("its list of models is none") from None

    def first_token_s(self, model: str, tokens: Sequence[int], extra: dict[str, Any]) -> float:
        """Send a prompt of token ids and return the seconds until its first token is here."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, **extra}
        payload = json.dumps(body)
        began = time.perf_counter()
        self._json("POST", "/v1/completions", payload)
        return time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """Every metric summed over its labels; empty where the server has no /metrics."""
        status, body = self._request("GET", "/metrics")
        sums: dict[str, float] = {}
        for name, value in _SAMPLE.findall(body.decode("utf-8", "replace")):
            if status == 200 and not name.endswith("_bucket"):
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def exposition(self) -> str:
        """What /metrics answers, as it is."""
        status, body = self._request("GET", "/metrics")
        if status != 200:
            raise CommandError(f"{self.url}/metrics answers HTTP {status}; is this a vLLM server?")
        return body.decode("utf-8", "replace")

    def _json(self, method: str, path: str, body: str | None = None) -> Any:
        status, content = self._request(method, path, body)
        try:
            answer = json.loads(content)
        except ValueError:
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
        try:
            self._connection.request(method, self._path + path, body, self._headers)
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, ssl.SSLError, http.client.HTTPException) as error:
            self._connection.close()
            raise CommandError(
                f"no answer from {self.url} ({error or type(error).__name__}); "
                "is the server up, and is this its address?"
            ) from None
