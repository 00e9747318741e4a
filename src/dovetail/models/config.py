"""Turns a `ModelRef` into a checked Hugging Face configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.manifest.model_families import ModelFamily
from dovetail.manifest.model_families.support import family_of, problem, text_part
from dovetail.protocol.errors import last_line
from dovetail.protocol.messages import ModelRef


class ModelError(ValueError):
    """A model folder or configuration cannot be used. The message is one sentence for the user."""


def load_config(ref: ModelRef) -> Any:
    """The checked `transformers` configuration of `ref`.

    Raises `ModelError` for a missing folder, an unsupported family or option, or a bad scratch configuration."""
    if (ref.path is None) == (ref.scratch is None):
        raise ModelError("a model needs exactly one of a folder and a scratch configuration")
    config = _from_folder(Path(ref.path), ref.trust_remote_code) if ref.path else _from_scratch(ref)
    check_config(config, ref.path or "the scratch model")
    return config


def check_config(config: Any, where: str) -> None:
    """Raise `ModelError` if stages cannot compute the model (`dovetail.manifest.model_families.support`). `where` names
    the model in the message."""
    if (why := problem(config.to_dict())) is not None:
        raise ModelError(f"{where}: {why}")


def without_dropout(config: Any) -> Any:
    """A copy of the configuration whose rates of dropout and of noise in routers are 0. Policy ratios compare two
    passes over the same tokens, so these passes must agree."""
    copy = type(config).from_dict(config.to_dict())
    for name, rate in copy.to_dict().items():
        if isinstance(rate, float) and name.endswith(("dropout", "drop", "dropout_prob", "jitter_noise")):
            setattr(copy, name, 0.0)
    return copy


def family_facts(config: Any) -> ModelFamily:
    """The facts about the family of a transformers configuration. Raises ModelError if its type is not trained."""
    if (found := family_of(config.to_dict())) is None:
        raise ModelError(f"model type {config.model_type!r} is not supported")
    return found


def is_tied(config: Any) -> bool:
    """Whether the vocabulary projection is the input embedding's weight."""
    return bool(getattr(config, "tie_word_embeddings", False))


def balance_coefficient(config: Any, asked: float | None) -> float:
    """The factor of the load-balancing loss. It is 0 for models without experts whose weights are a softmax.

    `asked` is the manifest's value. If it is None, the model's configuration decides. With `output_router_logits` the
    factor is its `router_aux_loss_coef`. Otherwise it is 0."""
    if not family_facts(config).softmax_routers:
        return 0.0
    if asked is not None:
        return asked
    return float(config.router_aux_loss_coef) if getattr(config, "output_router_logits", False) else 0.0


def _from_folder(path: Path, trust_remote_code: bool) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if not path.is_dir():
        raise ModelError(f"{path}: no such model folder")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: not a Hugging Face model folder: config.json is missing")
    try:
        stated = json.loads((path / "config.json").read_text())
        why, text = problem(stated), text_part(stated)
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path}/config.json: not valid JSON: {error}") from error
    if why is not None:
        raise ModelError(f"{path}: {why}")
    try:
        if text is not stated:
            config: Any = CONFIG_MAPPING[text["model_type"]].from_dict(dict(text))
            config.name_or_path = str(path)
            return config
        return AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the user's values make configuration classes raise many kinds of errors
        raise ModelError(f"{path}/config.json: transformers cannot read it: {last_line(error)}") from error


def _from_scratch(ref: ModelRef) -> Any:
    from transformers import AutoConfig

    assert ref.scratch is not None
    fields = dict(ref.scratch.config)
    if ref.tokenizer is not None:
        fields = {**_tokenizer_fields(Path(ref.tokenizer), ref.trust_remote_code), **fields}
    elif "vocab_size" not in fields:
        raise ModelError("a scratch model needs a tokenizer folder or vocab_size in its configuration")
    try:
        return AutoConfig.for_model(ref.scratch.architecture, **fields)
    except Exception as error:  # the user's values make configuration classes raise many kinds of errors
        raise ModelError(f"scratch configuration of {ref.scratch.architecture}: {last_line(error)}") from error


def _tokenizer_fields(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ModelError(f"{folder}: no such tokenizer folder")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    eos, bos, pad = tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": bos,
        "eos_token_id": eos,
        # The embedding's row of `pad_token_id` gets no gradient, so it must not be a token that the model reads.
        "pad_token_id": None if pad in (eos, bos) else pad,
    }
