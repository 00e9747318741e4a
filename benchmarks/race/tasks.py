"""Three small tasks whose reward is the share of right digits, and what both systems are told.

Standard library only: it is read in both virtual environments, and our job imports `score` from this folder."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

DIGITS = 7
TASKS = {
    "sort": sorted,
    "reverse": lambda digits: digits[::-1],
    "sums": lambda digits: [total % 10 for total in accumulate(digits)],
}
# The equal settings: what TRL's GRPOTrainer does by default, but for the sizes and the rate.
SETTINGS: dict[str, Any] = {
    "iterations": 60,
    "prompts": 8,
    "samples": 8,
    "learning_rate": 3e-4,
    "max_tokens": DIGITS + 3,
    "clip_high": 0.2,
    "aggregation": "Token",
    "normalize_std": True,
    "weight_decay": 0.0,
    "loss": "ppo",
    # Optimizer steps of an iteration, and passes over its samples.
    "mini_batches": 1,
    "epochs": 1,
    "kl_coef": 0.0,
}


def prompts(task: str, count: int, seed: int) -> list[dict[str, str]]:
    """Records with `prompt` and the right `answer`, without duplicates. Every digit is a word."""
    draw = random.Random(f"{task} {seed}")
    found: dict[str, str] = {}
    while len(found) < count:
        digits = [draw.randrange(10) for _ in range(DIGITS)]
        found[_words(digits) + " ="] = _words(TASKS[task](digits))
    return [{"prompt": prompt, "answer": answer} for prompt, answer in found.items()]


def _words(digits: list[int]) -> str:
    return " ".join(str(digit) for digit in digits)


def score(prompts: list[str], responses: list[str], answer: list[str], **fields: object) -> list[float]:
    """The share of places, of answer or response, whichever is longer, that hold the right digit."""
    return [_score(response.split(), right.split()) for response, right in zip(responses, answer, strict=True)]


def _score(said: list[str], right: list[str]) -> float:
    return sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right))
