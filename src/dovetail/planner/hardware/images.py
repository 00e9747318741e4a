"""Whether the images of a job's groups have kernels for the groups' GPUs. A process asks again when it starts
(`dovetail.gpus.kernel_check`): here only the GPU's product is known, and what the images were built from."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dovetail.gpus.kernels import DEFAULT_ARCHITECTURES, capabilities, has_kernels, remedy, show
from dovetail.manifest.types import RLHFJobSpec, Role
from dovetail.planner.hardware import GPU, UnknownProduct, gpu

# In place of a list: an image whose kernels are not known is not checked.
ANY = "any"


def image_errors(
    spec: RLHFJobSpec,
    trainer: Collection[str] = DEFAULT_ARCHITECTURES,
    rollout: Collection[str] = DEFAULT_ARCHITECTURES,
    measured: Mapping[str, GPU] | None = None,
) -> list[str]:
    """One sentence for each group that names no image, and whose GPU the operator's has no kernels for. `trainer`,
    `rollout`: the architectures that the operator's images have kernels for, or ANY."""
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
