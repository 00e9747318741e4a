"""Computes the memory of every GPU in a candidate, by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from dovetail.manifest.hashing import known_share
from dovetail.planner.candidate import INFERENCE, TRAINING, Candidate, Share, Task, cells
from dovetail.planner.costs.memory import (
    BATCHED_TOKENS,
    CONTEXT_BYTES,
    FRAGMENTS,
    GRAPH_BYTES,
    ITEMSIZE,
    UTILISATION,
    Training,
    generation_step_bytes,
    kept_prefix_bytes,
    logit_bytes,
    scoring_step_bytes,
    serial_activations,
    shortage,
    stage_parameters,
    trained_parameters,
    training_job,
    training_memory,
    two_blocks,
)
from dovetail.planner.inventory import Inventory, Pool
from dovetail.planner.workload import Workload
from dovetail.protocol.budgets import SCORER_TOKENS, SHARED_WEIGHT_BYTES

# Parts of a training rank that stay while other tasks have the GPU.
_STAYS = ("weights", "optimizer", "moving average", "NCCL buffers")
# Parts of a training rank that are there while a pass runs.
_PASSING = ("logits", "a layer's backward")
# The schedules that run both models at once.
_TOGETHER = ("TimeSharing", "Fused", "VShaped")
_PROCESS = {"generation": "vLLM", **dict.fromkeys(INFERENCE, "scorer"), **dict.fromkeys(TRAINING, "trainer")}


@dataclass(frozen=True)
class GPUMemory:
    """The bytes by part of each GPU in `range` of a pool, at an iteration's peak. `capacity`: the bytes of a GPU."""

    pool: str
    range: range
    device: Mapping[str, float]
    host: Mapping[str, float]
    capacity: float

    @property
    def device_bytes(self) -> float:
        return sum(self.device.values())

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.capacity

    @property
    def explanation(self) -> str:
        """One sentence with the bytes and the largest parts."""
        return shortage(f"{self.pool}[{self.range.start}:{self.range.stop}]", self.device, self.capacity)


@dataclass(frozen=True)
class TaskMemory:
    """The bytes by part of one task on one GPU. `stays`: bytes that stay all the time. `works`: bytes that the task
    needs while it works. `host`: bytes in host memory. `gradients`: the bytes of `works` that stay while another model
    trains and when a server wakes up, because the last step is applied while the weights are sent. Under ZeRO-3 they
    include the buffers of the model's streams."""

    stays: Mapping[str, float]
    works: Mapping[str, float]
    host: Mapping[str, float] = field(default_factory=dict)
    gradients: float = 0.0

    @cached_property
    def resident(self) -> float:
        return sum(self.stays.values())

    @cached_property
    def transient(self) -> float:
        return sum(self.works.values())


@dataclass(frozen=True)
class Footprint:
    """The bytes of one GPU for one task. `need`, `room`: the bytes, and the tokens of a server's KV cache, if nothing
    else runs there.

    `kept`: bytes that stay all the time, including fragments and the smallest KV cache of a server that stays awake.
    `works`: further bytes while the task runs. `gradients`: the bytes of `works` that stay until the next iteration's
    server is awake. `serves`: the task generates. `awake`: its server keeps the KV cache while other tasks work."""

    need: float
    room: int = 0
    kept: float = 0.0
    works: float = 0.0
    gradients: float = 0.0
    serves: bool = False
    awake: bool = False


Loads = list[tuple[Task, Share, TaskMemory]]


class GPUMemoryModel:
    """Computes the memory of the tasks of one workload."""

    def __init__(self, work: Workload, inventory: Inventory) -> None:
        self.work, self.inventory = work, inventory

    # ------------------------------------------------------------ one task

    def footprint(self, task: Task, share: Share) -> Footprint:
        """The bytes of a task, without those that depend on other tasks of its GPUs."""
        load, pool = self.load(task, share), self.inventory[share.pool]
        kept, works = (1 + FRAGMENTS) * load.resident, load.transient
        need = kept + works + CONTEXT_BYTES
        if task != "generation":
            return Footprint(need, 0, kept, works, load.gradients)
        each = self._kv_bytes(share)
        room = int((UTILISATION * pool.gpu.memory - need) // each)
        need += self._cached_tokens(share, room) * each
        works += self.work.longest * each
        if self.awake(share):
            kept, works = kept + works, 0.0
        return Footprint(need, room, kept, works, serves=True, awake=self.awake(share))

    def explanation(self, task: Task, share: Share) -> str:
        """The memory that a task with GPUs of its own needs, as one sentence."""
        tasks, room = [(task, share, self.load(task, share))], self.footprint(task, share).room
        return self._peak(self.inventory[share.pool], share.range, tasks, {share: room}).explanation

    def rooms(self, tasks: Iterable[Task], pool: Pool) -> tuple[float, float]:
        """The bytes of a GPU for these tasks: if none of them generates, and if one does (vLLM leaves some free)."""
        contexts = self._contexts(tasks)
        return pool.gpu.memory - contexts, UTILISATION * pool.gpu.memory - contexts

    # ------------------------------------------------------------ a candidate

    def of(self, candidate: Candidate) -> tuple[tuple[GPUMemory, ...], dict[Share, int]]:
        """The memory of every GPU that has a task, and the tokens of KV cache of each generation share's servers. Equal
        neighbours are one entry. With 0 tokens or less not even one sample fits."""
        cells = [(pool, where, self._loads(candidate, on)) for pool, where, on in self._cells(candidate)]
        rooms: dict[Share, int] = {}
        for pool, _, tasks in cells:
            for task, share, load in tasks:
                if task == "generation":
                    taken = self._taken(share, tasks) + self._overhead(tasks)
                    left = UTILISATION * pool.gpu.memory - taken - load.resident - load.transient
                    room = int(left // self._kv_bytes(share))
                    rooms[share] = min(room, rooms.get(share, room))
        both = candidate.schedule in _TOGETHER
        return tuple(self._peak(pool, where, tasks, rooms, both) for pool, where, tasks in cells), rooms

    def server_memory(self, candidate: Candidate) -> dict[Share, float]:
        """The fraction of a GPU's memory that the servers of each generation share may take in all."""
        parts: dict[Share, float] = {}
        for pool, _, on in self._cells(candidate):
            tasks = self._loads(candidate, on)
            for share in (share for task, share, _ in tasks if task == "generation"):
                others = [each for each in tasks if each[0] != "generation"]
                part = UTILISATION - (self._taken(share, tasks) + self._overhead(others)) / pool.gpu.memory
                parts[share] = min(part, parts.get(share, part))
        return parts

    def _taken(self, share: Share, tasks: Loads) -> float:
        """The bytes of a GPU that other tasks have while a server of the generation share `share` generates."""
        others = [other for task, _, other in tasks if task != "generation"]
        taken = sum(other.resident for other in others)
        if self.awake(share):
            return taken + max((other.transient for other in others), default=0.0)
        return taken + sum(other.gradients for other in others)

    def _loads(self, candidate: Candidate, on: list[tuple[Task, Share]]) -> Loads:
        """The loads of tasks that share GPUs. If a rank has stages of both models, it is the rank that holds most."""
        actor, critic = (next((share for task, share in on if task == kind), None) for kind in TRAINING)
        if actor is None or critic is None or actor.range != critic.range:
            return [(task, share, self.load(task, share)) for task, share in on]
        both = candidate.schedule in _TOGETHER
        pairs: list[tuple[int, int] | tuple[None, None]] = [(None, None)]
        if 1 < actor.pp == critic.pp:
            last = actor.pp - 1
            # The critic runs against the actor in the schedules that fuse them, and in some of those in a V.
            against, along = [(0, last), (last, 0)], [(0, 0), (last, last)]
            pairs = [*{"Fused": against, "VShaped": against + along}.get(candidate.schedule, along)]
        found = []
        for pair in pairs:
            stages: dict[Task, int | None] = dict(zip(TRAINING, pair, strict=True))
            found.append([(task, share, self.load(task, share, stages.get(task), both)) for task, share in on])
        most = max(found, key=lambda loads: sum(load.resident + load.transient for _, _, load in loads))
        return self._with_activations(most) if both else most

    def _with_activations(self, loads: Loads) -> Loads:
        """Adds the activations of actor and critic under one schedule to the actor's load on a rank. The other memory
        of a pass exists for one model at a time."""
        trained = {task: (share, load.works) for task, share, load in loads if task in TRAINING}
        passing = {task: sum(works.get(part, 0.0) for part in _PASSING) for task, (_, works) in trained.items()}
        larger = max(passing, key=lambda task: passing[task])
        steps = sum(works.get("optimizer, stepping", 0.0) for _, works in trained.values())
        kept = self._activations_together((task, share) for task, (share, _) in trained.items())
        # Moments in host memory are loaded for the step when the passes are done, so they take the activations' place.
        parts = {"activations of both models": kept, "optimizer, stepping": max(0.0, steps - kept)}
        found = []
        for task, share, load in loads:
            if task in TRAINING:
                left = ("activations", "optimizer, stepping", "fragments", *(() if task == larger else _PASSING))
                works = {name: size for name, size in load.works.items() if name not in left}
                works |= parts if task == "actor_training" else {}
                works["fragments"] = FRAGMENTS * sum(works.values())
                load = replace(load, works=works)
            found.append((task, share, load))
        return found

    def _activations_together(self, trained: Iterable[tuple[Task, Share]]) -> float:
        """The most bytes of activations that a schedule of both models keeps on a rank. The search of schedules keeps
        to the manifest's limit, or to what serial 1F1B takes (`dovetail.coordinator.schedules.scheduling`)."""
        serial, everything = zip(*(self._activation_bounds(task, share) for task, share in trained), strict=True)
        limit = self.work.activation_limit
        return float(max(serial) if limit is None else min(limit, sum(everything)))

    @known_share
    def _activation_bounds(self, task: Task, share: Share) -> tuple[float, float]:
        """The bytes of a model's activations on a rank: the most under serial 1F1B, and those of a whole mini-batch."""
        job = self.training_job(task, share, 0)
        serial = serial_activations(job)
        return serial, serial / min(share.pp, job.micro_batches) * job.micro_batches

    def _cells(self, candidate: Candidate) -> Iterator[tuple[Pool, range, list[tuple[Task, Share]]]]:
        """The ranges of GPUs that have the same tasks."""
        placed = list(candidate.placed)
        for pool in self.inventory.pools:
            mine = [(task, share) for task, share in placed if share.pool == pool.name]
            for where, on in cells([_range(candidate, *each) for each in mine]):
                yield pool, where, [mine[i] for i in on]

    def _peak(
        self, pool: Pool, where: range, tasks: Loads, rooms: Mapping[Share, int], both: bool = False
    ) -> GPUMemory:
        """The peak memory of GPUs with these tasks. `rooms`: see `of`. `both`: one schedule runs actor and critic, so
        both work at the same time."""
        device: dict[str, float] = {}
        host: dict[str, float] = {}
        peaks: list[tuple[float, dict[str, float]]] = []
        for task, share, load in tasks:
            device |= {f"{task}: {name}": size for name, size in load.stays.items()}
            host |= {f"{task}: {name}": size for name, size in load.host.items()}
            works = {f"{task}: {name}": size for name, size in load.works.items()}
            if task == "generation" and share.dp > 1 and not any(other in TRAINING for other, _, _ in tasks):
                # A server that shares no GPU with trainers keeps what it received, to send it to others.
                host["generation: received copy"] = {**load.stays, **load.works}["weights"]
            if task == "generation":
                works["generation: KV cache"] = self._cached_tokens(share, rooms[share]) * self._kv_bytes(share)
                if self.awake(share):
                    device |= works
                    continue
            if task in TRAINING:
                for other, _, beside in tasks:
                    if other in TRAINING and other != task:
                        more = beside.works if both else {"gradients": beside.gradients}
                        works |= {f"{other}: {name}": size for name, size in more.items()}
            if task == "generation":
                works |= {f"{other}: gradients": beside.gradients for other, _, beside in tasks if beside.gradients}
            peaks.append((sum(works.values()), works))
        if peaks:
            device |= max(peaks, key=lambda p: p[0])[1]
        device["contexts, fragments"] = self._overhead(tasks)
        return GPUMemory(pool.name, where, device, host, float(pool.gpu.memory))

    def _overhead(self, tasks: Loads) -> float:
        """The contexts of the processes, and the fragments of the memory that stays."""
        fragments = FRAGMENTS * sum(load.resident for _, _, load in tasks)
        return self._contexts(task for task, _, _ in tasks) + fragments

    def _contexts(self, tasks: Iterable[Task]) -> float:
        """The contexts of the processes, and the memory that they share to pass weights on this GPU."""
        here = set(tasks)
        shares = {"actor_training", "generation"} <= here or {"critic_training", "critic"} <= here
        return self.processes(here) * CONTEXT_BYTES + shares * SHARED_WEIGHT_BYTES

    def _cached_tokens(self, share: Share, room: int) -> float:
        """The tokens of a server's KV cache: its part of the batch if there is room, but at least one sample."""
        work = self.work
        wanted = -(-work.batch // share.dp) * (work.prompt.mean + work.response.mean)
        return max(float(work.longest), min(float(room), max(wanted, work.longest)))

    def _kv_bytes(self, share: Share) -> float:
        """The bytes of the KV cache of one token on one GPU."""
        itemsize = ITEMSIZE[self.inventory[share.pool].gpu.dtype]
        return self.work.actor.kv_bytes(itemsize, share.tp) / share.pp

    # ------------------------------------------------------------ what the software does

    def awake(self, share: Share) -> bool:
        """Whether a server keeps its KV cache while other tasks work."""
        return not share.offload

    def processes(self, tasks: Iterable[Task]) -> int:
        """The number of processes with a CUDA context on a GPU with these tasks."""
        return len({_PROCESS[task] for task in tasks})

    def scored_tokens(self, share: Share) -> int:
        """The tokens of one forward pass of a scorer."""
        return max(self.work.longest, SCORER_TOKENS // share.pp)

    def load(self, task: Task, share: Share, stage: int | None = None, both: bool = False) -> TaskMemory:
        """The memory of one task. `stage`: the pipeline stage of training. None: the stage that holds most. `both`: the
        load is without activations, because one schedule runs actor and critic."""
        return self.training_load(task, share, stage, both) if task in TRAINING else self.serving_load(task, share)

    @known_share
    def training_load(self, task: Task, share: Share, stage: int | None, both: bool) -> TaskMemory:
        """The memory of a training task on a rank of pipeline stage `stage`. For None and `both` see `load`."""
        # The first stage keeps most micro-batches, and the last one has the logits.
        stages = {0, share.pp - 1} if stage is None else {stage}
        jobs = [(self.training_job(task, share, each), each) for each in stages]
        loads = [self.stage_load(replace(job, in_flight=0) if both else job, each) for job, each in jobs]
        return max(loads, key=lambda load: load.resident + load.transient)

    def training_job(self, task: Task, share: Share, stage: int) -> Training:
        """The job of a training share as its pipeline stage `stage` runs it under 1F1B."""
        return training_job(self.work, task, share, self.inventory[share.pool].gpu.training.dtype, stage)

    def stage_load(self, job: Training, stage: int) -> TaskMemory:
        found = training_memory(job, stage)
        parts = {k: v for k, v in found.device.items() if k not in ("fragments", "CUDA context")}
        dp = job.shards if job.fsdp > 1 else 1
        stays = {name: size for name, size in parts.items() if name in _STAYS}
        works = {name: size for name, size in parts.items() if name not in _STAYS}
        works["fragments"] = FRAGMENTS * sum(works.values())
        beside = 4 * trained_parameters(job, stage)[1] / dp
        if job.fsdp == 3:
            beside += works.get("all-gather buffers", 0.0)
        return TaskMemory(stays, works, found.host, beside)

    @known_share
    def serving_load(self, task: Task, share: Share) -> TaskMemory:
        """The memory of generation without its KV cache, or of inference."""
        shape, head = self.work.needed(task)
        b, last = ITEMSIZE[self.inventory[share.pool].gpu.dtype], share.pp - 1
        total = max(stage_parameters(shape, head, share.pp, share.tp, stage) for stage in {0, last})
        size = float(b * total)
        works: dict[str, float] = {}
        if share.fsdp == 3:
            layers = max(1, shape.layers // share.pp)
            works["gathered weights"] = float(b * two_blocks(total, shape.layer_parameters(share.tp), layers))
            size /= share.dp
        if task == "generation":
            works["CUDA graphs"] = GRAPH_BYTES
            works["a step"] = generation_step_bytes(shape, BATCHED_TOKENS, b, share.tp)
        else:
            tokens = self.scored_tokens(share)
            logits = logit_bytes(shape, tokens, b, share.tp, training=False) if head == "lm" else 0.0
            # Logits exist only after the last layer.
            body = scoring_step_bytes(shape, "value", tokens, b, share.tp)
            works["a step"] = max(body, 2.0 * tokens * shape.hidden * b + logits)
        if task == "critic" and not share.offload:
            # While no pass runs, the new version is assembled beside the old one.
            works["new weights"] = max(0.0, size - sum(works.values()))
        held = {"weights": size}
        if task in INFERENCE and (kept := kept_prefix_bytes(shape, self.work.longest, b, share.tp) / share.pp):
            held["kept prefixes"] = kept
        if share.offload:
            return TaskMemory({}, {**works, **held}, {"weights": size})
        return TaskMemory(held, works)


def _range(candidate: Candidate, task: Task, share: Share) -> range:
    """The GPUs that may hold a part of a share. A share's copies beside servers have consecutive GPUs, although each is
    on the first GPUs of its own server. If the servers' GPUs train one of two models, all GPUs of a server count."""
    if task in INFERENCE and candidate.beside and candidate.schedule == "Dedicated":
        server = next((s for s in candidate.generation if s.overlaps(share)), None)
        if server is not None and any(server.overlaps(s) for s in candidate.actor_training):
            return range(share.first, share.first + share.dp * server.pp * server.tp)
    return share.range
