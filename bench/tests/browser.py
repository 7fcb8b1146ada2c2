"""A headless browser: what a page looks like in it, and what its console says."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(
    FOUND is None, reason=f"no browser here (any of {', '.join(NAMES)}: apt-get install chromium)"
)
SIZE = (1120, 2400)  # of the window, in pixels


@dataclass(frozen=True)
class Seen:
    """`pixels`: (height, width, 3) of 0 to 255; `console`: its messages."""

    pixels: Any
    console: list[str]

    def count(self, color: str) -> int:
        """Pixels of exactly that colour, like #d1480f."""
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        return int((self.pixels == wanted).all(axis=2).sum())


def look(page: Path, folder: Path, *, dark: bool) -> Seen:
    """Open a file as a reader would who prefers light, or dark."""
    from matplotlib.image import imread

    shot = folder / f"{page.stem}-{'dark' if dark else 'light'}.png"
    log = _run(page, folder, f"--screenshot={shot}", f"--blink-settings={_scheme(dark)}").stderr
    pixels = (imread(shot)[:, :, :3] * 255).round().astype(int)
    return Seen(pixels, re.findall(r":CONSOLE[^\]]*\] (.*)", log))


def ask(page: Path, folder: Path, expression: str) -> str:
    """What a script says of the page, run in a copy of it."""
    copy = folder / f"{page.stem}-asked.html"
    script = f"<script>document.body.textContent = 'said:' + ({expression}) + ';'</script>"
    copy.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    said = re.search(r"said:(.*);", _run(copy, folder, "--dump-dom").stdout)
    assert said is not None
    return said[1]


def _scheme(dark: bool) -> str:
    return f"preferredColorScheme={0 if dark else 1}"


def _run(page: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert FOUND is not None
    return subprocess.run(
        [
            *(FOUND, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--no-first-run", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"),
            *(f"--window-size={SIZE[0]},{SIZE[1]}", *options, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
