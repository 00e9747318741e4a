"""`dovetail explain` and the words for types."""

import json
import re

import pytest
from pydantic import BaseModel, Field

from dovetail.manifest.describe.explain import ExplainError, explain
from dovetail.manifest.job_class import RLHFJobClass
from dovetail.manifest.type_descriptions import describe, model_in
from dovetail.manifest.types import RLHFJob, RLHFJobSpec


def test_an_object_lists_its_fields_with_types_and_defaults():
    page = explain("RLHFJob.spec.ppo")
    assert "FIELD:    ppo <PPO>" in page
    assert "globalBatchSize <integer>  (default 64)" in page
    assert "Samples per iteration: prompts times samplesPerPrompt." in page


def test_a_scalar_says_what_it_takes():
    page = explain("RLHFJob.spec.ppo.advantage")
    assert "ENUM:     gae, grpo, rloo" in page
    assert "DEFAULT:  gae" in page
    assert "FIELDS" not in page


def test_lists_are_entered_without_an_index():
    assert explain("spec.groups.gpu.product") == explain("RLHFJob.spec.groups[0].gpu.product")
    assert "groups <[]Group>  (required)" in explain("spec.groups")


def test_unions_show_both_sides():
    assert "interStageFusion <string | number>" in explain("spec.plan")
    assert "actor <Parallelism> -required-" in explain("spec.plan.parallelism")


def test_the_root_and_status():
    assert "spec <RLHFJobSpec> -required-" in explain("RLHFJob")
    assert "samplesPerSecond <number>" in explain("RLHFJob.status")


@pytest.mark.parametrize("kind", [RLHFJobSpec, RLHFJobClass])
def test_a_text_of_a_certain_form_is_described_by_its_form(kind: type[BaseModel]) -> None:
    """Not by its length alone, which is seldom what is wrong with it."""
    patterns = set(re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', json.dumps(kind.model_json_schema())))
    assert patterns
    described = {each: describe(str, Field(pattern=json.loads(each)).metadata) for each in patterns}
    assert [pattern for pattern, words in described.items() if words == "text"] == []


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("RLHFJob.spec.pppo", "RLHFJob.spec has no field 'pppo'; did you mean ppo"),
        ("RLHFJob.spec.zzzzz", "RLHFJob.spec has no field 'zzzzz'; it has suspend, retry, managedBy, class, seed, "),
        ("spec.seed.x", "RLHFJob.spec.seed has no fields"),
        ("Pod.spec", "RLHFJob has no field 'Pod'"),
    ],
)
def test_unknown_paths_name_the_nearest(path, sentence):
    with pytest.raises(ExplainError) as caught:
        explain(path)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("clip", "  spec.ppo.clip <number>"),
        ("ppo.clip", "  spec.ppo.clip <number>"),
        ("learning_rate", "  spec.sft.optimizer.learningRate <number>"),
        ("max_new_tokens", "  spec.data.maxTokens <integer>"),
        ("distillation", "  spec.ppo.advantage <string>"),
    ],
)
def test_a_word_is_searched(word, first):
    lines = explain(word).splitlines()
    assert lines[0] == f"FIELDS with {word}:"
    assert first in lines[:10]


def test_a_word_that_is_nowhere():
    with pytest.raises(ExplainError, match=r"^RLHFJob has no field 'globalBathSize', .*; did you mean globalBatchSize"):
        explain("globalBathSize")


def test_every_field_is_described():
    todo, seen = [RLHFJob], set()
    while todo:
        model = todo.pop()
        if model in seen:
            continue
        seen.add(model)
        assert model.__doc__, model
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            if inner := model_in(field.annotation):
                todo.append(inner)
    assert len(seen) > 25
