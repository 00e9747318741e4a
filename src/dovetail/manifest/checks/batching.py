"""Says which batch sizes must divide which others, for every stage and model. Validation and the planner share this
table."""

from __future__ import annotations

from typing import NamedTuple

from dovetail.manifest.sizes import has_critic
from dovetail.manifest.training_types import PPO, Supervised
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Stage


class BatchRule(NamedTuple):
    """The batch of one model in one stage. Sizes count sequences, or pairs in reward training and DPO. Fields are paths
    below the root. If micro-batches are divided by tokens, `tokens` is the maximum of a micro-batch, and `micro` is
    1."""

    stage: Stage
    model: str
    batch: int
    batch_field: str
    micro: int
    micro_field: str
    tokens: int | None = None

    def problem(self, dp: int) -> str | None:
        """The reason why `dp` data-parallel ranks cannot divide the batch evenly, without a full stop. None if they
        can."""
        if self.batch % (dp * self.micro) == 0:
            return None
        ranks = f"{dp} data-parallel ranks of the {self.model}" if dp > 1 else f"the {self.model}"
        if self.tokens is not None:
            return f"{self.batch_field} is {self.batch}, which {ranks} cannot share; make it a multiple of {dp}"
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
    for stage in (Stage.SFT, Stage.REWARD, Stage.DPO):
        if stage in spec.stages:
            config = spec.supervised(stage)
            rules.append(_rule(spec, stage, stage.model, config, config.batch_size, "batchSize"))
    if Stage.PPO in spec.stages:
        for model in ("actor", "critic") if has_critic(spec) else ("actor",):
            rules.append(_rule(spec, Stage.PPO, model, spec.ppo, spec.ppo.mini_batch_size, "miniBatchSize"))
    return rules


def _rule(spec: RLHFJobSpec, stage: Stage, model: str, config: PPO | Supervised, batch: int, name: str) -> BatchRule:
    field, tokens = f"spec.{stage.value}", micro_batch_tokens(spec, stage)
    micro = config.micro_batch_size if tokens is None else 1
    return BatchRule(stage, model, batch, f"{field}.{name}", micro, f"{field}.microBatchSize", tokens)


def longest_sample(spec: RLHFJobSpec, stage: Stage) -> int:
    """The maximum number of tokens that stay together in a micro-batch. They are those of a sequence, or of a pair of
    sequences in reward training and DPO."""
    if stage is Stage.PPO:
        return spec.data.max_prompt_tokens + spec.generation.max_tokens
    return spec.data.max_tokens * (2 if stage.has_pairs else 1)


def micro_batch_tokens(spec: RLHFJobSpec, stage: Stage) -> int | None:
    """The maximum number of tokens of a stage's micro-batch. None if rows are counted. Auto means the tokens of
    `microBatchSize` samples of the maximum length. The planner may choose another number for PPO
    (`Batching.micro_batch_tokens`)."""
    config = getattr(spec, stage.value)
    if config.micro_batch_tokens == "Auto":
        return int(config.micro_batch_size) * longest_sample(spec, stage)
    given: int | None = config.micro_batch_tokens
    return given


def pinned_layouts(spec: RLHFJobSpec) -> dict[str, tuple[str, Parallelism]] | None:
    """The layout and the field path of each model that spec.plan.parallelism pins. None for the other models. The
    reward model has the critic's layout, because the critic starts from it."""
    pins = spec.plan.parallelism
    if pins == "Auto":
        return None
    actor = ("spec.plan.parallelism.actor", pins.actor)
    critic = actor if pins.critic is None else ("spec.plan.parallelism.critic", pins.critic)
    return {"actor": actor, "critic": critic, "reward": critic}
