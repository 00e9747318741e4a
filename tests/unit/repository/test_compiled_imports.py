"""What `make install` imports is there, so that a file that moved does not end the installation."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "hack"))

import compile_imports


@pytest.mark.parametrize("name", compile_imports.OTHERS)
def test_what_is_compiled_at_the_installation_exists(name: str) -> None:
    assert find_spec(name) is not None
