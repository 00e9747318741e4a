"""Simulates iterations of a candidate whose lengths are drawn at random. They predict what a lag gains (`ppo.lag`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dovetail.fusion.lengths import Ints
from dovetail.planner.candidate import Candidate
from dovetail.planner.costs.gpu import GPUCosts
from dovetail.planner.simulate.iteration import Rolled, play_rollout
from dovetail.planner.simulate.lanes import Lanes, Parts

# The number of iterations that are drawn.
DRAWS = 4


def _played(candidate: Candidate, costs: GPUCosts, seed: int) -> Iterator[tuple[Ints, Ints, Rolled]]:
    """Prompt and response lengths of iterations, (batch,) each, and their generation and scoring, event by event."""
    work, rng = costs.work, np.random.default_rng(seed)
    for _ in range(DRAWS):
        prompts = work.prompt.draw(work.batch, rng)
        responses = work.response.draw(work.batch, rng)
        yield prompts, responses, play_rollout(candidate, costs, prompts, responses)


def drawn_lanes(candidate: Candidate, costs: GPUCosts, seed: int) -> Lanes:
    """Iterations whose generation and scoring are scaled so that their means are those of the estimate. The time of
    training is in proportion to its tokens. With a lag the trainers recompute the old log-probabilities."""
    inference = costs.estimate(candidate).phases["inference"]
    candidate = replace(candidate, folded=True)
    mean = costs.estimate(candidate).phases
    played = list(_played(candidate, costs, seed))
    tokens = _relative([float(prompts.sum() + responses.sum()) for prompts, responses, _ in played])
    generated = _relative([rolled.generated for _, _, rolled in played])
    scored = _relative([rolled.scored - rolled.generated for _, _, rolled in played])
    own = max(costs.inference("actor_training", share) for share in candidate.actor_training)
    hidden = 0.0
    if candidate.migration is not None:
        hidden = costs.estimate(replace(candidate, migration=None)).phases["inference"] - mean["inference"]
    synchronous, lagged = [], []
    for at, (_, _, rolled) in enumerate(played):
        made = {
            "transfer": mean["transfer"],
            "swap": mean["swap"],
            "generation": mean["generation"] * generated[at],
            "inference": mean["inference"] * scored[at],
        }
        training = mean["training"] * tokens[at]
        rest = (made["generation"] + made["inference"]) * (1 - rolled.busy(candidate.generation))
        alone = {**made, "inference": inference * scored[at]}
        synchronous.append(Parts(alone, {"training": training}, rest + alone["inference"] - made["inference"]))
        tail = made["generation"] * (1 - rolled.half / rolled.generated) if rolled.generated else 0.0
        # Scoring on free servers in the tail takes their time too.
        kept = min(1.0, rolled.kept + max(0.0, hidden) / tail) if tail else 0.0
        lagged.append(Parts(made, {"training": training + own}, rest, tail=tail, kept=kept))
    return Lanes(synchronous, lagged)


def _relative(values: Sequence[float]) -> list[float]:
    """The values as multiples of their mean."""
    mean = sum(values) / len(values)
    return [value / mean if mean else 1.0 for value in values]
