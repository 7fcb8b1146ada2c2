"""Asks this vLLM about many command lines: it is imported once, and a child answers for each.

python -m tests.vllm.asked < LINES    one JSON list of options per line; prints one answer each
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from continuum_connector.tools.checks import ask
from tests.corpus.run import preload


def answers(
    questions: Iterable[Sequence[str]], environs: Mapping[int, Mapping[str, str]] | None = None
) -> list[dict[str, Any]]:
    """What `ask.look_at_vllm` says of the KV cache for each of these options of `vllm serve`.

    `environs`: what a question has in its environment, by its number."""
    every = environs or {}
    lines = [json.dumps([list(words), every.get(i, {})]) for i, words in enumerate(questions)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.vllm.asked"]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(lines), done.stderr
    return found


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM prints, too
    ask.look_at_vllm("--help")  # imports what it takes
    from continuum_connector.vllm import planned  # noqa: F401

    preload()
    for line in sys.stdin:
        words, environ = json.loads(line)
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"vLLM was not asked about {shlex.join(words)}: {status=} of waitpid")
            continue
        os.environ.update(environ)
        os.write(out, (json.dumps(ask.read_words(words), default=str) + "\n").encode())
        os._exit(0)


if __name__ == "__main__":
    main()
