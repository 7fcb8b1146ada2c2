"""The lab around vLLM's scheduler: what tests/vllm needs, it needs."""

from __future__ import annotations

from tests.vllm.conftest import pytest_ignore_collect as pytest_ignore_collect
from tests.vllm.conftest import pytest_report_header as pytest_report_header
