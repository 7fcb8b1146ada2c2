"""The server of an arm: what it needs, kept for every load that it serves, looked at afterwards."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from bench.serve import results
from bench.serve.arms import CannotRunError
from bench.serve.metrics import parse_metrics, total
from bench.serve.record import RunFolder
from bench.serve.rivals import LmcacheServer
from bench.serve.server import ServerOptions, VllmServer

WHY_NO_TIER = re.compile(r"No DRAM tier on this rank: .*|ContinuumConnector steps aside: .*")


@dataclass(frozen=True)
class Prepared:
    """What a run starts: vLLM's server, and the one that must be there before it."""

    options: ServerOptions
    side: LmcacheServer | None


class Kept(contextlib.ExitStack):
    """The server of one arm, kept for every load that it serves; leaving stops it."""

    server: VllmServer | None = None

    def serving(self, prepared: Prepared, model: Path, out: RunFolder) -> tuple[VllmServer, bool]:
        """A healthy server, and whether it has served another load."""
        log = out.folder / results.LOG
        if self.server is not None and self.server.healthy():
            log.symlink_to(os.path.relpath(self.server.log, log.parent))
            return self.server, True
        self.close()
        options, side = prepared.options, prepared.side
        if side is not None:
            side.log, side.start_timeout_s = out.folder / "lmcache.log", options.start_timeout_s
            self.enter_context(side)
        server = VllmServer(model, out.run.name, options, log=log)
        self.server = self.enter_context(server)
        out.run.server_start_s = self.server.start_s
        return self.server, False


def check_tier(options: ServerOptions, folder: Path) -> None:
    """Raise CannotRunError if our server served without the DRAM that it was given.

    It serves on without, so nothing fails; the last metrics are the first that surely say so.
    """
    metrics, log = folder / results.AFTER, folder / results.LOG
    if not (options.connector or {}).get("dram_bytes") or not metrics.exists():
        return
    if total(parse_metrics(metrics.read_text()), "continuum:tier_up"):
        return
    said = WHY_NO_TIER.search(log.read_text(errors="replace"))
    why = said[0] if said else f"the log should say why: {log}"
    raise CannotRunError(f"it served without its DRAM tier (continuum:tier_up is 0). {why}")
