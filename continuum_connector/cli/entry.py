"""The `continuum` command's first lines: they work without the extra that the rest needs."""

from __future__ import annotations


def main() -> None:
    """Run the command line; without its packages, say what to install."""
    try:
        import prometheus_client  # noqa: F401
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"continuum: the command line needs the package {error.name}, which the server does "
            "not; install it with: pip install '.[cli]' in a clone"
        ) from None
    from continuum_connector.cli.app import app

    app()
