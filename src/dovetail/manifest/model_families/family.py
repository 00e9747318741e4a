"""Describes a family of causal language models, with its names, its defaults and the parts of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# The widths of a layer are those of the hidden states, all query heads, all key (or value) heads, the MLP's inner
# states, and one head. For fused layers they are queries, keys and values together, and gate and up together. Beside
# experts they are those of an MLP in their place, and of the experts that every token gets. Gated queries come with a
# gate for each number. 1 is that of a gate. Any other width is a sum of products of fields in config.json, such as
# "kv_lora_rank+qk_rope_head_dim".
Width = str
WIDTHS = (
    *("hidden", "queries", "keys", "inner", "attention", "gates", "head", "heads", "dense", "shared", "one"),
    "gated_queries",
)
# The layers that have a part: all, only those with or without experts, or only those with linear or full attention.
Layers = Literal["all", "sparse", "dense", "linear", "full"]


@dataclass(frozen=True)
class LinearPart:
    """A linear layer of a decoder layer, by transformers' name. `split` is the side that tensor-parallel ranks share,
    "out" (columns) or "in" (rows). It is None if they cannot share it. `bias` is the field of config.json that says
    whether it has a bias, or "always" or "never". `layers` are those that have it."""

    name: str
    inputs: Width
    outputs: Width
    split: Literal["out", "in"] | None
    bias: str
    layers: Layers = "all"


# The names of each expert's three matrices in files, by the name of the parameter that holds them for all experts.
EXPERT_MATRICES = {"gate_up_proj": ("gate_proj.weight", "up_proj.weight"), "down_proj": ("down_proj.weight",)}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP, in all layers or in some (`ModelFamily.dense_layers`).

    These are names of fields in config.json: `count` is the number of experts, by the first of these names that exists.
    `chosen` is the number of experts of a token. `inner` is the inner width of one expert. `dense` is that of an MLP in
    their place, if some layers have one. The product of `shared` is that of the experts that every token gets. `router`
    is transformers' name of the module that chooses the experts. `over_chosen` says that the weights are a softmax over
    the chosen experts of a token, and not over all. `softmax` says that they are a softmax, so that a token can get the
    experts that a rollout chose. `bias` says that experts and router have biases."""

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    chosen: str = "num_experts_per_tok"
    inner: str = "moe_intermediate_size"
    dense: str | None = None
    shared: tuple[str, ...] = ()
    router: str = "mlp.gate"
    over_chosen: bool = False
    softmax: bool = True
    bias: bool = False


# Kinds of layers by their names in files of Transformers 4.
OLD_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}
# The widths that the numbers kept for a token grow with: 1, those of `Width`, the number of heads and of key heads, the
# number of experts, and, for each of the chosen experts of a token, 1, the hidden width and the inner width.
KEPT = (
    *("token", "hidden", "queries", "keys", "inner", "heads", "key_heads", "dense", "shared"),
    *("experts", "chosen", "chosen_hidden", "chosen_inner"),
)
LLAMA_KEPT = {
    "token": (2, 0),  # one number of each norm
    "hidden": (2, 4),  # each norm keeps its input in float32, the normalised input and its product with the weight
    "queries": (0, 2),  # and the output of attention
    "keys": (0, 2),  # and the values
    "heads": (1, 0),  # the logarithm of the sum of the exponentials
    "inner": (0, 4),  # a gate, its activation, up and their product
}


def width_of(text: Width, config: Mapping[str, Any]) -> int:
    """A width that is a sum of products of fields in config.json. Raises KeyError or TypeError for a missing field."""
    return sum(
        math.prod(int(name) if name.isdigit() else int(config[name]) for name in product.split("*"))
        for product in text.split("+")
    )


def fields_of(width: Width) -> set[str]:
    """The fields that a sum of products names."""
    return {name for product in width.split("+") for name in product.split("*") if not name.isdigit()}


def saved_as(renamed: Mapping[str, str], name: str) -> str:
    """The name in files of a tensor or module, where `renamed` has the parts that differ."""
    for part, other in renamed.items():
        name = name.replace(part, other)
    return name


def layers_at(config: Mapping[str, Any], pattern: tuple[str, ...]) -> list[str]:
    """For each layer its entries in the fields `pattern`, joined by commas. A field that is a number says that of so
    many first layers. [] if one is missing."""
    told = [config.get(name) for name in pattern]
    count = next((len(each) for each in told if isinstance(each, list)), config.get("num_hidden_layers"))
    lists = [[number < each for number in range(count or 0)] if isinstance(each, int) else each for each in told]
    if not lists or not all(lists):
        return []
    return [",".join(OLD_KINDS.get(str(e), str(e)) for e in each) for each in zip(*lists, strict=False)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Kind:
    """A kind of layer whose parts only transformers knows. The planner counts it by sums of products of fields.

    `at` are the entries of a layer of this kind in `ModelFamily.pattern`, joined by commas. `share` is its share of the
    published layers. `parameters` are all weights, `multiplied` those with which a token is multiplied, and `through`
    the widths of all linear layers that a token passes. Autograd keeps the two factors `kept` of them (`KEPT`).
    `attends` says that it has keys and values."""

    at: tuple[str, ...]
    share: float
    parameters: Width
    multiplied: Width
    through: Width
    kept: tuple[float, float] = (0.0, 0.0)
    attends: bool = True


@dataclass(frozen=True)
class ModelFamily:
    """One family. The defaults of the fields below are those of Llama.

    `name` is `model_type` in config.json. A second family of a type has more than the first, which its name says after
    a plus, as in "granitemoehybrid+mamba". The names of transformers' classes begin with `classes`, and that of the
    class with a value head with `classifier_classes` if it differs. `lm_class` is the language model's if it differs.
    `defaults` has the values that transformers uses if a configuration leaves a size out. `linears` has the linear
    layers of a decoder layer, in order.

    These are names of fields in config.json: `inner_field` is the MLP's inner width. `embedding_field` is the width of
    the token embedding, if it may differ from the hidden width. `softcap` is the bound of logits. `embedding_factor`
    multiplies the embedding. `logit_factor` multiplies the logits (`logit_scale`), or divides them (`logits_scaling`).
    If the configuration does not say it, `tied` says whether head and embedding share one weight, and `head_dim` is the
    width of a head (hidden / heads if it is None). `grouped` says that there may be fewer key heads than query heads.

    The parts of the model: `body` is the module that holds embedding and layers. `entry` are its parts besides the
    embedding before the first layer. `exits` are its parts after the last layer, in the order of use. `embedding` is
    the token embedding. `norm_vectors` is the number of a norm's parameters: 2 if it has a bias, 0 if it has no weight.
    `norms` is the number of norms of a layer, except those in attention. `norm_offset` says that 1 is added to a norm's
    weight. `head_norms` are the norms of queries and keys, with their widths. `learnt_positions` says that the model
    has a table of positions in place of rotary ones. `saved_head` is the name of the vocabulary projection in files.
    `renamed` has the parts of other names that differ in files, by transformers' part. `matrices` has the names of one
    expert's matrices in files, by the name of transformers' parameter for all experts. It is empty if files have the
    same parameters as transformers. `constants` are the ends of the
    files' names of parameters that no training changes. They stay float32. `sinks` says that each head has a learnt
    score that takes a part of its attention. `bounded_scores` says that tanh bounds attention's scores. `experts`
    replace the MLP.

    `windows` says which layers attend only to `sliding_window` tokens, if config.json has no `layer_types`. They are
    all layers, or all except every n-th one (n is `sliding_window_pattern`, or this number). With "never", models with
    windows are refused.

    `vectors` are the parameters of a layer with linear attention that are no linear layers, with their sizes. Those of
    one dimension begin as 1 in models from scratch.

    `single` are the parameters of a layer that are one number, with the numbers of models from scratch.

    `packs` says that layers know where packed sequences begin. Other layers get each sequence as a row.

    `kept` says how many numbers autograd keeps of one layer for one token, which the planner needs. Each width of
    `KEPT`, and each that is a sum of fields, has two factors: for numbers that are float32 in every compute dtype (an
    int64 counts as two), and for numbers in the compute dtype. Cosines and sines of positions do not count, because all
    layers share them. `kept_dense` says it of a layer without experts beside layers with experts, and `kept_linear` of
    a layer with linear attention.

    `forward` says what computes a stage: "layers", its layers with the positions and factors that are described here;
    "body", transformers' own forward pass of the body, in which layers of other stages do nothing; or "own", the same
    with the body's own attention, whose masks it makes itself. For the last two, `layers` is the name of the list of
    layers, `tuples` is the length of the tuple that a layer returns, if it returns one, and `kinds` has the kinds of
    layers. `pattern` has the fields that say which layer is of which kind. `keys` is the number of numbers of a layer's
    KV cache, if it is not that of all key heads. `aliases` are names
    of this family's fields, by transformers' usual ones.

    `rotary_fields` has the fields of `rope_parameters` by the names that only this family has in Transformers 4.
    `served` are fields that vLLM's class needs and transformers' class does not have. Published models have them."""

    name: str
    classes: str
    defaults: Mapping[str, Any]
    linears: tuple[LinearPart, ...]
    inner_field: str = "intermediate_size"
    embedding_field: str | None = None
    tied: bool = False
    grouped: bool = True
    head_dim: int | None = None
    classifier_classes: str | None = None
    lm_class: str | None = None
    body: str = "model"
    entry: tuple[str, ...] = ()
    exits: tuple[str, ...] = ("norm",)
    norm_vectors: int = 1
    head_norms: Mapping[str, Width] = field(default_factory=dict)
    learnt_positions: bool = False
    embedding: str = "embed_tokens"
    norms: int = 2
    norm_offset: bool = False
    saved_head: str = "lm_head"
    renamed: Mapping[str, str] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    windows: Literal["never", "all"] | int = "never"
    softcap: str | None = None
    embedding_factor: str | None = None
    logit_factor: str | None = None
    sinks: bool = False
    bounded_scores: bool = False
    experts: Experts | None = None
    vectors: Mapping[str, Width] = field(default_factory=dict)
    single: Mapping[str, float] = field(default_factory=dict)
    packs: bool = True
    kept: Mapping[str, tuple[int, int]] = field(default_factory=lambda: LLAMA_KEPT)
    kept_dense: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    kept_linear: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    forward: Literal["layers", "body", "own"] = "layers"
    layers: str = "layers"
    tuples: int = 0
    kinds: tuple[Kind, ...] = ()
    pattern: tuple[str, ...] = ()
    keys: Width = ""
    matrices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    rotary_fields: Mapping[str, str] = field(default_factory=dict)
    served: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        """`model_type` in config.json."""
        return self.name.partition("+")[0]

    @property
    def causal_lm(self) -> str:
        """transformers' class of the language model."""
        return self.lm_class or f"{self.classes}ForCausalLM"

    @property
    def classifier(self) -> str:
        """transformers' class of the model with a value head."""
        return f"{self.classifier_classes or self.classes}ForSequenceClassification"

    @property
    def of_experts(self) -> tuple[str, ...]:
        """The names by which adapters are asked for on the parameters of all experts of a layer."""
        return () if self.experts is None else tuple(f"experts.{name}" for name in EXPERT_MATRICES)

    @property
    def splits(self) -> bool:
        """Whether tensor-parallel ranks can share its layers. They cannot share fused layers or experts."""
        return self.experts is None and not self.kinds and all(part.split is not None for part in self.linears)

    @property
    def softmax_routers(self) -> bool:
        """Whether each layer has experts that replay and the load-balancing loss know."""
        return self.experts is not None and self.experts.softmax and self.experts.dense is None

    def windowed(self, config: Mapping[str, Any]) -> int:
        """The number of layers of a `config.json` that attend only to `sliding_window` tokens."""
        layers = int(config.get("num_hidden_layers", self.defaults["num_hidden_layers"]))
        kinds = config.get("layer_types")
        if self.windows == "never" or not config.get("sliding_window", self.defaults.get("sliding_window")):
            return 0
        if kinds:
            return sum(kind == "sliding_attention" for kind in kinds)
        if isinstance(self.windows, int):
            return layers - layers // int(config.get("sliding_window_pattern") or self.windows)
        return layers if self.windows == "all" else 0

    @property
    def sums(self) -> frozenset[Width]:
        """The widths of its layers that are sums of products of fields of config.json."""
        used = {w for part in self.linears for w in (part.inputs, part.outputs)}
        used |= {*self.head_norms.values(), *self.vectors.values(), *self.kept_linear, self.keys}
        used |= {width for kind in self.kinds for width in (kind.parameters, kind.multiplied, kind.through)}
        return frozenset(used - {*WIDTHS, *KEPT, ""})

    @property
    def latent(self) -> bool:
        """Whether keys and values are made of a latent state, which the KV cache holds (DeepSeek-V2's attention)."""
        return "kv_lora_rank+qk_rope_head_dim" in self.sums

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state and no keys."""
        return bool(self.vectors) or not all(kind.attends for kind in self.kinds)

    def shares(self, config: Mapping[str, Any]) -> tuple[float, ...]:
        """The share of the layers that are of each of `kinds`. A `config.json` that leaves the pattern out has the
        published one."""
        at = layers_at(config, self.pattern)
        if not at:
            return tuple(kind.share for kind in self.kinds)
        return tuple(sum(each in kind.at for each in at) / len(at) for kind in self.kinds)

    def linear_layers(self, config: Mapping[str, Any]) -> int:
        """The number of layers of a `config.json` that have linear attention, which keeps a state and no keys."""
        if self.kinds:
            layers = int(config.get("num_hidden_layers", self.defaults["num_hidden_layers"]))
            held = zip(self.kinds, self.shares(config), strict=True)
            return round(layers * sum(share for kind, share in held if not kind.attends))
        if not self.vectors:
            return 0
        if (kinds := config.get("layer_types")) is not None:
            return list(kinds).count("linear_attention")
        layers = int(config.get("num_hidden_layers", self.defaults["num_hidden_layers"]))
        return layers - layers // int(config.get("full_attention_interval") or self.defaults["full_attention_interval"])

    def dense_layers(self, config: Mapping[str, Any]) -> frozenset[int]:
        """The layers of a `config.json` that have an MLP beside layers that have experts."""
        if self.experts is None or self.experts.dense is None:
            return frozenset()

        def told(*names: str) -> int:
            found = [config.get(name, self.defaults.get(name)) for name in names]
            return int(next((value for value in found if value is not None), 0))

        if (kinds := config.get("mlp_layer_types")) is not None:
            return frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
        if isinstance(each := config.get("moe_layer_freq"), list):
            return frozenset(i for i, sparse in enumerate(each) if not sparse)
        first = told("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
        return frozenset(range(min(told("num_hidden_layers"), first)))
