"""The server of an arm: what it needs, kept for every load that it serves, looked at afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from bench.serve import results
from bench.serve.arms import CannotRunError, Setup
from bench.serve.metrics import parse_metrics, total
from bench.serve.record import RunFolder
from bench.serve.router import LOG as ROUTER_LOG
from bench.serve.router import Router
from bench.serve.server import ServerOptions, VllmServer

Prepared = tuple[ServerOptions, Setup]  # what a run starts: vLLM's server, and what is around it
ASIDE = r"ContinuumConnector steps aside: .*"
TIERS = (  # the key that asks for it, what it is, the metric that says it is there, why it is not
    ("dram_bytes", "DRAM tier", "continuum:tier_up", rf"No DRAM tier on this rank: .*|{ASIDE}"),
    ("disk_path", "disk", "continuum:disk_up", rf"No disk tier.*: .*|{ASIDE}"),
)


class Kept(contextlib.ExitStack):
    """The server of one arm, kept for every load that it serves; leaving stops it."""

    server: VllmServer | None = None
    front: Router | None = None

    def stop(self) -> None:
        """End it and what is around it; the next load gets another one."""
        self.close()
        self.server = self.front = None

    def serving(self, prepared: Prepared, model: Path, out: RunFolder) -> tuple[VllmServer, bool]:
        """A healthy server, and whether it has served another load."""
        log = out.folder / results.LOG
        if self.server is not None and self.server.healthy():
            log.symlink_to(os.path.relpath(self.server.log, log.parent))
            return self.server, True
        self.stop()
        options, setup = prepared
        if setup.disk is not None:
            shutil.rmtree(setup.disk, ignore_errors=True)
            setup.disk.mkdir(mode=0o700, parents=True)
            self.callback(shutil.rmtree, setup.disk, ignore_errors=True)
        if (side := setup.side) is not None:
            side.log, side.start_timeout_s = out.folder / "lmcache.log", options.start_timeout_s
            self.enter_context(side)
        server = VllmServer(model, out.run.name, log, **vars(options))
        self.server = self.enter_context(server)
        out.run.server_start_s = self.server.start_s
        if setup.front:
            front = Router([server.url], setup.front, out.folder / ROUTER_LOG)
            out.run.front = front.command
            self.front = self.enter_context(front)
        return self.server, False


def check_tier(options: ServerOptions, folder: Path) -> None:
    """Raise CannotRunError if our server served without the DRAM or the disk that it was given.

    It serves on without, so nothing fails; the last metrics are the first that surely say so.
    """
    metrics, log = folder / results.AFTER, folder / results.LOG
    if not metrics.exists():
        return
    numbers = parse_metrics(metrics.read_text())
    for key, what, metric, why in TIERS:
        if (options.connector or {}).get(key) and not total(numbers, metric):
            said = re.search(why, log.read_text(errors="replace"))
            told = said[0] if said else f"the log should say why: {log}"
            raise CannotRunError(f"it served without its {what} ({metric} is 0). {told}")
