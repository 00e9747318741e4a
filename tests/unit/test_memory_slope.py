"""What each process holds does not grow with its iterations."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dovetail.coordinator.store.samples import NewSample
from dovetail.manifest.types import Stage
from dovetail.rollout import scoring
from dovetail.rollout.samples import Samples
from dovetail.trainer.measure import SavedBytes
from helpers.generation_job import Job, play
from helpers.local_trainer import LocalTrainer
from helpers.scorers import ref, samples
from helpers.trainer_ranks import job, load_command, ppo_batch

ITERATIONS = 300


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


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


def test_a_trainer_holds_no_more_after_300_iterations() -> None:
    sizes = {"globalBatchSize": 2, "miniBatchSize": 2, "microBatchSize": 2, "epochs": 1}
    batch = ppo_batch(1, count=2)
    with LocalTrainer(job(ppo=sizes)) as trainer:
        trainer.metrics(load_command(Stage.PPO))

        def step(index: int) -> None:
            trainer.metrics(trainer.step(Stage.PPO, index, batch, ["actor", "critic"], 1, kl_coef=0.05))
            trainer.client.batches.clear()

        assert slope(step, live_tensors) <= 10


def test_a_scorer_holds_no_more_after_300_iterations() -> None:
    scorer = scoring.Scorer()
    scorer.load({name: ref(head, 0) for name, head in scoring.HEADS.items()})
    chunk = Samples.read(samples(n=2))

    assert slope(lambda _: void(scorer.score(scoring.MODELS, chunk)), live_tensors) <= 10


def void(_: object) -> None:
    pass


def test_a_coordinator_holds_no_more_after_300_iterations(tmp_path: Path) -> None:
    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    async def scenario(run: Job) -> None:
        server = await run.server("r0")
        found = {}
        for index in range(2, ITERATIONS + 2):
            run.store.samples.begin_iteration(index, [NewSample(0, 0, np.arange(1, 4), index)])
            done = await run.generator.generate(index)
            assert done.samples == 1
            run.store.samples.forget_before(index)
            for notes in (server.requests, run.events):
                notes.clear()
            if index in (ITERATIONS // 3, ITERATIONS + 1):
                found[index] = objects()
        first, last = found.values()
        assert last - first <= 100

    play(tmp_path, scenario, generation={"maxTokens": 4})
