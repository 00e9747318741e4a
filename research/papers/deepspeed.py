"""DeepSpeed-Chat as the three papers describe it: every model on every GPU, ZeRO data parallelism, a hybrid engine.

Training is ZeRO-3 (APP: ZeRO-2 for 7B). The hybrid engine generates with the training's weights: gathered once into
tensor parallel ranks or whole copies where these fit, else layer by layer for every token. It decodes a batch until its
longest sample is done and trains on the samples in the order in which they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from dovetail.gpus.inventory import Inventory
from dovetail.planner.candidate import Candidate, Placement, Share
from dovetail.planner.workload import Workload
from papers.common import Measured, best, with_batch
from papers.system import System

# It reduces gradients in the dtype of the model.
SYSTEM = System(
    continuous=False, balanced=False, shared_weights=True, host_step=True, gradient_bytes=2, max_samples=1024
)
# DeepSpeed-Chat's largest global batch.
MOST = 1024


@dataclass(frozen=True)
class Config:
    """`tp`: ranks that generate together, 0: layer by layer on each GPU."""

    zero: Literal[2, 3]
    tp: int
    recompute: bool
    offload: bool

    def candidate(self, pool: str, gpus: int, rows: int) -> Candidate:
        """With `rows` sequences in a GPU's forward pass."""
        scoring = Share(pool, dp=gpus, micro_batch=rows, fsdp=3 if self.zero == 3 else 0)
        generation = Share(pool, tp=self.tp, dp=gpus // self.tp) if self.tp else Share(pool, dp=gpus, fsdp=3)
        training = Share(
            pool, dp=gpus, micro_batch=rows, fsdp=self.zero, recompute=self.recompute, offload=self.offload
        )
        scorers = (scoring,)
        trained = (training,)
        return Candidate(Placement.FLATTENING, (generation,), trained, trained, scorers, scorers, scorers, folded=False)


def configs(zero: Literal[2, 3], tps: tuple[int, ...]) -> list[Config]:
    """With and without offload and recomputation."""
    return [Config(zero, tp, r, offload) for offload in (False, True) for tp in tps for r in (False, True)]


def largest(
    work: Workload,
    inventory: Inventory,
    gpus: int,
    zero: Literal[2, 3],
    tps: tuple[int, ...],
    change: Callable[[Candidate], Candidate] = lambda c: c,
    spread: int = 1,
) -> Measured | None:
    """At the largest batch that fits (APP: "the maximum batch size available before Out-of-Memory"), of the
    configurations the one that is fastest at its largest. `change`: of the placement, by which a task has one of
    `spread` parts of the GPUs."""
    pool = inventory.pools[0].name

    def at(config: Config, per_gpu: int) -> Measured | None:
        candidate = change(config.candidate(pool, gpus, per_gpu * spread))
        return best([candidate], with_batch(work, per_gpu * gpus), inventory, SYSTEM)

    found: Measured | None = None
    for config in configs(zero, tps):
        each = climb(lambda n, config=config: at(config, n), MOST // gpus)  # type: ignore[misc]
        if each is not None and (found is None or each.rate > found.rate):
            found = each
    return found


def climb(at: Callable[[int], Measured | None], most: int) -> Measured | None:
    """`at(n)` of the largest n up to `most` for which it is not None; what fits for n fits for less."""
    low, high, found = 0, most + 1, None
    while high - low > 1:
        middle = (low + high) // 2
        each = at(middle)
        if each is None:
            high = middle
        else:
            low, found = middle, each
    return found


def halves(candidate: Candidate) -> Candidate:
    """APP's first interleaving: reference on one half of the GPUs, reward model on the other."""
    first = candidate.reference[0]
    half = replace(first, dp=first.dp // 2)
    other = replace(half, first=half.gpus)
    return replace(candidate, placement=Placement.INTERLEAVING, reference=(half,), reward=(other,), folded=True)


def all_halves(candidate: Candidate) -> Candidate:
    """APP's second: actor (and reward model) on one half, critic (and reference) on the other."""

    def part(share: Share, second: bool) -> tuple[Share, ...]:
        half = replace(share, dp=share.dp // 2)
        return (replace(half, first=half.gpus) if second else half,)

    return replace(
        candidate,
        placement=Placement.INTERLEAVING,
        generation=part(candidate.generation[0], False),
        actor_training=part(candidate.actor_training[0], False),
        reward=part(candidate.reward[0], False),
        critic_training=part(candidate.critic_training[0], True),
        critic=part(candidate.critic[0], True),
        reference=part(candidate.reference[0], True),
        folded=True,
    )
