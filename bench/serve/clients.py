"""Who puts a load on an arm's server: our own agents, or a load generator that nobody here wrote.

agents    ours (load.py): token ids, exact lengths, every answer compared
aiperf    NVIDIA's (aiperf.py): chats made up from the same programs' lengths
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serve.api import Api
from bench.serve.load import Driver, Load
from bench.serve.record import RunFolder
from bench.serve.results import Turn
from continuum_connector.errors import ToldError

OnTurn = Callable[[Turn], None]


class ClientError(ToldError):
    """A client that cannot be used, or a load that it cannot play; the message says what to do."""


@dataclass(frozen=True)
class Client:
    """A way to put a load on a server: our agents."""

    def settings(self) -> dict[str, Any]:
        """What two runs in one folder must have in common, beside their load."""
        return {}

    def check(self, load: Load) -> None:
        """ClientError if it cannot play this load."""

    async def drive(self, api: Api, load: Load, folder: RunFolder, on_turn: OnTurn) -> None:
        """Play the load and write down what came of it; cancelled, it stops early."""
        await Driver(api, load, folder, on_turn).run()


def find_client(name: str, model: Path, block_size: int) -> Client:
    """The client of this name for servers of that model and size of blocks; ClientError if there is
    none, or it is not installed."""
    if name == "aiperf":
        from bench.serve.aiperf import Aiperf

        return Aiperf.installed(model, block_size)
    if name != "agents":
        raise ClientError(f"--client {name}: not known; there is agents and aiperf")
    return Client()
