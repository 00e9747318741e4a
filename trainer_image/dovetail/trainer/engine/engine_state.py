"""A trainer rank's part of a stage's models. Checkpoints save it, and exports write it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.protocol.messages import ModelRef
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.engine.engine_model import EngineModel


class EngineState:
    """The models of the stage `stage`. `loaded` are the models of all ranks, and `models` those of which this rank
    holds a part. `ema` is this rank's part of the actor's moving average, by parameter name, or empty.

    `step` is the last applied step. The caller sets it after each step, and `restore` sets it."""

    def __init__(self, spec: RLHFJobSpec, groups: Groups) -> None:
        self.spec, self.groups = spec, groups
        self.models: dict[str, EngineModel] = {}
        self.loaded: dict[str, ModelRef] = {}
        self.stage: Stage | None = None
        self.step = 0
        self.ema: dict[str, Tensor] = {}

    def weights(self, model: str) -> Iterator[tuple[str, Tensor]]:
        """This stage's weights as (Hugging Face name, whole tensor), with adapters merged. They are float32 unless the
        parameter has another dtype. `ema` is the averaged actor. This is collective over dp: every dp rank must exhaust
        the iterator. Raises ValueError for `ema` without an averaged actor."""
        if model == "ema":
            if not self.ema:
                raise ValueError("there is no averaged actor; set ppo.ema")
            return self.models["actor"].gather(self.ema)
        return self.models[model].gather()
