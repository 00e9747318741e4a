"""`.venv/bin/python hack/nullgpu build`: compile the null GPU for the torch of this Python; see README.md.

`path` prints the library to preload; its folder goes into LD_LIBRARY_PATH. The standard library, gcc and nm are all
that this needs; torch is not imported."""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
# torch's libraries that call CUDA, and the functions that they call of it.
RUNTIME = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cpu.so")
FUNCTION = re.compile(r"^(__cuda|cuda|nccl|cublas)")
DRIVER_FUNCTION = re.compile(r"^cu[A-Z]")
MANAGEMENT_FUNCTION = re.compile(r"^nvml[A-Z]")


def site() -> Path:
    """The folder that holds torch and NVIDIA's headers."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit(
            "nullgpu: torch is not installed for this Python: run make install, then .venv/bin/python hack/nullgpu"
        )
    return Path(torch.origin).parent.parent


def unsupported() -> str | None:
    """Why it cannot be built here, None where it can."""
    if platform.system() != "Linux":
        return f"it needs Linux, and this is {platform.system()}"
    for program in ("gcc", "nm"):
        if shutil.which(program) is None:
            return f"it needs {program}: install gcc and binutils"
    if not (site() / "torch/lib/libtorch_cuda.so").exists():
        return "this torch was built without CUDA"
    if not (headers() / "driver_types.h").exists():
        return "NVIDIA's headers are missing: install nvidia-cuda-runtime"
    return None


def headers() -> Path:
    return site() / "nvidia/cu13/include"


def library() -> Path:
    """Where the library for these sources and this torch is, or will be."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for source in [Path(__file__), *sorted(SOURCES.rglob("*.[ch]"))]:
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dovetail" / "nullgpu" / digest.hexdigest()[:16] / "libnullgpu.so"


def symbols(option: str, files: list[Path]) -> set[str]:
    listing = subprocess.run(
        ["nm", *option.split(), *map(str, files)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines() if len(line.split()) > 1}


def build() -> Path:
    """Compile the libraries unless they are there; returns the one to preload."""
    target = library().parent
    if library().exists():
        return library()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        built = Path(name) / "built"
        built.mkdir(mode=0o755)
        compile_library(SOURCES, RUNTIME, FUNCTION, built / "libnullgpu.so")
        compile_library(SOURCES / "driver", ("libcaffe2_nvrtc.so",), DRIVER_FUNCTION, built / "libcuda.so.1")
        compile_library(SOURCES / "management", RUNTIME, MANAGEMENT_FUNCTION, built / "libnvidia-ml.so.1")
        (built / "libcuda.so").symlink_to("libcuda.so.1")
        with contextlib.suppress(OSError):  # another build was faster
            built.rename(target)
    return library()


def compile_library(sources: Path, callers: tuple[str, ...], function: re.Pattern[str], target: Path) -> None:
    """Of the functions that torch's libraries `callers` call, those that no source defines become stubs: they do
    nothing and return 0."""
    folder = target.parent.parent
    gcc = ["gcc", "-fPIC", "-O1", "-g", "-Wall", "-std=gnu11", f"-I{SOURCES}", f"-isystem{headers()}"]
    objects = []
    for source in sorted(sources.glob("*.c")):
        objects.append(folder / f"{source.stem}.o")
        subprocess.run([*gcc, "-c", str(source), "-o", str(objects[-1])], check=True)
    called = symbols("-D --undefined-only", [site() / "torch/lib" / name for name in callers])
    missing = {name for name in called if function.match(name)} - symbols("--defined-only", objects)
    stubs = folder / "stubs.c"
    stubs.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(missing)))
    link = ["-w", "-shared", f"-Wl,-soname,{target.name}", "-o", str(target), *map(str, objects), str(stubs)]
    subprocess.run([*gcc, *link, "-lpthread"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="nullgpu", description="A CUDA runtime and NCCL without arithmetic.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build", help="compile it into the cache and print its path")
    one.add_argument("--where-supported", action="store_true", help="where it can't be built say why, and succeed")
    commands.add_parser("path", help="print its path; fails unless it is built")
    arguments = parser.parse_args()
    reason = unsupported()
    if reason is not None:
        print(f"no null GPU: {reason}", file=sys.stderr)
        return 0 if arguments.command == "build" and arguments.where_supported else 1
    if arguments.command == "path" and not library().exists():
        print("the null GPU is not built: .venv/bin/python hack/nullgpu build", file=sys.stderr)
        return 1
    print(build())
    return 0


if __name__ == "__main__":
    sys.exit(main())
