"""Real preference data: Anthropic's hh-rlhf, harmless-base, test split, from a local file.

The project does not ship it: it is $DOVETAIL_HH_DATA, or ../shared/data/hh-rlhf-harmless-base-test.jsonl.gz beside
the checkout."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from dovetail.coordinator.data.prepare import Prepared, prepare
from dovetail.manifest.types import RLHFJob
from helpers.jobs import run_job, summary

BESIDE = Path(__file__).parents[2].parent / "shared" / "data" / "hh-rlhf-harmless-base-test.jsonl.gz"
PAIRS = 2312
pytestmark = pytest.mark.slow

# What limits the reward model is not its size: with a thousand pairs to learn from, a logistic regression on bags of
# words gets 0.61 of the held-out pairs right. So a small model and strong weight decay, few passes, and half of the
# pairs held out, for the test's power.
MANIFEST = """
apiVersion: dovetail.dev/v1beta1
kind: RLHFJob
metadata: {name: hh}
spec:
  stages: [sft, reward]
  models:
    actor:
      source:
        scratch:
          architecture: llama
          config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 4,
                   num_key_value_heads: 4, max_position_embeddings: 128, tie_word_embeddings: true}
    tokenizer: {train: {vocabSize: 512}}
  data:
    split: {sft: 1, reward: 4}
    maxPromptTokens: 16
    maxTokens: 128
    heldOut: 0.5
  sft:
    epochs: 6
    batchSize: 16
    microBatchSize: 8
    optimizer: {learningRate: 5.0e-3, weightDecay: 1.0, warmupFraction: 0.1}
  reward:
    epochs: 2
    batchSize: 16
    microBatchSize: 8
    optimizer: {learningRate: 3.0e-3, weightDecay: 5.0, warmupFraction: 0.1}
  groups:
    - {name: trainers, roles: [trainer], replicas: 2}
  checkpoint: {everySteps: 100}
"""


@pytest.fixture(scope="module")
def data() -> Path:
    """The file. Skips when it is not at its default place; a wrong DOVETAIL_HH_DATA is an error."""
    named = os.environ.get("DOVETAIL_HH_DATA")
    path = Path(named) if named else BESIDE
    if named:
        assert path.is_file(), f"DOVETAIL_HH_DATA={named} is not a file"
    elif not path.is_file():
        pytest.skip(f"the hh-rlhf file is not there; set DOVETAIL_HH_DATA or put it at {path}")
    return path


def hh_job(path: Path, seed: int = 0) -> RLHFJob:
    """The manifest above on the file, which serves as demonstrations and as preferences."""
    document = yaml.safe_load(MANIFEST)
    source = [{"path": str(path.resolve()), "format": "HH"}]
    document["spec"] |= {"seed": seed}
    document["spec"]["data"] |= {"demonstrations": source, "preferences": source}
    return RLHFJob.model_validate(document)


def p_value(correct: int, pairs: int) -> float:
    """One-sided exact binomial test: chance of at least so many right when each is a fair coin."""
    return sum(math.comb(pairs, k) for k in range(correct, pairs + 1)) / 2**pairs


def test_the_binomial_test_itself() -> None:
    assert p_value(0, 10) == 1.0
    assert p_value(10, 10) == 2**-10
    assert p_value(8, 10) == pytest.approx(56 / 1024)


def test_every_real_record_loads_and_the_stages_share_none(data: Path, tmp_path: Path) -> None:
    """Prompt and replies put together are the file's dialogues; SFT, reward model and held-out parts are disjoint."""
    prepared = prepare(hh_job(data).spec, tmp_path, Path.cwd())
    with gzip.open(data, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == PAIRS
    demonstrations, preferences = prepared.data.demonstrations, prepared.data.preferences
    assert demonstrations is not None
    assert preferences is not None
    (shown,), (compared,) = demonstrations.parts, preferences.parts
    for i, row in enumerate(rows):
        pair, reply = compared.records[i], shown.records[i]
        assert (pair.prompt + pair.chosen, pair.prompt + pair.rejected) == (row["chosen"], row["rejected"])
        assert pair.prompt.endswith("\n\nAssistant:")
        assert reply.prompt + reply.response == row["chosen"]
    used = [int(i) for part in (shown, compared) for i in (*part.train, *part.held_out)]
    assert sorted(used) == list(range(PAIRS))


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prepared]:
    """The finished job's run directory, and its data as the job itself had them."""
    run_dir = tmp_path_factory.mktemp("hh") / "run"
    job = hh_job(data)
    outcome, told = run_job(job, run_dir)
    assert outcome.succeeded, (outcome.reason, told)
    facts = summary(run_dir)
    print(json.dumps({name: facts.get(name) for name in ("sft", "reward_model", "wall_seconds")}))
    return run_dir, prepare(job.spec, run_dir, Path.cwd())


def unigram_loss(prepared: Prepared) -> float:
    """Held-out cross entropy, nats a token, of token frequencies (add-one) in the training replies."""
    assert prepared.data.demonstrations is not None
    counts = np.ones(len(prepared.tokenizer))
    for record in prepared.data.demonstrations.training_records():
        encoded = prepared.encoder.demonstration(record)
        np.add.at(counts, encoded.tokens[encoded.prompt_length :], 1)
    batches = prepared.sft_eval_batches()
    learnt = np.concatenate([batch["tokens"][batch["loss_mask"].astype(bool)] for batch in batches])
    return -float(np.log(counts / counts.sum())[learnt].mean())


@pytest.mark.nightly
def test_sft_lowers_held_out_loss_on_real_dialogues(run: tuple[Path, Prepared]) -> None:
    run_dir, prepared = run
    sft = summary(run_dir)["sft"]
    baseline = unigram_loss(prepared)
    assert sft["loss_before"] == pytest.approx(math.log(512), abs=0.2), "an untrained model knows nothing"
    assert sft["loss_after"] < sft["loss_before"] - 1.0
    assert sft["loss_after"] < baseline - 0.2, f"no better than token frequencies, {baseline:.3f}"


@pytest.mark.nightly
def test_the_reward_model_beats_chance_on_held_out_real_pairs(run: tuple[Path, Prepared]) -> None:
    facts = summary(run[0])["reward_model"]
    pairs = int(facts["pairs"])
    correct = round(facts["accuracy"] * pairs)
    assert pairs > 900
    assert p_value(correct, pairs) < 0.01, f"{correct} of {pairs} right"


def padded(batch: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    """A transformers model's input from a batch's arrays `<name>tokens` and `<name>lengths`."""
    tokens = torch.tensor(batch[f"{name}tokens"]).long()
    lengths = torch.tensor(batch[f"{name}lengths"])
    return {"input_ids": tokens, "attention_mask": (torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)).long()}


@pytest.mark.nightly
@torch.inference_mode()
def test_transformers_finds_the_same_numbers_in_the_exported_models(run: tuple[Path, Prepared]) -> None:
    """Accuracy and loss computed again, by other code: stock transformers on the exported folders."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    run_dir, prepared = run
    facts = summary(run_dir)

    actor = AutoModelForCausalLM.from_pretrained(run_dir / "models" / "sft")
    loss = tokens = 0.0
    for batch in prepared.sft_eval_batches():
        given = padded(batch, "")
        logprobs = actor(**given).logits[:, :-1].log_softmax(-1)
        mask = torch.tensor(batch["loss_mask"])[:, 1:].bool()
        loss -= float(logprobs.gather(2, given["input_ids"][:, 1:].unsqueeze(2)).squeeze(2)[mask].sum())
        tokens += int(mask.sum())
    assert loss / tokens == pytest.approx(facts["sft"]["loss_after"], abs=1e-4)

    judge = AutoModelForSequenceClassification.from_pretrained(run_dir / "models" / "reward")

    def rewards(batch: dict[str, Any], name: str) -> torch.Tensor:
        return judge(**padded(batch, name)).logits.squeeze(1)

    batches = prepared.reward_eval_batches()
    correct = sum(int((rewards(b, "chosen_") > rewards(b, "rejected_")).sum()) for b in batches)
    # A pair whose replies are all but tied may fall either way in another order of additions.
    assert correct == pytest.approx(facts["reward_model"]["accuracy"] * facts["reward_model"]["pairs"], abs=2)
