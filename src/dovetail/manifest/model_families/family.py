"""What Dovetail has to know of a family of causal language models: names, defaults, and the parts of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# A width of a layer: the hidden states, all query heads, all key (or value) heads, the MLP's inner states.
Width = Literal["hidden", "queries", "keys", "inner"]


@dataclass(frozen=True)
class LinearPart:
    """A linear layer of a decoder layer, by transformers' name. `split`: which side tensor-parallel ranks share, "out"
    (columns) or "in" (rows). `bias`: whose field of the configuration says whether it has one
    (`ModelFamily.bias_fields`), or "always"."""

    name: str
    inputs: Width
    outputs: Width
    split: Literal["out", "in"]
    bias: Literal["attention", "mlp", "always"]


def attention_parts(
    output: str = "o_proj", inputs_bias: Literal["attention", "always"] = "attention"
) -> tuple[LinearPart, ...]:
    """Queries, keys, values and the output of attention."""
    return (
        LinearPart("q_proj", "hidden", "queries", "out", inputs_bias),
        LinearPart("k_proj", "hidden", "keys", "out", inputs_bias),
        LinearPart("v_proj", "hidden", "keys", "out", inputs_bias),
        LinearPart(output, "queries", "hidden", "in", "attention"),
    )


GATED_MLP = (
    LinearPart("gate_proj", "hidden", "inner", "out", "mlp"),
    LinearPart("up_proj", "hidden", "inner", "out", "mlp"),
    LinearPart("down_proj", "inner", "hidden", "in", "mlp"),
)


@dataclass(frozen=True)
class ModelFamily:
    """One family. The defaults of the fields below are those of Llama.

    `name`: `model_type` of config.json. `classes`: what transformers' classes begin with. `defaults`: what transformers
    fills in where a configuration leaves a size out. `linears`: of a decoder layer, in order.

    Names in config.json: `inner_field`, the MLP's inner width; `embedding_field`, the width of the token embedding,
    where it may differ from the hidden one; `bias_fields`, attention's and the MLP's, and `bias_default` where they are
    absent. Where the configuration does not say: `tied`, whether head and embedding are one weight; `head_dim`, of a
    head (None: hidden / heads). `grouped`: whether key heads may be fewer than query heads.

    Parts of the model: `body`, the module that holds embedding and layers; `entry`, what it has beside the embedding
    before the first layer; `exits`, what it has after the last, in the order of use. `layer_norm`: norms have a bias.
    `head_norms`: norms of each query and key head, by name. `learnt_positions`: a table of them in place of rotary
    ones."""

    name: str
    classes: str
    defaults: Mapping[str, Any]
    linears: tuple[LinearPart, ...] = field(default_factory=lambda: (*attention_parts(), *GATED_MLP))
    inner_field: str = "intermediate_size"
    embedding_field: str | None = None
    bias_fields: tuple[str, str] = ("attention_bias", "mlp_bias")
    bias_default: bool = False
    tied: bool = False
    grouped: bool = True
    head_dim: int | None = None
    body: str = "model"
    entry: tuple[str, ...] = ()
    exits: tuple[str, ...] = ("norm",)
    layer_norm: bool = False
    head_norms: tuple[str, ...] = ()
    learnt_positions: bool = False

    @property
    def causal_lm(self) -> str:
        """transformers' class of the language model."""
        return f"{self.classes}ForCausalLM"

    @property
    def classifier(self) -> str:
        """transformers' class of the model with a value head."""
        return f"{self.classes}ForSequenceClassification"

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections."""
        return sum(part.outputs == "inner" for part in self.linears) == 2

    def names(self, split: Literal["out", "in"]) -> tuple[str, ...]:
        """Linear layers of which tensor-parallel ranks share that side."""
        return tuple(part.name for part in self.linears if part.split == split)
