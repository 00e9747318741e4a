"""The end-to-end benchmark's arithmetic, its models, and that both systems are told the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_e2e  # noqa: E402
from e2e import losses, ours  # noqa: E402
from e2e.model import EOS, PAD, UNK, VOCABULARY, make_models, random_tokens  # noqa: E402
from e2e.settings import Folder, Settings  # noqa: E402

SETTINGS = Settings(batch=8, mini_batches=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = Folder(tmp_path_factory.mktemp("bench") / "models")
    make_models(made, SETTINGS)
    return made


def test_responses_end_with_the_wanted_rate_and_other_special_tokens_never_come(folder: Folder) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder.actor)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(3.3e6, rel=0.02)
    tokens = random_tokens((4, 144), torch.Generator().manual_seed(5))
    with torch.no_grad():
        rates = torch.softmax(model(input_ids=tokens).logits[:, 16:], dim=-1).flatten(0, 1)
    assert rates[:, EOS].mean() == pytest.approx(1 / 32, rel=0.1)
    assert rates[:, EOS].min() > 1 / 64
    assert rates[:, [PAD, UNK]].max() < 1e-6


def test_prompts_have_exactly_the_wanted_tokens(folder: Folder) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder.actor)
    texts = folder.texts()
    assert len(texts) == SETTINGS.batch
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert {len(row) for row in ids} == {SETTINGS.prompt_tokens}
    assert all(UNK < token < VOCABULARY for row in ids for token in row)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_our_job_gets_the_shared_settings_and_makes_as_many_optimizer_steps(folder: Folder) -> None:
    settings = Settings(epochs=4, clip=0.3, learning_rate=1e-5)
    job = ours.manifest(folder, settings)
    ppo = job.spec.ppo
    assert ppo.global_batch_size // ppo.mini_batch_size == settings.mini_batches
    assert (ppo.epochs, ppo.clip, ppo.kl.coef, ppo.lam) == (4, 0.3, settings.kl_coef, settings.lam)
    assert ppo.actor_optimizer.learning_rate == ppo.critic_optimizer.learning_rate == 1e-5
    assert job.spec.generation.max_tokens == settings.max_new_tokens


def test_summary_is_of_medians_per_sample(tmp_path: Path) -> None:
    rows = [
        {"seconds": s, "generation": s / 2, "training": s / 2, "other": 0.0, "response_length": 30.0}
        for s in (2.0, 4.0, 100.0)
    ]
    found = bench_e2e.summarise(rows, 64)
    assert found["samples_per_second"] == 16.0
    assert found["phases"]["generation"] == 2.0
    assert found["phases"]["weights"] == 0.0
    assert found["cpu_seconds"] is None


def test_rows_of_our_history_are_the_ppo_iterations(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    metrics = {"iteration_seconds": 3.0, "response_length": 31.0, "seconds_generation": 1.0, "seconds_other": 0.1}
    lines = [{"stage": "sft", "step": 1, "metrics": {}}, {"stage": "ppo", "step": 1, "metrics": metrics}]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = ours.read_rows(history)
    assert (row["seconds"], row["generation"], row["inference"], row["other"]) == (3.0, 1.0, 0.0, 0.1)


def trl_like_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Rows as TRL makes them: one cut at the limit, the others padded after their end token."""
    ends = torch.tensor([2, 5, 7, 3])
    steps = torch.arange(8).expand(4, 8)
    mask, mask_p1 = steps > ends[:, None], steps > ends[:, None] + 1
    logprobs, ref = (torch.randn(4, 8, generator=generator).masked_fill(mask, 1.0) for _ in range(2))
    values = torch.randn(4, 8, generator=generator).masked_fill(mask_p1, 0.0)
    scores = torch.randn(4, generator=generator)
    rewards = -0.05 * (logprobs - ref)
    rewards[torch.arange(4), torch.where(ends + 1 < 8, ends + 1, ends)] += scores
    advantages, carried = torch.zeros(4, 8), torch.zeros(4)
    for t in reversed(range(8)):
        following = values[:, t + 1] if t < 7 else 0.0
        carried = rewards[:, t] + following - values[:, t] + 0.95 * carried
        advantages[:, t] = carried
    return {
        "query_responses": torch.randint(3, 512, (4, 12), generator=generator),
        "logprobs": logprobs,
        "ref_logprobs": ref,
        "values": values,
        "scores": scores,
        "padding_mask": mask,
        "padding_mask_p1": mask_p1,
        "rewards": rewards,
        "returns": advantages + values,
        "advantages": advantages,
    }


def test_one_more_token_gives_trls_rewards_and_returns(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = trl_like_batch(torch.Generator().manual_seed(3))
    kept = ~batch["padding_mask"]
    raw = batch["advantages"][kept].double()
    batch["advantages"] = torch.where(kept, (batch["advantages"] - raw.mean()) / raw.std(), 0.0).float()
    batch |= {"policy_losses": torch.zeros(2), "value_losses": torch.zeros(2)}
    monkeypatch.setattr("safetensors.torch.load_file", lambda path: batch)
    monkeypatch.setattr(losses, "train", lambda *_: torch.zeros(2))
    found = losses.agree(folder, Settings(epochs=2), Path("unused"))
    assert [f.name for f in found[:3]] == ["token rewards", "returns", "advantages"]
    assert all(f.difference < 1e-5 for f in found)


def test_a_difference_is_reported() -> None:
    same, other = torch.tensor([0.1, 0.2]), torch.tensor([0.1, 0.21])
    assert losses.compare("x", same, same).ok
    assert not losses.compare("x", same, other).ok


def test_the_batch_for_our_trainer_is_cut_at_the_mask() -> None:
    batch = trl_like_batch(torch.Generator().manual_seed(4))
    longer = ~batch["padding_mask_p1"]
    made = losses.arrays(batch, longer, batch["advantages"], batch["returns"])
    assert made["prompt_lengths"].tolist() == [4, 4, 4, 4]
    assert made["response_lengths"].tolist() == [4, 7, 8, 5]
    assert not np.any(made["rollout_logprobs"][0, 4:])
