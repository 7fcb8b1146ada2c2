"""The commands of `continuum`, where they start, and how each of them ends."""

from __future__ import annotations

from continuum_connector.tools.cli import ending


def main() -> None:
    """Run the command line. Says what to install where rich or typer is missing."""
    ending.leave(_main, "continuum")  # rich and typer read the terminal's size when imported


def _main() -> None:
    from continuum_connector.tools.cli.app import app

    app()
