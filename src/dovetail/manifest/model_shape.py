"""Computes the sizes of a transformer from its Hugging Face configuration: parameters, saved activations, and the KV
cache.

The differences between families are in `dovetail.manifest.model_families`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from dovetail.manifest.hashing import hashed_once
from dovetail.manifest.model_families import MODEL_FAMILIES, ModelFamily
from dovetail.manifest.model_families.family import Width, fields_of, width_of
from dovetail.manifest.model_families.support import family_of, problem, text_part

# A model computes at each position logits of the vocabulary, one value, or both.
Head = Literal["lm", "value", "lm+value"]


class ShapeError(ValueError):
    """A model configuration cannot be read. The message names the field."""


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block. `split`: the side that tensor-parallel ranks share, "out" (columns) or "in" (rows).
    None: they cannot share it. `share`: the share of the layers that have it."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    split: Literal["out", "in"] | None
    share: float = 1

    def parameters(self, tp: int) -> int:
        """The parameters on one of `tp` tensor-parallel ranks."""
        bias = self.bias * self.outputs
        return self.inputs * self.outputs // tp + (bias // tp if self.split == "out" else bias)


@hashed_once
@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model. `queries`, `keys`: the width of all query heads, and of all key (or value) heads.
    `embedding`: the width of the token embedding if it is not `hidden` (some OPT models), else 0. `positions`: the rows
    of a learnt position table. `biases`: the fields of config.json that ask for biases. `windowed`: how many layers
    attend only to the last `window` tokens. `experts`: the experts of a layer. With 0 it has an MLP. `chosen`: the
    experts that a token gets. `intermediate`: the inner width of the MLP or of one expert. `shared`: that of the
    experts that each token gets. `dense`: how many layers have an MLP of the width `dense_intermediate` beside layers
    with experts. `linear`: how many layers have linear attention. What is said of one block is then the mean of all.
    `sums`: the widths that are sums of fields. `shares`: those of the family's kinds of layers.
    `use_qk_norm`: a field of Cohere's."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    biases: tuple[str, ...] = ()
    embedding: int = 0
    positions: int = 0
    final_norm: bool = True
    windowed: int = 0
    window: int = 0
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    dense: int = 0
    dense_intermediate: int = 0
    linear: int = 0
    sums: tuple[tuple[Width, int], ...] = ()
    shares: tuple[float, ...] = ()
    use_qk_norm: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Reads the sizes from a model's `config.json`. Raises ShapeError."""
        if (why := problem(config)) is not None:
            raise ShapeError(why)
        config = text_part(config)
        family = family_of(config)
        assert family is not None, "problem has refused other types"
        config = _as_used(config) if family.kinds else config
        told = {**family.defaults, **config}
        config = told if family.kinds else config
        hidden = _whole(config, "hidden_size")
        # Models without attention have no heads.
        heads = 1 if family.kinds and "num_attention_heads" not in config else _whole(config, "num_attention_heads")
        if family.kinds:
            told |= {n: v for n, v in family.defaults.items() if isinstance(told.get(n), str)}  # "auto"
            told["head_dim"] = told.get("head_dim") or hidden // heads
        ends = config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False)
        narrow = family.embedding_field
        width = hidden if narrow is None else config.get(narrow) or hidden
        asked = {part.bias: config.get(part.bias, family.defaults.get(part.bias, False)) for part in family.linears}
        experts = family.experts
        count = None if experts is None else next((n for n in experts.count if n in config), experts.count[0])
        return cls(
            family=family.name,
            layers=_whole(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_whole(config, family.inner_field),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads) if family.grouped else heads,
            head_dim=_head(told, family, hidden // heads),
            vocabulary=_whole(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family.tied)),
            biases=tuple(name for name, there in asked.items() if there),
            embedding=int(width) if width != hidden else 0,
            positions=_whole(config, "max_position_embeddings") + 2 if family.learnt_positions else 0,
            final_norm=bool(ends),
            windowed=family.windowed(config),
            window=int(config.get("sliding_window") or family.defaults.get("sliding_window") or 0),
            experts=0 if count is None else _whole(config, count),
            chosen=0 if experts is None else _whole(config, experts.chosen),
            shared=math.prod(int(told.get(n) or 0) for n in experts.shared) if experts and experts.shared else 0,
            dense=len(family.dense_layers(config)),
            dense_intermediate=0 if experts is None or experts.dense is None else _whole(told, experts.dense),
            linear=family.linear_layers(config),
            sums=_sums(told, family),
            shares=family.shares(config),
            use_qk_norm=bool(config.get("use_qk_norm")),
        )

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of one block, without experts. Beside experts of all tokens it may have those of an MLP,
        each in a share of the blocks."""
        widths = {"hidden": self.hidden, "queries": self.queries, "keys": self.keys, "inner": self.intermediate}
        widths |= {"attention": self.queries + 2 * self.keys, "gates": 2 * self.intermediate, "heads": self.heads}
        widths |= {"dense": self.dense_intermediate, "shared": self.shared, "one": 1, **dict(self.sums)}
        widths |= {"gated_queries": 2 * self.queries}
        shares = {"all": 1, "dense": self.dense / self.layers, "sparse": self.sparse}
        shares |= {"linear": self.linear / self.layers, "full": self.full}
        biases = {"always", *self.biases}
        return tuple(
            Linear(p.name, widths[p.inputs], widths[p.outputs], p.bias in biases, p.split, shares[p.layers])
            for p in MODEL_FAMILIES[self.family].linears
        )

    @property
    def of_experts(self) -> tuple[Linear, ...]:
        """The matrices of the experts of one block, with the mean number of experts as their share."""
        names, count = MODEL_FAMILIES[self.family].of_experts, self.sparse * self.experts
        sides = (self.hidden, 2 * self.intermediate), (self.intermediate, self.hidden)
        return tuple(Linear(name, *each, False, None, count) for name, each in zip(names, sides, strict=False))

    @property
    def sparse(self) -> float:
        """The share of the blocks that have experts, if any have."""
        return 1 - self.dense / self.layers

    @property
    def full(self) -> float:
        """The share of the blocks whose attention has keys."""
        return 1 - self.linear / self.layers

    def split_problem(self, tp: int, model: str = "model") -> str | None:
        """Why `tp` tensor-parallel ranks cannot train a block of `model` together, and what to do, as the second half
        of a sentence. Each rank must get as many heads and as much of the MLP as the others. None if they can."""
        family = MODEL_FAMILIES[self.family]
        # Cohere's use_qk_norm gives each head norms with weights of its own.
        normed = self.use_qk_norm and not family.head_norms
        if tp > 1 and (normed or not family.splits):
            kind = f"{self.family} models{' with use_qk_norm' if family.splits else ''}"
            return f"but layers of {kind}, such as the {model}, cannot be shared over ranks; set tp to 1"
        inner = family.inner_field
        sizes = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, inner: self.intermediate}
        odd = next((field for field, size in sizes.items() if size % tp), None)
        return (
            None if odd is None else f"which does not divide its {odd}, {sizes[odd]} of the {model}; use a tp that does"
        )

    def share_problem(self, cp: int, tp: int = 1) -> str | None:
        """Why `cp` context-parallel ranks, each also one of `tp`, cannot share the tokens of a pass, and what to do, as
        the second half of a sentence. Each rank must get as many heads as the others. A key head may be on several.
        None if they can."""
        heads, key_heads = self.heads // tp, self.kv_heads // tp
        if cp == 1:
            return None
        if not MODEL_FAMILIES[self.family].packs:
            return f"but layers of {self.family} models need whole sequences; set cp to 1"
        if heads % cp:
            return f"which does not divide its {heads} attention heads (of one tp rank); use a cp that does"
        if key_heads % cp and cp % key_heads:
            return f"which neither divides its {key_heads} key heads (of one tp rank) nor is a multiple; use another cp"
        return None

    def deal_problem(self, ep: int) -> str | None:
        """Why `ep` expert-parallel ranks cannot divide the experts of a layer, and what to do, as the second half of a
        sentence. Each rank must get as many as the others. None if they can."""
        family = MODEL_FAMILIES[self.family]
        if ep == 1:
            return None
        if family.experts is None and not family.matrices:
            return f"but layers of {self.family} models have no experts that ranks can divide; set ep to 1"
        if self.experts % ep:
            return f"which does not divide the {self.experts} experts of a layer; use an ep that does"
        return None

    # ------------------------------------------------------------ parameters

    @lru_cache(maxsize=4096)  # noqa: B019  the search of a placement asks for it a hundred thousand times
    def layer_parameters(self, tp: int = 1, ep: int = 1) -> int:
        """The parameters of a block on one of `tp` tensor-parallel ranks: a part of the linear layers, and all norms.
        vLLM also shares the inner width of the experts. Trainers don't share layers with experts (`split_problem`), but
        `ep` of them divide the experts."""
        family = MODEL_FAMILIES[self.family]
        if family.kinds:
            return math.ceil(self.mean("parameters") / tp)
        linear = sum(each.share * each.parameters(tp) for each in self.linears)
        widths = {"head": self.head_dim, "hidden": self.hidden, "queries": self.queries, "keys": self.keys}
        widths |= {"inner": self.intermediate, **dict(self.sums)}
        norms = family.norms * family.norm_vectors * self.hidden
        of_heads = self.full * sum(widths[w] for w in family.head_norms.values())
        vectors = (1 - self.full) * sum(widths[w] for w in family.vectors.values())
        return math.ceil(
            linear + norms + of_heads + vectors + self.heads * family.sinks + _expert_parameters(self, tp, ep)
        )

    def embedding_parameters(self, tp: int = 1) -> int:
        """The parameters before the first block, on one of `tp` tensor-parallel ranks."""
        projection = self.embedding * self.hidden
        return self.vocabulary * (self.embedding or self.hidden) // tp + projection + self.positions * self.hidden

    def head_parameters(self, head: Head, tied_here: bool = False, tp: int = 1) -> int:
        """The parameters after the last block, on one of `tp` tensor-parallel ranks. `tied_here`: the head's weight is
        the embedding, which is on the same rank."""
        norm = MODEL_FAMILIES[self.family].norm_vectors * self.hidden * self.final_norm
        width = self.embedding or self.hidden
        vocabulary = 0 if tied_here or head == "value" else self.vocabulary * width // tp
        return norm + self.embedding * self.hidden + vocabulary + (0 if head == "lm" else width)

    def parameters(self, head: Head = "lm", ep: int = 1) -> int:
        """The parameters of the whole model, on one of `ep` ranks that divide its experts. A tied embedding counts
        once."""
        blocks = self.layers * self.layer_parameters(1, ep)
        return self.embedding_parameters() + blocks + self.head_parameters(head, self.tied)

    def read_parameters(self, tokens: float, head: Head = "lm") -> float:
        """The mean number of parameters that a pass over `tokens` positions reads. It reads all but the experts that no
        token gets. Each token gets any `chosen` of the experts with the same probability."""
        if not self.experts:
            return self.parameters(head)
        idle: float = (1 - self.chosen / self.experts) ** tokens
        return self.parameters(head) - idle * self.layers * _expert_parameters(self)

    # ------------------------------------------------------------ bytes a token

    def saved_bytes(self, itemsize: int, tp: int = 1) -> float:
        """The bytes that autograd keeps of one block for one token, on one of `tp` tensor-parallel ranks, as measured
        (`ModelFamily.kept`). `itemsize`: bytes of a number."""
        family, sums = MODEL_FAMILIES[self.family], dict(self.sums)
        if family.kinds:
            each = zip(family.kinds, self.shares, strict=True)
            return sum(s * sums[k.through] * (4 * k.kept[0] + itemsize * k.kept[1]) for k, s in each) / tp
        widths = {
            "token": 1.0,
            "hidden": self.hidden,
            "queries": self.queries / tp,
            "keys": self.keys / tp,
            "inner": self.intermediate / tp,
            "heads": self.heads / tp,
            "key_heads": self.kv_heads / tp,
            "experts": self.experts,
            "chosen": self.chosen,
            "chosen_hidden": self.chosen * self.hidden,
            "chosen_inner": self.chosen * self.intermediate,
            "dense": self.dense_intermediate,
            "shared": self.shared,
            **sums,
        }
        dense, linear = self.dense / self.layers, self.linear / self.layers
        held = [
            sum(widths[name] * (4 * single + itemsize * own) for name, (single, own) in kept.items())
            for kept in (family.kept, family.kept_dense, family.kept_linear)
        ]
        return (1 - dense - linear) * held[0] + dense * held[1] + linear * held[2] if dense or linear else held[0]

    def kv_bytes(self, itemsize: int, tp: int = 1) -> float:
        """The bytes of the KV cache of one token in all blocks, on one of `tp` ranks. A key head is never split. Blocks
        with a window count like others, because it is not known beforehand how much vLLM frees behind the window."""
        told = dict(self.sums)
        keys = told.get(MODEL_FAMILIES[self.family].keys) or told.get("kv_lora_rank+qk_rope_head_dim")
        if keys is not None:
            return float((self.layers - self.linear) * keys * itemsize)
        return 2 * (self.layers - self.linear) * max(1.0, self.kv_heads / tp) * self.head_dim * itemsize

    # ------------------------------------------------------------ arithmetic

    @cached_property
    def _matrices(self) -> int:
        """The weights of one block's matrices that one token is multiplied with."""
        if self.shares:
            return round(self.mean("multiplied"))
        routing = self.experts * self.hidden + self.chosen * 3 * self.hidden * self.intermediate
        linear = sum(each.share * each.inputs * each.outputs for each in self.linears)
        return round(linear + self.sparse * routing)

    def mean(self, what: Literal["parameters", "multiplied", "through"]) -> float:
        """The mean over all layers of a number that the family's kinds have."""
        sums, kinds = dict(self.sums), MODEL_FAMILIES[self.family].kinds
        return sum(share * sums[getattr(kind, what)] for kind, share in zip(kinds, self.shares, strict=True))

    def forward_flops(self, tokens: float, context: float, head: Head = "lm") -> float:
        """The FLOPs of a forward pass over `tokens` positions, which attend to `context` tokens on average.

        Each position costs 2 FLOPs for each weight of a matrix. Only the experts that the token gets count. Attention
        scores and their use cost 4 x queries x context, where a window limits the context. Linear attention costs what
        its linear layers cost."""
        if self.windowed:
            context = context + self.windowed / self.layers * (min(context, self.window) - context)
        output = (head != "value") * self.vocabulary * (self.embedding or self.hidden) + (head != "lm") * self.hidden
        attention = self.full * 4 * self.queries * context
        return tokens * (self.layers * (2 * self._matrices + attention) + 2 * output)


def _as_used(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with fields that transformers' classes make of others."""
    found = dict(config)
    for each in (config.get("per_layer_config") or {}).values():
        found["global_head_dim"] = each.get("head_dim")
    if config.get("block_auto_adjust_ff_dim"):
        inner = int(2 * int(config.get("block_ff_dim") or config["intermediate_size"]) / 3)
        inner, unit = int(config.get("block_ffn_dim_multiplier") or 1) * inner, int(config["block_multiple_of"])
        found["intermediate_size"] = unit * -(-inner // unit)
    if not config.get("num_hidden_layers") and (kinds := config.get("layers_block_type")):
        found["num_hidden_layers"] = len(kinds)
    return found


def _sums(config: Mapping[str, Any], family: ModelFamily) -> tuple[tuple[Width, int], ...]:
    for name in sorted({name for width in family.sums for name in fields_of(width)}):
        _whole(config, name, 0 if "expert" in name else 1)  # some models of a type have no experts
    return tuple((width, width_of(width, config)) for width in sorted(family.sums))


def _head(config: Mapping[str, Any], family: ModelFamily, usual: int) -> int:
    """The width of a head. With latent keys it is the mean of a key's and a value's, on which the FLOPs depend."""
    if family.latent:
        return width_of("qk_nope_head_dim+qk_rope_head_dim+v_head_dim", config) // 2
    return int(config.get("head_dim") or family.head_dim or usual)


def _expert_parameters(shape: ModelShape, tp: int = 1, ep: int = 1) -> float:
    """The parameters of all experts of one block and of their router on one of `tp` ranks, or of `ep` that divide the
    experts, as the mean of all blocks."""
    experts = MODEL_FAMILIES[shape.family].experts
    if experts is None:
        return 0
    one = (3 * shape.hidden + 2 * experts.bias) * shape.intermediate / tp + experts.bias * shape.hidden
    return shape.sparse * shape.experts * (one / ep + shape.hidden + experts.bias)


def _whole(config: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ShapeError(f"the model's {name} is {value!r}; it must be a whole number above {least - 1}")
    return value
