"""What every test against vLLM needs: left out without it, one thread, quiet logs."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path

# Before vllm is imported: its logger and platform read these once. Two cores are often all
# there is, and torch's thread pool is of no use to a scheduler.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")  # seeds the block hashes: a failure repeats exactly

_HAS_VLLM = importlib.util.find_spec("vllm") is not None

if _HAS_VLLM:
    with warnings.catch_warnings():  # warnings are errors, but not those of others' imports
        warnings.simplefilter("ignore")
        import vllm
        import vllm.v1.core.sched.async_scheduler


def pytest_report_header() -> str:
    """Say which vLLM this is: tests/versions runs these tests over several and reads it."""
    return f"vllm: {vllm.__version__} from {Path(vllm.__file__).parent}" if _HAS_VLLM else ""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave these tests out where there is no vLLM, so that `pytest tests` runs anywhere."""
    return True if collection_path.suffix == ".py" and not _HAS_VLLM else None
