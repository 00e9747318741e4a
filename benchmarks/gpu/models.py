"""Builds the models that several groups train and score. These are our models with random weights made on the device,
and the stock ones."""

from __future__ import annotations

import random
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from dovetail.manifest.types import Parallelism, RLHFJobSpec, ScratchModel, Stage
from dovetail.models.layers.predictions import Predicted, Predictions
from dovetail.protocol.messages import Action, Load, ModelRef
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.engine.engine import Engine, choose_algorithms
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.packed_batches import Sequences
from gpu.scale import Scale

DEADLINE = 300.0
HEADS: dict[str, Any] = {"actor": "lm", "critic": "value"}


class _Random:
    """Makes random weights on the device, because a generator of the host takes minutes for models of this size. A
    name's weights are the same in every process."""

    def read(self, name: str, shape: torch.Size, box: tuple[slice, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device="cuda")[box]
        generator = torch.Generator("cuda").manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, device="cuda").normal_(0.0, 0.02, generator=generator)[box]


@contextmanager
def random_weights() -> Iterator[None]:
    """A context in which models get random weights instead of those of their source."""
    names = ("dovetail.models.build.open_source", "dovetail.trainer.engine.engine_model.open_source")
    with patch(names[0], lambda *_: _Random()), patch(names[1], lambda *_: _Random()):
        yield


def reference(scale: Scale, layers: int, head: Any) -> ModelRef:
    return ModelRef(head=head, scratch=ScratchModel(architecture="llama", config=scale.shape(layers)), seed=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def one_rank(deterministic: bool = True) -> Iterator[Groups]:
    """A context with the groups of a trainer of one rank (NCCL, as always on a GPU) and its choice of algorithms."""
    port = free_port()
    alone = {name: Parallelism() for name in ("actor", "critic", "reward")}
    groups = Groups.form("127.0.0.1", port, 0, 1, alone, DEADLINE)
    choose_algorithms(deterministic)
    try:
        yield groups
    finally:
        torch.use_deterministic_algorithms(False)
        groups.close()


def empty_engine(groups: Groups, scale: Scale, **trained: Any) -> Engine:
    """An engine without models. `trained` has fields of spec.trainer."""
    trainer = {"compile": "Auto" if scale.compiles else "Never", **trained}
    fields = {"groups": [{"name": "t", "roles": ["trainer", "rollout"]}], "trainer": trainer}
    return Engine(RLHFJobSpec.model_validate(fields), groups)


def engine(groups: Groups, scale: Scale, layers: int, models: Sequence[str], **trained: Any) -> Engine:
    """A PPO engine that holds these models. `trained` has fields of spec.trainer."""
    made = empty_engine(groups, scale, **trained)
    refs = {name: reference(scale, layers, HEADS[name]) for name in models}
    with random_weights():
        made.load(Load(id="load", stage=Stage.PPO, models=refs, total_steps=1000))
    return made


# ------------------------------------------------------------ work


def lengths(scale: Scale, count: int, equal: bool, seed: int = 0) -> list[int]:
    """The tokens of each of `count` sequences. With `equal` each has `scale.tokens`. Otherwise each has between half
    and one and a half times that, and the sum is the same."""
    if equal:
        return [scale.tokens] * count
    drawn = random.Random(seed)
    half = [drawn.randint(-scale.tokens // 2, scale.tokens // 2) for _ in range(count // 2)]
    return [scale.tokens + x for x in half] + [scale.tokens] * (count % 2) + [scale.tokens - x for x in half]


def micro_batches(scale: Scale, head: str, equal: bool, vocabulary: int) -> list[MicroBatch]:
    """The micro-batches of one optimizer step."""
    made = []
    for index in range(scale.micro_batches):
        sizes = torch.tensor(lengths(scale, scale.sequences, equal, index))
        tokens = torch.randint(1, vocabulary, (len(sizes), int(sizes.max())))
        wanted = torch.arange(tokens.shape[1]) < sizes.unsqueeze(1) - 1
        packed = Sequences(tokens, sizes).pack(range(len(sizes)), wanted)

        def loss(output: Tensor | Predicted) -> tuple[Tensor, dict[str, Tensor]]:
            value = -output.logprobs.mean() if isinstance(output, Predicted) else output.square().mean()
            return value / scale.micro_batches, {"loss": value.detach()}

        made.append(MicroBatch(packed, loss, Predictions if head == "lm" else None))
    return made


def in_turn(model: str, count: int) -> list[Action]:
    """A schedule that runs each micro-batch forward and then backward."""
    kinds: tuple[Any, ...] = ("F", "B")
    return [Action(model=model, micro_batch=i, kind=kind) for i in range(count) for kind in kinds]


def training_flops(scale: Scale, layers: int, head: str, sizes: Sequence[int]) -> float:
    """The floating-point operations of a forward and a backward pass over sequences of these lengths. They are six for
    each weight and token, and those of causal attention. Recomputation does not count."""
    vocabulary = scale.config["vocab_size"] * scale.config["hidden_size"]
    outside = scale.parameters(0)
    weights = scale.parameters(layers) - outside + (vocabulary if head == "lm" else 0)
    attention = 6 * layers * scale.config["hidden_size"] * sum(n * n for n in sizes)
    return 6.0 * weights * sum(sizes) + attention


# ------------------------------------------------------------ the stock tool


class _Values(torch.nn.Module):
    """A Hugging Face body with a value for each token."""

    def __init__(self, body: Any, hidden: int) -> None:
        super().__init__()
        self.body = body
        self.score = torch.nn.Linear(hidden, 1, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        values: Tensor = self.score(self.body(input_ids=input_ids, use_cache=False).last_hidden_state)
        return values.squeeze(-1).float()


def stock_model(scale: Scale, layers: int, head: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Hugging Face's own model with random weights. torch's scaled_dot_product_attention computes attention."""
    from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**scale.shape(layers))
    kind: Any = AutoModelForCausalLM if head == "lm" else AutoModel
    with torch.device("cuda"):
        model = kind.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model if head == "lm" else _Values(model, config.hidden_size).to(dtype)


def stock_step(scale: Scale, layers: int, head: str) -> tuple[Callable[[], None], str]:
    """A training step of as many tokens with the stock tools, and a description of these. The whole model is compiled
    if it can be. Weights, gradients and moments are in bfloat16, and rows have equal length without padding."""
    model = stock_model(scale, layers, head).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    name = "Hugging Face, torch.compile, fused AdamW"
    if scale.compiles:
        model.compile()
    else:
        name = "Hugging Face, fused AdamW"
    vocabulary = scale.config["vocab_size"]
    rows = [torch.randint(1, vocabulary, (scale.sequences, scale.tokens)).cuda() for _ in range(scale.micro_batches)]

    def step() -> None:
        for tokens in rows:
            if head == "lm":
                logits = model(input_ids=tokens, use_cache=False).logits
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
            else:
                loss = model(tokens).square().mean()
            (loss / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, name
