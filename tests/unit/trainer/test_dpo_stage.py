"""DPO, IPO and KTO as a stage: on one real trainer rank, and what the coordinator keeps for them."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.data.text.tokenize import Encoded, dpo_batch
from dovetail.coordinator.job import Job
from dovetail.coordinator.loop.supervised import SupervisedStages
from dovetail.coordinator.store.reference_logprobs import ReferenceLogprobs
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import Stage
from dovetail.protocol.messages import Evaluate
from dovetail.protocol.wire import pack, unpack
from helpers import trainer_ranks
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job, load_command


def with_reference(trainer: LocalTrainer, references: ReferenceLogprobs, key: str, batch: bytes) -> bytes:
    """The batch as the coordinator serves it once the trainer has computed the reference's log-probabilities."""
    trainer.client.batches["asked"] = batch
    asked = Evaluate(id=f"asked/{key}", stage=Stage.DPO, batches=["asked"], reference=True)
    result = trainer.execute(asked)
    assert result.ok, result.error
    references.add(key, unpack(batch), result.logprobs)
    return pack(references.added(unpack(batch)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dpo", "at_start"),
    [
        ({}, math.log(2)),
        ({"labelSmoothing": 0.1, "microBatchTokens": 64}, math.log(2)),
        ({"loss": "IPO"}, 25.0),
        ({"loss": "KTO"}, 0.5),
    ],
    ids=["dpo", "conservative", "ipo", "kto"],
)
def test_an_actor_learns_to_prefer_the_chosen_responses(tmp_path: Path, dpo: dict[str, Any], at_start: float) -> None:
    store = Store(tmp_path)
    references = ReferenceLogprobs(store)
    with LocalTrainer(job(dpo=dpo)) as trainer:
        trainer.metrics(load_command(Stage.DPO))
        plain = [trainer_ranks.dpo_batch(seed, reference=False) for seed in range(4)]
        if dpo.get("loss") != "KTO":
            plain = [pack({k: v for k, v in unpack(batch).items() if not k.startswith("kl_")}) for batch in plain]
        batches = [with_reference(trainer, references, f"dpo/{i}", batch) for i, batch in enumerate(plain)]
        nothing = trainer.metrics(Evaluate(id="nothing", stage=Stage.DPO, batches=[]))
        assert nothing["pairs"] == nothing["loss"] == 0.0, "data.heldOut may be 0"
        trainer.client.batches["held-out"] = batches[0]
        evaluate = Evaluate(id="before", stage=Stage.DPO, batches=["held-out"])
        before = trainer.metrics(evaluate)
        assert before["loss"] == pytest.approx(at_start, abs=1e-3)
        assert before["rewards/chosen"] == pytest.approx(0.0, abs=1e-4)
        # Cut by tokens, an actions list of more micro-batches than are needed is shortened.
        cut = {"micro_batch_tokens": dpo["microBatchTokens"]} if "microBatchTokens" in dpo else {}
        for step in range(1, 9):
            command = trainer.step(Stage.DPO, step, batches[1 + step % 3], ["actor"], 8 if cut else 4, **cut)
            metrics = trainer.metrics(command)
            if step == 1:
                assert metrics["loss"] == pytest.approx(at_start, abs=1e-3)
                assert {"loss", "accuracy", "rewards/chosen", "rewards/rejected"} <= metrics.keys()
        after = trainer.metrics(evaluate.model_copy(update={"id": "after"}))
    assert after["loss"] < before["loss"]
    assert after["accuracy"] == 1.0
    assert after["margin"] == pytest.approx(after["rewards/chosen"] - after["rewards/rejected"], abs=1e-5)
    assert after["margin"] > 0
    store.close()


@pytest.mark.slow
def test_an_actor_learns_from_labels_alone(tmp_path: Path) -> None:
    """Rows of the pairs in any order, more of one kind than of the other."""
    store = Store(tmp_path)
    references = ReferenceLogprobs(store)
    with LocalTrainer(job(dpo={"loss": "KTO", "batchSize": 12, "microBatchSize": 4})) as trainer:
        trainer.metrics(load_command(Stage.DPO))
        pairs = unpack(trainer_ranks.dpo_batch(1, reference=False))
        rows = [0, 8, 1, 2, 9, 3, 4, 10, 5, 6, 11, 7]
        good = np.array([row < 8 for row in rows], np.uint8)
        batch = with_reference(
            trainer, references, "dpo/1", pack({name: value[rows] for name, value in pairs.items()} | {"good": good})
        )
        trainer.client.batches["held-out"] = batch
        evaluate = Evaluate(id="before", stage=Stage.DPO, batches=["held-out"])
        before = trainer.metrics(evaluate)
        assert (before["loss"], before["responses"]) == (pytest.approx(0.5, abs=1e-3), 12)
        for step in range(1, 9):
            trainer.metrics(trainer.step(Stage.DPO, step, batch, ["actor"], 3))
        after = trainer.metrics(evaluate.model_copy(update={"id": "after"}))
    assert after["loss"] < before["loss"]
    assert after["rewards/chosen"] > after["rewards/rejected"]
    assert after["margin"] == pytest.approx(after["rewards/chosen"] - after["rewards/rejected"])
    store.close()


def test_labels_are_for_kto() -> None:
    with LocalTrainer(job()) as trainer:
        trainer.metrics(load_command(Stage.DPO))
        batch = unpack(trainer_ranks.dpo_batch(1)) | {"good": np.ones(16, np.uint8)}
        result = trainer.execute(trainer.step(Stage.DPO, 1, pack(batch), ["actor"], 4))
    assert result.error == "batch dpo/1 has labels, which loss DPO cannot use"


def test_a_batch_without_the_reference_is_refused() -> None:
    with LocalTrainer(job()) as trainer:
        trainer.metrics(load_command(Stage.DPO))
        batch = trainer_ranks.dpo_batch(1, reference=False)
        result = trainer.execute(trainer.step(Stage.DPO, 1, batch, ["actor"], 4))
    assert result.error == "batch dpo/1 has no log-probabilities of the reference"


def test_references_are_known_again_after_a_restart_whatever_the_batch(tmp_path: Path) -> None:
    pairs = [(Encoded([1, 2, 3], 1), Encoded([1, 4], 1)), (Encoded([5, 6, 7, 8], 2), Encoded([5, 6, 9], 2))]
    store = Store(tmp_path)
    before = ReferenceLogprobs(store)
    first = dpo_batch(pairs, 0, None)
    assert not before.has(first)
    assert before.added(first).keys() == first.keys()
    before.add("dpo/1", first, [-1.0, -2.0, -3.0, -4.0])
    store.close()
    store = Store(tmp_path)
    after = ReferenceLogprobs(store)
    # The same pairs in another order and with other padding.
    longer = dpo_batch([pairs[1], pairs[0], (Encoded([1] * 9, 1), Encoded([1, 2], 1))], 0, None)
    assert not after.has(longer)
    turned = dpo_batch(pairs[::-1], 0, None)
    assert after.added(turned)["reference"].tolist() == [-2.0, -1.0, -4.0, -3.0]
    store.close()


def test_the_reference_is_computed_for_few_steps_ahead_and_says_how_far_it_is(tmp_path: Path) -> None:
    store = Store(tmp_path)
    references, asked, told = ReferenceLogprobs(store), [], []
    pairs = {k: [(Encoded([k, 2, 3], 1), Encoded([k, 4], 1))] for k in range(1, 202)}
    arrays = {f"dpo/{k}": dpo_batch(pairs[k], 0, None) for k in range(1, 201)}
    arrays["dpo-eval/0"] = dpo_batch(pairs[201], 0, None)

    class Session:
        async def logprobs(self, key: str) -> list[float]:
            asked.append(key)
            return [-1.0, -2.0]

    spec = job(dpo={"loss": "KTO"}).spec
    progress = SimpleNamespace(update=lambda **fields: told.append(fields["message"]))
    records: Any = SimpleNamespace(progress=progress, store=store)
    batches: Any = SimpleNamespace(references=references, arrays=arrays.__getitem__)
    session: Any = Session()
    unused: Any = None
    job_ = Job(spec, unused, tmp_path, "run", records, unused)
    stages = SupervisedStages(job_, session, batches, unused)
    stage: Any = SimpleNamespace(steps=200, checkpoint_every=1, eval_batches=["dpo-eval/0"])
    before = []
    for step in range(200):
        asyncio.run(stages._references(stage, step))
        if asked[len(before) :]:
            before += asked[len(before) :]
            at = len([key for key in asked if not key.startswith("dpo-eval/")])
            assert (step, at) in [(0, 10), (10, 40), (40, 160), (160, 200)]
    assert sorted(asked) == sorted(arrays), "each once"
    again = SupervisedStages(job_, session, batches, unused)
    asyncio.run(again._references(stage, 0))
    assert len(asked) == len(arrays), "also after a restart"
    store.close()
    third = [text for text in told if "of steps 41 to 160" in text]
    assert [text.rpartition(": ")[2] for text in third] == [f"{12 * k} of 120 batches" for k in range(10)]
    assert told[-1] == ""


def test_mismatched_responses_answer_other_prompts() -> None:
    pairs = [(Encoded([1, 2, 3], 1), Encoded([1, 4], 1)), (Encoded([5, 6, 7, 8], 2), Encoded([5, 6, 9], 2))]
    arrays = dpo_batch(pairs, 0, 4)
    rows = [row[:length].tolist() for row, length in zip(arrays["kl_tokens"], arrays["kl_lengths"], strict=True)]
    assert rows == [[1, 7, 8], [5, 6, 4], [1, 9], [5, 6, 2, 3]]
    assert np.array_equal(arrays["kl_loss_mask"].sum(axis=1), [2, 1, 1, 2])
