"""Turns a measured profile into the times of real pipeline stages. The first and the last stage differ from others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.pipelines import Floats, ProblemError
from dovetail.protocol.files.machine_profile import ModelTimes, PassTimes, Profile
from dovetail.protocol.weights import layer_range

# This many seconds replace times that are 0, because a schedule problem needs times above 0.
_NO_TIME = 1e-9


def stage_times(name: str, times: ModelTimes, pp: int, size: int) -> dict[str, Floats]:
    """The times and the activations of a micro-batch of `size` sequences, by kind of pass, as (pp,) float64 arrays.

    F is the forward pass and B the whole backward pass. I is the input gradient and W the weight gradient of a split
    backward pass. All four are in seconds. `bytes` has the bytes of the activations that a stage keeps. Raises
    ProblemError if the model has fewer layers than stages."""
    layers = stage_layers(name, times.layers, pp)
    embedding, layer, head = (_at(part, size) for part in (times.embedding_times, times.layer_times, times.head_times))

    def per_stage(field: str) -> Floats:
        values = np.array([n * getattr(layer, field) for n in layers], dtype=np.float64)
        values[0] += getattr(embedding, field)
        values[-1] += getattr(head, field)
        return values

    first, second = per_stage("input_gradient"), per_stage("weight_gradient")
    # The first stage computes both halves of its backward pass in W, because no stage waits for its input gradient.
    second[0] += first[0]
    first[0] = 0.0
    seconds = {"F": per_stage("forward"), "B": per_stage("backward"), "I": first, "W": second}
    return {kind: np.maximum(values, _NO_TIME) for kind, values in seconds.items()} | {
        "bytes": per_stage("activation_bytes")
    }


def transfer_seconds(profile: Profile, name: str, micro_batch: int) -> float:
    """The seconds that a micro-batch's hidden states need to reach the next stage. 0 if the link was not measured.

    `name` is the model's name. `micro_batch` is the number of sequences."""
    model, link = profile.models[name], profile.link
    boundary = micro_batch * profile.tokens * model.hidden_size * model.bytes_per_value
    return 0.0 if link is None else link.latency + boundary / link.bytes_per_second


def stage_layers(name: str, layers: int, stages: int) -> list[int]:
    """The number of layers of each stage, as the trainer splits them. `name` is the model's name, for the error's
    sentence.

    Raises ProblemError if there are more stages than layers."""
    if stages > layers:
        raise ProblemError(
            f"{stages} pipeline stages need at least {stages} layers, the {name} has {layers}; use fewer"
        )
    return [len(layer_range(layers, index, stages)) for index in range(stages)]


def _at(measured: Sequence[PassTimes], size: int) -> PassTimes:
    """The times of a micro-batch of `size` sequences. They are as measured, or on a line through the two nearest
    sizes."""
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
