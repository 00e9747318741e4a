"""From a measured profile to a problem: times of real stages, which differ at both ends of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.api.profile import ModelTimes, PassTimes, Profile
from dovetail.planner.schedules.problem import Model, Problem, ProblemError

# Seconds, where nothing was measured: a problem's times are above 0.
_NO_TIME = 1e-9


def profiled_problem(
    profile: Profile,
    names: tuple[str, str],
    stages: tuple[int, int],
    micro_batches: int,
    micro_batch: int,
    *,
    mini_batches: int = 1,
    memory_limit: float | None = None,
) -> Problem:
    """The problem of training `names` (actor first), in seconds and bytes.

    `stages` pp1, pp2; `micro_batches`: of an actor pipeline and mini-batch, of `micro_batch` sequences; the critic's
    follow from K1 * M1 = K2 * M2. Raises ProblemError for numbers that do not fit and for what was not measured."""
    ranks = max(stages)
    models = []
    for name, pp in zip(names, stages, strict=True):
        if name not in profile.models:
            raise ProblemError(f"the profile has no {name}, only {', '.join(profile.models)}; measure it")
        if ranks % pp:
            raise ProblemError(f"the {name}'s {pp} pipeline stages do not divide {ranks}")
        pipelines, total = ranks // pp, ranks // stages[0] * micro_batches
        if total % pipelines:
            raise ProblemError(
                f"{total} micro-batches cannot be divided among the {name}'s {pipelines} pipelines of {pp} stages"
            )
        models.append(_model(name, profile.models[name], pp, pipelines, total // pipelines, micro_batch))
    first = profile.models[names[0]]
    boundary = micro_batch * profile.tokens * first.hidden_size * first.bytes_per_value
    link = profile.link
    latency = 0.0 if link is None else link.latency + boundary / link.bytes_per_second
    return Problem((models[0], models[1]), latency, mini_batches, memory_limit)


def _model(name: str, times: ModelTimes, pp: int, pipelines: int, count: int, size: int) -> Model:
    layers = stage_layers(name, times.layers, pp)
    embedding, layer, head = (_at(part, size) for part in (times.embedding_times, times.layer_times, times.head_times))

    def per_stage(field: str) -> np.ndarray:  # type: ignore[type-arg]
        values = np.array([n * getattr(layer, field) for n in layers], dtype=float)
        values[0] += getattr(embedding, field)
        values[-1] += getattr(head, field)
        return values

    halves = {"input": per_stage("input_gradient"), "weight": per_stage("weight_gradient")}
    # The first stage computes both halves in the second: nobody waits for the gradient of tokens.
    halves["weight"][0] += halves["input"][0]
    halves["input"][0] = 0.0
    return Model(
        name,
        pp,
        count,
        np.maximum(per_stage("forward"), _NO_TIME)[None, :, None],
        np.maximum(per_stage("backward"), _NO_TIME)[None, :, None],
        per_stage("activation_bytes")[None, :, None],
        pipelines,
        np.maximum(halves["input"], _NO_TIME)[None, :, None],
        np.maximum(halves["weight"], _NO_TIME)[None, :, None],
    )


def stage_layers(name: str, layers: int, stages: int) -> list[int]:
    """Layers of each stage, as the trainer splits them: the extra ones to the early stages. Raises ProblemError."""
    if stages > layers:
        raise ProblemError(
            f"{stages} pipeline stages need at least {stages} layers, the {name} has {layers}; use fewer"
        )
    base, extra = divmod(layers, stages)
    return [base + (index < extra) for index in range(stages)]


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
