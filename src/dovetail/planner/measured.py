"""From a measured profile to the times of real stages, which differ at both ends of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.pipelines import Floats, ProblemError
from dovetail.protocol.machine_profile import ModelTimes, PassTimes, Profile
from dovetail.protocol.weights import layer_range

# Seconds, where nothing was measured: a problem's times are above 0.
_NO_TIME = 1e-9


def stage_times(name: str, times: ModelTimes, pp: int, size: int) -> dict[str, Floats]:
    """Seconds of F, B, I and W and bytes of activations (`bytes`), each (pp,), of a micro-batch of `size` sequences."""
    layers = stage_layers(name, times.layers, pp)
    embedding, layer, head = (_at(part, size) for part in (times.embedding_times, times.layer_times, times.head_times))

    def per_stage(field: str) -> Floats:
        values = np.array([n * getattr(layer, field) for n in layers], dtype=np.float64)
        values[0] += getattr(embedding, field)
        values[-1] += getattr(head, field)
        return values

    first, second = per_stage("input_gradient"), per_stage("weight_gradient")
    # The first stage computes both halves in the second: nobody waits for the gradient of tokens.
    second[0] += first[0]
    first[0] = 0.0
    seconds = {"F": per_stage("forward"), "B": per_stage("backward"), "I": first, "W": second}
    return {kind: np.maximum(values, _NO_TIME) for kind, values in seconds.items()} | {
        "bytes": per_stage("activation_bytes")
    }


def transfer_seconds(profile: Profile, name: str, micro_batch: int) -> float:
    """Seconds that what a micro-batch of `name` sends to the next stage is on its way; 0 where not measured."""
    model, link = profile.models[name], profile.link
    boundary = micro_batch * profile.tokens * model.hidden_size * model.bytes_per_value
    return 0.0 if link is None else link.latency + boundary / link.bytes_per_second


def stage_layers(name: str, layers: int, stages: int) -> list[int]:
    """Layers of each stage, as the trainer splits them. Raises ProblemError."""
    if stages > layers:
        raise ProblemError(
            f"{stages} pipeline stages need at least {stages} layers, the {name} has {layers}; use fewer"
        )
    return [len(layer_range(layers, index, stages)) for index in range(stages)]


def _at(measured: Sequence[PassTimes], size: int) -> PassTimes:
    """Times of a micro-batch size: as measured, else between or beyond the two nearest ones measured."""
    points = sorted(measured, key=lambda p: p.micro_batch)
    for point in points:
        if point.micro_batch == size:
            return point
    if len(points) == 1:
        low, high = points[0], points[0]
        weight = size / low.micro_batch
        return _scaled(low, low, weight, 0.0, size)
    at = min(max(1, sum(p.micro_batch < size for p in points)), len(points) - 1)
    low, high = points[at - 1], points[at]
    part = (size - low.micro_batch) / (high.micro_batch - low.micro_batch)
    return _scaled(low, high, 1 - part, part, size)


def _scaled(low: PassTimes, high: PassTimes, a: float, b: float, size: int) -> PassTimes:
    fields = ("forward", "backward", "input_gradient", "weight_gradient", "activation_bytes")
    mixed = {field: max(0.0, a * getattr(low, field) + b * getattr(high, field)) for field in fields}
    return PassTimes(micro_batch=size, **{**mixed, "activation_bytes": int(mixed["activation_bytes"])})
