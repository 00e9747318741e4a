"""Chooses the sizes of all measurements from the device's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

# The bytes of a trained parameter: float32 weight, gradient, its reduced copy and two moments, and the copies in the
# compute dtype.
TRAINED_BYTES = 26


@dataclass(frozen=True)
class Scale:
    """The sizes. `config` is a Llama configuration without its number of layers. A micro-batch has `sequences` of
    `tokens` tokens on average, and an optimizer step has `micro_batches` of them. `copied` is the bytes of a copy that
    is timed. `product` is the rows and columns of the matrix product that gives the peak. `rows` is the rows of logits
    over `vocabulary` tokens. `samples` is the samples of an iteration. `few_layers` is for several models on the device
    at once."""

    name: str
    config: dict[str, Any]
    layers: int
    few_layers: int
    sequences: int
    tokens: int
    micro_batches: int
    copied: int
    product: int
    rows: int
    vocabulary: int
    samples: int
    repeats: int
    compiles: bool = True

    def shape(self, layers: int) -> dict[str, Any]:
        """The configuration of a model of this many layers."""
        return {**self.config, "num_hidden_layers": layers}

    def parameters(self, layers: int) -> int:
        """The number of parameters of a language model of this many layers."""
        return layers * _layer(self.config) + _outside(self.config)


def _llama(hidden: int, inner: int, heads: int, keys: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": tied,
        "rope_theta": 500000.0,
    }


def _layer(config: dict[str, Any]) -> int:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] / config["num_attention_heads"]
    return int(hidden * hidden * (2 + 2 * keys) + 3 * hidden * inner)


def _outside(config: dict[str, Any]) -> int:
    return int(config["vocab_size"] * config["hidden_size"] * (1 if config["tie_word_embeddings"] else 2))


# The layers of Llama 3 8B, of Llama 3.2 1B, and of a small one.
SHAPES = {
    "8b": _llama(4096, 14336, 32, 8, 128256, False),
    "1b": _llama(2048, 8192, 32, 8, 128256, True),
    "small": _llama(1024, 4096, 16, 8, 32000, True),
}
TINY = Scale(
    name="tiny",
    config={**_llama(64, 96, 4, 2, 256, True), "max_position_embeddings": 256},
    layers=2,
    few_layers=1,
    sequences=2,
    tokens=16,
    micro_batches=2,
    copied=2**16,
    product=64,
    rows=32,
    vocabulary=256,
    samples=4,
    repeats=1,
    compiles=False,
)


def choose(memory: int, quick: bool) -> Scale:
    """The sizes for a device with `memory` bytes. They have the largest shape of which at least two layers can be
    trained in half of it. The activations are in the other half."""
    room = memory / 2
    for name, config in SHAPES.items():
        layers = int((room / TRAINED_BYTES - _outside(config)) // _layer(config))
        if layers >= 2 or name == "small":
            break
    layers = max(1, min(layers, 8))
    few = max(1, layers // 3)
    tokens = 1024 if config["hidden_size"] >= 2048 else 512
    whole = Scale(
        name=name,
        config=config,
        layers=layers,
        few_layers=few,
        sequences=8,
        tokens=tokens,
        micro_batches=4,
        copied=min(2**31, memory // 32),
        product=8192,
        rows=8192,
        vocabulary=128256,
        samples=64,
        repeats=5,
    )
    return replace(whole, layers=few, micro_batches=2, rows=2048, samples=16, repeats=2) if quick else whole
