"""One page about a results file: python -m bench.sim.report RESULTS.jsonl -o report.html"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.cli import start, teaching_parser
from bench.sim import store
from bench.sim.report.page import in_order, page
from continuum_connector.tools.cli.ending import ToldError

TEACH = """\
what happens
  Reads what `continuum simulate` (or bench.sim.runner) wrote, failed and missing runs included,
  and writes one HTML file. Reading it: bench/sim/README.md.

examples
  python -m bench.sim.report runs/x.jsonl
  python -m bench.sim.report runs/x.jsonl -o /tmp/x.html --title "before"
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = teaching_parser("python -m bench.sim.report", __doc__, TEACH)
    parser.add_argument("results", type=Path, help="a JSON-lines file")
    parser.add_argument("-o", "--out", type=Path, help="the page (beside the results)")
    parser.add_argument("--title", default="", help="of the page")
    options = parser.parse_args(argv)
    if not options.results.is_file():
        raise ToldError(f"{options.results} is no file; give one that `continuum simulate` wrote")
    out = options.out or options.results.with_suffix(".html")
    found = in_order(store.results(options.results).values())
    text = page(found, store.starts(options.results), options.title)
    out.write_text(text)
    print(f"{out}: {len(found)} runs, {len(text) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    start(main, "python -m bench.sim.report")
