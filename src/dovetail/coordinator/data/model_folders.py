"""The sources of the job's models: checks folders and hub repositories, and writes configurations of models from
scratch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.data_error import DataError
from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.model_families.support import problem
from dovetail.manifest.types import ModelSource, ScratchModel

# Weights in safetensors and what describes them; never pickles, and no code unless asked for.
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def resolve(source: ModelSource, field: str, base_dir: Path, trust_remote_code: bool = False) -> Path:
    """The folder of a path or hub source, with safetensors weights. Raises DataError that names `field`."""
    if source.path is not None:
        folder = (base_dir / source.path).resolve()
        if not folder.is_dir():
            raise DataError(f"{field}.source.path: {folder} is not a folder")
    elif source.hugging_face is not None:
        folder = _download(source.hugging_face, source.revision, field, trust_remote_code)
    else:
        raise DataError(f"{field}.source: a volume claim (pvc) can be read only on a cluster; use path or huggingFace")
    if not (folder / "config.json").is_file():
        raise DataError(f"{field}.source: {folder} is not a Hugging Face model folder: config.json is missing")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
        found = f"only pickled weights ({pickles[0]}), which can run code when loaded" if pickles else "no weights"
        raise DataError(
            f"{field}.source: {source.path or source.hugging_face} has {found}; Dovetail loads safetensors, so save "
            "the model with save_pretrained(..., safe_serialization=True)"
        )
    config = _read(folder / "config.json")
    if isinstance(config, dict) and "model_type" in config and (why := problem(config, MODEL_FAMILIES)) is not None:
        raise DataError(f"{field}.source: {source.path or source.hugging_face}: {why}")
    return folder


def _read(path: Path) -> Any:
    """A JSON file's value; None for what is no JSON, which is told where the model is loaded."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _download(repository: str, revision: str | None, field: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    patterns = [*_PATTERNS, "*.py"] if trust_remote_code else _PATTERNS
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds: no network, no such repository, no permission
        message = " ".join(str(error).split())[:300]
        raise DataError(f"{field}.source.huggingFace: {repository} cannot be downloaded: {message}") from error
    if not any(folder.glob("*.safetensors")):
        try:
            files = HfApi().list_repo_files(repository, revision=revision)
        except Exception:
            files = []
        pickles = [f for f in files if Path(f).suffix in {Path(p).suffix for p in _PICKLES}]
        if pickles:
            raise DataError(
                f"{field}.source: {repository} has only pickled weights ({pickles[0]}), which can run code "
                "when loaded; Dovetail loads safetensors, so name a repository or revision that has them"
            )
    return folder


# Fields of all families that must be whole numbers above 0.
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
    """config.json of a model with random weights: the manifest's fields, then those that follow from the tokenizer.

    Other fields have the family's defaults when the model is loaded. (The configuration classes are not used here,
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
        # The embedding row of the pad token gets no gradient, so it must not be a token that is read.
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
