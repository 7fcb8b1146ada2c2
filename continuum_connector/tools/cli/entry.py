"""Where the `continuum` command starts; works without the packages of the `cli` extra."""

from __future__ import annotations

from continuum_connector.errors import ToldError
from continuum_connector.tools.cli import ending


def main() -> None:
    """Run the command line; without its packages, say what to install."""
    ending.leave(_main, "continuum")  # rich and typer read the terminal's size when imported


def _main() -> None:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        raise ToldError(
            f"the command line needs the package {error.name}, which the server does not; "
            "install it with: pip install '.[cli]' in a clone"
        ) from None
    from continuum_connector.tools.cli.app import app

    app()
