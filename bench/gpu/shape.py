"""Write a model folder of Llama-3.1-8B's shape without weights: 3 MB, nothing is downloaded.

python -m bench.gpu.shape FOLDER
"""

from __future__ import annotations

from pathlib import Path

from bench.cli import start, teaching_parser
from bench.serve.tiny_model import ModelShape, write_shape

TEACH = """Serve it with --load-format dummy. Steps and KV cost what the real model's cost, 128 KiB
of KV per token in bfloat16; its text is noise."""
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
    parser = teaching_parser("python -m bench.gpu.shape", (__doc__ or "").splitlines()[0], TEACH)
    parser.add_argument("folder", type=Path, help="where the model goes")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    write_shape(folder, LLAMA_8B)
    print(folder)


if __name__ == "__main__":
    start(main, "python -m bench.gpu.shape")
