"""Each name that we touch, renamed in the newest vLLM, as in the installed one
(tests/vllm/test_renames.py): minutes of a core, so in a file of its own for another worker."""

from __future__ import annotations

import pytest

from tests.versions import sources
from tests.versions.test_matrix import installed, run_version

pytestmark = [pytest.mark.vllm]


@pytest.mark.parametrize("version", [v for v in sources.VERSIONS[-1:] if v != installed()])
def test_no_name_that_the_newest_renames_ends_a_server(version: str) -> None:
    pytest.importorskip("vllm")
    try:
        run = run_version(version, ["renames"])
    except sources.SourcesUnavailableError as error:
        pytest.skip(str(error))
    assert run.returncode == 0, run.failures[-6000:]
