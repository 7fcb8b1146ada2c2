"""The benchmark of copies over the native engine: what tests/native needs, it needs."""

from __future__ import annotations

from tests.native.conftest import _library as _library
from tests.native.conftest import fake_cuda as fake_cuda
