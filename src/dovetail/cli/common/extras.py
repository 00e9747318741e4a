"""The optional parts of the installation, with one sentence that names a missing one.

`pip install dovetail-rlhf` installs what checks and plans a job. Everything else is an extra in pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection
from typing import Literal

from dovetail.supervision.errors import UsageError

DISTRIBUTION = "dovetail-rlhf"
Extra = Literal["coordinator", "trainer", "rollout-cpu", "rollout-gpu", "client"]
# One module of each extra that nothing else installs.
MARKS: dict[Extra, tuple[str, ...]] = {
    "coordinator": ("aiohttp", "prometheus_client", "tensorboard", "tokenizers"),
    "trainer": ("torch", "transformers", "peft"),
    "rollout-cpu": ("torch", "vllm"),
    "rollout-gpu": ("torch", "vllm"),
    "client": ("httpx2",),
}


def version() -> str:
    """The installed distribution's version."""
    return importlib.metadata.version(DISTRIBUTION)


def is_installed(module: str) -> bool:
    """Whether a module can be imported. Nothing is imported."""
    return importlib.util.find_spec(module) is not None


def require(what: str, extras: Collection[Extra], installed: Callable[[str], bool] = is_installed) -> None:
    """Check that `extras` are installed. `what` needs them, for example "dovetail run".

    Raises UsageError (exit code 2) with one sentence that names the missing extras and the command that installs
    them."""
    missing = [extra for extra in extras if not all(map(installed, MARKS[extra]))]
    if "rollout-cpu" in missing or "rollout-gpu" in missing:
        missing = [extra for extra in missing if extra != "trainer"]  # both bring it along
    if missing:
        named = [f"'{extra}'" for extra in missing]
        listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
        raise UsageError(
            f"{what} needs the extra{'s' if len(named) > 1 else ''} {listed}: "
            f"pip install '{DISTRIBUTION}[{','.join(missing)}]'"
        )
