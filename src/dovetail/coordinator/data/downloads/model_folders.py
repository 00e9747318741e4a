"""The sources of the job's models. It checks folders and hub repositories, and writes the configurations of models that
start from random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads.hub import Hub, read_json
from dovetail.coordinator.data.downloads.hub_client import INDEX, weight_files
from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.model_families.support import problem
from dovetail.manifest.types import ModelSource, ScratchModel

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def resolve(source: ModelSource, name: str, base_dir: Path, hub: Hub, trust_remote_code: bool = False) -> Path:
    """The folder of a path or hub source. The weights of a hub model are there after `hub.download_weights`. `name` is
    actor, critic, reward or reference. Raises DataError that names the field."""
    field = f"spec.models.{name}"
    if source.path is not None:
        folder = (base_dir / source.path).resolve()
        if not folder.is_dir():
            raise DataError(f"{field}.source.path: {folder} is not a folder")
        files = [path.name for path in folder.iterdir()]
    elif source.hugging_face is not None:
        where = f"{field}.source.huggingFace"
        folder = hub.describe(name, where, source.hugging_face, source.revision, trust_remote_code)
        files = hub.files(name)
    else:
        raise DataError(f"{field}.source: a volume claim (pvc) can be read only on a cluster; use path or huggingFace")
    if not (folder / "config.json").is_file():
        raise DataError(f"{field}.source: {folder} is not a Hugging Face model folder: config.json is missing")
    if not any("/" not in file and file.endswith(".safetensors") for file in files):
        pickles = sorted(file for file in files if file.endswith(_PICKLES))
        found = f"only pickled weights ({pickles[0]}), which can run code when loaded" if pickles else "no weights"
        fix = (
            "save the model with save_pretrained(..., safe_serialization=True)"
            if source.path is not None
            else "name a repository or revision that has them"
        )
        raise DataError(
            f"{field}.source: {source.path or source.hugging_face} has {found}; Dovetail loads safetensors, so {fix}"
        )
    config = read_json(folder / "config.json")  # loading the model reports a file that is not JSON
    if isinstance(config, dict) and "model_type" in config and (why := problem(config, MODEL_FAMILIES)) is not None:
        raise DataError(f"{field}.source: {source.path or source.hugging_face}: {why}")
    return folder


def check_scores(folder: Path, field: str) -> None:
    """Raises DataError for a model without a score head, because all its scores would be 0, and for one with several
    labels.

    If the weights are there, they decide, because loading takes `score.weight` whatever config.json calls the model.
    Before they are downloaded, config.json decides."""
    config = read_json(folder / "config.json")
    config = config if isinstance(config, dict) else {}
    kinds = [str(kind) for kind in config.get("architectures") or []]
    labels, lacks, where = _labels(folder), f"has no {_SCORE} among its weights", f"{_SCORE} of its weights"
    if labels is None:
        lacks, where = "is no reward model", "id2label of its config.json"
        if kinds and all(kind.endswith("ForCausalLM") for kind in kinds):
            labels = 0
        elif any("SequenceClassification" in kind for kind in kinds):
            named = config.get("id2label")
            # transformers writes no labels if there are two, because that is its default.
            labels = len(named) if isinstance(named, dict) else config.get("num_labels", 2)
    if labels == 0:
        raise DataError(
            f"{field}: {folder} {lacks} ({', '.join(kinds) or 'no architectures'}), so all its scores would be 0; name "
            "one (...ForSequenceClassification), or train it: add reward to spec.stages"
        )
    if labels not in (None, 1):
        raise DataError(
            f"{field}: {folder} has {labels} labels ({where}), but a reward model gives one score; name another model"
        )


_SCORE = "score.weight"
_MOST_HEADER = 100_000_000  # bytes, as in the library safetensors


def _labels(folder: Path) -> int | None:
    """The number of rows of the score head in the weights, or 0 if there is no head. None if the weights are missing or
    incomplete."""
    tensors: dict[str, Any] = {}
    for name in weight_files([path.name for path in folder.iterdir()], read_json(folder / INDEX)):
        header = _header(folder / name)
        if header is None:
            return None  # loading says what is wrong
        tensors |= header
    return int(tensors[_SCORE]["shape"][0]) if _SCORE in tensors else 0 if tensors else None


def _header(file: Path) -> dict[str, Any] | None:
    """The header of a safetensors file, with the shape, dtype and byte offsets of each tensor. None if it cannot be
    read."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size)) if size <= _MOST_HEADER else None
    except (OSError, ValueError):
        return None
    return header if isinstance(header, dict) else None


# The fields of all families that must be integers above 0.
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "ffn_dim",
    "max_position_embeddings",
)


def scratch_config(scratch: ScratchModel, tokenizer: Any, field: str) -> dict[str, Any]:
    """The config.json of a model with random weights. It has the manifest's fields, and those that follow from the
    tokenizer.

    Other fields get the family's defaults when the model is loaded. (The configuration classes are not used here,
    because importing one imports torch.) Raises DataError for sizes that do not fit each other or the tokenizer."""
    where = f"{field}.source.scratch.config"
    eos, bos, pad = tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id
    config: dict[str, Any] = {
        "architectures": [MODEL_FAMILIES[scratch.architecture].causal_lm],
        "model_type": scratch.architecture,
        "dtype": "float32",
        "vocab_size": len(tokenizer),
        "eos_token_id": eos,
        "bos_token_id": bos,
        # The embedding row of the pad token gets no gradient, so the pad token must not be a token that the model
        # reads.
        "pad_token_id": None if pad in (eos, bos) else pad,
        **scratch.config,
    }
    for name in _COUNTS:
        value = config.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise DataError(f"{where}: {name} must be a whole number above 0, not {value!r}")
    if config["vocab_size"] < len(tokenizer):
        raise DataError(f"{where}: vocab_size {config['vocab_size']} is less than the tokenizer's {len(tokenizer)}")
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if width and heads and config.get("head_dim") is None and width % heads:
        raise DataError(f"{where}: hidden_size {width} is not a multiple of num_attention_heads {heads}")
    kv_heads = config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise DataError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return config
