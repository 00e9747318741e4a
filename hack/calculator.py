"""Puts the planner beside docs/calculator.md in a built site: python hack/calculator.py SITE.

Python for browsers comes from npm by requirements/calculator/package-lock.json, and the one compiled package,
pydantic-core, from the Python index by requirements/docs.txt. Both are kept in build/calculator. All else is pure
Python of this environment."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "calculator"
PAGE = ROOT / "docs" / "calculator"
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
PLATFORM = ("--platform", "pyemscripten_2026_0_wasm32", "--python-version", "314", "--only-binary=:all:")
PURE = ("annotated_types", "pydantic", "typing_extensions", "typing_inspection", "yaml")
IMPORTED = """
import sys, yaml
sys.path.insert(0, sys.argv[1])
import answers.form
for name in (each.partition(".")[0] for each in list(sys.modules)):
    assert name not in ("numpy", "numba", "torch", "cel_expr_python"), name
mine = [module for name, module in sys.modules.items() if name.split(".")[0] in ("dovetail", "answers")]
print("\\n".join(module.__file__ for module in mine if module.__file__))
"""


class Failed(Exception):
    """The message is one sentence."""


def run(command: list[str | Path], what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise Failed(f"{what} needs {command[0]}, which is not installed") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
        raise Failed(f"{what} failed: {said}")
    return done.stdout


def pyodide() -> Path:
    """The folder of Pyodide."""
    found = KEPT / "node_modules" / "pyodide"
    lock = ROOT / "requirements" / "calculator" / "package-lock.json"
    if not (KEPT / lock.name).exists() or (KEPT / lock.name).read_bytes() != lock.read_bytes():
        KEPT.mkdir(parents=True, exist_ok=True)
        shutil.copy(lock.with_name("package.json"), KEPT)
        shutil.copy(lock, KEPT / "npm-shrinkwrap.json")
        what = "npm's download of Pyodide for the calculator"
        run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", KEPT], what)
        shutil.copy(lock, KEPT)
    return found


def core() -> Path:
    """The wheel of pydantic-core for browsers."""
    text = (ROOT / "requirements" / "docs.txt").read_text()
    pinned = re.search(r"^pydantic-core==(\S+) \\\n(?:    --hash=\S+(?: \\)?\n)+", text, re.MULTILINE)
    assert pinned is not None
    name = f"pydantic_core-{pinned[1]}-*.whl"
    if not (known := sorted(KEPT.glob(name))):
        KEPT.mkdir(parents=True, exist_ok=True)
        wanted = KEPT / "wanted.txt"
        wanted.write_text(pinned[0])
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        what = "pip's download of pydantic-core for the calculator"
        run([*command, *PLATFORM, "--require-hashes", "--dest", KEPT, "--requirement", wanted], what)
        known = sorted(KEPT.glob(name))
    return known[0]


def sources() -> Iterator[tuple[Path, Path]]:
    """The files of the planner, and their places below site-packages."""
    import pydantic

    packages = Path(pydantic.__file__).parents[1]
    for name in PURE:
        single = packages / f"{name}.py"
        for path in [single] if single.exists() else sorted((packages / name).rglob("*.py")):
            yield path, path.relative_to(packages)
    files = [Path(line) for line in run([sys.executable, "-c", IMPORTED, PAGE], "the import of the planner").split()]
    data = [path for folder in {file.parent for file in files} for path in folder.iterdir()]
    for path in sorted({*files, *(path for path in data if path.suffix in (".toml", ".json"))}):
        yield path, path.relative_to(PAGE if path.is_relative_to(PAGE) else ROOT / "src")


def gather(site: Path) -> None:
    out = site / "calculator"
    wheel, python = core(), pyodide()
    for path in (wheel, *(python / name for name in PYODIDE)):
        shutil.copy(path, out)
    with zipfile.ZipFile(out / "planner.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path, name in sources():
            # Without the time of the file, the same sources are the same archive.
            archive.writestr(zipfile.ZipInfo(str(name)), path.read_bytes(), zipfile.ZIP_DEFLATED)
    from dovetail.gpus.gpu_products import products

    size = sum((out / name).stat().st_size for name in (*PYODIDE, wheel.name, "planner.zip"))
    told = {"wheel": wheel.name, "bytes": size, "products": sorted(products())}
    (out / "files.json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    try:
        gather(Path(sys.argv[1]))
    except Failed as error:
        sys.exit(f"The site is built, but its calculator is not: {error}.")
