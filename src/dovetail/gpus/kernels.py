"""Says which GPUs a build of torch has kernels for, and in which dtype a server or scorer computes there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable
from functools import cache
from importlib.util import find_spec

from dovetail.manifest.types import Dtype

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


@cache
def can_compile() -> bool:
    """Whether this machine has Triton, and the C compiler that Triton needs."""
    return find_spec("triton") is not None and any(shutil.which(name) for name in ("cc", "gcc", "clang"))


def serving_dtype(group: Dtype, actor: Dtype, capability: Capability | None) -> Dtype:
    """The group's dtype, or else the actor's. If neither is set, it is bfloat16 on a GPU and float32 on a CPU
    (`capability` is None on a CPU). GPUs below compute capability 8.0 have no bfloat16, so they use float16. Raises
    ValueError if the group itself asks for bfloat16 there."""
    old = capability is not None and capability < BFLOAT16
    if group is not Dtype.AUTO:
        if old and group is Dtype.BFLOAT16:
            assert capability is not None
            raise ValueError(
                f"the group's dtype is bfloat16, which a GPU of compute capability {show(capability)} does not have; "
                "set it to float16 or Auto"
            )
        return group
    if actor is Dtype.AUTO:
        actor = Dtype.FLOAT32 if capability is None else Dtype.BFLOAT16
    return Dtype.FLOAT16 if old and actor is Dtype.BFLOAT16 else actor
