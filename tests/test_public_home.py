"""What the public repository shows beside the code: address, forms, workflow, terms.

The address is `Repository` in pyproject.toml, and still a placeholder. `scripts/repository ADDRESS`
puts another one there and wherever it stands.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import yaml

from tests.markdown import ROOT, documents

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Repository"]
NAME = HOME.rpartition("/")[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
SCHEMAS = {  # file -> check-jsonschema's name of what it must obey; both come with the package
    **dict.fromkeys(FORMS, "vendor.github-issue-forms"),
    ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml": "vendor.github-issue-config",
    ROOT / ".github" / "workflows" / "ci.yml": "vendor.github-workflows",
    ROOT / "CITATION.cff": "vendor.citation-file-format",
}


# --- the address ------------------------------------------------------------------------
def test_every_address_of_ours_begins_with_the_one_setting() -> None:
    line = ["git", "grep", "-hoIE", "--untracked", rf"https://github\.com/[^ /]+/{NAME}\b"]
    found = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == {HOME}
    assert all(url.startswith(HOME) for url in PROJECT["urls"].values())


@pytest.mark.parametrize("path", [*documents(), ".github/ISSUE_TEMPLATE/config.yml"])
def test_an_address_of_ours_is_of_a_file_that_exists(path: str) -> None:
    files = re.findall(rf"{re.escape(HOME)}/blob/main/([\w./-]+)", (ROOT / path).read_text())
    files += [url.partition("/blob/main/")[2] for url in PROJECT["urls"].values()]
    assert [name for name in files if not (ROOT / name).exists()] == []


# --- forms, workflow, terms -------------------------------------------------------------
@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_a_file_is_as_its_reader_wants_it(path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[path], str(path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_form_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    wrong = tmp_path / "bug.yml"
    wrong.write_text("name: A bug\ndescription: It does not work.\nbody: []\n")
    line = [sys.executable, "-m", "check_jsonschema"]
    line += ["--builtin-schema", "vendor.github-issue-forms", str(wrong)]
    assert subprocess.run(line, capture_output=True, check=False).returncode != 0


def test_a_report_brings_what_answers_most_of_them() -> None:
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    for command in ("continuum --version", "continuum check", "continuum explain"):
        assert command in form


def test_the_workflow_runs_what_a_clone_can_run() -> None:
    [job] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert job["steps"][-1]["run"] == ".ci/run"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_what_is_cited_is_this_release() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == PROJECT["version"]
    assert cited["license"] == PROJECT["license"]
    assert cited["repository-code"] == HOME
