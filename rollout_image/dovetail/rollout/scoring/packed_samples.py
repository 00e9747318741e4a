"""The samples of a request, and the way in which they share forward passes. Each prompt is computed once, and then all
responses to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dovetail.protocol.wire import Arrays

# Attention on GPUs repeats a prompt's KV cache for each of its responses. The copies have at most so many times a
# pack's tokens.
KEYS = 8


@dataclass(frozen=True)
class SamplesToScore:
    """N samples. `tokens` (N, T) int64 has the prompt and then the response, right-padded. `prompts` and `responses`
    (N,) int64 are their lengths.

    `held` (N,) int64 is the number of response tokens that the model has already processed, together with the prompt.
    The pass continues from their keys and values. If it is 0, the model has not processed the prompt either. None means
    0 for all samples. With `unfinished` the last response token is known, but the model does not process it yet."""

    tokens: NDArray[np.int64]
    prompts: NDArray[np.int64]
    responses: NDArray[np.int64]
    held: NDArray[np.int64] | None = None
    unfinished: bool = False

    @staticmethod
    def read(arrays: Arrays) -> SamplesToScore:
        """Read the arrays of POST /v1/score. Raises ValueError that names the wrong array."""
        found = {}
        for name, dimensions in (("tokens", 2), ("prompt_lengths", 1), ("response_lengths", 1)):
            if name not in arrays:
                raise ValueError(f"array {name} is missing")
            array = arrays[name]
            if array.ndim != dimensions or array.dtype.kind not in "iu":
                raise ValueError(
                    f"{name} must be an integer array of {dimensions} dimensions, "
                    f"not {array.dtype} of shape {array.shape}"
                )
            found[name] = array.astype(np.int64)
        tokens, prompts, responses = found["tokens"], found["prompt_lengths"], found["response_lengths"]
        if not len(tokens) == len(prompts) == len(responses):
            raise ValueError("tokens, prompt_lengths and response_lengths must have one row a sample")
        if len(prompts) and prompts.min() < 1:
            raise ValueError("prompt_lengths must be at least 1: the first response token needs a token before it")
        if len(responses) and responses.min() < 0:
            raise ValueError("response_lengths must not be negative")
        if len(prompts) and (prompts + responses).max() > tokens.shape[1]:
            raise ValueError("prompt_lengths + response_lengths exceed the width of tokens")
        return SamplesToScore(tokens, prompts, responses)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.prompts + self.responses

    def without_end(self, token: int) -> SamplesToScore:
        """The samples without the tokens `token` at their ends. Each keeps its first token."""
        inside = np.arange(self.tokens.shape[1]) < self.lengths[:, None]
        kept = np.where(inside & (self.tokens != token), np.arange(1, self.tokens.shape[1] + 1), 1).max(axis=1)
        return replace(self, prompts=np.minimum(self.prompts, kept), responses=np.maximum(kept - self.prompts, 0))

    @cached_property
    def begins(self) -> NDArray[np.int64]:
        """`held` of every sample, or zeros if it is None."""
        return np.zeros(len(self.tokens), np.int64) if self.held is None else self.held

    @cached_property
    def new(self) -> NDArray[np.int64]:
        """The number of each sample's response tokens that go through the model."""
        return self.responses - self.begins - self.unfinished


@dataclass(frozen=True)
class Pack:
    """Samples of one forward pass. `tokens` (total,) int64 has sequences of `lengths`, which continue `prefixes` as
    `Stage.forward` takes them. Some sequences are prompts. The others continue their prompts.

    `rows` (n,): the samples. `last` (n,): the place in `tokens` of each sample's last token. `places` (n,): the
    sequence with its response. The next three arrays (m,) have an entry for each response token whose predecessor is in
    the pass: `of` is its sample, `at` its place in the response, and `before` the place of its predecessor in
    `tokens`."""

    tokens: NDArray[np.int64]
    lengths: tuple[int, ...]
    prefixes: tuple[int | None, ...]
    rows: NDArray[np.int64]
    last: NDArray[np.int64]
    places: NDArray[np.int64]
    of: NDArray[np.int64]
    at: NDArray[np.int64]
    before: NDArray[np.int64]


def groups(samples: SamplesToScore) -> list[list[int]]:
    """Samples with the same prompt form a group. Samples and groups are in order of length, the longest first. A sample
    whose prompt the model has already processed is a group of its own."""
    found: dict[bytes | int, list[int]] = {}
    lengths = samples.lengths
    for row in sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i)):
        alone = samples.begins[row] > 0
        found.setdefault(row if alone else samples.tokens[row, : samples.prompts[row]].tobytes(), []).append(row)
    return list(found.values())


def packs(samples: SamplesToScore, max_tokens: int, max_outputs: int, enough: int | None = None) -> Iterator[Pack]:
    """All samples in packs. A pack has at most `max_tokens` tokens and `max_outputs` positions before response tokens,
    and its samples have at most `KEYS` x `max_tokens` tokens with their prompts (or it has one sample). A prompt is in
    as few packs as possible. Samples of several prompts share a pack up to `enough` tokens."""
    limits = np.array([max_tokens, max_outputs, KEYS * max_tokens])
    together = np.minimum(limits, [enough or max_tokens, max_outputs, KEYS * max_tokens])

    def cost(rows: Sequence[int], prompt: bool) -> NDArray[np.int64]:
        held, responses = int(samples.begins[rows[0]]), int(samples.new[rows].sum())
        before, prompt = held + int(samples.prompts[rows[0]]), prompt and not held
        return np.array([responses + prompt * before, responses + prompt, responses + len(rows) * before])

    pack: list[list[int]] = []
    used = np.zeros(3, np.int64)
    for group in groups(samples):
        parts = [[row] for row in group] if (cost(group, True) > limits).any() else [group]
        joined = False
        for part in parts:
            if pack and (used + cost(part, not joined) > (limits if joined else together)).any():
                yield _pack(samples, pack)
                pack, used, joined = [], np.zeros(3, np.int64), False
            used = used + cost(part, not joined)
            if joined:
                pack[-1] += part
            else:
                pack.append(list(part))
            joined = True
    if pack:
        yield _pack(samples, pack)


def _pack(samples: SamplesToScore, chosen: Sequence[Sequence[int]]) -> Pack:
    """Packs of groups that share a prompt."""
    parts: list[NDArray[np.int64]] = []
    prefixes: list[int | None] = []
    last, places, at, before = [], [], [], []
    total = 0
    for group in chosen:
        length, held = int(samples.prompts[group[0]]), int(samples.begins[group[0]])
        prompt = None
        if not held:
            prompt = len(parts)
            parts.append(samples.tokens[group[0], :length])
            prefixes.append(None)
            total += length
        end = total - 1
        for row in group:
            new = int(samples.new[row])
            # The token before the first new one is the prompt's last token, or was processed earlier.
            path = np.arange(total, total + new)
            path = path if held else np.append(end, path)
            here = path[: len(path) - (not samples.unfinished)]
            before.append(here)
            at.append(np.arange(len(here)) + (held + 1 if held else 0))
            places.append(len(parts) if new else prompt)
            if new:
                parts.append(samples.tokens[row, length + held : length + held + new])
                prefixes.append(prompt)
                total += new
            last.append(total - 1 if new else end)
    rows = np.array([row for group in chosen for row in group])
    return Pack(
        np.concatenate(parts),
        tuple(len(part) for part in parts),
        tuple(prefixes),
        rows,
        np.array(last),
        np.array(places),
        np.repeat(rows, [len(part) for part in at]),
        np.concatenate(at),
        np.concatenate(before),
    )
