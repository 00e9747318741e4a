"""Real transformer stages on two ranks: training under several schedules, against torch's own 1F1B and ZB-V."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from dovetail.coordinator.schedules.stored_schedule import StoredSchedule, encode
from dovetail.coordinator.schedules.training_schedule import (
    Times,
    choose_schedule,
    rank_actions,
    shared_layouts,
    training_problem,
)
from dovetail.manifest.types import Parallelism, RLHFJobSpec, ScratchModel
from dovetail.models import PipelineStage, load_config
from dovetail.pipelines import (
    Schedule,
    ScheduleProblem,
    SearchEffort,
    evaluate,
)
from dovetail.pipelines.instance import make_instance
from dovetail.protocol.messages import Action, Load, ModelRef, StageTimes
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.packed_batches import Sequences
from pipeline import torch_zbv

VOCABULARY = 1024
WARM_UP = 8  # rounds; the first ones meet pages that nobody has touched yet
# By placement: stages of a model on a rank, and whether the critic's run against the actor's.
FAMILIES = {
    (1, True): ("serial", "zero-bubble", "fused", "fused-split"),
    (1, False): ("stitched",),
    (2, True): ("fused-v", "fused-v-whole"),
    (2, False): ("zb-v", "v-half"),
}
# Of each number of stages on a rank: schedules with both kinds of backward, whose passes are measured.
MEASURED = {1: ("serial", "fused-split"), 2: ("fused-v-whole", "fused-v")}


@dataclass(frozen=True)
class Found:
    """A schedule: predicted seconds, peak bytes of each rank, each rank's word; on rank 0 all that the search says."""

    family: str
    makespan: float
    peaks: list[float]
    words: list[str]
    schedule: Schedule | None = None

    def actions(self, rank: int) -> list[Action]:
        return StoredSchedule(self.family, 1, self.words).actions()[rank]


class Bench:
    """One rank. `settings`: layers, hidden, micro_batches, sequences, tokens, repeats."""

    def __init__(self, rank: int, world: int, port: int, settings: dict[str, int]) -> None:
        self.rank, self.world, self.s = rank, world, settings
        plain = Parallelism(pp=world)
        self.groups = Groups.form("127.0.0.1", port, rank, world, {"actor": plain, "critic": plain}, 900.0)
        groups = [{"name": "t", "roles": ["trainer", "rollout"]}]
        self.engine = Engine(RLHFJobSpec.model_validate({"groups": groups}), self.groups)
        self.counts = {"actor": settings["micro_batches"], "critic": settings["micro_batches"]}

    def load(self, reverse: bool, chunks: int) -> None:
        """Place the stages and build both models anew."""
        scratch = ScratchModel(
            architecture="llama",
            config={
                "vocab_size": VOCABULARY,
                "hidden_size": self.s["hidden"],
                "intermediate_size": 3 * self.s["hidden"],
                "num_hidden_layers": self.s["layers"],
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "tie_word_embeddings": False,
            },
        )
        self.layouts = shared_layouts({m: Parallelism(pp=self.world) for m in ("actor", "critic")}, reverse, chunks)
        refs = {
            "actor": ModelRef(head="lm", scratch=scratch, seed=1),
            "critic": ModelRef(head="value", scratch=scratch, seed=2),
        }
        self.engine.load(Load(id="load", stage="ppo", models=refs, total_steps=100, layouts=dict(self.layouts)))

    def work(self) -> dict[str, list[MicroBatch]]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.s["sequences"], self.s["tokens"])
        lengths = torch.full((self.s["sequences"],), self.s["tokens"])

        def one(model: str) -> MicroBatch:
            tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
            packed = Sequences(tokens, lengths).pack(range(len(tokens)), torch.ones_like(tokens, dtype=torch.bool))

            def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                rows = output.view(*shape, -1)
                value = token_loss(rows, tokens) if model == "actor" else output.square().mean()
                return value / self.s["micro_batches"], {}

            return MicroBatch(packed, loss)

        return {model: [one(model) for _ in range(count)] for model, count in self.counts.items()}

    def timed(self, *lists: list[Action]) -> tuple[float, int]:
        """Wall seconds of one mini-batch of both models without the optimizer's, and this rank's peak of bytes."""
        work = self.work()
        self.groups.barrier()
        start = time.perf_counter()
        peak = 0
        for actions in lists:
            models = {action.model for action in actions}
            self.engine.run(actions, {m: work[m] for m in models})
            peak = max(peak, self.engine.measured.peak_bytes)
        self.groups.barrier()
        seconds = time.perf_counter() - start
        for held in self.engine.models.values():
            for parameter in held.trainable().values():
                parameter.grad = None
        return seconds, peak

    def measured(self) -> list[Any]:
        """Every rank's times since the last call, on every rank."""
        parts = self.groups.share_json([t.model_dump(mode="json") for t in self.engine.measured.take(self.rank)])
        return [part for mine in parts for part in mine]

    def latency(self) -> float:
        """Seconds that one boundary tensor takes from rank 0 to rank 1."""
        model = self.engine.models["actor"].groups
        tensor = torch.zeros(self.s["sequences"], self.s["tokens"], self.s["hidden"])
        times = []
        for _ in range(12):
            start = time.perf_counter()
            edge = model.edges[0]
            if self.rank == 0:
                dist.send(tensor, 1, group=edge.forward_out)
                dist.recv(tensor, 1, group=edge.backward_in)
            elif self.rank == 1:
                dist.recv(tensor, 0, group=edge.forward_in)
                dist.send(tensor, 0, group=edge.backward_out)
            times.append((time.perf_counter() - start) / 2)
        return float(self.groups.broadcast_json(statistics.median(times[2:])))


def compile_search() -> None:
    """Compile the planner's kernels, before the ranks are forked and wait for each other."""
    for (chunks, reverse), names in FAMILIES.items():
        layouts = shared_layouts({m: Parallelism(pp=2) for m in ("actor", "critic")}, reverse, chunks)
        problem = training_problem(layouts, {"actor": 2, "critic": 2}, 1)
        choose_schedule(problem, names, SearchEffort(workers=1, scale=0.01), reverse, chunks)


def token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross entropy."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def run(rank: int, world: int, port: int, settings: dict[str, int]) -> dict[str, Any]:
    """Everything measured on this rank; the same numbers on all, except `peaks`."""
    bench = Bench(rank, world, port, settings)
    rows: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {}
    times, c = Times(), 0.0
    for chunks, reverse in FAMILIES:
        bench.load(reverse, chunks)
        if reverse:
            c = c or bench.latency()
            times = measure(bench, c, chunks)
        found = plan(bench, times, c, reverse, chunks)
        bench.timed(next(iter(found.values())).actions(bench.rank))
        rounds(bench, rows, found, c)
        if (chunks, reverse) == (1, False):
            result = {"split": split_cost(bench, times, c)}
            seconds = torch_rounds(bench)
            rows["serial, torch's 1F1B"] = {**rows["serial"], "seconds": seconds, "own": None, "peaks": None}
    seconds = torch_zbv_rounds(bench)
    rows["zb-v, torch's ZBV"] = {**rows["zb-v"], "seconds": seconds, "own": None, "peaks": None}
    bench.groups.barrier()
    bench.groups.close()
    return {"rows": rows, "latency": c, **result}


def measure(bench: Bench, c: float, chunks: int) -> Times:
    """Seconds and bytes of each stage's passes, where the critic runs against the actor."""
    times = Times()
    warm = plan(bench, times, c, True, chunks)
    for name in MEASURED[chunks]:
        for _ in range(WARM_UP):
            bench.timed(warm[name].actions(bench.rank))
            seen = bench.measured()
        times.add([StageTimes.model_validate(part) for part in seen], bench.layouts)
    return times


def problem_of(bench: Bench, times: Times, c: float) -> ScheduleProblem:
    return training_problem(bench.layouts, bench.counts, 1, times, communication=c)


def split_cost(bench: Bench, times: Times, c: float) -> float:
    """How much longer both halves of a backward take than the whole, later stages only: the first has no halves."""
    problem, fields = problem_of(bench, times, c), ("input_gradient", "weight_gradient", "backward")
    arrays = [[problem.array(m, field)[1:] for field in fields] for m in (0, 1)]
    ratio = [((first + second) / whole).mean() for first, second, whole in arrays]
    return float(sum(ratio) / 2 - 1)


def plan(bench: Bench, times: Times, c: float, reverse: bool, chunks: int) -> dict[str, Found]:
    """The families' schedules for these times, rank 0's for all: searches may end unlike."""
    found, schedules = None, {}
    if bench.rank == 0:
        effort, names = SearchEffort(20.0, time.monotonic, 1, scale=0.1), FAMILIES[chunks, reverse]
        choice = choose_schedule(problem_of(bench, times, c), names, effort, reverse, chunks)
        schedules = dict(choice.schedules)
        found = {
            name: (s.makespan, s.peaks.tolist(), encode(rank_actions(s, bench.layouts)))
            for name, s in schedules.items()
        }
    shared = bench.groups.broadcast_json(found)
    return {name: Found(name, *values, schedules.get(name)) for name, values in shared.items()}


def from_own_passes(bench: Bench, found: Found, c: float) -> float:
    """The seconds of the round that has just run, predicted from its own passes and the schedule's orders. What it took
    longer are waits for messages and the executor's own work: passes take longer in one round than in another."""
    times = Times()
    times.add([StageTimes.model_validate(part) for part in bench.measured()], bench.layouts)
    seconds = None
    if found.schedule is not None:
        old, problem = found.schedule.instance, problem_of(bench, times, c)
        instance = make_instance(problem, old.placement, split=old.split, coupling=old.coupling)
        seconds = evaluate(instance, found.schedule.orders).makespan
    return float(bench.groups.broadcast_json(seconds))


def rounds(bench: Bench, rows: dict[str, dict[str, Any]], found: dict[str, Found], c: float) -> None:
    """Run the schedules in turn, several times over, so that the machine's moods hit all alike."""
    lists: dict[str, list[list[Action]]] = {}
    for name, schedule in found.items():
        mine = schedule.actions(bench.rank)
        # A barrier between the models, as the definition of serial has it.
        parts = [[a for a in mine if a.model == m] for m in ("actor", "critic")]
        lists[name] = parts if name in ("serial", "zero-bubble") else [mine]
    for mine in lists.values():
        bench.timed(*mine)  # the first round of a schedule meets memory that nothing has used yet
    bench.measured()
    own: dict[str, list[float]] = {name: [] for name in lists}
    seconds: dict[str, list[float]] = {name: [] for name in lists}
    peaks: dict[str, int] = {}
    for _ in range(bench.s["repeats"]):
        for name, mine in lists.items():
            took, peak = bench.timed(*mine)
            seconds[name].append(took)
            peaks[name] = peak
            own[name].append(from_own_passes(bench, found[name], c))
    for name, schedule in found.items():
        everyone = bench.groups.share_json(peaks[name])
        rows[name] = {
            "seconds": seconds[name],
            "predicted": schedule.makespan,
            "own": own[name],
            "peaks": [everyone, schedule.peaks],
        }


def torch_rounds(bench: Bench) -> list[float]:
    """The same stages, one model after the other on torch.distributed.pipelining's Schedule1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    size, count = bench.s["sequences"], bench.counts["actor"]
    schedules = []
    for name in ("actor", "critic"):
        held = bench.engine.models[name]
        shape = (size, bench.s["tokens"], bench.s["hidden"])
        inputs = torch.zeros(shape[:2], dtype=torch.int64) if held.is_first else torch.zeros(shape)
        held.module.train()
        if not held.is_first:
            inputs.requires_grad_(True)
        outputs = held.module(inputs).detach().requires_grad_(True)  # what needs a gradient is received
        stage = PipelineStage(
            held.module, bench.rank, bench.world, torch.device("cpu"), input_args=inputs, output_args=outputs
        )
        loss = token_loss if name == "actor" else (lambda output, _: output.square().mean())
        schedules.append((held, Schedule1F1B(stage, count, loss_fn=loss)))
    found = []
    for _ in range(bench.s["repeats"] + 1):
        work = bench.work()
        bench.groups.barrier()
        start = time.perf_counter()
        for held, schedule in schedules:
            tokens = torch.cat([b.packed.tokens.view(size, -1) for b in work[held.name]])
            given = (tokens,) if held.is_first else ()
            schedule.step(*given, target=tokens if held.is_last else None)
            bench.groups.barrier()
        found.append(time.perf_counter() - start)
        for held, _ in schedules:
            held.module.zero_grad()
    return found[1:]  # the first makes the communicators


def torch_zbv_rounds(bench: Bench) -> list[float]:
    """The same layers in stages of their own, one model after the other on torch's ZB-V, without a barrier between."""
    size, count = bench.s["sequences"], bench.counts["actor"]
    shape = torch.Size((size, bench.s["tokens"], bench.s["hidden"]))

    def make(name: str, stage: int) -> nn.Module:
        ref = bench.engine.models[name].ref
        module = PipelineStage(load_config(ref), ref.head, stage, 2 * bench.world)
        module.to_empty(device="cpu")
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
        module.place_buffers("cpu")
        return module.train()

    losses: dict[str, torch_zbv.Loss] = {"actor": token_loss, "critic": lambda output, _: output.square().mean()}
    example = torch.zeros(shape[:2], dtype=torch.int64)
    schedules = {
        name: torch_zbv.zb_v(partial(make, name), bench.rank, bench.world, example, shape, count, loss)
        for name, loss in losses.items()
    }
    found = []
    for _ in range(bench.s["repeats"] + 1):
        work = bench.work()
        tokens = {name: torch.cat([b.packed.tokens.view(size, -1) for b in work[name]]) for name in schedules}
        bench.groups.barrier()
        start = time.perf_counter()
        for name, schedule in schedules.items():
            torch_zbv.step(schedule, bench.rank, tokens[name])
        bench.groups.barrier()
        found.append(time.perf_counter() - start)
        for schedule in schedules.values():
            for stage in schedule._stages:
                stage.submod.zero_grad()
    return found[1:]  # the first makes the communicators
