"""The end-to-end benchmark's arithmetic, that both systems are told the same, and the models of other benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_e2e  # noqa: E402
from e2e import ours  # noqa: E402
from e2e.model import EOS, PAD, UNK, VOCABULARY, make_models, random_tokens  # noqa: E402
from e2e.settings import Folder, Settings  # noqa: E402
from race.ours import TRL_OPTIMIZER, manifest  # noqa: E402

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


@pytest.mark.slow  # TRL's imports
def test_both_systems_make_as_many_iterations_and_steps() -> None:
    from race.trl_grpo import config

    for settings in bench_e2e.CASES.values():
        job, theirs = manifest(Path("/base"), settings, 0, TRL_OPTIMIZER), config(settings, 0, "/out")
        assert job.spec.ppo.iterations == theirs.max_steps
        assert job.spec.ppo.global_batch_size == theirs.per_device_train_batch_size == theirs.generation_batch_size
        assert job.spec.ppo.mini_batch_size == job.spec.ppo.global_batch_size
        assert job.spec.ppo.samples_per_prompt == theirs.num_generations
        assert job.spec.generation.max_tokens == theirs.max_completion_length
        assert job.spec.ppo.actor_optimizer.learning_rate == theirs.learning_rate


def test_summary_shows_start_up_apart() -> None:
    runs = [
        bench_e2e.Run(15.0 + more, 4.0, [(10.0, 1.0), (11.0, 2.0), (12.0 + more, 3.0)]) for more in (0.0, 2.0, 100.0)
    ]
    found = bench_e2e.summarise(runs, {"prompts": 4, "samples": 5})
    assert found["start_up_cpu_seconds"] == 10.0
    assert found["cpu_seconds"] == 17.0
    assert found["cpu_ms_a_sample"] == 100.0, "4 seconds for 40 samples"
    assert found["wall_seconds"] == 4.0


def test_rows_of_our_history_are_the_ppo_iterations(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    metrics = {"iteration_seconds": 3.0, "response_length": 31.0, "seconds_generation": 1.0, "seconds_other": 0.1}
    lines = [{"stage": "sft", "step": 1, "metrics": {}}, {"stage": "ppo", "step": 1, "metrics": metrics}]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = ours.read_rows(history)
    assert (row["seconds"], row["generation"], row["inference"], row["other"]) == (3.0, 1.0, 0.0, 0.1)
