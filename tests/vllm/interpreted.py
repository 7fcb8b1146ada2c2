"""A vLLM of a CPU whose Triton kernels run all the same, interpreted; then state_columns.py."""

from __future__ import annotations

import os
from types import SimpleNamespace


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    # vLLM for CPUs leaves Triton out if it has no such backend.
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    from tests.vllm import state_columns

    state_columns.main()


if __name__ == "__main__":
    main()
