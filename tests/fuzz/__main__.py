"""python -m tests.fuzz [--runs 10000] [--seed 0] [--only TEXT]: counts, and each fault once."""

from __future__ import annotations

import argparse
import resource
import tempfile
from collections import Counter
from pathlib import Path

from tests.fuzz.many import many


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="commands with this text in their name")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds for each")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # what asks for all memory gets none
    counts: Counter[tuple[str, int]] = Counter()
    faults: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for played in many(Path(folder), options.runs, options.seed, options.limit, options.only):
            counts[played.title, played.code] += 1
            if played.fault:
                kind = f"{played.title}: {played.fault.strip().splitlines()[-1][:160]}"
                faults[kind] += 1
                if faults[kind] == 1:
                    words = [each[:200] for each in played.argv]
                    print(f"--- {played.title} {words!r}\n{played.fault[-1500:]}", flush=True)
    for (title, code), num in sorted(counts.items()):
        print(f"{num:6} {title} -> {code}")
    print(f"\n{counts.total()} runs, {faults.total()} faults of {len(faults)} kinds")
    for kind, num in faults.most_common():
        print(f"{num:6} {kind}")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
