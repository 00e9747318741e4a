"""`dovetail model check` and the table of families: it holds what is derived, and what is wrong is found."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dovetail.cli.main import cli
from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.manifest.checks.scratch import architecture_layers
from dovetail.manifest.model_families import MODEL_FAMILIES, REFUSED
from dovetail.manifest.model_families.support import target_problem
from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import ScratchModel
from dovetail.models import HuggingFaceWriter, build_stage, tensor_parallel
from dovetail.models.derive import derive_family, differences, known, resized, usual_config, whole_model
from dovetail.models.layers.token_ranks import TokenRanks
from dovetail.protocol.messages import ModelRef
from dovetail.tools import model_check
from dovetail.tools.model_check import prove, prove_model, served, share, small_copy
from helpers.family_models import COMMON, FAMILIES

pytestmark = pytest.mark.slow
# Factors of embedding and logits, norms of all heads together, windows and no rotary positions in some layers.
# Rotary positions of each layer's own. An activation that learns. Layers without experts, shared experts, and biases
# that only choose. Latent keys and values. Linear attention. Then bodies that transformers computes: learnt positions,
# layers of Mamba, masks of chunks, and heads of two widths.
SOME: tuple[str, ...] = ("gpt2", "nemotron_h", "llama4_text", "gemma4_text")
SOME += ("granite", "granite_swa", "apertus", "olmo2", "cohere2", "smollm3", "glm4_moe", "deepseek_v3", "qwen3_5_text")


def config_of(kind: str, **changes: Any) -> Any:
    return usual_config(kind, **changes)


def problems(kind: str, folder: Path, **facts: Any) -> str:
    """What the check finds wrong in a family whose facts are changed."""
    found = prove(config_of(kind), folder, replace(MODEL_FAMILIES[kind], **facts), ranks=False)
    return "; ".join(finding.says for finding in found if finding.state == "problem")


def test_a_family_tried_for_a_while_leaves_the_table_as_it_was() -> None:
    """Its order too: pages and messages list the families in it."""
    before = list(MODEL_FAMILIES.items())
    for name in ("llama", "made_up"):
        with known(replace(MODEL_FAMILIES["llama"], name=name, packs=False)):
            assert not MODEL_FAMILIES[name].packs
    assert list(MODEL_FAMILIES.items()) == before


@pytest.mark.parametrize("kind", sorted(MODEL_FAMILIES))
def test_the_table_holds_what_transformers_says(kind: str) -> None:
    family = MODEL_FAMILIES[kind]
    found = derive_family(kind, family.forward)
    measured = tuple(replace(one, kept=two.kept) for one, two in zip(found.kinds, family.kinds, strict=True))
    found = replace(found, kinds=measured)
    if not family.splits:  # two ranks may have refused to share what the plan shares
        family, found = (
            replace(each, linears=tuple(replace(part, split=None) for part in each.linears)) for each in (family, found)
        )
    assert set(differences(family, found)) <= {"kept", "kept_dense", "kept_linear", "packs"}  # measured and proved


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in SOME else pytest.mark.nightly) for k in sorted(MODEL_FAMILIES)]
)
def test_a_family_of_the_table_passes(kind: str, tmp_path: Path) -> None:
    """Nightly with two ranks that share layers or tokens, which start slowly."""
    found = prove(config_of(kind), tmp_path, ranks=kind not in SOME)
    assert [f.says for f in found if f.state in ("problem", "warning")] == []
    checks = {f.check for f in found}
    assert checks >= {"attention", "stages", "packing", "gradients", "value head", "export", "memory", "vLLM"}


@pytest.mark.parametrize(
    ("kind", "facts", "finding"),
    [
        ("granite", {"logit_factor": None}, "installed transformers gives granite models other parts .logit_factor"),
        ("gemma2", {"exits": ()}, "other parts .exits"),
        ("llama", {"norms": 3}, "other parts .norms"),
    ],
)
def test_facts_that_transformers_does_not_bear_out_are_found(
    kind: str, facts: dict[str, Any], finding: str, tmp_path: Path
) -> None:
    assert re.search(finding, problems(kind, tmp_path, **facts))


def test_layers_that_hand_no_packing_on_are_trained_as_rows_or_refused(tmp_path: Path) -> None:
    config = config_of("stablelm")
    found = [f for f in prove(config, tmp_path, derive_family(config.model_type), ranks=False) if f.state == "problem"]
    assert "packed sequences change each other" in found[0].says
    assert "stablelm" in REFUSED or not MODEL_FAMILIES["stablelm"].packs


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("gemma3_text", {"num_attention_heads": 4, "num_key_value_heads": 1}, "num_key_value_heads, 1"),  # 270M, 1B
        ("llama", {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}, "num_attention_heads, 9"),
        ("cohere", {"use_qk_norm": True}, "cohere models with use_qk_norm"),  # Command R+
    ],
)
def test_models_whose_layers_two_ranks_cannot_share_train_on_one(
    kind: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    fields = COMMON | FAMILIES.get(kind, {"intermediate_size": 48}) | changes
    found = {f.check: f for f in prove(config_of(kind, **fields), tmp_path)}
    assert [f.says for f in found.values() if f.state in ("problem", "warning")] == []
    assert found["tensor parallelism"].state == "skipped"
    assert why in found["tensor parallelism"].says
    assert found["context parallelism"].state == "ok"


def _rank_of_other_heads(*arguments: Any) -> None:
    exchanged = TokenRanks.to_heads
    TokenRanks.to_heads = lambda ranks, values, total: exchanged(ranks, values.flip(1), total)  # type: ignore[method-assign]
    model_check._rank(*arguments)


def test_ranks_that_give_tokens_the_attention_of_other_heads_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_check, "_rank", _rank_of_other_heads)
    found = {f.check: f for f in prove(config_of("llama", **COMMON, **FAMILIES["llama"]), tmp_path)}
    assert found["tensor parallelism"].state == "ok"
    assert found["context parallelism"].state == "warning"
    assert "off by" in found["context parallelism"].says
    assert found["context parallelism"].mend == "keep cp 1"


def test_layers_of_whole_sequences_keep_their_tokens(tmp_path: Path) -> None:
    found = {f.check: f for f in prove(config_of("mamba2"), tmp_path)}
    assert "layers of mamba2 models need whole sequences; set cp to 1" in found["context parallelism"].says


@pytest.mark.parametrize(
    ("answer", "state", "says"),
    [("off by 1e+00 of 3e+00", "warning", "off by 1e"), (RuntimeError("\n\nno memory\n"), "skipped", "no memory")],
)
def test_two_ranks_that_fail_refuse_no_model(
    answer: Any, state: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a machine that cannot start them."""

    def share(copies: dict[Path, Any], degree: str) -> dict[Path, str]:
        if isinstance(answer, Exception):
            raise answer
        return dict.fromkeys(copies, answer)

    monkeypatch.setattr("dovetail.tools.model_check.share", share)
    found = prove(config_of("llama", **COMMON, **FAMILIES["llama"]), tmp_path)
    assert found[-1].check == "vLLM"
    twos = [f for f in found if f.check in ("tensor parallelism", "context parallelism")]
    assert [two.state for two in twos] == [state] * 2
    assert all(says in two.says for two in twos)


def _lonely_rank(rank: int, *others: Any) -> None:
    """Rank 1 fails by itself and ends, and rank 0 waits for it."""
    if rank == 1:
        tensor_parallel.split_stage = lambda *_: [][0]
        TokenRanks.own = lambda *_: [][0]  # type: ignore[method-assign]
    model_check._rank(rank, *others)


def test_a_rank_that_loses_its_peer_says_nothing_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = model_check.share

    def lonely(copies: dict[Path, Any], degree: model_check.Degree) -> dict[Path, str | None]:
        with monkeypatch.context() as patch:
            patch.setattr(model_check, "_rank", _lonely_rank)
            return share(copies, degree)

    monkeypatch.setattr(model_check, "share", lonely)
    found = {f.check: f for f in prove(config_of("llama", **COMMON, **FAMILIES["llama"]), tmp_path)}
    for two in (found["tensor parallelism"], found["context parallelism"]):
        assert two.state == "skipped"
        assert "two ranks cannot run here: " in two.says


def test_a_gradient_that_ranks_must_add_up_and_do_not_is_found(tmp_path: Path) -> None:
    """Each rank has the norms of all heads, and the gradient of its own heads."""
    config = config_of("qwen3", **COMMON, **FAMILIES["qwen3"])
    prove(config, tmp_path, ranks=False)
    copy, family = tmp_path / "copy", MODEL_FAMILIES["qwen3"]
    assert "off by" in str(share({copy: replace(family, head_norms={})}, "tp")[copy])


def test_a_default_of_another_transformers_matters_only_where_the_model_leaves_it_out(tmp_path: Path) -> None:
    """The planner takes the table's default."""
    family = MODEL_FAMILIES["llama"]
    other = replace(family, defaults={**family.defaults, "hidden_size": 96}, tied=True)
    config = config_of("llama", **COMMON, **FAMILIES["llama"])

    def refusals(*stated: str) -> list[str]:
        found = prove(config, tmp_path / str(len(stated)), other, ranks=False, stated=stated)
        return [f.says for f in found if f.state == "problem"]

    assert "hidden_size, tie_word_embeddings" in refusals()[0]
    assert "(tie_word_embeddings)" in refusals("hidden_size")[0]
    assert refusals("hidden_size", "tie_word_embeddings") == []


@pytest.mark.parametrize("change", [{"num_hidden_layers": "two"}, {"num_attention_heads": 0}])
def test_a_configuration_that_transformers_cannot_read_is_a_finding(change: dict[str, Any], tmp_path: Path) -> None:
    config_of("llama", **COMMON, **FAMILIES["llama"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = prove_model(ModelRef(head="lm", path=str(tmp_path)), tmp_path / "scratch")
    assert [f.state for f in found] == ["problem"]
    assert found[0].says


def test_a_vllm_that_cannot_be_imported_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise OSError('libcuda.so.1 is missing')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    found = served(MODEL_FAMILIES["llama"])
    assert found.state == "skipped"
    assert found.says == "vLLM cannot be imported here: libcuda.so.1 is missing"


def test_vllm_wraps_what_it_does_not_know_by_name() -> None:
    pytest.importorskip("vllm")
    assert "Transformers backend" in served(MODEL_FAMILIES["solar_open"]).says
    assert "of its own" in served(MODEL_FAMILIES["llama"]).says
    unknown = served(replace(MODEL_FAMILIES["llama"], classes="Made"))
    assert unknown.says == "vLLM does not serve MadeForCausalLM"


@pytest.mark.parametrize("name", ["models/my-typo", "./typo", "../typo", "a/b/c", "/no/such"])
def test_a_folder_that_does_not_exist_is_named_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    monkeypatch.setattr(Hub, "describe", lambda *_: pytest.fail("the hub was asked"))
    done = CliRunner().invoke(cli, ["model", "check", name])
    assert done.exit_code == 2, done.output
    assert f"{name} does not exist" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("glm4_moe", {}),
        ("glm4_moe", {"first_k_dense_replace": 3}),
        ("afmoe", {"num_dense_layers": 2}),
        ("exaone_moe", {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"] * 2}),
        ("hy_v3", {}),
    ],
)
def test_a_config_json_says_which_layers_have_experts(kind: str, fields: dict[str, Any]) -> None:
    """The planner reads it without transformers, also where config.json leaves the fields out."""
    config = resized(config_of(kind), 8, **fields)
    if "mlp_layer_types" in fields:
        config = type(config).from_dict(config.to_dict() | fields)
    layers = whole_model(config).model.layers
    dense = {i for i, layer in enumerate(layers) if not any(hasattr(m, "has_gate") for m in layer.modules())}
    assert MODEL_FAMILIES[kind].dense_layers({"num_hidden_layers": 8, **fields}) == dense
    assert 0 < len(dense) < 8


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(kind for kind, family in MODEL_FAMILIES.items() if family.kinds))
def test_the_planner_counts_published_sizes_by_fields(kind: str) -> None:
    """The sums of products were found at other sizes."""
    config = config_of(kind)
    actual = sum(p.numel() for p in whole_model(config).parameters())
    assert ModelShape.of(config.to_dict()).parameters() == pytest.approx(actual, rel=0.01)


HYBRID = "granitemoehybrid+mamba"


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({}, HYBRID),  # 4.0 H Tiny
        ({"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 8192}, HYBRID),  # 4.0 H Micro
        ({"num_local_experts": 0, "layer_types": ["full_attention"] * 40}, "granitemoehybrid"),  # 4.0 Micro
        ({"layer_types": ["full_attention"] * 40}, HYBRID),  # experts
    ],
)
def test_a_config_json_says_of_which_family_of_its_type_it_is(
    fields: dict[str, Any], family: str, tmp_path: Path
) -> None:
    """Also with the names of Transformers 4. Of either family the planner counts the parameters."""
    config = config_of(HYBRID, **fields)
    old = {"linear_attention": "mamba", "full_attention": "attention"}
    published = {**config.to_dict(), "layer_types": [old[kind] for kind in config.layer_types]}
    shape = ModelShape.of(published)
    assert shape.family == family
    assert shape.linear == published["layer_types"].count("mamba")
    assert shape.parameters() == pytest.approx(sum(p.numel() for p in whole_model(config).parameters()), rel=0.01)
    found = {f.check: f for f in prove(config, tmp_path)}
    assert [f.says for f in found.values() if f.state in ("problem", "warning")] == []
    assert found["context parallelism"].state == ("ok" if family == "granitemoehybrid" else "skipped")


def test_deepseek_v2_lite_is_counted_and_proved(tmp_path: Path) -> None:
    """It has 15.7 billion parameters. V2 makes its queries of a latent state."""
    lite = {"hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = config_of("deepseek_v2", num_hidden_layers=27, **lite)
    shape = ModelShape.of(config.to_dict())
    assert (shape.family, shape.dense) == ("deepseek_v2", 1)
    assert shape.parameters() == pytest.approx(15.7e9, rel=0.001)
    assert ModelShape.of({**config.to_dict(), "q_lora_rank": 1536}).family == "deepseek_v2+q_lora"
    assert [f.says for f in prove(config, tmp_path, ranks=False) if f.state in ("problem", "warning")] == []


def test_fields_by_names_of_their_own_and_patterns_of_layers_are_read() -> None:
    shape = ModelShape.of({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 3})
    assert (shape.layers, shape.hidden, shape.head_dim, shape.linear) == (3, 32, 8, 0)
    assert architecture_layers(ScratchModel(architecture="gpt2", config={"n_layer": 3})) == 3
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    few = ModelShape.of(config_of("nemotron_h", layers_block_type=kinds).to_dict())
    assert (few.layers, few.linear) == (4, 3)
    assert few.kv_bytes(2) == 2 * 2 * few.kv_heads * few.head_dim
    assert "remove lora" in str(target_problem((), 0, MODEL_FAMILIES["gpt2"]))


def test_a_router_s_bias_stays_float32(tmp_path: Path) -> None:
    """In passes of bfloat16 and in files. Rounded, it would choose other experts than vLLM's."""
    small = small_copy(config_of("glm4_moe"), MODEL_FAMILIES["glm4_moe"])
    fields = {name: value for name, value in small.to_dict().items() if name != "model_type"}
    ref = ModelRef(head="lm", scratch=ScratchModel(architecture="glm4_moe", config=fields))
    stage = build_stage(ref, dtype=torch.bfloat16)
    names = [name for name, p in stage.named_parameters() if p.dtype == torch.float32]
    assert names == [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(1, small.num_hidden_layers)]
    for name in names:
        stage.get_parameter(name).data.fill_(1 + 2**-20)
    writer = HuggingFaceWriter(tmp_path)
    written = writer.write(stage.named_parameters(), torch.bfloat16, stage.family.constants)
    writer.finish([written], stage.config, "lm", torch.bfloat16, None)
    again = build_stage(ModelRef(head="lm", path=str(tmp_path)), dtype=torch.bfloat16)
    assert all(bool((again.get_parameter(name) == 1 + 2**-20).all()) for name in names)


def test_the_copy_has_all_kinds_of_layers_of_the_model() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = config_of("gemma3_text", num_hidden_layers=12, layer_types=kinds * 2, sliding_window=512)
    small = small_copy(config, MODEL_FAMILIES[config.model_type])
    assert small.layer_types == kinds
    assert small.sliding_window < 9
    assert small_copy(config_of("llama", num_hidden_layers=2), MODEL_FAMILIES["llama"]).num_hidden_layers == 2
    grouped = small_copy(config_of("llama", num_attention_heads=32, num_key_value_heads=8), MODEL_FAMILIES["llama"])
    assert grouped.num_key_value_heads < grouped.num_attention_heads


def test_the_command_proves_a_folder_and_refuses_another(tmp_path: Path) -> None:
    config = config_of("llama", **COMMON, **FAMILIES["llama"])
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "good")
    done = CliRunner().invoke(cli, ["model", "check", str(tmp_path / "good"), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    found = {f["check"]: f for f in told["findings"]}
    assert found["tensor parallelism"]["state"] == found["context parallelism"]["state"] == "ok"
    assert "cp 2, 4 fit its heads" in found["context parallelism"]["says"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "youtu"}))
    done = CliRunner().invoke(cli, ["model", "check", str(tmp_path / "other")])
    assert done.exit_code == 1
    assert "youtu" in done.stdout
    assert "exported model is not the same" in " ".join(done.stdout.split())
