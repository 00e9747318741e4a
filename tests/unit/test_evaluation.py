"""Held-out prompts answered before and after PPO: what is measured, when, and that it is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.loop.evaluation import AFTER, BEFORE, PROMPTS, Evaluation, measures, slot
from dovetail.coordinator.store.results import Results
from dovetail.coordinator.store.samples import NewSample, State
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import RLHFJob, RLHFJobSpec
from helpers.manifests import changed

ASK = "\n\nHuman: Tell me two things about the cat.\n\nAssistant:"
GOOD = " Of course! The cat is small. It has fur. I hope this helps."


class Policy:
    """Answers badly with the first weights, well with any later ones."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int]]] = []

    async def __call__(self, slot: int, records: Sequence[PromptRecord], seeds: Sequence[int]) -> list[str]:
        self.calls.append((slot, list(seeds)))
        return [" The cat can run." if slot == -1 else GOOD for _ in records]


def spec(**prompts: object) -> RLHFJobSpec:
    return RLHFJob.model_validate(changed(**({"data.prompts": [prompts]} if prompts else {}))).spec


def evaluate(path: Path, policy: Policy, *moments: tuple[str, int], held: int = 100) -> dict[str, object]:
    records = [PromptRecord(i, ASK, [1, 2], {}) for i in range(held)]
    evaluation = Evaluation(measures(spec()), lambda: records, 0, policy)
    store = Store(path)
    results = Results(store, path, 0, lambda: 0.0)
    try:
        for when, iteration in moments:
            asyncio.run(evaluation.run(when, iteration, store, results))
        return dict(results.write("succeeded").get("evaluation", {}))
    finally:
        store.close()


def test_the_languages_quality_is_reported_before_and_after_ppo(tmp_path: Path) -> None:
    policy = Policy()
    found = evaluate(tmp_path, policy, (BEFORE, 0), (AFTER, 12))
    assert found["prompts"] == PROMPTS
    quality = found["quality"]
    assert isinstance(quality, dict)
    assert quality["after_ppo"] == {"mean": pytest.approx(1.0), "ci95": pytest.approx(0.0)}
    assert quality["before_ppo"]["mean"] < 0.7
    (_, first), (_, second) = policy.calls
    assert first == second, "both moments draw alike"
    assert len(set(first)) == PROMPTS


def test_it_is_done_once_for_the_same_weights(tmp_path: Path) -> None:
    policy = Policy()
    evaluate(tmp_path, policy, (BEFORE, 0), (BEFORE, 0), (AFTER, 12))
    evaluate(tmp_path, policy, (AFTER, 12))
    assert [at for at, _ in policy.calls] == [slot(0), slot(12)]
    # A run that was extended is measured again.
    evaluate(tmp_path, policy, (AFTER, 20))
    assert policy.calls[-1][0] == slot(20)


def test_nothing_is_asked_where_nothing_can_be_measured(tmp_path: Path) -> None:
    assert measures(spec(path="prompts.jsonl")) == {}
    policy = Policy()
    assert evaluate(tmp_path, policy, (BEFORE, 0), held=0) == {}
    assert policy.calls == []


def test_answers_stay_apart_from_the_samples_of_training(tmp_path: Path) -> None:
    """A checkpoint lets go of the iterations before it while held-out prompts may still be answered."""
    store = Store(tmp_path)
    for iteration in (slot(0), slot(12), 11, 12):
        store.samples.begin_iteration(iteration, [NewSample(0, 0, [1, 2], 7)])
    store.samples.forget_before(12)
    assert [len(store.samples.samples(i, State.PENDING)) for i in (slot(0), slot(12), 11, 12)] == [1, 1, 0, 1]
    store.close()
