"""The sources of the job's models. It checks folders and hub repositories, and writes the configurations of models that
start from random weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads.hub import Hub, read_json
from dovetail.manifest.checks.model_contents import PICKLES, BrokenWeights, folder_problems, headers, weight_files
from dovetail.manifest.fixed_names import MODEL_NAMES
from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.model_families.support import TEXT_PREFIX, problem
from dovetail.manifest.model_shape import ModelShape, ShapeError
from dovetail.manifest.types import ModelSource, RLHFJobSpec, ScratchModel


def resolve(source: ModelSource, name: str, base_dir: Path, hub: Hub, trust_remote_code: bool = False) -> Path:
    """The folder of a path or hub source. The weights of a hub model are there after `hub.download_weights`. `name` is
    actor, critic, reward or reference. Raises DataError that names the field."""
    field = f"spec.models.{name}.source"
    if source.path is not None:
        folder = (base_dir / source.path).resolve()
        if not folder.is_dir():
            raise DataError(f"{field}.path: {folder} is not a folder")
        check_weights(folder, f"{field}.path")
        return folder
    if source.hugging_face is None:
        raise DataError(f"{field}: a volume claim (pvc) can be read only on a cluster; use path or huggingFace")
    where, repository = f"{field}.huggingFace", source.hugging_face
    folder = hub.describe(name, where, repository, source.revision, trust_remote_code)
    files = hub.files(name)
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        what = "holds an adapter and no model; merge it into its base model" if adapter else "has no config.json"
        raise DataError(f"{where}: {repository} {what}")
    if not weight_files(files, None):
        pickles = sorted(file for file in files if file.endswith(PICKLES))
        found = f"only pickled weights ({pickles[0]}), which can run code when loaded" if pickles else "no weights"
        raise DataError(
            f"{where}: {repository} has {found}; Dovetail loads safetensors, so name a repository or revision that has "
            "them"
        )
    config = read_json(folder / "config.json")  # loading the model reports a file that is not JSON
    if isinstance(config, dict) and "model_type" in config and (why := problem(config)) is not None:
        raise DataError(f"{where}: {repository}: {why}")
    return folder


def check_local(spec: RLHFJobSpec) -> None:
    """Check the models in folders of this machine before anything starts. Paths are absolute. Raises DataError."""
    for name in MODEL_NAMES:
        source: ModelSource | None = getattr(spec.models, name).source
        if source is not None and source.path is not None and Path(source.path).is_dir():
            check_weights(Path(source.path), f"spec.models.{name}.source.path")


def check_weights(folder: Path, field: str) -> None:
    """Raises DataError for a folder whose configuration cannot be used, or whose weights are not whole or have other
    shapes than config.json says."""
    if (why := next(folder_problems(folder), None)) is not None:
        raise DataError(f"{field}: {why}")
    tensors = {name: tensor for header in headers(folder).values() for name, tensor in header.items()}
    # The layers of an encoder of images have equal names.
    tensors = {name: tensor for name, tensor in tensors.items() if TEXT_PREFIX in name} or tensors
    try:
        shape = ModelShape.of(read_json(folder / "config.json"))
    except (ShapeError, ValueError, TypeError):
        return  # the plan says what is wrong with it
    family = MODEL_FAMILIES[shape.family]
    width = shape.embedding or shape.hidden
    outer = {f"{name}.weight": [[shape.vocabulary, width]] for name in (family.embedding, family.saved_head)}
    inner: dict[str, list[list[int]]] = {}
    for part in shape.linears:  # an MLP and the experts of all tokens have equal names
        inner.setdefault(f"{part.name}.weight", []).append([part.outputs, part.inputs])
    each = {f"{part.name}.weight" for part in shape.linears if part.share == 1}
    missing = {(layer, name) for layer in range(shape.layers) for name in each}
    for name, tensor in tensors.items():
        found = _IN_LAYER.search(name)
        short = ".".join(name.rsplit(".", 2)[-2:])
        expected = None if ".experts." in name else (outer if found is None else inner).get(short)
        if expected is not None and list(tensor["shape"]) not in expected:
            asked = " or ".join(str(tuple(size)) for size in expected)
            raise DataError(
                f"{field}: {folder}: {name} has shape {tuple(tensor['shape'])}, but config.json asks for {asked}; take "
                "the config.json that was saved with these weights"
            )
        if found is not None:
            missing.discard((int(found[1]), short))
    if (lacks := min(missing, default=None)) is not None:
        raise DataError(
            f"{field}: {folder}: the weights lack {lacks[1]} of layer {lacks[0]}, but config.json says that there are "
            f"{shape.layers} layers; copy the whole model"
        )


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
_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def _labels(folder: Path) -> int | None:
    """The number of rows of the score head in the weights, or 0 if there is no head. None if the weights are missing or
    incomplete."""
    try:
        found = headers(folder)
    except BrokenWeights:
        return None  # a hub's weights come later
    tensors = {name: tensor for header in found.values() for name, tensor in header.items()}
    return int(tensors[_SCORE]["shape"][0]) if _SCORE in tensors else 0 if tensors else None


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
