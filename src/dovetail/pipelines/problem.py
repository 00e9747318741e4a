"""The problem: two models trained at once on the same pipeline ranks (RLHFuse section 5.2), or one model alone.

N pipeline ranks hold K pipelines (`pipelines`) of each model, with pp stages (`stages`) each: N = K1 * pp1 = K2 * pp2.
The stages of pipeline k are on the ranks k * pp to (k + 1) * pp - 1. Both models train on the same sequences, so their
numbers of micro-batches match: K1 * M1 = K2 * M2. Alternatively each model has separate ranks, from `first` on:
N = K1 * pp1 + K2 * pp2. Times and latencies may be in any unit, but must all use the same one. So must activation
sizes."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.pipelines.simulate import Floats


class ProblemError(ValueError):
    """The schedule cannot exist. The message names the numbers and how to correct them."""


@dataclass(frozen=True, eq=False)
class ModelPipelines:
    """One model's pipelines. Arrays broadcast to (pipelines, stages * parts, micro-batches of all mini-batches).

    `stages`: the number of ranks of a pipeline. `parts`: the arrays divide each rank's stage into so many equal shares
    of layers. With 2 parts, a placement of two chunks per rank uses the values unchanged, and a placement of one chunk
    per rank uses the sum of two values. If a placement needs smaller shares, it divides the values evenly.

    `forward`, `backward`: the time of one micro-batch in one part. `input_gradient`: if the backward is split, the time
    that the previous stage waits for (default: half of `backward`). `weight_gradient`: the time of the other half, if
    both halves together take longer or shorter than the whole backward. `activation`: the memory that one micro-batch
    holds in a stage, from the start of its forward to the end of its backward. `optimizer_step`: the time between two
    mini-batches. `first`: the rank of the first pipeline's first stage."""

    name: str
    stages: int
    micro_batches: int  # of one pipeline and mini-batch
    forward: float | Floats
    backward: float | Floats
    activation: float | Floats = 1.0
    pipelines: int = 1
    input_gradient: float | Floats | None = None
    weight_gradient: float | Floats | None = None
    optimizer_step: float = 0.0
    first: int = 0
    parts: int = 1

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.stages * self.pipelines)


@dataclass(frozen=True, eq=False)
class ScheduleProblem:
    """One model, or two models on the same or on separate ranks. The first of two models is the actor. Raises
    ProblemError if the numbers do not fit together.

    `communication`: the time from the end of a pass to the start of the pass in the next stage. Neither rank is busy in
    this time. It is one number, or an array (N, N) from rank to rank if the links differ.
    `memory_limit`: the largest activation memory of a rank."""

    models: tuple[ModelPipelines, ...]
    communication: float | Floats = 0.0
    mini_batches: int = 1
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def ranks(self) -> int:
        return max(m.ranks.stop for m in self.models)

    @property
    def latencies(self) -> Floats:
        """The latency from rank to rank, (N, N)."""
        return np.broadcast_to(np.asarray(self.communication, dtype=np.float64), (self.ranks, self.ranks))

    def array(self, model: int, field: str) -> Floats:
        """A model's times or sizes as (ranks, micro-batches), with one chunk a rank. Rank first + r holds stage r %
        stages of pipeline r // stages. The values are 0 on ranks that hold nothing of the model."""
        m = self.models[model]
        own = self.along(model, field).reshape(len(m.ranks), -1)
        result = np.zeros((self.ranks, own.shape[1]))
        result[m.ranks.start : m.ranks.stop] = own
        return result

    def along(self, model: int, field: str, chunks: int = 1) -> Floats:
        """A model's times or sizes along its pipelines, (pipelines, stages * chunks, micro-batches), if each rank holds
        `chunks` stages of equal numbers of layers."""
        m = self.models[model]
        value: Any = getattr(m, field)
        if field == "input_gradient" and value is None:
            value = np.asarray(m.backward, dtype=np.float64) / 2
        if field == "weight_gradient" and value is None:
            return self.along(model, "backward", chunks) - self.along(model, "input_gradient", chunks)
        shape = (m.pipelines, m.stages * m.parts, m.micro_batches * self.mini_batches)
        own: Floats = np.broadcast_to(np.asarray(value, dtype=np.float64), shape)
        if chunks == m.parts:
            return own
        fine = math.lcm(chunks, m.parts)
        divided = np.repeat(own, fine // m.parts, axis=1) / (fine // m.parts)
        grouped: Floats = divided.reshape(m.pipelines, m.stages * chunks, fine // chunks, -1).sum(axis=2)
        return grouped

    @property
    def least_memory(self) -> float:
        """The activation memory that every schedule with one stage a rank needs, for the largest micro-batch in one
        stage."""
        return self.least_memory_of(1)

    def least_memory_of(self, chunks: int, loop: bool = False) -> float:
        """The activation memory that every schedule with so many stages a rank needs. A rank holds a micro-batch in all
        of its stages when it has run the last one forward. `loop`: the stages are placed as in `Shape.LOOP`."""
        most = 0.0
        for index, m in enumerate(self.models):
            each = self.along(index, "activation", chunks).reshape(m.pipelines, chunks, m.stages, -1)
            if not loop:
                each = np.stack([each[:, c, :: -1 if c % 2 else 1] for c in range(chunks)], axis=1)
            most = max(most, float(each.sum(axis=1).max()))
        return most

    @property
    def digest(self) -> str:
        """SHA-256 of everything that determines the answer."""
        edges = hashlib.sha256(self.latencies.tobytes()).hexdigest()
        parts: list[Any] = [edges, self.mini_batches, self.memory_limit]
        for index, m in enumerate(self.models):
            parts += [m.name, m.stages, m.pipelines, m.micro_batches, m.optimizer_step, *([m.first] if m.first else [])]
            parts += [{"parts": m.parts}] if m.parts > 1 else []
            for field in ("forward", "backward", "input_gradient", "weight_gradient", "activation"):
                parts.append(hashlib.sha256(self.along(index, field, m.parts).tobytes()).hexdigest())
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def fused_problem(
    actor_stages: int,
    critic_stages: int,
    micro_batches: int,
    actor_forward: float,
    critic_forward: float,
    *,
    actor_backward: float | None = None,
    critic_backward: float | None = None,
    actor_activation: float = 1.0,
    critic_activation: float | None = None,
    communication: float = 0.0,
    mini_batches: int = 1,
    memory_limit: float | None = None,
) -> ScheduleProblem:
    """A problem of uniform stages in the terms of RLHFuse's Table 3.

    Forward times and activations describe a stage if both models have max(actor_stages, critic_stages) stages. A model
    with half as many stages has stages that are twice as long and twice as large. `micro_batches` counts the actor's
    micro-batches per pipeline. The critic's number follows from K1 * M1 = K2 * M2. Backward defaults to twice forward.
    The critic's activation defaults to the actor's activation, in proportion to the forward times."""
    for name, value in (
        ("actor stages", actor_stages),
        ("critic stages", critic_stages),
        ("micro-batches", micro_batches),
    ):
        if value < 1:
            raise ProblemError(f"{name} is {value}; it must be at least 1")
    ranks = max(actor_stages, critic_stages)
    for name, stages in (("actor", actor_stages), ("critic", critic_stages)):
        if ranks % stages:
            other = "critic" if name == "actor" else "actor"
            raise ProblemError(
                f"the {name}'s {stages} pipeline stages do not divide the {other}'s {ranks}; "
                f"use {_nearest_divisor(ranks, stages)} or another divisor of {ranks}"
            )
    k1, k2 = ranks // actor_stages, ranks // critic_stages
    if k1 * micro_batches % k2:
        raise ProblemError(
            f"the actor's {micro_batches} micro-batches cannot be divided among the critic's {k2} pipelines of "
            f"{critic_stages} stages; use a multiple of {k2 // math.gcd(k1, k2)}"
        )
    if critic_activation is None:
        critic_activation = actor_activation * (critic_forward / actor_forward if actor_forward else 1.0)

    def model(name: str, stages: int, k: int, count: int, f: float, b: float | None, a: float) -> ModelPipelines:
        return ModelPipelines(name, stages, count, f * k, (2 * f if b is None else b) * k, a * k, k)

    return ScheduleProblem(
        (
            model("actor", actor_stages, k1, micro_batches, actor_forward, actor_backward, actor_activation),
            model(
                "critic",
                critic_stages,
                k2,
                k1 * micro_batches // k2,
                critic_forward,
                critic_backward,
                critic_activation,
            ),
        ),
        communication,
        mini_batches,
        memory_limit,
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))


def _check(problem: ScheduleProblem) -> None:
    first, second = problem.models[0], problem.models[-1]
    if len(problem.models) not in (1, 2):
        raise ProblemError(f"a problem has {len(problem.models)} models; it needs one or two")
    for m in problem.models:
        counts = {"stages": m.stages, "pipelines": m.pipelines, "micro-batches": m.micro_batches, "parts": m.parts}
        for what, count in counts.items():
            if count < 1:
                raise ProblemError(f"{m.name} has {count} {what}; it needs at least 1")
    if len(problem.models) == 2 and first.name == second.name:
        raise ProblemError(f"both models are called {first.name}; give them different names")
    if problem.mini_batches < 1:
        raise ProblemError(f"mini-batches is {problem.mini_batches}; it must be at least 1")
    if len(problem.models) == 1 and first.first:
        raise ProblemError(f"{first.name} is alone but begins at rank {first.first}; it must begin at rank 0")
    if first.ranks != second.ranks and (first.first, second.first) != (0, first.ranks.stop):
        raise ProblemError(
            f"{first.name}'s {first.pipelines} pipelines of {first.stages} stages and {second.name}'s "
            f"{second.pipelines} of {second.stages} do not occupy the same ranks ({first.stages * first.pipelines} and "
            f"{second.stages * second.pipelines})"
        )
    try:
        edges = problem.latencies
    except ValueError:
        shape = np.shape(problem.communication)
        raise ProblemError(
            f"communication has the shape {shape}; {problem.ranks} ranks need one number or a square"
        ) from None
    if not (np.isfinite(edges) & (edges >= 0)).all():
        worst = float(edges.min()) if np.isfinite(edges).all() else math.inf
        raise ProblemError(f"communication is {worst:g}; it must be 0 or more and finite")
    for index, m in enumerate(problem.models):
        _check_values(problem, index, m)
    limit = problem.memory_limit
    if limit is None or limit >= problem.least_memory * (1 - 1e-9):
        return
    kinds = ((1, False), (2, False), (2, True), (3, True), (4, False), (4, True))
    least = min(problem.least_memory_of(chunks, loop) for chunks, loop in kinds)
    if not limit >= least * (1 - 1e-9):
        raise ProblemError(
            f"a memory limit of {limit:g} is below what any schedule needs: one micro-batch's activations alone take "
            f"{least:g} on a rank, which is the least limit possible"
        )


def _check_values(problem: ScheduleProblem, index: int, m: ModelPipelines) -> None:
    for field, lowest in (("forward", "above 0"), ("backward", "above 0"), ("activation", "0 or more")):
        try:
            values = problem.along(index, field, m.parts)
        except ValueError as error:
            shape = (m.pipelines, m.stages * m.parts, m.micro_batches * problem.mini_batches)
            raise ProblemError(f"{m.name}'s {field} times do not broadcast to {shape}: {error}") from None
        bad = ~np.isfinite(values) | (values < 0 if field == "activation" else values <= 0)
        if bad.any():
            raise ProblemError(f"{m.name}'s {field} is {values[bad][0]:g}; it must be {lowest}")
    first, second = (problem.along(index, field, m.parts) for field in ("input_gradient", "weight_gradient"))
    if not ((first > 0) & (second > 0)).all():
        raise ProblemError(f"{m.name}'s input_gradient must be above 0 and, if alone, below its backward time")
    if not m.optimizer_step >= 0:
        raise ProblemError(f"{m.name}'s optimizer_step is {m.optimizer_step}; it must be 0 or more")


def serial_memory(problem: ScheduleProblem) -> float:
    """The peak activation memory of a rank under serial 1F1B. The first stage holds min(M, pp) micro-batches."""
    peak = 0.0
    for index, m in enumerate(problem.models):
        sizes = problem.array(index, "activation")
        for rank in m.ranks:
            alive = min(m.micro_batches, m.stages - (rank - m.first) % m.stages)
            peak = max(peak, float(np.convolve(sizes[rank], np.ones(alive), "valid").max()))
    return peak
