"""Compares the numbers of trainer and scorer with those of Hugging Face's model of the same folder in float32. The
anchor is the distance of Hugging Face's own bfloat16 from it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dovetail.manifest.types import Stage
from dovetail.models.layers.predictions import Predicted, Predictions
from dovetail.protocol.messages import Load, ModelRef
from dovetail.rollout.scoring.forward_passes import ModelScorer
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from dovetail.trainer.engine.executor import MicroBatch
from dovetail.trainer.packed_batches import Sequences
from gpu import models
from gpu.report import Report
from gpu.scale import Scale
from gpu.timing import free

# llama is like most families. qwen3 has tied weights and norms of queries and keys. gemma2 has bounded logits and
# windows.
FAMILIES = ("llama", "qwen3", "gemma2")
VOCABULARY = 151936


@dataclass(frozen=True)
class Found:
    """The results of one forward and backward pass. `logprobs` has each token after the first, row by row."""

    logprobs: Tensor
    norm: float


def run(scale: Scale, report: Report) -> None:
    sizes = [16, 9, 12] if scale.name == "tiny" else [512, 200, 384, 131, 512, 77, 256, 300]
    for family in FAMILIES:
        with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
            vocabulary = _make(family, Path(folder), scale.name == "tiny")
            torch.manual_seed(0)
            tokens = torch.randint(1, vocabulary, (len(sizes), max(sizes)))
            right, stock = (_stock(folder, tokens, sizes, dtype) for dtype in (torch.float32, torch.bfloat16))
            free()
            ours = _trained(scale, folder, tokens, sizes)
            free()
            scored = _scored(folder, tokens, sizes)
            free()
        beside = _error(stock.logprobs, right.logprobs)
        note = f"root mean square, of {len(right.logprobs)} tokens; 1 is as good as the anchor"
        anchor = "Hugging Face in bfloat16"
        report.add(
            f"log-probabilities, {family}, trainer", _error(ours.logprobs, right.logprobs), "", anchor, beside, note
        )
        report.add(f"log-probabilities, {family}, scorer", _error(scored, right.logprobs), "", anchor, beside, note)
        norms = [abs(each.norm / max(right.norm, 1e-30) - 1) for each in (ours, stock)]
        report.add(f"gradient norm, {family}", norms[0], "", anchor, norms[1], "relative to float32")


def _make(family: str, folder: Path, tiny: bool) -> int:
    """Write a folder with random weights. Returns the size of its vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    width, vocabulary = (64, 256) if tiny else (1024, VOCABULARY)
    config = AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2 if tiny else 4,
        num_attention_heads=width // 16 if tiny else width // 64,
        num_key_value_heads=2,
        head_dim=16 if tiny else 64,
        max_position_embeddings=1024,
        tie_word_embeddings=family != "llama",
        pad_token_id=0,
        initializer_range=0.05,
        **({"sliding_window": 128} if family == "gemma2" else {}),
    )
    torch.manual_seed(1)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return vocabulary


def _stock(folder: str, tokens: Tensor, sizes: list[int], dtype: torch.dtype) -> Found:
    from transformers import AutoModelForCausalLM

    attention = "eager" if "gemma2" in (Path(folder) / "config.json").read_text() else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).cuda().eval()
    found, count = [], sum(sizes) - len(sizes)
    for row, size in zip(tokens, sizes, strict=True):
        some = row[:size].cuda()
        logits = model(input_ids=some[None], use_cache=False).logits[0, :-1].float()
        each = torch.log_softmax(logits, -1).gather(1, some[1:, None]).squeeze(1)
        (-each.sum() / count).backward()
        found.append(each.detach())
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    return Found(torch.cat(found), float(torch.stack(norms).norm()))


def _trained(scale: Scale, folder: str, tokens: Tensor, sizes: list[int]) -> Found:
    """The results of the trainer's pass, with layers compiled as by default."""
    wanted = torch.arange(tokens.shape[1]) < torch.tensor(sizes).unsqueeze(1) - 1
    packed = Sequences(tokens, torch.tensor(sizes)).pack(range(len(sizes)), wanted)
    kept: list[Tensor] = []

    def loss(output: Tensor | Predicted) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(output, Predicted)
        kept.append(output.logprobs.detach().clone())
        value = -output.logprobs.mean()
        return value, {"loss": value.detach()}

    with models.one_rank() as groups:
        engine = models.empty_engine(groups, scale)
        refs = {"actor": ModelRef(head="lm", path=folder)}
        engine.load(Load(id="load", stage=Stage.PPO, models=refs, total_steps=10))
        engine.run(models.in_turn("actor", 1), {"actor": [MicroBatch(packed, loss, Predictions)]})
        norm = engine.optimizer_step("actor")["grad_norm"]
    return Found(kept[0], norm)


def _scored(folder: str, tokens: Tensor, sizes: list[int]) -> Tensor:
    scorer = ModelScorer("cuda:0", torch.bfloat16)
    scorer.load({"reference": ModelRef(head="lm", path=folder)})
    lengths = np.array(sizes)
    given = SamplesToScore(tokens.numpy(), np.ones_like(lengths), lengths - 1)
    rows = scorer.score(["reference"], given)["ref_logprobs"]
    return torch.cat([torch.from_numpy(row[: size - 1].copy()) for row, size in zip(rows, sizes, strict=True)])


def _error(found: Tensor, right: Tensor) -> float:
    return float((found.double().cpu() - right.double().cpu()).square().mean().sqrt())
