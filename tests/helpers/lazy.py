"""Modules that a test file names, and that only the worker that runs its tests imports. All workers list all tests."""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """A module, imported when something of it is first asked for: `vllm = Lazy("vllm")`, then `vllm.LLM`.

    It gives no private names: pytest asks each object of a test file for some, such as `_mock_name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
