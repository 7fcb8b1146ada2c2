"""The state machine of machine.py for a number of engine steps, seed by seed.

    nice python -m tests.vllm.long_machine --steps 1000000 --version 0.32.0
    nice python -m tests.vllm.long_machine --steps 1000000 --version 0.32.0 --first-seed 812

A line per seed says the steps so far, of how many programs' engines, and steps per second. What
is told last when it is stopped is where to go on (`--first-seed`, with the steps that are left).
A seed that fails is told with its example and how to repeat it, and ends the run, unless
`--go-on`; `--shrink` makes that example short, in minutes.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
import warnings

EXAMPLES_PER_SEED = 20
STEPS_PER_EXAMPLE = 25  # rules, of 0 to some hundred engine steps each


def main(arguments: list[str]) -> int:
    """Return how many seeds failed, at most 1 without `--go-on`."""
    options = _options(arguments)
    enter(options.version, __spec__.name)
    import vllm

    from tests.vllm.machine import Machine

    logging.disable(logging.WARNING)
    print(f"vLLM {vllm.__version__}, from seed {options.first_seed}", flush=True)
    began, seed, failed = time.monotonic(), options.first_seed, []
    while Machine.num_steps < options.steps:
        if not _run(Machine, seed, options.shrink):
            failed.append(seed)
        num_steps, seconds = Machine.num_steps, time.monotonic() - began
        rate = f"{num_steps / seconds:.0f} steps/s"
        print(f"seed {seed}: {num_steps:,} steps, {seconds:.0f} s, {rate}", flush=True)
        seed += 1
        if failed and not options.go_on:
            break
    engines = f"{Machine.num_engines:,} engines"
    print(f"{Machine.num_steps:,} steps of {engines}; seeds that failed: {failed or 'none'}")
    return len(failed)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.long_machine")
    parser.add_argument("--steps", type=int, default=1_000_000, help="engine steps to take")
    parser.add_argument("--version", help="of vLLM, from .cache/vllm; else the one installed")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--go-on", action="store_true", help="after a seed that failed")
    parser.add_argument("--shrink", action="store_true", help="make a failing example short")
    return parser.parse_args(arguments)


def enter(version: str | None, module: str) -> None:
    """Begin the module again where vLLM is that version, and block hashes the same each time."""
    from tests.versions.sources import CACHE, ROOT, is_cached, source_dir

    path = [str(ROOT)] if version is None else [str(source_dir(version)), str(ROOT)]
    wanted = {"PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    wanted |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    wanted |= {"VLLM_NO_USAGE_STATS": "1"}
    if version is not None and not is_cached(version):
        sys.exit(f"no vLLM {version} in {CACHE}: python -m tests.versions.sources {version}")
    if wanted.items() <= os.environ.items():
        return
    os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | wanted)


def _run(machine: type, seed: int, shrinks: bool) -> bool:
    """Run the examples of one seed; False if one of them failed, which is printed."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    machine._hypothesis_internal_use_seed = seed  # type: ignore[attr-defined]  # hypothesis.seed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=EXAMPLES_PER_SEED,
                    stateful_step_count=STEPS_PER_EXAMPLE,
                    deadline=None,
                    database=None,
                    phases=phases,
                    suppress_health_check=list(HealthCheck),
                ),
            )
    except Exception as error:
        traceback.print_exception(error, limit=-6)
        print(f"seed {seed} FAILS; repeat it with --first-seed {seed} --steps 1", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
