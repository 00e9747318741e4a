"""`make bench-gpu`, in a process that has its imports."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

import transformers.models.llama.modeling_llama  # noqa: F401  once for all processes
from worker import Place

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))
# What a machine is said to have; docs/gpus.md.
THERE = ("torch", "transformers", "triton", "numpy", "safetensors")


def carried() -> list[str]:
    """The packages that `make bench-gpu-wheels` takes along."""
    (line,) = re.findall(r"^CARRIED := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return line.split()


def hide_others() -> set[str]:
    """Make packages that are neither there nor carried along impossible to import. Returns the names of their
    modules."""
    known, wanted = set(), [*THERE, *carried()]
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in known:
            continue
        known.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        wanted += [re.match(r"[\w.-]+", need)[0] for need in needs if "extra ==" not in need]  # type: ignore[index]
    hidden = set()
    for module, packages in importlib.metadata.packages_distributions().items():
        names = {re.sub(r"[-_.]+", "-", package).lower() for package in packages}
        if not names & {*known, "dovetail-rlhf"} and not module.startswith("_"):
            hidden.add(module)
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    return hidden


def every_group(place: Place) -> dict[str, Any]:
    """Its exit code, and what it wrote."""
    hidden = hide_others()
    assert {"vllm", "peft", "aiohttp"} <= hidden
    import bench_gpu

    found = place.folder / "found.json"
    code = bench_gpu.main(["--tiny", "--json", str(found), "--logs", str(place.folder / "logs")])
    return {"code": code, "groups": json.loads(found.read_text())["groups"]}
