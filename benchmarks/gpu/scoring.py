"""Measures passes of a scorer."""

from __future__ import annotations

import numpy as np
import torch

from dovetail.rollout.scoring.forward_passes import ModelScorer
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from gpu import models
from gpu.report import Report
from gpu.scale import Scale
from gpu.timing import by_clock, free


def samples(scale: Scale, count: int, shared: int, equal: bool) -> SamplesToScore:
    """`count` samples. Each prompt belongs to `shared` of them, and has a quarter of the tokens on average."""
    rng = np.random.default_rng(0)
    prompt = max(1, scale.tokens // 4)
    sizes = np.array(models.lengths(scale, count, equal)) - prompt
    tokens = np.zeros((count, prompt + int(sizes.max())), np.int64)
    for row, size in enumerate(sizes):
        if row % shared == 0:
            prompt_tokens = rng.integers(1, scale.config["vocab_size"], prompt)
        tokens[row, :prompt] = prompt_tokens
        tokens[row, prompt : prompt + size] = rng.integers(1, scale.config["vocab_size"], size)
    return SamplesToScore(tokens, np.full(count, prompt), sizes)


def scorer(scale: Scale, layers: int, names: tuple[str, ...]) -> ModelScorer:
    made = ModelScorer("cuda:0", torch.bfloat16)
    heads = {"reference": "lm", "reward": "value", "critic": "value"}
    with models.random_weights():
        made.load({name: models.reference(scale, layers, heads[name]) for name in names})
    return made


def run(scale: Scale, report: Report) -> None:
    count = scale.samples
    ours = _ours(scale, count)
    free()
    for name, head in (("reference", "lm"), ("reward", "value")):
        tokens = stock_forward(scale, scale.layers, head, count)
        for (model, what), value in ours.items():
            if model == name:
                report.add(
                    f"{name}, {what}", value, "tokens/s", "Hugging Face, equal lengths", tokens, "bfloat16, no padding"
                )
        free()


def _ours(scale: Scale, count: int) -> dict[tuple[str, str], float]:
    """The tokens per second, by model and kind of samples."""
    found = {}
    made = scorer(scale, scale.layers, ("reference", "reward"))
    for name in ("reference", "reward"):
        for what, given in (
            ("equal lengths", samples(scale, count, 1, True)),
            ("unlike lengths", samples(scale, count, 1, False)),
            ("8 samples a prompt", samples(scale, count, 8, False)),
        ):
            seconds = by_clock(lambda name=name, given=given: made.score([name], given), scale.repeats)
            found[name, what] = int(given.lengths.sum()) / seconds
    return found


def stock_forward(scale: Scale, layers: int, head: str, count: int) -> float:
    """The tokens per second of Hugging Face's forward pass with torch's flash attention, log-probabilities included."""
    model = models.stock_model(scale, layers, head).eval()
    rows = torch.randint(1, scale.config["vocab_size"], (count, scale.tokens)).cuda()

    def work() -> None:
        with torch.no_grad():
            for some in rows.split(scale.sequences):
                if head == "lm":
                    logits = model(input_ids=some, use_cache=False).logits
                    for row, row_tokens in zip(logits, some, strict=True):
                        torch.log_softmax(row.float(), -1).gather(1, row_tokens.unsqueeze(1)).cpu()
                else:
                    model(some)[:, -1].cpu()

    return rows.numel() / by_clock(work, scale.repeats)
