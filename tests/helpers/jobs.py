"""Whole tiny jobs with real vLLM servers, scorers and trainer ranks, and a hand that kills them on cue."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import yaml
from safetensors.numpy import load_file

from dovetail.coordinator.store.samples import Sample
from dovetail.coordinator.store.store import Store
from dovetail.launch.local.launcher import Launcher, earlier_run
from dovetail.launch.supervisor import Outcome
from dovetail.manifest.types import RLHFJob
from dovetail.planner.make_plan import make_plan
from dovetail.tools.run_audit import audit_run
from helpers.nursery import forked_jobs
from helpers.patience import PATIENCE
from helpers.whole_lines import whole_lines

MANIFEST = """
apiVersion: dovetail.dev/v1beta1
kind: RLHFJob
metadata: {name: tiny}
spec:
  seed: 3
  models:
    actor:
      source:
        scratch:
          architecture: llama
          config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2,
                   num_key_value_heads: 2, max_position_embeddings: 128, tie_word_embeddings: false}
    tokenizer: {train: {vocabSize: 300}}
  data:
    demonstrations: [{synthetic: {size: 200}}]
    preferences: [{synthetic: {size: 200}}]
    prompts: [{synthetic: {size: 200}}]
    maxPromptTokens: 48
    maxTokens: 96
  sft: {steps: 16, batchSize: 8, microBatchSize: 4, optimizer: {learningRate: 3.0e-3}}
  reward: {steps: 16, batchSize: 8, microBatchSize: 4, optimizer: {learningRate: 1.0e-3}}
  ppo:
    iterations: 4
    globalBatchSize: 16
    miniBatchSize: 8
    microBatchSize: 4
    actorOptimizer: {learningRate: 1.0e-4}
    criticOptimizer: {learningRate: 1.0e-4}
  generation: {maxTokens: 48}
  groups:
    - {name: trainers, roles: [trainer], replicas: 2}
    - {name: rollouts, roles: [rollout], replicas: 2}
  checkpoint: {everySteps: 2, keep: 2}
  failurePolicy: {maxRestarts: 20, peerTimeoutSeconds: 60}
"""

# For jobs that need no second rollout, and whose first stages are not the subject: half the processes and the time.
SMALLER: dict[str, Any] = {
    "groups": [
        {"name": "trainers", "roles": ["trainer"], "replicas": 2},
        {"name": "rollouts", "roles": ["rollout"], "replicas": 1},
    ],
    "sft": {"steps": 4},
    "reward": {"steps": 4},
}


def tiny_job(**spec: Any) -> RLHFJob:
    """The manifest above; keyword arguments update mappings of the spec one level deep and replace the rest."""
    document = yaml.safe_load(MANIFEST)
    for name, value in spec.items():
        old = document["spec"].get(name)
        document["spec"][name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return RLHFJob.model_validate(document)


def tied_actor() -> dict[str, Any]:
    """`models.actor` of the manifest above, but with one matrix for embedding and head, as most small models have."""
    actor: dict[str, Any] = yaml.safe_load(MANIFEST)["spec"]["models"]["actor"]
    actor["source"]["scratch"]["config"]["tie_word_embeddings"] = True
    return actor


# A job that is as fast as it can would be over before the last fault.
_PACED = """
import math, pathlib, time
TOLD = pathlib.Path("{told}")
called = 0
def pace():
    if TOLD.exists():
        return float(TOLD.read_text()) / CALLS
    return PACE_SECONDS / CALLS if called <= 3 * CALLS else math.inf
def score(prompts, responses, **fields):
    global called
    called += 1
    began = time.monotonic()
    while time.monotonic() - began < pace():
        time.sleep(0.1)
    return [len(set(text)) / 40 for text in responses]
"""


def paced_reward(spec: dict[str, Any], seconds: float, told: str) -> str:
    """Gives the spec a reward function, of the module `paced` whose code this returns, in place of a reward model: each
    iteration takes `seconds` more, or as many as the file `told` says. After some three iterations the job waits for
    that file: it is not over before a slow machine's test has seen its first iteration.

    The function is called once for each prompt's samples, by one worker: each call takes its part of the time."""
    spec["models"]["reward"] = {"function": "paced:score", "workers": 1, "timeoutSeconds": 3600}
    spec.pop("reward", None)
    spec["evaluation"] = {"heldOut": 0}  # the function would take its time for these answers too
    spec["data"].pop("preferences", None)
    calls = spec["ppo"]["globalBatchSize"] // spec["ppo"].get("samplesPerPrompt", 1)
    return f"PACE_SECONDS = {seconds}\nCALLS = {calls}\n" + _PACED.format(told=told)


def set_pace(told: Path, seconds: float) -> None:
    """Never half a number."""
    partial = told.with_suffix(".partial")
    partial.write_text(str(seconds))
    partial.rename(told)


@dataclass
class Fault:
    """Send `process` (a spawner, too; or, with `child`, the process it started) a signal once `when(status)` holds for
    the first time."""

    process: str
    when: Callable[[dict[str, Any]], bool]
    child: bool = False
    done: bool = False
    signal: int = signal.SIGKILL


def in_phase(phase: str, iteration: int) -> Callable[[dict[str, Any]], bool]:
    """Whether a status is of this phase, in this iteration of PPO or a later one."""
    return lambda s: s["stage"] == "ppo" and s["phase"] == phase and s["iteration"] >= iteration


def since_phase(phase: str, iteration: int) -> Callable[[dict[str, Any]], bool]:
    """`in_phase`, or any later iteration: on a machine that stands still now and then, nobody may look in a phase."""
    here = in_phase(phase, iteration)
    return lambda s: here(s) or in_iteration(iteration + 1)(s)


def in_iteration(iteration: int) -> Callable[[dict[str, Any]], bool]:
    """Whether a status is of this iteration of PPO or a later one."""
    return lambda s: bool(s["stage"] == "ppo" and s["iteration"] >= iteration)


def in_stage(stage: str, step: int) -> Callable[[dict[str, Any]], bool]:
    """Whether a status is of this step of SFT or reward training, or of a later time."""
    stages = ["sft", "reward", "ppo"]
    later = stages[stages.index(stage) + 1 :]
    return lambda s: s["stage"] in later or (s["stage"] == stage and s["step"] >= step)


@dataclass
class Watcher:
    """Looks at a job in a thread of its own, every `period` seconds, from the launcher's first call on: a phase of a
    tiny job is over before the launcher calls again. `run_job` closes it."""

    period: ClassVar[float] = 0.02
    _thread: threading.Thread | None = field(default=None, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    def __call__(self, launcher: Launcher) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, args=(launcher,), daemon=True)
            self._thread.start()

    def look(self, launcher: Launcher) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def _watch(self, launcher: Launcher) -> None:
        while not self._stop.wait(self.period):
            self.look(launcher)


@dataclass
class Injector(Watcher):
    """Applies each fault once. What one fault has hit is hit by the next only after it has been replaced."""

    faults: list[Fault]
    killed: list[str] = field(default_factory=list)
    interrupt_when: Callable[[dict[str, Any]], bool] | None = None
    _hit: dict[str, int] = field(default_factory=dict, init=False)

    def look(self, launcher: Launcher) -> None:
        status = read_status(launcher)
        if status is None:
            return
        if self.interrupt_when is not None and self.interrupt_when(status):
            self.interrupt_when = None
            os.kill(os.getpid(), signal.SIGINT)
        for fault in self.faults:
            pid = {**launcher.pids, **launcher.spawner_pids}.get(fault.process)
            if fault.done or pid is None or self._hit.get(fault.process) == pid or not fault.when(status):
                continue
            victims = children_of(pid)[:1] if fault.child else [pid]
            with contextlib.suppress(ProcessLookupError):
                for victim in victims:
                    os.kill(victim, fault.signal)
                    self._hit[fault.process] = pid
                    fault.done = True
                    self.killed.append(fault.process)


def children_of(pid: int) -> list[int]:
    """Of a process that may just be ending."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def untrained(run_dir: Path) -> list[str]:
    """What `dovetail audit` finds wrong with the prompts of a run. The data is read again, too."""
    audited = audit_run(run_dir)
    assert audited.unread == ""
    assert audited.found.done
    return list(audited.found.problems)


def same_weights(one: Path, other: Path) -> list[str]:
    """Tensors of two runs' models that are not the same bits; what only one of them has, too. In which of a folder's
    files a tensor is depends on where the pipeline's stages were."""
    a, b = (dict(_weights(run / "models")) for run in (one, other))
    assert a, "no weights were written"
    return [name for name in sorted(a.keys() | b.keys()) if not _same(a.get(name), b.get(name))]


def _weights(models: Path) -> Iterator[tuple[str, np.ndarray]]:
    for path in models.rglob("*.safetensors"):
        for name, array in load_file(path).items():
            yield f"{path.parent.relative_to(models)}: {name}", array


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def read_status(launcher: Launcher) -> dict[str, Any] | None:
    """GET /v1/status, or None while the coordinator is away."""
    request = urllib.request.Request(f"{launcher.url}/v1/status", headers={"Authorization": f"Bearer {launcher.token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return dict(json.load(response))
    except (OSError, ValueError):
        return None


def run_job(
    job: RLHFJob,
    run_dir: Path,
    injector: Callable[[Launcher], None] | None = None,
    *,
    resume: bool = False,
    own_imports: bool = False,
) -> tuple[Outcome, list[str]]:
    """Run to the end; the outcome and what the launcher told. The launcher calls `injector` a few times a second.

    The job's processes have the imports from one for all tests, unless they are to make their `own_imports`. Fails the
    test if a process outlives the launcher."""
    told: list[str] = []
    with contextlib.ExitStack() as stack:
        if not own_imports:
            stack.enter_context(forked_jobs())
        before = {p.pid for p in psutil.Process().children(recursive=True)}
        launcher = stack.enter_context(
            Launcher(job, make_plan(job.spec), run_dir, earlier_run(resume, False), tell=told.append)
        )
        if isinstance(injector, Watcher):
            stack.callback(injector.close)
        outcome = launcher.run(lambda: injector(launcher) if injector is not None else None)
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE], f"still running: {left}"
    return outcome, told


def summary(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def history(run_dir: Path, stage: str) -> dict[int, dict[str, float]]:
    """Metrics by step, the last entry of a step winning."""
    rows = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    return {row["step"]: row["metrics"] for row in rows if row["stage"] == stage}


def sample_rows(run_dir: Path) -> list[tuple[int, int, int, str, int]]:
    """(iteration, prompt, sample, state, response tokens) of every sample still in the store."""
    with sqlite3.connect(run_dir / "store.sqlite") as db:
        rows = db.execute(
            "SELECT iteration, prompt_index, sample_index, state, length(response)/4 FROM samples ORDER BY 1, 2, 3"
        )
        return [tuple(row) for row in rows]


def stored_samples(run_dir: Path, iteration: int) -> list[Sample]:
    """The samples of an iteration, whole, in order of (prompt, sample)."""
    store = Store(run_dir)
    try:
        return store.samples.samples(iteration)
    finally:
        store.close()


@dataclass
class Reaper(Watcher):
    """SIGKILLs processes as soon as an event is logged.

    `victims(event)` names the processes to kill; it is asked of each line of events.jsonl once, a few milliseconds
    after it is written."""

    run_dir: Path
    victims: Callable[[dict[str, Any]], Sequence[str]]
    killed: list[str] = field(default_factory=list)
    period: ClassVar[float] = 0.003
    _offset: int = field(default=0, init=False)

    def look(self, launcher: Launcher) -> None:
        path = self.run_dir / "events.jsonl"
        if not path.exists() or path.stat().st_size == self._offset:
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            for name in self.victims(json.loads(line)):
                if (pid := launcher.pids.get(name)) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    self.killed.append(name)


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in whole_lines(run_dir / "events.jsonl")]
    return [line for line in lines if line["event"] == name]
