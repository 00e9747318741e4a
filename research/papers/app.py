"""APP (arXiv 2312.11819), section VI: DGX nodes of 8 A100-80GB, about 100 GB/s between nodes.

In the text at hand "1x8", "2x8" and "4x8" GPUs lost their crosses. Prompts and responses have 256 tokens, the batch is
the largest before memory ends; ZeRO-2 and ZeRO-0 for 7B, ZeRO-3 else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.planner.candidate import Candidate, Placement, Share
from dovetail.planner.workload import Workload
from papers.common import Figure, Measured, Section, best, llama, tensor_parallel, with_batch
from papers.deepspeed import MOST, all_halves, climb, halves, largest
from papers.planner import planned
from papers.system import System

A100, V100 = gpu("NVIDIA-A100-SXM4-80GB"), gpu("Tesla-V100-SXM2-32GB")
NETWORK = 100e9 / 8
# Table I: by GPUs and model, samples/s of DeepSpeed-Chat and of the two interleavings; None: OOM, absent: not printed.
TABLE_1: dict[int, dict[str, tuple[float | None, ...]]] = {
    8: {"7B": (16.12, 17.35), "13B": (7.32, 7.63), "33B": (0.69, 0.69), "65B": (None, None)},
    16: {
        "7B": (32.15, 34.70, 18.27),
        "13B": (15.35, 15.66, 8.27),
        "33B": (0.64, 0.64, 0.97),
        "65B": (0.14, 0.14, 0.24),
    },
    32: {"7B": (61.95, 69.44), "13B": (28.60, 28.54), "33B": (0.93, 0.95), "65B": (0.20, 0.20)},
}
# Table II: DeepSpeed-Chat and separation.
TABLE_2: dict[int, dict[str, tuple[float | None, ...]]] = {
    32: {"33B": (0.93, 4.76), "65B": (0.20, 1.75)},
    128: {"33B": (2.11, 10.07), "65B": (0.55, 6.80)},
}
TABLE_3 = (0.69, 0.79)
STRATEGIES = ("DeepSpeed-Chat", "interleaving 1", "interleaving 2", "separation")
# What serves generation in APP's separation is an inference engine with tensor parallelism.
SEPARATED = System(balanced=False, shared_weights=True, host_step=True)


def inventory(gpus: int, v100: int = 0) -> Inventory:
    pools = [Pool("a100", A100, gpus // 8, 8, NETWORK)]
    if v100:
        pools.append(Pool("v100", V100, v100 // 8, 8, NETWORK))
    return Inventory(tuple(pools))


def workload(model: str) -> Workload:
    shape = llama(model)
    return Workload(shape, shape, shape, shape, 8, 8, 1, Lengths.fixed(256), Lengths.fixed(256))


def flattened(
    model: str, gpus: int, change: Callable[[Candidate], Candidate] = lambda c: c, spread: int = 1
) -> Measured | None:
    """DeepSpeed-Chat, or with `change` an interleaving. "Frequent inter-node AllGather communications in ZeRO-3 are
    required in the 33B and 65B model training for the Flattening strategy": those generate layer by layer."""
    zero: Literal[2, 3] = 2 if model == "7B" else 3
    tp = 0 if model in ("33B", "65B") else 1
    return largest(workload(model), inventory(gpus), gpus, zero, (tp,), change, spread)


def separated(model: str, gpus: int) -> Measured | None:
    """Its planner looks for the shares of generation, training and the rest: every division into nodes is tried."""
    work, cluster = workload(model), inventory(gpus)
    found: Measured | None = None
    for share in _divisions(gpus // 8):

        def at(eighth: int, share: tuple[int, int, int] = share) -> Measured | None:
            batch = 8 * eighth
            return best(
                _separations(share, batch, tensor_parallel(work.actor)[-1]), with_batch(work, batch), cluster, SEPARATED
            )

        each = climb(at, MOST // 8)
        if each is not None and (found is None or each.rate > found.rate):
            found = each
    return found


def _divisions(nodes: int) -> Iterator[tuple[int, int, int]]:
    """Nodes of generation, of training and of the other models' inference (0: with generation)."""
    step = max(1, nodes // 8)
    for generation in range(step, nodes, step):
        for training in range(step, nodes - generation + 1, step):
            rest = nodes - generation - training
            if rest % step == 0:
                yield generation, training, rest


def _separations(share: tuple[int, int, int], batch: int, tp: int) -> Iterator[Candidate]:
    generation, training, rest = share
    begin = 8 * (generation + training)
    servers = Share("a100", tp=tp, dp=8 * generation // tp)
    scorers = Share("a100", begin if rest else 0, tp=tp, dp=8 * (rest or generation) // tp, micro_batch=4)
    per_rank = -(-batch // (8 * training))
    micros = sorted({min(per_rank, m) for m in (1, 2, 4, 8, 16)}, reverse=True)
    for micro in micros:
        for recompute in (False, True):
            for offload in (False, True):
                trained = Share(
                    "a100",
                    8 * generation,
                    dp=8 * training,
                    micro_batch=micro,
                    fsdp=3,
                    recompute=recompute,
                    offload=offload,
                )
                yield Candidate(
                    Placement.SEPARATION, (servers,), (trained,), (trained,), (scorers,), (scorers,), (scorers,)
                )


def heterogeneous() -> Measured | None:
    """Reference and reward model on four V100 each, two A100 for two copies of the actor, six to train on."""
    work, cluster = workload("33B"), inventory(8, 8)

    def at(per_gpu: int) -> Measured | None:
        candidates = []
        for recompute in (False, True):
            for offload in (False, True):
                trained = Share("a100", 2, dp=6, micro_batch=per_gpu, fsdp=3, recompute=recompute, offload=offload)
                candidates.append(
                    Candidate(
                        Placement.SEPARATION,
                        (Share("a100", dp=2),),
                        (trained,),
                        (trained,),
                        (Share("v100", 0, tp=4, micro_batch=2),),
                        (Share("v100", 4, tp=4, micro_batch=2),),
                        (Share("a100", 2, dp=6, micro_batch=per_gpu, fsdp=3),),
                    )
                )
        return best(candidates, with_batch(work, 6 * per_gpu), cluster, SEPARATED)

    return climb(at, MOST // 6)


def sections() -> Iterator[Section]:
    first = Section("APP Table I", "samples/s")
    for gpus, models in TABLE_1.items():
        for model, values in models.items():
            ours = [flattened(model, gpus), flattened(model, gpus, halves)]
            if len(values) > 2:
                # Half of the GPUs that a task has left see twice the samples.
                ours.append(flattened(model, gpus, all_halves, 2))
            _add(first, f"{gpus} GPUs {model}", STRATEGIES, values, ours, inventory(gpus), model)
    yield first
    second = Section("APP Table II", "samples/s")
    for gpus, models in TABLE_2.items():
        for model, values in models.items():
            ours = [flattened(model, gpus), separated(model, gpus)]
            _add(second, f"{gpus} GPUs {model}", (STRATEGIES[0], STRATEGIES[3]), values, ours, inventory(gpus), model)
    yield second
    third = Section("APP Table III", "samples/s")
    ours = [flattened("33B", 8), heterogeneous()]
    _add(third, "8 A100 + 8 V100 33B", (STRATEGIES[0], "heterogeneous"), TABLE_3, ours, inventory(8, 8), "33B")
    yield third


def _add(section: Section, group: str, names: tuple[str, ...], values, ours, cluster: Inventory, model: str) -> None:  # type: ignore[no-untyped-def]
    for name, value, mine in zip(names, values, ours, strict=False):
        note = f"batch {mine.work.batch}" if mine else ""
        section.figures.append(Figure(name, group, value, mine.rate if mine else None, note))
    fastest = max((m for m in ours if m), key=lambda m: m.rate, default=None)
    if fastest is not None:
        plan = planned(fastest.work, cluster)
        if plan is not None:
            section.planned.append((f"{section.title} {group}", plan, fastest.seconds))
