"""Which scorer serves which models: all of them everything, or each a part (APP section V-A, Interleaving)."""

from __future__ import annotations

from dovetail.api.critic import has_critic
from dovetail.api.plan import Scored
from dovetail.api.types import RLHFJobSpec


def scored_models(spec: RLHFJobSpec) -> list[Scored]:
    """What PPO asks scorers for."""
    found: list[Scored] = ["reference"]
    if spec.models.reward.function is None:
        found.append("reward")
    if has_critic(spec):
        found.append("critic")
    return found


def scorer_models(spec: RLHFJobSpec, scorers: int) -> list[list[Scored]]:
    """The models that each of `scorers` holds.

    Interleaving, with two scorers or more: the reference on the first half of them, the others, which have no
    vocabulary projection, on the second. So each
    holds fewer models, and their passes run side by side. Else: all on all."""
    models = scored_models(spec)
    if spec.plan.placement != "Interleaving" or scorers < 2 or len(models) < 2:
        return [list(models) for _ in range(scorers)]
    half = scorers // 2
    return [["reference"] if index < half else models[1:] for index in range(scorers)]
