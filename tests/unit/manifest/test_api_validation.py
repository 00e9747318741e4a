"""Warnings, files and defaults."""

import json
import re
from pathlib import Path

import pytest
import yaml

from dovetail.cli.job_arguments import read_job
from dovetail.manifest.checks.files import check_files
from dovetail.manifest.checks.rules import check
from dovetail.manifest.checks.scratch import NOT_ON_CPUS, cpu_head_error, head_size
from dovetail.manifest.checks.validation import load_manifest, parse_manifest, warnings
from dovetail.manifest.resolve import absolute_paths, resolve
from dovetail.manifest.types import API_VERSION, Dtype, RLHFJob, Stage
from helpers.model_folder import write_weights

EXAMPLES = Path(__file__).parents[3] / "examples"
DATA = {"demonstrations": [{"synthetic": {}}], "preferences": [{"synthetic": {}}], "prompts": [{"synthetic": {}}]}


def job(groups=None, models=None, **spec) -> RLHFJob:
    manifest = {
        "apiVersion": API_VERSION,
        "kind": "RLHFJob",
        "metadata": {"name": "job"},
        "spec": {
            "models": {"actor": {"source": {"scratch": {}}}, "tokenizer": {"train": {}}} | (models or {}),
            "data": DATA,
            "groups": groups or [{"name": "all", "roles": ["trainer", "rollout"]}],
        }
        | spec,
    }
    return parse_manifest(yaml.safe_dump(manifest))


A100 = {"product": "NVIDIA-A100-SXM4-80GB"}
HUB = {"actor": {"source": {"huggingFace": "a/b"}}, "tokenizer": {}}


@pytest.mark.parametrize("name", ["quickstart.yaml", "hh-rlhf.yaml"])
def test_examples_are_clean(name):
    written = parse_manifest(EXAMPLES / name)
    assert warnings(written.spec) == []
    assert check_files(written.spec, EXAMPLES) == []
    loaded = load_manifest(EXAMPLES / name)
    assert check(loaded.spec) == []
    assert RLHFJob.model_validate_json(loaded.model_dump_json(by_alias=True)) == loaded


# ------------------------------------------------------------ warnings

USED = {
    "spec.trackers[].secret": {"trackers": [{"kind": "wandb", "secret": "keys"}]},
    "spec.suspend": {"suspend": True},
    "spec.failurePolicy.startTimeoutSeconds": {"failurePolicy": {"startTimeoutSeconds": 60}},
    "spec.ttlSecondsAfterFinished": {"ttlSecondsAfterFinished": 0},
    "spec.storage": {"storage": {"folder": "first"}},
    "spec.output.pvc": {"output": {"pvc": "models/chat"}},
    "spec.checkpoint.volume": {"checkpoint": {"volume": "claim"}},
    "spec.groups[].image": {"groups": [{"name": "a", "roles": ["trainer", "rollout"], "image": "x"}]},
    "spec.groups[].podTemplate": {
        "groups": [{"name": "a", "roles": ["trainer", "rollout"], "podTemplate": {"metadata": {}}}]
    },
    "spec.coordinator.image": {"coordinator": {"image": "x"}},
    "spec.hub.cacheClaim": {"hub": {"cacheClaim": "x"}},
    "spec.models.tokenizer.pvc": {"models": {"tokenizer": {"pvc": "claim/tokenizer"}}},
    "spec.models.reward.code": {"models": {"reward": {"function": "a:b", "code": {"configMap": "x"}}}},
    "spec.models.actor.source.pvc": {"models": {"actor": {"source": {"pvc": "claim/actor"}}, "tokenizer": {}}},
    "spec.models.reference.dtype": {"models": {"reference": {"dtype": "bfloat16"}}},
    "spec.groups[].maxReplicas": {
        "groups": [{"name": "t", "roles": ["trainer"]}, {"name": "r", "roles": ["rollout"], "maxReplicas": 4}]
    },
}


@pytest.mark.parametrize("field", USED)
def test_a_field_without_effect_says_so(field):
    spec = job(**USED[field]).spec
    where = "yet" if field == "spec.models.reference.dtype" else "on a single machine"
    found = [
        sentence
        for sentence in warnings(spec)
        if re.sub(r"\[\d+\]", "[]", sentence).startswith(f"{field} is not executed {where}: ")
    ]
    assert len(found) == 1, warnings(spec)
    assert (found[0] in warnings(spec, cluster=True)) == (where == "yet")


def test_a_group_that_cannot_grow_brings_no_warning():
    groups = [{"name": "t", "roles": ["trainer"]}, {"name": "r", "roles": ["rollout"], "replicas": 2, "maxReplicas": 2}]
    assert warnings(job(groups=groups).spec) == []


def test_defaults_bring_no_warning():
    assert warnings(job().spec) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"models": {"reward": {"function": "a:b"}}}, "the reward stage is dropped"),
        ({"sft": {"optimizer": {"offload": True}}}, "spec.sft.optimizer.offload has no effect on CPUs"),
        (
            {"ppo": {"advantage": "grpo", "samplesPerPrompt": 4}, "models": {"critic": {"lora": {}}}},
            "spec.models.critic has no effect: grpo uses no critic.",
        ),
        ({"data": {**DATA, "heldOut": 0}}, "spec.data.heldOut is 0"),
        ({"stages": ["dpo"], "evaluation": {"heldOut": 8}}, "spec.evaluation has no effect: its prompts are answered"),
        (
            {"plan": {"placement": "Interleaving"}, "groups": [{"name": "a", "roles": ["trainer", "rollout"]}]},
            "Interleaving has no effect: it takes two rollouts",
        ),
        (
            {
                "plan": {"placement": "Interleaving"},
                "groups": [{"name": "a", "roles": ["trainer", "rollout"], "replicas": 2}],
                "models": {"reward": {"function": "a:b"}},
                "ppo": {"advantage": "grpo", "samplesPerPrompt": 4},
            },
            "Interleaving has no effect: scorers run no model beside the reference",
        ),
        (
            {
                "groups": [
                    {"name": "t", "roles": ["trainer"], "dtype": "bfloat16"},
                    {"name": "r", "roles": ["rollout"]},
                ]
            },
            "spec.groups[0].dtype has no effect",
        ),
    ],
)
def test_pointless_settings_say_so(changes, sentence):
    assert any(sentence in w for w in warnings(job(**changes).spec))


# ------------------------------------------------------------ resolve

VARIANTS = [
    {},
    {"models": {"reward": {"function": "a:b"}}},
    {"models": {"reward": {"functions": [{"function": "a:b"}, {"function": "a:c", "weight": -1}]}}},
    {"models": HUB, "groups": [{"name": "a", "roles": ["trainer", "rollout"], "gpu": A100, "replicas": 2}]},
    {"generation": {"topK": 5}},
    {"groups": [{"name": "t", "roles": ["trainer"]}, {"name": "r", "roles": ["rollout"], "minReplicas": 3}]},
    {"groups": [{"name": "t", "roles": ["trainer"], "gpu": A100}, {"name": "r", "roles": ["rollout"]}]},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_resolving_twice_changes_nothing_and_breaks_no_rule(changes):
    once = resolve(job(**changes).spec)
    assert resolve(once) == once
    assert check(once) == []


def test_on_cpus_everything_is_float32_and_the_rollout_is_trusted():
    spec = resolve(job().spec)
    assert spec.groups[0].dtype is Dtype.FLOAT32
    assert spec.groups[0].gpu.per_pod == 0
    assert spec.models.actor.dtype is Dtype.FLOAT32
    assert spec.ppo.old_log_probs == "Rollout"


@pytest.mark.parametrize("generation", [{"topK": 5}, {"topP": 0.9}])
def test_a_cut_distribution_is_recomputed(generation):
    assert resolve(job(generation=generation).spec).ppo.old_log_probs == "Recompute"
    assert resolve(job(generation={"temperature": 0.7}).spec).ppo.old_log_probs == "Rollout"


def test_on_gpus_dtypes_stay_open_and_log_probs_are_recomputed():
    spec = resolve(job(groups=[{"name": "a", "roles": ["trainer", "rollout"], "gpu": A100}]).spec)
    assert spec.models.actor.dtype is Dtype.AUTO
    assert spec.groups[0].dtype is Dtype.AUTO
    assert spec.ppo.old_log_probs == "Recompute"


def test_a_choice_of_the_user_is_kept():
    spec = resolve(job(ppo={"oldLogProbs": "Recompute"}, models={"critic": {"dtype": "bfloat16"}}).spec)
    assert spec.ppo.old_log_probs == "Recompute"
    assert spec.models.critic.dtype is Dtype.BFLOAT16


@pytest.mark.parametrize("reward", [{"function": "a:b"}, {"functions": [{"function": "a:b"}]}])
def test_a_reward_function_drops_the_reward_stage(reward):
    spec = resolve(job(models={"reward": reward}).spec)
    assert spec.stages == [Stage.SFT, Stage.PPO]


def test_reward_functions_are_looked_for_beside_the_manifest(tmp_path):
    found = absolute_paths(job(models={"reward": {"function": "a:b"}}), tmp_path)
    assert found.spec.models.reward.import_path == str(tmp_path)
    found = absolute_paths(job(models={"reward": {"function": "a:b", "importPath": "code"}}), tmp_path)
    assert found.spec.models.reward.import_path == str(tmp_path / "code")
    assert absolute_paths(job(), tmp_path).spec.models.reward.import_path is None


# ------------------------------------------------------------ files


def model_folder(path: Path, weights: str | None = "model.safetensors", config: str = '{"model_type": "llama"}') -> str:
    path.mkdir(parents=True)
    (path / "config.json").write_text(config)
    (path / "tokenizer.json").write_text("{}")
    if weights:
        write_weights(path / weights, {"a": [1]})
    return path.name


def files(tmp_path, **changes):
    return check_files(job(**changes).spec, tmp_path)


def actor(path: str):
    return {"actor": {"source": {"path": path}}, "tokenizer": {}}


def test_a_folder_of_reward_functions_must_be_there(tmp_path):
    missing = {"reward": {"function": "a:b", "importPath": "code"}}
    (found,) = files(tmp_path, models=missing)
    assert found.startswith(f"spec.models.reward.importPath: {tmp_path}/code is no folder")
    (tmp_path / "code").mkdir()
    (found,) = files(tmp_path, models=missing)
    assert found.startswith(f"spec.models.reward.function: there is no module 'a' in {tmp_path}/code or on PYTHONPATH")
    (tmp_path / "code/a.py").write_text("raise RuntimeError('this is not imported')")
    assert files(tmp_path, models=missing) == []
    (tmp_path / "code/b/c").mkdir(parents=True)
    (tmp_path / "code/b/c/__init__.py").touch()
    functions = [{"function": "b.c:x"}, {"function": "json:dumps"}, {"function": "nowhere.a:x", "name": "y"}]
    several = {"reward": {"functions": functions, "importPath": "code"}}
    (found,) = files(tmp_path, models=several)
    assert found.startswith("spec.models.reward.functions[2].function: there is no module 'nowhere.a' in ")


def test_the_modules_of_functions_are_looked_for_where_the_job_runs(tmp_path):
    """The run said so only after its processes had started."""
    named = job(
        models={"reward": {"function": "nowhere:a"}},
        evaluation={"metrics": ["reward", "there:b"]},
        ppo={"advantageFunction": "nothing:c"},
    ).spec
    (tmp_path / "there.py").touch()
    assert check_files(named, tmp_path) == [], "a pod's image may have it"
    reward, advantage = check_files(named, tmp_path, here=True)
    assert reward.startswith(
        f"spec.models.reward.function: there is no module 'nowhere' in {tmp_path} or on PYTHONPATH"
    )
    assert advantage.startswith("spec.ppo.advantageFunction: there is no module 'nothing' in ")
    assert "name the module's folder in spec.ppo.importPath." in advantage


def test_a_good_model_folder(tmp_path):
    assert files(tmp_path, models=actor(model_folder(tmp_path / "m"))) == []


def test_sharded_weights_must_be_complete(tmp_path):
    name = model_folder(tmp_path / "m", "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (
        "model-00002-of-00002.safetensors is missing, which model.safetensors.index.json names"
        in files(tmp_path, models=actor(name))[0]
    )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: None, "does not exist; give a folder in Hugging Face format."),
        (lambda p: p.write_text("x"), "is not a folder"),
        (lambda p: p.mkdir(), "config.json is missing"),
        (lambda p: model_folder(p, None), "holds no weights"),
        (lambda p: model_folder(p, "pytorch_model.bin"), "holds only pickled weights"),
        (lambda p: model_folder(p, config="{"), "cannot be read: not valid JSON"),
        (lambda p: model_folder(p, config="{}"), "names no model_type"),
        (lambda p: model_folder(p, config='{"model_type": "gemma3", "text_config": {}}'), "it reads more than text"),
        (lambda p: model_folder(p, config='{"model_type": "t5", "is_encoder_decoder": true}'), "it has an encoder"),
    ],
)
def test_bad_model_folders(tmp_path, make, sentence):
    make(tmp_path / "m")
    found = files(tmp_path, models=actor("m"))
    assert any(sentence in s for s in found), found
    assert all(s.startswith("spec.models.actor.source.path: ") for s in found)


@pytest.mark.parametrize("kind", ["llama", "glm4_moe"])  # the second weighs its experts by a sigmoid
def test_routing_replay_and_load_balancing_of_a_model_without_softmax_routers(tmp_path, kind):
    source = {"source": {"scratch": {"architecture": kind, "config": {"head_dim": 32}}}}
    for more, field in (
        ({"ppo": {"routingReplay": True}}, "ppo.routingReplay"),
        ({}, "models.actor.routerAuxLossCoef"),
    ):
        coefficient = {} if more else {"routerAuxLossCoef": 0.01}
        found = files(tmp_path, models={"actor": {**source, **coefficient}, "tokenizer": {"train": {}}}, **more)
        assert found == [
            f"spec.{field} is for models with routers like Qwen3-MoE's in all layers, and {kind} models have none; "
            "remove it."
        ]
    models = {"actor": {"source": {"scratch": {"architecture": "gpt_oss"}}}, "tokenizer": {"train": {}}}
    assert files(tmp_path, models=models, ppo={"routingReplay": True}) == []


def test_fields_that_only_vllm_reads(tmp_path):
    """Published models have them. A model from scratch, or one that transformers saved, may not."""
    name = model_folder(
        tmp_path / "m", config='{"model_type": "glm4_moe", "hidden_size": 64, "num_attention_heads": 2}'
    )
    scratch = {"source": {"scratch": {"architecture": "minimax_m2"}}}
    (found,) = files(tmp_path, models=actor(name))
    assert found == (
        "spec.models.actor.source.path: vLLM needs head_dim in the config.json of glm4_moe models; set what the "
        "published models have."
    )
    assert files(tmp_path, models=actor(name), stages=["sft"]) == []
    (found,) = files(tmp_path, models={"actor": scratch, "tokenizer": {"train": {}}})
    assert found.startswith("spec.models.actor.source.scratch.config: vLLM needs rotary_dim and scoring_func in")
    scratch["source"]["scratch"]["config"] = {"rotary_dim": 64, "scoring_func": "sigmoid"}
    assert files(tmp_path, models={"actor": scratch, "tokenizer": {"train": {}}}) == []


@pytest.mark.parametrize(
    ("given", "factor", "refused"),
    [
        (["--model-impl", "transformers"], 8.0, True),
        (["--model_impl=transformers"], 8.0, True),
        (["--model-impl", "transformers"], 1.0, False),
        (["--model-impl", "vllm"], 8.0, False),
        ([], 8.0, False),
    ],
)
def test_transformers_code_serves_the_model_that_is_trained(tmp_path, given, factor, refused):
    source = {"source": {"scratch": {"architecture": "granite", "config": {"logits_scaling": factor}}}}
    groups = [{"name": "t", "roles": ["trainer"]}, {"name": "r", "roles": ["rollout"], "vllmArgs": given}]
    found = files(tmp_path, models={"actor": source, "tokenizer": {"train": {}}}, groups=groups)
    told = (
        "spec.groups[1].vllmArgs: vLLM's Transformers backend leaves out logits_scaling, by which this model's logits "
        "are divided; remove --model-impl from vllmArgs."
    )
    assert found == ([told] if refused else [])


def test_heads_have_the_size_that_their_family_gives_them():
    """vLLM on CPUs takes heads of 256 dimensions, not of 16."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    assert head_size({"model_type": "gemma2", **sizes}) == 256
    assert head_size({"model_type": "gemma2", **sizes, "head_dim": 32}) == 32
    assert cpu_head_error({"model_type": "gemma2", **sizes}) is None
    assert cpu_head_error({"model_type": "llama", **sizes}) is not None
    for kind in ("deepseek_v3", "qwen3_5_text"):
        assert cpu_head_error({"model_type": kind, **sizes}) == NOT_ON_CPUS


def test_heads_of_a_folders_model_are_looked_at_before_the_run(tmp_path):
    """SFT was trained first, and then the rollout said that it cannot run."""
    name = model_folder(tmp_path / "m", config='{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}')
    (found,) = files(tmp_path, models=actor(name))
    assert found.startswith("spec.models.actor.source.path: the actor's attention heads have 16 dimensions")
    assert files(tmp_path, models=actor(name), stages=["sft"]) == []
    on_gpu = [{"name": "all", "roles": ["trainer", "rollout"], "gpu": A100}]
    assert files(tmp_path, groups=on_gpu, models=actor(name)) == []


@pytest.mark.parametrize("scratch", [True, False])
def test_layers_that_ranks_cannot_share(tmp_path, scratch):
    model_folder(tmp_path / "m", config='{"model_type": "qwen3_moe"}')
    source = {"scratch": {"architecture": "qwen3_moe"}} if scratch else {"path": "m"}
    pins = {"plan": {"parallelism": {"actor": {"tp": 2}}}}
    groups = [{"name": "t", "roles": ["trainer"], "replicas": 2}, {"name": "r", "roles": ["rollout"]}]
    models = {"actor": {"source": source}, "tokenizer": {"train": {}} if scratch else {}}
    (found,) = files(tmp_path, models=models, groups=groups, **pins)
    assert found.startswith("spec.plan.parallelism.actor.tp: 2 ranks cannot share layers of qwen3_moe models")


@pytest.mark.parametrize(
    ("make", "path", "sentence"),
    [
        (lambda d: None, "no.jsonl", "does not exist; correct the path"),
        (lambda d: (d / "a.jsonl").touch(), "a.jsonl", "a.jsonl is empty"),
        (lambda d: (d / "a.txt").write_text("x"), "a.txt", "a.txt must end in .jsonl, .json, .csv or .tsv"),
        (lambda d: (d / "a.json").touch(), "a.json", "a.json is empty"),
        (lambda d: (d / "d").mkdir(), "d", "holds no data file"),
        (lambda d: ((d / "d").mkdir(), (d / "d" / "a.jsonl").touch()), "d", "a.jsonl is empty"),
    ],
)
def test_bad_data_paths(tmp_path, make, path, sentence):
    make(tmp_path)
    found = files(tmp_path, data={**DATA, "prompts": [{"path": path}]})
    assert len(found) == 1
    assert found[0].startswith("spec.data.prompts[0].path: ")
    assert sentence in found[0]


def test_data_that_no_stage_uses_is_not_looked_at(tmp_path):
    changes = {"stages": ["sft"], "data": {**DATA, "prompts": [{"path": "no.jsonl"}]}}
    assert files(tmp_path, **changes) == []


def test_tokenizer_paths(tmp_path):
    def found(path):
        return files(tmp_path, models={"tokenizer": {"path": path}})

    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert found("owner/name") == []
    assert "tokenizer.json is missing" in found("empty")[0]
    assert "is a file" in found("file")[0]
    assert "does not exist" in found("./none")[0]


def test_paths_become_absolute(tmp_path):
    (tmp_path / "tok").mkdir()
    before = job(
        models={"actor": {"source": {"path": "m"}}, "tokenizer": {"path": "tok"}},
        data={**DATA, "prompts": [{"path": "p.jsonl"}]},
    )
    spec = absolute_paths(before, tmp_path).spec
    assert spec.models.actor.source.path == str(tmp_path / "m")
    assert spec.data.prompts[0].path == str(tmp_path / "p.jsonl")
    assert spec.models.tokenizer.path == str(tmp_path / "tok")
    hub = before.model_copy(update={"spec": job(models={"tokenizer": {"path": "owner/name"}}).spec})
    assert absolute_paths(hub, tmp_path).spec.models.tokenizer.path == "owner/name"


def test_loading_makes_paths_start_at_the_manifest(tmp_path):
    (tmp_path / "jobs").mkdir()
    path = tmp_path / "jobs" / "job.yaml"
    written = job(models=actor("m"))
    path.write_text(written.model_dump_json(by_alias=True, exclude_none=True))
    assert load_manifest(path).spec.models.actor.source.path == str(tmp_path / "jobs" / "m")
    assert load_manifest(path, tmp_path).spec.models.actor.source.path == str(tmp_path / "m")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """A shell would replace it, so people write it. It was taken for a folder of this name, and spec.output.path made
    one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model_folder(tmp_path / "models" / "m")
    (tmp_path / "models" / "m" / "tokenizer.json").write_text("{}")
    (tmp_path / "p.jsonl").write_text('{"prompt": "p"}\n')
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").touch()
    models = {
        "actor": {"source": {"path": "~/models/m"}},
        "tokenizer": {"path": "~/models/m"},
        "reward": {"function": "a:b", "importPath": "~/code"},
    }
    data = DATA | {"prompts": [{"path": "~/p.jsonl"}, {"path": "./~/q.jsonl"}]}
    written = job(models=models, data=data, output={"path": "~/out"}).model_dump(mode="json", by_alias=True)
    file = tmp_path / "elsewhere" / "job.yaml"
    file.parent.mkdir()
    file.write_text(json.dumps(written))
    (file.parent / "~").mkdir()
    (file.parent / "~" / "q.jsonl").write_text('{"prompt": "q"}\n')
    for spec in (load_manifest(file).spec, read_job(file, [])[1].spec):
        assert spec.models.actor.source.path == spec.models.tokenizer.path == str(tmp_path / "models/m")
        assert spec.models.reward.import_path == str(tmp_path / "code")
        assert spec.output.path == str(tmp_path / "out")
        assert [s.path for s in spec.data.prompts] == [str(tmp_path / "p.jsonl"), f"{file.parent}/~/q.jsonl"]


def test_environment_variables_are_named(tmp_path):
    (found,) = files(tmp_path, models=actor("$HOME/m"))
    assert found.endswith("write the path itself, because no environment variables are replaced in a manifest.")
    (found,) = files(tmp_path, data=DATA | {"prompts": [{"path": "${DATA}/p.jsonl"}]})
    assert found.endswith("write the path itself, because no environment variables are replaced in a manifest.")
