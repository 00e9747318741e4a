"""Decides which scorer holds which models. Each holds all models, or a part of them (APP section V-A,
Interleaving)."""

from __future__ import annotations

from typing import get_args

from dovetail.manifest.critic import has_critic
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.plan import Scored


def scorer_models(spec: RLHFJobSpec, scorers: int, interleaved: bool = False) -> list[list[Scored]]:
    """The models that each of the `scorers` scorers holds, of those whose outputs PPO needs.

    With Interleaving, which is pinned or chosen (`interleaved`), and two scorers or more, the first half of them holds
    the reference. The second half holds the other models, which have no vocabulary projection. So each scorer holds
    fewer models, and their passes run side by side. Otherwise every scorer holds all models."""
    needs = {
        "reference": spec.ppo.reads_reference,
        "reward": not spec.models.reward.calls,
        "critic": has_critic(spec),
    }
    models: list[Scored] = [model for model in get_args(Scored) if needs[model]]
    halves = interleaved or spec.plan.placement == "Interleaving"
    if not halves or scorers < 2 or len(models) < 2 or "reference" not in models:
        return [list(models) for _ in range(scorers)]
    half = scorers // 2
    return [["reference"] if index < half else models[1:] for index in range(scorers)]
