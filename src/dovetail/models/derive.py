"""Derives the facts about a family (`dovetail.manifest.model_families`) from transformers' own configuration and model
classes. The models are built on the meta device from small copies of a configuration.

`make families` writes the facts of all types that pass the proof into the table, because the operator and the planner
read them without torch."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from dovetail.manifest.model_families import MODEL_FAMILIES, Experts, Kind, LinearPart, ModelFamily
from dovetail.manifest.model_families.family import (
    EXPERT_MATRICES,
    Layers,
    Width,
    fields_of,
    layers_at,
    saved_as,
    width_of,
)
from dovetail.models.config import ModelError
from dovetail.protocol.errors import last_line

# Sizes of which no two are equal, so that a width says which field it comes from.
_SIZES = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "ffn_dim": 216,
    "moe_intermediate_size": 56,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 20,
    "word_embed_proj_dim": 88,
    "vocab_size": 104,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    **dict.fromkeys(("n_routed_experts", "moe_num_experts"), 4),
    "shared_expert_intermediate_size": 72,
    "shared_intermediate_size": 232,
    "q_lora_rank": 36,
    "kv_lora_rank": 44,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 11,
    "linear_value_head_dim": 17,
    "linear_conv_kernel_dim": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "sliding_window": 8,
}
# The fields with the number of experts that every token gets.
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# The fields that say which layers have experts (`ModelFamily.dense_layers`).
_PATTERN = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "decoder_sparse_step")
_COUNTS = {
    "count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "chosen": ("num_experts_per_tok", "moe_k"),
}
_INNER = ("intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_intermediate_size")
_LAYERS = 12
# Fields of published models where the defaults of transformers' class are those of another kind. Granite 4 without
# Mamba's layers and experts is one family, and granite-4.0-h-tiny shows the other. So do DeepSeek-V2-Lite and V2.
_LITE = {"q_lora_rank": None, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_intermediate_size": 1408}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "sliding_window": None}
    | {"first_k_dense_replace": 1, "norm_topk_prob": True, "num_key_value_heads": 32},
    "deepseek_v2": _LITE,
    "deepseek_v2+q_lora": {**_LITE, "q_lora_rank": 1536},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8, "num_key_value_heads": 8},
    "lfm2": {
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "layer_types": (["conv", "conv", "full_attention"] * 3 + ["conv", "full_attention"] * 4)[:16],
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "granitemoeshared": {"shared_intermediate_size": 1024},
    "laguna": {"layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 10},
    "mellum": {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 7},
    "granitemoehybrid": {
        "layer_types": ["full_attention"] * 32,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "granitemoehybrid+mamba": {
        "layer_types": (["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 4) * 4,
        "num_hidden_layers": 40,
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "intermediate_size": 512,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "tie_word_embeddings": True,
        "vocab_size": 100352,
    },
}
# What transformers says nowhere.
_ONLY_KNOWN: dict[str, dict[str, Any]] = {
    # The names of the fields that only this family had in Transformers 4.
    "gpt_neox": {
        "rotary_fields": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        "saved_head": "embed_out",
    },
    # These experts are not saved one by one, and their weights are a softmax over the chosen ones.
    "gpt_oss": {"experts": Experts(inner="intermediate_size", router="mlp.router", over_chosen=True, bias=True)},
    # What vLLM's classes read beside transformers' fields.
    "afmoe": {"served": ("score_func", "route_norm", "n_group", "topk_group")},
    "deepseek_v3": {"served": ("topk_method",)},
    "glm4_moe": {"served": ("head_dim",)},
    "glm4_moe_lite": {"served": ("first_k_dense_replace",)},
    "hy_v3": {"served": ("expert_hidden_dim", "route_norm", "first_k_dense_replace")},
    "minimax_m2": {"served": ("rotary_dim", "scoring_func")},
}


def usual_config(kind: str, **fields: Any) -> Any:
    """transformers' configuration of a family, as models of it are published, with other `fields`."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind.partition("+")[0]](**{**_PUBLISHED.get(kind, {}), **fields})


def resized(config: Any, layers: int, **sizes: Any) -> Any:
    """A copy of `config` with the first `layers` layers and other sizes. It has only the sizes that `config` has
    itself, and keeps the pattern of the layers."""
    known, aliases = config.to_dict(), own_names(config)
    count = aliases.get("num_hidden_layers", "num_hidden_layers")
    before = known.get(count) or len(known.get("layers_block_type") or ())
    if not before:
        raise ModelError("its config.json has no num_hidden_layers, from which Dovetail takes the number of layers")
    sizes = {**{aliases[name]: size for name, size in sizes.items() if name in aliases}, **sizes}
    # No experts stay no experts, and queries that are made of no latent state stay so.
    has = {name for name, value in known.items() if value is False or value != 0}
    has -= set() if known.get("q_lora_rank") else {"q_lora_rank"}
    fields = {**known, **{name: value for name, value in sizes.items() if name in has}}
    fields |= {count: layers} if count in known else {}
    if known.get("head_dim") and known["head_dim"] == known.get("qk_rope_head_dim"):  # the part with rotary positions
        fields["head_dim"] = fields["qk_rope_head_dim"]
    if "mamba_d_head" in known:  # its heads must fill a multiple of the hidden states
        fields |= {"mamba_n_heads": 8, "mamba_d_head": "auto"}
    if set(known.get("num_attention_heads_per_layer") or ()) == {known.get("num_attention_heads")}:
        del fields["num_attention_heads_per_layer"]
    if "num_heads" in known and "expand" in known:  # Mamba 2's heads too
        fields |= {"head_dim": 16, "n_groups": 2, "num_heads": known["expand"] * fields["hidden_size"] // 16}
    if known.get("num_experts_per_tok") == 1:
        fields["num_experts_per_tok"] = 1
    if "time_step_limit" in known:  # transformers does not read the infinity that it writes
        fields["time_step_limit"] = [0.0, 1e9]
    if overrides := known.get("per_layer_config"):  # Gemma 4's, which its class makes again from these
        del fields["per_layer_config"]
        each = next(iter(overrides.values()))
        fields["global_head_dim"] = each["head_dim"] * fields["head_dim"] // known["head_dim"]
    for name, value in known.items():  # one entry for each layer
        if name in fields and isinstance(value, list) and len(value) == before and _by_layer(name):
            fields[name] = (value * (layers // before + 1))[:layers]
    return type(config).from_dict(fields)


def own_names(config: Any) -> dict[str, str]:
    """The names of a configuration's fields, by transformers' usual ones, where they differ."""
    known = config.to_dict()
    return {usual: own for usual, own in type(config).attribute_map.items() if own in known and usual not in known}


def _by_layer(name: str) -> bool:
    return any(part in name for part in ("layer", "block", "pattern"))


def whole_model(config: Any, **options: Any) -> Any:
    """transformers' language model of a configuration, on the meta device. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    except Exception as error:  # configurations of users make the classes raise many kinds of errors
        raise ModelError(f"transformers cannot build the model: {last_line(error)}") from error


def derive_family(kind: str, forward: Literal["layers", "body", "own"] = "layers") -> ModelFamily:
    """The facts about the family `kind` (`ModelFamily.name`), if `forward` computes it, except what autograd keeps
    (`kept`), which must be measured, and `packs`, which must be proved. Raises ModelError if stages cannot compute such
    a model."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    plain = usual_config(kind)  # what the class itself says of fields that a configuration leaves out
    known = plain.to_dict()
    # With latent keys each head has its own.
    sizes = _SIZES | ({"num_key_value_heads": 8} if known.get("kv_lora_rank") else {})
    sizes |= {name: 3 for name in _SHARED if known.get(name)} if forward == "layers" else {}
    small = resized(plain, _LAYERS, **sizes)
    try:
        whole = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    except Exception as error:  # configurations that have lost a field in the copy
        raise ModelError(f"transformers cannot build the model: {last_line(error)}") from error
    lists = [(n, m) for n, m in whole.named_modules() if isinstance(m, nn.ModuleList) and len(m) == _LAYERS]
    if not lists:
        raise ModelError(f"{kind} models do not keep their layers in one list")
    (path, _, name), layers = lists[0][0].rpartition("."), lists[0][1]
    body = whole.get_submodule(path)
    called: list[str] = []
    tuples: set[int] = set()
    parts = {n: m for n, m in body.named_children() if n != name and (_is_norm(m) or any(True for _ in m.parameters()))}
    for part in (*parts, f"{name}.0"):
        body.get_submodule(part).register_forward_hook(lambda *_, part=part: called.append(part))
    layers[0].register_forward_hook(lambda _layer, _given, found: tuples.add(len(found) * isinstance(found, tuple)))
    for each in layers if forward == "layers" else ():  # which cannot compute sizes of which no two are equal
        each.forward = lambda hidden_states, *_, **__: hidden_states
    with torch.no_grad():
        whole(torch.arange(3, 9)[None], use_cache=False)
    at = called.index(f"{name}.0")
    embedding = next((n for n in called[:at] if parts[n] is whole.get_input_embeddings()), None)
    if embedding is None:
        raise ModelError(f"{kind} models have no plain token embedding beside their layers")
    entry = tuple(n for n in dict.fromkeys(called[:at]) if n != embedding)
    exits = tuple(dict.fromkeys(called[at + 1 :]))
    head_name, head = next((n, m) for n, m in whole.named_modules() if m is whole.get_output_embeddings())
    if head.bias is not None:
        raise ModelError(f"the vocabulary projection of {kind} models has a bias, which stages do not compute")
    saved = {n: t for each in layers for n, t in each.state_dict().items()}
    buffers = {n for each in layers for n, t in each.named_buffers() if t.numel() > 1}
    # Those that files do not hold are made again with transformers' body.
    if odd := sorted(n for n in buffers if not n.endswith("bias") and (n in saved or forward == "layers")):
        raise ModelError(f"the layers of {kind} models hold {odd[0]} beside their weights, which stages do not restore")
    norm = next((parts[n] for n in exits if _is_norm(parts[n])), nn.Identity())
    constants = {n for each in layers for n, p in each.named_parameters() if not p.requires_grad}
    constants |= {n for each in layers for n, _ in each.named_buffers() if n in saved}
    renamed, told = _renamed(plain.model_type), told_fields(plain)
    found = CLASSES[plain.model_type]
    classes = found.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    other = CLASSIFIERS.get(plain.model_type, "").removesuffix("ForSequenceClassification")
    facts: dict[str, Any] = {
        "name": kind,
        "classes": classes,
        "classifier_classes": None if other in ("", classes) else other,
        "lm_class": None if found == f"{classes}ForCausalLM" else found,
        "tied": bool(getattr(plain, "tie_word_embeddings", False)),
        "grouped": "num_key_value_heads" in told,
        "body": path,
        "embedding": embedding,
        "entry": entry,
        "exits": exits,
        "norm_vectors": len(list(norm.parameters())),
        "learnt_positions": any(isinstance(parts[n], nn.Embedding) for n in entry),
        "saved_head": head_name,
        "renamed": renamed,
        "matrices": _matrices(plain.model_type),
        "constants": tuple(sorted({saved_as(renamed, n).rpartition(".")[2] for n in constants})),
        "norm_offset": _adds_one(norm),
        "softcap": next((n for n in ("final_logit_softcapping",) if n in known), None),
        "logit_factor": next((n for n in ("logit_scale", "logits_scaling", "lm_head_multiplier") if n in known), None),
        # Single numbers begin as those of transformers. Scratch models get zeros for biases.
        "single": {n: round(float(saved[n]), 7) for n in sorted(saved) if saved[n].numel() == 1},
    }
    if forward != "layers":
        return ModelFamily(
            **facts | _of_body(plain, small, lists[0][0], max(tuples), forward) | _ONLY_KNOWN.get(kind, {})
        )
    if name != "layers" or (odd := sorted({*entry, *exits} - {n for n in parts if _is_norm(parts[n])} - _ENDS)):
        what = f"a part {odd[0]!r} beside their layers" if name == "layers" else f"layers in {name!r}"
        raise ModelError(f"{kind} models have {what}, which stages do not compute")
    own = _of_layers(kind, plain, small, layers, path, facts["learnt_positions"])
    return ModelFamily(**facts | _ONLY_KNOWN.get(kind, {}) | own)


# The parts of OPT's body, besides embedding and norms, that stages compute.
_ENDS = {"embed_positions", "project_in", "project_out"}


def _of_layers(kind: str, plain: Any, small: Any, layers: Any, path: str, learnt: bool) -> dict[str, Any]:
    """The facts about a family whose layers stages call themselves."""
    known = plain.to_dict()
    layer, plain_layer, linear_layer = _kinds(layers, small)
    experts = _experts(layer, small, plain.model_type)
    linears, inner, experts = _linears(plain, path, (layer, plain_layer, linear_layer), small, experts)
    vectors = {} if linear_layer is None else _vectors(linear_layer, layer, small)
    kept_as_is = [n for n in ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window") if n in known]
    doubled = usual_config(kind, num_attention_heads=2 * plain.num_attention_heads)
    fixed = {n: known[n] for n in kept_as_is if known[n] is not None and getattr(doubled, n) == known[n]}
    sizes = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", inner]
    if experts is not None:
        sizes += [experts.chosen, next(n for n in experts.count if n in known)]
        sizes += [n for n in (experts.dense, *experts.shared, *(_PATTERN if experts.dense else ())) if n in known]
    windows = _windows(small, layers)
    sizes += ["max_position_embeddings"] * learnt + [n for n in ("num_key_value_heads",) if n in fixed]
    sizes += ["sliding_window"] * (windows != "never" and known.get("sliding_window") is not None)
    sizes += [
        n for n in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim") if n in known
    ]
    sizes += sorted({p.bias for p in linears if known.get(p.bias) is True})
    sizes += sorted({n for w in vectors.values() for product in w.split("+") for n in product.split("*")})
    heads = {n.rpartition(".")[2]: m for n, m in layer.named_modules() if _is_norm(m) and "." in n}
    widths: dict[int, Width] = {small.hidden_size: "hidden", **_head_widths(small), **_sums(small)}
    widths |= {getattr(small, inner): "inner"}
    defaults = {name: known[name] for name in sizes}
    if plain_layer is not None and not set(_PATTERN) & set(known):  # their mlp_layer_types say it
        defaults["first_k_dense_replace"] = plain.mlp_layer_types.count("dense")
    if vectors:
        defaults["full_attention_interval"] = plain.layer_types.index("full_attention") + 1
    return {
        "defaults": defaults,
        "linears": linears,
        "inner_field": inner,
        "embedding_field": "word_embed_proj_dim" if "word_embed_proj_dim" in known else None,
        "head_dim": fixed.get("head_dim"),
        "head_norms": {n: widths[m.weight.numel()] for n, m in heads.items() if list(m.parameters())},
        "norms": sum(_is_norm(m) for _, m in layer.named_children()),
        "windows": windows,
        "embedding_factor": "embedding_multiplier" if "embedding_multiplier" in known else None,
        "sinks": any(n.endswith("sinks") for n, _ in layer.named_parameters()),
        "vectors": vectors,
        "bounded_scores": known.get("attn_logit_softcapping") is not None,
        "experts": experts,
    }


def _of_body(plain: Any, small: Any, path: str, tuples: int, forward: str) -> dict[str, Any]:
    """The facts about a family of which transformers' body computes a stage, with its layers at `path`."""
    kinds, pattern = _counted_kinds(plain, small, path)
    told = told_fields(plain)
    used = {n for kind in kinds for n in fields_of(f"{kind.parameters}+{kind.multiplied}+{kind.through}")}
    keys = "kv_lora_rank+qk_rope_head_dim" if told.get("kv_lora_rank") else ""
    used |= {"hidden_size", "num_hidden_layers", "vocab_size", *(fields_of(keys) if keys else ())}
    used |= {n for n in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings") if told.get(n)}
    return {
        "defaults": {n: told[n] for n in sorted(used) if told.get(n)},
        "linears": (),
        "inner_field": "hidden_size",
        "forward": forward,
        "layers": path.rpartition(".")[2],
        "tuples": tuples,
        "kinds": kinds,
        "pattern": pattern,
        "aliases": own_names(plain),
        "keys": keys,
    }


def _counted_kinds(plain: Any, small: Any, path: str) -> tuple[tuple[Kind, ...], tuple[str, ...]]:
    """The kinds of layers of a model, and the fields that say which layer is of which kind."""
    layers: Any = whole_model(small).get_submodule(path)
    parts = [_parts(layer) for layer in layers]
    first = [number for number, each in enumerate(parts) if each not in parts[:number]]  # a layer of each kind
    unlike = [parts[number] for number in first]
    of = [unlike.index(each) for each in parts]
    known = {n: v for n, v in small.to_dict().items() if _by_layer(n) and isinstance(v, list) and len(v) == len(of)}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if isinstance(value := getattr(small, name, None), list) and len(value) == len(of) and name not in known:
            known[name] = value
    told = small.to_dict() | known | {"num_hidden_layers": len(of)}
    fields = sorted([*known, *(n for n in _PATTERN if isinstance(told.get(n), int))])
    pattern: tuple[str, ...] = ()
    for names in (*itertools.combinations(fields, 1), *itertools.combinations(fields, 2)):
        at = layers_at(told, names)
        if len(first) > 1 and len(set(zip(at, of, strict=True))) == len(set(at)):
            pattern = names
            break
    at = layers_at(told, pattern)
    # The published pattern, of all layers.
    published: Any = whole_model(resized(plain, plain.num_hidden_layers, **_SIZES)).get_submodule(path)
    every = [next((k for k, each in enumerate(unlike) if each == _parts(layer)), 0) for layer in published]
    widths = _Widths(small, path, first)
    return tuple(
        Kind(
            at=tuple(sorted({a for a, o in zip(at, of, strict=True) if o == k})) if pattern else (),
            share=round(every.count(k) / len(every), 4),
            parameters=widths.of(k, "parameters"),
            multiplied=widths.of(k, "multiplied"),
            through=widths.of(k, "through"),
            attends=any(_attends(m) for m in layers[number].modules()),
        )
        for k, number in enumerate(first)
    ), pattern


def _parts(layer: nn.Module) -> list[Any]:
    """What tells kinds of layers apart."""
    found: list[Any] = [(name, type(part)) for name, part in layer.named_modules()]
    return found + [(name, tensor.shape) for name, tensor in layer.named_parameters()]


def _attends(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name and not any(part in name for part in ("linear", "lightning", "delta"))


def _fields(config: Any) -> dict[str, Any]:
    """A configuration's fields, with that of Gemma 4's wider heads, which its class keeps for each layer."""
    known: dict[str, Any] = config.to_dict()
    for each in (known.pop("per_layer_config", None) or {}).values():
        known["global_head_dim"] = each["head_dim"]
    return known


def told_fields(config: Any) -> dict[str, Any]:
    """A configuration's fields, also by transformers' usual names."""
    known = _fields(config)
    known.setdefault("num_hidden_layers", config.num_hidden_layers)
    return {**known, **{usual: known[own] for usual, own in own_names(config).items()}}


def _matrices(kind: str) -> dict[str, tuple[str, ...]]:
    """The names of one expert's matrices in files, by the name of transformers' parameter for all experts."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    found = {}
    for change in get_checkpoint_conversion_mapping(kind) or ():
        sources, target = change.source_patterns, change.target_patterns[0]
        if any("experts.*." in each for each in sources):
            found[target.rpartition("experts.")[2]] = tuple(each.rpartition("experts.*.")[2] for each in sources)
    return found


class _Widths:
    """Finds sums of products of fields that give the sizes of layers. `config` is a small copy with its layers at
    `path`. Layers of `numbers` are looked at. What a field does to a size is seen where only this field is another
    one, or two where one alone builds no model."""

    def __init__(self, config: Any, path: str, numbers: list[int]) -> None:
        self.config, self.path, self.numbers = config, path, numbers
        known = _fields(config)
        count = own_names(config).get("num_hidden_layers", "num_hidden_layers")
        self.own = {own: usual for usual, own in own_names(config).items()}
        skipped = (count, "vocab_size", "max_position_embeddings", "n_positions", "sliding_window")
        whole = {n: v for n, v in known.items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}
        whole = {n: v for n, v in whole.items() if n not in skipped and not n.endswith(("_id", "_idx", "_ids"))}
        self.builds = [(whole, self._sizes({}))]
        alone = [name for name in whole if self._try({name: 2 * whole[name]}, whole)]
        self.bound = [name for name in whole if name not in alone]
        for name in self.bound:
            others = (other for other in (*self.bound, *alone) if other != name)
            next((o for o in others if self._try({name: 2 * whole[name], o: 2 * whole[o]}, whole)), None)
        self.columns = {name: tuple(fields[name] for fields, _ in self.builds) for name in whole}
        if not known.get("head_dim"):
            hidden, number = (
                self.columns.get(own_names(config).get(n, n)) for n in ("hidden_size", "num_attention_heads")
            )
            if hidden and number:
                self.columns["head_dim"] = tuple(h // n for h, n in zip(hidden, number, strict=True))
        self.found: dict[tuple[int, ...], Counter[tuple[str, ...]]] = {}

    def _try(self, fields: dict[str, int], whole: dict[str, int]) -> bool:
        with suppress(Exception):  # sizes that do not go together make the classes raise many kinds of errors
            sizes = self._sizes(fields)
            if [set(each) for each in sizes] == [set(each) for each in self.builds[0][1]]:
                self.builds.append(({**whole, **fields}, sizes))
                return True
        return False

    def _sizes(self, fields: dict[str, int]) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of the parameters of each kind of layer."""
        config = type(self.config).from_dict({**_fields(self.config), **fields})
        layers: Any = whole_model(config).get_submodule(self.path)
        return [{n: tuple(p.shape) for n, p in layers[k].named_parameters()} for k in self.numbers]

    def of(self, kind: int, what: Literal["parameters", "multiplied", "through"]) -> Width:
        total: Counter[tuple[str, ...]] = Counter()
        for name, shape in self.builds[0][1][kind].items():
            dims = [self._size(kind, name, axis) for axis in range(len(shape))]
            if what != "parameters":
                if len(shape) < 2:
                    continue
                if len(shape) == 3:  # of all experts, of which a token gets some
                    dims[0] = self._chosen(dims[0])
            if what == "through":
                first = dims[0] if len(shape) == 3 else _ONE
                for dim in dims[-2:]:
                    total += _product([first, dim])
            else:
                total += _product(dims)
        return "+".join(
            "*".join([*([str(count)] if count > 1 or not names else []), *(self.own.get(n, n) for n in names)])
            for names, count in sorted(total.items())
        )

    def _chosen(self, count: Counter[tuple[str, ...]]) -> Counter[tuple[str, ...]]:
        names = {own_names(self.config).get(n, n) for n in (*_COUNTS["chosen"], "moe_topk", "num_experts_per_token")}
        chosen = next((n for n in sorted(names) if n in self.columns), None)
        experts = {own_names(self.config).get(n, n) for n in _COUNTS["count"]}
        is_count = chosen is not None and len(count) == 1 and set(next(iter(count))) & experts
        return Counter({(chosen,): 1}) if is_count and chosen else count

    def _size(self, kind: int, name: str, axis: int) -> Counter[tuple[str, ...]]:
        values = tuple(sizes[kind][name][axis] for _, sizes in self.builds)
        if values not in self.found:
            self.found[values] = self._search(values, f"{name} ({values[0]})")
        return self.found[values]

    def _search(self, values: tuple[int, ...], what: str) -> Counter[tuple[str, ...]]:
        if len(set(values)) == 1:
            return Counter({(): values[0]})
        names = [name for name in self.columns if self._matters(name, values)]
        terms: dict[tuple[int, ...], Counter[tuple[str, ...]]] = {}
        products = [p for n in (1, 2, 3) for p in itertools.combinations(names, n)]
        for product, count in itertools.product([(), *products], (1, 2, 3, 4)):
            column = tuple(count * math.prod(row) for row in zip(*(self.columns[n] for n in product), strict=True))
            terms.setdefault(column or (count,) * len(values), Counter({product: count}))
        if values in terms:
            return terms[values]
        for one, first in terms.items():
            if (rest := tuple(a - b for a, b in zip(values, one, strict=True))) in terms:
                return first + terms[rest]
        for (one, first), (two, second) in itertools.combinations(terms.items(), 2):
            if (rest := tuple(a - b - c for a, b, c in zip(values, one, two, strict=True))) in terms:
                return first + second + terms[rest]
        raise ModelError(f"its config.json does not say the size of {what} in a way that Dovetail finds")

    def _matters(self, name: str, values: tuple[int, ...]) -> bool:
        """Whether a size may depend on a field."""
        column = self.columns[name]
        return any(a != column[0] and b != values[0] for a, b in zip(column, values, strict=True))


_ONE: Counter[tuple[str, ...]] = Counter({(): 1})


def _product(dims: list[Counter[tuple[str, ...]]]) -> Counter[tuple[str, ...]]:
    total = _ONE
    for dim in dims:
        more: Counter[tuple[str, ...]] = Counter()
        for (left, a), (right, b) in itertools.product(total.items(), dim.items()):
            more[tuple(sorted((*left, *right)))] += a * b
        total = more
    return total


def _kinds(layers: Any, config: Any) -> tuple[Any, Any, Any]:
    """A layer of each kind: the usual one, which has experts if some have them; one with an MLP in their place; and one
    with linear attention. None for a kind that the model does not have."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    linear = [layer for layer, type_ in zip(layers, types, strict=True) if type_ == "linear_attention"]
    others = [layer for layer in layers if layer not in linear]
    sparse = [layer for layer in others if any(hasattr(part, "has_gate") for part in layer.modules())]
    dense = [layer for layer in others if layer not in sparse]

    alike = all(_parts(layer) == _parts(group[0]) for group in (sparse, dense, linear) for layer in group)
    if not alike or not others or (linear and sparse and dense):
        kind = config.model_type
        raise ModelError(f"the layers of {kind} models have different parts, which Dovetail does not know yet")
    usual, beside = (sparse[0], dense[0] if dense else None) if sparse else (dense[0], None)
    return usual, beside, linear[0] if linear else None


def _renamed(kind: str) -> dict[str, str]:
    """`ModelFamily.renamed`."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    changes = [c for c in get_checkpoint_conversion_mapping(kind) or () if type(c).__name__ == "WeightRenaming"]
    return {c.target_patterns[0].replace("\\", ""): c.source_patterns[0].replace("\\", "") for c in changes}


def _is_norm(module: nn.Module | None) -> bool:
    return module is not None and "norm" in type(module).__name__.lower()


def _adds_one(norm: Any) -> bool:
    """Whether a norm adds 1 to its weight: whether it gives anything with a weight of 0."""
    real = copy.deepcopy(norm).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in real.parameters():
            parameter.zero_()
        return bool(list(real.parameters())) and bool(real(torch.ones(1, 1, len(real.weight))).any())


def _experts(layer: nn.Module, config: Any, kind: str) -> Experts | None:
    found = [(name, module) for name, module in layer.named_modules() if hasattr(module, "has_gate")]
    if not found:
        return None
    if (known := _ONLY_KNOWN.get(kind, {}).get("experts")) is not None:
        return known  # type: ignore[no-any-return]
    matrices = _matrices(kind)
    lengths = {name: len(parts) for name, parts in EXPERT_MATRICES.items()}
    block = found[0][0].rpartition(".")[0]
    parts = {name for name, _ in layer.get_submodule(block).named_children()}
    alike = {name: len(each) for name, each in matrices.items()} == lengths and all(map(all, matrices.values()))
    router = next((name for name in ("gate", "router") if name in parts), None)
    beside = [n for n, m in layer.get_submodule(block).named_children() if not (n.startswith("shared_") or _is_norm(m))]
    names = {n: tuple(each for each in _COUNTS[n] if each in config.to_dict()) for n in _COUNTS}
    # Files may hold all experts of a layer together, as transformers does.
    alike |= not matrices and set(dict(found[0][1].named_parameters())) == set(lengths)
    if len(found) > 1 or set(beside) != {"experts", router} or not alike or not all(names.values()):
        raise ModelError(f"experts of {kind} models are not those of Qwen3, whose names and routers Dovetail knows")
    known = config.to_dict()
    inner = "moe_intermediate_size" if "moe_intermediate_size" in known else "intermediate_size"
    part = layer.get_submodule(f"{block}.{router}")
    # Routers that have no choice of it make the weights of the chosen experts add up to 1.
    over_chosen, softmax = not hasattr(part, "norm_topk_prob"), _is_softmax(part, config)
    usual = Experts()
    count = usual.count if set(names["count"]) & set(usual.count) else names["count"]
    return Experts(
        *(count, names["chosen"][0], inner),
        router=f"{block}.{router}",
        over_chosen=over_chosen and softmax,
        softmax=softmax,
    )


def _is_softmax(router: nn.Module, config: Any) -> bool:
    """Whether a router, which gives (logits, weights, chosen experts), weighs the experts by a softmax."""
    real: Any = copy.deepcopy(router).to_empty(device="cpu")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*real.parameters(), *real.buffers()):
            tensor.normal_(generator=draw)
        try:
            logits, weights, chosen = real(torch.randn(7, config.hidden_size, generator=draw))
            found = logits.float().softmax(-1).gather(1, chosen)
        except Exception:  # of routers that take or give something else
            return False
    norm = getattr(real, "norm_topk_prob", True)
    found = found / found.sum(-1, keepdim=True) if norm else found
    return bool(torch.allclose(weights, found, atol=1e-5))


def _vectors(linear: nn.Module, usual: nn.Module, config: Any) -> dict[str, Width]:
    """`ModelFamily.vectors`, of a layer with linear attention and a usual one."""
    widths, found = _sums(config), {}
    for name, parameter in linear.named_parameters():
        owner = linear.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Linear) or name in dict(usual.named_parameters()):
            continue
        if (width := widths.get(parameter.numel())) is None:
            raise ModelError(
                f"{config.model_type} models have a parameter {name} of a size that Dovetail does not know"
            )
        found[name] = width
    return found


def _head_widths(config: Any) -> dict[int, Width]:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", config.num_attention_heads)
    queries = config.num_attention_heads
    return {size: "head", keys * size: "keys", queries * size: "queries"}


def _linears(
    plain: Any, path: str, kinds: tuple[Any, Any, Any], config: Any, experts: Experts | None
) -> tuple[tuple[LinearPart, ...], str, Experts | None]:
    """The linear layers of a decoder layer, in the order of use, the field of the MLP's inner width, and the experts
    with the widths of the MLPs beside them. `kinds`: see `_kinds`."""
    layer, dense, linear = kinds
    found: list[tuple[str, nn.Linear, Layers]] = []
    both = {} if linear is None else dict(linear.named_modules())
    for name, module in both.items():
        if isinstance(module, nn.Linear) and name not in dict(layer.named_modules()):
            found.append((name, module, "linear"))
    for each, layers in ((layer, "sparse"), (dense or nn.Module(), "dense")):
        for name, module in each.named_modules():
            beside = experts is not None and name.startswith(experts.router.rpartition(".")[0] + ".")
            router = experts is not None and f"{name}.".startswith(f"{experts.router}.")
            if isinstance(module, nn.Linear) and not router and (beside or each is layer):
                usual = "full" if both and name not in both else "all"
                found.append((name, module, layers if beside else usual))  # type: ignore[arg-type]
    biases = dict(_biases(plain, path))
    plan = getattr(config, "base_model_tp_plan", None) or {}
    sums = _sums(config)
    fields = {getattr(config, n): n for n in _INNER if hasattr(config, n) and getattr(config, n) not in sums}
    heads = {name: value for value, name in _head_widths(config).items()}
    queries, keys = heads["queries"], heads.get("keys", heads["queries"])
    inner = "" if experts is None else experts.inner
    shared = _shared(config) if experts is not None else {}
    placed = []
    for name, module, layers in found:
        leaf, (outputs, inputs) = name.rpartition(".")[2], module.weight.shape
        hidden = config.hidden_size
        wide: tuple[Width, Width]
        others: dict[str, Mapping[int, Any]] = {"dense": fields, "sparse": shared}
        other = others.get(layers, {})
        if experts is not None and (inputs in other or outputs in other):
            kind = "dense" if layers == "dense" else "shared"
            experts = replace(experts, **{kind: other.get(outputs) or other[inputs]})
            wide, place = (("hidden", kind), 4) if inputs == hidden else ((kind, "hidden"), 5)
        elif layers == "sparse" and (inputs, outputs) == (hidden, 1):
            wide, place = ("hidden", "one"), 5
        elif inputs in fields or outputs in fields or any(outputs == 2 * size for size in fields):
            inner = next(fields[n] for n in (inputs, outputs, outputs // 2) if n in fields)
            wide = ("inner", "hidden")
            if inputs == hidden:
                wide = ("hidden", "inner" if outputs in fields else "gates")
            place = 4 + (inputs != hidden)
        elif inputs == hidden and outputs == 2 * queries and leaf == "q_proj":
            wide, place = ("hidden", "gated_queries"), 0
        elif inputs == hidden and outputs == queries + 2 * keys:
            wide, place = ("hidden", "attention"), 0
        elif inputs == hidden and outputs in (queries, keys) and leaf[0] in "qkv":
            wide, place = ("hidden", "queries" if leaf[0] == "q" else "keys"), "qkv".index(leaf[0])
        elif inputs == queries and outputs == hidden:
            wide, place = ("queries", "hidden"), 3
        elif {inputs, outputs} - {hidden} <= set(sums):  # latent or linear attention
            wide, place = (sums.get(inputs, "hidden"), sums.get(outputs, "hidden")), 3 * (outputs == hidden)
        elif inputs == hidden and outputs in (queries, config.num_attention_heads):  # gates of attention
            wide, place = ("hidden", "queries" if outputs == queries else "heads"), 2
        else:
            raise ModelError(f"the linear layer {name} ({inputs} to {outputs}) has a shape that Dovetail does not know")
        style = plan.get(f"layers.*.{name}", "none" if plan else "colwise" if place in (0, 1, 2, 4) else "rowwise")
        split = {"colwise": "out", "rowwise": "in"}.get(style) if wide[1] not in ("attention", "gates") else None
        placed.append((place, LinearPart(leaf, *wide, split, biases[name], layers)))  # type: ignore[arg-type]
    parts = tuple(part for _, part in sorted(placed, key=lambda each: each[0]))
    return parts, inner or next(iter(fields.values())), experts


def _sums(config: Any) -> dict[int, Width]:
    """The widths of attention with latent keys, and of linear attention, by their size."""
    names = ("q_lora_rank", "kv_lora_rank", "kv_lora_rank+qk_rope_head_dim", "num_attention_heads*v_head_dim")
    both = [f"num_attention_heads*qk_nope_head_dim+num_attention_heads*{n}" for n in ("qk_rope_head_dim", "v_head_dim")]
    known = config.to_dict()
    if "kv_lora_rank" in known:
        return {width_of(name, known): name for name in (*names[not known["q_lora_rank"] :], *both)}
    if known.get("shared_intermediate_size") and getattr(config, "num_local_experts", 0):
        return {config.shared_intermediate_size * n: "+".join(["shared_intermediate_size"] * n) for n in (1, 2)}
    if "linear_num_value_heads" not in known:
        return {}
    keys, values = ("linear_num_key_heads*linear_key_head_dim", "linear_num_value_heads*linear_value_head_dim")
    heads = "linear_num_value_heads"
    convolved = "+".join(f"linear_conv_kernel_dim*{each}" for each in (keys, keys, values))
    of_heads = (heads, f"{heads}+{heads}", "linear_value_head_dim", values)
    fused = (f"{keys}+{keys}+{values}", f"{keys}+{keys}+{values}+{values}", convolved)
    return {width_of(name, known): name for name in (*of_heads, *fused)}


def _shared(config: Any) -> dict[int, tuple[str, ...]]:
    """The fields whose product may be the width of the experts that every token gets, by this width."""
    found: dict[int, tuple[str, ...]] = {}
    if hasattr(config, "shared_expert_intermediate_size"):
        found[config.shared_expert_intermediate_size] = ("shared_expert_intermediate_size",)
    for count in _SHARED:
        if config.to_dict().get(count) and hasattr(config, "moe_intermediate_size"):
            found[getattr(config, count) * config.moe_intermediate_size] = ("moe_intermediate_size", count)
    return found


def _biases(plain: Any, path: str) -> Iterator[tuple[str, str]]:
    """For each linear layer the field that says whether it has a bias, or "always" or "never"."""
    fields = [n for n, v in plain.to_dict().items() if isinstance(v, bool) and "bias" in n]
    fields += ["use_bias"] if hasattr(plain, "use_bias") and "use_bias" not in fields else []

    def has(**changed: bool) -> dict[str, bool]:
        whole = whole_model(resized(plain, _LAYERS, **{**_SIZES, **changed}))
        layers: Any = whole.get_submodule(f"{path}.layers")
        return {n: m.bias is not None for one in layers for n, m in one.named_modules() if isinstance(m, nn.Linear)}

    now = has()
    other = {field: has(**{field: not getattr(plain, field)}) for field in fields}
    for name, there in now.items():
        field = next((f for f in fields if other[f].get(name, there) != there), None)
        yield name, field or ("always" if there else "never")


def _windows(small: Any, layers: Any) -> Any:
    """Which layers have a window: `ModelFamily.windows`."""
    if hasattr(small, "use_sliding_window") or "sliding_window" not in small.to_dict():
        return "never"
    kinds = getattr(small, "layer_types", None)
    if kinds is None:
        return "all"
    full = kinds.count("full_attention")
    return "all" if not full else "never" if full == len(layers) else len(layers) // full


def differences(left: ModelFamily, right: ModelFamily) -> Mapping[str, tuple[Any, Any]]:
    """The facts in which two families differ."""
    names = left.__dataclass_fields__
    pairs = {name: (getattr(left, name), getattr(right, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class known:  # noqa: N801  a context manager
    """Lets this process know a family, as if it were in the table."""

    def __init__(self, family: ModelFamily) -> None:
        self.family = family

    def __enter__(self) -> ModelFamily:
        self.before = MODEL_FAMILIES.get(self.family.name)
        MODEL_FAMILIES[self.family.name] = self.family
        return self.family

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            del MODEL_FAMILIES[self.family.name]
        else:
            # In its place: pages and messages list the families in the table's order.
            MODEL_FAMILIES[self.family.name] = self.before
