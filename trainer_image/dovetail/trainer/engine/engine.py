"""The engine of one trainer rank: models, optimizers and EMA of a stage, and the collective operations on them.

Every public method is collective. All ranks call it with the same arguments, and only the work differs between dp
ranks."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.manifest.training_types import Optimizer
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.models.config import balance_coefficient
from dovetail.models.layers.expert_routing import take_counts, take_unbalance
from dovetail.protocol.messages import Action, Load, Step
from dovetail.trainer.communication.groups import Groups, PeerLost, peer_errors
from dovetail.trainer.engine import checkpoint
from dovetail.trainer.engine.action_measures import Collected
from dovetail.trainer.engine.engine_model import EngineModel, EngineState, parts, senders
from dovetail.trainer.engine.executor import Executor, MicroBatch, Pipe, Record, agree_on_work, check_actions
from dovetail.trainer.engine.model_export import export_model
from dovetail.trainer.engine.optim import OptimizerStep, ema_update, local
from dovetail.trainer.engine.parallel import (
    drop_gathered,
    reshard,
    set_last_backward,
    take_gradients,
    take_split_gradients,
)
from dovetail.trainer.engine.reduction import Reduction
from dovetail.trainer.weight_sender import Source, WeightParts

Stepped = Callable[[str, dict[str, float]], None]


class Engine(EngineState):
    """Builds the models that `load` names, and trains them.

    For every executed action `record(name, start, end)` gets a span, in seconds since the epoch."""

    def __init__(self, spec: RLHFJobSpec, groups: Groups, record: Record | None = None) -> None:
        super().__init__(spec, groups)
        self.record = record
        self.measured = Collected()
        self.boundaries: dict[str, tuple[torch.Size, torch.dtype]] = {}  # shape and dtype of messages between stages
        # The optimizer steps, by model, that are decided but not applied to all parameters yet. See `run`.
        self._begun: dict[str, OptimizerStep] = {}

    # ------------------------------------------------------------ state

    def load(self, command: Load) -> None:
        """Drop all models and build the command's models, from their sources or from its checkpoint.

        Raises `RankFailed` with one sentence on every rank if any rank could not do it, and `PeerLost`."""
        self.models, self.ema, self.stage, self.step, self._begun = {}, {}, None, 0, {}
        self.loaded, self.boundaries = dict(command.models), {}
        error = None
        try:
            for name, layout in sorted({**self.groups.planned, **command.layouts}.items()):
                self.groups.place(name, layout)
            for name, ref in command.models.items():
                if name in self.groups.elsewhere:
                    continue
                self.models[name] = EngineModel.build(
                    name,
                    ref,
                    getattr(self.spec.models, name),
                    self._optimizer_config(command.stage, name),
                    self._steps_of(command.stage, name, command.total_steps),
                    self.groups.of(name),
                    self.groups.device,
                    weights=command.checkpoint is None,
                    always_shard=self.spec.plan.sharding == "Always",
                    checkpointing=name in command.recompute,
                    compiling=self.spec.trainer.compile == "Auto",
                    by_layer=name in command.zero3,
                )
            self.stage = command.stage
            if self.averages and "actor" in self.models:
                self.ema = {n: local(p).clone() for n, p in self.models["actor"].trainable().items()}
        except PeerLost:
            raise
        except Exception as problem:
            error = sentence(problem)
        self.groups.all_succeed(error)
        if command.checkpoint is not None:
            self.step = checkpoint.restore(self, Path(command.checkpoint), command.run)

    def follow(self, command: Step) -> None:
        """Set each model's learning rate and number of steps, where the command names another."""
        for name, model in self.models.items():
            totals = (
                total and self._steps_of(command.stage, name, total)
                for total in (command.total_steps, command.warmup_total)
            )
            model.optimizer.follow(command.learning_rates.get(name), *totals)

    def _steps_of(self, stage: Stage, model: str, total: int) -> int:
        """The optimizer steps of a model in a stage of `total` steps. While the critic is trained alone, the actor
        takes none."""
        ppo = self.spec.ppo
        late = ppo.critic_warmup_iterations if stage is Stage.PPO and model == "actor" else 0
        return total - late * ppo.steps_per_iteration

    @property
    def averages(self) -> bool:
        """Whether the ranks that hold the actor keep its moving average (`ppo.ema`)."""
        return self.stage is Stage.PPO and self.spec.ppo.ema is not None and "actor" in self.loaded

    def _optimizer_config(self, stage: Stage, model: str) -> Optimizer:
        if stage is Stage.PPO:
            return self.spec.ppo.actor_optimizer if model == "actor" else self.spec.ppo.critic_optimizer
        return self.spec.supervised(stage).optimizer

    def save(self, path: Path, run: str = "") -> None:
        """Write a checkpoint folder, completely or not at all.

        Raises `RankFailed` on every rank if any rank could not write, for example because the disk is full."""
        self.settle()
        checkpoint.save(self, path, run)

    def export(self, model: str, path: Path, subtract: float = 0.0, run: str = "") -> None:
        """Write `model` (or `ema`) as a Hugging Face folder, completely or not at all, with adapters merged.

        `subtract` is subtracted from every value of a model with a value head. Raises `RankFailed` on every rank if any
        rank could not write."""
        self.settle()
        export_model(self, model, path, subtract, run)

    # ------------------------------------------------------------ work

    def run(
        self,
        actions: Sequence[Action],
        work: dict[str, list[MicroBatch]],
        mini_batches: int = 1,
        stepped: Stepped | None = None,
        schedule: str = "",
        defer: bool = False,
    ) -> dict[str, dict[str, float]]:
        """Execute this rank's actions and accumulate gradients.

        `work[model]` holds the micro-batches of this dp rank. They are the same on all its pipeline stages. Those of
        `mini_batches` optimizer steps come one after another. It holds nothing of models on other ranks.

        Without `stepped` the caller makes the optimizer steps. With it, a model's steps are applied within the run,
        each before the model's next mini-batch. At the end of the run every rank calls `stepped` for each step, with
        what `optimizer_step` returns. With `defer` each model's last step is decided and reported, but the next
        operation applies it. So weights can be sent while they are updated (`sendable`).

        All ranks compare `schedule`. Returns each model's loss statistics, summed over micro-batches and dp ranks, the
        same on every rank. Raises `FloatingPointError` on every rank if a gradient norm is not finite, `ValueError` for
        actions that do not fit the work, `RuntimeError` if schedules differ, and `PeerLost`."""
        self.settle()
        chunks = {name: self.models[name].groups.chunks for name in work}
        check_actions(actions, {name: len(batches) for name, batches in work.items()}, True, mini_batches, chunks)
        steps: dict[str, list[dict[str, float]]] = {}

        def keep(name: str, applied: dict[str, float]) -> None:
            steps.setdefault(name, []).append(applied)

        during = None if stepped is None else keep
        pipes = {n: self._training_pipe(self.models[n], b, mini_batches, during, defer) for n, b in work.items()}
        agree_on_work(pipes, list(self.loaded), schedule, self.groups.control, self.groups.rank)
        executor = self._executor(pipes)
        error = None
        try:
            executor.run(actions)
        except FloatingPointError as problem:
            error = str(problem)  # other ranks may hold nothing of this model, so the error is shared below
        executor.report()
        self._meet()
        for name in pipes:
            self.models[name].module.eval()
        counts = {name: pipe.mini_batch for name, pipe in pipes.items()}
        self.measured.add(executor.watch.seconds(), executor.saved_bytes, executor.peak_bytes, counts)
        self.boundaries |= {name: (pipe.boundary(), pipe.dtype) for name, pipe in pipes.items() if pipe.batches}
        mine = {name: _sum(pipe.stats) for name, pipe in pipes.items() if pipe.stage.is_last and pipe.groups.speaks}
        for name, pipe in pipes.items():
            other, every = take_counts(pipe.stage)
            if every and not pipe.groups.tp_rank:
                mine.setdefault(name, {}).update(routing_differs=other, routing_chosen=every)
            unbalance, passes = take_unbalance(pipe.stage)
            if passes and not pipe.groups.tp_rank:
                share = passes / pipe.groups.token_ranks.size
                mine.setdefault(name, {}).update(router_aux_loss=unbalance, router_passes=share)
        total: dict[str, dict[str, float]] = {name: {} for name in work}
        for failed, part, there in self.groups.share_json([error, mine, steps]):
            error = error or failed
            steps = there | steps
            for name, values in part.items():
                found = total.setdefault(name, {})
                for key, value in values.items():
                    found[key] = found.get(key, 0.0) + value
        if error is not None:
            raise FloatingPointError(error)
        if stepped is not None:
            for name, each in sorted(steps.items()):
                for applied in each:
                    stepped(name, applied)
        return total

    def forward(
        self, model: str, batches: Sequence[MicroBatch], read: Callable[[Any, MicroBatch], Tensor]
    ) -> list[Tensor]:
        """Forward passes without gradients.

        `read(output, micro_batch)` takes a small tensor from the last stage's output. All stages of this dp rank get
        these tensors, on the trainer's device. The result is empty if the model is on other ranks. Raises
        `PeerLost`."""
        self.settle()
        if model not in self.models:
            agree_on_work({}, [model], "", self.groups.control, self.groups.rank)
            self._meet()
            return []
        held = self.models[model]
        pipe = Pipe(held.module, held.groups, batches, self.groups.device, held.compute, read=read)
        actions = _forwards(model, len(batches), held)
        check_actions(actions, {model: len(batches)}, False, chunks={model: held.groups.chunks})
        agree_on_work({model: pipe}, [model], "", self.groups.control, self.groups.rank)
        # After a single pass nothing is used again. A probe is such a pass, and a vLLM server may be awake on this GPU.
        once = len(batches) <= 1
        drop_gathered(held.module, once or held.by_layer, once)
        executor = self._executor({model: pipe})
        try:
            executor.run(actions, training=False)
            executor.report()
        finally:
            drop_gathered(held.module, held.by_layer, False)
        self._meet()
        reshard(held.module)
        if held.groups.pp_size == 1 or not batches:
            return pipe.results
        return self._share_results(held, pipe.results)

    def optimizer_step(self, model: str) -> dict[str, float]:
        """Clip the gradient by its global norm, apply a step, and drop the gradient.

        The norm is over all stages and shards, and tied weights count once. Returns `grad_norm` (before clipping) and
        `learning_rate`, the same on every rank. If the norm is not finite, raises `FloatingPointError` on every rank
        and leaves the weights as they are."""
        if model in self._begun:
            self.settle()
        applied: dict[str, float] = {}
        error = None
        if (held := self.models.get(model)) is not None:
            try:
                applied = self._decide(held, Reduction(held, self.groups.device))
                self._begun.pop(model).finish()
            except FloatingPointError as problem:
                error = str(problem)
        if self.groups.models_on_own_ranks:
            applied, error = self.groups.broadcast_json([applied, error], source=self.groups.first_rank(model))
        if error is not None:
            raise FloatingPointError(error)
        return applied

    def settle(self) -> None:
        """Apply what is left of deferred optimizer steps. Every method that reads weights calls this first."""
        for model in list(self._begun):
            self._begun.pop(model).finish()
            if model == "actor":
                self.after_actor_step()

    def _decide(self, held: EngineModel, reduction: Reduction) -> dict[str, float]:
        """Begin the optimizer step with the reduced gradient. Raises FloatingPointError if its norm is not finite."""
        norm = reduction.norm(self.groups.timeout, self.groups.awaiting)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of {held.name} is not finite at optimizer step {held.optimizer.steps + 1}; "
                "lower the learning rate"
            )
        limit = held.optimizer.config.max_grad_norm
        begun = self._begun[held.name] = held.optimizer.begin(limit / norm if norm > limit else 1.0)
        return {"grad_norm": norm, "learning_rate": begun.rate}

    def after_actor_step(self) -> None:
        """Update the averaged actor (`ppo.ema`), if there is one."""
        if self.ema and self.spec.ppo.ema is not None:
            parameters = [local(p) for p in self.models["actor"].trainable().values()]
            ema_update(self.ema.values(), parameters, self.spec.ppo.ema)

    def weights(self, model: str) -> Iterator[tuple[str, Tensor]]:
        """Do the same as `EngineState.weights`, after deferred optimizer steps were applied."""
        self.settle()
        return super().weights(model)

    def sendable(self, model: str, most: int) -> Source | WeightParts:
        """The weights of `weights`, to be sent by at most `most` ranks of each stage. Each sends what it holds. If a
        tensor is spread over more ranks than that, the first dp rank sends it. A deferred step is applied to each layer
        just before the layer is read."""
        held = self.models[model]
        layout = senders(held, most)
        if layout is None:
            return lambda: self.weights(model)

        def ready(names: list[str]) -> None:
            if model in self._begun:
                self._begun[model].apply(names)

        return WeightParts(lambda: parts(held, ready), layout)

    # ------------------------------------------------------------ helpers

    def _meet(self) -> None:
        """Wait for the ranks of other models, which may take much longer."""
        if self.groups.models_on_own_ranks:
            self.groups.meet()

    def _executor(self, pipes: dict[str, Pipe]) -> Executor:
        return Executor(pipes, self.groups.timeout, self.record, awaiting=self.groups.awaiting)

    def _training_pipe(
        self, held: EngineModel, batches: list[MicroBatch], mini_batches: int, stepped: Stepped | None, defer: bool
    ) -> Pipe:
        held.module.train()
        set_last_backward(held.module, False, held.alone, held.by_layer)
        pipe = Pipe(
            held.module,
            held.groups,
            batches,
            self.groups.device,
            held.compute,
            before_forward=self._seeder(held),
            before_last_backward=lambda: set_last_backward(held.module, True, held.alone, held.by_layer),
            after_weight_gradient=lambda last: take_split_gradients(held.module, held.compute, last, held.alone),
            mini_batch=len(batches) // mini_batches,
            by_layer=held.by_layer,
            reduce=lambda: self._take(held),
        )
        asked = getattr(self.spec.models, held.name).router_aux_loss_coef
        pipe.balance = balance_coefficient(held.module.config, asked) / (pipe.mini_batch * held.dp_size)
        if stepped is not None:
            begun: list[Reduction] = []
            left = [*range(mini_batches)]

            def step() -> None:
                applied = self._decide(held, begun.pop())
                set_last_backward(held.module, False, held.alone, held.by_layer)
                if left.pop() or not defer:
                    self._begun.pop(held.name).finish()
                    if held.name == "actor":
                        self.after_actor_step()
                stepped(held.name, applied)

            def reduce() -> None:
                self._take(held)
                begun.append(Reduction(held, self.groups.device))

            pipe.reduce, pipe.step = reduce, step
        return pipe

    def _take(self, held: EngineModel) -> None:
        if held.alone:
            take_gradients(held.module)

    def _seeder(self, held: EngineModel) -> Callable[[int, int], None] | None:
        """A function that seeds LoRA dropout by position, so that neither the schedule nor a restart changes it. It is
        None without dropout."""
        if held.trained.lora is None or held.trained.lora.dropout == 0.0:
            return None

        def seed(chunk: int, micro_batch: int) -> None:
            place = f"{held.module.stages[chunk]}/{held.groups.dp_rank}"
            now = f"{self.spec.seed}/{held.name}/{held.optimizer.steps}"
            digest = hashlib.sha256(f"{now}/{place}/{micro_batch}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

        return seed

    def _share_results(self, held: EngineModel, results: list[Tensor]) -> list[Tensor]:
        source, group = held.groups.last_rank, held.groups.pp_group
        dtypes = {str(result.dtype).removeprefix("torch.") for result in results}
        if len(dtypes) > 1:
            raise ValueError(f"results of one forward call must have one dtype, not {sorted(dtypes)}")
        header = self.groups.broadcast_json([sorted(dtypes), [list(r.shape) for r in results]], group, source)
        shapes = [torch.Size(shape) for shape in header[1]]
        sizes = [shape.numel() for shape in shapes]
        if held.is_last:
            flat = torch.cat([result.reshape(-1) for result in results])
        else:
            flat = torch.empty(sum(sizes), dtype=getattr(torch, header[0][0]), device=self.groups.device)
        with peer_errors(f"sharing results of {held.name} along its pipeline"):
            dist.broadcast(flat, src=source, group=group)
        return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _forwards(model: str, count: int, held: EngineModel) -> list[Action]:
    """The forward passes of all micro-batches on this rank. A later chunk's pass comes when the first chunk's output
    can have returned. So few tensors wait in between."""
    stages = held.module.stages
    behind = [-((stages[0] - stage) // len(stages)) for stage in stages]
    return [
        Action(model=model, micro_batch=step - late, kind="F", chunk=chunk)
        for step in range(count + behind[-1])
        for chunk, late in enumerate(behind)
        if 0 <= step - late < count
    ]


def _sum(stats: list[dict[str, Tensor]]) -> dict[str, float]:
    """Add up scalars by key, in micro-batch order, in float64. The host waits for a GPU only once."""
    total: dict[str, Tensor] = {}
    for values in stats:
        for key, value in values.items():
            number = torch.as_tensor(value).detach().double()
            total[key] = total[key] + number if key in total else number
    if not total:
        return {}
    device = next((value.device for value in total.values() if value.is_cuda), torch.device("cpu"))
    return dict(zip(total, torch.stack([value.to(device) for value in total.values()]).tolist(), strict=True))


def sentence(problem: Exception) -> str:
    """The problem as one sentence for the user."""
    if isinstance(problem, torch.OutOfMemoryError | MemoryError):
        return "out of memory while loading a model; use more ranks, a smaller model or LoRA"
    text = str(problem).strip().splitlines()
    return text[0] if text else type(problem).__name__


def choose_algorithms(deterministic: bool) -> None:
    """Make torch use only deterministic algorithms, on CPUs always and on GPUs if `deterministic`. On a GPU an
    operation without such an algorithm then fails."""
    gpu = torch.cuda.is_available()
    torch.utils.deterministic.fill_uninitialized_memory = False
    if deterministic or not gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # With `warn_only`, flash attention keeps its own backward pass, whose sums differ from run to run.
        torch.use_deterministic_algorithms(True, warn_only=not gpu)
