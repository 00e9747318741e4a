"""The environment behind HTTP that is an example of the documentation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "environments" / "guess_server.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("guess_server", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
