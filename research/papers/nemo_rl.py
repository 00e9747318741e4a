"""GRPO steps of NeMo-RL v0.4 on DGX-H100 nodes in bfloat16, with Megatron-core and vLLM.

From docs/about/performance-summary.md of NVIDIA-NeMo/RL. What its table leaves out is from the recipes in
examples/configs/recipes/llm/performance: micro-batches are packed to one maximal sequence, gradients cross the network
in bfloat16, there is a reference policy, and the policy's own pass gives the old log-probabilities. Prompts have 110
tokens, by the table's tokens per second less its mean responses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.model_shape import ModelShape
from dovetail.planner.candidate import Candidate, Placement, Share
from dovetail.planner.workload import Workload
from papers.common import Figure, Section
from papers.planner import planned
from papers.system import System, SystemCosts

H100 = gpu("NVIDIA-H100-80GB-HBM3")
NETWORK = 400e9 / 8
PROMPT = Lengths.fixed(110)
SHARED = System(gradient_bytes=2, max_samples=1024)
MODELS = {
    "Llama 3.1 8B": ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256),
    "Qwen3 32B": ModelShape("qwen3", 64, 5120, 25600, 64, 8, 128, 151936),
    "Qwen3 30B-A3B": ModelShape("qwen3_moe", 48, 2048, 768, 32, 4, 128, 151936, experts=128, chosen=8),
    "Qwen3 235B-A22B": ModelShape("qwen3_moe", 94, 4096, 1536, 64, 4, 128, 151936, experts=128, chosen=8),
}


@dataclass(frozen=True)
class Run:
    """A row of the table. `beside`: how many of the GPUs generate while the others train (1-step off-policy). `serving`
    and `training` are (pp, tp). `seconds`: of a step, as published."""

    model: str
    gpus: int
    longest: int
    response: int
    seconds: float
    serving: tuple[int, int]
    training: tuple[int, int]
    batch: int = 2048
    beside: int = 0
    recompute: bool = False


# NeMo-RL's trainers have experts over ranks (EP), ours gather them (ZeRO-3). Its servers of 16 are two stages.
RUNS = (
    Run("Llama 3.1 8B", 16, 4096, 1060, 97.7, (1, 1), (2, 1), recompute=True),
    Run("Llama 3.1 8B", 16, 4096, 1129, 74.6, (1, 1), (2, 1), beside=8, recompute=True),
    Run("Qwen3 32B", 32, 4096, 3206, 393, (1, 4), (4, 4)),
    Run("Qwen3 32B", 64, 4096, 3207, 215, (1, 4), (4, 4), beside=32),
    Run("Qwen3 30B-A3B", 32, 4096, 3154, 225, (1, 4), (1, 2)),
    Run("Qwen3 30B-A3B", 32, 4096, 3158, 244, (1, 2), (2, 1), beside=16),
    Run("Qwen3 235B-A22B", 128, 8192, 5671, 506, (2, 8), (8, 4), batch=512, recompute=True),
)


def responses(mean: int, longest: int) -> Lengths:
    """Long-tailed lengths with this mean, of which those beyond the limit are cut off."""
    sigma, low, high = Lengths.long_tailed(longest).sigma, 1.0, 100.0 * longest
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if Lengths(middle, sigma, longest).mean < mean else (low, middle)
    return Lengths(low, sigma, longest)


def seconds(run: Run, work: Workload, inventory: Inventory) -> tuple[float | None, str]:
    """Of a step in the published layout, and where they go. None: it does not fit."""
    experts = work.actor.experts > 0
    trains = run.gpus - run.beside
    pp, tp = run.training
    trained = Share(
        "h100",
        run.beside,
        pp,
        tp,
        dp=trains // (pp * tp),
        fsdp=3 if experts else 1,
        recompute=run.recompute,
        offload=not run.beside,
    )
    serving_pp, serving_tp = run.serving
    serving = (run.beside or run.gpus) // (serving_pp * serving_tp)
    candidate = Candidate(
        Placement.SEPARATION if run.beside else Placement.FLATTENING,
        (Share("h100", 0, serving_pp, serving_tp, serving, offload=not run.beside),),
        (trained,),
        reference=(Share("h100", run.beside, pp, tp, trained.dp, fsdp=3 if experts else 0, offload=True),),
        folded=False,
    )
    found = SystemCosts(work, inventory, SHARED).estimate(candidate)
    if not found.fits:
        return None, str(found.problem)
    phases = dict(found.phases)
    if run.beside:
        # The GPUs that train also score. Samples of the next step are drawn meanwhile.
        beside = phases["inference"] + phases["training"] - phases["generation"]
        phases["training"], phases["inference"] = max(0.0, beside), 0.0
    parts = (f"{name} {phases[name]:.0f}" for name in ("generation", "inference", "training"))
    return sum(phases.values()), ", ".join(parts)


def sections() -> Iterator[Section]:
    section = Section("NeMo-RL v0.4 on H100", "seconds a step", higher=False)
    for run in RUNS:
        shape = MODELS[run.model]
        lengths = responses(run.response, run.longest - PROMPT.longest)
        work = Workload(
            shape, shape, None, None, run.batch, 512, 1, PROMPT, lengths, per_prompt=32, micro_batch_tokens=run.longest
        )
        inventory = Inventory((Pool("h100", H100, run.gpus // 8, 8, NETWORK),))
        ours, note = seconds(run, work, inventory)
        way = "1-step off" if run.beside else "on-policy"
        section.figures.append(Figure(way, f"{run.gpus} GPUs {run.model}", run.seconds, ours, note))
        plan = planned(work, inventory)
        if plan is not None and ours is not None and not run.beside:
            section.planned.append((f"{run.gpus} GPUs {run.model}", plan, ours))
    yield section
