"""Writes a Hugging Face folder that `transformers` and vLLM can load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.manifest.model_families import ModelFamily
from dovetail.manifest.model_families.support import text_part
from dovetail.manifest.model_shape import Head
from dovetail.models.config import family_facts
from dovetail.models.model_stage import SCORE_BIAS, VALUE_HEAD_FILE
from dovetail.protocol.files.durable import read_object, sync

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# A tokenizer's folder of further chat templates, such as one for tools.
_TEMPLATES = "additional_chat_templates"
# The fields of `rope_parameters` that are not in `rope_scaling` of Transformers 4.
_NOT_SCALING = ("rope_theta", "partial_rotary_factor")
_PAD = "<|pad|>"


class HuggingFaceWriter:
    """Writes one part of a model's folder. A part holds the tensors of one pipeline stage.

    Each writer calls `write` with its tensors. Then one process calls `finish` with the manifests of all writers. Heads
    `lm` and `lm+value` give a causal language model. Head `value` gives a `...ForSequenceClassification` with one
    label, whose `score` is the scalar head. All files are flushed to the disk. A full disk raises OSError."""

    def __init__(self, folder: Path, part: int = 0, shard_bytes: int = 2 * 1024**3) -> None:
        self.folder, self.part, self.shard_bytes = folder, part, shard_bytes

    def write(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, constants: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Write the tensors, cast to `dtype`, as safetensors shards. Those whose names end with one of `constants` stay
        float32. Returns the manifest: files, names and bytes."""
        pending: dict[str, Tensor] = {}
        pending_bytes = total = 0
        files: list[dict[str, Any]] = []

        def flush() -> None:
            from safetensors.torch import save_file

            name = f"part-{self.part:05d}-{len(files):05d}.safetensors"
            save_file(pending, str(self.folder / name), metadata={"format": "pt"})
            sync(self.folder / name)
            files.append({"file": name, "names": sorted(pending)})
            pending.clear()

        for name, tensor in tensors:
            stored = torch.float32 if name.endswith(constants) else dtype
            value = tensor.detach().to(device="cpu", dtype=stored).contiguous()
            size = value.numel() * value.element_size()
            if pending and pending_bytes + size > self.shard_bytes:
                flush()
                pending_bytes = 0
            # The copy is needed because safetensors refuses tensors that share a storage.
            pending[name] = value.clone() if value.data_ptr() == tensor.data_ptr() else value
            pending_bytes += size
            total += size
        if pending:
            flush()
        return {"files": files, "bytes": total}

    def write_value_head(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Write the value head of a model with both heads, in float32. Without tensors it writes nothing."""
        from safetensors.torch import save_file

        if not tensors:
            return
        path = self.folder / VALUE_HEAD_FILE
        path.parent.mkdir(exist_ok=True)
        whole = {name: t.detach().to(device="cpu", dtype=torch.float32).contiguous().clone() for name, t in tensors}
        save_file(whole, str(path), metadata={"format": "pt"})
        sync(path)
        sync(path.parent)

    def finish(
        self,
        manifests: list[dict[str, Any]],
        config: Any,
        head: Head,
        dtype: torch.dtype,
        tokenizer: Path | None,
        subtract: float = 0.0,
    ) -> None:
        """Give the shards their standard names, and write index, config.json and the tokenizer's files. `subtract` is
        subtracted from each value of a model with head `value`."""
        files = [file for manifest in manifests for file in manifest["files"]]
        weight_map: dict[str, str] = {}
        for number, file in enumerate(files, start=1):
            final = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            os.replace(self.folder / file["file"], self.folder / final)
            weight_map.update(dict.fromkeys(file["names"], final))
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(m["bytes"] for m in manifests)},
                "weight_map": dict(sorted(weight_map.items())),
            }
            write_text(self.folder / "model.safetensors.index.json", json.dumps(index, indent=1))
        fields = exported_config(config, head, dtype, subtract)
        if tokenizer is not None:
            self._copy_tokenizer(tokenizer, fields if head == "value" else None)
        write_text(self.folder / "config.json", json.dumps(fields, indent=1))
        sync(self.folder)

    def _copy_tokenizer(self, tokenizer: Path, classifier: dict[str, Any] | None) -> None:
        """Copy the tokenizer's files. `classifier`: the config.json of a model with a value head, which gets the
        padding token."""
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, self.folder / name)
        settings, whole = read_object(self.folder / "tokenizer_config.json"), self.folder / "tokenizer.json"
        if settings and whole.is_file():
            if "auto_map" not in settings:
                settings = _for_version_4(settings)
            if classifier is not None:
                _pad(settings, whole, classifier)
            write_text(self.folder / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False))
        for name in _TOKENIZER_FILES:
            if (self.folder / name).is_file():
                sync(self.folder / name)
        if (tokenizer / _TEMPLATES).is_dir():
            shutil.copytree(tokenizer / _TEMPLATES, self.folder / _TEMPLATES, dirs_exist_ok=True)
            for path in (self.folder / _TEMPLATES).rglob("*"):
                sync(path)
            sync(self.folder / _TEMPLATES)


def exported_config(config: Any, head: Head, dtype: torch.dtype, subtract: float = 0.0) -> dict[str, Any]:
    """The config.json of the trained model. It is the source's config.json (in the folder `config.name_or_path`) with
    the trained model's architecture, dtype and head. Fields are there in the forms of Transformers 4 and 5. `subtract`:
    see `HuggingFaceWriter.finish`."""
    family = family_facts(config)
    source = text_part(read_object(Path(config.name_or_path) / "config.json")) if config.name_or_path else {}
    fields: dict[str, Any] = dict(source) | config.to_dict() | _rotary_fields(config, source, family)
    if family.experts is not None:
        found = next(fields[name] for name in family.experts.count if name in fields)
        fields |= dict.fromkeys(family.experts.count, found)  # the versions have different names
    fields["architectures"] = [family.classifier if head == "value" else family.causal_lm]
    fields["dtype"] = fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    for stale in ("auto_map", "_name_or_path", "_attn_implementation"):
        fields.pop(stale, None)
    if head == "value":
        fields |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if subtract:
            fields[SCORE_BIAS] = float(fields.get(SCORE_BIAS, 0.0)) - subtract
    else:
        for name in ("num_labels", "id2label", "label2id", SCORE_BIAS):
            fields.pop(name, None)
    return fields


def _rotary_fields(config: Any, source: Mapping[str, Any], family: ModelFamily) -> dict[str, Any]:
    """The fields that say to Transformers 4 what `rope_parameters` says to version 5. Those of a source that was
    written by version 4 stay as they are."""
    kinds = getattr(config, "rope_parameters", None)
    if not kinds or family.forward != "layers":
        return {}
    each = kinds.get("full_attention", kinds)
    scaling = {name: value for name, value in each.items() if name not in _NOT_SCALING}
    # It is written even if it is None, because the default of gpt-oss is another one.
    found = {"rope_theta": each["rope_theta"], "rope_scaling": None if each["rope_type"] == "default" else scaling}
    if "sliding_attention" in kinds:
        found["rope_local_base_freq"] = kinds["sliding_attention"]["rope_theta"]
    if "partial_rotary_factor" in each:
        found["partial_rotary_factor"] = each["partial_rotary_factor"]
    found |= {name: each[now] for name, now in family.rotary_fields.items()}
    if type(config).from_dict({**config.to_dict(), **found}).rope_parameters != kinds:
        return {}  # Transformers 4 did not have this type
    return found if "rope_parameters" in source else found | {name: source[name] for name in found if name in source}


def _for_version_4(settings: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json that Transformers 4 reads too. Its classes for single families build a tokenizer of their
    own, with a begin token for example. The generic class takes tokenizer.json as it is, in both versions."""
    found = {name: value for name, value in settings.items() if name not in ("backend", "is_local")}
    found |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    found.setdefault("model_input_names", ["input_ids", "attention_mask"])
    if isinstance(more := found.get("extra_special_tokens"), list):  # version 4 takes only a mapping here
        del found["extra_special_tokens"]
        found["additional_special_tokens"] = more
    return found


def _pad(settings: dict[str, Any], whole: Path, fields: dict[str, Any]) -> None:
    """Give a model with a value head a padding token that never ends a text, in its config.json (`fields`) and its
    tokenizer. transformers takes the score of the last token that is not `pad_token_id`.

    It is the first of these: the tokenizer's, the model's, a token that is called so, a new one if the embedding has a
    row to spare, the unknown token, the begin token. If there is none, transformers refuses batches."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(whole))

    def named(kind: str) -> int | None:
        token = settings.get(kind)
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else tokenizer.token_to_id(token)

    ends = fields.get("eos_token_id")
    never = {named("eos_token"), *(ends if isinstance(ends, list) else [ends])}
    more = tokenizer.get_added_tokens_decoder()
    known = [named("pad_token"), fields.get("pad_token_id")]
    known += [number for number, token in more.items() if token.special and "pad" in token.content.lower()]
    # Some models say -1.
    found = [n for n in known if n is not None and n >= 0 and n not in never and tokenizer.id_to_token(n) is not None]
    if not found and (size := tokenizer.get_vocab_size()) < fields["vocab_size"]:
        tokenizer.add_special_tokens([AddedToken(_PAD, special=True, normalized=False)])
        if tokenizer.token_to_id(_PAD) == size:
            tokenizer.save(str(whole))
            found = [size]
    found += [n for n in (named("unk_token"), named("bos_token")) if n is not None and n not in never]
    pad = next(iter(found), None)
    fields["pad_token_id"] = pad
    settings["padding_side"] = "right"
    if pad is not None:
        settings["pad_token"] = tokenizer.id_to_token(pad)
    map_path = whole.with_name("special_tokens_map.json")
    if pad is not None and map_path.is_file():
        write_text(map_path, json.dumps(read_object(map_path) | {"pad_token": settings["pad_token"]}, indent=2))


def write_text(path: Path, text: str) -> None:
    """Write a file and flush it to the disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)
