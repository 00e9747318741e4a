"""What the planner expects of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import LoRA
from dovetail.planner.candidate import Candidate, Placement, Share, side_by_side
from dovetail.planner.memory import CONTEXT_BYTES, GPUMemoryModel
from dovetail.planner.workload import Workload
from gpu_memory.cases import Case


def predicted(case: Case) -> float:
    """Bytes of the fullest GPU, without what a process holds beside torch's allocator."""
    actor = ModelShape.of(case.actor)
    critic = None if case.critic is None else ModelShape.of(case.critic)
    adapters = LoRA(rank=case.lora) if case.lora else None
    mini_batch = case.rows * case.micro_batches * case.dp
    work = Workload(
        actor=actor,
        reference=actor,
        reward=critic or actor,
        critic=critic,
        batch=2 * mini_batch,
        mini_batch=mini_batch,
        epochs=1,
        prompt=Lengths.fixed(case.prompt),
        response=Lengths.fixed(case.response),
        actor_lora=adapters,
        critic_lora=adapters,
        ema=case.ema,
        value_head=case.shared,
        chunks=case.chunks,
    )
    zero = 3 if case.zero3 else 2
    share = Share("gpus", 0, case.pp, case.tp, case.dp, case.rows, zero, case.recompute, case.offload)
    if case.scores:
        held = {name: (Share("gpus", pp=case.pp, micro_batch=case.rows),) for name in case.scores}
        candidate = Candidate(Placement.SEPARATION, (), (), **held)
    else:
        schedule = "VShaped" if case.chunks > 1 else "Fused" if case.schedule else "Serial"
        pp = case.critic_pp or case.pp
        trained, other = side_by_side(share, replace(share, pp=pp, dp=case.dp * case.pp // pp))
        candidate = Candidate(
            Placement.SEPARATION, (), (trained,), () if critic is None else (other,), schedule=schedule
        )
    pool = Pool("gpus", gpu("NVIDIA-A100-SXM4-80GB"), 1, case.world, 1e9)
    cells, _ = GPUMemoryModel(work, Inventory((pool,))).of(candidate)
    return max(cell.device_bytes - CONTEXT_BYTES - _unused(cell.device) for cell in cells)


def _unused(parts: Mapping[str, float]) -> float:
    """What the null GPU does not have, and the measured scorers, whose samples are finished, do not need."""
    return sum(size for name, size in parts.items() if name.endswith(("NCCL buffers", "kept prefixes")))
