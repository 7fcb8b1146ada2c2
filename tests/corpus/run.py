"""Counts what `continuum check` and `size` say of cases.py and pastes.py: right, wrong, not seen.

    python tests/corpus/run.py                    of the checkout in which it is started
    python tests/corpus/run.py "size falcon-7b"   one case

vLLM is imported once, and a child answers for each case. It works on older checkouts, too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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


# What vLLM reads only where it builds a model, as nearly every case does.
FOR_A_MODEL = (
    *("transformers.models.llama.configuration_llama", "continuum_connector.connector"),
    *(f"vllm.model_executor.models.{name}" for name in ("config", "llama", "adapters")),
    *(f"vllm.v1.attention.backends.{name}_attn" for name in ("flash", "triton", "turboquant")),
    "vllm.v1.attention.backends.flex_attention",
)


def preload() -> None:
    """Read these once, here, instead of in each child; then leave this process's pages alone."""
    for name in FOR_A_MODEL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page of vLLM


def warm_up() -> Any:
    """Import what a question takes; returns what answers one in this process."""
    import typer.testing  # noqa: F401

    from continuum_connector.tools.checks import ask
    from continuum_connector.tools.cli import app, check, size  # noqa: F401

    own = (ask.KV,) if hasattr(ask, "KV") else ()  # older ones ask with that word
    base = ask.look_at_vllm(*own, "--help")
    base = {key: value for key, value in base.items() if key != "refused"}
    from continuum_connector.vllm import planned  # noqa: F401

    preload()
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
            if about != "vllm":  # the machine is not what is asked about
                return own(about, given, environ) if about == "disk" else {}
            os.environ.update(environ)
            return json.loads(json.dumps(answer(tuple(given)), default=str))

        machine._ask = ask
        result = CliRunner().invoke(app, words)
    except BaseException as error:  # of the child alone
        return -1, repr(error)
    return result.exit_code, result.stdout


def wanted(case: Any) -> str:
    """What `judge` or `size` is to say of a case."""
    is_seen = case.wants.get("model") != "not seen" if hasattr(case, "wants") else case.num_bytes
    return "right" if is_seen else "not seen"


def judge(status: int, said: str, case: Any) -> str:
    """right, wrong or not seen."""
    wants = case.wants
    if status not in (0, 1, 3):
        return f"wrong: status {status}"
    found = wanted(case)
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
        return "not seen"
    found = json.loads(said)["context_bytes"]
    if num_bytes is not None and abs(found - num_bytes) <= num_bytes / 10:
        return "right"
    return f"wrong: {found:,} bytes"


def results(cases: Any, sizes: Any) -> Iterator[tuple[str, Any, str]]:
    """Which of both was asked, the case, and what is to be thought of its answer."""
    answer = warm_up()
    with tempfile.TemporaryDirectory() as root:
        known = names(Path(root), load(HERE.with_name("cases.py")))
        for case in cases:
            words = ["check", "--json", "--", filled(case.text, known)]
            yield "check", case, judge(*asked(words, answer), case)
        given = ["--programs", "1", "--context", "16000", "--json"]
        for one in sizes:
            words = ["size", *given, *shlex.split(filled(one.words, known))]
            yield "size", one, size(*asked(words, answer), one.num_bytes)


def main() -> None:
    """Run them all and count; fail if one is not as it is wanted."""
    sys.path.insert(0, os.getcwd())
    cases, pastes = (load(HERE.with_name(name)) for name in ("cases.py", "pastes.py"))
    every = {"check": [*cases.CASES, *pastes.CASES], "size": cases.SIZES}
    picked = [
        [one for one in some if not sys.argv[1:] or f"{about} {one.name}" in sys.argv]
        for about, some in every.items()
    ]
    counts: Counter[tuple[str, str]] = Counter()
    is_good, began = True, time.monotonic()
    for about, case, told in results(*picked):
        counts[about, told.partition(":")[0]] += 1
        is_good &= told == wanted(case)
        print(f"{time.monotonic() - began:5.1f} s  {about} {case.name:27} {told}", flush=True)
        began = time.monotonic()
    for about in ("check", "size"):
        said = ", ".join(f"{counts[about, each]} {each}" for each in ("right", "wrong", "not seen"))
        print(f"{about}: {said}")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
