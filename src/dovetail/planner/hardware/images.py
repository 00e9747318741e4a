"""Checks that the images of a job's groups have kernels for the groups' GPUs. It knows only the GPU's product and the
architectures that the images were built for. A process checks again when it starts (`dovetail.gpus.kernel_check`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dovetail.gpus.kernels import DEFAULT_ARCHITECTURES, capabilities, has_kernels, remedy, show
from dovetail.manifest.types import RLHFJobSpec, Role
from dovetail.planner.hardware.gpus import GPU, UnknownProduct, gpu

# This replaces the list of architectures of an image that is not checked, because its kernels are not known.
ANY = "any"


def image_errors(
    spec: RLHFJobSpec,
    trainer: Collection[str] = DEFAULT_ARCHITECTURES,
    rollout: Collection[str] = DEFAULT_ARCHITECTURES,
    measured: Mapping[str, GPU] | None = None,
) -> list[str]:
    """One sentence for each group that names no image, if the operator's image has no kernels for the group's GPU.
    `trainer`, `rollout`: the architectures that the operator's images have kernels for, or ANY."""
    found = []
    for index, group in enumerate(spec.groups):
        built_for = rollout if Role.ROLLOUT in group.roles else trainer
        if group.on_cpu or group.image is not None or ANY in built_for:
            continue
        try:
            product = gpu(str(group.gpu.product), measured)
        except UnknownProduct:
            continue  # The plan says so.
        if not has_kernels(built_for, product.capability):
            found.append(
                f"spec.groups[{index}].image: {product.product} has compute capability {show(product.capability)}, and "
                f"the operator's image has kernels for {capabilities(built_for)}; {remedy(product.capability)}, and "
                "name it here."
            )
    return found
