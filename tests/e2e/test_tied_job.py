"""Whole jobs of a tied model from a local Hugging Face folder and of its untied twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.manifest.types import RLHFJob
from helpers.jobs import history, run_job, stored_samples, tiny_job

pytestmark = pytest.mark.slow

QWEN3 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "dtype": "float32",
}


def write_models(tied: Path, untied: Path) -> None:
    """The same model twice: with one matrix for embedding and head, and with the head written out."""
    tokenizer = tokenizers.train(["the cat can run and the dog can sing", "tell me one thing about the bird"], 300)
    torch.manual_seed(1)
    fields = {
        **QWEN3,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen3", **fields, tie_word_embeddings=True)
    ).float()
    twin = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen3", **fields, tie_word_embeddings=False)
    ).float()
    twin.load_state_dict(model.state_dict())
    for made, folder in ((model, tied), (twin, untied)):
        made.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def job(folder: Path, pp: int) -> RLHFJob:
    return tiny_job(
        stages=["ppo"],
        models={
            "actor": {"source": {"path": str(folder)}},
            "reward": {"function": "dovetail.coordinator.data.synthetic:reward"},
            "tokenizer": {"train": None},
        },
        ppo={"iterations": 2, "advantage": "grpo", "samplesPerPrompt": 4, "actorOptimizer": {"learningRate": 3.0e-3}},
        groups=[
            {"name": "trainers", "roles": ["trainer"], "replicas": pp},
            {"name": "rollouts", "roles": ["rollout"], "replicas": 1},
        ],
        plan={"parallelism": {"actor": {"pp": pp}}},
        generation={"maxTokens": 24},
        checkpoint={"everySteps": 100},
    )


@pytest.mark.nightly
def test_a_tied_model_learns_and_samples_as_its_untied_twin(tmp_path: Path) -> None:
    """The tied one's trainers hold embedding and head on two ranks."""
    folders = {True: tmp_path / "tied", False: tmp_path / "untied"}
    write_models(folders[True], folders[False])
    said = {}
    for tied, folder in folders.items():
        run = tmp_path / f"run-{tied}"
        outcome, _ = run_job(job(folder, 2 if tied else 1), run)
        assert outcome.succeeded, outcome.reason
        rows = history(run, "ppo")
        assert sorted(rows) == [1, 2]
        for row in rows.values():
            assert row["mismatch_abs"] < 1e-4, row
        assert abs(rows[1]["kl"]) < 1e-3
        said[tied] = [(s.key, s.tokens.tolist()) for s in stored_samples(run, 1)]
    assert said[True] == said[False]
    assert len({tuple(tokens) for _, tokens in said[True]}) > 1
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run-True" / "models" / "actor")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
