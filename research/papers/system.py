"""The software of the papers' baselines, as far as times and memory depend on it: our cost model with what they do
otherwise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.inventory import Inventory
from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.planner.candidate import TRAINING, Candidate, Share, Task
from dovetail.planner.memory import FRAGMENTS, ITEMSIZE, GPUMemoryModel, Loads, TaskMemory, Training, trained_parameters
from dovetail.planner.seconds import (
    LINK,
    OPTIMIZER_BYTES,
    Estimate,
    GenerationTimes,
    GPUCosts,
    Servers,
    deal,
    expected_longest,
    quantiles,
)
from dovetail.planner.workload import Workload


@dataclass(frozen=True)
class System:
    """Ours by default.

    `continuous`: a sample that is done leaves the batch and a waiting one joins; else all of a server's samples are
    decoded at once, until the longest is done. `balanced`: data-parallel ranks get mini-batches of about equal tokens;
    else the rank with the longest samples is waited for. `shared_weights`: tasks of one model on the same GPUs hold its
    weights once, in one process that frees the cache after generation; else trainer, vLLM and scorer are processes with
    weights of their own. `host_step`: a training that offloads keeps masters and gradients on the host too, and steps
    there, at the pace of PCIe; else only the moments, which come back for the step. `hidden_swaps`: weights come from
    host memory while the task before still runs. `gradient_bytes`: of a gradient that crosses the network.
    `max_samples`: most requests of a server at once."""

    continuous: bool = True
    balanced: bool = True
    shared_weights: bool = False
    host_step: bool = False
    hidden_swaps: bool = False
    gradient_bytes: int = 4
    max_samples: int = 256


class SystemCosts(GPUCosts):
    """Of one workload on one inventory, by a system's software."""

    def __init__(self, work: Workload, inventory: Inventory, system: System) -> None:
        super().__init__(work, inventory, system.max_samples)
        self.memory = _Memory(work, inventory, system)
        self._system = system
        self.gradient_bytes = system.gradient_bytes

    def estimate(self, candidate: Candidate) -> Estimate:
        """An engine that cannot let samples join holds all of them at once."""
        found = super().estimate(candidate)
        if self._system.continuous or found.problem is not None:
            return found
        samples = -(-self.work.batch // sum(s.dp for s in candidate.generation))
        _, rooms = self.memory.of(candidate)
        share = min(rooms, key=rooms.__getitem__)
        if rooms[share] >= samples * self.work.longest:
            return found
        held = f"but {samples} samples may have {samples * self.work.longest}"
        problem = f"generation on {share} has room for {max(0, rooms[share])} tokens of KV cache, {held}"
        return replace(found, problem=problem)

    def generated(self, shares: Sequence[tuple[Share, int]], migration: float | None) -> GenerationTimes:
        if self._system.continuous:
            return super().generated(shares, migration)
        each, work = [self.servers("generation", share, room) for share, room in shares], self.work
        dealt = zip(each, deal(each, work.batch), strict=True)
        end = max(_static(s, n, work.prompt, work.response) for s, n in dealt)
        count = sum(s.count for s in each)
        return GenerationTimes(end, end, count, count)

    def exposed(self, share: Share, gathered: float, reduced: float) -> float:
        """ZeRO-3 hides all of its messages behind passes."""
        return 0.0 if share.gathers else super().exposed(share, gathered, reduced)

    def straggling(self, dp: int) -> float:
        """Dealt at random, the most of dp sums of k samples is about 1 + cv sqrt(2 ln dp / k) times their mean."""
        longest, work = super().straggling(dp), self.work
        if self._system.balanced or dp == 1:
            return longest
        mini = min(work.mini_batch, work.batch)
        tokens = [length + work.prompt.mean for length in quantiles(work.response, mini)]
        average = statistics.fmean(tokens)
        most = (expected_longest(work.response, mini) + work.prompt.mean) / average
        spread = statistics.pstdev(tokens) / average
        each = max(1.0, mini / dp)
        return min(max(longest, 1 + spread * math.sqrt(2 * math.log(dp) / each)), max(1.0, most))

    def longest_of(self, dp: int) -> int:
        """Of ranks with unequal work the one with most of it ends last."""
        every = super().longest_of(dp)
        return every if self._system.balanced else -(-every // dp)

    def optimizer(self, parameters: float, share: Share) -> float:
        if not (share.offload and self._system.host_step):
            return super().optimizer(parameters, share)
        gpu = self.inventory[share.pool].gpu
        moved = self.gradient_bytes + ITEMSIZE[gpu.dtype]
        return (moved + OPTIMIZER_BYTES) * parameters / (LINK * gpu.pcie)

    def transferred(self, shape: ModelShape, head: Head, source: Share, target: Share) -> float:
        if self._system.shared_weights and source.overlaps(target) and target.fsdp == 3:
            return 0.0  # gathered when used, not before
        return super().transferred(shape, head, source, target)

    def swap(self, task: Task, share: Share) -> float:
        return 0.0 if self._system.hidden_swaps else super().swap(task, share)


def _static(server: Servers, samples: int, prompt: Lengths, response: Lengths) -> float:
    """Batches one after the other, each until its longest sample is done."""
    slots = min(samples, server.slots(prompt.mean + response.longest))
    rounds, rest = divmod(samples, slots)
    sizes = [slots] * rounds + ([rest] if rest else [])
    return sum(n * prompt.mean * server.prefill + response.longest * float(server.steps[n]) for n in sizes)


class _Memory(GPUMemoryModel):
    def __init__(self, work: Workload, inventory: Inventory, system: System) -> None:
        super().__init__(work, inventory)
        self._system = system
        self._beside: Candidate | None = None

    def _loads(self, candidate: Candidate, on: list[tuple[Task, Share]]) -> Loads:
        self._beside = candidate
        try:
            return super()._loads(candidate, on)
        finally:
            self._beside = None

    def awake(self, share: Share) -> bool:
        return super().awake(share) and not self._system.shared_weights

    def processes(self, tasks: Iterable[Task]) -> int:
        return 1 if self._system.shared_weights else super().processes(tasks)

    def scored_tokens(self, share: Share) -> int:
        return share.micro_batch * self.work.longest

    def load(self, task: Task, share: Share, stage: int | None = None, both: bool = False) -> TaskMemory:
        """Where weights are shared, those of a training serve generation and the critic's inference on its GPUs."""
        alone, candidate = super().load(task, share, stage, both), self._beside
        if candidate is None or not self._system.shared_weights:
            return alone
        if task in TRAINING:
            used = candidate.shares("generation" if task == "actor_training" else "critic")
            held = any(other.range == share.range and other.pool == share.pool for other in used)
            return _kept(alone) if held and share.fsdp < 3 else alone
        trained = candidate.shares("critic_training" if task == "critic" else "actor_training")
        owner = next((t for t in trained if t.pool == share.pool and t.range == share.range), None)
        if task not in ("critic", "generation") or owner is None:
            return alone
        return self._owned(task, share, owner)

    def _owned(self, task: Task, share: Share, owner: Share) -> TaskMemory:
        """A task whose weights the training `owner` has already; under ZeRO-3 it gathers them."""
        awake = super().load(task, replace(share, offload=False))
        works = dict(awake.works)
        if share.fsdp < 3 and owner.fsdp == 3:
            works = {"gathered weights": awake.stays["weights"], **works}
        if share.offload:
            return TaskMemory({}, {**works, "weights": 0.0}, {"weights": 0.0})
        return TaskMemory({"weights": 0.0}, works)

    def stage_load(self, job: Training, stage: int) -> TaskMemory:
        """A step on the host keeps masters and gradients there."""
        found = super().stage_load(job, stage)
        if not (job.offload and self._system.host_step):
            return found
        each = 4 * trained_parameters(job, stage)[1] / (job.layout.dp if job.fsdp > 1 else 1)
        stays = {**found.stays, "weights": found.stays["weights"] * ITEMSIZE[job.dtype] / 4}
        works = {k: v for k, v in found.works.items() if k not in ("optimizer, stepping", "fragments")}
        works["gradients"] -= each
        works["fragments"] = FRAGMENTS * sum(works.values())
        return TaskMemory(stays, works, {**found.host, "masters": found.stays["weights"], "gradients": each})


def _kept(load: TaskMemory) -> TaskMemory:
    """The weights in the compute dtype serve another task too, so they stay."""
    works = {name: size for name, size in load.works.items() if name not in ("gathered weights", "fragments")}
    works["fragments"] = FRAGMENTS * sum(works.values())
    return TaskMemory({**load.stays, "gathered weights": load.works.get("gathered weights", 0.0)}, works, load.host)
