"""The Python API. With it you write your own training loop for a job on one machine, as with DeepSpeed-Chat's RLHF API.

    with Pipeline.from_manifest("examples/quickstart.yaml") as pipeline:
        pipeline.run_sft()
        pipeline.run_reward()
        pipeline.begin_ppo()
        for _ in range(10):
            experience = pipeline.generate_experience()
            print(pipeline.train(experience))
        pipeline.finish()

`dovetail run` runs the same code (`coordinator/loop/engines.py`). vLLM servers, scorers and trainer ranks are processes
on this machine. Only the coordinator runs in your process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from dovetail.gpus.nvidia_driver import cuda_devices
from dovetail.launch.processes import HOST
from dovetail.launch.supervisor import Outcome
from dovetail.manifest.accelerators import no_gpus, on_cpus
from dovetail.manifest.checks.files import model_configs
from dovetail.manifest.checks.validation import load_manifest, parse_manifest
from dovetail.manifest.documents import ManifestError
from dovetail.manifest.resolve import resolve, with_lag
from dovetail.manifest.types import RLHFJob
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.errors import RunError
from dovetail.protocol.experience import AdvantageFunction, Experience, advantages_of
from dovetail.protocol.process.extras import import_error, missing_extras, needed_extras
from dovetail.protocol.process.process_names import COORDINATOR

try:
    from dovetail.coordinator.data.prepare import GivenPrompt
    from dovetail.coordinator.loop.engines import CoordinatorSettings, Engines
    from dovetail.coordinator.loop.failure import sentence
    from dovetail.coordinator.rewards.live import RewardCallable
    from dovetail.launch.local.aftermath import with_cause, write_results
    from dovetail.launch.local.launcher import Launcher, earlier_run
    from dovetail.launch.local.rundir import lag_of_run, zero3_of_run
    from dovetail.protocol.eventlog import EventLog
except ModuleNotFoundError as error:
    raise import_error("dovetail.local.pipeline", ["coordinator"], error) from error

T = TypeVar("T")
END_SECONDS = 300.0


class Pipeline:
    """A job that your own code drives. It is synchronous. Use it from one thread, as a context manager. On exit every
    process that it started is ended. Errors of the job are raised as `RunError` with one sentence.

    `reward_function(prompts, responses, **fields)` replaces the reward model. It returns one float per response. It is
    called in this process, for all responses to a prompt or for each one (docs/custom.md), while others are generated.

    `advantage_function(experience)` replaces the job's estimator. It returns advantages (N,R), or these and the returns
    that the critic learns. A manifest can name the same function (`ppo.advantageFunction`)."""

    def __init__(
        self,
        job: RLHFJob,
        run_dir: Path | str,
        *,
        reward_function: RewardCallable | None = None,
        advantage_function: AdvantageFunction | None = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        if reward_function is not None and job.spec.ppo.reward_clip == "Auto":
            job = without_clip(job)
        self.run_dir = Path(run_dir).resolve()
        lag, zero3 = (lag_of_run(self.run_dir), zero3_of_run(self.run_dir)) if resume else (None, None)
        self.plan = make_plan(job.spec, configs=model_configs(job.spec, Path()), lag=lag, zero3=zero3)
        if absent := missing_extras("dovetail.local.pipeline", needed_extras(job, self.plan)):
            raise RunError(absent)
        self.job = job = job.model_copy(update={"spec": with_lag(job.spec, self.plan.lag)})
        self._reward_function = reward_function
        self._advantage_function = advantage_function
        self._launcher = Launcher(job, self.plan, self.run_dir, earlier_run(resume, overwrite), exclude={COORDINATOR})
        self._loop = asyncio.new_event_loop()
        self._engines: Engines | None = None
        self._failure: str | None = None
        self._finished = False
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    @classmethod
    def from_manifest(
        cls, path: Path | str, run_dir: Path | str | None = None, *, cpu: bool = False, **options: Any
    ) -> Pipeline:
        """Make a pipeline from an RLHFJob manifest, which is a file or its text. `run_dir`: runs/<name> by default.
        `cpu`: run everything on CPUs, even groups that ask for GPUs. `options`: those of `Pipeline`. Raises
        ManifestError if the manifest is wrong, or if this machine does not have its GPUs."""
        written, job = parse_manifest(path), load_manifest(path)
        if cpu:
            job = job.model_copy(update={"spec": resolve(on_cpus(job.spec))})
        elif problem := no_gpus(written.spec, len(cuda_devices())):
            raise ManifestError([f"{problem} (in Python: cpu=True)."])
        return cls(job, run_dir or Path("runs") / job.metadata.name, **options)

    # ------------------------------------------------------------ methods for a training loop

    def run_sft(self) -> None:
        """Fine-tune the actor on demonstrations (SFT)."""
        self._call(self.engines.run_sft())

    def run_reward(self) -> None:
        """Train the reward model."""
        self._call(self.engines.run_reward())

    def run_dpo(self) -> None:
        """Train the actor on preferences, or on responses with labels, without a reward model."""
        self._call(self.engines.run_dpo())

    def begin_ppo(self) -> None:
        """Load actor and critic, and send the rollouts their first weights."""
        self._call(self.engines.begin_ppo())

    @property
    def iteration(self) -> int:
        """The last finished PPO iteration."""
        return self.engines.iteration

    @property
    def over(self) -> bool:
        """Whether PPO has ended, after all iterations or earlier because of spec.evaluation.stopAfterNoGain."""

        async def ask() -> bool:
            return self.engines.over

        return self._call(ask())

    def status(self) -> dict[str, Any]:
        """The coordinator's status (docs/run-files.md). Another thread may ask for it while a call runs."""

        async def ask() -> dict[str, Any]:
            return self.engines.status()

        return self._submit(ask())

    def prompts(self) -> list[str]:
        """The texts of the job's own prompts for the next iteration."""
        return [record.text for record in self.engines.prepared.prompts(self.iteration + 1)]

    def prompt_records(self) -> list[dict[str, Any]]:
        """The same prompts as records. They have the text in "prompt", and the other fields of the data."""
        return [{**r.fields, "prompt": r.text} for r in self.engines.prepared.prompts(self.iteration + 1)]

    def generate_experience(self, prompts: Sequence[GivenPrompt] | None = None) -> Experience:
        """Generate responses to `prompts`, by default the job's own. Returns them with their log-probabilities, those
        of the reference, the critic's values and the scores.

        There must be ppo.globalBatchSize / ppo.samplesPerPrompt prompts. A prompt is a text, or a record with the text
        in "prompt". Reward functions get the record's other fields. Raises ValueError for other prompts, and for
        prompts of your own in a job with ppo.lag."""
        ppo = self.job.spec.ppo
        expected = ppo.global_batch_size // ppo.samples_per_prompt
        if prompts is not None and len(prompts) != expected:
            raise ValueError(f"{len(prompts)} prompts given, {expected} expected (globalBatchSize / samplesPerPrompt)")
        return self._call(self.engines.generate_experience(prompts))

    def train(self, experience: Experience) -> dict[str, float]:
        """Train on one iteration's experience and send the new weights to the rollouts. Returns the metrics by name."""
        if self._advantage_function is not None:
            experience.set_advantages(*advantages_of(self._advantage_function, experience, "advantage_function"))
        return self._call(self.engines.train(experience))

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Evaluate the newest weights on the prompts of spec.evaluation, which are never trained on. Returns mean and
        ci95 of each metric, by name. Returns {} if there are no such prompts. Raises ValueError in a job with
        ppo.lag."""
        return self._call(self.engines.evaluate())

    def run(self) -> dict[str, Any]:
        """Run all stages of the manifest, as `dovetail run` does, and finish. Returns the content of summary.json."""
        if self._advantage_function is not None:
            raise ValueError("run() does not call advantage_function; name it in spec.ppo.advantageFunction")
        document = self._call(self.engines.run())
        self._finished = True
        return document

    def finish(self) -> dict[str, Any]:
        """Export the trained models to run_dir/models and write summary.json. Returns the content of summary.json."""
        document = self._call(self.engines.finish())
        self._finished = True
        return document

    # ------------------------------------------------------------ starting and ending

    @property
    def engines(self) -> Engines:
        """The asynchronous engines underneath. Use them only from their own event loop."""
        if self._engines is None:
            raise RuntimeError("use the pipeline in a with statement")
        return self._engines

    def __enter__(self) -> Pipeline:
        self._launcher.__enter__()
        try:
            self._start_thread(self._run_loop, "dovetail-loop")
            # No deadline is needed here. Models and data may take an hour to download, and downloads have deadlines of
            # their own (spec.hub).
            self._engines = self._submit(self._open())
            # Each call of a reward function has its own deadline.
            self._submit(self._engines.check_rewards())
            self._start_thread(self._supervise, "dovetail-launcher")
        except BaseException as error:
            self.close()
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is not None and not self._finished:
            self._leave(error)

    def close(self) -> None:
        """End every process. A second call does nothing."""
        self._closing.set()
        if self._engines is not None:
            engines, self._engines = self._engines, None
            self._submit(engines.__aexit__(None, None, None), END_SECONDS)
            self._log.close()
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join(END_SECONDS)
        self._threads.clear()
        self._launcher.close()

    def _leave(self, error: BaseException) -> None:
        """Write the results of a failed run, even if the error came from the user's own loop."""
        reason = str(error) if isinstance(error, RunError) else sentence(error, self.run_dir)
        outcome = Outcome(False, reason, interrupted=isinstance(error, KeyboardInterrupt))
        write_results(self.run_dir, with_cause(outcome, (self.run_dir,)))

    async def _open(self) -> Engines:
        self._log = EventLog(
            COORDINATOR, self.run_dir / "events.jsonl", stream=(self.run_dir / "logs/coordinator.log").open("a")
        )
        settings = CoordinatorSettings(
            run_dir=self.run_dir,
            token=self._launcher.token,
            host=HOST,
            port=self._launcher.coordinator_port,
            base_dir=Path.cwd(),
            job=self.job.metadata.name,
            reward_function=self._reward_function,
        )
        return await Engines(self.job.spec, self.plan, settings, self._log).__aenter__()

    def _start_thread(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _supervise(self) -> None:
        try:
            self._launcher.start()
            while not self._closing.is_set():
                outcome = self._launcher.step(0.2)
                if outcome is not None:
                    self._failure = outcome.reason or "the job's processes ended"
                    return
            self._launcher.stop()
        except Exception as error:  # without this the caller would wait for processes that nobody starts
            self._failure = str(error) if isinstance(error, RunError) else sentence(error, self.run_dir)

    def _submit(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the event loop. Raises RunError early if the launcher gives up."""
        future = asyncio.run_coroutine_threadsafe(self.engines.guard(work), self._loop)
        while True:
            try:
                return future.result(0.2)
            except TimeoutError:
                if future.done():
                    raise
            if self._failure is not None:
                future.cancel()
                raise RunError(self._failure)


def without_clip(job: RLHFJob) -> RLHFJob:
    """The job without reward clipping. The trainers do not know that a function is given here, and its author decides
    the scale of its rewards (`dovetail.manifest.resolve`)."""
    ppo = job.spec.ppo.model_copy(update={"reward_clip": None})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"ppo": ppo})})
