"""The versions of the packages that a run uses, for its summary."""

from __future__ import annotations

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version

# The packages by their common names. A package that is not in the coordinator's image is left out.
PACKAGES = {"dovetail": "dovetail-rlhf", "torch": "torch", "vllm": "vllm", "transformers": "transformers"}


def installed_versions() -> dict[str, str]:
    """The version of Python and of each package that is installed here."""
    found = {"python": platform.python_version()}
    for name, package in PACKAGES.items():
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(package)
    return found
