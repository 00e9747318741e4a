"""Says which configurations of models Dovetail can train, and why it cannot train others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dovetail.manifest.model_families import MODEL_FAMILIES, MODEL_TYPES, REFUSED, ModelFamily
from dovetail.manifest.model_families.family import OLD_KINDS

# The frequencies of these rotary types depend on the longest sequence of the batch. So a token's output would depend on
# the lengths of other sequences, and differ between trainer, scorer and rollout.
_ROPES = ("dynamic", "longrope", "su")
_KINDS = {"full_attention", "sliding_attention"}
# Files hold the language model of a folder that also reads images under names with this part.
TEXT_PREFIX = "language_model."
# What the configuration of such a folder may say for its language model too.
_OF_ALL = (
    *("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def family_of(config: Mapping[str, Any]) -> ModelFamily | None:
    """The family of a `config.json`: the first of its type that has its layers, or the last. None for a type that is
    not trained."""
    same = [family for family in MODEL_FAMILIES.values() if family.model_type == config.get("model_type")]
    return next((family for family in same[:-1] if _unlike(config, family) is None), same[-1] if same else None)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `config.json` of the language model, if `config` is that of a model which also reads images or sounds.
    Otherwise `config` itself."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        family = family_of(config)
        aliases = {} if family is None else family.aliases
        usual = {name: config[own] for name, own in aliases.items() if own in config}
        return {**config, **usual} if usual else config
    kind = str(inner.get("model_type"))
    if kind not in MODEL_TYPES and kind not in REFUSED:
        return config
    shared = {name: config[name] for name in _OF_ALL if config.get(name) is not None}
    if (family := family_of(inner)) is None:
        return {**shared, **inner}
    # Published ones leave out what transformers' class says itself.
    return {**family.defaults, **shared, **inner, "architectures": [family.causal_lm]}


def problem(config: Mapping[str, Any]) -> str | None:
    """The reason why a `config.json` cannot be used, and what to do. It is a clause without the model's name and
    without a full stop. None if it can be used."""
    config = text_part(config)
    kind = str(config.get("model_type"))
    family = family_of(config)
    if family is None:
        said = foreign(config) or REFUSED.get(kind)
        why = f" ({said})" if said else ""
        return f"model type {kind!r} is not supported{why}; use one of {', '.join(MODEL_TYPES)}"
    if config.get("quantization_config") is not None:
        return "quantised weights cannot be trained; use the model's original weights"
    if (rope := next((r for r in _rope_types(config) if r in _ROPES), None)) is not None:
        return f"rope type {rope!r} is not supported; use default, linear, yarn or llama3"
    if config.get("use_bidirectional_attention") in (True, "all"):  # Gemma 4's "vision" is for images
        return "attention to later tokens is not supported; set use_bidirectional_attention to false in config.json"
    if config.get("hidden_size_per_layer_input"):  # Gemma 4 E2B and E4B
        return "embeddings of each layer are not supported; use a model with hidden_size_per_layer_input 0"
    return _unlike(config, family)


def _unlike(config: Mapping[str, Any], family: ModelFamily) -> str | None:
    """The reason why the layers of a `config.json` are not those of its family, as `problem` gives it."""
    if family.kinds:
        return None
    if family.windows == "never" and _has_windows(config):
        return (
            "sliding-window attention is not supported in this family; remove sliding_window and use_sliding_window "
            "from config.json"
        )
    kinds = _KINDS | {"linear_attention"} if family.vectors else _KINDS
    if other := sorted({OLD_KINDS.get(kind, kind) for kind in config.get("layer_types") or ()} - kinds):
        return f"layers of type {other[0]!r} are not supported; use a model with {' and '.join(sorted(kinds))} only"
    if family.latent and config.get("q_lora_rank") and "q_lora_rank" not in family.sums:
        return "q_lora_rank is not supported in this family; use a model without it"
    if family.experts is None and config.get("num_local_experts"):
        return "experts are not supported in this family; use a model with num_local_experts 0"
    if family.experts is not None:
        plain: dict[str, Any] = {"expert_selection_fn": "softmax", "moe_layer_interval": 1}
        if family.experts.dense is None:
            if config.get("mlp_only_layers") or "dense" in (config.get("mlp_layer_types") or ()):
                return (
                    "layers without experts are not supported beside layers with experts in this family; use a model "
                    "with experts in all"
                )
            plain |= {"decoder_sparse_step": 1, "first_k_dense_replace": 0}
        if not family.experts.shared:
            plain["num_shared_experts"] = 0
        for name, usual in plain.items():
            if (asked := config.get(name)) not in (None, usual):
                return f"{name} {asked} is not supported in models with experts; use a model with {name} {usual}"
    return None


def replay_error(config: Mapping[str, Any]) -> str | None:
    """A sentence that says why `ppo.routingReplay` does not work with an actor of this `config.json`. None if it
    does."""
    family = family_of(config)
    if family is None or family.softmax_routers:
        return None
    return (
        f"spec.ppo.routingReplay is for models with routers like Qwen3-MoE's in all layers, and "
        f"{family.name} models have none; remove it."
    )


def served_problem(config: Mapping[str, Any], vllm_args: Sequence[str]) -> str | None:
    """The reason why a server with these arguments gives other log-probabilities than the trainers, and what to do. It
    is a clause without a full stop. None if nothing is known."""
    family = family_of(config)
    given = " ".join(vllm_args).replace("_", "-").replace("=", " ")
    if family is None or family.logit_factor != "logits_scaling" or "--model-impl transformers" not in given:
        return None
    if config.get("logits_scaling", 1) == 1:
        return None
    return (
        "vLLM's Transformers backend leaves out logits_scaling, by which this model's logits are divided; remove "
        "--model-impl from vllmArgs"
    )


def target_problem(targets: Collection[str], dropout: float, family: ModelFamily) -> str | None:
    """The reason why adapters cannot be put on the layers of these names, without a full stop. None if they can."""
    if family.kinds:
        return f"the planner does not count adapters of {family.name} models; remove lora"
    names = [*(part.name for part in family.linears), *family.of_experts]
    if dropout and (experts := set(targets) & {*family.of_experts}):
        return f"adapters of {min(experts)} have no dropout; set lora.dropout to 0"
    unknown = sorted(set(targets) - set(names))
    return f"no layer is called {unknown[0]!r}; {family.name} models have {', '.join(names)}" if unknown else None


def _has_windows(config: Mapping[str, Any]) -> bool:
    # vLLM takes the window also where transformers' class does not know the field.
    asked = config.get("use_sliding_window", True) and config.get("sliding_window")
    return bool(asked) or "sliding_attention" in (config.get("layer_types") or ())


def foreign(config: Mapping[str, Any]) -> str | None:
    """The reason why a configuration is not that of a language model of text. None if it may be."""
    if config.get("is_encoder_decoder") or config.get("is_decoder") is False:
        return "it has an encoder, and Dovetail trains decoders"
    parts = ("vision_config", "audio_config", "audio_encoder", "text_config", "vq_config", "vision_model_name")
    if any(config.get(name) is not None for name in parts):
        return "it reads more than text, and Dovetail trains models of text"
    return None


def _rope_types(config: Mapping[str, Any]) -> Iterator[str]:
    """The rotary types of all kinds of layers."""
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if isinstance(found, Mapping):
            for each in (found, *(part for part in found.values() if isinstance(part, Mapping))):
                yield str(each.get("rope_type", each.get("type", "default")))
