"""The cost model of GPUs. It computes seconds and memory of one iteration of a candidate in closed form.

The search asks it thousands of times. `dovetail.planner.simulate.iteration` simulates the same iteration event by
event. A test compares the two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dovetail.manifest.hashing import known_share
from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.manifest.types import Dtype, LoRA, Parallelism
from dovetail.planner.candidate import INFERENCE, TRAINING, Candidate, Share, Task
from dovetail.planner.costs.generation import GenerationTimes, Servers, expected_longest, exposed_inference, generate
from dovetail.planner.costs.gpu_memory import Footprint, GPUMemory, GPUMemoryModel
from dovetail.planner.costs.memory import ITEMSIZE, Training, trained_parameters
from dovetail.planner.costs.passes import (
    COLLECTIVE_SECONDS,
    LINK,
    MEMORY,
    all_gather,
    all_reduce,
    pass_seconds,
    servers,
    shared_prompt,
    straggling,
)
from dovetail.planner.costs.steps import StepTimes, together
from dovetail.planner.inventory import Inventory
from dovetail.planner.workload import Workload

PHASES = ("generation", "inference", "training", "transfer", "swap")
# For each parameter a step reads its float32 master, two moments and gradient, and writes all but the gradient.
OPTIMIZER_BYTES = 28
# The most requests of a vLLM server at once.
MAX_SAMPLES = 256


@dataclass(frozen=True)
class Estimate:
    """`phases`: seconds by name of PHASES, one after the other. `inference` is the part that fusion does not hide.
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

    `seconds`: the time of the task in an iteration. `floor`: the least time of the task beside other tasks, with any
    schedule. `footprint`: the bytes of one GPU. `problem`: why the share cannot run even alone. None if it can."""

    share: Share
    footprint: Footprint
    seconds: float = 0.0
    floor: float = 0.0
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
            problem = self._no_room(share, mine.room)
            # A tail that gathers on fewer servers may end a little sooner.
            return Option(share, mine, seconds + self.swap(task, share), 0.9 * seconds, problem)
        if task in TRAINING:
            step, steps = self.step(task, share), self.work.steps
            return Option(share, mine, steps * step.alone, steps * (step.work + step.fixed))
        return Option(share, mine, self.inference(task, share) + self.swap(task, share))

    def _no_room(self, share: Share, room: int) -> str | None:
        """Why a server with `room` tokens of KV cache cannot generate. None if it can."""
        longest, there = self.work.longest, max(0, room)
        if room >= longest:
            return None
        return f"generation on {share} has room for {there} tokens of KV cache, but a sample may have {longest}"

    # ------------------------------------------------------------ generation and inference

    def servers(self, share: Share, room: int) -> Servers:
        """The vLLM servers of a generation share, each with `room` tokens of KV cache."""
        return servers(share.at(0), self.inventory[share.pool], self.work, room, self.max_samples)

    def generated(self, shares: Sequence[tuple[Share, int]], migration: float | None) -> GenerationTimes:
        """The times of generation on these shares. Each comes with the tokens of KV cache of its servers."""
        each = [self.servers(share, room) for share, room in shares]
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
        samples = work.samples_together(share.dp, share.micro_batch) if task in TRAINING else float(share.micro_batch)
        of_one = tokens * samples / share.micro_batch
        stage, gather, hop = pass_seconds(shape, head, share, pool, of_one, (prompt + response) / 2)
        count = math.ceil(work.batch / (share.dp * samples) - 1e-9)
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
        samples = work.samples_together(share.dp, share.micro_batch)
        stage, gather, hop = pass_seconds(shape, head, share, pool, tokens * samples / share.micro_batch, tokens / 2)
        stage *= self.straggling(share.dp)
        pp, dp, tp = share.pp, share.shards, share.tp
        size, ring = shape.parameters(head) / (pp * tp), pool.ring(dp, tp)
        reduced = all_gather(self.gradient_bytes * trained * size, dp, ring)
        count = work.micro_batches(share.dp, share.micro_batch)
        backwards = (3 if share.recompute else 2) * stage
        gathered = all_gather(ITEMSIZE[pool.gpu.dtype] * size, dp, ring)
        if share.gathers:
            backwards = max(backwards, gather + reduced)
        fixed = self.exposed(share, gathered, reduced)
        # To add a gradient to the float32 sum, it is read, and the sum is read and written. ZeRO-3 costs as much: each
        # gradient is written in float32 to be reduced, and a part of it is added up.
        added = (ITEMSIZE[pool.gpu.dtype] + 8) * (trained * size) / (MEMORY * pool.gpu.memory_bandwidth)
        fixed += (count - 1) * added
        fixed += self.optimizer(trained * size / (dp if share.fsdp else 1), share)
        across = pool.ring(share.pipelines, dp * pp * tp)
        fixed += all_reduce(self.gradient_bytes * trained * size / dp, share.pipelines, across)
        # If ranks have equal work, the one with the longest of all samples ends last.
        longest = expected_longest(work.response, self.longest_of(share.dp)) + work.prompt.mean
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
        """The tokens of the data-parallel rank with most of a mini-batch, divided by the mean of the ranks."""
        return straggling(self.work, dp)

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
