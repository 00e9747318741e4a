"""Writes the files of a trained model's folder that describe its use: generation_config.json, a chat template and
README.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.prepare import Prepared
from dovetail.coordinator.data.text.chat_template import human_assistant_template
from dovetail.coordinator.reporting.model_card import LANGUAGE_MODELS, CardFacts, ListSize, model_card, source_name
from dovetail.coordinator.store.delivery import trained
from dovetail.manifest.fixed_names import DATA_KINDS
from dovetail.manifest.training_types import Generation
from dovetail.protocol.files.durable import read_object, write_json, write_whole

GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# These settings are copied from the base model. The manifest says how samples are drawn.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "suppress_tokens")


def generation_config(base: Mapping[str, Any], generation: Generation, eos: int, pad: int | None) -> dict[str, Any]:
    """The generation_config.json of a model that was trained with these sampling settings. `base` is the same file of
    the model from which the training began. The result has its end tokens and the tokenizer's `eos`."""
    config = {name: base[name] for name in _KEPT if base.get(name) is not None}
    ends = config.get("eos_token_id", [])
    every = list(dict.fromkeys([eos, *(ends if isinstance(ends, list) else [ends])]))
    config["eos_token_id"] = every[0] if len(every) == 1 else every
    if pad is not None:
        config["pad_token_id"] = pad
    # The value 0 turns top_k off. Without it transformers would use 50.
    sampling = {"do_sample": True, "temperature": generation.temperature, "top_p": generation.top_p}
    return config | sampling | {"top_k": generation.top_k}


def list_sizes(prepared: Prepared) -> list[ListSize]:
    """The number of records that the job takes from each source."""
    found = []
    for name in DATA_KINDS:
        data, sources = getattr(prepared.data, name), getattr(prepared.spec.data, name)
        for source, part in zip(sources, data.parts if data is not None else [], strict=False):
            found.append(ListSize(name, source_name(source), len(part.train), len(part.held_out)))
    return found


def describe_models(models: Path, facts: CardFacts, tokenizer: Any) -> None:
    """Complete every whole model in the folder `models`. Files of an earlier end of the run are replaced. Raises
    OSError."""
    for name in trained(models):
        describe_model(models / name, name, models / "actor-config", facts, tokenizer)


def describe_model(folder: Path, name: str, base: Path, facts: CardFacts, tokenizer: Any) -> None:
    """Complete the folder of the model `name`. The folder `base` has the settings of the model from which the training
    began. Raises OSError."""
    own = bool(getattr(tokenizer, "chat_template", None))
    if name in LANGUAGE_MODELS:
        ids = tokenizer.eos_token_id, tokenizer.pad_token_id
        config = generation_config(read_object(base / GENERATION_CONFIG), facts.spec.generation, *ids)
        write_json(folder / GENERATION_CONFIG, config)
        if not own:
            write_whole(folder / CHAT_TEMPLATE, human_assistant_template(tokenizer).encode())
    step = read_object(folder / "dovetail.json").get("step")
    bias = read_object(folder / "config.json").get("score_bias") or 0.0
    card = model_card(facts, name, step if isinstance(step, int) else None, own, bias)
    write_whole(folder / "README.md", card.encode())
