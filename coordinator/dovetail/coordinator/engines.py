"""The engines of a job: everything that a training loop calls. `dovetail run` and the Python API stand on this class.

    async with Engines(spec, plan, settings) as engines:
        await engines.run_sft()
        await engines.run_reward()
        await engines.begin_ppo()
        while engines.iteration < spec.ppo.iterations:
            experience = await engines.generate_experience()
            await engines.train(experience)
        await engines.finish()

Each call goes on from whatever the store says, so a coordinator that died repeats nothing that was finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from dovetail.api.messages import CommandResult, Offer, Register
from dovetail.api.plan import Plan
from dovetail.api.types import RLHFJobSpec, Stage
from dovetail.api.wire import Arrays, pack
from dovetail.coordinator.commands import ModelSources, supervised_step
from dovetail.coordinator.experience import Experience, ExperienceFiles
from dovetail.coordinator.experience_maker import ExperienceMaker, RewardFunction
from dovetail.coordinator.fleet import Fleet, Timeouts
from dovetail.coordinator.kl import KLController
from dovetail.coordinator.ppo import StepFacts, has_critic, iteration_metrics, optimizer_steps, other_seconds, ppo_step
from dovetail.coordinator.prepare import Prepared, PromptRecord, prepare
from dovetail.coordinator.publishing import Publisher
from dovetail.coordinator.server import make_app
from dovetail.coordinator.store import Store
from dovetail.coordinator.summary import build, mean_ci95, write_json
from dovetail.coordinator.supervised import Hooks, SupervisedStage, run_supervised
from dovetail.coordinator.telemetry import History, Metrics, Status
from dovetail.coordinator.timeline import Timeline
from dovetail.coordinator.trainer_group import TrainerGroup
from dovetail.coordinator.trainer_session import StagePlan, TrainerSession
from dovetail.coordinator.weight_sync import WeightSync

START_SECONDS = 900.0
WEIGHTS_SECONDS = 300.0
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Where the coordinator serves and keeps its files. `reward_function` replaces the manifest's, if given."""

    run_dir: Path
    token: str
    host: str
    port: int
    base_dir: Path
    reward_function: RewardFunction | None = None


class Engines:
    """See the module's docstring. Not thread-safe: use from one event loop."""

    def __init__(self, spec: RLHFJobSpec, plan: Plan, settings: Settings, log: Callable[..., None]) -> None:
        self.spec = spec
        self.plan = plan
        self.settings = settings
        self.log = log
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self._status = Status()
        self._store = Store(settings.run_dir)
        self._history = History(settings.run_dir)
        self._timeline = Timeline(settings.run_dir)
        self._files = ExperienceFiles(settings.run_dir)
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._prepared: Prepared | None = None
        self._held_out: dict[Stage, list[Arrays]] = {}
        self._started = time.time()
        self.trainers = TrainerGroup(
            world_size=plan.world_size,
            generation=int(self._store.get("trainers/generation") or 1),
            formed=bool(self._store.get("trainers/formed")),
            peer_timeout=float(spec.failure_policy.peer_timeout_seconds),
            clock=time.monotonic,
            record_generation=self._record_generation,
            record_result=self._record_result,
            log=log,
        )
        self.session = TrainerSession(
            self.trainers, self._store, settings.run_dir, spec.checkpoint.keep, START_SECONDS, log
        )
        self._kinds = ("rollout", "scorer") if has_critic(spec) else ("rollout",)
        self.fleet = Fleet(
            time.monotonic, log, Timeouts(dead=float(spec.failure_policy.peer_timeout_seconds)), versioned=self._kinds
        )

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> Engines:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.settings.token}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        self._publisher = Publisher(self.trainers, self._session, float(self.spec.failure_policy.peer_timeout_seconds))
        self._runner = web.AppRunner(make_app(self, self.settings.token, self.registry), access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.settings.host, self.settings.port, reuse_address=True).start()
        except OSError as error:
            raise OSError(f"port {self.settings.port} on {self.settings.host} is taken: {error.strerror}") from error
        self._status.update(state="running", message="preparing data and tokenizer")
        self._prepared = await asyncio.to_thread(prepare, self.spec, self.settings.run_dir, self.settings.base_dir)
        self.sources = ModelSources(
            self.spec, self.settings.run_dir, self._prepared.model_ref, self.settings.reward_function is None
        )
        self._maker = ExperienceMaker(self, self.settings.reward_function)
        self._sync = WeightSync(
            self.fleet,
            self._publisher,
            self.session,
            self._maker.prepare_instance,
            self._kinds,
            self.log,
            WEIGHTS_SECONDS,
        )
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._hold())]
        self.log("coordinator.ready", host=self.settings.host, port=self.settings.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._prepared is not None:
            await self._maker.close()
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._history.close()
        self._store.close()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the job's loop; if one of the background tasks fails, so does the loop, with that error."""
        main = asyncio.create_task(work)
        try:
            await asyncio.wait({main, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            if not main.done():
                for task in self._tasks:
                    if task.done():
                        task.result()
            return await main
        finally:
            main.cancel()

    async def _watch(self) -> None:
        """Once a second: silent peers, and the instances' gauges."""
        while True:
            self.trainers.check_silence()
            for kind in ("rollout", "scorer"):
                ready = {i.name for i in self.fleet.eligible(kind)}
                for instance in self.fleet.instances(kind):
                    self.metrics.instance_ready.labels(instance.name, kind).set(instance.name in ready)
            await asyncio.sleep(1.0)

    async def _hold(self) -> None:
        """Whoever comes late, or comes back, is brought up to date while the stages go on."""
        await asyncio.gather(self.session.hold(), self._sync.hold(), self._maker.hold())

    # ------------------------------------------------------------ called by the HTTP server

    def register(self, message: Register) -> None:
        self.fleet.register(message)

    def offer(self, message: Offer) -> None:
        self._publisher.offer(message)

    def status(self) -> dict[str, Any]:
        instances = {i.name: {"kind": i.kind, "state": i.health.value} for i in self.fleet.instances()}
        return self._status.document(instances)

    async def batch(self, key: str) -> bytes:
        """Raises KeyError for an unknown key."""
        stage, _, number = key.partition("/")
        makers: dict[str, Callable[[int], Arrays]] = {
            "sft": self.prepared.sft_batch,
            "reward": self.prepared.reward_batch,
            "sft-eval": lambda i: self._eval_batches(Stage.SFT)[i],
            "reward-eval": lambda i: self._eval_batches(Stage.REWARD)[i],
        }
        if stage == "ppo":
            return self._files.read(int(number))
        if stage not in makers:
            raise KeyError(key)
        return pack(makers[stage](int(number)))

    def _eval_batches(self, stage: Stage) -> list[Arrays]:
        if stage not in self._held_out:
            prepared = self.prepared
            made = prepared.sft_eval_batches() if stage is Stage.SFT else prepared.reward_eval_batches()
            self._held_out = {stage: made}
        return self._held_out[stage]

    # ------------------------------------------------------------ parts that others use

    @property
    def prepared(self) -> Prepared:
        if self._prepared is None:
            raise RuntimeError("the coordinator is still preparing its data")
        return self._prepared

    @property
    def http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the engines as an async context manager")
        return self._session

    @property
    def store(self) -> Store:
        return self._store

    @property
    def timeline(self) -> Timeline:
        return self._timeline

    @property
    def progress(self) -> Status:
        return self._status

    # ------------------------------------------------------------ SFT and reward model

    async def run_sft(self) -> None:
        """Supervised fine-tuning of the actor, to models/sft. Facts: sft.loss_before, sft.loss_after."""
        stage = SupervisedStage(
            stage=Stage.SFT,
            model="actor",
            source=self.sources.actor(),
            steps=self.prepared.total_steps(Stage.SFT),
            make_step=lambda k: supervised_step(self.spec, self.plan, Stage.SFT, k),
            eval_batches=[f"sft-eval/{i}" for i in range(len(self._eval_batches(Stage.SFT)))],
            export_to=self.settings.run_dir / "models" / "sft",
            checkpoint_every=self.spec.checkpoint.every_steps,
        )
        await self._supervised(stage)
        for when in ("before", "after"):
            metrics = self._store.get(f"sft/{when}")
            if metrics:
                self._fact(f"sft.loss_{when}", metrics["loss"])

    async def run_reward(self) -> None:
        """Training of the reward model, to models/reward. Facts: reward_model.accuracy, .pairs."""
        stage = SupervisedStage(
            stage=Stage.REWARD,
            model="reward",
            source=self.sources.reward(),
            steps=self.prepared.total_steps(Stage.REWARD),
            make_step=lambda k: supervised_step(self.spec, self.plan, Stage.REWARD, k),
            eval_batches=[f"reward-eval/{i}" for i in range(len(self._eval_batches(Stage.REWARD)))],
            export_to=self.settings.run_dir / "models" / "reward",
            checkpoint_every=self.spec.checkpoint.every_steps,
        )
        await self._supervised(stage)
        after = self._store.get("reward/after")
        if after:
            self._fact("reward_model.accuracy", after["accuracy"])
            self._fact("reward_model.pairs", after["pairs"])

    async def _supervised(self, stage: SupervisedStage) -> None:
        if self._store.get(f"{stage.stage.value}/done"):
            return
        self._status.update(state="running", stage=stage.stage.value, step=0, total_steps=stage.steps, phase="training")
        await run_supervised(stage, self.session, self._store, Hooks(self._on_step, self._fact))
        self.log("stage.finished", stage=stage.stage.value)

    def _on_step(self, stage: Stage, step: int, total: int, result: CommandResult) -> None:
        self._history.add(stage, step, result.metrics)
        self.metrics.stage_step.labels(stage.value).set(step)
        self.metrics.steps.labels(stage.value).inc()
        self._status.update(step=step, total_steps=total, metrics=result.metrics, message="")

    # ------------------------------------------------------------ PPO

    @property
    def iteration(self) -> int:
        """Last finished PPO iteration."""
        return self.session.step

    async def begin_ppo(self) -> None:
        """Load actor and critic and bring their weights to the rollouts and scorers."""
        progress = self._store.get("ppo/progress") or {"step": 0, "kl_coef": self.spec.ppo.kl.coef}
        self._kl = KLController.from_config(self.spec.ppo.kl, progress["kl_coef"])
        models = {"actor": self.sources.actor_for_ppo()}
        if has_critic(self.spec):
            models["critic"] = self.sources.critic()
        self.session.begin(
            StagePlan(Stage.PPO, models, optimizer_steps(self.spec), self._ppo_step), int(progress["step"])
        )
        self._status.update(
            state="running",
            stage="ppo",
            iteration=self.iteration,
            total_iterations=self.spec.ppo.iterations,
            phase="weights",
            message="waiting for rollouts to take the first weights",
        )
        await self._sync.publish(self.iteration)
        self._timeline.begin()

    async def generate_experience(self, prompts: Sequence[str] | None = None) -> Experience:
        """Answer and score the next iteration's prompts: `prompts`, or else the job's own.

        What the store already holds of the iteration (after a crash) is not done again."""
        iteration = self.iteration + 1
        self._status.update(iteration=iteration, message="")
        prepared = self.prepared
        if prompts is None:
            records = prepared.prompts(iteration)
        else:
            records = [PromptRecord(i, text, prepared.encoder.prompt(text), {}) for i, text in enumerate(prompts)]
        return await self._maker.make(iteration, records)

    async def train(self, experience: Experience) -> dict[str, float]:
        """One iteration's training on `experience`, then the new weights to all. Returns the iteration's metrics."""
        iteration = experience.iteration
        if iteration != self.iteration + 1:
            raise ValueError(f"experience of iteration {iteration} given, {self.iteration + 1} expected")
        if self._store.get(f"ppo/{iteration}/facts") is None:
            facts = StepFacts(
                self._kl.coef, iteration > self.spec.ppo.critic_warmup_iterations or not has_critic(self.spec)
            )
            self._files.write(iteration, experience.arrays)
            self._store.put(f"ppo/{iteration}/facts", facts.as_json())
        self._maker.in_batch(iteration)
        with self._timeline.phase("training"):
            self._status.update(phase="training")
            result = await self.session.run_step()
            self._timeline.add(result.spans)
            self._kl.update(float(experience.kl.mean()), len(experience.responses))
            self._store.put("ppo/progress", {"step": iteration, "kl_coef": self._kl.coef})
            self._maker.trained(iteration)
        with self._timeline.phase("weights"):
            self._status.update(phase="weights")
            await self._sync.publish(iteration)
        if iteration % self.spec.checkpoint.every_steps == 0:
            with self._timeline.phase("checkpoint"):
                await self.session.save()
                self._files.forget_through(iteration)
                self._store.samples.forget_before(iteration)
        return self._close_iteration(experience, result)

    def _close_iteration(self, experience: Experience, result: CommandResult) -> dict[str, float]:
        timeline, iteration = self._timeline, experience.iteration
        wall = time.time() - timeline.started
        phases = {**timeline.phases, "other": other_seconds(wall, timeline.phases)}
        metrics = iteration_metrics(experience, result.metrics, phases, wall)
        self._history.add(Stage.PPO, iteration, metrics)
        totals = self._store.get("ppo/totals") or {"samples": 0, "seconds": 0.0, "phases": {}}
        totals["samples"] += len(experience.responses)
        totals["seconds"] += wall
        for name, seconds in phases.items():
            totals["phases"][name] = totals["phases"].get(name, 0.0) + seconds
            self.metrics.phase_seconds.labels(name).inc(seconds)
        self._store.put("ppo/totals", totals)
        for when in ["first"] * (iteration == 1) + ["last"]:
            self._fact(f"ppo.reward_{when}", mean_ci95(experience.scores.tolist()))
            self._fact(f"ppo.kl_{when}", mean_ci95(experience.kl.tolist()))
        self.metrics.reward.set(metrics["reward"])
        self.metrics.kl.set(metrics["kl"])
        self.metrics.rate.set(metrics["samples_per_second"])
        self.metrics.iteration_seconds.observe(wall)
        self.metrics.weight_version.set(iteration)
        self.metrics.stage_step.labels("ppo").set(iteration)
        self.metrics.steps.labels("ppo").inc()
        self._status.update(iteration=iteration, metrics=metrics, phase=None)
        self.log("iteration.finished", iteration=iteration, **{k: round(v, 5) for k, v in metrics.items()})
        timeline.write(iteration)
        timeline.begin()
        return metrics

    def _ppo_step(self, iteration: int) -> Any:
        facts = self._store.get(f"ppo/{iteration}/facts")
        return ppo_step(self.spec, self.plan, iteration, StepFacts(**facts))

    # ------------------------------------------------------------ end

    async def finish(self) -> dict[str, Any]:
        """Export the trained models and write summary.json; returns its content."""
        self._status.update(phase="export", message="exporting models")
        folder = self.settings.run_dir / "models"
        if Stage.PPO in self.spec.stages:
            await self.session.export("actor", folder / "actor")
            if self.spec.ppo.ema is not None:
                await self.session.export("ema", folder / "actor-ema")
            if has_critic(self.spec):
                await self.session.export("critic", folder / "critic")
        document = self.write_summary("succeeded")
        self._status.update(state="succeeded", phase=None, message="")
        self.log("job.succeeded")
        return document

    def write_summary(self, state: str, reason: str | None = None) -> dict[str, Any]:
        """summary.json from the facts so far."""
        facts = {key.removeprefix("fact/"): value for key, value in self._store.items("fact").items()}
        totals = self._store.get("ppo/totals")
        spent = float(self._store.get("job/seconds") or 0.0) + time.time() - self._started
        document = build(facts)
        document |= {"state": state, "seed": self.spec.seed, "wall_seconds": spent}
        if reason is not None:
            document["reason"] = reason
        if totals:
            document["samples_per_second"] = totals["samples"] / totals["seconds"]
            document["phases"] = totals["phases"]
        write_json(self.settings.run_dir / "summary.json", document)
        return document

    def fail(self, reason: str) -> None:
        """Record that the job failed, and why."""
        self._status.update(state="failed", message=reason)
        self.write_summary("failed", reason)
        self.log("job.failed", reason=reason)

    def note_time(self) -> None:
        """Add this process's life to the job's wall time; call once, when it ends before the job does."""
        self._store.put("job/seconds", float(self._store.get("job/seconds") or 0.0) + time.time() - self._started)

    # ------------------------------------------------------------ records

    def _fact(self, name: str, value: object) -> None:
        self._store.put(f"fact/{name}", value)

    def _record_generation(self, generation: int) -> None:
        self._store.put_all({"trainers/generation": generation, "trainers/formed": self.trainers.formed})
        if self.trainers.formed:
            self.metrics.generations.inc()

    def _record_result(self, result: CommandResult) -> None:
        self._store.put(f"result/{result.id}", result.model_dump(mode="json", exclude={"spans"}))
