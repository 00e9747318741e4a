"""What each process holds does not grow with its iterations."""

from __future__ import annotations

import gc
import itertools
import json
import os
import socket
import tracemalloc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from test_local_launcher import CPU, CPU_PLAN, a_job

from dovetail.coordinator.store.samples import NewSample
from dovetail.launch import supervisor
from dovetail.launch.local import launcher
from dovetail.launch.local.progress_bars import Lines
from dovetail.launch.spawn import ForkSpawner
from dovetail.manifest.types import Stage
from dovetail.rollout.scoring import forward_passes as scoring
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from dovetail.trainer.engine.action_measures import SavedBytes
from helpers.generation_job import Job, play
from helpers.local_trainer import LocalTrainer
from helpers.scorers import ref, samples
from helpers.trainer_ranks import job, load_command, ppo_batch

ITERATIONS = 120


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
def test_what_is_saved_is_let_go_without_a_backward_pass() -> None:
    """An operation may save its own output, and nobody may visit it: a statistic, say."""
    weight = torch.nn.Parameter(torch.ones(4))
    before = live_tensors()
    for _ in range(5):
        with SavedBytes([weight]) as meter:
            torch.expm1(weight * 2.0)
        assert meter.bytes > 0
    assert live_tensors() <= before + 1


def test_gradients_are_the_same_while_bytes_are_counted() -> None:
    def gradient(count: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(0.1, 1.0, 8))
        with SavedBytes([]) if count else torch.enable_grad():
            loss = (torch.expm1(weight * 2.0) * weight.exp()).sum()
        loss.backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(gradient(True), gradient(False))


def slope(step: Callable[[int], None], held: Callable[[], int]) -> int:
    """Growth of `held` over the last two thirds of the iterations."""
    for index in range(1, ITERATIONS // 3 + 1):
        step(index)
    start = held()
    for index in range(ITERATIONS // 3 + 1, ITERATIONS + 1):
        step(index)
    return held() - start


@pytest.mark.slow
def test_a_trainer_holds_no_more_however_long_it_runs() -> None:
    sizes = {"globalBatchSize": 2, "miniBatchSize": 2, "microBatchSize": 2, "epochs": 1}
    batch = ppo_batch(1, count=2)
    with LocalTrainer(job(ppo=sizes)) as trainer:
        trainer.metrics(load_command(Stage.PPO))

        def step(index: int) -> None:
            trainer.metrics(trainer.step(Stage.PPO, index, batch, ["actor", "critic"], 1, kl_coef=0.05))
            trainer.client.batches.clear()

        assert slope(step, live_tensors) <= 4


@pytest.mark.slow
def test_a_scorer_holds_no_more_however_long_it_runs() -> None:
    scorer = scoring.ModelScorer()
    scorer.load({name: ref(head, 0) for name, head in scoring.HEADS.items()})
    chunk = SamplesToScore.read(samples(n=2))

    assert slope(lambda _: void(scorer.score(scoring.MODELS, chunk)), live_tensors) <= 4


class NoZygote(ForkSpawner):
    """Its end of the zygote's socket; `answer` plays the zygote."""

    pid = itertools.count(2**30)  # no process has such a number
    made: ClassVar[dict[str, NoZygote]] = {}

    def start(self) -> None:
        if self._channel is None:
            self.made[self.name] = self
            self._channel, self._far = socket.socketpair()
            self._channel.setblocking(False)

    def answer(self) -> None:
        """Every process that was asked for has started; a server dies."""
        asked = [json.loads(line) for line in self._far.recv(1 << 20).splitlines()] if self._asked else []
        events = [{"event": "started", "name": spec["name"], "pid": next(self.pid)} for spec in asked]
        events.append({"event": "exit", "name": "gen-0", "code": -9})
        self._far.sendall(b"".join(json.dumps(event).encode() + b"\n" for event in events))


def traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.slow
def test_a_launcher_holds_no_more_however_long_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each iteration a server dies and is started again, and the status is shown."""
    monkeypatch.setattr(supervisor, "FIRST_DELAY_SECONDS", 0.0)
    for name in ("ExecSpawner", "ForkSpawner"):
        monkeypatch.setattr(launcher, name, NoZygote)
    restarts = itertools.count()
    run = launcher.Launcher(
        a_job(CPU, failurePolicy={"maxRestarts": 1000}),
        CPU_PLAN,
        tmp_path / "run",
        tell=lambda _: void(next(restarts)),
    )
    with run, open(os.devnull, "w") as nowhere:
        display = Lines(a_job(CPU).spec, Console(file=nowhere))
        run.start()

        def step(index: int) -> None:
            NoZygote.made["forker"].answer()
            assert run.step(0.0) is None
            verdicts = [{"reason": "R", "message": f"of {index}"}] if index % 2 else []
            display.update(
                {
                    "stage": "ppo",
                    "iteration": index,
                    "total_iterations": 900,
                    "metrics": {"reward": float(index), "kl": 0.1},
                    "health": {"iteration": index, "verdicts": verdicts},
                }
            )

        tracemalloc.start()
        try:
            assert slope(step, traced_bytes) <= 20_000
        finally:
            tracemalloc.stop()
    assert next(restarts) >= ITERATIONS


def void(_: object) -> None:
    pass


@pytest.mark.slow
def test_a_coordinator_holds_no_more_however_long_it_runs(tmp_path: Path) -> None:
    def objects() -> int:
        """Without weak references: sqlite3 drops those of its finished cursors only every 200 statements."""
        gc.collect()
        return sum(type(thing) is not weakref.ref for thing in gc.get_objects())

    async def scenario(run: Job) -> None:
        server = await run.server("r0")
        found = {}
        for index in range(2, ITERATIONS + 2):
            run.store.samples.begin_iteration(index, [NewSample(0, 0, np.arange(1, 4), index)])
            with run.generator.open(index, 1) as turn:
                done = await run.generator.generate(turn)
            assert done.samples == 1
            run.store.samples.forget_before(index)
            for notes in (server.requests, run.events):
                notes.clear()
            if index in (ITERATIONS // 3, ITERATIONS + 1):
                found[index] = objects()
        first, last = found.values()
        assert last - first <= 40

    play(tmp_path, scenario, generation={"maxTokens": 4})
