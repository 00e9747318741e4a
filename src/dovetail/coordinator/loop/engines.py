"""The engines of a job. `dovetail run` and the Python API both use this class.

    async with Engines(spec, plan, settings, log) as engines:
        await engines.guard(engines.run())

A training loop of one's own calls the parts of `run`. Each continues at the point that the store has recorded, so a
restarted coordinator repeats nothing that was finished."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.coordinator.data.fingerprints import ModelFolders
from dovetail.coordinator.data.prepare import GivenPrompt, Prepared, prepare
from dovetail.coordinator.job import Job
from dovetail.coordinator.loop.experience_maker import ExperienceMaker
from dovetail.coordinator.loop.model_sources import ModelSources
from dovetail.coordinator.loop.ppo_stage import PPOStage
from dovetail.coordinator.loop.supervised import SupervisedStages
from dovetail.coordinator.reporting.audit import audit, summary_of
from dovetail.coordinator.reporting.model_card import CardFacts
from dovetail.coordinator.reporting.model_files import describe_models, list_sizes
from dovetail.coordinator.reporting.page.page_documents import PageDocuments
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.reporting.run_records import RunRecords
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT
from dovetail.coordinator.reporting.trackers.tracker_processes import TrackerProcesses
from dovetail.coordinator.reporting.wait_chain import STALLED, Peer, PhaseClock, WaitingRun, wait_chain
from dovetail.coordinator.rewards.calls import Calls, RewardError, rehearse
from dovetail.coordinator.rewards.live import LiveFunction, RewardCallable
from dovetail.coordinator.rewards.workers import Workers
from dovetail.coordinator.samples.device_sharing import Devices
from dovetail.coordinator.samples.evaluation import Evaluator
from dovetail.coordinator.samples.evaluation_metrics import EvaluationMetrics
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.score import Score
from dovetail.coordinator.samples.scorers import Scorers
from dovetail.coordinator.samples.session_drawing import Episodes
from dovetail.coordinator.serving.coordinator_routes import make_app
from dovetail.coordinator.serving.served_batches import Batches, NotPrepared
from dovetail.coordinator.sessions.job_sessions import Places, job_environment
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.delivery import OutputError, check, deliver, deliver_history
from dovetail.coordinator.store.identity import check_complete, identify
from dovetail.coordinator.store.manifest_changes import adopt, reshard
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet, InstanceHealth, Timeouts
from dovetail.coordinator.workers.publishing import Publisher
from dovetail.coordinator.workers.ranks import Ranks
from dovetail.coordinator.workers.trainer_group import TrainerGroup
from dovetail.coordinator.workers.weights import Weights
from dovetail.manifest.sizes import has_critic
from dovetail.manifest.types import API_VERSION, KIND, RLHFJobSpec, Stage
from dovetail.protocol.experience import Experience
from dovetail.protocol.http import serving
from dovetail.protocol.http.client_session import client_session
from dovetail.protocol.messages import CommandResult, ModelRef, Offer, Register
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.endings import cancel
from dovetail.protocol.process.env import AGENTS_PORT
from dovetail.protocol.process.extras import installed_versions
from dovetail.protocol.process.process_names import scorer_name

# The time that the trainers may take to join, and a first rollout to start, if the manifest sets no limit.
START_SECONDS = 900.0
# The time that another process may take to leave the coordinator's port.
PORT_SECONDS = 60.0
# The time that running requests may take at the end. Trainers always wait for their next command, and they ask again.
CLOSE_SECONDS = 1.0
SHOWN = 1000  # characters of a text in an event
T = TypeVar("T")


@dataclass(frozen=True)
class CoordinatorSettings:
    """Where the coordinator serves and keeps its files. `job` is the job's name. `reward_function` is a function of
    this process that replaces the manifest's reward. If it is None, the manifest decides. `pods` says that the other
    processes are pods. Then the operator limits how long they may take to start."""

    run_dir: Path
    token: str
    host: str
    port: int
    base_dir: Path
    job: str = ""
    reward_function: RewardCallable | None = None
    pods: bool = False


class Engines:
    """The module's docstring shows how to use it. It is not thread-safe, so use it from one event loop only."""

    def __init__(self, spec: RLHFJobSpec, plan: Plan, settings: CoordinatorSettings, log: Callable[..., None]) -> None:
        self.spec = spec
        self.plan = plan
        self.settings = settings
        self.log = log
        self.registry = CollectorRegistry()
        check_complete(settings.run_dir)
        store = Store(settings.run_dir)
        try:
            self.run_id = identify(settings.run_dir, store)
            adopt(spec, store, log, guarded=settings.pods)
            reshard(spec, plan, store, log)
        except BaseException:
            store.close()
            raise
        predicted = None if plan.prediction is None else plan.prediction.iteration_seconds
        self.records = RunRecords.of(settings.run_dir, store, spec, self.registry, log, predicted)
        self.records.results.fact("versions", installed_versions())
        if Stage.PPO in spec.stages:
            self.records.results.fact("method", spec.ppo.method)
            self.records.progress.update(method=spec.ppo.method)
        self._hub = Hub(spec.hub, settings.run_dir, pods=settings.pods, note=self._note)
        self._trackers = TrackerProcesses(spec, settings.run_dir, self.run_id, log)
        self._batches = Batches(None, self.records.batches, store)
        self._rewards = self._reward_calls()
        places = Places(settings.base_dir, settings.run_dir)
        if settings.pods:
            places = places._replace(host=settings.host, port=AGENTS_PORT, token=settings.token)
        self._environment = job_environment(spec, places, self.run_id, log, self._function_read)
        self._metrics = EvaluationMetrics(spec, settings.base_dir, log)
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._prepared: Prepared | None = None
        self.trainers = TrainerGroup(
            world_size=plan.world_size,
            generation=int(store.get("trainers/generation") or 1),
            formed=bool(store.get("trainers/formed")),
            peer_timeout=float(spec.failure_policy.peer_timeout_seconds),
            clock=time.monotonic,
            record_generation=self._record_generation,
            record_result=self._record_result,
            log=log,
        )
        # A pod may wait for hours for a node or an image. The operator limits that time (startTimeoutSeconds).
        start_seconds = float("inf") if settings.pods else START_SECONDS
        sources = ModelSources(spec, settings.run_dir, self._given_model, self._rewards is None)
        self._job = Job(spec, plan, settings.run_dir, self.run_id, self.records, sources, start_seconds)
        self.session = Ranks(self._job, self.trainers)
        head = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": settings.job or "job"}}
        job = {**head, "spec": spec.model_dump(mode="json", by_alias=True)}
        documents = {"job.json": job, "plan.json": plan.model_dump(mode="json", by_alias=True)}
        self._documents = PageDocuments(RunFolder(settings.run_dir, documents))
        self._kinds = ("rollout", "scorer") if has_critic(spec) else ("rollout",)
        self._trained: list[str] = []
        self._phases, self._stalled = PhaseClock(), ""
        self._epoch = time.time() - time.monotonic()
        self.fleet = Fleet(
            time.monotonic,
            log,
            Timeouts(dead=float(spec.failure_policy.peer_timeout_seconds)),
            versioned=self._kinds,
            exempt=[scorer_name(r.name) for r in plan.rollouts if "critic" not in r.scores],
            expected={
                "rollout": [r.name for r in plan.rollouts],
                "scorer": [scorer_name(r.name) for r in plan.rollouts],
            },
        )

    # ------------------------------------------------------------ start and end

    async def __aenter__(self) -> Engines:
        try:
            await self._start()
        except BaseException as error:
            # The trackers learn that the run has ended. The error is the reason, whatever closing adds.
            with contextlib.suppress(Exception):
                await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def _start(self) -> None:
        spec, settings, records = self.spec, self.settings, self.records
        self._session = http = client_session(
            headers={"Authorization": f"Bearer {settings.token}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        self._publisher = Publisher(self.trainers, http, float(spec.failure_policy.peer_timeout_seconds))
        app = make_app(self, settings.token, self.registry, self._page)
        self._runner = serving.Runner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        await self._listen(self._runner)
        self._trackers.start()
        records.progress.update(state="running", message="preparing data and tokenizer")
        known = records.store.get("data/sources") or {}
        prepared = await asyncio.to_thread(prepare, spec, settings.run_dir, settings.base_dir, known, self._hub)
        for name, found in self._hub.commits.items():
            self.log("model.found", model=name, **found)
        records.store.put("data/sources", {**known, **prepared.data.fingerprints})
        for kind, given, learnt in prepared.first_texts():
            records.log("data.first_record", kind=kind, given=given[-SHOWN:], learnt=learnt[:SHOWN])
        await asyncio.to_thread(prepared.tokenise, self._note)
        self._batches = Batches(prepared, records.batches, records.store)
        folders = ModelFolders(settings.run_dir, prepared.sources, records.store)
        await folders.check_all()
        self.session.folders = folders
        job = self._job
        self._scorers = Scorers(job, self.fleet, http, folders, self._rewards is None)
        self._devices = Devices(job, self.fleet, http, self._scorers, folders)
        self._weights = Weights(job, self.fleet, self._publisher, self.session, self._devices)
        self._score = Score(job, prepared, self._scorers, self._rewards)
        self._generator = Generator(job, self.fleet, self._weights, settings.token, self._score.texts.decode)
        drawn: Generator | Episodes = self._generator
        if spec.sessions is not None:
            assert self._environment is not None
            drawn = Episodes(job, spec.sessions, prepared, self._environment, self._generator)
        maker = ExperienceMaker(job, prepared, self._weights, drawn, self._score, self._devices)
        self._evaluation = Evaluator(spec, prepared.evaluation_prompts, self._metrics, maker.answer, records)
        self._supervised = SupervisedStages(job, self.session, self._batches, prepared.total_steps)
        self._ppo = PPOStage(job, prepared, self.session, self._weights, maker, self._evaluation)
        # This is set last. It says that everything that `__aexit__` closes is there.
        self._prepared = prepared
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._hold())]
        method = {"method": spec.ppo.method} if Stage.PPO in spec.stages else {}
        self.log("coordinator.ready", host=settings.host, port=settings.port, **method)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancel(self._tasks)
        if self._prepared is not None:
            await self._ppo.close()
            self._devices.close()
            await self._score.close()
            await self._generator.close()
        if self._rewards is not None:
            await self._rewards.close()
        if self._environment is not None:
            await self._environment.close()
        await self._metrics.close()
        if self._session is not None:
            await self._session.close()
        self.trainers.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._trackers.close()
        self.records.close()

    async def _listen(self, runner: web.AppRunner) -> None:
        """Listen on the port. If another process still has it, wait until it is free. Raises TimeoutError after
        PORT_SECONDS, and OSError for any other error."""
        host, port, end = self.settings.host, self.settings.port, time.monotonic() + PORT_SECONDS
        while True:
            try:
                return await web.TCPSite(runner, host, port, reuse_address=True).start()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"port {port} on {host} was taken for {PORT_SECONDS:.0f} s; end what listens there, or run on "
                        "another port"
                    ) from error
            self.log("coordinator.port_taken", host=host, port=port)
            await asyncio.sleep(1.0)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the job's loop `work` and return its result. If a background task fails, this raises that task's
        error."""
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
        """Check once a second which peers are silent, and set the gauges of the instances."""
        while True:
            self.trainers.check_silence()
            self._look_at_waits()
            for kind in ("rollout", "scorer"):
                ready = {i.name for i in self.fleet.eligible(kind)}
                for instance in self.fleet.instances(kind):
                    self.records.metrics.instance_ready.labels(instance.name, kind).set(instance.name in ready)
            for holder, size in self.buffered().items():
                self.records.metrics.buffered.labels(holder).set(size)
            self.records.results.note_time()
            await asyncio.sleep(1.0)

    def _look_at_waits(self) -> None:
        """If a phase takes far longer than usual, say for whom it waits: in the status, and once in the log."""
        fields = self.records.progress.document({})
        phase, iteration = fields["phase"], fields["iteration"]
        since = self._phases.see(phase if fields["stage"] == Stage.PPO else None, iteration, time.monotonic())
        if since is None:
            self._stalled = ""
            return
        on, epoch = self._generator.on_servers(), self._epoch

        def peers(kind: str) -> list[Peer]:
            here = (i for i in self.fleet.instances(kind) if i.health is not InstanceHealth.RETIRED)
            found = ((i, *on.get(i.name, (0, 0.0))) for i in here)
            return [Peer(i.name, epoch + i.seen, i.reason, samples, epoch + token) for i, samples, token in found]

        ranks = [
            Peer(name, epoch + heard, "" if joined else "has not joined", at=at, waits=waits)
            for name, (heard, joined, (at, waits)) in self.trainers.heard().items()
        ]
        running = {} if self._rewards is None else self._rewards.running()
        calls = {name: epoch + began for name, began in running.items()}
        found = WaitingRun(phase, ranks, peers("rollout"), peers("scorer"), calls)
        before, self._stalled = self._stalled, wait_chain(found, epoch + since, time.time())
        if self._stalled != before:
            self.log("phase.stalled", iteration=iteration, phase=phase, message=self._stalled)

    async def _hold(self) -> None:
        """Bring late and restarted processes up to date while the stages run."""
        await asyncio.gather(self.session.hold(), self._weights.hold(), self._devices.hold())

    def _note(self, text: str) -> None:
        """Show the progress of the preparation. Another thread calls this."""
        self.records.progress.update(message=text)

    # ------------------------------------------------------------ called by the HTTP server

    def register(self, message: Register) -> None:
        self.fleet.register(message)

    def retire(self, name: str, host: str | None = None) -> None:
        """Record that the pod of an instance or a trainer will end soon. An instance gets no more work. `host` is that
        of `Fleet.retire`. The trainers write a checkpoint as soon as no step runs."""
        if not self._trains(name):
            self.fleet.retire(name, host)
            return
        self.session.save_soon()
        if self._prepared is not None:
            self._ppo.save_if_idle()

    def left(self, name: str) -> bool:
        """Whether no sample needs the instance any more, or a trainer's steps are all in a checkpoint."""
        if self._trains(name):
            return self.session.saved
        return self._prepared is None or self._generator.left(name)

    def _trains(self, name: str) -> bool:
        return any(trainer.name == name for trainer in self.plan.trainers)

    def offer(self, message: Offer) -> None:
        self._publisher.offer(message)

    def status(self) -> dict[str, Any]:
        instances = {
            i.name: {"kind": i.kind, "state": i.health.value, "reason": i.reason} for i in self.fleet.instances()
        }
        document = self.records.progress.document(instances)
        stage = document["stage"]
        step, path = self.session.checkpoint(Stage(stage)) if stage else (0, None)
        checkpoint = {"stage": stage, "step": step, "path": path} if path else None
        # The model before SFT is no version of PPO.
        version = None if self.fleet.version == BEFORE_SFT else self.fleet.version
        more = {"weight_version": version, "checkpoint": checkpoint, "models": self._hub.commits}
        if self._stalled:
            verdicts = [{"reason": STALLED, "message": self._stalled}, *document["health"].get("verdicts", [])]
            more["health"] = {**document["health"], "iteration": document["iteration"], "verdicts": verdicts}
        return document | more | {"artifacts": self._trained, "buffered": self.buffered()}

    def buffered(self) -> dict[str, int]:
        """The bytes of batches in this process's memory, by what holds them."""
        waiting = 0 if self._prepared is None else self._ppo.buffered
        return {"packed batches": self._batches.buffered, "iterations that wait for the trainers": waiting}

    def history_since(self, offset: int) -> dict[str, Any]:
        return self.records.history.since(offset)

    def trace(self, iteration: int) -> bytes:
        """The trace of an iteration, as JSON. Raises FileNotFoundError."""
        return self.records.timeline.read(iteration)

    async def batch(self, key: str) -> bytes | Path:
        """The packed arrays of a batch, as `Batches.fetch` returns them."""
        return await self._batches.fetch(key)

    def _page(self, question: str) -> bytes:
        """Answer a question of the run page. Raises NotKept."""
        return self._documents.answer(question, time.time(), alive=True)

    # ------------------------------------------------------------ parts that others use

    @property
    def prepared(self) -> Prepared:
        if self._prepared is None:
            raise NotPrepared("the coordinator is still preparing its data")
        return self._prepared

    def _given_model(self, name: str) -> ModelRef | None:
        """The source that the manifest gives a model."""
        return self.prepared.model_ref(name)

    # ------------------------------------------------------------ reward functions

    def _reward_calls(self) -> Calls | None:
        """The reward functions of the job. None if a reward model gives the rewards."""
        reward, given = self.spec.models.reward, self.settings.reward_function
        if given is None and not reward.calls:
            return None
        caller = (
            Workers(reward, self.settings.base_dir, read=self._function_read)
            if given is None
            else LiveFunction(given, reward.timeout_seconds)
        )
        return Calls(caller, self.spec.failure_policy.reward_retries, self.log)

    def _function_read(self, name: str, file: str, digest: str) -> None:
        """Record that a process has imported a reward function. Its file may have changed since another one did."""
        known = self.records.store.get("rewards/code") or {}
        if known.get(name) != digest:
            self.records.store.put("rewards/code", {**known, name: digest})
            if name in known:
                self.log("reward.changed", function=name, file=file)

    async def check_rewards(self) -> None:
        """Call the job's reward and evaluation functions on two of its prompts, so that a broken function fails before
        anything is trained. A run does this once. Raises RewardError and DataError."""
        if Stage.PPO not in self.spec.stages or self.records.store.get("rewards/checked"):
            return
        if self._environment is not None:
            try:
                await self._environment.open()
            except ValueError as error:
                raise RewardError(str(error)) from error
        if self._rewards is not None:
            self.records.progress.update(message="trying the reward functions")
            await rehearse(self._rewards, self.prepared)
        await self._evaluation.check()
        self.records.store.put("rewards/checked", True)

    async def run(self) -> dict[str, Any]:
        """Run the stages of the manifest, one after another. A restarted job continues at the point that the store has
        recorded. Returns the content of summary.json."""
        stages = self.spec.stages
        await self.check_rewards()
        await self.check_output()
        if Stage.SFT in stages:
            await self.run_sft()
        if Stage.REWARD in stages:
            await self.run_reward()
        if Stage.DPO in stages:
            await self.run_dpo()
        if Stage.PPO in stages:
            await self.begin_ppo()
            while not self.over:
                experience = await self.generate_experience()
                await self.train(experience)
        return await self.finish()

    # ------------------------------------------------------------ SFT, reward model and DPO

    async def run_sft(self) -> None:
        """Fine-tune the actor on demonstrations. The result is models/sft. Facts: sft.loss_before, sft.loss_after."""
        await self._supervised.sft()

    async def run_reward(self) -> None:
        """Train and centre the reward model. The result is models/reward. Facts: reward_model.accuracy, .pairs,
        .centre."""
        await self._supervised.reward()

    async def run_dpo(self) -> None:
        """Train the actor on preferences. The result is models/actor. Facts: dpo.loss_before, .loss_after, .accuracy,
        and .pairs or .responses."""
        await self._supervised.dpo()

    # ------------------------------------------------------------ PPO

    @property
    def iteration(self) -> int:
        """The last finished PPO iteration. 0 before the first one."""
        return self.session.step

    @property
    def over(self) -> bool:
        """Whether PPO has ended, because all iterations are done or spec.evaluation.stopAfterNoGain ends it."""
        return self._ppo.over

    async def begin_ppo(self) -> None:
        """Load the actor and the critic, and send their weights to the rollouts and scorers."""
        await self._ppo.begin()

    async def evaluate(self) -> dict[str, dict[str, float]]:
        """Evaluate the newest weights, as `PPOStage.evaluate` does."""
        return await self._ppo.evaluate()

    async def generate_experience(self, prompts: Sequence[GivenPrompt] | None = None) -> Experience:
        """Generate and score responses to the next iteration's prompts. These are `prompts`, or the job's own if it is
        None.

        With `ppo.lag`, `prompts` must be None. The samples of the next iterations are then generated in the background
        from now on.

        After a crash, results that the store already holds are not computed again. Raises ValueError for `prompts` in a
        job with `ppo.lag`."""
        return await self._ppo.generate_experience(prompts)

    async def train(self, experience: Experience) -> dict[str, float]:
        """Train one iteration on `experience`, and send the new weights to all rollouts and scorers. Returns the
        iteration's metrics. Raises ValueError if the experience is of another iteration."""
        return await self._ppo.train(experience)

    # ------------------------------------------------------------ export and result
    async def check_output(self) -> None:
        """Check that the models can be copied to spec.output. Raises OutputError."""
        await asyncio.to_thread(check, self.spec.output, self.spec.stages, self.run_id)

    async def finish(self) -> dict[str, Any]:
        """Export the trained models, copy them to spec.output, and write summary.json. Returns its content."""
        if Stage.PPO in self.spec.stages:
            await self._ppo.close_iterations()
            await self._ppo.finish()
            store = self.records.store
            found = await asyncio.to_thread(lambda: audit(self.spec, store.get, store.outcomes.parts()))
            self.records.results.fact("audit", summary_of(found))
        models = self.settings.run_dir / "models"
        await asyncio.to_thread(describe_models, models, self._card_facts(), self.prepared.tokenizer)
        self._trained = await asyncio.to_thread(deliver, self.spec.output, models, self.run_id)
        if self.spec.output is not None:
            self.log("models.copied", models=self._trained, to=self.spec.output.place)
        document = self.records.results.write("succeeded")
        self.records.progress.update(state="succeeded", phase=None, message="")
        self.log("job.succeeded")
        await self.copy_history()
        return document

    def _card_facts(self) -> CardFacts:
        """The facts for the models' cards. Call it once the results are known."""
        found = self.records.results.document("succeeded")
        return CardFacts(self.settings.job or self.settings.run_dir.name, self.spec, found, list_sizes(self.prepared))

    async def copy_history(self) -> None:
        """Copy the run's history to spec.output, at the end of the job. An error is only logged."""
        try:
            await asyncio.to_thread(deliver_history, self.spec.output, self.settings.run_dir, self.run_id)
        except (OSError, OutputError) as error:
            self.log("history.uncopied", reason=str(error))

    def fail(self, reason: str) -> None:
        """Record that the job failed, and why. It writes as much as the store and the disk still allow."""
        self.records.progress.update(state="failed", message=reason)
        self.log("job.failed", reason=reason)
        with contextlib.suppress(OSError, StoreError):
            self.records.results.write("failed", reason)

    # ------------------------------------------------------------ records

    def _record_generation(self, generation: int) -> None:
        self.records.store.put_all({"trainers/generation": generation, "trainers/formed": self.trainers.formed})
        if self.trainers.formed:
            self.records.metrics.generations.inc()

    def _record_result(self, result: CommandResult) -> None:
        self.records.store.put(
            f"result/{result.id}", result.model_dump(mode="json", exclude={"spans", "probe", "logprobs"})
        )
