"""What becomes of us where vLLM has renamed one name of touched.py: a row for each.

    python -m tests.vllm.renames                 print a row for each name
    python -m tests.vllm.renames Scheduler._pre  for those that begin so
    python -m tests.vllm.renames --write         write docs/versions.md

Each name is played in a child of this process, through every scenario that could tell.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm.v1.engine.core  # noqa: F401  else each child would read it and its 300 modules anew

from bench.markers import rewrite
from continuum_connector.vllm import attach, plugin, touched
from continuum_connector.vllm.touched import TOUCHED, Part, Touch
from tests.versions import sources
from tests.vllm.harness import Engine, OracleError
from tests.vllm.renamed import rename
from tests.vllm.scenarios import SCENARIOS
from tests.vllm.tiering import reference

PASSES, STOCK = "passes", "stock, one sentence"
LESS = {
    Part.ORDER: "no program order, one sentence",
    Part.TIER: "no DRAM tier, one sentence",
    Part.DISK: "no disk tier, one sentence",
    Part.EVENTS: "no KV events of DRAM, one sentence",
    Part.WORKER: "no DRAM tier, one sentence of the workers",
    Part.PLUGIN: "one sentence of the plugin",
}
TOLD = {*LESS.values(), PASSES, STOCK}
TIMEOUT_S = 120
# Once a server has stepped aside, all hooks answer alike.
ENOUGH_ASIDE = {"pins", "vram too small", "load", "reset amid turns", "priority", "states"}


class _Said(logging.Handler):
    """The sentences of ours that name the release."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "continuum" in record.name and touched.release() in record.getMessage():
            self.lines.append(record.getMessage())


@contextmanager
def _heard() -> Iterator[_Said]:
    said, logger = _Said(), logging.getLogger("vllm")
    logger.addHandler(said)
    try:
        yield said
    finally:
        logger.removeHandler(said)


def row(touch: Touch) -> str:
    """Play it in a child; what became of us, or what went wrong."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads beside a fork
        child = os.fork()
    if not child:
        os.close(read)
        signal.alarm(TIMEOUT_S)
        try:
            told = _row(touch)
        except BaseException as error:
            told = f"the test fails: {_where(error)}"
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as end:
        told = end.read().decode()
    _, status = os.waitpid(child, 0)
    return told or f"ended by signal {status}"


def _row(touch: Touch) -> str:
    rename(touch)
    touched.missing.cache_clear()
    touched._stored_by.cache_clear()
    if touch.needs is Part.LOAD:
        return _not_loaded(touch)
    if touch.needs is Part.WORKER:
        return LESS[Part.WORKER] if touch.name in touched.why_no_copies() else "silent"
    if touch.needs is Part.PLUGIN:
        with _heard() as said:
            plugin.register()
        is_told = len(said.lines) == 1 and touch.any_of[0] in said.lines[0]
        return LESS[Part.PLUGIN] if is_told else f"silent: {said.lines}"
    found: dict[str, None] = {}
    for name, scenario in SCENARIOS.items():
        if STOCK not in found or len(found) > 1 or name in ENOUGH_ASIDE:
            found[_played(name, scenario, touch)] = None
    wrong = [each for each in found if each not in TOLD]
    told = [each for each in found if each != PASSES] or [PASSES]
    return "; ".join(wrong or told)


def _not_loaded(touch: Touch) -> str:
    named = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="ContinuumConnector"))
    with _heard() as said:
        attach._check_args(named)
    is_told = len(said.lines) == 1 and touch.any_of[0] in said.lines[0]
    return STOCK if is_told and named.kv_transfer_config is None else f"silent: {said.lines}"


def _played(name: str, scenario: Callable[..., Engine], touch: Touch) -> str:
    made: list[Engine] = []

    def make(*args: Any, **kwargs: Any) -> Engine:
        made.append(Engine(*args, **kwargs))
        return made[-1]

    with _heard() as said:
        try:
            scenario(make)
            _check(made)
        except OracleError as error:
            if not (made and _is_aside(made[-1]) and _is_wrong_in_stock(scenario)):
                return f"wrong KV in {name}: {error}"
        except Exception as error:
            return f"ends {name}: {_where(error)}"
    return _told(name, made, said.lines, touch)


def _told(name: str, made: list[Engine], lines: list[str], touch: Touch) -> str:
    if not lines:
        modes = {engine.connector.mode.name for engine in made}
        return PASSES if modes == {"ATTACHED"} else f"silent in {name}: {modes}"
    if len(lines) != len(made) or not all(touch.name in line for line in lines):
        return f"not one sentence in {name}: {lines}"
    return STOCK if all(map(_is_aside, made)) else LESS.get(touch.needs, f"said more: {lines}")


def _is_aside(engine: Engine) -> bool:
    return bool(engine.connector.mode.name == "ASIDE")


def _check(made: list[Engine]) -> None:
    for engine in made:
        assert set(engine.finish_reasons) >= set(engine.requests) - {"d"}, "a turn never ends"
        for each, request in engine.requests.items():
            outputs = engine.outputs[each]
            if engine.num_drafts or each not in engine.finish_reasons:
                continue  # its worker proves what is read; `d` is aborted
            if outputs != reference(list(request.prompt_token_ids), len(outputs)):
                raise OracleError(f"{each} answers from wrong KV")


def _is_wrong_in_stock(scenario: Callable[..., Engine]) -> bool:
    """Whether vLLM itself reads wrong KV there, as under its priority policy."""
    made: list[Engine] = []

    def make(*args: Any, **kwargs: Any) -> Engine:
        made.append(Engine(*args, **{**kwargs, "connector": None, "extra_config": None}))
        return made[-1]

    try:
        scenario(make)
        _check(made)
    except OracleError:
        return True
    return False


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "continuum_connector" in f.filename] or frames
    return f"{type(error).__name__}: {error} ({Path(ours[-1].filename).name}:{ours[-1].lineno})"


# --- docs/versions.md ---------------------------------------------------------------------
DOCS = sources.ROOT / "docs" / "versions.md"
_ASK = """
import json
import vllm.v1.core.sched.scheduler
from continuum_connector.vllm import touched
from continuum_connector.vllm.touched import TOUCHED
print(json.dumps([touched.is_there(t._replace(takes=())) for t in TOUCHED]))
"""


def in_release(version: str) -> list[bool]:
    """Which names of the table that release has."""
    path = os.pathsep.join([str(sources.source_dir(version)), str(sources.ROOT)])
    environ = {**os.environ, "PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", _ASK]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def static_row(touch: Touch) -> str:
    """All but the last two columns."""
    takes = f"({', '.join(touch.takes)})" if touch.takes else ""
    name = f"`{' / '.join(touch.any_of)}{takes}`"
    owner = touch.owner.removeprefix("vllm.").rpartition(".")[2]
    return f"| `{owner}` | {name} | {touch.needs.value} | {touch.where} | {touch.hook or 'none'} |"


def table(rows: list[str], releases: dict[str, list[bool]]) -> str:
    head = "| of vLLM | name | without it off | touched in | vLLM's own way | releases | renamed |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for number, (touch, told) in enumerate(zip(TOUCHED, rows, strict=True)):
        having = [v for v, found in releases.items() if found[number]]
        lines.append(f"{static_row(touch)} {_span(having, list(releases))} | {told} |")
    return "\n".join(lines)


def _span(having: list[str], releases: list[str]) -> str:
    if having == releases:
        return "all"
    if not having:
        return "none"
    if having == releases[releases.index(having[0]) :]:
        return f">= {having[0]}"
    return f"{having[0]} to {having[-1]}"


def main(words: list[str]) -> None:
    about, *_ = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.renames", description=about)
    parser.add_argument("names", nargs="*", help="those that begin so, such as Scheduler._pre")
    parser.add_argument("--write", action="store_true", help="docs/versions.md; plays all: minutes")
    options = parser.parse_args(words)
    asked = [each for each in TOUCHED if each.name.startswith(tuple(options.names) or "")]
    if options.write and options.names:
        parser.error("--write needs a row of every name; leave the names out")
    if not asked:
        parser.error(f"no name that we touch begins with {' or '.join(options.names)}")
    rows = []
    for touch in asked:
        rows.append(row(touch))
        print(f"{touch.needs.value:9} {touch.name}: {rows[-1]}", flush=True)
    if options.write:
        found = {version: in_release(version) for version in sources.VERSIONS}
        rewrite(DOCS, {"touched": table(rows, found)})


if __name__ == "__main__":
    main(sys.argv[1:])
