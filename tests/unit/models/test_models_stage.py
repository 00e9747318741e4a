"""Pipeline stages compute what the whole Hugging Face model computes, from the same folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.types import ScratchModel
from dovetail.models import HuggingFaceWriter, ModelError, PipelineStage, build_stage, load_config
from dovetail.models.derive import told_fields, usual_config
from dovetail.models.source import in_files
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.weights import layer_range
from dovetail.trainer.compat import is_view
from dovetail.trainer.engine.split_backward import backward_input, backward_weights
from helpers.family_models import COMMON, FAMILIES, ref


def test_every_family_has_the_defaults_of_transformers() -> None:
    assert FAMILIES.keys() <= MODEL_FAMILIES.keys()
    for name, family in MODEL_FAMILIES.items():
        # Some say in a list only which layers have no experts, or full attention.
        config = {"first_k_dense_replace": 1, "full_attention_interval": 4} | told_fields(usual_config(name))
        assert {key: config[key] for key in family.defaults} == family.defaults, name
        assert hasattr(transformers, family.causal_lm)


def attention(config: Any) -> str:
    """transformers computes bounded scores and sinks without a kernel only."""
    return "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"


def hugging_face(whole: PipelineStage) -> Any:
    """transformers' own model with the stage's weights, randomised so that no bias or norm is trivial."""
    generator = torch.Generator().manual_seed(0)
    for parameter in whole.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    model = transformers.AutoModelForCausalLM.from_config(whole.config, attn_implementation=attention(whole.config))
    result = model.load_state_dict(dict(whole.named_parameters()), strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *((family, False) for family in FAMILIES),
        *(
            pytest.param(f, True, marks=() if f in ("llama", "opt", "gemma2") else pytest.mark.nightly)
            for f in FAMILIES
        ),
    ],
)
def test_stages_equal_the_whole_model_in_outputs_and_gradients(family: str, tied: bool, tmp_path: Path) -> None:
    model = hugging_face(build_stage(ref(family, tie_word_embeddings=tied)))
    model.save_pretrained(tmp_path)
    tokens = torch.randint(1, 64, (2, 11), generator=torch.Generator().manual_seed(1))
    logits = model(tokens).logits
    logits.square().mean().backward()
    for size in (1, 2, 3):
        stages = [build_stage(ModelRef(head="lm", path=str(tmp_path)), rank, size) for rank in range(size)]
        hidden: torch.Tensor = tokens
        for stage in stages:
            stage.requires_grad_(True)
            hidden = stage(hidden)
        torch.testing.assert_close(hidden, logits, atol=1e-6, rtol=1e-5)
        hidden.square().mean().backward()
        total: dict[str, torch.Tensor] = {}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                key = stage.checkpoint_name(name)
                total[key] = total.get(key, 0) + parameter.grad
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert set(total) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(total[name], gradient, atol=1e-6, rtol=1e-4)


UNLIKE = (7, 3, 11, 3)
PACKED = [("lm", (6, 6)), ("lm", (9,)), *(("value", lengths) for lengths in (UNLIKE, (6, 6), (9,)))]


@pytest.mark.parametrize(
    ("family", "head", "lengths"),
    [
        *((family, "lm", UNLIKE) for family in FAMILIES),
        *(("llama", *which) for which in PACKED),
        *(pytest.param(f, *which, marks=pytest.mark.nightly) for f in FAMILIES if f != "llama" for which in PACKED),
    ],
    ids=str,
)
def test_packed_sequences_equal_padded_ones_in_outputs_and_gradients(
    family: str, head: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    hugging_face(build_stage(ref(family))).save_pretrained(tmp_path)
    wanted = torch.tensor([0, 2, 5])
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(1, 64, inside.shape, generator=torch.Generator().manual_seed(1))
    found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for size, packed in ((1, False), (1, True), (2, True)):
        stages = [build_stage(ModelRef(head=head, path=str(tmp_path)), rank, size) for rank in range(size)]
        if head == "value":
            torch.nn.init.ones_(stages[-1].score.weight)
        hidden = tokens[inside][None] if packed else tokens
        for stage in stages:
            stage.requires_grad_(True)
            hidden = stage(hidden, lengths, wanted) if packed else stage(hidden)
        output = hidden if packed else hidden[inside][wanted]
        output.square().mean().backward()
        total: dict[str, torch.Tensor] = {}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                key = stage.checkpoint_name(name)
                total[key] = total.get(key, 0) + parameter.grad
        found.append((output, total))
    (outputs, gradients), *others = found
    for output, total in others:
        torch.testing.assert_close(output, outputs, atol=1e-6, rtol=1e-5)
        assert set(total) == set(gradients)
        for name, gradient in gradients.items():
            largest = float(gradient.abs().max())  # of some, as of keys' biases, 0
            torch.testing.assert_close(total[name], gradient, atol=1e-6 + 1e-5 * largest, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_backward_in_two_halves_gives_the_whole_one_s_gradients(family: str) -> None:
    generator = torch.Generator().manual_seed(0)
    stage = build_stage(ref(family), 1, 3).requires_grad_(True)
    inputs, gradient = (torch.randn(1, 11, 32, generator=generator) for _ in range(2))
    found = []
    for halves in (False, True):
        given = inputs.clone().requires_grad_(True)
        output = stage(given, (7, 4))
        if halves:
            output = output.clone() if is_view(output) else output
            given.grad, groups = backward_input(output, gradient, given)
            backward_weights(groups)
        else:
            output.backward(gradient)
        found.append({"inputs": given.grad} | {name: p.grad for name, p in stage.named_parameters()})
        stage.zero_grad()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, atol=1e-6, rtol=1e-5, msg=name)


def test_a_loss_that_wants_no_output_has_no_gradient() -> None:
    stage = build_stage(ref("llama")).requires_grad_(True)
    stage(torch.ones(1, 5, dtype=torch.int64), (2, 3), torch.zeros(0, dtype=torch.int64)).sum().backward()
    assert all(not parameter.grad.any() for parameter in stage.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_scratch_weights_do_not_depend_on_the_split(family: str) -> None:
    whole = dict(build_stage(ref(family, tie_word_embeddings=True)).named_parameters())
    for rank in range(3):
        stage = build_stage(ref(family, tie_word_embeddings=True), rank, 3)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, whole[stage.checkpoint_name(name)]), name


def test_padding_on_the_right_changes_nothing() -> None:
    stage = build_stage(ref("llama"))
    tokens = torch.randint(1, 64, (1, 6))
    padded = torch.cat([tokens, torch.zeros(1, 5, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(stage(padded)[:, :6], stage(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_value_head_starts_at_zero_and_survives_export(family: str, tmp_path: Path) -> None:
    stage = build_stage(ref(family, head="value"))
    tokens = torch.randint(1, 64, (2, 7))
    assert torch.equal(stage(tokens), torch.zeros(2, 7))
    torch.nn.init.normal_(stage.score.weight)
    writer = HuggingFaceWriter(tmp_path)
    held = in_files(stage.family, stage.named_parameters())
    writer.finish([writer.write(held, torch.float32)], stage.config, "value", torch.float32, None)
    values = stage(tokens)
    torch.testing.assert_close(build_stage(ModelRef(head="value", path=str(tmp_path)))(tokens), values)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation=attention(stage.config)
    )
    lengths = torch.tensor([7, 4])
    mask = (torch.arange(7)[None] < lengths[:, None]).long()
    scores = model(tokens * mask, attention_mask=mask).logits[:, 0]
    torch.testing.assert_close(scores, values.gather(1, lengths[:, None] - 1)[:, 0], atol=1e-6, rtol=1e-5)


# Files of the last two hold experts one by one, and the head under another name.
@pytest.mark.parametrize(
    ("family", "shard_bytes"),
    [("qwen3", 1), ("qwen3", 10_000), ("qwen3", 2**30), ("qwen3_moe", 10_000), ("gpt_neox", 10_000)],
)
def test_exported_shards_load_in_transformers(family: str, shard_bytes: int, tmp_path: Path) -> None:
    stages = [build_stage(ref(family, tie_word_embeddings=False), rank, 2) for rank in range(2)]
    manifests = [
        HuggingFaceWriter(tmp_path, part, shard_bytes).write(
            in_files(stage.family, stage.named_parameters()), torch.float32
        )
        for part, stage in enumerate(stages)
    ]
    HuggingFaceWriter(tmp_path).finish(manifests, stages[0].config, "lm", torch.float32, None)
    assert not list(tmp_path.glob("part-*"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == stages[0].family.causal_lm
    written = (
        json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"] if shard_bytes < 2**30 else {}
    )
    assert ("embed_out.weight" in written) is (family == "gpt_neox")
    assert ("model.layers.2.mlp.experts.3.up_proj.weight" in written) is (family == "qwen3_moe")
    tokens = torch.randint(1, 64, (2, 7))
    torch.testing.assert_close(model(tokens).logits, stages[1](stages[0](tokens)))


def test_bfloat16_stage_keeps_values_in_float32() -> None:
    stage = build_stage(ref("llama", head="value"), dtype=torch.bfloat16)
    assert stage(torch.ones(1, 3, dtype=torch.int64)).dtype == torch.float32
    assert stage.model.norm.weight.dtype == torch.bfloat16


@given(st.integers(1, 100), st.data())
def test_layers_are_split_without_gap_and_evenly(layers: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, layers))
    ranges = [layer_range(layers, rank, size) for rank in range(size)]
    assert [i for r in ranges for i in r] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_more_stages_than_layers() -> None:
    with pytest.raises(ModelError, match="pp 4 needs at least 4 layers"):
        build_stage(ref("llama"), 3, 4)


def save(folder: Path, **changes: Any) -> None:
    build = build_stage(ref("llama"))
    writer = HuggingFaceWriter(folder)
    writer.finish([writer.write(build.named_parameters(), torch.float32)], build.config, "lm", torch.float32, None)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_pickle_weights_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"only pickle weights.*convert them to safetensors"):
        build_stage(ModelRef(head="lm", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is not supported .it has an encoder"),
        ({"model_type": "gemma3", "text_config": {}, "vision_config": {}}, "'gemma3' is not supported .it reads more"),
        ({"model_type": "gemma3n_text"}, "'gemma3n_text' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "attention to later tokens"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "layers without experts"),
        ({"model_type": "cohere2_moe", "first_k_dense_replace": 1}, "first_k_dense_replace 1 is not supported"),
        ({"model_type": "cohere2_moe", "mlp_layer_types": ["dense", "sparse"]}, "layers without experts"),
        ({"model_type": "cohere2_moe", "num_shared_experts": 1}, "num_shared_experts 1 is not supported"),
        (
            {"model_type": "cohere2_moe", "expert_selection_fn": "sigmoid"},
            "expert_selection_fn sigmoid is not supported",
        ),
        ({"model_type": "bert"}, "model type 'bert' is not supported.*use one of afmoe, apertus, arcee, "),
        ({"hidden_size": 16}, "config.json asks for"),
        ({"num_hidden_layers": 4}, "is missing from the weights"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised weights"),
    ],
)
def test_unusable_folders_are_named(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    save(tmp_path, **changes)
    with pytest.raises(ModelError, match=sentence) as error:
        build_stage(ModelRef(head="lm", path=str(tmp_path)))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("size", [1, 2])
def test_a_tied_folder_with_a_head_of_its_own_is_refused(size: int, tmp_path: Path) -> None:
    """transformers would use that head, and vLLM too."""
    from safetensors.torch import load_file, save_file

    hugging_face(build_stage(ref("qwen3", tie_word_embeddings=True))).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    folder = ModelRef(head="lm", path=str(tmp_path))
    build_stage(folder, 0, size)
    weights["lm_head.weight"][3, 1] += 1.0
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight; set tie_word_embeddings to false"):
        build_stage(folder, 0, size)
    build_stage(ModelRef(head="value", path=str(tmp_path)), 0, size)


def test_truncated_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        load_config(ModelRef(head="lm", path=str(tmp_path / "nowhere")))
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_config(ModelRef(head="lm", path=str(tmp_path)))
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        build_stage(ModelRef(head="lm", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("llama", {"sliding_window": 8}),  # vLLM takes it, transformers does not
    ],
)
def test_sliding_windows_are_refused(family: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="sliding-window"):
        load_config(ref(family, **fields))


def test_sequence_longer_than_opt_positions() -> None:
    with pytest.raises(ModelError, match="33 tokens is longer than the model's max_position_embeddings, 32"):
        build_stage(ref("opt"))(torch.ones(1, 33, dtype=torch.int64))


def test_scratch_model_takes_its_vocabulary_from_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<eos>": 0, "a": 1, "b": 2}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")), eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(tmp_path)
    scratch = ScratchModel(architecture="llama", config={k: v for k, v in COMMON.items() if k != "vocab_size"})
    config = load_config(ModelRef(head="lm", scratch=scratch, tokenizer=str(tmp_path)))
    assert (config.vocab_size, config.eos_token_id) == (3, 0)
    assert config.pad_token_id is None  # the end token must be learnt
    with pytest.raises(ModelError, match="needs a tokenizer folder or vocab_size"):
        load_config(ModelRef(head="lm", scratch=scratch))


def test_all_chat_templates_of_a_tokenizer_are_exported(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    (tokenizer / "additional_chat_templates").mkdir(parents=True)
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (tokenizer / name).write_text(name)
    writer, stage = HuggingFaceWriter(tmp_path / "model"), build_stage(ref("llama"))
    for _ in range(2):
        (tmp_path / "model").mkdir(exist_ok=True)
        written = writer.write(stage.named_parameters(), torch.float32)
        writer.finish([written], stage.config, "lm", torch.float32, tokenizer)
        for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
            assert (tmp_path / "model" / name).read_text() == name


def test_weights_beside_the_model_s_are_not_read(tmp_path: Path) -> None:
    """Such as an average, or Mistral's own format."""
    from safetensors.torch import load_file, save_file

    save(tmp_path)
    own = load_file(tmp_path / "model.safetensors")
    save_file({name: value + 1.0 for name, value in own.items()}, tmp_path / "model_ema.safetensors")
    loaded = dict(build_stage(ModelRef(head="lm", path=str(tmp_path))).named_parameters())
    assert all(torch.equal(loaded[name], value) for name, value in own.items())
