"""mkdocs hook: the site's pages are the repository's, wherever they lie.

mkdocs wants all pages below one folder, GitHub wants them beside what they describe. So the
build reads a copy: every Markdown file under version control, and what these files link to.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Copy the pages, and let mkdocs read the copy."""
    pages = Path(tempfile.mkdtemp(prefix="site-pages-"))
    line = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.splitlines()):
        if (ROOT / name).exists():
            _copy(name, pages)
    for sheet in config.extra_css:
        _put(ROOT / str(sheet), pages)
    config.docs_dir = str(pages)
    return config


def on_post_build(config: Any) -> None:
    """The copy is done with."""
    shutil.rmtree(config.docs_dir)


def _copy(name: str, pages: Path) -> None:
    """Copy one page and the files it links to; folders are left to their README."""
    _put(ROOT / name, pages)
    for target in _LINK.findall((ROOT / name).read_text()):
        linked = ((ROOT / name).parent / target).resolve()
        if linked.is_file() and linked.suffix != ".md":
            _put(linked, pages)


def _put(path: Path, pages: Path) -> None:
    target = pages / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
