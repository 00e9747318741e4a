"""Writes a Hugging Face folder that `transformers` and vLLM can load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.models.model_stage import SCORE_BIAS, VALUE_HEAD_FILE
from dovetail.protocol.files.durable import sync
from dovetail.protocol.messages import Head

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


class HuggingFaceWriter:
    """Writes one part of a model's folder. A part holds the tensors of one pipeline stage.

    Each writer calls `write` with its tensors. Then one process calls `finish` with the manifests of all writers. Heads
    `lm` and `lm+value` give a causal language model. Head `value` gives a `...ForSequenceClassification` with one
    label, whose `score` is the scalar head. All files are flushed to the disk. A full disk raises OSError."""

    def __init__(self, folder: Path, part: int = 0, shard_bytes: int = 2 * 1024**3) -> None:
        self.folder, self.part, self.shard_bytes = folder, part, shard_bytes

    def write(self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Any]:
        """Write the tensors, cast to `dtype`, as safetensors shards. Returns the manifest: files, names and bytes."""
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
            value = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
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
        write_text(self.folder / "config.json", json.dumps(exported_config(config, head, dtype, subtract), indent=1))
        for name in _TOKENIZER_FILES if tokenizer is not None else ():
            assert tokenizer is not None
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, self.folder / name)
                sync(self.folder / name)
        if tokenizer is not None and (tokenizer / _TEMPLATES).is_dir():
            shutil.copytree(tokenizer / _TEMPLATES, self.folder / _TEMPLATES, dirs_exist_ok=True)
            for path in (self.folder / _TEMPLATES).rglob("*"):
                sync(path)
            sync(self.folder / _TEMPLATES)
        sync(self.folder)


def exported_config(config: Any, head: Head, dtype: torch.dtype, subtract: float = 0.0) -> dict[str, Any]:
    """The config.json of the trained model. It is the source's config.json with the trained model's architecture, dtype
    and head. `subtract`: see `HuggingFaceWriter.finish`."""
    fields: dict[str, Any] = config.to_dict()
    family = MODEL_FAMILIES[config.model_type]
    fields["architectures"] = [family.classifier if head == "value" else family.causal_lm]
    fields["dtype"] = str(dtype).removeprefix("torch.")
    for stale in ("torch_dtype", "auto_map", "_name_or_path", "_attn_implementation"):
        fields.pop(stale, None)
    if head == "value":
        fields |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if subtract:
            fields[SCORE_BIAS] = float(fields.get(SCORE_BIAS, 0.0)) - subtract
    else:
        for name in ("num_labels", "id2label", "label2id", SCORE_BIAS):
            fields.pop(name, None)
    return fields


def write_text(path: Path, text: str) -> None:
    """Write a file and flush it to the disk."""
    path.write_text(text)
    sync(path)
