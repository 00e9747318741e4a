"""Samples with noise that depends on the position. It is a logits processor of vLLM's V1 runner.

A token is drawn by the Gumbel-max trick. The argmax over tokens t of logit[t]/T + g[t], with g[t] = -log(-log u[t]), is
an exact sample of softmax(logits/T). u comes from a counter-based generator (Philox4x64-10, Salmon et al. 2011) and
depends only on (seed, absolute position, token id). So another server can continue a response from its prompt and
tokens so far with the same noise, whatever else runs in either batch.

Requests ask for it with temperature 0 and `extra_args` (`dovetail.protocol.sampling`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from dovetail.protocol.sampling import SEED, TEMPERATURE, TOP_K, TOP_P
from dovetail.rollout.compat import follow_batch

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

_KEYS = {SEED, TEMPERATURE, TOP_K, TOP_P}
_MASK64 = 2**64 - 1
# So many elements are transformed at a time. float64 temporaries of this size stay in a core's cache.
_CHUNK = 1 << 15
# Top-p looks at so many of the largest logits first. It looks at more only if they hold too little probability.
_TOP = 256


class GumbelNoise:
    """Gumbel noise for rows of (seed, position). There is one object per process, and it is not thread-safe.

    Token t of the row uses the t-th 32-bit word of the Philox stream with key `seed` and counter (0, 0, 0, position).
    So streams of two positions never overlap."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._state: Any = self._bits.state
        self._state["buffer_pos"] = 4  # the buffer is empty, so start at the counter
        self._state["has_uint32"] = 0
        self._scratch = np.empty(_CHUNK, np.float64)

    def _words(self, seed: int, position: int, count: int) -> NDArray[np.uint32]:
        counter, key = self._state["state"]["counter"], self._state["state"]["key"]
        counter[:] = (0, 0, 0, position)
        key[:] = (seed & _MASK64, 0)
        self._bits.state = self._state
        return self._bits.random_raw((count + 1) // 2).view(np.uint32)[:count]

    def fill(self, out: NDArray[np.float32], keys: list[tuple[int, int]]) -> None:
        """Write noise into `out` (rows, vocabulary) float32. `keys` holds the (seed, position) of each row."""
        vocab = out.shape[1]
        words = np.empty(out.shape, np.uint32)
        for row, (seed, position) in enumerate(keys):
            words[row] = self._words(seed, position, vocab)
        flat, source = out.reshape(-1), words.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            u = self._scratch[: part.size]
            # u is in (0, 1) and has 32 bits. It is float64 until after the first log, because u near 1 makes the
            # largest g, which wins.
            np.add(source[start : start + _CHUNK], 0.5, out=u)
            np.multiply(u, 2.0**-32, out=u)
            np.log(u, out=u)
            np.negative(u, out=part, casting="same_kind")
            np.log(part, out=part)
            np.negative(part, out=part)


def mask_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Set logits outside the top-k and then the nucleus (Holtzman et al. 2020) to -inf, in place.

    logits (N, V) float32 are already divided by the temperature, on any device. top_k (N,) int64 (V means off) and
    top_p (N,) float32 (1 means off) are in host memory. The nucleus is the smallest set of the most likely tokens, of
    those left by top-k, that holds probability >= top_p. Ties at a boundary stay in. At least one token always
    stays."""
    threshold = torch.full((logits.shape[0],), -torch.inf, dtype=logits.dtype, device=logits.device)
    nucleus = top_p < 1.0
    counted = ~nucleus & (top_k < logits.shape[1])
    if rows := counted.nonzero()[:, 0].tolist():
        k = top_k[rows]
        values = _rows(logits, rows).topk(int(k.max()), dim=-1).values
        threshold[rows] = values.gather(1, k[:, None].to(logits.device) - 1)[:, 0]
    if rows := nucleus.nonzero()[:, 0].tolist():
        k, p = top_k[rows].to(logits.device), top_p[rows].to(logits.device)
        threshold[rows] = _nucleus_threshold(_rows(logits, rows), k, p)
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == logits.shape[0] else logits[rows]


def _nucleus_threshold(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least likely logit that stays, (N,). It looks at more and more of the largest logits until they suffice."""
    count, vocab = logits.shape
    threshold = logits.new_empty(count)
    everything = logits.logsumexp(-1)
    todo = torch.arange(count, device=logits.device)
    width = min(vocab, _TOP)
    while len(todo):
        # Sorting is faster than selecting if a large part of the row is wanted.
        chosen = logits if len(todo) == count else logits[todo]
        if width * 4 > vocab:
            width = vocab
            values = chosen.sort(-1, descending=True).values
        else:
            values = chosen.topk(width, dim=-1).values
        k, p = top_k[todo], top_p[todo]
        inside = torch.arange(width, device=logits.device) < k[:, None]
        total = torch.where(k < vocab, values.masked_fill(~inside, -torch.inf).logsumexp(-1), everything[todo])
        mass = (values - total[:, None]).exp_()
        before = mass.cumsum(-1).sub_(mass)
        keep = inside & (before < p[:, None])
        keep[:, 0] = True
        # A row is done once its cut lies among the logits that were looked at, and so do all that `total` had to count.
        done = ((k <= width) | (k >= vocab)) & (~keep[:, -1] | (k <= width) | (width == vocab))
        last = keep.sum(-1) - 1
        threshold[todo[done]] = values.gather(1, last[:, None])[:, 0][done]
        todo = todo[~done]
        width = min(vocab, width * 8)
    return threshold


class _Row:
    __slots__ = ("output", "prompt_length", "seed", "temperature", "top_k", "top_p")

    def __init__(self, extra: dict[str, Any], prompt_length: int, output: list[int], vocab: int):
        self.seed = int(extra[SEED])
        self.temperature = float(extra.get(TEMPERATURE, 1.0))
        top_k = int(extra.get(TOP_K, 0))
        self.top_k = min(top_k, vocab) if top_k > 0 else vocab
        self.top_p = float(extra.get(TOP_P, 1.0))
        self.prompt_length = prompt_length
        self.output = output


class CounterSampler(LogitsProcessor):
    """Adds noise that depends on the position to the logits of requests that carry `dt_seed`. Others pass unchanged."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError (HTTP 400) that names the wrong parameter."""
        extra = sampling_params.extra_args or {}
        mine = {key for key in extra if key.startswith("dt_")}
        if not mine:
            return
        if unknown := mine - _KEYS:
            raise ValueError(f"extra_args: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(_KEYS))}")
        if SEED not in extra:
            raise ValueError(f"extra_args: {', '.join(sorted(mine))} without {SEED}; add {SEED} (an integer)")
        seed = extra[SEED]
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MASK64:
            raise ValueError(f"extra_args.{SEED}: {seed!r} is not an integer in [0, 2**64)")
        if sampling_params.temperature != 0.0:
            raise ValueError(
                f"temperature must be 0 with {SEED} (the sampler's own temperature is {TEMPERATURE}), "
                f"not {sampling_params.temperature}"
            )
        _number(extra, TEMPERATURE, "above 0", lambda x: x > 0 and np.isfinite(x))
        _number(extra, TOP_P, "in (0, 1]", lambda x: 0 < x <= 1)
        top_k = extra.get(TOP_K, 0)
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0:
            raise ValueError(f"extra_args.{TOP_K}: {top_k!r} is not an integer >= 0 (0: off)")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self._vocab = int(vllm_config.model_config.get_vocab_size())
        self._rows: dict[int, _Row] = {}
        self._noise = GumbelNoise()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        follow_batch(self._rows, batch_update, self._new)

    def _new(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Row | None:
        extra = params.extra_args or {}
        if SEED not in extra:
            return None
        if prompt_ids is None:
            raise ValueError(f"{SEED} needs a prompt of token ids")
        return _Row(extra, len(prompt_ids), output_ids, self._vocab)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change `logits` (N, V) float32 in place, and return them."""
        if not self._rows:
            return logits
        indices = sorted(self._rows)
        rows = [self._rows[index] for index in indices]
        every = len(rows) == logits.shape[0]
        index = torch.tensor(indices)
        chosen = logits if every else logits[index]
        if any(row.temperature != 1.0 for row in rows):
            chosen.div_(torch.tensor([row.temperature for row in rows], device=chosen.device)[:, None])
        limited = [i for i, row in enumerate(rows) if row.top_k < self._vocab or row.top_p < 1.0]
        if limited:
            part = chosen if len(limited) == len(rows) else chosen[torch.tensor(limited)]
            mask_top_k_top_p(
                part,
                torch.tensor([rows[i].top_k for i in limited]),
                torch.tensor([rows[i].top_p for i in limited]),
            )
            if part is not chosen:
                chosen[torch.tensor(limited)] = part
        noise = np.empty(tuple(chosen.shape), np.float32)
        self._noise.fill(noise, [(row.seed, row.prompt_length + len(row.output)) for row in rows])
        chosen.add_(torch.from_numpy(noise).to(chosen.device))
        if not every:
            logits[index] = chosen
        return logits


def _number(extra: dict[str, Any], key: str, what: str, good: Any) -> None:
    value = extra.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not good(value):
        raise ValueError(f"extra_args.{key}: {value!r} is not a number {what}")
