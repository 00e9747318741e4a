"""Seconds of one share of a task, by the rooflines of `dovetail.planner.timing`; what repeats is worked out once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import numpy as np

from dovetail.planner.interstage.profile import SATURATED
from dovetail.planner.iteration.generation import Floats, Servers, expected_longest, mean, quantiles
from dovetail.planner.iteration.system import System
from dovetail.planner.memory.training import ITEMSIZE
from dovetail.planner.placement.candidate import Share
from dovetail.planner.placement.workload import Workload
from dovetail.planner.shape import Head, ModelShape
from dovetail.planner.timing import BATCHES, Cluster, Constants, all_gather, decode_step, forward

# An optimizer step reads float32 masters, two moments and gradients, and writes all but the last.
OPTIMIZER_BYTES = 28
CHUNK = 16
# Of a scorer's pass, at most, over its stages (dovetail.rollout.scoring.MAX_TOKENS).
PASS_TOKENS = 8192


@lru_cache(maxsize=32768)
def _origin(pp: int, tp: int, dp: int, micro_batch: int, fsdp: int, recompute: bool, offload: bool) -> Share:
    return Share("", 0, pp, tp, dp, micro_batch, fsdp, recompute, offload)  # type: ignore[arg-type]


def origin(share: Share) -> Share:
    """The same wherever in a pool it is: costs depend on the layout, so what is known of it is known everywhere."""
    return _origin(share.pp, share.tp, share.dp, share.micro_batch, share.fsdp, share.recompute, share.offload)


P = ParamSpec("P")
R = TypeVar("R")


def _placed_at_origin(function: Callable[P, R]) -> Callable[P, R]:
    """`function` once for each layout, wherever in a pool its share is."""
    known = lru_cache(maxsize=32768)(function)

    @wraps(function)
    def placed(*args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs  # what is given by name would be another key of the cache
        return known(*(origin(a) if isinstance(a, Share) else a for a in args))  # type: ignore[arg-type]

    return placed


def gathering(shape: ModelShape, head: Head, cluster: Cluster, share: Share, c: Constants) -> float:
    """Seconds in which a ZeRO-3 share gathers all weights of a stage, layer by layer; else 0."""
    if share.fsdp != 3 or share.dp == 1:
        return 0.0
    size = shape.parameters(head) * ITEMSIZE[cluster.gpu.dtype] / (share.pp * share.tp)
    layers = max(1, shape.layers // share.pp)
    return all_gather(size, share.dp, cluster.ring(share.dp, share.tp), c) + (layers - 1) * c.collective_seconds


@lru_cache(maxsize=8192)
def decode_steps(
    shape: ModelShape, cluster: Cluster, tp: int, context: float, gather: float, most: int, c: Constants
) -> tuple[Floats, int]:
    """(most + 1,) seconds of a step with 0 (as 1) to `most` samples, and BS_max. `gather`: seconds to gather weights
    before each step."""
    gpu = cluster.gpu
    points = [*(n for n in BATCHES if n < most), most]
    seconds = [decode_step(shape, n, context, gpu, gpu.dtype, tp, c) + gather for n in points]
    steps: Floats = np.interp(np.arange(most + 1), points, seconds)
    steps.setflags(write=False)
    return steps, max(1, int(np.searchsorted(steps, SATURATED * steps[1], "right")) - 1)


@_placed_at_origin
def servers(share: Share, cluster: Cluster, work: Workload, room: int, system: System, c: Constants) -> Servers:
    """A generation share's, with `room` tokens of KV cache each."""
    shape, gpu = work.actor, cluster.gpu
    prompt, response = mean(work.prompt), mean(work.response)
    gather = gathering(shape, "lm", cluster, share, c)
    steps, saturation = decode_steps(
        shape, cluster, share.tp, prompt + response / 2, gather, min(work.batch, system.max_samples), c
    )
    if share.pp > 1:
        steps, saturation = _staged(steps, share, cluster, shape, c), saturation * share.pp
    tokens = CHUNK * (prompt + response)
    prefill = max(forward(shape, "lm", tokens, prompt, gpu, gpu.dtype, share.tp, c) / share.pp, gather) / tokens
    moved = shape.kv_bytes(ITEMSIZE[gpu.dtype], share.tp) / (share.pp * c.link * cluster.network)
    return Servers(share.dp, steps, prefill, room, saturation, min(prefill, moved))


def _staged(steps: Floats, share: Share, cluster: Cluster, shape: ModelShape, c: Constants) -> Floats:
    """With pp stages: pp groups of samples follow each other, each with a pp-th of them, so that a step takes all of
    them as long as one group takes through all stages, and the messages between these."""
    parts = -(-np.arange(len(steps)) // share.pp)
    sizes = parts * shape.hidden * ITEMSIZE[cluster.gpu.dtype]
    hop = c.collective_seconds + sizes / (c.link * cluster.link(share.pp * share.tp))
    staged: Floats = steps[parts] + share.pp * hop
    staged.setflags(write=False)
    return staged


@lru_cache(maxsize=8192)
def pass_seconds(
    shape: ModelShape, head: Head, share: Share, cluster: Cluster, tokens: float, context: float, c: Constants
) -> tuple[float, float, float]:
    """Of a forward pass of one micro-batch of samples of `tokens` each, that attend to `context`: its seconds in the
    slowest stage, those of gathering that stage's weights (which go on at the same time), and those of sending a
    boundary tensor on."""
    gpu = cluster.gpu
    whole = forward(shape, head, share.micro_batch * tokens, context, gpu, gpu.dtype, share.tp, c)
    slowest = -(-shape.layers // share.pp) / shape.layers
    hop = 0.0
    if share.pp > 1:
        boundary = share.micro_batch * tokens * shape.hidden * ITEMSIZE[gpu.dtype]
        hop = c.collective_seconds + boundary / (c.link * cluster.link(share.gpus))
    return whole * slowest, gathering(shape, head, cluster, share, c), hop


def shared_prompt(work: Workload, stages: int) -> float:
    """Part of a sample's prompt that a scorer computes for it: a pass has each prompt once, for all its samples in it
    (`dovetail.rollout.samples.packs`)."""
    prompt, response = mean(work.prompt), mean(work.response)
    together = max(1, int((PASS_TOKENS / stages - prompt) // response))
    return -(-work.per_prompt // together) / work.per_prompt


def inference_seconds(
    shape: ModelShape, head: Head, share: Share, cluster: Cluster, work: Workload, c: Constants, scored: bool = True
) -> float:
    """Of a forward pass over all samples; `scored`: by scorers, which compute a prompt once for its samples."""
    prompt, response = mean(work.prompt), mean(work.response)
    tokens = response + prompt * (shared_prompt(work, share.pp) if scored else 1.0)
    stage, gather, hop = pass_seconds(shape, head, origin(share), cluster, tokens, (prompt + response) / 2, c)
    count = -(-work.batch // (share.dp * share.micro_batch))
    return (count + share.pp - 1) * max(stage, gather) + (share.pp - 1) * hop


@dataclass(frozen=True)
class Step:
    """One optimizer step of a model in a share. `forward`, `backward`: seconds of a micro-batch in the slowest stage;
    `hop`: from stage to stage; `fixed`: collectives, optimizer and its swap. `skew`: the longest micro-batch over the
    mean one: a pipeline fills and drains at the pace of the longest."""

    stages: int
    micro_batches: int
    forward: float
    backward: float
    hop: float
    fixed: float
    skew: float = 1.0

    @property
    def both(self) -> float:
        return self.forward + self.backward

    @property
    def work(self) -> float:
        """Of the slowest stage, without bubbles."""
        return self.micro_batches * self.both

    @property
    def hops(self) -> float:
        """Waiting for boundary tensors: there and back for every pp micro-batches, as a 1F1B stage has so many."""
        return 2 * (self.stages - 1) * self.hop * max(1.0, self.micro_batches / self.stages)

    @property
    def alone(self) -> float:
        """1F1B: (M + pp - 1)(f + b)."""
        return self.work + self.bubble + self.hops + self.fixed

    @property
    def bubble(self) -> float:
        return (self.stages - 1) * self.both * self.skew


@lru_cache(maxsize=32768)
@_placed_at_origin
def training_step(
    shape: ModelShape,
    head: Head,
    share: Share,
    cluster: Cluster,
    work: Workload,
    trained: float,
    system: System,
    c: Constants,
) -> Step:
    """`trained`: share of the parameters that have gradients (LoRA: few). A backward is twice a forward, with
    recomputation three times; the micro-batches of the rank with most tokens count (`straggling`)."""
    tokens = mean(work.prompt) + mean(work.response)
    mini = min(work.mini_batch, work.batch)
    stage, gather, hop = pass_seconds(shape, head, share, cluster, tokens, tokens / 2, c)
    stage *= straggling(work, share.dp, system.balanced)
    gpu, pp, dp, tp = cluster.gpu, share.pp, share.dp, share.tp
    size = shape.parameters(head) / (pp * tp)
    ring = cluster.ring(dp, tp)
    reduced = all_gather(system.gradient_bytes * trained * size, dp, ring, c)
    forwards, backwards = max(stage, gather), (3 if share.recompute else 2) * stage
    fixed = 0.0
    if share.fsdp == 3:
        backwards = max(backwards, gather + reduced)
    elif dp > 1:
        gathered = all_gather(ITEMSIZE[gpu.dtype] * size, dp, ring, c)
        fixed = reduced + (gathered if share.fsdp else 0.0)
        if share.fsdp == 0:
            fixed += reduced  # gradients come back whole
    owners = dp if share.fsdp else 1
    stepped = trained * size / owners
    if share.offload and system.host_step:
        moved = system.gradient_bytes + ITEMSIZE[gpu.dtype]
        fixed += (moved + OPTIMIZER_BYTES) * stepped / (c.link * gpu.pcie)
    else:
        fixed += OPTIMIZER_BYTES * stepped / (c.memory * gpu.memory_bandwidth)
        fixed += 2 * 8 * stepped / (c.link * gpu.pcie) if share.offload else 0.0
    count = -(-mini // (dp * share.micro_batch))
    # Of ranks with equal work the one with the longest sample of all ends last; else the one with most work does.
    longest = expected_longest(work.response, mini if system.balanced else -(-mini // dp)) + mean(work.prompt)
    skew = 1 + max(0.0, longest / tokens - 1) / share.micro_batch
    return Step(pp, count, forwards, backwards, hop, fixed, skew)


@lru_cache(maxsize=8192)
def straggling(work: Workload, dp: int, balanced: bool) -> float:
    """Tokens of the rank with most of a mini-batch over those of the mean.

    Dealt at random the most of dp sums of k samples is about 1 + cv sqrt(2 ln dp / k) times their mean; dealt by length
    it is 1, or where a rank's share is less than the longest sample, that sample."""
    mini = min(work.mini_batch, work.batch)
    each = max(1.0, mini / dp)
    if dp == 1:
        return 1.0
    tokens = quantiles(work.response, mini) + mean(work.prompt)
    average = float(tokens.mean())
    most = (expected_longest(work.response, mini) + mean(work.prompt)) / average
    longest = max(1.0, most / each)
    if balanced:
        return longest
    spread = float(tokens.std()) / average
    return min(max(longest, 1 + spread * math.sqrt(2 * math.log(dp) / each)), max(1.0, most))


def together(actor: Step, critic: Step, schedule: str) -> float:
    """Seconds of one optimizer step of both models on the same GPUs.

    TimeSharing: PUZZLE's equation 1, M (T1 + T2) + (P - 1) max(T1, T2), T = f + b. Fused: RLHFuse's lower bound
    (section 7.3), which the search of `dovetail.pipelines` reaches or nearly so: on each position the earliest
    arrival, all work, the least that then remains, and each model alone. Serial: one after the other."""
    serial = actor.alone + critic.alone
    if schedule == "Serial" or max(actor.stages, critic.stages) == 1:
        return serial
    rest = actor.hops + critic.hops + actor.fixed + critic.fixed
    if schedule == "TimeSharing":
        return min(serial, actor.work + critic.work + max(actor.bubble, critic.bubble) + rest)
    positions = math.lcm(actor.stages, critic.stages)
    bound = max(s.work + s.bubble for s in (actor, critic))
    for x in range(positions):
        i, j = x % actor.stages, critic.stages - 1 - x % critic.stages
        arrival = min(i * actor.forward * actor.skew, j * critic.forward * critic.skew)
        left = min(i * actor.backward * actor.skew, j * critic.backward * critic.skew)
        bound = max(bound, arrival + actor.work + critic.work + left)
    return min(serial, bound + max(actor.hops, critic.hops) + actor.fixed + critic.fixed)
