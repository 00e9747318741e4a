"""What a trained model's folder holds beside its weights: settings, a chat template, and a card."""

import json
from typing import get_args

import pytest
import yaml

from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.coordinator.data.text.chat_template import HumanAssistant
from dovetail.coordinator.reporting.model_card import CardFacts, ListSize, model_card, shown_manifest
from dovetail.coordinator.reporting.model_files import describe_models, generation_config
from dovetail.manifest.training_types import DPO, PPO, Generation
from dovetail.manifest.types import RLHFJob

JOB = {
    "apiVersion": "dovetail.dev/v1beta1",
    "kind": "RLHFJob",
    "metadata": {"name": "hello"},
    "spec": {
        "models": {"actor": {"source": {"huggingFace": "Qwen/Qwen3-0.6B"}}},
        "data": {
            "demonstrations": [{"path": "/home/somebody/secret/mine.jsonl"}],
            "prompts": [{"huggingFace": "Anthropic/hh-rlhf", "subset": "harmless-base"}],
        },
        "ppo": {"iterations": 7, "advantage": "grpo"},
        "generation": {"temperature": 0.8},
        "groups": [
            {"name": "all", "roles": ["trainer", "rollout"], "image": "registry.example.com/private"},
        ],
    },
}
SUMMARY = {
    "state": "succeeded",
    "method": "GRPO",
    "sft": {"loss_before": 3.25, "loss_after": 1.5},
    "ppo": {"reward_first": {"mean": 0.1, "ci95": 0.02}, "reward_last": {"mean": 0.9, "ci95": 0.01}},
    "evaluation": {"prompts": 64, "reward": {"before_ppo": {"mean": 0.1, "ci95": 0.0}, "after_ppo": {"mean": 0.8}}},
    "versions": {"dovetail": "0.1.0", "torch": "2.13.0"},
}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.train(["hello there, how are you"], 300)


@pytest.fixture
def models(tmp_path):
    """An actor and a reward model that are whole, and a critic that is not."""
    for name in ("actor-config", "actor", "reward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "critic").mkdir()
    (tmp_path / "actor" / "dovetail.json").write_text(json.dumps({"run": "x", "stage": "ppo", "step": 7}))
    base = {"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "transformers_version": "4"}
    (tmp_path / "actor-config" / "generation_config.json").write_text(json.dumps(base))
    return tmp_path


def facts() -> CardFacts:
    job = RLHFJob.model_validate(JOB)
    return CardFacts("hello", job.spec, SUMMARY, [ListSize("demonstrations", "mine.jsonl", 900, 100)])


def test_sampling_settings_are_those_of_the_training_and_end_tokens_those_of_both():
    base = {"eos_token_id": [5, 6], "bos_token_id": 1, "temperature": 0.6, "top_k": 20}
    assert generation_config(base, Generation(temperature=0.8, top_p=0.9), eos=6, pad=0) == {
        "bos_token_id": 1,
        "eos_token_id": [6, 5],
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 0,
    }
    assert generation_config({}, Generation(), eos=2, pad=None)["eos_token_id"] == 2


def test_models_that_are_whole_are_completed(models, tokenizer):
    describe_models(models, facts(), tokenizer)
    written = {str(p.relative_to(models)) for p in models.rglob("*") if p.name not in ("config.json", "dovetail.json")}
    assert written >= {"actor/README.md", "actor/generation_config.json", "actor/chat_template.jinja"}
    assert "reward/README.md" in written
    assert not written & {"reward/generation_config.json", "critic/README.md", "actor-config/README.md"}
    config = json.loads((models / "actor" / "generation_config.json").read_text())
    assert config["eos_token_id"] == [tokenizer.eos_token_id, 5, 6]
    assert "AutoModelForSequenceClassification" in (models / "reward" / "README.md").read_text()
    (models / "reward" / "config.json").write_text('{"score_bias": -1.25}')
    describe_models(models, facts(), tokenizer)
    assert "Dovetail adds -1.25 to it" in (models / "reward" / "README.md").read_text()


def test_a_card_says_how_the_model_was_trained_and_names_no_folder_of_the_machine(models, tokenizer):
    describe_models(models, facts(), tokenizer)
    _, metadata, text = (models / "actor" / "README.md").read_text().split("---\n", 2)
    about = yaml.safe_load(metadata)
    assert about["base_model"] == "Qwen/Qwen3-0.6B"
    assert about["datasets"] == ["Anthropic/hh-rlhf"]
    for said in (
        "after step 7",
        "GRPO",
        "| SFT loss, held out | 3.250 | 1.500 |",
        "| Reward per sample | 0.100 ± 0.020 | 0.900 ± 0.010 |",
        "| demonstrations | mine.jsonl | 900 | 100 |",
        "torch 2.13.0",
        "vllm serve",
    ):
        assert said in text
    assert "/home/somebody" not in text
    assert "registry.example.com" not in text
    manifest = text.split("```yaml\n")[1].split("```")[0]
    assert RLHFJob.model_validate(yaml.safe_load(manifest)).spec.ppo.iterations == 7
    assert yaml.safe_load(manifest) == shown_manifest("hello", facts().spec)


PPO_METHODS = {
    "gae": "PPO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce++": "REINFORCE++",
    "reinforce++-baseline": "REINFORCE++ with a baseline",
    "distillation": "on-policy distillation",
}
SETTINGS = [
    *(({"ppo": {"advantage": advantage}}, ["ppo"], method) for advantage, method in PPO_METHODS.items()),
    ({"ppo": {"advantage": "grpo", "loss": "gspo"}}, ["ppo"], "GSPO"),
    ({"ppo": {"advantage": "grpo", "loss": "cispo"}}, ["ppo"], "CISPO"),
    ({"ppo": {"advantage": "grpo", "normalizeStd": False, "lossAggregation": "Constant"}}, ["ppo"], "Dr. GRPO"),
    (
        {"ppo": {"advantage": "rloo", "loss": "mine:loss"}},
        ["sft", "ppo"],
        "supervised fine-tuning, RLOO with mine:loss",
    ),
    *(({"dpo": {"loss": loss}}, ["dpo"], loss) for loss in get_args(DPO.model_fields["loss"].annotation)),
    ({"dpo": {"loss": "KTO"}}, ["sft", "dpo"], "supervised fine-tuning, KTO"),
    ({}, ["sft", "reward", "ppo"], "supervised fine-tuning, a reward model, PPO"),
    ({}, ["sft"], "supervised fine-tuning"),
]


@pytest.mark.parametrize(("settings", "stages", "method"), SETTINGS)
def test_a_card_names_the_method(settings, stages, method):
    job = RLHFJob.model_validate(JOB | {"spec": {"groups": JOB["spec"]["groups"], "stages": stages} | settings})
    card = model_card(CardFacts("hello", job.spec, {}), "actor", 3, True)
    assert (
        "This is the actor at the end of training of the job `hello`, "
        f"trained with Dovetail ({method}). It was exported after step 3 of its stage." in card
    )


def test_every_advantage_has_a_method_on_the_card():
    assert set(PPO_METHODS) == set(get_args(PPO.model_fields["advantage"].annotation))


def test_a_card_names_only_what_came_before_its_model():
    job = RLHFJob.model_validate(JOB | {"spec": JOB["spec"] | {"stages": ["sft", "reward", "ppo"]}})
    facts = CardFacts("hello", job.spec, SUMMARY)
    assert "(supervised fine-tuning)." in model_card(facts, "sft", None, True)
    assert "(supervised fine-tuning, a reward model)." in model_card(facts, "reward", None, True)


def test_the_chat_template_writes_what_the_training_read(models, tokenizer):
    tokenizer.save_pretrained(models / "actor")
    describe_models(models, facts(), tokenizer)
    loaded = tokenizers.load(models / "actor", "field")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    messages += [{"role": "user", "content": "so"}]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == HumanAssistant().prompt(messages)


def test_a_template_of_the_tokenizers_own_stays(models, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "own", raising=False)
    describe_models(models, facts(), tokenizer)
    assert not (models / "actor" / "chat_template.jinja").exists()
    assert "chat template of its own" not in (models / "actor" / "README.md").read_text()
