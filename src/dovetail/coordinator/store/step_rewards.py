"""Converts the rewards of steps. Functions return them at characters of a response, and arrays have them at tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.store.samples import Key, Sample
from dovetail.protocol.wire import Arrays

Text = Callable[[NDArray[np.int32]], str]


def step_arrays(
    samples: Sequence[Sample],
    steps: Mapping[Key, Mapping[str, Sequence[tuple[int, float]]]],
    weights: Mapping[str, float],
    text: Text,
) -> Arrays:
    """The arrays `step_rewards` (N,R) float32 and `step_ends` (N,R) uint8, which is 1 at the tokens that end a step. {}
    without steps.

    `steps` has, by sample and function, the number of characters up to each step's end, and its reward. The rewards of
    each function are multiplied by its weight in `weights`. Rewards at one token are added up. `text` decodes a
    response."""
    if not any(found for of_sample in steps.values() for found in of_sample.values()):
        return {}
    shape = len(samples), max(len(s.tokens) for s in samples)
    rewards, ends = np.zeros(shape, np.float64), np.zeros(shape, np.uint8)
    lengths: dict[int, int] = {}
    for row, sample in enumerate(samples):
        for function, found in sorted(steps.get(sample.key, {}).items()):
            tokens = last_tokens(sample.tokens, [end for end, _ in found], text, lengths)
            for token, (_, reward) in zip(tokens, found, strict=True):
                rewards[row, token] += weights[function] * reward
                ends[row, token] = 1
    return {"step_rewards": rewards.astype(np.float32), "step_ends": ends}


def last_tokens(
    tokens: NDArray[np.int32], ends: Sequence[int], text: Text, lengths: dict[int, int] | None = None
) -> list[int]:
    """For each number of characters in `ends`, the first token up to which the text has at least that many characters.
    If the text is shorter, this is the last token."""
    if not ends or not len(tokens):
        return []
    known: dict[int, int] = {} if lengths is None else lengths
    ids = tokens.tolist()
    for place, token in enumerate(ids):
        if token not in known:
            known[token] = len(text(tokens[place : place + 1]))
    about = list(accumulate(known[token] for token in ids))
    found = []
    for end in ends:
        count = min(bisect_left(about, end) + 1, len(tokens))
        while count < len(tokens) and len(text(tokens[:count])) < end:
            count += 1
        while count > 1 and len(text(tokens[: count - 1])) >= end:
            count -= 1
        found.append(count - 1)
    return found
