"""Memory of every GPU in a candidate, by part, through `dovetail.planner.memory` (APP's MinResourceChecker)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

from dovetail.manifest.types import Parallelism
from dovetail.planner.iteration.costs import origin
from dovetail.planner.iteration.generation import mean
from dovetail.planner.iteration.system import System
from dovetail.planner.memory import Training, training_memory
from dovetail.planner.memory.parts import CONTEXT_BYTES, FRAGMENTS, GIB
from dovetail.planner.memory.rollout import BATCHED_TOKENS, GRAPH_BYTES, UTILISATION
from dovetail.planner.memory.training import ITEMSIZE, stage_parameters, two_blocks
from dovetail.planner.placement.candidate import INFERENCE, TRAINING, Candidate, Share, Task
from dovetail.planner.placement.inventory import Inventory, Pool
from dovetail.planner.placement.workload import Workload
from dovetail.planner.shape import Head, ModelShape

# Parts of a training rank that stay while other tasks have the GPU.
_STAYS = ("weights", "optimizer", "moving average")
_PROCESS = {"generation": "vLLM", **dict.fromkeys(INFERENCE, "scorer"), **dict.fromkeys(TRAINING, "trainer")}


@dataclass(frozen=True)
class GPUMemory:
    """Bytes by part of each of the GPUs `range` of a pool, at the peak of an iteration."""

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
        """One sentence with the numbers and the largest parts."""
        largest = sorted(self.device.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
        where = f"{self.pool}[{self.range.start}:{self.range.stop}]"
        need, there = self.device_bytes / GIB, self.capacity / GIB
        return f"{where} needs {need:.1f} GiB per GPU, {there:.1f} GiB there (most: {parts})"


@dataclass(frozen=True)
class _Load:
    """One task on one GPU: bytes that stay all the time, those that it needs while it works, and on the host."""

    stays: Mapping[str, float]
    works: Mapping[str, float]
    host: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def resident(self) -> float:
        return sum(self.stays.values())

    @cached_property
    def transient(self) -> float:
        return sum(self.works.values())


@dataclass(frozen=True)
class Footprint:
    """Bytes of one GPU for a task, whatever else is on it: `kept` all the time, with what allocators lose of it and the
    least KV cache of a server that stays awake; `works` more while it runs. `serves`: it generates, `awake`: and keeps
    its cache while others work."""

    kept: float = 0.0
    works: float = 0.0
    serves: bool = False
    awake: bool = False


@dataclass(frozen=True)
class Alone:
    """A task that has its GPUs to itself: bytes of one, tokens of KV cache of a server, and what is left of the bytes
    beside other tasks."""

    need: float
    room: int
    footprint: Footprint


def alone(task: Task, share: Share, work: Workload, pool: Pool, system: System) -> Alone:
    """As `memory` of a candidate with this share only."""
    load = _load_alone(task, share, work, pool, system)
    kept, works = (1 + FRAGMENTS) * load.resident, load.transient
    need = kept + works + CONTEXT_BYTES
    if task != "generation":
        return Alone(need, 0, Footprint(kept, works))
    each = _kv_bytes(work, pool, share)
    room = int((UTILISATION * pool.gpu.memory - need) // each)
    need += _cached_tokens(work, share, room) * each
    works += work.longest * each
    if share.offload or system.shared_weights:
        return Alone(need, room, Footprint(kept, works, serves=True))
    return Alone(need, room, Footprint(kept + works, 0.0, serves=True, awake=True))


def explanation(task: Task, share: Share, work: Workload, pool: Pool, system: System) -> str:
    """What a task that has its GPUs to itself needs of them, one sentence."""
    load, room = _load_alone(task, share, work, pool, system), alone(task, share, work, pool, system).room
    return _peak(pool, share.range, [(task, share, load)], {share: room}, work, system).explanation


def _load_alone(task: Task, share: Share, work: Workload, pool: Pool, system: System) -> _Load:
    if task in TRAINING:
        return _training(task, origin(share), work, pool, False, system.host_step)
    return _serving(task, origin(share), None, work, pool)


def rooms_for(tasks: Iterable[Task], pool: Pool, system: System) -> tuple[float, float]:
    """Bytes of a GPU for the footprints of these tasks, and for them where one serves, as vLLM leaves some free."""
    processes = 1 if system.shared_weights else len({_PROCESS[task] for task in tasks})
    contexts = processes * CONTEXT_BYTES
    return pool.gpu.memory - contexts, UTILISATION * pool.gpu.memory - contexts


def memory(
    candidate: Candidate, work: Workload, inventory: Inventory, system: System
) -> tuple[tuple[GPUMemory, ...], dict[Share, int]]:
    """Of every GPU that has a task, equal neighbours together; and the tokens of KV cache of each generation share's
    servers (0 or less: not even one sample fits)."""
    cells = list(_cells(candidate, inventory))
    rooms: dict[Share, int] = {}
    loads = [
        [(task, share, _load(task, share, candidate, work, pool, system)) for task, share in on]
        for pool, _, on in cells
    ]
    for (pool, _, _), tasks in zip(cells, loads, strict=True):
        for task, share, load in tasks:
            if task == "generation":
                others = [other for t, s, other in tasks if s is not share or t != task]
                taken = sum(other.resident for other in others)
                if not (share.offload or system.shared_weights):
                    # vLLM keeps its cache while others work.
                    taken += max((other.transient for other in others), default=0.0)
                taken += _overhead(tasks, system)
                left = UTILISATION * pool.gpu.memory - taken - load.resident - load.transient
                room = int(left // _kv_bytes(work, pool, share))
                rooms[share] = min(room, rooms.get(share, room))
    found = []
    for (pool, where, _), tasks in zip(cells, loads, strict=True):
        found.append(_peak(pool, where, tasks, rooms, work, system))
    return tuple(found), rooms


def _cached_tokens(work: Workload, share: Share, room: int) -> float:
    """That a server keeps: those of its part of the batch, as far as there is room, and of the longest sample."""
    wanted = -(-work.batch // share.dp) * (mean(work.prompt) + mean(work.response))
    return max(float(work.longest), min(float(room), max(wanted, work.longest)))


def _kv_bytes(work: Workload, pool: Pool, share: Share) -> float:
    """Of one token on one GPU."""
    return work.actor.kv_bytes(ITEMSIZE[pool.gpu.dtype], share.tp) / share.pp


def _cells(candidate: Candidate, inventory: Inventory) -> Iterator[tuple[Pool, range, list[tuple[Task, Share]]]]:
    """Ranges of GPUs with the same tasks."""
    placed = list(candidate.placed)
    for pool in inventory.pools:
        mine = [(task, share, _range(candidate, task, share)) for task, share in placed if share.pool == pool.name]
        cuts = sorted({edge for _, _, there in mine for edge in (there.start, there.stop)})
        for start, stop in pairwise(cuts):
            on = [(t, s) for t, s, there in mine if there.start <= start and stop <= there.stop]
            if on:
                yield pool, range(start, stop), on


def _range(candidate: Candidate, task: Task, share: Share) -> range:
    """GPUs that may hold a part of it. Copies beside servers are counted through, though each is on the first GPUs of
    its own server: where these train one of two models, all of a server's count."""
    if task in INFERENCE and candidate.beside and candidate.schedule == "Dedicated":
        server = next((s for s in candidate.generation if s.overlaps(share)), None)
        if server is not None and any(server.overlaps(s) for s in candidate.actor_training):
            return range(share.first, share.first + share.dp * server.pp * server.tp)
    return share.range


def _overhead(tasks: list[tuple[Task, Share, _Load]], system: System) -> float:
    """Contexts of the processes, and what allocators lose of what stays."""
    processes = 1 if system.shared_weights else len({_PROCESS[task] for task, _, _ in tasks})
    return processes * CONTEXT_BYTES + FRAGMENTS * sum(load.resident for _, _, load in tasks)


def _peak(
    pool: Pool,
    where: range,
    tasks: list[tuple[Task, Share, _Load]],
    rooms: Mapping[Share, int],
    work: Workload,
    system: System,
) -> GPUMemory:
    device: dict[str, float] = {}
    host: dict[str, float] = {}
    peaks: list[tuple[float, Task, dict[str, float]]] = []
    for task, share, load in tasks:
        device |= {f"{task}: {name}": size for name, size in load.stays.items()}
        host |= {f"{task}: {name}": size for name, size in load.host.items()}
        works = {f"{task}: {name}": size for name, size in load.works.items()}
        if task == "generation":
            works["generation: KV cache"] = _cached_tokens(work, share, rooms[share]) * _kv_bytes(work, pool, share)
            if not (share.offload or system.shared_weights):
                device |= works
                continue
        peaks.append((sum(works.values()), task, works))
    if peaks:
        device |= max(peaks, key=lambda p: p[0])[2]
    device["contexts, fragments"] = _overhead(tasks, system)
    return GPUMemory(pool.name, where, device, host, float(pool.gpu.memory))


def _load(task: Task, share: Share, candidate: Candidate, work: Workload, pool: Pool, system: System) -> _Load:
    if task in TRAINING:
        held = system.shared_weights and any(
            other.range == share.range and other.pool == share.pool
            for use in (("generation",) if task == "actor_training" else ("critic",))
            for other in candidate.shares(use)  # type: ignore[arg-type]
        )
        return _training(task, origin(share), work, pool, held, system.host_step)
    trained = candidate.shares("critic_training" if task == "critic" else "actor_training")
    same = system.shared_weights and task in ("critic", "generation")
    owner = next((t for t in trained if same and t.pool == share.pool and t.range == share.range), None)
    return _serving(task, origin(share), owner.fsdp if owner else None, work, pool)


@lru_cache(maxsize=32768)
def _training(task: Task, share: Share, work: Workload, pool: Pool, held: bool, host_step: bool) -> _Load:
    """`held`: the weights in the compute dtype serve another task too, so they stay."""
    shape, head = _model(work, task)
    sequences = -(-min(work.mini_batch, work.batch) // share.dp)
    count = -(-sequences // share.micro_batch)
    lora = work.actor_lora if task == "actor_training" else work.critic_lora
    best: tuple[float, _Load] | None = None
    # The first stage keeps most micro-batches, the last has the logits.
    for stage in {0, share.pp - 1}:
        job = Training(
            shape,
            head,
            _layout(share.pp, share.tp, share.dp),
            pool.gpu.dtype,
            tokens=min(share.micro_batch, sequences) * work.longest,
            micro_batches=count,
            in_flight=min(share.pp - stage, count),
            lora=lora,
            recompute=share.recompute,
            offload=share.offload,
            ema="host" if work.ema and task == "actor_training" else None,
            fsdp=share.fsdp,
        )
        found = training_memory(job, stage)
        parts = {k: v for k, v in found.device.items() if k not in ("fragments", "CUDA context")}
        host = dict(found.host)
        if share.offload and host_step:
            each = 4 * stage_parameters(job, stage)[1] / (share.dp if share.fsdp > 1 else 1)
            host |= {"masters": parts["weights"], "gradients": each}
            parts["weights"] *= ITEMSIZE[pool.gpu.dtype] / 4
            parts["gradients"] -= each
            parts.pop("optimizer, stepping", None)
        stays = {name: size for name, size in parts.items() if name in _STAYS}
        works = {name: size for name, size in parts.items() if name not in _STAYS}
        if held and share.fsdp < 3:
            stays["gathered weights"] = works.pop("gathered weights", 0.0)
        works["fragments"] = FRAGMENTS * sum(works.values())
        total = sum(stays.values()) + sum(works.values())
        if best is None or total > best[0]:
            best = total, _Load(stays, works, host)
    assert best is not None
    return best[1]


@lru_cache(maxsize=8192)
def _serving(task: Task, share: Share, owner: Literal[0, 1, 2, 3] | None, work: Workload, pool: Pool) -> _Load:
    """Generation without its cache, or inference. `owner`: ZeRO stage of the training that has the weights already."""
    shape, head = _model(work, task)
    b, total = ITEMSIZE[pool.gpu.dtype], max(_stage(shape, head, share, pool, stage) for stage in {0, share.pp - 1})
    size = float(b * total)
    works: dict[str, float] = {}
    stays: dict[str, float] = {}
    host: dict[str, float] = {}
    if share.fsdp == 3:
        layers = max(1, shape.layers // share.pp)
        works["gathered weights"] = float(b * two_blocks(total, shape.layer_parameters(share.tp), layers))
        size = size / share.dp if owner is None else 0.0
    elif owner == 3:
        works["gathered weights"] = size
        size = 0.0
    elif owner is not None:
        size = 0.0
    if task == "generation":
        tokens, inner = BATCHED_TOKENS, max(shape.queries + 2 * shape.keys, 2 * shape.intermediate) / share.tp
        logits = 2 * 1024 * shape.vocabulary * 4.0
        works["CUDA graphs"] = GRAPH_BYTES
    else:
        tokens = share.micro_batch * work.longest
        inner = max(shape.queries + 2 * shape.keys, 3 * shape.intermediate) / share.tp
        logits = tokens * shape.vocabulary * (head == "lm") * b / share.tp
    works["a step"] = tokens * (3 * shape.hidden + inner) * b + logits
    if share.offload:
        works["weights"] = works.get("weights", 0.0) + size
        host["weights"] = size
    else:
        stays["weights"] = size
    return _Load(stays, works, host)


def _stage(shape: ModelShape, head: Head, share: Share, pool: Pool, stage: int) -> int:
    job = Training(shape, head, _layout(share.pp, share.tp, share.dp), pool.gpu.dtype, 1)
    return stage_parameters(job, stage)[0]


@lru_cache(maxsize=4096)
def _layout(pp: int, tp: int, dp: int) -> Parallelism:
    return Parallelism.model_construct(pp=pp, tp=tp, dp=dp)


def _model(work: Workload, task: Task) -> tuple[ModelShape, Head]:
    found = work.model(task)
    assert found is not None, f"the workload has no {task}"
    return found
