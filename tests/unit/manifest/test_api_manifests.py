"""Bad manifests and the sentences that users get for them."""

import copy
from pathlib import Path

import pytest
import yaml

from dovetail.manifest.checks.validation import load_manifest, parse_manifest, warnings
from dovetail.manifest.describe.crd import class_crd, crd
from dovetail.manifest.documents import ManifestError, parse
from dovetail.manifest.training_types import PPO
from dovetail.manifest.type_descriptions import named
from dovetail.manifest.types import API_VERSIONS, RLHFJob
from helpers.manifests import FIELDS, GOOD, RULES, changed


def errors(manifest):
    with pytest.raises(ManifestError) as caught:
        parse_manifest(yaml.safe_dump(manifest))
    return caught.value.errors


@pytest.mark.parametrize(("changes", "sentence"), FIELDS + RULES, ids=[s[:60] for _, s in FIELDS + RULES])
def test_bad_manifest(changes, sentence):
    found = errors(changed(**changes))
    assert any(sentence in error for error in found), found
    for error in found:
        assert error.endswith((".", "?")), "a whole sentence"
        assert "pydantic" not in error
        assert "Input should" not in error


@pytest.mark.parametrize("index", range(len(RULES)))
def test_a_broken_rule_brings_no_more_than_two_sentences(index):
    assert len(errors(changed(**RULES[index][0]))) <= 2


def test_the_base_manifest_is_good():
    assert parse_manifest(yaml.safe_dump(GOOD)).spec.ppo.global_batch_size == 64


def test_every_problem_is_told_at_once():
    found = errors(changed(**{"ppo.clip": 0, "seed": -1, "sft.epochs": 0}))
    assert [error.split()[0] for error in found] == ["spec.seed", "spec.sft.epochs", "spec.ppo.clip"]


# Nine levels of nine aliases each.
BILLIONS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "the manifest, line 1, column 5: not valid YAML"),
        ("spec:\n  seed: 1\n  seed: 2\n", "the manifest, line 3, column 3: not valid YAML: `seed` is given twice"),
        ("a: 1\n---\nb: 2\n", "the manifest holds 2 documents; give exactly one RLHFJob."),
        ("\n# nothing\n", "the manifest is empty; give exactly one RLHFJob."),
        ("- a: 1\n", "The manifest must be a mapping that starts with `apiVersion: dovetail.dev/v1beta1`."),
        ("kind: RLHFJob\n", "apiVersion must be dovetail.dev/v1beta1 or dovetail.dev/v1alpha1; it is missing."),
        (
            "apiVersion: dovetail.dev/v1\nkind: X\n",
            'apiVersion must be dovetail.dev/v1beta1 or dovetail.dev/v1alpha1; it is "dovetail.dev/v1".',
        ),
        ("apiVersion: dovetail.dev/v1beta1\nkind: Job\n", 'kind must be RLHFJob; it is "Job".'),
        ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("a: &a [*a, \x07]\n", "not valid YAML"),
        ("a: &a {b: [*a]}\n", "line 1, column 12: not valid YAML: an alias must not stand for what it is part of."),
        (BILLIONS, "not valid YAML: more than 20000 values, counting what aliases stand for; use fewer."),
        ("a: [" + "1," * 30_000 + "]\n", "not valid YAML: more than 20000 values"),
        ("x" * 30 + ".yaml", "cannot read the manifest: no such file or directory."),
    ],
)
def test_text_that_is_no_manifest(text, sentence):
    with pytest.raises(ManifestError) as caught:
        load_manifest(text)
    assert sentence in str(caught.value)


def test_both_versions_of_the_api_have_the_same_fields():
    newer, older = (parse_manifest(yaml.safe_dump(GOOD | {"apiVersion": version})) for version in API_VERSIONS)
    assert newer.spec == older.spec
    stored = [[each["storage"] for each in made()["spec"]["versions"]] for made in (crd, class_crd)]
    assert stored == [[True, False], [True, False]]


def test_a_manifest_that_is_not_text(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="is not UTF-8 text"):
        load_manifest(path)


def test_yaml_words_and_numbers_mean_what_they_look_like():
    text = yaml.safe_dump(GOOD) + "  plan: {interStageFusion: Off}\n  sft: {optimizer: {learningRate: 1e-5}}\n"
    spec = parse_manifest(text).spec
    assert spec.plan.inter_stage_fusion == "Off"
    assert spec.sft.optimizer.learning_rate == 1e-5


def test_a_merge_key_is_no_repetition():
    text = yaml.safe_dump(GOOD)
    text += "  sft: &s {epochs: 2, optimizer: {learningRate: 0.1}}\n  reward: {<<: *s, epochs: 3}\n"
    spec = parse_manifest(text).spec
    assert (spec.reward.epochs, spec.reward.optimizer.learning_rate) == (3, 0.1)


def test_aliases_within_reason_are_fine():
    text = yaml.safe_dump(GOOD) + "  sft: &s {epochs: 2}\n  reward: *s\n"
    assert parse_manifest(text).spec.reward.epochs == 2


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("ppo.learningRate", 1, "did you mean spec.ppo.actorOptimizer.learningRate or spec.ppo.criticOptimizer."),
        ("sft.lr", 1, "did you mean spec.sft.optimizer.learningRate?"),
        ("ppo.kl_coef", 1, "did you mean spec.ppo.kl.coef?"),
        ("ppo.num_generations", 1, "did you mean samplesPerPrompt?"),
        ("ppo.steps", 1, "did you mean iterations?"),
        ("groups.0.gpu", {"count": 4}, "spec.groups[0].gpu.count is not a field; did you mean perPod?"),
        ("generation.max_new_tokens", 1, "did you mean maxTokens?"),
        ("model", "x", "did you mean spec.models.actor.source?"),
    ],
)
def test_an_unknown_field_names_the_one_that_is_meant(field, value, said):
    document = copy.deepcopy(GOOD)
    *parents, last = field.split(".")
    here = document["spec"]
    for step in parents:
        here = here[int(step)] if step.isdecimal() else here.setdefault(step, {})
    here[last] = value
    with pytest.raises(ManifestError) as refused:
        parse(document)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "path"),
    [  # as TRL, verl and OpenRLHF spell them
        ("per_device_train_batch_size", "spec.sft.microBatchSize"),
        ("max_completion_length", "spec.generation.maxTokens"),
        ("num_train_epochs", "spec.sft.epochs"),
        ("init_kl_coef", "spec.ppo.kl.coef"),
        ("cliprange", "spec.ppo.clip"),
        ("save_steps", "spec.checkpoint.everySteps"),
        ("train_batch_size", "spec.ppo.globalBatchSize"),
        ("ppo_mini_batch_size", "spec.ppo.miniBatchSize"),
        ("max_response_length", "spec.generation.maxTokens"),
        ("total_epochs", "spec.sft.epochs"),
        ("rollout_batch_size", "spec.ppo.globalBatchSize"),
        ("lora_rank", "spec.models.actor.lora.rank"),
    ],
)
def test_other_tools_names_lead_to_their_fields(name, path):
    assert path in named(RLHFJob, name)


def test_batch_size_means_the_global_one_where_no_field_has_this_name():
    assert named(PPO, "batch_size") == ["globalBatchSize"]


def test_a_function_may_be_written_as_its_file():
    document = copy.deepcopy(GOOD)
    spec = document["spec"]
    spec["models"]["reward"] = {"functions": [{"function": "code/a/mine.py:one"}, {"function": "code/a/mine.py:two"}]}
    spec["evaluation"] = {"metrics": ["reward", "code/a/other.py:measure"]}
    spec["ppo"] = spec.get("ppo", {}) | {"loss": "losses.py:clipped", "advantageFunction": "losses.py:mine"}
    found = parse(document).spec
    assert [call.function for call in found.models.reward.calls] == ["mine:one", "mine:two"]
    assert found.models.reward.import_path == "code/a"
    assert found.evaluation.metrics == ["reward", "other:measure"]
    assert (found.ppo.loss, found.ppo.advantage_function) == ("losses:clipped", "losses:mine")
    assert found.ppo.import_path is None, "the manifest's own folder"
    del spec["models"]["reward"]
    assert parse(document).spec.models.reward.import_path == "code/a", "the metrics' folder"
    for wrong in ({"models": {"reward": ["a.py:f"]}}, {"ppo": ["a.py:f"]}, {"evaluation": {"metrics": "a.py:f"}}):
        with pytest.raises(ManifestError):
            parse({**document, "spec": spec | wrong})
    spec["models"]["reward"] = {"functions": [{"function": "code/a/mine.py:one"}], "importPath": "elsewhere"}
    with pytest.raises(ManifestError, match=r"functions\[0\].function must be a Python function as module:callable"):
        parse(document)


def test_epochs_beside_steps_have_no_effect():
    document = copy.deepcopy(GOOD)
    document["spec"]["sft"] = document["spec"].get("sft", {}) | {"steps": 10, "epochs": 3}
    (said,) = [line for line in warnings(parse(document).spec) if "epochs" in line]
    assert said.startswith("spec.sft.epochs has no effect beside spec.sft.steps")
