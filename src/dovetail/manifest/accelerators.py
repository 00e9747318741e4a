"""The GPUs of a manifest. It finds where a manifest asks for them, makes the same job without them, and finds servers
that leave them to other processes."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.manifest.types import Group, GroupGPU, RLHFJobSpec, Role

SLEEP = "--enable-sleep-mode"


def asked(spec: RLHFJobSpec) -> Iterator[tuple[int, Group]]:
    """The index and the group wherever the manifest asks for GPUs. A group asks with a product, or with a perPod that
    the manifest contains. (The default of perPod asks for nothing.) `spec` must be as it was written, because `resolve`
    does not change products."""
    for index, group in enumerate(spec.groups):
        named = group.gpu.product is not None or "per_pod" in group.gpu.model_fields_set
        if named and group.gpu.per_pod > 0:
            yield index, group


def no_gpus(spec: RLHFJobSpec, present: int) -> str | None:
    """The reason why this machine, with `present` GPUs, would run such a group on its CPUs. None if it would not."""
    for index, group in asked(spec):
        gpu, field = group.gpu, f"spec.groups[{index}].gpu"
        if gpu.product is None:
            return (
                f"{field}.perPod is {gpu.per_pod}, but without gpu.product the group runs on CPUs; name the product, "
                "or give --cpu to mean CPUs"
            )
        if not present:
            return (
                f"{field} asks for {gpu.per_pod} x {gpu.product} a pod, but this machine has no GPU; give --cpu to run "
                "the job on its CPUs"
            )
    return None


def on_cpus(spec: RLHFJobSpec) -> RLHFJobSpec:
    """`spec` with all groups on CPUs. The number of pods stays the same, and each has one trainer rank."""
    groups = [group.model_copy(update={"gpu": GroupGPU(product=None, per_pod=0)}) for group in spec.groups]
    return spec.model_copy(update={"groups": groups})


def sleeps(group: Group) -> bool:
    """Whether the group's vLLM servers sleep while the scorers or trainers beside them work. Servers beside trainers
    always do. Others do if `vllmArgs` says so. Only servers on GPUs can sleep."""
    return not group.on_cpu and (Role.TRAINER in group.roles or SLEEP in group.vllm_args)
