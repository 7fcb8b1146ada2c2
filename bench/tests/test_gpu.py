"""The first half hour on a GPU: run dry, resumed, cut off; every command is one that exists."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from bench.copy_engine import run as copy_engine
from bench.gpu import __main__ as main
from bench.gpu import runner, steps
from bench.gpu.runner import FILE, Sitting, State, open_state, read_state
from bench.gpu.steps import BY_NAME, STEPS, Ended, Step, Verdict, filled, said
from bench.markers import replace as put
from bench.serve import commands
from bench.serve.server import end_group
from bench.tests import ab_results


class Clock:
    """Every command takes as long as it says; nothing sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called: list[str] = []

    def launch(self, argv: Sequence[str], log: Path, limit_s: float) -> int | None:
        """`argv`: name, status, seconds."""
        name, status, seconds = argv
        self.called.append(name)
        self.now += min(float(seconds), limit_s)
        log.write_text(f"{name} said so\n")
        return None if float(seconds) > limit_s else int(status)


def step(name: str, status: int = 0, seconds: int = 10, **more: object) -> Step:
    fake = (name, str(status), str(seconds))
    made = Step(name, "A", f"{name} holds", fake, 60.0, said, (f"dry-{name}", *fake[1:]))
    return replace(made, **more)  # type: ignore[arg-type]


def sit(
    out: Path, plan: Sequence[Step], *, rehearsal: bool = False, until: float = 1e9, again: str = ""
) -> tuple[State, Clock]:
    clock = Clock()
    state = open_state(out, rehearsal=rehearsal)
    list(Sitting(out, state, clock.launch, lambda: clock.now, until).run(plan, again.split()))
    return state, clock


def verdicts(state: State, plan: Sequence[Step]) -> list[str]:
    return [state.of(each).verdict for each in plan]


# --- running ------------------------------------------------------------------------------
def test_a_dry_run_rehearses_each_step_and_says_what_cannot_be(tmp_path: Path) -> None:
    plan = [step("gate", 2, is_gate=True), step("one"), step("two", rehearsal="no such thing")]
    state, clock = sit(tmp_path, plan, rehearsal=True)
    assert clock.called == ["dry-gate", "dry-one"], "no gate is shut for a rehearsal"
    assert verdicts(state, plan) == ["not reached", "proven", "not reached"]
    assert state.of(plan[2]).said == "cannot be rehearsed: no such thing"
    told = main.summary(state, plan)
    assert told.splitlines()[1:] == ["rehearsed: one", "failed: nothing", "not reached: gate, two"]
    assert main.status(state, plan[1:]) == 0
    assert main.status(state, plan) == 2


def test_what_is_settled_is_not_run_again_unless_asked_for(tmp_path: Path) -> None:
    plan = [step("one"), step("two", 1), step("three", 2)]
    state, _ = sit(tmp_path, plan)
    assert verdicts(state, plan) == ["proven", "failed", "not reached"]
    assert main.status(state, plan) == 1
    assert "failed: two; mend, then --again\n" in main.summary(state, plan)
    assert sit(tmp_path, plan)[1].called == ["three"]
    assert sit(tmp_path, plan, again="one")[1].called == ["one", "three"]


def test_a_step_ends_at_its_bound_and_a_sitting_at_its_end(tmp_path: Path) -> None:
    plan = [step("slow", seconds=61), step("one", seconds=30), step("two"), step("three")]
    state, clock = sit(tmp_path, plan, until=95.0)
    assert clock.called == ["slow", "one", "two"]
    assert clock.now == 95.0
    assert verdicts(state, plan) == ["not reached", "proven", "not reached", "not reached"]
    assert state.of(plan[0]).said == "cut off after 60 s; slow said so"


def test_nothing_is_begun_behind_a_gate_that_is_shut(tmp_path: Path) -> None:
    plan = [step("gate", 1, is_gate=True), step("one")]
    assert sit(tmp_path, plan)[1].called == ["gate"]
    assert sit(tmp_path, plan)[1].called == [], "shut by an earlier call"
    plan[0] = step("gate", is_gate=True)
    assert sit(tmp_path, plan, again="gate")[1].called == ["gate", "one"]


def test_the_file_is_whole_after_every_step(tmp_path: Path) -> None:
    plan = [step("one"), step("two")]
    state = open_state(tmp_path, rehearsal=False)
    clock = Clock()
    for number, _ in enumerate(Sitting(tmp_path, state, clock.launch, lambda: 0.0).run(plan), 1):
        assert len(read_state(tmp_path / FILE).steps) == number
    assert read_state(tmp_path / FILE) == state


def test_a_dry_run_and_a_run_do_not_share_a_folder(tmp_path: Path) -> None:
    sit(tmp_path, [step("one")], rehearsal=True)
    with pytest.raises(runner.OtherStateError, match="holds a dry run and this is a run on a GPU"):
        open_state(tmp_path, rehearsal=False)


def test_a_command_that_is_cut_off_is_ended_with_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []

    def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
        end_group(process, grace_s)
        ended.append(process.returncode)

    monkeypatch.setattr(runner, "end_group", end)
    log = tmp_path / "log"
    assert runner.launch(["sleep", "600"], log, 0.05) is None
    assert ended == [-signal.SIGINT]
    assert runner.launch(["bash", "-c", "exit 3"], log, 60.0) == 3
    assert runner.launch(["no-such-command"], log, 60.0) == 127


# --- how results are read -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("skipped", "expected"),
    [(4, (Verdict.NOT_REACHED, "0 tests passed, 4 skipped")), (1, (Verdict.PROVEN, "3 tests"))],
)
def test_tests_that_are_all_skipped_prove_nothing(
    skipped: int, expected: tuple[Verdict, str], tmp_path: Path
) -> None:
    xml = f'<testsuites><testsuite name="pytest" tests="4" skipped="{skipped}"/></testsuites>'
    (tmp_path / "engine.xml").write_text(xml)
    verdict, told = BY_NAME["engine"].read(Ended("", tmp_path))
    assert (verdict, told[: len(expected[1])]) == expected


@pytest.mark.parametrize(
    ("found", "verdict", "told"), [(96.0, "proven", "1 aims met"), (90.0, "failed", "FAIL  peak")]
)
def test_an_aim_that_is_missed_fails_its_step(
    found: float, verdict: str, told: str, tmp_path: Path
) -> None:
    target = {"text": "peak", "found": found, "limit": 95.0, "unit": "%", "at_most": False}
    (tmp_path / "aims.json").write_text(json.dumps([{"rows": [["a"]], "targets": [target]}]))
    assert judged("aims", tmp_path) == verdict
    assert BY_NAME["aims"].read(Ended("", tmp_path))[1].startswith(told)


@pytest.mark.parametrize(
    ("factors", "verdict"), [((0.8, 0.9), "proven"), ((0.8, 1.2), "failed"), ((1.2, 0.8), "failed")]
)
def test_ours_fails_where_agents_end_later_than_with_stock_vllm(
    factors: tuple[float, float], verdict: str, tmp_path: Path
) -> None:
    folders = [tmp_path / "ab" / f"rate-{rate}" for rate in steps.RATES]
    for folder, factor in zip(folders, factors, strict=True):
        assert judged("continuum", tmp_path) == "not reached", "a rate is missing"
        ab_results.measured(folder, ab_results.run_of(steps.OURS), factor)
    assert judged("continuum", tmp_path) == "not reached", "nothing to compare with"
    for folder in folders:
        ab_results.measured(folder, ab_results.run_of("none"), 1.0)
    assert judged("continuum", tmp_path) == verdict
    assert judged("none", tmp_path) == "proven"
    assert judged("simple", tmp_path) == "not reached"


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "proven"), (0.9, "failed")])
def test_a_layout_that_slows_decoding_fails(factor: float, verdict: str, tmp_path: Path) -> None:
    ab_results.measured(
        tmp_path / "ab" / f"rate-{steps.RATES[0]}", ab_results.run_of(steps.OURS), 1.0
    )
    assert judged("layout", tmp_path) == "not reached", "nothing to compare with"
    folder = tmp_path / steps.STOCK_LAYOUT / f"rate-{steps.RATES[0]}"
    ab_results.measured(folder, ab_results.run_of(steps.OURS), factor)
    assert judged("layout", tmp_path) == verdict


def judged(name: str, out: Path) -> str:
    log = out / f"{name}.log"
    log.write_text("done\n")
    return runner.judge(BY_NAME[name], 0, log, out, rehearsal=False)[0].value


# --- the plan itself ----------------------------------------------------------------------
def copies(argv: list[str]) -> None:
    options = copy_engine.parse(argv)
    assert options.json is not None


def serve_equal(argv: list[str]) -> None:
    from tests.gpu.serve_equal import parse

    assert not parse(argv).serve


def bench(argv: list[str]) -> None:
    group = typer.main.get_command(commands.app)
    name, *rest = argv
    chosen = group.commands[name]  # type: ignore[attr-defined]
    chosen.make_context(name, rest)


def shape(argv: list[str]) -> None:
    assert len(argv) == 1


def run_tests(argv: list[str]) -> None:
    from _pytest.config import get_config

    config = get_config()
    _, unknown = config._parser.parse_known_and_unknown_args([*map(str, argv)])
    assert not unknown
    assert Path(argv[0]).is_dir()


PARSERS: dict[str, Callable[[list[str]], None]] = {
    "bench.copy_engine.run": copies,
    "tests.gpu.serve_equal": serve_equal,
    "bench.serve.commands": bench,
    "bench.serve.gpu.shape": shape,
    "pytest": run_tests,
}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_command_is_read_by_its_own_parser(name: str, tmp_path: Path) -> None:
    for command in (BY_NAME[name].command, BY_NAME[name].rehearsal):
        argv = [] if isinstance(command, str) else filled(command, tmp_path)
        assert "{" not in " ".join(argv)
        if argv and argv[0] != "nvidia-smi":
            argv = argv[2:] if argv[0] == "env" else argv
            python, flag, module, *rest = argv
            assert (python, flag) == (steps.sys.executable, "-m")
            PARSERS[module](rest)


def test_a_step_says_what_it_decides_and_where_its_file_is() -> None:
    assert len(BY_NAME) == len(STEPS)
    for each in STEPS:
        leaves = each.leaves and f"{{out}}/{each.leaves}"
        assert not leaves or leaves in each.command, each.name
    assert sum(each.limit_s for each in STEPS if each.sitting == "A") <= 25 * 60


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("B", ["shape", "none", "continuum", "simple", "layout", "report"]),
        ("flash,aims", ["aims", "flash"]),
    ],
)
def test_steps_and_sittings_are_named_in_the_plans_order(given: str, names: list[str]) -> None:
    assert [each.name for each in main.parse(["--only", given]).steps] == names


def test_limits_md_quotes_what_the_last_gpu_said() -> None:
    text = main.LIMITS.read_text()
    assert put(text, main.MARKER, main.quoted(main.committed())) == text, (
        "run: python -m bench.gpu --write, or put the block back"
    )
