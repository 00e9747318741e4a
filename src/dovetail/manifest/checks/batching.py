"""Which batch sizes must divide which others, for every stage and model. Validation and planner share this table."""

from __future__ import annotations

from typing import NamedTuple

from dovetail.manifest.critic import has_critic
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Stage


class BatchRule(NamedTuple):
    """One model's batch in one stage; sizes in sequences (reward training: pairs), fields as paths below the root."""

    stage: Stage
    model: str
    batch: int
    batch_field: str
    micro: int
    micro_field: str

    def problem(self, dp: int) -> str | None:
        """Why `dp` data-parallel ranks cannot share the batch evenly, without a full stop; None if they can."""
        if self.batch % (dp * self.micro) == 0:
            return None
        ranks = f"{dp} data-parallel ranks of the {self.model}" if dp > 1 else f"the {self.model}"
        return cannot_cut(self.batch_field, self.batch, self.micro_field, self.micro, ranks, dp * self.micro)


def cannot_cut(batch_field: str, batch: object, micro_field: str, micro: object, ranks: str, multiple: object) -> str:
    """The sentence, without its full stop, about a batch that is no multiple of `multiple`."""
    return (
        f"{batch_field} is {batch}, which cannot be cut into micro-batches of {micro} ({micro_field}) on {ranks}; "
        f"make it a multiple of {multiple}"
    )


def batch_rules(spec: RLHFJobSpec) -> list[BatchRule]:
    """A rule for each model that each of the job's stages trains."""
    rules = []
    if Stage.SFT in spec.stages:
        rules.append(_supervised(spec, Stage.SFT, "actor"))
    if Stage.REWARD in spec.stages:
        rules.append(_supervised(spec, Stage.REWARD, "reward"))
    if Stage.PPO in spec.stages:
        for model in ("actor", "critic") if has_critic(spec) else ("actor",):
            rules.append(
                BatchRule(
                    Stage.PPO,
                    model,
                    spec.ppo.mini_batch_size,
                    "spec.ppo.miniBatchSize",
                    spec.ppo.micro_batch_size,
                    "spec.ppo.microBatchSize",
                )
            )
    return rules


def _supervised(spec: RLHFJobSpec, stage: Stage, model: str) -> BatchRule:
    config = spec.sft if stage is Stage.SFT else spec.reward
    field = f"spec.{stage.value}"
    return BatchRule(
        stage, model, config.batch_size, f"{field}.batchSize", config.micro_batch_size, f"{field}.microBatchSize"
    )


def pinned_layouts(spec: RLHFJobSpec) -> dict[str, tuple[str, Parallelism]] | None:
    """Layout and field path of each model where spec.plan.parallelism pins it, else None.

    The reward model is laid out like the critic, which starts from it."""
    pins = spec.plan.parallelism
    if pins == "Auto":
        return None
    actor = ("spec.plan.parallelism.actor", pins.actor)
    critic = actor if pins.critic is None else ("spec.plan.parallelism.critic", pins.critic)
    return {"actor": actor, "critic": critic, "reward": critic}
