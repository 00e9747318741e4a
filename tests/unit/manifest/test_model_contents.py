"""A model's folder that cannot be loaded is refused with one sentence before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.coordinator.data.downloads.model_folders import check_weights
from dovetail.coordinator.data.prepare import model_sources, prepare
from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.launch.local.launcher import Launcher
from dovetail.manifest.checks.files import check_files
from dovetail.manifest.checks.model_contents import tokenizer_problem
from dovetail.manifest.checks.validation import load_manifest
from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.model_families.support import target_problem
from dovetail.manifest.types import HubAccess
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.errors import RunError
from helpers.family_models import COMMON, FAMILIES
from helpers.model_folder import CONFIG, llama_shapes, save_model_folder, write_weights

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 4\n"
SHAPES = llama_shapes(CONFIG)
Change = Callable[[Path], Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model_folder(tmp_path / "model")


@pytest.fixture
def manifest(tmp_path: Path, model: Path) -> Path:
    done = CliRunner().invoke(cli, ["init", "sft", str(tmp_path / "job"), "--model", str(model)])
    assert done.exit_code == 0, done.output
    return tmp_path / "job" / "job.yaml"


def weights(change: Callable[[bytes], bytes]) -> Change:
    def made(model: Path) -> None:
        file = model / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return made


def sharded(index: Any) -> Change:
    def made(model: Path) -> None:
        (model / "model.safetensors").rename(model / "a.safetensors")
        (model / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))

    return made


def adapter(model: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (model / file).unlink()
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    (model / "adapter_model.safetensors").write_bytes(b"")


def no_tokenizer(model: Path) -> None:
    for file in (*model.glob("tokenizer*"), *model.glob("*.jinja")):
        file.unlink()


NO_START = [
    (weights(lambda data: b""), "model.safetensors is empty; copy it again"),
    (weights(lambda data: data[:5]), "model.safetensors is cut off in its header, after 5 bytes"),
    (weights(lambda data: data[:99]), "model.safetensors is cut off in its header, after 99 bytes"),
    (weights(lambda data: data[:-1]), "but its header names"),
    (weights(lambda data: data + b"x"), "but its header names"),
    (weights(lambda data: b"\xff" * 99), "model.safetensors is no safetensors file; copy it again"),
    (weights(lambda data: data[:8] + b"x" + data[9:]), "its header cannot be read; copy it again"),
    (
        weights(lambda data: POINTER),
        "model.safetensors is a pointer of Git LFS and not the weights; run",
    ),
    (sharded({"weight_map": dict.fromkeys(SHAPES, "b.safetensors")}), "b.safetensors is missing, which model.saf"),
    (sharded({"weight_map": {"norm.weight": "a.safetensors"}}), "a.safetensors lacks norm.weight, which model.saf"),
    (sharded({}), "model.safetensors.index.json cannot be read: it holds no weight_map"),
    (sharded("{"), "model.safetensors.index.json cannot be read: it holds no weight_map"),
    (adapter, "holds an adapter of Qwen/Qwen3-0.6B and no model; merge it into its base model (merge_and_unload"),
    (no_tokenizer, "holds no tokenizer: tokenizer.json is missing"),
    (lambda m: (m / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read: not valid JSON"),
    (lambda m: (m / "tokenizer.json").write_text("[]"), "tokenizer.json cannot be read: not a JSON object"),
    (lambda m: (m / "tokenizer.json").write_text(""), "tokenizer.json is empty"),
    (lambda m: (m / "tokenizer.json").write_bytes(POINTER), "tokenizer.json is a pointer of Git LFS"),
    (lambda m: (m / "tokenizer_config.json").write_text("{"), "tokenizer_config.json cannot be read: not valid JSON"),
]


@pytest.mark.parametrize(("change", "sentence"), NO_START)
def test_validate_and_run_refuse_it(model: Path, manifest: Path, change: Change, sentence: str) -> None:
    assert CliRunner().invoke(cli, ["validate", str(manifest)]).exit_code == 0
    change(model)
    for command in (["validate"], ["validate", "--deep"], ["run", "--run-dir", str(model.parent / "run")]):
        done = CliRunner().invoke(cli, [*command, str(manifest)])
        assert done.exit_code != 0
        said = [line for line in done.output.splitlines() if sentence in line]
        assert len(said) == 1, done.output
        assert "spec.models.actor.source.path: " in said[0]
    assert not (model.parent / "run").exists()


@pytest.mark.parametrize(("change", "sentence"), NO_START)
def test_the_coordinator_refuses_it_too(model: Path, manifest: Path, change: Change, sentence: str) -> None:
    """It alone sees the folders of a cluster's volumes."""
    spec = load_manifest(manifest).spec
    change(model)
    with pytest.raises(DataError, match=re.escape(sentence)):
        prepare(spec, model.parent / "run", model.parent)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight": [64, 64]},
            "model.layers.1.mlp.up_proj.weight has shape (64, 64), but config.json asks for (128, 64)",
        ),
        ({"model.embed_tokens.weight": [301, 64]}, "model.embed_tokens.weight has shape (301, 64), but"),
        ({"lm_head.weight": [300, 32]}, "lm_head.weight has shape (300, 32), but config.json asks for (300, 64)"),
        (
            {"model.layers.1.self_attn.k_proj.weight": None},
            "the weights lack k_proj.weight of layer 1, but config.json says that there are 2 layers",
        ),
    ],
)
def test_weights_of_another_shape(
    model: Path, manifest: Path, changes: dict[str, list[int] | None], sentence: str
) -> None:
    check_weights(model, "spec.models.actor.source.path")
    shapes = {name: shape for name, shape in (SHAPES | changes).items() if shape is not None}
    write_weights(model / "model.safetensors", shapes)
    done = CliRunner().invoke(cli, ["validate", "--deep", str(manifest)])
    assert done.exit_code != 0
    assert sentence in " ".join(done.output.split())
    job = load_manifest(manifest)
    run = model.parent / "run"
    with pytest.raises(RunError) as error, Launcher(job, make_plan(job.spec), run):
        pass
    assert str(error.value).startswith("spec.models.actor.source.path: ")
    assert sentence in str(error.value)
    assert not run.exists()


def test_a_bare_body_and_further_layers_are_no_problem(model: Path) -> None:
    bare = {name.removeprefix("model."): shape for name, shape in SHAPES.items()}
    write_weights(
        model / "model.safetensors", bare | {"score.weight": [1, 64], "layers.2.mlp.up_proj.weight": [128, 64]}
    )
    check_weights(model, "field")


def test_adapters_on_layers_that_the_model_lacks(manifest: Path) -> None:
    text = manifest.read_text()
    for targets, refused in ((["q_proj", "down_proj"], False), (["q_proj", "c_attn"], True)):
        actor = f"actor:\n      lora: {{rank: 4, targetModules: {json.dumps(targets)}}}\n"
        assert "actor:\n" in text
        manifest.write_text(text.replace("actor:\n", actor))
        found = check_files(load_manifest(manifest).spec, manifest.parent)
        says = "spec.models.actor.lora.targetModules: no layer is called 'c_attn'; qwen3 models have q_proj, k_proj, "
        assert [sentence.startswith(says) for sentence in found] == [True] * refused
        spec = load_manifest(manifest).spec
        if not refused:
            model_sources(spec, manifest.parent, Hub(HubAccess()))
            continue
        with pytest.raises(DataError) as error:
            model_sources(spec, manifest.parent, Hub(HubAccess()))
        assert str(error.value).startswith(says)


@pytest.mark.slow
def test_a_tokenizer_without_a_vocabulary_is_none(tmp_path: Path) -> None:
    """Transformers makes an empty tokenizer of one token from the name of its class alone."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    assert tokenizer_problem(tmp_path) is None
    with pytest.raises(DataError, match=r"f: the tokenizer in .* has no vocabulary; copy the tokenizer's files"):
        tokenizers.load(tmp_path, "f")


# An MLP in the first layer, and shared experts, whose names are those of the MLP and of each expert.
SHARED = {"intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields"), [*sorted(FAMILIES.items()), ("glm4_moe", {**SHARED, "num_key_value_heads": 2})]
)
def test_models_that_transformers_saves_pass(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **COMMON | fields | {"pad_token_id": 0, "eos_token_id": 1})
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path, max_shard_size="20KB")
    check_weights(tmp_path, "field")
    linear = {name.rpartition(".")[2] for name, part in made.named_modules() if isinstance(part, torch.nn.Linear)}
    named = [part.name for part in MODEL_FAMILIES[family].linears]
    # The head, and what OPT has around its layers, get no adapters.
    assert linear - {"lm_head", "embed_out", "project_in", "project_out"} == set(named)
    assert target_problem(named, 0.1, MODEL_FAMILIES[family]) is None
    wider = {**json.loads((tmp_path / "config.json").read_text()), "vocab_size": 65}
    (tmp_path / "config.json").write_text(json.dumps(wider))
    with pytest.raises(DataError, match="has shape"):
        check_weights(tmp_path, "field")
