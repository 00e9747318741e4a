"""Says which GPUs a build of torch has kernels for. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

Capability = tuple[int, int]

# The images that are built from requirements/trainer.txt and requirements/rollout-gpu.txt have kernels for these (torch
# 2.13 for CUDA 13).
DEFAULT_ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
BFLOAT16: Capability = (8, 0)
# The last builds that have kernels for a V100.
OLD_GPUS = "torch for CUDA 12.6"
_NAME = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)$")
_CAPABILITY = re.compile(r"(\d+)\.(\d)$")


def read_capability(text: str) -> Capability:
    """Turn `7.0` into (7, 0). Raises ValueError for other text."""
    found = _CAPABILITY.match(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no compute capability; write it as 8.0")
    return int(found[1]), int(found[2])


def show(capability: Capability) -> str:
    """Turn (7, 0) into `7.0`."""
    return f"{capability[0]}.{capability[1]}"


def serves(architecture: str, capability: Capability) -> bool:
    """Whether kernels that were built for `architecture` run on a GPU of that compute capability. `sm_80` runs on 8.0,
    8.6 and 8.9. `sm_90a` runs on 9.0 only, and `sm_100f` on its whole family. `compute_80` is compiled at load time,
    for any later GPU."""
    found = _NAME.match(architecture)
    if found is None:
        return False
    kind, built, suffix = found[1], (int(found[2]), int(found[3])), found[4]
    if suffix == "a":
        return built == capability
    if kind == "compute" and not suffix:
        return built <= capability
    return built[0] == capability[0] and built <= capability


def has_kernels(architectures: Iterable[str], capability: Capability) -> bool:
    return any(serves(architecture, capability) for architecture in architectures)


def capabilities(architectures: Collection[str]) -> str:
    """The compute capabilities in a list of architectures, as `7.5, 8.0 and 9.0`."""
    names = [f"{m[2]}.{m[3]}" for m in map(_NAME.match, architectures) if m is not None]
    names = list(dict.fromkeys(names)) or ["no GPU"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def remedy(capability: Capability) -> str:
    """What a user can do if torch has no kernels for a GPU."""
    version = show(capability)
    if capability < (7, 0):
        return "use GPUs of compute capability 7.0 or later"
    if capability < (7, 5):
        return f"build an image with {OLD_GPUS} and --build-arg CAPABILITY={version} (docs/images.md)"
    return f"build an image with a torch that has kernels for {version} (docs/images.md)"
