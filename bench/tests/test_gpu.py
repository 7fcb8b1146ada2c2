"""What a GPU must still say: run dry, resumed, cut off; every command is one that exists."""

from __future__ import annotations

import functools
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.copy_engine import run as copy_engine
from bench.gpu import __main__ as main
from bench.gpu import runner, steps
from bench.gpu.runner import FILE, Sitting, State, open_state, read_state
from bench.gpu.steps import BY_NAME, STEPS, Ended, Step, Verdict, filled, said
from bench.markers import replace as put
from bench.serve import commands, package, results, rivals
from bench.serve.live import kv_bytes_per_token
from bench.serve.server import end_group
from bench.serve.tiny_model import LLAMA_8B, write_shape
from bench.tests import ab_results
from bench.tests.test_serve_arms import install
from continuum_connector.errors import ToldError

SHORT = {step.name: step for step in steps.plan(steps.SHORT)}


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
    made = Step(name, f"{name} holds", fake, 60.0, said, (f"dry-{name}", *fake[1:]))
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


def test_a_longer_plan_asks_again_what_a_shorter_one_asked_otherwise(tmp_path: Path) -> None:
    assert sit(tmp_path, [step("one"), step("two")])[1].called == ["one", "two"]
    longer = step("two", command=("two", "0", "20"))
    assert sit(tmp_path, [step("one"), longer])[1].called == ["two"]


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


def test_a_step_that_this_vllm_does_not_have_takes_no_time(tmp_path: Path) -> None:
    plan = [step("new", since=(0, 30)), step("old", since=(0, 26))]
    state = open_state(tmp_path, rehearsal=False)
    state.versions["vllm"] = "0.26.0+cu130"
    clock = Clock()
    list(Sitting(tmp_path, state, clock.launch, lambda: 0.0).run(plan))
    assert clock.called == ["old"]
    assert state.of(plan[0]).said == "vLLM 0.26.0+cu130 does not have it"
    assert verdicts(state, plan) == ["not reached", "proven"]


def test_the_file_is_whole_after_every_step(tmp_path: Path) -> None:
    plan = [step("one"), step("two")]
    state = open_state(tmp_path, rehearsal=False)
    clock = Clock()
    for number, _ in enumerate(Sitting(tmp_path, state, clock.launch, lambda: 0.0).run(plan), 1):
        assert len(read_state(tmp_path / FILE).steps) == number
    assert read_state(tmp_path / FILE) == state


def test_a_dry_run_and_a_run_do_not_share_a_folder(tmp_path: Path) -> None:
    sit(tmp_path, [step("one")], rehearsal=True)
    with pytest.raises(ToldError, match="holds a dry run and this is a run on a GPU"):
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
    folders = [tmp_path / "ab-24" / f"rate-{rate}" for rate in steps.SHORT.rates]
    for folder, factor in zip(folders, factors, strict=True):
        assert judged(steps.OURS, tmp_path) == "not reached", "a rate is missing"
        ab_results.measured(folder, ab_results.run_of(steps.OURS), factor)
    assert judged(steps.OURS, tmp_path) == "not reached", "nothing to compare with"
    for folder in folders:
        ab_results.measured(folder, ab_results.run_of("none"), 1.0)
    assert judged(steps.OURS, tmp_path) == verdict
    assert judged("none", tmp_path) == "proven"
    told = SHORT[steps.OURS].read(Ended("", tmp_path))[1]
    assert "15 of 15 answers as stock" in told
    assert "T8/T1 1.00" in told


@pytest.mark.parametrize(
    ("gaps_ms", "hooks_s", "verdict"),
    [([8.0, 9.0], 1e-3, "proven"), ([8.0, 30.0], 1e-3, "failed"), ([8.0, 9.0], 0.1, "failed")],
)
def test_tokens_that_come_unevenly_fail_and_so_do_hooks_that_take_long(
    gaps_ms: list[float], hooks_s: float, verdict: str, tmp_path: Path
) -> None:
    folder = tmp_path / "ab-24" / "rate-1"
    for arm, gaps in (("none", [8.0, 9.0]), (steps.OURS, gaps_ms)):
        assert judged("evenness", tmp_path) == "not reached", "nothing to compare"
        made = ab_results.measured(folder, ab_results.run_of(arm), 1.0, gaps_ms=gaps)
        counted = f"continuum:hook_seconds_sum{{}} {hooks_s}\n" if arm == steps.OURS else ""
        (made / results.AFTER).write_text((made / results.AFTER).read_text() + counted)
    assert judged("evenness", tmp_path) == verdict


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "proven"), (0.9, "failed")])
def test_a_layout_that_slows_decoding_fails(factor: float, verdict: str, tmp_path: Path) -> None:
    ab_results.measured(tmp_path / "ab-24" / "rate-1", ab_results.run_of(steps.OURS), 1.0)
    assert judged("layout", tmp_path) == "not reached", "nothing to compare with"
    folder = tmp_path / steps.STOCK_LAYOUT / "rate-1"
    ab_results.measured(folder, ab_results.run_of(steps.OURS), factor)
    assert judged("layout", tmp_path) == verdict


def judged(name: str, out: Path) -> str:
    log = out / f"{name}.log"
    log.write_text("done\n")
    return runner.judge((BY_NAME | SHORT)[name], 0, log, out, rehearsal=False)[0].value


# --- the plan itself ----------------------------------------------------------------------
def serve_equal(argv: list[str]) -> None:
    from tests.gpu.serve_equal import parse

    served = parse(argv).serve
    assert served == argv[len(argv) - len(served) :]


def bench(argv: list[str]) -> None:
    group = typer.main.get_command(commands.app)
    name, *rest = argv
    chosen = group.commands[name]  # type: ignore[attr-defined]
    chosen.make_context(name, rest)


def writes_a_shape(argv: list[str]) -> None:
    option, folder = argv
    assert option == "--llama-8b"
    assert folder.endswith("llama-3.1-8b-shape")


def run_tests(argv: list[str]) -> None:
    from _pytest.config import get_config

    config = get_config()
    _, unknown = config._parser.parse_known_and_unknown_args([*map(str, argv)])
    assert not unknown
    assert Path(argv[0]).is_dir()


PARSERS: dict[str, Callable[[list[str]], object]] = {
    "bench.copy_engine.run": copy_engine.parse,
    "tests.gpu.serve_equal": serve_equal,
    "bench.serve.commands": bench,
    "bench.serve.tiny_model": writes_a_shape,
    "pytest": run_tests,
}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_command_is_read_by_its_own_parser(name: str, tmp_path: Path) -> None:
    for command in (BY_NAME[name].command, BY_NAME[name].rehearsal):
        argv = [] if isinstance(command, str) else filled(command, tmp_path)
        assert not {"{out}", "{rivals}"} & {*argv}
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


def test_a_plan_is_cut_to_the_minutes_that_there_are() -> None:
    short, middle, whole = (steps.plan(size) for size in steps.SIZES)
    named = [[each.name for each in plan] for plan in (short, middle, whole)]
    for some in named[:2]:
        assert some == [name for name in named[2] if name in some], "all in one order"
    assert {*named[0]} < {*named[1]} < {*named[2]}
    assert [each.name for each in main.parse(["--minutes", "12"]).steps] == named[0]
    assert [each.name for each in main.parse([]).steps] == named[2]
    assert [each.name for each in main.parse(["--only", "flash,aims"]).steps] == ["flash", "aims"]
    with pytest.raises(SystemExit):
        main.parse(["--minutes", "5"])


def left_behind(argv: Sequence[str], log: Path, limit_s: float) -> int:
    """Stands in for a step's command: leaves what that leaves, at once."""
    out, name = log.parent, log.stem
    log.write_text("NVIDIA H100, 580.1, 81559 MiB, 5, 16\n" if name == "machine" else "PASS\n")
    if name == "engine":
        (out / "engine.xml").write_text('<tests><testsuite tests="17" skipped="0"/></tests>')
    if "ab" in argv:
        folder, arm = Path(argv[argv.index("--out") + 1]), argv[argv.index("--arms") + 1]
        for rate in argv[argv.index("--rates") + 1].split(","):
            run, root = ab_results.run_of(arm), folder / f"rate-{rate}"
            made = ab_results.measured(root, run, 1.0, gaps_ms=[8.0])
            counted = "continuum:hook_seconds_sum{} 0.001\n" * (arm == steps.OURS)
            (made / results.AFTER).write_text((made / results.AFTER).read_text() + counted)
    return 0


def test_one_command_runs_the_plan_and_writes_what_came_of_it_where_people_read_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan of ten minutes, each command played by what leaves the same files."""
    written = {name: tmp_path / name for name in ("COMMITTED", "LIMITS", "README")}
    for name, path in written.items():
        path.write_bytes(getattr(main, name).read_bytes())
        monkeypatch.setattr(main, name, path)
    monkeypatch.setattr(main, "Sitting", functools.partial(Sitting, launch=left_behind))
    out = tmp_path / "out"
    assert main.main(["--minutes", "10", "--out", str(out), "--write"]) == 0
    state = read_state(written["COMMITTED"])
    assert state == read_state(out / FILE)
    assert [*state.steps] == [*SHORT]
    limits, readme = (written[name].read_text() for name in ("LIMITS", "README"))
    assert put(limits, main.MARKER, main.quoted(state)) == limits
    assert put(readme, main.IN_README, main.in_short(state)) == readme
    (ours,) = (line for line in limits.splitlines() if steps.DECIDES[steps.OURS] in line)
    _, found = ours.strip("| ").split(" | ")
    assert found.startswith("**proven**: 1/s: JCT")
    assert "6 proven" in readme


def test_readme_and_limits_tell_what_the_last_gpu_said() -> None:
    known = read_state(main.COMMITTED)
    told = {main.README: (main.IN_README, main.in_short(known))}
    told[main.LIMITS] = (main.MARKER, main.quoted(known))
    for path, (marker, text) in told.items():
        page = path.read_text()
        assert put(page, marker, text) == page, "run: python -m bench.gpu --write, or put it back"


# --- its servers: each `ab` run dry as on a GPU, whose command lines vLLM's own parser reads -----
# Reads command lines from stdin, writes what is wrong with them: `vllm serve` without a server.
PARSE = """
import json, sys
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers()).allow_abbrev = False
for words in json.load(sys.stdin):
    args = parser.parse_args(words)
    backend = args.attention_backend
    AttentionBackendEnum[getattr(backend, "name", backend)]
    transfer = args.kv_transfer_config
    known = [*KVConnectorFactory._registry, "ContinuumConnector", None]
    assert getattr(transfer, "kv_connector", None) in known, transfer
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A result folder on a machine with a GPU, LMCache beside it."""
    model = tmp_path / "llama-3.1-8b-shape"
    model.mkdir()
    write_shape(model, LLAMA_8B)
    install(tmp_path, *rivals.packages(on_cpu=False))
    monkeypatch.setattr(package, "on_cpu", lambda: False)
    return tmp_path


def shown(host: Path) -> dict[str, str]:
    """By step, what the dry run of its `ab` prints, `bench.serve.commands` and `env` left out."""
    found = {}
    for step in STEPS:
        words = filled(step.command, host, host)
        if "ab" in words:
            given = [*words[words.index("ab") :], "--dry-run"]
            done = CliRunner().invoke(commands.app, given)
            assert done.exit_code == 0, f"{shlex.join(given)}\n{done.output}"
            found[step.name] = done.output
    return found


def servers(output: str) -> list[list[str]]:
    """What would be started, variables left out."""
    lines = [part.splitlines()[-1] for part in output.split("\n# ")[1:]]
    found = [shlex.split(line) for line in lines]
    return [words[words.index("serve") :] for words in found if "serve" in words]


def test_an_arm_that_lacks_something_says_what(host: Path) -> None:
    (host / "lmcache-0.5.6.dist-info").rmdir()
    lacking = [name for name, output in shown(host).items() if "cannot run" in output]
    assert lacking == ["lmcache-mp"]


def test_every_arm_would_be_started_on_a_gpu_by_what_vllm_understands(host: Path) -> None:
    lines = []
    for name, output in shown(host).items():
        assert servers(output), f"{name}\n{output}"
        assert "cannot run" not in output
        assert "Cpu" not in output, "no shims"
        lines += servers(output)
    assert len(lines) >= len(steps.LONG.arms)
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_shape_has_the_kv_of_llama_8b(host: Path) -> None:
    assert kv_bytes_per_token(host / "llama-3.1-8b-shape", "bfloat16") == 128 * 2**10


# --- from end to end on a CPU: simulated driver, real servers, as one command ------------------
@pytest.mark.full
@pytest.mark.release  # ten minutes of real servers, as in tests/server
def test_every_step_that_a_cpu_can_rehearse_is_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    out = tmp_path / "gpu"
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800.0)
    state = read_state(out / FILE)
    told = {each.name: (state.of(each).verdict, state.of(each).said) for each in STEPS}
    needs_gpu = {each.name for each in STEPS if not isinstance(each.rehearsal, tuple)}
    assert needs_gpu == {"machine", "evenness"}
    wrong = {name: told[name] for name in told.keys() - needs_gpu if told[name][0] != "proven"}
    assert not wrong, ended.stdout
    assert all(told[name][0] == "not reached" for name in needs_gpu)
    assert ended.returncode == 0, ended.stdout + ended.stderr
