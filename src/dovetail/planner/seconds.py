"""The model of time: the seconds of an iteration of a candidate on GPUs, in closed form, with one set of constants. The
search asks for them thousands of times, so figures that it asks for repeatedly are cached.

Figures that a run or `dovetail profile` has measured take precedence. `dovetail.cli.simulated_iteration` plays the same
iteration event by event, and a test compares the two. Symbols: F is the peak FLOP/s of the dtype, W the memory's bytes
per second, b the bytes of a number, and p the parameters. tp GPUs share one server or pipeline stage."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from statistics import NormalDist, fmean

from dovetail.fusion.curve import interpolate
from dovetail.fusion.lengths import Lengths
from dovetail.fusion.profile import SATURATED, StageProfile
from dovetail.gpus.gpu_products import GPU
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.hashing import known_share
from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.manifest.types import Dtype, LoRA, Parallelism
from dovetail.planner.candidate import INFERENCE, TRAINING, Candidate, Share, Task
from dovetail.planner.memory import ITEMSIZE, Footprint, GPUMemory, GPUMemoryModel, Training, trained_parameters
from dovetail.planner.workload import Workload
from dovetail.protocol.budgets import SCORER_TOKENS

Floats = tuple[float, ...]
# With more samples than this, fewer quantiles are computed, and each stands for several samples.
EXACT = 512


@dataclass(frozen=True, eq=False)
class Servers:
    """`count` equal vLLM servers. `steps`: the seconds of a decode step with 0, 1, ... samples. `prefill`:
    seconds per token. `room`: tokens of the KV cache. `saturation`: the largest batch whose step takes almost as long
    as that of one sample (BS_max). `arrival`: seconds per token to bring a sample from another server, by a prefill or
    by a transfer of its KV cache."""

    count: int
    steps: Floats
    prefill: float
    room: int
    saturation: int
    arrival: float

    def slots(self, tokens: float) -> int:
        """The number of samples of `tokens` tokens that a server generates at once. It is at least 1."""
        return max(1, min(len(self.steps) - 1, int(self.room // max(1.0, tokens))))

    @cached_property
    def profile(self) -> StageProfile:
        """One of them, for the simulator."""
        steps = tuple(enumerate(self.steps))[1:]
        most, moving = len(steps), self.arrival
        return StageProfile(
            steps, self.prefill, 0.0, max_samples=most, kv_tokens=self.room, kv_transfer_seconds_per_token=moving
        )


@dataclass(frozen=True)
class GenerationTimes:
    """`seconds`: when generation ends. `gathered`: when the tail moved to `destinations` of the `servers` servers. The
    other servers are free from then on. Without a migration it is the end. Both are seconds since generation began."""

    seconds: float
    gathered: float
    destinations: int
    servers: int


def generate(servers: Sequence[Servers], work: Workload, migration: float | None = None) -> GenerationTimes:
    """The times of generating a batch. The servers share the samples by their speed. `migration`: the tail gathers when
    this fraction of the samples is left. None: it does not gather."""
    instances = sum(s.count for s in servers)
    dealt = deal(servers, work.batch)
    end = max(_curve(s, n, work)[1][-1] for s, n in zip(servers, dealt, strict=True))
    left = 0 if migration is None else int(migration * work.batch)
    fastest = servers[max(range(len(servers)), key=lambda i: dealt[i])]
    destinations = _destinations(fastest, instances, left, work.longest)
    if not left or destinations is None:
        return GenerationTimes(end, end, instances, instances)
    # The samples that are left are the longest of the batch. They gather when the next shorter one is done.
    done = quantiles(work.response, work.batch)[-left]
    begun = max(_reached(s, n, work, done) for s, n in zip(servers, dealt, strict=True))
    return GenerationTimes(begun + _tail(fastest, work, left, destinations), begun, destinations, instances)


def deal(servers: Sequence[Servers], batch: int) -> list[int]:
    """The number of samples that one server of each kind gets, in proportion to its speed."""
    share = max(1, -(-batch // sum(s.count for s in servers)))
    speeds = [s.count / s.steps[min(share, len(s.steps) - 1)] for s in servers]
    return [max(1, math.ceil(batch * speed / sum(speeds) / s.count)) for s, speed in zip(servers, speeds, strict=True)]


def _destinations(server: Servers, instances: int, left: int, longest: int) -> int | None:
    """The number of servers for the tail, m = max(R / BS_max, R KV / M), as in RLHFuse section 4.2. None if no server
    would be free. R is `left`, KV the cache of `longest` tokens, and M a server's memory for it."""
    slots = max(1, min(server.saturation, server.room // max(1, longest)))
    wanted = -(-left // slots)
    return wanted if wanted < instances else None


def _curve(server: Servers, samples: int, work: Workload) -> tuple[Floats, Floats]:
    """The lengths of the last n samples of a server, (n,), and when each is done, (n,) seconds. n is the number of
    samples that the server holds at once."""
    slots = min(samples, server.slots(work.tokens))
    lengths = _of_server(work.response, slots, work.batch)
    before = (1.0, *lengths)  # the prefill makes the first token
    steps = server.steps[slots:0:-1]
    parts = [(there - here) * step for here, there, step in zip(before, lengths, steps, strict=False)]
    waiting = samples - slots
    begun = waiting * work.response.mean / slots * server.steps[slots] + samples * work.prompt.mean * server.prefill
    return lengths, tuple(accumulate(parts, initial=begun))[1:]


def _reached(server: Servers, samples: int, work: Workload, tokens: float) -> float:
    """The seconds until a server has generated `tokens` tokens of every sample that has so many."""
    lengths, ends = _curve(server, samples, work)
    first = ends[0] - (lengths[0] - 1.0) * server.steps[len(lengths)]
    return interpolate(tokens, (1.0, *lengths), (first, *ends))


def _tail(server: Servers, work: Workload, left: int, destinations: int) -> float:
    """The seconds from the gathering to the last token. Each destination takes its part of the tail, prefills the
    samples that came, and goes on."""
    longest = list(quantiles(work.response, work.batch)[-left:])
    longest[-1] = max(longest[0], expected_longest(work.response, work.batch))
    done = longest[0]
    mine = sorted(length - done for length in longest[::-1][::destinations])
    slots = min(len(mine), len(server.steps) - 1)
    came = (1 - 1 / max(1, destinations)) if destinations > 1 else 1.0
    moved = len(mine) * came * (work.prompt.mean + done) * server.arrival
    # If a destination has more samples than slots, the others wait until a slot is free.
    over = max(1.0, len(mine) / slots)
    steps = (server.steps[min(count, slots)] for count in range(len(mine), 0, -1))
    spent = math.fsum((there - here) * step for here, there, step in zip((0.0, *mine), mine, steps, strict=False))
    return moved + over * spent


@lru_cache(maxsize=4096)
def quantiles(lengths: Lengths, count: int) -> Floats:
    """The `count` lengths of `Lengths.quantiles`."""
    few = min(count, EXACT)
    found = lengths.quantiles(few)
    return tuple(float(found[i * few // count]) for i in range(count))


@lru_cache(maxsize=4096)
def _of_server(lengths: Lengths, samples: int, batch: int) -> Floats:
    """The lengths of one server's `samples` samples. They are quantiles, but the longest one is that of the
    whole batch, because one server has it."""
    *others, last = quantiles(lengths, samples)
    return (*others, max(last, expected_longest(lengths, batch)))


@lru_cache(maxsize=4096)
def expected_longest(lengths: Lengths, samples: int) -> float:
    """The mean length of the longest of n samples. It is the mean of Q(u^(1/n)), where u is uniform and Q is the
    quantile function."""
    normal = NormalDist()
    levels = (((i + 0.5) / 64) ** (1 / samples) for i in range(64))
    return fmean(lengths.exact(normal.inv_cdf(level)) for level in levels)


# ------------------------------------------------------------ inference beside it


def exposed_inference(
    candidate: Candidate, batch: int, generated: GenerationTimes, scored: Sequence[tuple[Task, Share, float]]
) -> float:
    """The seconds of inference that are left after generation, on the busiest GPU. Tasks that share a GPU take turns.

    With fusion, shares on GPUs of their own score all samples but the last ones during generation. Shares on the
    servers' GPUs score after the tail has gathered, on the GPUs that are free by then. `batch`: the samples of an
    iteration. `scored`: each inference task's shares with the seconds of their part of the batch."""
    most = 0.0
    for _, corner, _ in scored:
        # The sum can only grow at a GPU where a share begins.
        here = [each for each in scored if each[1].pool == corner.pool and corner.first in each[1].range]
        total = sum(seconds for _, _, seconds in here)
        if candidate.migration is None:
            most = max(most, total)
            continue
        early = [(share, seconds) for task, share, seconds in here if task != "actor_training"]
        # A pass over the last samples always remains.
        rest = sum(seconds * min(1.0, share.batch_shares * share.micro_batch / batch) for share, seconds in early)
        most = max(most, rest, total - _hidden(candidate, generated, early))
    return most


def _hidden(candidate: Candidate, generated: GenerationTimes, tasks: Sequence[tuple[Share, float]]) -> float:
    """The seconds of one GPU's tasks that are done before generation ends. A task on a server's GPUs works when the
    server is free. Any set of servers is equally likely to get the tail."""
    serving = [seconds for share, seconds in tasks if any(share.overlaps(other) for other in candidate.generation)]
    hidden = min(generated.seconds, sum(seconds for _, seconds in tasks) - sum(serving))
    left = min(generated.seconds - generated.gathered, generated.seconds - hidden)
    return hidden + min(sum(serving), left * (1 - generated.destinations / generated.servers))


# The number of samples that vLLM prefills together.
PREFILLED = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
# These fractions of the peaks are assumed, for all GPUs and models. MATRIX is the fraction of F in large matrix
# products, MEMORY that of W while weights and KV cache are read, and LINK that of a link's bandwidth. With the first
# two, training steps on an H200 were predicted within 8 % (docs/performance.md).
MATRIX = 0.5
MEMORY = 0.65
LINK = 0.8
# The times for launches and latencies, for one block in a decode step, and for one collective or message.
LAYER_SECONDS = 20e-6
COLLECTIVE_SECONDS = 15e-6
# The host's work, for which the GPU waits if a model is small. STEP_SECONDS is the least time of a step of vLLM
# (scheduling, inputs, sampling, output). LAUNCH_SECONDS is the time of each kernel that PyTorch launches, and LAUNCHES
# their number for a block in a forward pass. The launches are counted
# (tests/unit/planner/test_planner_launches.py). Both times are assumed.
STEP_SECONDS = 2.5e-3
LAUNCH_SECONDS = 5e-6
LAUNCHES = 36


def all_reduce(size: float, ranks: int, bandwidth: float) -> float:
    """The seconds of a ring all-reduce, in which each of n ranks sends and receives 2 (n - 1) / n of `size` bytes.
    `bandwidth`: bytes per second."""
    return all_gather(2 * size, ranks, bandwidth)


def all_gather(size: float, ranks: int, bandwidth: float) -> float:
    """The seconds of a ring all-gather, in which each of n ranks receives (n - 1) / n of `size` bytes. A reduce-scatter
    takes as long. `bandwidth`: bytes per second."""
    if ranks == 1:
        return 0.0
    return COLLECTIVE_SECONDS + (ranks - 1) / ranks * size / (LINK * bandwidth)


def forward(shape: ModelShape, head: Head, tokens: float, context: float, gpu: GPU, tp: int = 1) -> float:
    """The seconds of a forward pass over `tokens` positions, which attend to `context` tokens on average. It is the
    longest of arithmetic, reading the weights, and launching kernels. With tp each block adds two all-reduces."""
    b = ITEMSIZE[gpu.dtype]
    arithmetic = shape.forward_flops(tokens, context, head) / (tp * MATRIX * gpu.flops[gpu.dtype])
    reading = shape.read_parameters(tokens, head) * b / (tp * MEMORY * gpu.memory_bandwidth)
    exchange = 2 * shape.layers * all_reduce(tokens * shape.hidden * b, tp, gpu.peer)
    launching = shape.layers * LAUNCHES * LAUNCH_SECONDS
    return max(arithmetic, reading, launching) + exchange


def decode_step(shape: ModelShape, batch: int, context: float, gpu: GPU, tp: int = 1) -> float:
    """The seconds of a decode step, which makes one token for each of `batch` samples with `context` tokens.

    Weights and KV cache are read once, which takes (p b + batch x context x KV bytes) / W. Only experts that are used
    are read. If the arithmetic takes longer, it counts. The step takes at least the host's time."""
    b = ITEMSIZE[gpu.dtype]
    read = shape.read_parameters(batch) * b / tp + batch * context * shape.kv_bytes(b, tp)
    memory = read / (MEMORY * gpu.memory_bandwidth)
    arithmetic = shape.forward_flops(batch, context) / (tp * MATRIX * gpu.flops[gpu.dtype])
    exchange = 2 * shape.layers * all_reduce(batch * shape.hidden * b, tp, gpu.peer)
    return max(max(memory, arithmetic) + shape.layers * LAYER_SECONDS + exchange, STEP_SECONDS)


def gathering(shape: ModelShape, head: Head, pool: Pool, share: Share) -> float:
    """The seconds in which a ZeRO-3 share gathers all weights of a stage, layer by layer. 0 for other shares."""
    if not share.gathers:
        return 0.0
    size = shape.parameters(head, share.ep) * ITEMSIZE[pool.gpu.dtype] / (share.pp * share.tp)
    layers = max(1, shape.layers // share.pp)
    return all_gather(size, share.shards, pool.ring(share.shards, share.tp)) + (layers - 1) * COLLECTIVE_SECONDS


@lru_cache(maxsize=8192)
def decode_steps(
    shape: ModelShape, pool: Pool, tp: int, context: float, gather: float, most: int
) -> tuple[Floats, int]:
    """The seconds of a decode step with 0 (as 1) to `most` samples, and BS_max. `gather`: the seconds to gather weights
    before each step."""
    gpu = pool.gpu
    points = [*(n for n in BATCHES if n < most), most]
    seconds = [decode_step(shape, n, context, gpu, tp) + gather for n in points]
    steps = tuple(interpolate(samples, points, seconds) for samples in range(most + 1))
    return steps, max(1, bisect_right(steps, SATURATED * steps[1]) - 1)


def _staged(steps: Floats, share: Share, pool: Pool, shape: ModelShape) -> Floats:
    """The seconds of a decode step with pp stages. The samples are in pp groups that follow each other. A step of all
    groups takes as long as one group takes through all stages, with the messages between them."""
    size, link = shape.hidden * ITEMSIZE[pool.gpu.dtype], LINK * pool.link(share.pp * share.tp)
    parts = (-(-samples // share.pp) for samples in range(len(steps)))
    return tuple(steps[part] + share.pp * (COLLECTIVE_SECONDS + part * size / link) for part in parts)


def exchange(shape: ModelShape, tokens: float, share: Share, pool: Pool) -> float:
    """The seconds in which the ranks that share tokens, `tokens` each, exchange queries, keys, values and outputs in
    all layers, and those that divide experts exchange tokens and outputs. Each keeps the part of its own heads or
    experts."""
    seconds, b = 0.0, ITEMSIZE[pool.gpu.dtype]
    if share.cp > 1:
        keys = max(shape.keys, shape.keys // shape.kv_heads * share.cp * share.tp)  # on several ranks if they are few
        size = tokens * 2 * (shape.queries + keys) / share.tp * b
        moved = (share.cp - 1) / share.cp * size / (LINK * pool.ring(share.cp, share.tp))
        seconds += shape.layers * (4 * COLLECTIVE_SECONDS + moved)
    if share.ep > 1:
        size = tokens * 2 * shape.chosen * shape.hidden * b
        moved = (share.ep - 1) / share.ep * size / (LINK * pool.ring(share.ep, share.tp))
        seconds += shape.layers * shape.sparse * (3 * COLLECTIVE_SECONDS + moved)  # counts come first
    return seconds


@lru_cache(maxsize=8192)
def pass_seconds(
    shape: ModelShape, head: Head, share: Share, pool: Pool, tokens: float, context: float
) -> tuple[float, float, float]:
    """Three parts of a forward pass of one micro-batch, in seconds: its slowest stage, gathering that stage's weights
    at the same time, and sending the boundary tensor to the next stage. The samples have `tokens` tokens,
    which attend to `context` tokens."""
    gpu = pool.gpu
    own = share.micro_batch * tokens / share.cp
    whole = forward(shape, head, own, context, gpu, share.tp) + exchange(shape, own, share, pool)
    slowest = -(-shape.layers // share.pp) / shape.layers
    hop = 0.0
    if share.pp > 1:
        boundary = own * shape.hidden * ITEMSIZE[gpu.dtype]
        hop = COLLECTIVE_SECONDS + boundary / (LINK * pool.link(share.gpus))
    return whole * slowest, gathering(shape, head, pool, share), hop


def shared_prompt(work: Workload, stages: int) -> float:
    """The fraction of a sample's prompt that a scorer computes for it. A pass has each prompt once, for all its
    samples (`dovetail.rollout.scoring.packed_samples.packs`)."""
    prompt, response = work.prompt.mean, work.response.mean
    together = max(1, int((SCORER_TOKENS / stages - prompt) // response))
    return -(-work.per_prompt // together) / work.per_prompt


@dataclass(frozen=True)
class StepTimes:
    """The times of one optimizer step of a model in a share, in seconds.

    `forward`, `backward`: a micro-batch in the slowest stage. `hop`: a message from stage to stage. `fixed`:
    collectives, the optimizer, and loading its moments from host memory. `skew`: the length of the longest micro-batch
    over that of the mean one. The longest one decides how fast a pipeline fills and drains. `samples`: the mean number
    of samples of a micro-batch."""

    stages: int
    micro_batches: int
    forward: float
    backward: float
    hop: float
    fixed: float
    skew: float = 1.0
    samples: float = 1.0

    @property
    def both(self) -> float:
        return self.forward + self.backward

    @property
    def work(self) -> float:
        """The seconds of the slowest stage, without bubbles."""
        return self.micro_batches * self.both

    @property
    def hops(self) -> float:
        """The seconds of waiting for boundary tensors. For every pp micro-batches they go there and back once."""
        return 2 * (self.stages - 1) * self.hop * max(1.0, self.micro_batches / self.stages)

    @property
    def alone(self) -> float:
        """The seconds of the step by 1F1B, (M + pp - 1)(f + b), with hops and fixed parts."""
        return self.work + self.bubble + self.hops + self.fixed

    @property
    def bubble(self) -> float:
        return (self.stages - 1) * self.both * self.skew


def together(
    actor: StepTimes, critic: StepTimes, schedule: str, filling: float | None = None, unsplit: bool = False
) -> float:
    """The seconds of one optimizer step of both models on the same ranks.

    Serial: the models run one after the other.
    TimeSharing: PUZZLE's equation 1, M (T1 + T2) + (P - 1) max(T1, T2), where T = f + b.
    Fused: RLHFuse's lower bound (section 7.3). The search of `dovetail.pipelines` reaches it almost or exactly. On each
    position it is the earliest arrival of work, plus all work there, plus the least time that remains afterwards. It is
    at least the time of each model alone.
    VShaped: the same bound with two half stages a rank. Work arrives and leaves in half the time, and a model alone has
    no bubbles. With `unsplit` backward passes are whole. Then no weight gradients fill the bubbles, and the search ends
    near the work of both models and half of the larger bubble.

    `filling`: a fused schedule takes TimeSharing's time, but only this fraction of the time for filling the pipeline.
    None: the bound is used."""
    serial = actor.alone + critic.alone
    if schedule == "Serial" or max(actor.stages, critic.stages) == 1:
        return serial
    rest = actor.hops + critic.hops + actor.fixed + critic.fixed
    if schedule == "TimeSharing":
        filling = 1.0
    if filling is not None:
        return min(serial, actor.work + critic.work + filling * max(actor.bubble, critic.bubble) + rest)
    positions = math.lcm(actor.stages, critic.stages)
    way = 0.5 if schedule == "VShaped" else 1.0
    bound = max(s.work + (s.bubble if way == 1.0 else 0.0) for s in (actor, critic))
    if schedule == "VShaped" and unsplit:
        bound = actor.work + critic.work + max(actor.bubble, critic.bubble) / 2
    for x in range(positions):
        i, j = x % actor.stages, critic.stages - 1 - x % critic.stages
        arrival = min(i * actor.forward * actor.skew, j * critic.forward * critic.skew)
        left = min(i * actor.backward * actor.skew, j * critic.backward * critic.skew)
        bound = max(bound, way * (arrival + left) + actor.work + critic.work)
    return min(serial, bound + max(actor.hops, critic.hops) + actor.fixed + critic.fixed)


# For each parameter a step reads its float32 master, two moments and gradient, and writes all but the gradient.
OPTIMIZER_BYTES = 28
# The most requests of a vLLM server at once.
MAX_SAMPLES = 256


@dataclass(frozen=True)
class Estimate:
    """`phases`: seconds by name, one after the other. `inference` is the part that fusion does not hide.
    `memory`: that of every GPU with a task. `problem`: why it cannot run, as one sentence. None if it can."""

    phases: Mapping[str, float]
    memory: tuple[GPUMemory, ...]
    problem: str | None = None

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class Option:
    """A share of a task, as if nothing else ran on its GPUs.

    `seconds`: the time of the task in an iteration. `footprint`: the bytes of one GPU. `problem`: why the share cannot
    run even alone. None if it can."""

    share: Share
    footprint: Footprint
    seconds: float = 0.0
    problem: str | None = None

    @property
    def need(self) -> float:
        """The bytes of one GPU, if nothing else runs there."""
        return self.footprint.need


class GPUCosts:
    """The costs of one workload on one inventory. `max_samples`: the most requests of a server at once.

    Seconds and bytes are of one iteration. Methods of a share raise KeyError for a pool that the inventory lacks."""

    gradient_bytes = 4  # bytes of a gradient that crosses the network

    def __init__(self, work: Workload, inventory: Inventory, max_samples: int = MAX_SAMPLES) -> None:
        self.work, self.inventory = work, inventory
        self.memory = GPUMemoryModel(work, inventory)
        self.max_samples = max_samples

    # ------------------------------------------------------------ for the search

    def estimate(self, candidate: Candidate) -> Estimate:
        """The estimate of a whole iteration. A candidate that does not fit is estimated as if it did.

        Raises KeyError for a pool that the inventory lacks."""
        used, rooms = self.memory.of(candidate)
        problem = next((m.explanation for m in used if not m.fits), None)
        for task, share in candidate.placed:
            if share.tp > self.inventory[share.pool].per_node:
                problem = f"{task} on {share} has tensor parallel ranks on several nodes of {share.pool}; lower tp"
        for share, room in rooms.items():
            problem = problem or self._no_room(share, room)
        longest = self.work.longest
        generated = self.generated([(s, max(rooms[s], longest)) for s in candidate.generation], candidate.migration)
        phases = {
            "generation": generated.seconds,
            "inference": exposed_inference(candidate, self.work.batch, generated, self.scoring(candidate)),
            "training": self.training(candidate),
            "transfer": self.transfer(candidate),
            "swap": self.swapped_in(candidate),
        }
        return Estimate(phases, used, problem)

    @known_share
    def option(self, task: Task, share: Share) -> Option:
        """The task as if this share did all of it, and nothing else ran on its GPUs."""
        mine = self.memory.footprint(task, share)
        if mine.need > self.inventory[share.pool].gpu.memory:
            return Option(share, Footprint(mine.need), problem=f"{task} on {self.memory.explanation(task, share)}")
        if task == "generation":
            seconds = self.generated([(share, max(mine.room, self.work.longest))], None).seconds
            return Option(share, mine, seconds + self.swap(task, share), self._no_room(share, mine.room))
        if task in TRAINING:
            return Option(share, mine, self.work.steps * self.step(task, share).alone)
        return Option(share, mine, self.inference(task, share) + self.swap(task, share))

    def _no_room(self, share: Share, room: int) -> str | None:
        """Why a server with `room` tokens of KV cache cannot generate. None if it can."""
        longest, there = self.work.longest, max(0, room)
        if room >= longest:
            return None
        return f"generation on {share} has room for {there} tokens of KV cache, but a sample may have {longest}"

    # ------------------------------------------------------------ generation and inference

    @known_share
    def servers(self, task: Task, share: Share, room: int) -> Servers:
        """The vLLM servers of a generation share, each with `room` tokens of KV cache."""
        work, pool = self.work, self.inventory[share.pool]
        shape, gpu = work.actor, pool.gpu
        prompt, response = work.prompt.mean, work.response.mean
        gather = gathering(shape, "lm", pool, share)
        most = min(work.batch, self.max_samples)
        steps, saturation = decode_steps(shape, pool, share.tp, prompt + response / 2, gather, most)
        if share.pp > 1:
            steps, saturation = _staged(steps, share, pool, shape), saturation * share.pp
        tokens = PREFILLED * (prompt + response)
        prefill = max(forward(shape, "lm", tokens, prompt, gpu, share.tp) / share.pp, gather) / tokens
        moved = shape.kv_bytes(ITEMSIZE[gpu.dtype], share.tp) / (share.pp * LINK * pool.network)
        return Servers(share.dp, steps, prefill, room, saturation, min(prefill, moved))

    def generated(self, shares: Sequence[tuple[Share, int]], migration: float | None) -> GenerationTimes:
        """The times of generation on these shares. Each comes with the tokens of KV cache of its servers."""
        each = [self.servers("generation", share, room) for share, room in shares]
        return generate(each, self.work, migration)

    def scoring(self, candidate: Candidate) -> list[tuple[Task, Share, float]]:
        """The shares of every inference task, with the seconds of their part of the batch. Shares divide the batch by
        their speed. The actor's training shares compute the old log-probabilities, unless these are folded."""
        found: list[tuple[Task, Share, float]] = []
        tasks: list[tuple[Task, tuple[Share, ...]]] = [(task, candidate.shares(task)) for task in INFERENCE]
        if not candidate.folded:
            tasks.append(("actor_training", candidate.actor_training))
        for task, shares in tasks:
            alone = [self.inference(task, share) for share in shares]
            if len(shares) == 1:
                found.append((task, shares[0], alone[0]))
            elif shares:
                together = 1 / sum(1 / seconds for seconds in alone)
                found += [(task, share, together) for share in shares]
        return found

    @known_share
    def inference(self, task: Task, share: Share) -> float:
        """The seconds of a forward pass over all samples. A scorer computes a prompt once for its samples, and a
        trainer computes it for each sample."""
        work, pool = self.work, self.inventory[share.pool]
        pool = pool.training if task in TRAINING else pool
        shape, head = work.needed(task)
        prompt, response = work.prompt.mean, work.response.mean
        tokens = response + prompt * (shared_prompt(work, share.pp) if task in INFERENCE else 1.0)
        samples = (
            work.samples_together(share.batch_shares, share.micro_batch)
            if task in TRAINING
            else float(share.micro_batch)
        )
        of_one = tokens * samples / share.micro_batch
        stage, gather, hop = pass_seconds(shape, head, share, pool, of_one, (prompt + response) / 2)
        count = math.ceil(work.batch / (share.batch_shares * samples) - 1e-9)
        return (count + share.pp - 1) * max(stage, gather) + (share.pp - 1) * hop

    # ------------------------------------------------------------ training

    def training(self, candidate: Candidate) -> float:
        """The seconds of all optimizer steps of actor and critic."""
        actor, critic = self.steps(candidate)
        if actor is None:
            return 0.0
        if critic is None:
            return self.work.steps * actor.alone
        mine, other = candidate.actor_training[0], candidate.critic_training[0]
        if not mine.overlaps(other):
            return self.work.steps * max(actor.alone, critic.alone)
        schedule = candidate.schedule if mine.same_ranks(other) else "Serial"
        return self.work.steps * together(actor, critic, schedule, unsplit=candidate.unsplit)

    def steps(self, candidate: Candidate) -> tuple[StepTimes | None, StepTimes | None]:
        """The times of an optimizer step of the actor and of the critic. None for one that is not trained."""
        actor, critic = candidate.actor_training, candidate.critic_training
        return (
            self.step("actor_training", actor[0]) if actor else None,
            self.step("critic_training", critic[0]) if critic and self.work.critic else None,
        )

    @known_share
    def step(self, task: Task, share: Share) -> StepTimes:
        """The times of an optimizer step of the model that a training task trains, by 1F1B.

        A backward pass takes twice as long as a forward pass, and three times with activation checkpointing. The
        micro-batches of the rank with most tokens count. Each but the first adds its gradients to those before. Weights
        are gathered and gradients reduced once in a step. Under ZeRO-3 this happens in each pass. Gradients are summed
        over pipelines once in a step."""
        work, pool = self.work, self.inventory[share.pool].training
        shape, head = work.needed(task)
        lora = work.lora(task)
        trained = 1.0 if lora is None else _trained(shape, head, lora.rank, tuple(lora.target_modules))
        tokens = work.prompt.mean + work.response.mean
        samples = work.samples_together(share.batch_shares, share.micro_batch)
        stage, gather, hop = pass_seconds(shape, head, share, pool, tokens * samples / share.micro_batch, tokens / 2)
        stage *= self.straggling(share.batch_shares)
        pp, dp, tp = share.pp, share.shards, share.tp
        size, ring = shape.parameters(head, share.ep) / (pp * tp), pool.ring(dp, tp)
        whole = shape.parameters(head) / (pp * tp)
        reduced = all_gather(self.gradient_bytes * trained * size, dp, ring)
        count = work.micro_batches(share.batch_shares, share.micro_batch)
        backwards = (3 if share.recompute else 2) * stage
        gathered = all_gather(ITEMSIZE[pool.gpu.dtype] * size, dp, ring)
        if share.gathers:
            backwards = max(backwards, gather + reduced)
        fixed = self.exposed(share, gathered, reduced)
        # To add a gradient to the float32 sum, it is read, and the sum is read and written. ZeRO-3 costs as much: each
        # gradient is written in float32 to be reduced, and a part of it is added up.
        added = (ITEMSIZE[pool.gpu.dtype] + 8) * (trained * size) / (MEMORY * pool.gpu.memory_bandwidth)
        fixed += (count - 1) * added
        fixed += self.optimizer(trained * whole / dp if share.fsdp else trained * size, share)
        across = pool.ring(share.pipelines, dp * pp * tp)
        fixed += all_reduce(self.gradient_bytes * trained * whole / dp, share.pipelines, across)
        # If ranks have equal work, the one with the longest of all samples ends last.
        longest = expected_longest(work.response, self.longest_of(share.batch_shares)) + work.prompt.mean
        # Micro-batches that are cut by tokens are equally long, except one that holds only the longest sample.
        skew = 1 + max(0.0, longest / tokens - 1) / samples
        if work.micro_batch_tokens is not None:
            skew = max(1.0, longest / (tokens * samples))
        return StepTimes(pp, count, max(stage, gather), backwards, hop, fixed, skew, samples)

    def exposed(self, share: Share, gathered: float, reduced: float) -> float:
        """The seconds of an optimizer step's collectives that no pass hides. `gathered`, `reduced`: the seconds to
        gather all weights and to reduce all gradients. All of it is assumed to be exposed. So a layout is never faster
        because of ZeRO-3, but it may fit only with it."""
        if share.shards == 1:
            return 0.0
        return reduced + (gathered if share.fsdp else reduced)  # without sharding, an all-reduce takes twice as long

    def straggling(self, dp: int) -> float:
        """The tokens of the data-parallel rank with most of a mini-batch, divided by the mean of the ranks. Samples are
        dealt by length, so it is 1 unless the longest sample alone is more than a rank's share."""
        work, mini = self.work, min(self.work.mini_batch, self.work.batch)
        if dp == 1:
            return 1.0
        average = fmean(quantiles(work.response, mini)) + work.prompt.mean
        most = (expected_longest(work.response, mini) + work.prompt.mean) / average
        return max(1.0, most / max(1.0, mini / dp))

    def longest_of(self, dp: int) -> int:
        """The number of samples among which the longest one determines how a pipeline fills and drains."""
        return min(self.work.mini_batch, self.work.batch)

    def optimizer(self, parameters: float, share: Share) -> float:
        """The seconds of the optimizer step of these parameters on one GPU. Moments on the host are loaded."""
        gpu = self.inventory[share.pool].gpu
        seconds = OPTIMIZER_BYTES * parameters / (MEMORY * gpu.memory_bandwidth)
        return seconds + (2 * 8 * parameters / (LINK * gpu.pcie) if share.offload else 0.0)

    # ------------------------------------------------------------ between the tasks

    def transfer(self, candidate: Candidate) -> float:
        """The seconds to send new weights. The actor's go to every generation share, and then the critic's to every
        critic share. The receivers of one model get them at the same time."""
        total = 0.0
        for task, serving in (("actor_training", candidate.generation), ("critic_training", candidate.critic)):
            model = self.work.model(task)
            sources = candidate.actor_training if task == "actor_training" else candidate.critic_training
            if model is not None and sources:
                total += max((self.transferred(*model, sources[0], target) for target in serving), default=0.0)
        return total

    def transferred(self, shape: ModelShape, head: Head, source: Share, target: Share) -> float:
        """The seconds to bring a model's new weights from its training share to a share that generates or scores. Each
        byte leaves its sender once and enters a node of receivers once. The node passes it on."""
        pool, origin = self.inventory[target.pool], self.inventory[source.pool]
        same = source.pool == target.pool
        size = shape.parameters(head) * ITEMSIZE[pool.gpu.dtype]
        each = size / (target.pp * target.tp)
        within = same and source.first <= target.first and target.first + target.gpus <= source.first + source.gpus
        held = _held(source, target) if within else 0.0  # else some receivers' GPUs have none of it
        if held == 1.0:
            return 0.0
        senders = source.gpus  # each sends a part of what it holds
        near = same and _node(source, pool.per_node) == _node(target, pool.per_node) is not None
        if near:
            seconds = max(each * (1 - held), size * (1 - held) / senders) / pool.gpu.peer
        else:
            local = min(pool.per_node, target.gpus)
            into = size * min(1.0, local / (target.pp * target.tp)) * (1 - held) / (local * pool.network)
            out = size * (1 - held) / (senders * origin.network)
            seconds = max(into, out, each / pool.gpu.peer)
        return COLLECTIVE_SECONDS + seconds / LINK

    def swapped_in(self, candidate: Candidate) -> float:
        """The seconds to load weights of servers and scorers from host memory. Tasks on the same GPUs load one after
        the other. Others load at the same time."""
        spent: dict[tuple[str, int], float] = {}
        for task, share in candidate.placed:
            if task not in TRAINING and share.offload:
                key = share.pool, share.first
                spent[key] = spent.get(key, 0.0) + self.swap(task, share)
        return max(spent.values(), default=0.0)

    def swap(self, task: Task, share: Share) -> float:
        """The seconds to load a task's weights from host memory. The moments of training count with its steps."""
        model = self.work.model(task)
        if model is None or not share.offload:
            return 0.0
        gpu = self.inventory[share.pool].gpu
        size = model[0].parameters(model[1]) * ITEMSIZE[gpu.dtype] / (share.pp * share.tp)
        return (size / share.dp if share.fsdp == 3 else size) / (LINK * gpu.pcie)


@lru_cache(maxsize=256)
def _trained(shape: ModelShape, head: Head, rank: int, modules: tuple[str, ...]) -> float:
    """The fraction of the parameters that are trained with adapters."""
    lora = LoRA(rank=rank, target_modules=list(modules))
    total, trained = trained_parameters(Training(shape, head, Parallelism(), Dtype.BFLOAT16, 1, lora=lora), 0)
    return trained / total


def _held(source: Share, target: Share) -> float:
    """The fraction of a receiver's weights that the trainer on the same GPU already holds."""
    if source.gathers:
        return 1 / source.shards if (source.pp, source.tp) == (target.pp, target.tp) else 0.0
    if (source.pp, source.tp, source.first) == (target.pp, target.tp, target.first):
        return 1.0
    return target.pp * target.tp / (source.pp * max(source.tp, target.tp)) if target.pp * target.tp < source.pp else 0.0


def _node(share: Share, per_node: int) -> int | None:
    """The index of the node that holds the whole share. None if it is on several nodes."""
    first, last = share.first // per_node, (share.first + share.gpus - 1) // per_node
    return first if first == last else None
