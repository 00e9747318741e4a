"""Execute the coordinator's commands on this rank, together with all other ranks.

A command runs in two halves. `prepare` fetches data and checks it. It uses no collectives and changes nothing. Then all
ranks exchange the results. Only if every rank is ready do they all `run`. So a command that one rank cannot execute
costs nothing and leaves every rank usable."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dovetail.gpus.gpu_failure import GPUFailed, context_is_lost, names_cuda
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.protocol.messages import (
    BatchPart,
    Command,
    CommandResult,
    Evaluate,
    Export,
    Load,
    Offer,
    Probe,
    Publish,
    Save,
    Span,
    StageTimes,
    Step,
)
from dovetail.protocol.process.pulse import PROGRESS
from dovetail.protocol.wire import Arrays, unpack
from dovetail.trainer.algorithms.policy import load_loss
from dovetail.trainer.command_errors import BadCommand, is_out_of_memory, is_peer_loss, sentence
from dovetail.trainer.communication.groups import Groups, PeerLost, peer_errors
from dovetail.trainer.engine.checkpoint import CheckpointDamaged
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.functions import load_advantages
from dovetail.trainer.profile.links import measure_transfers
from dovetail.trainer.rank.coordinator_client import BatchAhead, RankProcess, Refused
from dovetail.trainer.steps import dpo_step as dpo
from dovetail.trainer.steps import ppo_step as ppo
from dovetail.trainer.steps import reward_step as reward
from dovetail.trainer.steps import sft_step as sft
from dovetail.trainer.steps.step_context import Context, Metrics, Run, SpanRecorder
from dovetail.trainer.weight_sender import WeightSender
from dovetail.trainer.weights.kept_weights import KeptWeights
from dovetail.trainer.weights.probe_logprobs import take_probe

# If one rank fails alone, the others first finish what they can. Some may then wait for it inside a collective. They
# are freed when the failed rank drops its groups after this many seconds.
LONELY_SECONDS = 10.0


class CommandRunner:
    """Executes the commands of one generation. Every rank calls `execute` with the same commands in the same order.

    `failed` outlives generations. It holds commands that failed on this rank and broke the groups, with the reason. A
    second try is then answered with the reason and not run again. `cancelled(id)` is called while a publish waits."""

    def __init__(
        self,
        process: RankProcess,
        spec: RLHFJobSpec,
        groups: Groups,
        failed: dict[str, str],
        cancelled: Callable[[str], bool] = lambda _: False,
        kept: KeptWeights | None = None,
    ) -> None:
        """`kept` gets the weight versions that `load` wants to be kept."""
        self.kept = kept or KeptWeights()
        self._groups, self._client, self._failed, self._log = groups, process.client, failed, process.log
        self._spec = spec
        self._ahead, self._last_step = BatchAhead(process.client), 0
        self.timeline = SpanRecorder(process.name)
        self.engine = Engine(spec, groups, self.timeline.record)
        self._context = Context(
            spec, groups, self.engine, self._fetch, self.timeline, load_loss(spec.ppo), load_advantages(spec.ppo)
        )
        sender_groups: Any = groups
        self._running = ""
        self._damaged = False  # whether the checkpoint that the command names is damaged
        self._timed_messages: set[str] = set()  # names of models
        self._sender = WeightSender(sender_groups, self._post_offer, cancelled=lambda: cancelled(self._running))
        self._dirty = False
        self._probe: Probe | None = None  # of the running command
        self._logprobs: list[float] = []  # of the running command

    @property
    def stage(self) -> Stage | None:
        """The stage that the ranks hold. It is None if nothing is loaded, or after a step that failed half-way."""
        return None if self._dirty else self.engine.stage

    @property
    def step(self) -> int:
        """The last applied step of the stage, or 0 if `stage` is None."""
        return self.engine.step if self.stage is not None else 0

    def close(self) -> None:
        """Free the models and the communicators."""
        self._sender.close()
        self.engine.models.clear()
        self.engine.ema.clear()
        self.kept.begin(0)

    def execute(self, command: Command) -> CommandResult:
        """The command's result. It is complete on rank 0; other ranks get no spans. After PeerLost, join again.

        A failure that all ranks agree on is in the result (`ok`, `error`). Raises PeerLost if the groups broke, and
        GPUFailed if this process can no longer use its GPU."""
        started = time.time()
        self._running = command.id
        self._damaged = False
        self._probe = None
        self._logprobs = []
        run: Run | None = None
        error: str | None = None
        try:
            if command.id in self._failed:
                raise BadCommand(self._failed.pop(command.id))
            run = self._prepare(command)
        except PeerLost:
            raise
        except Exception as problem:
            self._raise_if_the_gpu_failed(command, problem)
            error = self._explain(command, problem)
        error = self._first_error(error)
        metrics: Metrics = {}
        if error is None and run is not None:
            error, metrics = self._run(command, run)
        self.timeline.record(command.id, started, time.time(), "commands")
        mine = [span.model_dump(mode="json") for span in self.timeline.take()]
        gathered = self._groups.gather_json(mine)
        spans = [Span.model_validate(span) for part in gathered or [] for span in part]
        times: list[StageTimes] = []
        if isinstance(command, Step):
            # The stages before PPO have many short steps, and schedules use the times of few of them.
            wanted = command.stage is Stage.PPO or command.step.bit_count() == 1
            transfers = self._transfers() if wanted and error is None else {}
            times, metrics["activation_peak_bytes"] = self._measured(transfers)
            times = times if wanted else []
        metrics["seconds"] = time.time() - started
        return CommandResult(
            id=command.id,
            ok=error is None,
            error=error,
            damaged=self._damaged,
            metrics=metrics if error is None else {},
            logprobs=self._logprobs if error is None else [],
            spans=spans,
            times=times if error is None else [],
            probe=self._probe if error is None else None,
        )

    def _transfers(self) -> dict[str, float]:
        """The seconds of a message between stages, for each model that has not been measured yet."""
        new = {name: found for name, found in self.engine.boundaries.items() if name not in self._timed_messages}
        self._timed_messages |= new.keys()
        return measure_transfers(self._groups.model, new, self._groups.device)

    def _measured(self, transfers: dict[str, float]) -> tuple[list[StageTimes], float]:
        """The measurements of all ranks since the last call, and the largest activation peak in bytes. Only rank 0 gets
        them."""
        peak = self.engine.measured.peak_bytes
        taken = self.engine.measured.take(self._groups.rank)
        sent = ((part, None if part.chunk else transfers.get(part.model)) for part in taken)
        mine = [part.model_copy(update={"transfer": seconds}) for part, seconds in sent]
        gathered = self._groups.gather_json([peak, [part.model_dump(mode="json") for part in mine]]) or []
        times = [StageTimes.model_validate(part) for _, parts in gathered for part in parts]
        return times, float(max((peak for peak, _ in gathered), default=0))

    # ------------------------------------------------------------ prepare and run

    def _prepare(self, command: Command) -> Run:
        if isinstance(command, Load):
            return lambda: self._load(command)
        if self._dirty:
            raise BadCommand("the last step broke off half-way; send `load` first")
        if isinstance(command, Step):
            return self._prepare_step(command)
        if isinstance(command, Evaluate):
            if command.stage is Stage.PPO:
                raise BadCommand("evaluate is for stages sft, reward and dpo")
            self._check_stage(command.stage)
            if command.stage is Stage.DPO and command.reference:
                return dpo.prepare_reference(self._context, command, self._logprobs)
            evaluate = {
                Stage.SFT: sft.prepare_evaluate,
                Stage.REWARD: reward.prepare_evaluate,
                Stage.DPO: dpo.prepare_evaluate,
            }
            return evaluate[command.stage](self._context, command)
        if isinstance(command, Save):
            self._require_loaded()
            return lambda: self._timed("save", lambda: self.engine.save(Path(command.path), command.run))
        if isinstance(command, Export):
            self._require_loaded()
            self._require_model(command.model)
            path, subtract, by = Path(command.path), command.subtract, command.run
            return lambda: self._timed("export", lambda: self.engine.export(command.model, path, subtract, by))
        if isinstance(command, Publish):
            self._require_loaded()
            return lambda: self._publish(command)
        raise BadCommand(f"command {command.kind!r} is not known here")

    def _check_next(self, command: Step) -> None:
        self._check_stage(command.stage)
        if command.step != self.engine.step + 1:
            raise BadCommand(f"step {command.step} cannot follow step {self.engine.step}")

    def _prepare_step(self, command: Step) -> Run:
        self._check_next(command)
        prepare = {
            Stage.SFT: sft.prepare_step,
            Stage.REWARD: reward.prepare_step,
            Stage.DPO: dpo.prepare_step,
            Stage.PPO: ppo.prepare_step,
        }
        run = prepare[command.stage](self._context, command)

        def step() -> Metrics:
            self._fetch_ahead(command)
            self.engine.follow(command)
            metrics = run()
            if self._groups.device.type == "cuda":
                # A vLLM server that wakes up on this GPU can then use the memory of the activations.
                torch.cuda.empty_cache()
            self.engine.step = command.step
            self._keep()
            return metrics

        return step

    def _run(self, command: Command, run: Run) -> tuple[str | None, Metrics]:
        """The collective half. An error on all ranks becomes the result. An error on this rank alone breaks the groups.

        Raises PeerLost in that case, and if another rank was lost."""
        changes = isinstance(command, Load | Step)
        self._dirty = self._dirty or changes
        error: str | None = None
        metrics: Metrics = {}
        refused = False
        try:
            metrics = run()
        except BadCommand as problem:
            # This follows from the whole batch. So it is the same on every rank, and nothing was changed yet.
            error, refused = self._explain(command, problem), True
        except Exception as problem:
            if is_peer_loss(problem) or self._groups.lost is not None:
                raise PeerLost(f"{command.id}: {sentence(problem)}") from problem
            self._raise_if_the_gpu_failed(command, problem)
            error = self._explain(command, problem)
            self._damaged = isinstance(problem, CheckpointDamaged)
        if not self._all_here(error is not None):
            assert error is not None
            self._failed[command.id] = error
            raise PeerLost(f"{command.id} failed on this rank alone: {error}")
        error = self._first_error(error)
        if changes:
            self._dirty = error is not None and not refused
        return error, metrics

    def _all_here(self, failed: bool) -> bool:
        """Wait for the other ranks after the collective half. Returns False on a rank that failed if the others do not
        come, because they wait for it elsewhere. Raises PeerLost on the other ranks."""
        if self._groups.world_size == 1:
            return True
        options = dist.AllreduceOptions()
        # The limit must be that of the operation itself. Groups are closed only after their operations have ended, so
        # with a shorter wait alone this rank would hold the others for the groups' whole deadline.
        options.timeout = timedelta(seconds=LONELY_SECONDS) if failed else self._groups.timeout
        try:
            with peer_errors("waiting for the other trainer ranks"):
                self._groups.control.allreduce([torch.zeros(1)], options).wait()
        except PeerLost:
            if failed:
                return False
            raise
        return True

    def _first_error(self, error: str | None) -> str | None:
        """The error that all ranks share, or the lowest rank's if they differ. The result is the same on all ranks."""
        errors = [(rank, e) for rank, e in enumerate(self._groups.share_json(error)) if e is not None]
        if not errors:
            return None
        rank, first = errors[0]
        alone = len({e for _, e in errors}) > 1 or len(errors) < self._groups.world_size
        return f"{first} (trainer rank {rank})" if alone and "(trainer rank" not in first else str(first)

    # ------------------------------------------------------------ commands

    def _load(self, command: Load) -> Metrics:
        self._timed_messages.clear()  # SFT's times do not hold for PPO
        self._last_step = command.total_steps
        with self.timeline.phase("load"):
            self.kept.begin(command.keep_versions)
            self.engine.load(command)
            self._keep()
        return {"step": float(self.engine.step)}

    def _keep(self) -> None:
        """Keep the current weights and their probe, if versions are kept."""
        if not self.kept.keeps:
            return
        with self.timeline.phase("keep"):
            copies = self.kept.copy(self.engine, self._sender.max_senders)
            self.engine.settle()
            probe, problem = None, None
            try:
                probe = take_probe(self._context, self.engine.step)
            except FloatingPointError as error:
                problem = sentence(error)
            self.kept.add(copies, probe, problem)

    def _timed(self, name: str, action: Callable[[], None]) -> Metrics:
        with self.timeline.phase(name):
            action()
        return {}

    def _publish(self, command: Publish) -> Metrics:
        wanted = {model for receiver in command.receivers for model in receiver.models}
        most = self._sender.max_senders
        weights = {name: self.engine.sendable(name, most) for name in sorted(wanted & set(self.engine.models))}
        with self.timeline.phase("publish"):
            try:
                with PROGRESS.bounded():
                    sent = self._sender.publish(command, weights)
            finally:
                self.engine.settle()
            if any(receiver.kind == "rollout" for receiver in command.receivers):
                self._probe = take_probe(self._context, command.version)
        return sent

    # ------------------------------------------------------------ helpers

    def _check_stage(self, stage: Stage) -> None:
        self._require_loaded()
        if stage is not self.engine.stage:
            raise BadCommand(f"the command is for stage {stage}, the ranks hold {self.engine.stage}")

    def _require_loaded(self) -> None:
        if self.engine.stage is None:
            raise BadCommand("nothing is loaded; send `load` first")

    def _require_model(self, name: str) -> None:
        if name == "ema":
            if not self.engine.averages:
                raise BadCommand("there is no averaged actor to export; set ppo.ema")
        else:
            self._context.require(name)

    def _fetch(self, key: str, wanted: Callable[[Arrays], BatchPart] | None = None) -> Arrays:
        part = None if wanted is None else wanted(self._received(key, BatchPart()))
        return self._received(key, part)

    def _fetch_ahead(self, command: Step) -> None:
        """Fetch the batch of the step after this one, where it is known by now and does not depend on this step."""
        self._last_step = command.total_steps or self._last_step
        if command.stage in (Stage.SFT, Stage.REWARD) and command.step < self._last_step:
            self._ahead.fetch(f"{command.stage.value}/{command.step + 1}")

    def _received(self, key: str, part: BatchPart | None) -> Arrays:
        try:
            with PROGRESS.bounded():
                data = self._ahead.take(key) if part is None else self._client.batch(key, part)
        except Refused as refusal:
            raise BadCommand(f"batch {key}: {refusal}") from refusal
        try:
            return unpack(data)
        except Exception as error:  # the name of safetensors' error class differs between its versions
            raise BadCommand(f"batch {key} is not a valid safetensors document: {error}") from error

    def _post_offer(self, offer: Offer) -> None:
        self._client.offer(offer)

    def _raise_if_the_gpu_failed(self, command: Command, problem: Exception) -> None:
        """A failed GPU is no fault of the command. The job goes on with a new process."""
        if names_cuda(problem) and context_is_lost():
            raise GPUFailed(f"{command.id}: the GPU failed: {sentence(problem)}") from problem

    def _explain(self, command: Command, problem: Exception) -> str:
        remedy = ""
        if is_out_of_memory(problem):
            stage = command.stage.value if isinstance(command, Step | Load | Evaluate) else "ppo"
            settings = getattr(self._spec, stage)
            field = "microBatchSize" if settings.micro_batch_tokens is None else "microBatchTokens"
            size = settings.micro_batch_size if settings.micro_batch_tokens is None else settings.micro_batch_tokens
            kept = isinstance(command, Step) and self._spec.plan.recompute != "Always"
            also = "set plan.recompute to Always, " if kept else ""
            remedy = (
                f" while running {command.id}: lower {stage}.{field} (now {size}), {also}or spread the model "
                "over more ranks"
            )
        text = sentence(problem, remedy)
        self._log(
            "command.failed", id=command.id, error=text, exception=None if isinstance(problem, BadCommand) else problem
        )
        return text
