"""Reads a sample's tokens, with their text and log-probabilities, from the batch that the trainers learnt from."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.coordinator.reporting.sample_files import Row
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.wire import Arrays

Document = dict[str, Any]
# The maximum number of tokens that are shown of a prompt, and of a response.
TOKENS = 4000


def token_texts(run_dir: Path, ids: list[int]) -> list[str] | None:
    """The text of each token. Joined they are the whole text. None without the run's tokenizer."""
    path = run_dir / "tokenizer" / "tokenizer.json"
    try:
        from tokenizers.decoders import DecodeStream

        tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
    except Exception:  # the library raises plain Exception for a file that it does not understand
        return None
    stream = DecodeStream(skip_special_tokens=False)
    # A token that ends within a character has no text. The next token has the whole character.
    return [stream.step(tokenizer, token) or "" for token in ids]


@lru_cache(maxsize=1)
def _tokenizer(path: Path, _changed: int) -> Any:
    """The tokenizer in a file, which takes long to read. `_changed`: the time of its last change."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def batch_row(arrays: Arrays, prompt: int, number: int) -> int:
    """The row of the batch with the prompt's `number`-th sample, or -1 if there is none."""
    rows = np.flatnonzero(arrays["groups"] == prompt) if arrays else np.empty(0, np.intp)
    return int(rows[number]) if number < len(rows) else -1


def token_document(arrays: Arrays, row: int, run_dir: Path) -> Document:
    """A sample's tokens. `prompt` and `response` have the texts of their tokens. For each token of the response there
    are its `logprob` when it was sampled, and its `reference`, `value` and `advantage`, if the batch has them. {} if
    the batch or the tokenizer is missing."""
    if not arrays or not 0 <= row < len(arrays["tokens"]):
        return {}
    begin, count = int(arrays["prompt_lengths"][row]), int(arrays["response_lengths"][row])
    ids = [int(token) for token in arrays["tokens"][row, : begin + count]]
    texts = token_texts(run_dir, ids)
    if texts is None:
        return {}
    named = {"logprob": "rollout_logprobs", "reference": "ref_logprobs", "value": "values", "advantage": "advantages"}
    return {
        "prompt": texts[:begin][-TOKENS:],
        "response": texts[begin:][:TOKENS],
        "left_out": max(0, begin - TOKENS) + max(0, count - TOKENS),
        **{
            name: [round(float(x), 4) for x in np.asarray(arrays[key], np.float32)[row, : min(count, TOKENS)]]
            for name, key in named.items()
            if key in arrays
        },
    }


def not_learnt(job: RLHFJob | None, row: Row, equal_group: bool) -> str:
    """The reason why nothing is learnt from the response. Empty if it is learnt."""
    if job is None:
        return ""
    if job.spec.ppo.mask_truncated and row.get("finish_reason") == "length":
        return "it was cut at the limit, and ppo.maskTruncated is set"
    if job.spec.ppo.drop_equal_groups and equal_group:
        return "all samples of its prompt have the same reward, and ppo.dropEqualGroups is set"
    return ""
