"""Counts what `continuum check` and `size` say of cases.py: right, wrong, not seen.

    python tests/corpus/run.py          of the checkout in which it is started, with its Python

vLLM is imported once, and a child answers for each case. It works on older checkouts, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
TIERS = {"dram_bytes": "1GiB", "disk_path": "/tmp/continuum-corpus", "disk_bytes": "2GiB"}


def load(path: Path) -> Any:
    """A module by its file: `tests` may be another checkout's."""
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def names(root: Path, cases: Any) -> dict[str, str]:
    """What stands for each `{NAME}`."""
    configs = vars(load(HERE.parents[1] / "vllm" / "model_configs.py"))
    transfer = {"kv_connector": "ContinuumConnector", "kv_connector_extra_config": TIERS}
    (root / "serve.yaml").write_text(cases.YAML)
    found = {"yaml": str(root / "serve.yaml"), "tiers": f"'{compact(transfer)}'"}
    for name, config in configs.items():
        if isinstance(config, dict) and "architectures" in config:
            (root / name).mkdir()
            (root / name / "config.json").write_text(json.dumps(config))
            found[name] = str(root / name)
    return found


def compact(value: Any) -> str:
    """JSON without spaces, which YAML would read otherwise."""
    return json.dumps(value, separators=(",", ":"))


def filled(text: str, known: dict[str, str]) -> str:
    for name, value in known.items():
        text = text.replace("{" + name + "}", value)
    return text


def warm_up() -> Any:
    """Import what a question takes; returns what answers one in this process."""
    from continuum_connector.tools.checks import ask

    own = getattr(ask, "KV", "")
    base = ask.look_at_vllm(*filter(None, [own, "--help"]))
    base = {key: value for key, value in base.items() if key != "refused"}
    if not own:
        return lambda words: ask.look_at_vllm(*words)
    from continuum_connector.vllm import planned  # noqa: F401

    return lambda words: base | (ask.read_words(words) if words else {})


def asked(words: list[str], answer: Any) -> tuple[int, str]:
    """The status and the output of one command, in a child."""
    read, write = os.pipe()
    if not (child := os.fork()):
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(_invoked(words, answer)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return tuple(json.loads(told)) if told else (-1, "")  # type: ignore[return-value]


def _invoked(words: list[str], answer: Any) -> tuple[int, str]:
    try:
        from typer.testing import CliRunner

        from continuum_connector.tools.checks import machine
        from continuum_connector.tools.cli.app import app

        own = machine._ask

        def ask(about: str, given: Any, environ: Any) -> Any:
            if about != "vllm":
                return {} if about == "cuda" else own(about, given, environ)
            os.environ.update(environ)
            return json.loads(json.dumps(answer(tuple(given)), default=str))

        machine._ask = ask
        result = CliRunner().invoke(app, words)
    except BaseException as error:  # of the child alone
        return -1, repr(error)
    return result.exit_code, result.stdout


def judge(status: int, said: str, wants: dict[str, str]) -> str:
    """right, wrong or not seen."""
    if status not in (0, 1, 3):
        return f"wrong: status {status}"
    found = "right"
    lines = json.loads(said)["lines"]
    for subject, want in wants.items():
        verdict, _, part = want.partition(":")
        seen = [line for line in lines if line["subject"] == subject]
        if any(line["verdict"] == verdict and part in line["text"] for line in seen):
            continue
        if not verdict and not any(line["verdict"] == "error" for line in seen):
            continue
        told = "; ".join(f"{line['verdict']} {line['text'][:90]}" for line in seen) or "no line"
        model = next((line for line in lines if line["subject"] == "model"), {})
        if "not seen" in (model.get("verdict"), *(line["verdict"] for line in seen)):
            found = f"not seen: {subject}: {told}"
            continue
        return f"wrong: {subject}: {told}"
    return found


def size(status: int, said: str, num_bytes: int | None) -> str:
    """The same of a size: within a tenth."""
    if status:
        return "right" if num_bytes is None else "not seen"
    found = json.loads(said)["context_bytes"]
    if num_bytes is not None and abs(found - num_bytes) <= num_bytes / 10:
        return "right"
    return f"wrong: {found:,} bytes"


def main() -> None:
    """Run them all and count."""
    sys.path.insert(0, os.getcwd())
    cases = load(HERE.with_name("cases.py"))
    answer = warm_up()
    counts: dict[str, Counter[str]] = {"check": Counter(), "size": Counter()}
    with tempfile.TemporaryDirectory() as root:
        known = names(Path(root), cases)
        for case in cases.CASES:
            began = time.monotonic()
            told = judge(
                *asked(["check", "--json", "--", filled(case.text, known)], answer), case.wants
            )
            counts["check"][told.partition(":")[0]] += 1
            print(f"{time.monotonic() - began:5.1f} s  {case.name:24} {told}", flush=True)
        given = ["--programs", "1", "--context", "16000", "--json"]
        for one in cases.SIZES:
            words = ["size", *given, *shlex.split(filled(one.words, known))]
            told = size(*asked(words, answer), one.num_bytes)
            counts["size"][told.partition(":")[0]] += 1
            print(f"         size {one.name:19} {told}", flush=True)
    for name, count in counts.items():
        print(f"{name}: {dict(count)}")


if __name__ == "__main__":
    main()
