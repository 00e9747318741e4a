"""`make bench-gpu`, in a process that has its imports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers.models.llama.modeling_llama  # noqa: F401  once for all processes
from worker import Place

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))


def every_group(place: Place) -> dict[str, Any]:
    """Its exit code, and what it wrote."""
    import bench_gpu

    found = place.folder / "found.json"
    code = bench_gpu.main(["--tiny", "--json", str(found), "--logs", str(place.folder / "logs")])
    return {"code": code, "groups": json.loads(found.read_text())["groups"]}
