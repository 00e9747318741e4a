"""Loads a model's tokenizer before there is a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.coordinator.data.text import tokenizer
from dovetail.manifest.checks.hub_names import hub_problem
from dovetail.manifest.types import HubAccess


def named_tokenizer(
    name: str, field: str, options: Mapping[str, Any] = MappingProxyType({}), on_hub: bool = False
) -> Any:
    """The tokenizer of a model's folder or of a hub's repository. No weights are downloaded. `field`: the manifest's
    field that names it. `options`: the options of its chat template, data.chatTemplateKwargs. `on_hub`: the name is one
    of a hub, even if a folder here has the same name. Raises DataError."""
    folder = Path(name).expanduser()
    if on_hub or not folder.is_dir():
        if not on_hub and (problem := hub_problem(name, "folder, and no model", Path())) is not None:
            raise DataError(f"{field} {name} {problem}")
        folder = Hub(HubAccess()).describe("tokenizer", field, name, None)
    return tokenizer.with_template_options(tokenizer.load(folder, field), options)
