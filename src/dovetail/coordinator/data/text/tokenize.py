"""Turns records into token ids and right-padded batches (docs/architecture.md, "Batches")."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.records import Demonstration, Judged, Labelled, Preference, Rendered, like
from dovetail.protocol.wire import Arrays

Tokens = list[int]
Row = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class Encoded:
    """One sequence of token ids. The first `prompt_length` tokens are context. The later ranges (start, end) in `given`
    are context, too. The other tokens are learnt."""

    tokens: Row
    prompt_length: int
    given: tuple[tuple[int, int], ...] = ()


class Encoder:
    """A tokenizer with the job's limits.

    Prompts longer than `max_prompt_tokens` keep only their last tokens. `max_tokens` is the limit of prompt, response
    and end token together. A longer sequence loses the end of its response, and also the end token, because the text
    does not end there. A prompt leaves at least half of `max_tokens` to the response."""

    def __init__(self, tokenizer: Any, max_prompt_tokens: int, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.eos: int = tokenizer.eos_token_id
        self.pad: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos
        self.max_prompt_tokens = max_prompt_tokens
        self.max_tokens = max_tokens
        # What the tokenizer writes around a text of its own accord. Only models that expect it have such tokenizers
        # (Llama does; Qwen and the GPT-2 tokenizer of OPT do not).
        around, alone = (self._ids("a", special) for special in (True, False))
        first = next((i for i in range(len(around)) if around[i : i + len(alone)] == alone), 0)
        self._first, self._last = first, len(around) - len(alone) - first
        self._opening = {around[0] if first else None, tokenizer.bos_token_id}

    def _ids(self, text: str, special: bool) -> Tokens:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def encode(self, text: str) -> Tokens:
        """All token ids of a text that the model continues. A rendered text has its special tokens. To another text the
        tokenizer adds what it writes before it."""
        if isinstance(text, Rendered):
            return self._ids(text, special=False)
        ids = self._ids(text, special=True)
        return ids[: len(ids) - self._last]

    def prompt(self, text: str) -> Tokens:
        """The token ids of a prompt, within the limit."""
        return self._cut(self.encode(text), self.max_prompt_tokens)

    def _cut(self, ids: Tokens, limit: int) -> Tokens:
        """The last `limit` ids. A first id that opens every text is kept, too."""
        if len(ids) <= limit:
            return ids
        opening = ids[:1] if ids[0] in self._opening else []
        return opening + ids[len(ids) - limit + len(opening) :]

    def whole(self, record: Demonstration) -> tuple[Tokens, list[tuple[int, int]]]:
        """All token ids of a text with its end token, and the (start, end) of each range that is learnt."""
        text, fast = record.text, bool(getattr(self.tokenizer, "is_fast", False))
        special = not isinstance(text, Rendered)
        found = self.tokenizer(text, add_special_tokens=special, **({"return_offsets_mapping": True} if fast else {}))
        ids = list(found["input_ids"])
        offsets = found["offset_mapping"][: len(ids) - (self._last if special else 0)] if fast else None
        places = [
            self._place(text, at, ids, offsets, ends=ends) for span in record.learnt for ends, at in enumerate(span)
        ]
        if special and ids[-1:] != [self.eos]:
            ids.append(self.eos)
        places[-1] = len(ids)
        return ids, list(zip(places[::2], places[1::2], strict=True))

    def _place(self, text: str, at: int, ids: Tokens, offsets: Sequence[tuple[int, int]] | None, ends: int) -> int:
        """The number of ids before character `at`. A token with characters on both sides is learnt, unless those of the
        learnt side are only white space. `ends` says whether the learnt side is before `at`."""
        if offsets is None:
            before = self.encode(like(text, text[:at]))
            unlike = (i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b)
            return next(unlike, min(len(before), len(ids)))
        first = 0 if isinstance(text, Rendered) else self._first
        place = bisect_right(offsets, at, first, key=lambda span: span[1])
        while place > first and offsets[place - 1] == (at, at):  # a word boundary that the text does not have
            place -= 1
        start, end = offsets[place] if place < len(offsets) else (at, at)
        if not start < at < end:
            return place
        learnt = text[start:at] if ends else text[at:end]
        return place + (bool(learnt.strip()) == bool(ends))

    def demonstration(self, record: Demonstration) -> Encoded:
        """The sequence of a text, within the limits."""
        ids, learnt = self.whole(record)
        first, most = learnt[0][0], self.max_tokens
        limit = self.max_prompt_tokens if self.max_prompt_tokens < most else max(1, most // 2)
        prompt = self._cut(ids[:first], limit)
        gone = first - len(prompt)
        between = [(a - gone, b - gone) for (_, a), (b, _) in pairwise(learnt) if a < b]
        kept = tuple((start, min(end, most)) for start, end in between if start < most)
        return Encoded((prompt + ids[first:])[:most], len(prompt), kept)

    def continued(self, prompt: str, response: str) -> Encoded:
        """The sequence of a prompt and a response, within the limits."""
        return self.demonstration(Demonstration.of(prompt, response))

    def labelled(self, record: Labelled) -> Encoded:
        return self.continued(record.prompt, record.response)

    def preference(self, record: Preference) -> tuple[Encoded, Encoded]:
        """The sequences of the chosen and the rejected response."""
        return self.continued(record.prompt, record.chosen), self.continued(record.prompt, record.rejected)

    def equal(self, record: Preference) -> bool:
        """Whether nothing can be learnt from a pair, because both sequences are equal. Perhaps both are cut."""
        chosen, rejected = self.preference(record)
        return chosen.tokens == rejected.tokens

    def sequences(self, record: Demonstration | Judged) -> tuple[Encoded, ...]:
        """The sequences of a record. These are the chosen and the rejected one of a pair, or the only one."""
        if isinstance(record, Demonstration):
            return (self.demonstration(record),)
        return (self.labelled(record),) if isinstance(record, Labelled) else self.preference(record)


def right_pad(rows: Sequence[Row], pad: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pad rows on the right. Returns (tokens (N,T) int32, lengths (N,) int32). T is the length of the longest row."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), int(lengths.max(initial=1))), pad, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, lengths


def sft_batch(sequences: Sequence[Encoded], pad: int, prefix: str = "") -> Arrays:
    """The arrays of an SFT batch: `tokens` (N,T) int32, `lengths` (N,) int32, and `loss_mask` (N,T) uint8, which is 1
    on responses and the end token. `prefix` begins their names."""
    tokens, lengths = right_pad([s.tokens for s in sequences], pad)
    column = np.arange(tokens.shape[1])[None, :]
    start = np.array([s.prompt_length for s in sequences], np.int32)[:, None]
    mask = ((column >= start) & (column < lengths[:, None])).astype(np.uint8)
    for row, sequence in enumerate(sequences):
        for first, last in sequence.given:
            mask[row, first:last] = 0
    return {f"{prefix}tokens": tokens, f"{prefix}lengths": lengths, f"{prefix}loss_mask": mask}


def reward_batch(pairs: Sequence[tuple[Encoded, Encoded]], pad: int) -> Arrays:
    """The arrays of a reward batch: `chosen_tokens` and `rejected_tokens` (N,T) int32, each with its own T, and
    `chosen_lengths` and `rejected_lengths` (N,) int32."""
    chosen, chosen_lengths = right_pad([c.tokens for c, _ in pairs], pad)
    rejected, rejected_lengths = right_pad([r.tokens for _, r in pairs], pad)
    return {
        "chosen_tokens": chosen,
        "chosen_lengths": chosen_lengths,
        "rejected_tokens": rejected,
        "rejected_lengths": rejected_lengths,
    }


def dpo_batch(pairs: Sequence[tuple[Encoded, Encoded]], pad: int, mismatched: int | None) -> Arrays:
    """The arrays of an SFT batch of 2N sequences. The N chosen ones come first, and then the N rejected ones.

    KTO's estimate of the KL also needs each prompt with the response of the next row. `mismatched` limits the tokens of
    each of these sequences. Their arrays have the prefix `kl_`. If it is None, they are left out."""
    rows = [c for c, _ in pairs] + [r for _, r in pairs]
    return sft_batch(rows, pad) | ({} if mismatched is None else _mismatched(rows, pad, mismatched))


def labelled_batch(rows: Sequence[Encoded], good: Sequence[bool], pad: int, mismatched: int) -> Arrays:
    """The arrays of an SFT batch of N responses, `good` (N,) uint8, and the arrays with the prefix `kl_` as in
    `dpo_batch`."""
    return {**sft_batch(rows, pad), "good": np.array(good, np.uint8), **_mismatched(rows, pad, mismatched)}


def _mismatched(rows: Sequence[Encoded], pad: int, limit: int) -> Arrays:
    """The arrays of each row's prompt with the response of the next row, in at most `limit` tokens."""
    others = [
        Encoded(
            np.concatenate([row.tokens[: row.prompt_length], other.tokens[other.prompt_length :]])[:limit],
            row.prompt_length,
        )
        for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
    ]
    return sft_batch(others, pad, "kl_")


def ppo_batch(prompts: Sequence[Row], responses: Sequence[Row], pad: int) -> Arrays:
    """The arrays of a PPO batch: `tokens` (N,T) int32, which is the prompt and then the response, and `prompt_lengths`
    and `response_lengths` (N,) int32."""
    tokens, _ = right_pad([np.concatenate([p, r]) for p, r in zip(prompts, responses, strict=True)], pad)
    return {
        "tokens": tokens,
        "prompt_lengths": np.array([len(p) for p in prompts], np.int32),
        "response_lengths": np.array([len(r) for r in responses], np.int32),
    }


def by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The positions in batches of `size`, sorted by length so that there is little padding. The last batch may be
    smaller."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    return [order[i : i + size] for i in range(0, len(order), size)]
