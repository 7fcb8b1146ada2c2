"""Where the `continuum` command starts; works without the packages of the `cli` extra."""

from __future__ import annotations

import signal

from continuum_connector.tools.cli import ending


def main() -> None:
    """Run the command line; without its packages, say what to install."""
    try:
        ending.prepare()  # rich and typer read the terminal's size when they are imported
        try:
            import rich  # noqa: F401
            import typer  # noqa: F401
        except ImportError as error:
            raise SystemExit(
                f"continuum: the command line needs the package {error.name}, which the server "
                "does not; install it with: pip install '.[cli]' in a clone"
            ) from None
        from continuum_connector.tools.cli.app import app

        app()
    except KeyboardInterrupt:  # during the imports
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that a late Ctrl-C prints no traceback
