"""Which scorer serves which models: all of them everything, or each a part (APP section V-A, Interleaving); and the
memory that the servers beside them leave them."""

from __future__ import annotations

import math
from typing import get_args

from dovetail.manifest.critic import has_critic
from dovetail.manifest.types import RLHFJobSpec
from dovetail.planner.costs.memory import CONTEXT_BYTES, FRAGMENTS, UTILISATION
from dovetail.protocol.plan import Scored
from dovetail.protocol.prediction import Prediction


def scored_models(spec: RLHFJobSpec) -> list[Scored]:
    """What PPO asks scorers for."""
    found: list[Scored] = ["reference"]
    if not spec.models.reward.calls:
        found.append("reward")
    if has_critic(spec):
        found.append("critic")
    return found


def scorer_models(spec: RLHFJobSpec, scorers: int, interleaved: bool = False) -> list[list[Scored]]:
    """The models that each of `scorers` holds.

    Interleaving, pinned or chosen (`interleaved`), with two scorers or more: the reference is on the first half of
    them. The other models, which have no vocabulary projection, are on the second half. So each scorer holds fewer
    models, and their passes run side by side. Otherwise every scorer holds all models."""
    models = scored_models(spec)
    halves = interleaved or spec.plan.placement == "Interleaving"
    if not halves or scorers < 2 or len(models) < 2:
        return [list(models) for _ in range(scorers)]
    half = scorers // 2
    return [["reference"] if index < half else models[1:] for index in range(scorers)]


def server_memory(prediction: Prediction, group: str) -> float | None:
    """Share of a GPU's memory for the group's servers, vLLM's default less what the scorers need there; None where no
    scorer stays beside a server: it sleeps, or trainers have the GPUs too."""
    least = 1.0
    for cell in prediction.memory:
        scored = {k: v for k, v in cell.parts.items() if k.partition(":")[0] in get_args(Scored)}
        if cell.group == group and scored and any(k.startswith("generation:") for k in cell.parts):
            weights = sum(size for name, size in scored.items() if name.endswith(": weights"))
            taken = sum(scored.values()) + FRAGMENTS * weights + CONTEXT_BYTES
            least = min(least, UTILISATION - taken / cell.capacity)
    kinds = {task.task for task in prediction.tasks if task.group == group}
    beside = any(task.task == "generation" and not task.details for task in prediction.tasks if task.group == group)
    alone = not any(kind.endswith("_training") for kind in kinds)
    return math.floor(100 * least) / 100 if least < 1 and beside and alone else None
