"""Looks for the modules of the user's functions without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from dovetail.manifest.types import RLHFJobSpec, Stage

# The folder that the user gave or None, the field for it, and the named functions with their fields.
_Place = tuple[str | None, str, list[tuple[str, str]]]


def missing_modules(spec: RLHFJobSpec, base: Path, here: bool) -> Iterator[str]:
    """A sentence for each function whose module is neither in its folder nor on Python's path. `base` is the manifest's
    folder. `here` says whether the job runs on this machine. If not, only folders that the manifest names are searched,
    because a pod's image may have more."""
    for folder, field, functions in _places(spec):
        if (folder is None and not here) or (folder is not None and not (base / folder).is_dir()):
            continue
        searched = base / (folder or "")
        for place, name in functions:
            module = name.partition(":")[0]
            if not _in_folder(module, searched) and not _importable(module):
                yield (
                    f"{place}: there is no module {module!r} in {searched.resolve()} or on PYTHONPATH; correct the "
                    f"name, or name the module's folder in {field}."
                )


def _places(spec: RLHFJobSpec) -> Iterator[_Place]:
    """The folders and their functions, for the functions that the job calls on this machine."""
    if Stage.PPO not in spec.stages:
        return
    reward, ppo = spec.models.reward, spec.ppo
    single = reward.functions is None
    field = "spec.models.reward.function"
    called = [(field if single else f"{field}s[{i}].function", c.function) for i, c in enumerate(reward.calls)]
    metrics = spec.evaluation.metrics
    called += [(f"spec.evaluation.metrics[{metrics.index(name)}]", name) for name in spec.evaluation.functions]
    if reward.code is None:
        yield reward.import_path, "spec.models.reward.importPath", called
    own = [("spec.ppo.advantageFunction", ppo.advantage_function), ("spec.ppo.loss", ppo.loss)]
    yield ppo.import_path, "spec.ppo.importPath", [(place, name) for place, name in own if name and ":" in name]


def _in_folder(module: str, folder: Path) -> bool:
    path = folder.joinpath(*module.split("."))
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return any(file.is_file() for file in files) or any(path.parent.glob(f"{path.name}.*so"))


def _importable(module: str) -> bool:
    """Whether the installation has the module's outermost package. What is in it is not looked at, because Python would
    import the package for that."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):  # the module is loaded, but does not say from where
        return True
