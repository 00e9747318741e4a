"""What the placement of a job on its own groups comes to, whatever hardware they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.manifest.types import Parallelism, Stage
from dovetail.planner.candidate import Candidate
from dovetail.planner.costs.gpu import GPUCosts
from dovetail.protocol.plan import Layout
from dovetail.protocol.prediction import Prediction

# Splitting a model or interleaving must gain this factor over doing neither: the models of time are not exact.
WORTH = 1.05
# Of an optimizer step: what the models of time leave out, such as launches and Python.
UNCOUNTED_SECONDS = 0.01


class Infeasible(ValueError):
    """No layout of the job's groups can run it. The message is one sentence: what failed, and what would help."""


@dataclass(frozen=True)
class Chosen:
    """The placement of a PPO iteration on GPUs, with all that it was estimated from."""

    candidate: Candidate
    costs: GPUCosts
    prediction: Prediction


@dataclass(frozen=True)
class Placed:
    """`layouts`: of each trained model, on all ranks. `apart`: of actor and critic in PPO, if each has its own trainer
    ranks. `recompute`: stages and models with activation checkpointing. `prediction`: of a PPO iteration, where one
    could be made; `chosen`: what it was made from, on GPUs. `warnings`: one sentence each."""

    layouts: Mapping[str, Parallelism]
    prediction: Prediction | None = None
    recompute: frozenset[tuple[Stage, str]] = frozenset()
    apart: Mapping[str, Layout] = field(default_factory=dict)
    chosen: Chosen | None = None
    warnings: tuple[str, ...] = ()

    @property
    def interleaved(self) -> bool:
        """Whether reference and reward are on halves of the rollouts."""
        return self.prediction is not None and self.prediction.placement == "Interleaving"


def worth(best: float, other: float, steps: int) -> bool:
    """Whether `best` seconds an iteration gain more over `other` seconds than the models of time can tell. `steps`:
    optimizer steps of an iteration."""
    return other > WORTH * best + UNCOUNTED_SECONDS * steps
