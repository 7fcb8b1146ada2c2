"""Where models, logs and rivals are kept: .cache of the checkout; of the user, for an installed
package has no place of its own to write to."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def cache_folder(root: Path = ROOT) -> Path:
    """The folder; who writes there makes it."""
    if (root / "pyproject.toml").is_file():
        return root / ".cache"
    of_user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(of_user) / "continuum-connector"


CACHE = cache_folder()
