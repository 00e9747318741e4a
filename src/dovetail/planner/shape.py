"""The sizes of a transformer, from its Hugging Face configuration: parameters, saved activations, keys and values.

What families differ in is in `dovetail.manifest.model_families`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.planner.hashing import hashed_once

Head = Literal["lm", "value", "lm+value"]


class ShapeError(ValueError):
    """A model configuration that cannot be read; the message names the field."""


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block. `split`: which side tensor parallel ranks share, "out" (columns) or "in" (rows)."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    split: Literal["out", "in"]

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + self.bias * self.outputs


@hashed_once
@dataclass(frozen=True)
class ModelShape:
    """`queries`, `keys`: width of all query heads, and of all key (or value) heads. `embedding`: width of the token
    embedding where it is not `hidden` (some OPT models). `positions`: rows of a learnt position table."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding: int = 0
    positions: int = 0
    final_norm: bool = True

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a `config.json`. Raises ShapeError."""
        family = MODEL_FAMILIES.get(config.get("model_type", ""))
        if family is None:
            known = ", ".join(MODEL_FAMILIES)
            raise ShapeError(f"model_type {config.get('model_type')!r} is not supported; use one of {known}")
        hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
        ends = config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False)
        narrow = family.embedding_field
        width = hidden if narrow is None else config.get(narrow) or hidden
        attention, mlp = (bool(config.get(name, family.bias_default)) for name in family.bias_fields)
        return cls(
            family=family.name,
            layers=_whole(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_whole(config, family.inner_field),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads) if family.grouped else heads,
            head_dim=int(config.get("head_dim") or family.head_dim or hidden // heads),
            vocabulary=_whole(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family.tied)),
            attention_bias=attention,
            mlp_bias=mlp,
            embedding=int(width) if width != hidden else 0,
            positions=_whole(config, "max_position_embeddings") + 2 if family.learnt_positions else 0,
            final_norm=bool(ends) if family.layer_norm else True,
        )

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    def linears(self) -> tuple[Linear, ...]:
        """Of one block."""
        return _linears(self)

    def split_problem(self, tp: int) -> str | None:
        """Why `tp` tensor parallel ranks cannot train a block together, each with as many heads and as much of the MLP;
        None if they can."""
        inner = MODEL_FAMILIES[self.family].inner_field
        sizes = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, inner: self.intermediate}
        odd = next((field for field, size in sizes.items() if size % tp), None)
        return None if odd is None else f"does not divide its {odd}, {sizes[odd]}"

    # ------------------------------------------------------------ parameters

    def layer_parameters(self, tp: int = 1) -> int:
        """Of one block, on one of `tp` tensor parallel ranks: its share of the linear layers, and the norms."""
        return _layer_parameters(self, tp)

    def embedding_parameters(self, tp: int = 1) -> int:
        """Before the first block."""
        projection = self.embedding * self.hidden
        return self.vocabulary * (self.embedding or self.hidden) // tp + projection + self.positions * self.hidden

    def head_parameters(self, head: Head, tied_here: bool = False, tp: int = 1) -> int:
        """After the last block. `tied_here`: the head's weight is the embedding on the same rank."""
        norm = (1 + MODEL_FAMILIES[self.family].layer_norm) * self.hidden * self.final_norm
        width = self.embedding or self.hidden
        vocabulary = 0 if tied_here or head == "value" else self.vocabulary * width // tp
        return norm + self.embedding * self.hidden + vocabulary + (0 if head == "lm" else width)

    def parameters(self, head: Head = "lm") -> int:
        """Of the whole model, a tied embedding counting once."""
        blocks = self.layers * self.layer_parameters()
        return self.embedding_parameters() + blocks + self.head_parameters(head, self.tied)

    # ------------------------------------------------------------ bytes a token

    def saved_bytes(self, itemsize: int, tp: int = 1) -> float:
        """What autograd keeps of one block for one token, attention by a fused kernel (scaled_dot_product_attention).

        Each norm: its input in float32, the normalised input and the scaled one; queries, keys, values and the
        attention's output, with a float32 number a head; the MLP's inner tensors: gate, its activation, up and their
        product, or one where there is no gate. LayerNorm keeps less than the RMSNorms of transformers."""
        q, k, i, h, b = self.queries / tp, self.keys / tp, self.intermediate / tp, self.hidden, itemsize
        attention = (2 * q + 2 * k) * b + 4 * self.heads / tp
        family = MODEL_FAMILIES[self.family]
        norms = 4 * h * b + 4 * b if family.layer_norm else 2 * h * (4 + 2 * b) + 8
        each_head = (q + k) * (4 + b) + 4 * (self.heads + self.kv_heads) / tp if family.head_norms else 0.0
        return norms + attention + each_head + (4 if family.gated else 1) * i * b

    def kv_bytes(self, itemsize: int, tp: int = 1) -> float:
        """Keys and values of one token in all blocks, on one of `tp` ranks (a key head is not split further)."""
        return 2 * self.layers * max(1.0, self.kv_heads / tp) * self.head_dim * itemsize

    # ------------------------------------------------------------ arithmetic

    def forward_flops(self, tokens: float, context: float, head: Head = "lm") -> float:
        """Of a forward pass over `tokens` positions that attend to `context` tokens each on average: two per weight of
        a matrix and position, and scores and their use (4 x queries x context)."""
        matrices = _matrices(self)
        output = (head != "value") * self.vocabulary * (self.embedding or self.hidden) + (head != "lm") * self.hidden
        return tokens * (self.layers * (2 * matrices + 4 * self.queries * context) + 2 * output)


# The search of a placement asks for these a hundred thousand times.
@lru_cache(maxsize=256)
def _linears(shape: ModelShape) -> tuple[Linear, ...]:
    widths = {"hidden": shape.hidden, "queries": shape.queries, "keys": shape.keys, "inner": shape.intermediate}
    biases = {"attention": shape.attention_bias, "mlp": shape.mlp_bias, "always": True}
    return tuple(
        Linear(part.name, widths[part.inputs], widths[part.outputs], biases[part.bias], part.split)
        for part in MODEL_FAMILIES[shape.family].linears
    )


@lru_cache(maxsize=256)
def _matrices(shape: ModelShape) -> int:
    return sum(each.inputs * each.outputs for each in _linears(shape))


@lru_cache(maxsize=4096)
def _layer_parameters(shape: ModelShape, tp: int) -> int:
    linear = 0
    for each in shape.linears():
        bias = each.bias * each.outputs
        linear += each.inputs * each.outputs // tp + (bias // tp if each.split == "out" else bias)
    family = MODEL_FAMILIES[shape.family]
    norms = 2 * (1 + family.layer_norm) * shape.hidden
    return linear + norms + len(family.head_norms) * shape.head_dim


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ShapeError(f"the model's {name} is {value!r}; it must be a whole number above 0")
    return value
