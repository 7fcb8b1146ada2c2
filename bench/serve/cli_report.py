"""`continuum bench report`: result folders as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.serve.page import page
from continuum_connector.tools.cli.server import CommandError

REPORT = "report.html"


def write(
    folders: Sequence[Path], out: Path | None = None, title: str = "", base: str = ""
) -> Path:
    """Write the page, beside the first folder's runs unless told where; CommandError if it cannot.

    `base`: the arm that the others are compared with; empty for plain vLLM.
    """
    text, path = page(folders, title, base), out or folders[0] / REPORT
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error}; give another -o FILE") from None
    return path
