"""Exported folders as other programs read them: Transformers 4, and transformers' own classifiers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dovetail.coordinator.data.downloads.model_folders import check_weights
from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.manifest.model_shape import ModelShape
from dovetail.models import HuggingFaceWriter, PipelineStage, build_stage, load_config
from dovetail.models.derive import usual_config
from dovetail.models.export import exported_config
from dovetail.models.source import in_files
from dovetail.protocol.messages import ModelRef
from helpers.family_models import FAMILIES, ref
from helpers.patience import PATIENCE

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
# Settings of positions, beside those of `FAMILIES`.
POSITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}}),
    "gpt_oss-default": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "phi3-partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "gpt_neox-half": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
}
_BYTES = {"bytes": "PreTrainedTokenizerFast", "qwen": "Qwen2Tokenizer"}
TEXTS = ["red dog", " two  spaces", "What is 2 + 3?\n\nThe answer", "<|im_start|>user\nhé<|im_end|>", "", "a <s> b</s>"]


def shaken(stage: PipelineStage) -> PipelineStage:
    generator = torch.Generator().manual_seed(1)
    for parameter in stage.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return stage


def export(folder: Path, stage: PipelineStage, tokenizer: Path | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceWriter(folder)
    held = in_files(stage.family, stage.named_parameters())
    writer.finish([writer.write(held, torch.float32)], stage.config, stage.head, torch.float32, tokenizer)
    return folder


# Folders that also read images: their type, and the fields of their language model.
READS_IMAGES = {
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 5},
    "mistral3": {"model_type": "ministral3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "qwen3_5": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "full_attention_interval": 3,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "llava": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", READS_IMAGES)
def test_the_language_model_of_a_folder_that_also_reads_images_is_trained(kind: str, tmp_path: Path) -> None:
    """It computes what the whole folder computes for texts, and is exported as a language model."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision |= {"num_heads": 2, "depth": 1, "out_hidden_size": 32}  # Qwen's names
    config = transformers.CONFIG_MAPPING[kind](
        text_config=sizes | READS_IMAGES[kind], vision_config=vision | {"image_size": 28, "patch_size": 14}
    )
    whole: Any = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path / "whole"
    whole.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    if kind == "gemma3":  # published ones leave out what the class says itself, and say tokens once
        del fields["text_config"]["num_attention_heads"], fields["text_config"]["num_key_value_heads"]
        del fields["text_config"]["eos_token_id"]
        fields["eos_token_id"] = [1, 7]
        (folder / "config.json").write_text(json.dumps(fields))
    check_weights(folder, "spec.models.actor.source.path")
    tokens = torch.randint(3, 60, (1, 9))
    stage = build_stage(ModelRef(head="lm", path=str(folder)))
    assert ModelShape.of(fields).parameters() == sum(p.numel() for p in stage.parameters())
    with torch.no_grad():
        wanted = whole(input_ids=tokens, use_cache=False).logits
        assert torch.allclose(stage(tokens), wanted, atol=1e-5)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            export(tmp_path / "text", stage), output_loading_info=True
        )
        assert not report["missing_keys"] | report["unexpected_keys"]
        assert type(model).__name__ == stage.family.causal_lm
        assert torch.allclose(model(tokens).logits, wanted, atol=1e-5)
    if kind == "gemma3":
        assert model.config.eos_token_id == [1, 7]


def saved(folder: Path, eos: str = "</s>", style: str = "bytes", specials: tuple[str, ...] = (), **tokens: str) -> Path:
    """A tokenizer's folder as `prepare` makes it from one of Transformers 4."""
    model = Tokenizer(models.BPE(byte_fallback=style not in _BYTES, unk_token=tokens.get("unk_token")))
    alphabet: list[str] = []
    if style in _BYTES:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = sorted(set("".join(TEXTS)))
    named = list(dict.fromkeys([*tokens.values(), eos, *specials]))
    named += [f"<0x{byte:02X}>" for byte in range(256)] if style not in _BYTES else []
    trainer = trainers.BpeTrainer(special_tokens=named, vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(TEXTS * 20, trainer)
    if (begin := tokens.get("bos_token")) is not None and style == "begins":
        model.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, model.token_to_id(begin))]
        )
    folder.mkdir(parents=True)
    model.save(str(folder / "tokenizer.json"))
    kind = _BYTES.get(style, "LlamaTokenizerFast")
    settings = {"tokenizer_class": kind, "eos_token": eos, "additional_special_tokens": list(specials), **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizers.load(folder, "field").save_pretrained(folder.with_name(f"{folder.name}-run"))
    return folder.with_name(f"{folder.name}-run")


def test_positions_of_a_type_that_version_4_never_had_are_written_once() -> None:
    """Its class takes `rope_scaling` for the new field."""
    config = usual_config("mellum")
    found = exported_config(config, "lm", torch.bfloat16)
    assert type(config).from_dict(found).rope_parameters == config.rope_parameters
    assert "rope_scaling" not in found


@pytest.mark.parametrize("case", POSITIONS)
def test_positions_are_written_for_both_versions(case: str, tmp_path: Path) -> None:
    family, changes = POSITIONS[case]
    config = load_config(ref(family, **changes))
    found = exported_config(config, "lm", torch.bfloat16)
    assert found["dtype"] == found["torch_dtype"] == "bfloat16"
    if family == "opt":
        return
    given = config.rope_parameters
    whole = given.get("full_attention", given)
    assert found["rope_parameters"] == given
    (tmp_path / "config.json").write_text(json.dumps(found))
    again = load_config(ModelRef(head="lm", path=str(tmp_path)))
    assert again.rope_parameters == given, "version 5 reads it as it was"
    assert exported_config(again, "lm", torch.bfloat16) == found
    assert found["rope_theta"] == whole["rope_theta"]
    if whole["rope_type"] == "default":
        assert found["rope_scaling"] is None
    else:
        assert found["rope_scaling"].items() >= {k: v for k, v in whole.items() if k != "rope_theta"}.items()
    assert found.get("rope_local_base_freq") == given.get("sliding_attention", {}).get("rope_theta")
    assert found.get("partial_rotary_factor") == whole.get("partial_rotary_factor")
    if family == "gpt_neox":
        assert (found["rotary_emb_base"], found["rotary_pct"]) == (found["rope_theta"], whole["partial_rotary_factor"])


def test_the_fields_of_a_source_stay(tmp_path: Path) -> None:
    """As version 4 wrote them, and as somebody changed them who knows version 5."""
    config = exported_config(load_config(ref("llama")), "lm", torch.float32)
    older = {name: value for name, value in config.items() if name not in ("rope_parameters", "dtype")}
    older |= {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "pretraining_tp": 1, "mine": 7}
    (tmp_path / "config.json").write_text(json.dumps(older))
    found = exported_config(load_config(ModelRef(head="lm", path=str(tmp_path))), "lm", torch.float32)
    assert found.items() >= {name: older[name] for name in ("rope_theta", "rope_scaling", "pretraining_tp")}.items()
    assert found["mine"] == 7
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}})
    )
    found = exported_config(load_config(ModelRef(head="lm", path=str(tmp_path))), "lm", torch.float32)
    assert found["rope_theta"] == 9.0


PADS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "own": ({"pad_token": "<pad>"}, {}, "<pad>"),
    "model's": ({"specials": ("<x>", "<reserved>")}, {"pad_token_id": 1}, "<x>"),
    "called so": ({"specials": ("<|fim_pad|>",), "bos_token": "<s>"}, {}, "<|fim_pad|>"),
    "a row to spare": ({"bos_token": "<s>"}, {"vocab_size": 1000}, "<|pad|>"),
    "a row to spare, no id": ({"bos_token": "<s>"}, {"vocab_size": 1000, "pad_token_id": None}, "<|pad|>"),
    "an id that is none": ({"bos_token": "<s>"}, {"pad_token_id": -1}, "<s>"),
    "unknown": ({"style": "prepends", "unk_token": "<unk>", "bos_token": "<s>"}, {}, "<unk>"),
    "begin": ({"bos_token": "<s>"}, {}, "<s>"),
    "none": ({}, {}, None),
}


@pytest.mark.parametrize("case", PADS)
def test_a_reward_models_scores_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    given, changes, expected = PADS[case]
    run = saved(tmp_path / "tokenizer", **given)
    own = transformers.AutoTokenizer.from_pretrained(run)
    changes = {"vocab_size": len(own), "eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id} | changes
    stage = shaken(build_stage(ref("llama", "value", max_position_embeddings=64, **changes)))
    folder = export(tmp_path / "reward", stage, run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    texts = [f"red dog{own.eos_token}", "What is 2 + 3?", f"a{own.eos_token}{own.eos_token}"]
    ids = [own(text)["input_ids"] for text in texts]
    assert [tokenizer(text)["input_ids"] for text in texts] == ids
    if expected is None:
        with pytest.raises(ValueError, match="batch sizes > 1"):
            model(torch.zeros(2, 3, dtype=torch.int64))
        return
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (expected, model.config.pad_token_id)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    wanted = torch.stack([stage(torch.tensor([each]))[0, -1] for each in ids])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- Transformers 4

READ = """
import json, sys
from pathlib import Path
import torch, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
root, texts = Path(sys.argv[1]), json.loads(sys.argv[2])
told = {"logits": {}, "ids": {}, "scores": None}
eager = {"attn_implementation": "eager"}
for folder in sorted((root / "models").iterdir()):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **eager).eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        told["logits"][folder.name] = model(torch.arange(1, 30)[None]).logits.tolist()
for folder in sorted((root / "tokenizers").iterdir()):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    told["ids"][folder.name] = [[tokenizer(t)["input_ids"], tokenizer.decode(tokenizer(t)["input_ids"])] for t in texts]
tokenizer = transformers.AutoTokenizer.from_pretrained(root / "reward")
model = transformers.AutoModelForSequenceClassification.from_pretrained(root / "reward", **eager)
batch = tokenizer(texts, padding=True, return_tensors="pt")
with torch.no_grad():
    told["scores"] = model(**batch).logits[:, 0].tolist()
(root / "told.json").write_text(json.dumps(told))
"""
# The last release of version 4. Its packages replace those of this environment. torch is the same.
VERSION_4 = ("transformers==4.57.6", "huggingface-hub==0.36.2", "tokenizers==0.22.2")


@pytest.fixture(scope="module")
def version_4() -> Path:
    folder = Path.home() / ".cache" / "dovetail" / "-".join(VERSION_4)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # It appears whole, also if this is killed or another checkout does the same.
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            uv, made = Path(sys.executable).with_name("uv"), Path(fresh) / "made"
            options = ["--quiet", "--no-deps", "--python", sys.executable, "--target", str(made)]
            patient = os.environ | {"UV_HTTP_TIMEOUT": "180"}
            subprocess.run([uv, "pip", "install", *options, *VERSION_4], check=True, env=patient, timeout=PATIENCE)
            with contextlib.suppress(OSError):
                made.rename(folder)
    return folder


@pytest.mark.slow
def test_transformers_4_computes_the_same(version_4: Path, tmp_path: Path) -> None:
    logits, ids = {}, {}
    for case, (family, changes) in POSITIONS.items():
        stage = shaken(build_stage(ref(family, **changes)))
        export(tmp_path / "models" / case, stage)
        logits[case] = stage(torch.arange(1, 30)[None])
    styles = [("bytes", {}), ("prepends", {}), ("begins", {}), ("qwen", {"specials": ("<|im_start|>", "<|im_end|>")})]
    for number, (style, more) in enumerate(styles):
        named = {"bos_token": "<s>", "unk_token": "<unk>"} if style not in _BYTES else {}
        run = saved(tmp_path / f"run-{number}", style=style, **named, **more)
        own = transformers.AutoTokenizer.from_pretrained(run)
        export(tmp_path / "tokenizers" / str(number), build_stage(ref("llama", vocab_size=len(own))), run)
        ids[str(number)] = [[own(text)["input_ids"], own.decode(own(text)["input_ids"])] for text in TEXTS]
    texts = [text for text in TEXTS if text]
    changes = {"vocab_size": 1000, "eos_token_id": own.eos_token_id, "max_position_embeddings": 64}
    stage = shaken(build_stage(ref("llama", "value", **changes)))
    export(tmp_path / "reward", stage, run)
    scores = [stage(torch.tensor([own(text)["input_ids"]]))[0, -1].item() for text in texts]
    subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path), json.dumps(TEXTS)],
        env=os.environ | {"PYTHONPATH": str(version_4)},
        check=True,
        timeout=PATIENCE,
    )
    told = json.loads((tmp_path / "told.json").read_text())
    for case, expected in logits.items():
        torch.testing.assert_close(torch.tensor(told["logits"][case]), expected, atol=1e-4, rtol=1e-4, msg=case)
    assert told["ids"] == ids
    found = [score for score, text in zip(told["scores"], TEXTS, strict=True) if text]
    assert found == pytest.approx(scores, abs=1e-4)
