"""A model folder of Llama-3.1-8B's shape without its weights: nothing is downloaded.

    python -m bench.serve.gpu.shape FOLDER      # a few MB; serve it with --load-format dummy

Steps and KV cost what the real model's cost (128 KiB of KV per token in bfloat16); its text is
noise.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.serve.tiny_model import ModelShape, write_shape

LLAMA_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14_336,
    vocab=128_256,
    max_position=131_072,
)


def main() -> None:
    """Write the folder that was named."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_shape(folder, LLAMA_8B)
    print(folder)


if __name__ == "__main__":
    main()
