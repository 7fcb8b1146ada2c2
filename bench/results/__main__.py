"""Publish: docs/results.md of the tables that are kept here; `keep` makes a table of results."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.cli import start, teaching_parser
from bench.markers import rewrite
from bench.results import kept, page
from bench.sim.provenance import versions

RESULTS = page.ROOT / "docs" / "results.md"
README = page.ROOT / "README.md"
MARKER = "numbers"
WHO = ("vllm", "continuum-connector", "python")  # of what is installed, where a result says nothing

TEACH = """\
examples
  python -m bench.results                       both pages, of what is kept
  python -m bench.results keep demo agents runs/demo-1 runs/demo-2 \\
      --command "make demo" --commit 1a2b3c4 --machine "2-core x86-64 VM"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Keep a table if asked to, then write the pages."""
    options = parse(argv)
    if options.action == "keep":
        keep(options)
    write()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = teaching_parser("python -m bench.results", __doc__, TEACH)
    actions = parser.add_subparsers(dest="action")
    add = actions.add_parser("keep", help="results become a table that is published").add_argument
    add("kind", help="which bench left them: demo, ab, agents, aiperf, paired, lab, storm")
    add("name", help="of the table, in bench/results")
    add("paths", nargs="+", type=Path, help="its files or folders")
    add("--command", required=True, help="as it is to be repeated")
    add("--commit", required=True, help="of the code that was measured")
    add("--machine", default="", help="in general words, and whether it was busy")
    return parser.parse_args(argv)


def keep(options: argparse.Namespace) -> None:
    """Reduce results to a table; what people said of one of that name stays."""
    from bench.results.readers import READERS

    found = READERS[options.kind](options.paths)
    found.versions = found.versions or {k: v for k, v in versions().items() if k in WHO}
    latest = max(path.stat().st_mtime for path in options.paths)
    kept.write(
        options.name,
        kept.Kept(
            command=options.command,
            commit=options.commit,
            machine=options.machine,
            date=datetime.date.fromtimestamp(latest).isoformat(),
            **msgspec.structs.asdict(found),
        ),
    )


def write() -> None:
    """Both pages, of what is kept."""
    tables = kept.read_all()
    rewrite(RESULTS, {page.TABLES: page.results(tables)})
    rewrite(README, {MARKER: page.front(tables)})


if __name__ == "__main__":
    start(main, "python -m bench.results")
