"""Pack all that the plan needs for a GPU host without a package index, in one folder.

python -m bench.gpu.pack OUT

On the host, `sh OUT/unpack FOLDER` installs it into a folder of its own and says how to go on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.cli import start, teaching_parser
from bench.gpu.runner import REPO
from bench.serve.rivals import packages

TEACH = """Run it where a package index is, in a clone; it packs the commit that is checked out.
The host needs Linux on x86-64, the Python that is named, and what --have names, torch first of
all, in the release that this vLLM was built for. Files of vLLM that Llama in bfloat16 never loads
are left out, and of its kernels those of other cards than --arch, so 750 MB become 110: made to
be carried to a host for a test, not to be given to others."""
NEVER_LOADED = (
    *("vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/vllm_flash_attn/cute/*", "vllm/vllm-rs"),
    *("vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*", "vllm/_flashmla*"),
    *("vllm/third_party/tml_fa4/*", "vllm/_qutlass_C*", "*/fused_moe/configs/*"),
)
KERNELS = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")
NEVER_IMPORTED = (  # by this plan: other backends, video, compilers of Python
    *("tilelang", "tokenspeed", "flashinfer", "opencv", "pynvvideocodec"),
    *("z3-solver", "soundfile", "av"),
)
OF_LMCACHE = ("numba", "llvmlite")  # vLLM brings them, of this plan only LMCache imports them
BESIDE_VLLM = ("openai", "aiohttp", "typer", "pytest", "hypothesis")  # of the benches, and tests
WITH_TORCH = ("nvidia", "cuda", "triton", "torch")  # what a host with torch has of its packages
UNPACK = """\
#!/bin/sh
# sh unpack FOLDER: everything into FOLDER, nothing elsewhere.
set -eu
here=$(cd "$(dirname "$0")" && pwd); mkdir -p "$1"; to=$(cd "$1" && pwd)
(cd "$here" && sha256sum -c --quiet SHA256SUMS)
cat "$here"/packed.part.* | xz -dc -T0 | tar -xf - -C "$to"
cat > "$to/env" <<END
export PYTHONPATH=$to/site:$to/project HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_SERVER_DEV_MODE=1
export VLLM_USE_V2_MODEL_RUNNER=@RUNNER@
END
echo "ready: . $to/env && cd $to/project"
echo "then:  python3 -m bench.gpu --minutes 28 --seconds 560 --rivals $to/rivals"
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Fetch, trim, pack."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        say("which packages", wanted := requirements(options))
        fetch(wanted, work / "wheels", options.python)
        install(work / "wheels", work / "site", options.python)
        if options.lmcache:
            fetch(lmcache(options.lmcache), work / "lmcache", options.python)
            install(work / "lmcache", work / "rivals", options.python)
        trim(work / "site", options.arch)
        project(work / "project", work / "site")
        pack(work, options.out, options.part)
    runner = "0" if options.vllm in ("0.26.0", "0.27.0", "0.27.1", "0.28.0") else "1"
    (options.out / "unpack").write_text(UNPACK.replace("@RUNNER@", runner))
    sums = [f"{digest(each)}  {each.name}\n" for each in parts(options.out)]
    (options.out / "SHA256SUMS").write_text("".join(sums))
    size = sum(each.stat().st_size for each in parts(options.out))
    print(
        f"{options.out}: {size / 2**20:.0f} MiB; on the host: sh {options.out.name}/unpack FOLDER"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = teaching_parser("python -m bench.gpu.pack", (__doc__ or "").split("\n\n")[0], TEACH)
    add = parser.add_argument
    add("out", type=Path, help="folder to make")
    add("--vllm", default="0.26.0", help="release (0.26.0)")
    add("--python", default="3.12", help="of the host (3.12)")
    add("--have", default="torch,torchvision,torchaudio", help="packages that the host has")
    add("--arch", default="90", help="compute capability of the card; all: every kernel (90)")
    add("--part", type=int, default=28, help="MiB of a file (28)")
    add("--lmcache", metavar="VERSION", help="LMCache too; torch 2.11 loads 0.5.0 to 0.5.3")
    return parser.parse_args(argv)


def say(what: str, names: Sequence[str]) -> None:
    """Progress, a line per stage."""
    print(f"{what}: {len(names)}", flush=True)


def run(*line: str | Path, text: str = "") -> str:
    """What a command prints; its own words end this one where it fails."""
    done = subprocess.run([*map(str, line)], input=text, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{Path(str(line[0])).name} failed: {done.stderr.strip()[-800:]}")
    return done.stdout


def requirements(options: argparse.Namespace) -> list[str]:
    """What this plan needs there, at exact versions, without what the host has."""
    uv = shutil.which("uv") or Path(sys.executable).with_name("uv")
    if not Path(uv).exists():
        run(sys.executable, "-m", "pip", "install", "--quiet", "uv")
    line = (uv, "pip", "compile", "-", "--quiet", "--no-annotate", "--no-header")
    line += ("--python-version", options.python, "--python-platform", "x86_64-manylinux_2_35")
    text = "\n".join((f"vllm=={options.vllm}", *BESIDE_VLLM))
    found = run(*line, text=text).splitlines()
    have = {*options.have.replace("_", "-").split(","), *OF_LMCACHE * (not options.lmcache)}
    return [each for each in found if each and not _is_left_out(each, have)]


def lmcache(release: str) -> list[str]:
    """What that LMCache needs beside vLLM on a GPU, as `continuum bench ab` installs it."""
    own = [each for each in packages(on_cpu=False) if not each.startswith("lmcache==")]
    return [f"lmcache=={release}", *own]


def _is_left_out(requirement: str, have: set[str]) -> bool:
    name = requirement.partition("==")[0].strip().lower()
    if name.startswith(NEVER_IMPORTED):
        return True
    return name in have or ("torch" in have and name.startswith(WITH_TORCH))


def _for(python: str) -> list[str]:
    """pip's words for wheels of that Python, whatever this machine has."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    return ["--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]


def fetch(wanted: Sequence[str], folder: Path, python: str) -> None:
    """Wheels, a call for all."""
    run(sys.executable, "-m", "pip", "download", "-q", "-d", folder, *_for(python), *wanted)
    say("fetched", [*folder.iterdir()])


def install(wheels: Path, site: Path, python: str) -> None:
    """Every wheel unpacked into one folder, which goes on the host's PYTHONPATH."""
    names = [str(each) for each in sorted(wheels.glob("*.whl"))]
    line = (sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-compile")
    line += ("--ignore-requires-python",)  # of this machine's
    run(*line, "--target", site, *_for(python), *names)


def trim(site: Path, arch: str) -> None:
    """Leave out what this plan never loads."""
    for pattern in NEVER_LOADED:
        for path in [*site.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(site / "pycountry" / "locales", ignore_errors=True)
    if arch != "all":
        for name in KERNELS:
            if (path := site / "vllm" / name).exists():
                path.write_bytes(one_arch(bytearray(path.read_bytes()), int(arch)))


def one_arch(library: bytearray, arch: int) -> bytearray:
    """An ELF library whose GPU code for other compute capabilities is zeroed in place, so that it
    compresses; offsets and headers stay (CUDA's fatbin: a header of 16 bytes, then entries whose
    kind, header size and payload size come first and whose capability is at byte 28)."""
    for offset, size in _sections(library, (".nv_fatbin", "__nv_relfatbin")):
        at = offset
        while at < offset + size:
            if struct.unpack_from("<I", library, at)[0] != 0xBA55ED50:
                at += 8
                continue
            _, header, payload = struct.unpack_from("<HHQ", library, at + 4)
            entry, at = at + header, at + header + payload
            while entry < at:
                _, _, head, length = struct.unpack_from("<HHIQ", library, entry)
                if struct.unpack_from("<I", library, entry + 28)[0] != arch:
                    library[entry + head : entry + head + length] = bytes(length)
                entry += head + length
    return library


def _sections(library: bytearray, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Offset and size of an ELF file's sections of these names."""
    table = struct.unpack_from("<Q", library, 0x28)[0]
    width, number, index = struct.unpack_from("<HHH", library, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", library, table + i * width) for i in range(number)]
    strings = heads[index][4]
    for name, _, _, _, offset, size in heads:
        begin = strings + name
        if library[begin : library.index(0, begin)].decode() in names:
            yield offset, size


def project(folder: Path, site: Path) -> None:
    """The commit's source, which has tests and benches, and its wheel, which has the native library
    and the entry point; the source gets the library as well, since it comes first where it runs."""
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    run("git", "-C", REPO, "archive", "-o", archive, "HEAD")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    archive.unlink()
    wheels = folder.parent / "own"
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, folder)
    (wheel,) = wheels.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    native = site / "continuum_connector" / "_ckv"
    shutil.copytree(native, folder / "continuum_connector" / "_ckv", dirs_exist_ok=True)
    shutil.rmtree(folder / "build", ignore_errors=True)


def pack(work: Path, out: Path, part: int) -> None:
    """One stream of xz in files of `part` MiB; those of before are gone first."""
    for each in parts(out):
        each.unlink()
    names = [name for name in ("site", "project", "rivals") if (work / name).exists()]
    tar = subprocess.Popen(["tar", "-C", work, "-cf", "-", *names], stdout=subprocess.PIPE)
    xz = subprocess.Popen(["xz", "-T0", "-6"], stdin=tar.stdout, stdout=subprocess.PIPE)
    line = ["split", "-b", f"{part}m", "-d", "-", str(out / "packed.part.")]
    subprocess.run(line, stdin=xz.stdout, check=True)
    if tar.wait() or xz.wait():
        raise SystemExit(f"tar or xz failed; is there room in {os.environ.get('TMPDIR', '/tmp')}?")


def parts(out: Path) -> list[Path]:
    """The files to carry."""
    return sorted(out.glob("packed.part.*"))


def digest(path: Path) -> str:
    """SHA-256, as sha256sum prints it."""
    return run("sha256sum", path).split()[0]


if __name__ == "__main__":
    start(main, "python -m bench.gpu.pack")
