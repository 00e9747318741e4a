"""Whole jobs with `ppo.lag`: samples are made while the trainers learn, and whatever happens the result has the same
bits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail.coordinator.reporting.bill import Bill
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.launch.local.launcher import Launcher
from dovetail.manifest.types import RLHFJob
from helpers.jobs import (
    Fault,
    Injector,
    events,
    history,
    in_phase,
    read_status,
    run_job,
    same_weights,
    since_phase,
    stored_samples,
    summary,
    tiny_job,
    untrained,
)
from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow
ITERATIONS, SAMPLES = 5, 16
# Both halves of an iteration sleep, so that they can overlap on a machine of few cores.
CODE = """
import time
def score(prompts, responses, **fields):
    time.sleep({reward} / {samples})
    return [len(set(text)) / 40 for text in responses]
def advantages(experience):
    time.sleep({training})
    return experience.per_token(experience.scores - experience.scores.mean())
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts(tmp_path_factory.mktemp("code"), 0.8)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts(tmp_path_factory.mktemp("quick"), 0.2)


def parts(folder: Path, seconds: float) -> Path:
    (folder / "slow_parts.py").write_text(CODE.format(reward=seconds, training=seconds, samples=SAMPLES))
    return folder


def job(code: Path, lag: int, rollouts: int = 2, iterations: int = ITERATIONS, **spec: Any) -> RLHFJob:
    """Only PPO, from random weights."""
    constant = {"learningRate": 1e-3, "schedule": "Constant", "warmupFraction": 0.0}
    ppo = {
        "lag": lag,
        "iterations": iterations,
        "globalBatchSize": SAMPLES,
        "advantageFunction": "slow_parts:advantages",
        "importPath": str(code),
        "actorOptimizer": constant,
        "criticOptimizer": constant,
    }
    groups = [
        {"name": "trainers", "roles": ["trainer"], "replicas": 2},
        {"name": "rollouts", "roles": ["rollout"], "replicas": rollouts},
    ]
    reward = {"function": "slow_parts:score", "importPath": str(code), "workers": 1}
    data = {"preferences": [], "demonstrations": [{"synthetic": {"size": 200}}]}
    return tiny_job(
        **{
            "stages": ["ppo"],
            "ppo": ppo,
            "models": {"reward": reward},
            "data": data,
            "groups": groups,
            "checkpoint": {"everySteps": 100},
            "generation": {"maxTokens": 48, "temperature": 0.7},
            **spec,
        }
    )


@pytest.fixture(scope="module")
def peaceful(code: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A job that nobody disturbs, by its lag."""
    done: dict[int, Path] = {}

    def run(lag: int) -> Path:
        if lag not in done:
            done[lag] = tmp_path_factory.mktemp(f"lag-{lag}")
            outcome, told = run_job(job(code, lag), done[lag])
            assert outcome.succeeded, outcome.reason
            assert told == []
            check_bill(done[lag])
        return done[lag]

    return run


def spans(run_dir: Path, name: str) -> dict[int, tuple[float, float]]:
    """The coordinator's phases of this name on the timeline, by iteration: first start and last end, in microseconds
    since the epoch."""
    found: dict[int, tuple[float, float]] = {}
    for path in sorted((run_dir / "traces").glob("*.json")):
        trace = json.loads(path.read_text())
        origin = trace["otherData"]["start_seconds"] * 1e6
        pid = next(
            e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name" and e["args"]["name"] == "coordinator"
        )
        for event in trace["traceEvents"]:
            iteration = event.get("args", {}).get("iteration")
            if event["name"] == name and event["ph"] == "X" and event["pid"] == pid and iteration is not None:
                start, end = origin + event["ts"], origin + event["ts"] + event["dur"]
                before = found.get(iteration, (start, end))
                found[iteration] = (min(before[0], start), max(before[1], end))
    return found


def check_versions(run_dir: Path, lag: int, iterations: int = ITERATIONS) -> None:
    """Each sample is of one version, the one that its iteration asks for."""
    for iteration in range(1, iterations + 1):
        for sample in stored_samples(run_dir, iteration):
            assert sample.first_version == sample.weight_version == max(0, iteration - 1 - lag), sample.key
            assert sample.critic_version == sample.weight_version


def test_samples_of_the_next_iteration_are_made_while_the_trainers_learn(peaceful: Callable[[int], Path]) -> None:
    run_dir = peaceful(1)
    check_versions(run_dir, 1)
    training, generation = spans(run_dir, "training"), spans(run_dir, "generation")
    assert sorted(training) == sorted(generation) == list(range(1, ITERATIONS + 1))
    # The next iteration's samples begin before this one's training ends, and these are its own weights. (On a machine
    # with too few cores a server may get its turn after a short step only.)
    assert any(generation[i + 1][0] < training[i][1] for i in range(1, ITERATIONS))
    assert [e["version"] for e in events(run_dir, "weights.published")][-1] == ITERATIONS
    metrics = history(run_dir, "ppo")
    # At the job's temperature, which the weights of older samples are of.
    assert metrics[1]["mismatch_abs"] < 1e-4
    assert [metrics[i].get("staleness", 0.0) for i in sorted(metrics)] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert set(summary(run_dir)["phases"]) >= {"generation", "inference", "training", "weights", "waiting"}


def disturbances(how: signal.Signals, apart: int = 1) -> list[Fault]:
    """Of each process, while the trainers learn from one iteration and the next one's samples are made. Two faults are
    so many iterations `apart`."""
    return [
        Fault("rollouts-1", since_phase("training", apart), child=True, signal=how),
        Fault("coordinator", since_phase("training", 2 * apart), signal=how),
        Fault("trainer-1", since_phase("training", 3 * apart), signal=how),
        Fault("rollouts-0-scorer", since_phase("training", 3 * apart), signal=how),
        Fault("trainer-0", since_phase("training", 4 * apart), signal=how),
    ]


def check_same(run_dir: Path, peaceful: Path, lag: int, iterations: int = ITERATIONS) -> None:
    """Two runs drew the same samples with the same versions, and ended with the same bits."""
    check_versions(run_dir, lag, iterations)
    for iteration in range(1, iterations + 1):
        ours, theirs = stored_samples(run_dir, iteration), stored_samples(peaceful, iteration)
        assert [(s.key, s.tokens.tolist()) for s in ours] == [(s.key, s.tokens.tolist()) for s in theirs]
    assert [name for name in same_weights(peaceful, run_dir) if "actor-best" not in name] == []
    assert untrained(run_dir) == []


def check_bill(run_dir: Path) -> None:
    """The bill of a run adds up to the time of all processes, and says what was computed twice."""
    bill = Bill(RunFolder(run_dir)).document()
    elapsed = json.loads((run_dir / "elapsed.json").read_text())["seconds"]
    assert bill["seconds"] == pytest.approx(elapsed, abs=0.01)
    assert sum(seconds for _, seconds, _ in bill["parts"]) == pytest.approx(elapsed * bill["gpus"], rel=1e-6)
    assert [one["samples"] for one in bill["iterations"]] == [SAMPLES] * len(bill["iterations"])
    parts = {name: seconds for name, seconds, _ in bill["parts"]}
    assert min(parts["generation"], parts["inference"], parts["training, between the passes"]) > 0
    assigned = sum(s.attempt for i in range(1, ITERATIONS + 1) for s in stored_samples(run_dir, i))
    if assigned == ITERATIONS * SAMPLES:
        assert bill["tokens"]["computed again"] == 0
    assert bill["steps_again"] > 0 or "steps run again" not in parts


def check_disturbed(code: Path, run_dir: Path, peaceful: Path, lag: int, faults: list[Fault], **spec: Any) -> None:
    outcome, told = run_job(job(code, lag, **spec), run_dir, Injector(faults))
    assert outcome.succeeded, (outcome.reason, told)
    assert [f.process for f in faults if not f.done] == []
    check_same(run_dir, peaceful, lag)
    check_bill(run_dir)


def test_whoever_dies_the_weights_are_the_same(tmp_path: Path, code: Path, peaceful: Callable[[int], Path]) -> None:
    """SIGKILL of a server and of the coordinator while one iteration is learnt and the next is drawn. Nightly of each
    process, at any lag."""
    run_dir = tmp_path / "run"
    faults = disturbances(signal.SIGKILL)[:2]
    evaluation = {"everyIterations": 1, "temperature": 0, "keepBest": True}
    # The other run answers prompts before and after PPO only.
    check_disturbed(code, run_dir, peaceful(1), 1, faults, evaluation=evaluation)
    curve = history(run_dir, "evaluation")
    assert sorted(curve) == list(range(ITERATIONS + 1))
    best = max(curve, key=lambda version: (curve[version]["reward"], -version))
    assert json.loads((run_dir / "models/actor-best/dovetail.json").read_text())["step"] == best


@pytest.mark.nightly
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_whoever_dies_or_freezes_at_any_lag(
    tmp_path: Path, code: Path, peaceful: Callable[[int], Path], lag: int, how: signal.Signals
) -> None:
    faults, patience = disturbances(how), {"maxRestarts": 20, "peerTimeoutSeconds": 6}
    check_disturbed(code, tmp_path / "run", peaceful(lag), lag, faults, failurePolicy=patience)


def served(status: dict[str, Any]) -> bool:
    """While the trainers learn from an iteration, all rollouts and scorers serve the version of the next one."""
    states = {name: one["state"] for name, one in status["instances"].items()}
    learning = in_phase("training", 2)(status) and status["weight_version"] == status["iteration"] - 1
    return learning and len(states) == 4 and set(states.values()) == {"healthy"}


@pytest.mark.nightly
def test_a_rollout_that_comes_back_while_a_trainer_is_frozen_gets_its_weights_from_the_other(
    tmp_path: Path, code: Path, peaceful: Callable[[int], Path]
) -> None:
    faults = [
        Fault("trainer-1", served, signal=signal.SIGSTOP),
        Fault("rollouts-1", lambda status: faults[0].done, child=True, signal=signal.SIGKILL),
    ]
    # The rollout is back long before the trainer is given up.
    patience = {"maxRestarts": 20, "peerTimeoutSeconds": 30}
    check_disturbed(code, tmp_path / "run", peaceful(1), 1, faults, failurePolicy=patience)
    relayed = events(tmp_path / "run", "weights.relayed")
    assert [(e["sender"], e["instance"]) for e in relayed] == [("rollouts-0", "rollouts-1")]


@pytest.mark.nightly
def test_samples_are_scored_while_a_trainer_is_frozen_and_a_scorer_waits_for_its_weights(
    tmp_path: Path, code: Path, peaceful: Callable[[int], Path]
) -> None:
    """A scorer gets its weights from the trainers alone. Until then the others score."""
    run_dir = tmp_path / "run"
    faults = [
        Fault("trainer-1", served, signal=signal.SIGSTOP),
        Fault("rollouts-0-scorer", lambda status: faults[0].done, signal=signal.SIGKILL),
    ]
    patience = {"maxRestarts": 20, "peerTimeoutSeconds": 45}
    check_disturbed(code, run_dir, peaceful(1), 1, faults, failurePolicy=patience)
    (lost,) = (e["time"] for e in events(run_dir, "trainers.lost"))
    learning = min(e["iteration"] for e in events(run_dir, "iteration.finished") if e["time"] > lost)
    assert spans(run_dir, "inference")[learning + 1][1] < lost * 1e6


class ComeAndGo(Injector):
    """One rollout at first, then four, then two. Those that shall go are retired, as the hook of a pod does it; those
    that shall come start anew."""

    def __init__(self) -> None:
        super().__init__([])
        self.retired, self.four = 0, False

    def look(self, launcher: Launcher) -> None:
        status = read_status(launcher)
        if status is None or status["stage"] != "ppo":
            return
        here = {name for name, one in status["instances"].items() if one["kind"] == "rollout"}
        if self.retired == 0 and len(here) == 4:
            self.retired = retire(launcher, ["rollouts-1", "rollouts-2", "rollouts-3"])
        if not self.four and self.retired and status["iteration"] >= 7:
            self.four = True
            for number in (1, 2, 3):
                os.kill(launcher.pids[f"rollouts-{number}"], signal.SIGKILL)
        if self.four and self.retired == 3 and status["iteration"] >= 14:
            self.retired += retire(launcher, ["rollouts-1", "rollouts-3"])


def retire(launcher: Launcher, names: list[str]) -> int:
    for name in names:
        request = urllib.request.Request(
            f"{launcher.url}/v1/instances/{name}",
            headers={"Authorization": f"Bearer {launcher.token}"},
            method="DELETE",
        )
        with urllib.request.urlopen(request, timeout=PATIENCE):
            pass
    return len(names)


class Slow(Injector):
    """Stops the processes of a server at random for moments that nobody takes for death."""

    def __init__(self) -> None:
        super().__init__([])
        self.chosen = random.Random(7)
        self.stops = 0

    def look(self, launcher: Launcher) -> None:
        pid = launcher.pids.get(f"rollouts-{self.chosen.randrange(2)}")
        if pid is None or self.chosen.random() > 0.1:
            return
        with contextlib.suppress(psutil.Error):
            processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            try:
                for process in processes:
                    process.suspend()
                self._stop.wait(self.chosen.random())
            finally:
                for process in processes:
                    with contextlib.suppress(psutil.Error):
                        process.resume()
            self.stops += 1


@pytest.mark.nightly
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_rollouts_that_come_and_go_and_slow_ones_change_nothing(tmp_path: Path, quick: Path, lag: int) -> None:
    """20 iterations. Processes that are killed change nothing either."""
    runs: dict[str, Path] = {}
    killed = Injector(disturbances(signal.SIGKILL, apart=4))
    disturbed = (("still", None, 2), ("moved", ComeAndGo(), 4), ("slow", Slow(), 2), ("killed", killed, 2))
    for name, injector, rollouts in disturbed:
        runs[name] = tmp_path / name
        outcome, told = run_job(job(quick, lag, rollouts, 20), runs[name], injector)
        assert outcome.succeeded, (outcome.reason, told)
        if isinstance(injector, ComeAndGo):
            assert injector.retired == 5
        if isinstance(injector, Slow):
            assert injector.stops > 10
        if injector is not None:
            assert [f.process for f in injector.faults if not f.done] == []
        check_same(runs[name], runs["still"], lag, 20)
