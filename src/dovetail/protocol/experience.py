"""The samples of one iteration as a user's code sees them. They are given to a training loop of your own and to
advantage functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dovetail.manifest.training_types import PPO
from dovetail.protocol.wire import LEARNT

FloatArray = NDArray[np.float32]
LOG_RATIO_LIMIT = 20.0
WHITEN_EPS = 1e-8
KL_ROWS = 64  # samples whose KL is computed together


@dataclass
class Experience:
    """N samples of one iteration, ordered by (prompt, sample), with at most R response tokens each. `arrays`: the
    arrays of a PPO batch (docs/architecture.md, "Batches"). `config`: the job's `spec.ppo`. `kl_coef`: the present
    coefficient of the KL penalty. `prompts`, `responses` and `fields` (the other fields of the prompt records) have one
    entry per sample. `raw` has the responses with the tokens that end them. In trainer ranks all of these are empty,
    because the ranks have only tokens. You may change `scores`. `set_advantages` replaces the job's own estimator."""

    iteration: int
    prompts: list[str]
    responses: list[str]
    arrays: MutableMapping[str, NDArray[np.generic]]
    fields: list[dict[str, object]] = field(default_factory=list)
    config: PPO = field(default_factory=PPO)
    kl_coef: float = 0.0
    raw: list[str] = field(default_factory=list)

    @property
    def scores(self) -> FloatArray:
        """The reward of each sample from the reward model or the reward functions, (N,) float32."""
        return self.arrays["scores"].astype(np.float32)

    @scores.setter
    def scores(self, value: Sequence[float] | FloatArray) -> None:
        array, shape = np.asarray(value, np.float32), self.arrays["scores"].shape
        if array.shape != shape:
            raise ValueError(f"scores must have shape {shape}, not {array.shape}")
        self.arrays["scores"] = array

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Which entries of a table are response tokens that are learnt, (N, R) bool. Those that the model was told in
        the midst of a response, such as a tool's answer, are not."""
        return _mask(self.arrays, slice(None))

    @property
    def response_lengths(self) -> NDArray[np.int32]:
        """The number of tokens of each response, (N,) int32."""
        return self.arrays["response_lengths"].astype(np.int32)

    @property
    def groups(self) -> NDArray[np.int32]:
        """A number for each sample, (N,) int32. Samples of the same prompt have the same number."""
        return self.arrays["groups"].astype(np.int32)

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Which responses ended by themselves, (N,) bool."""
        return self.arrays["finished"].astype(np.bool_)

    @property
    def values(self) -> FloatArray | None:
        """The critic's value before each response token, (N,R) float32. None without a critic. They are also None in a
        loop of your own if the critic shares the actor's body, because then the trainers compute them."""
        return self.arrays["values"].astype(np.float32) if "values" in self.arrays else None

    @property
    def step_rewards(self) -> FloatArray | None:
        """The rewards that reward functions gave at the ends of steps, (N, R) float32. None if they gave none.
        `arrays["step_ends"]` marks the tokens that end a step."""
        if "step_rewards" not in self.arrays:
            return None
        return np.where(self.mask, self.arrays["step_rewards"].astype(np.float32), np.float32(0))

    @property
    def logprobs(self) -> FloatArray:
        """Log-probabilities under the policy with which the iteration's training begins, (N, R) float32. They come from
        the trainers if these recompute them (`oldLogProbs`, and always with `ppo.lag`). In a loop of your own they come
        from the rollouts."""
        name = "old_logprobs" if "old_logprobs" in self.arrays else "rollout_logprobs"
        return self.arrays[name].astype(np.float32)

    @property
    def token_kl(self) -> FloatArray:
        """KL against the reference at each token in nats, (N,R) float32. It is the difference of log-probabilities
        (k1), clipped to +-20, and zero without a reference."""
        if "ref_logprobs" not in self.arrays:
            return np.zeros(self.mask.shape, np.float32)
        difference = self.logprobs - self.arrays["ref_logprobs"].astype(np.float32)
        limited = np.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return np.where(self.mask, limited, np.float32(0)).astype(np.float32)

    @property
    def kl(self) -> FloatArray:
        """KL of each sample against the reference in nats, (N,) float32. It is the sum of differences of
        log-probabilities (k1), and zero without a reference."""
        found = kl_per_sample(self.arrays)
        return np.zeros(len(self.scores), np.float32) if found is None else found

    @property
    def rewards(self) -> FloatArray:
        """The reward of each token, (N, R) float32, as the built-in estimators use it. It is the sum of three parts.
        The first is the KL penalty, if that is part of the reward. The second is the score, at the last token, after
        `rewardClip`, `missingEosPenalty` and `overlong`. The third is `step_rewards`. Then `whitenRewards` applies."""
        config, mask, final = self.config, self.mask, self.scores
        if isinstance(config.reward_clip, float):
            final = np.clip(final, -config.reward_clip, config.reward_clip)
        if config.missing_eos_penalty:
            final = final - np.float32(config.missing_eos_penalty) * (~self.finished).astype(np.float32)
        if (over := config.overlong) is not None and over.to_tokens is not None:
            share = (self.response_lengths.astype(np.float32) - over.from_tokens) / (over.to_tokens - over.from_tokens)
            final = final - np.float32(over.penalty) * np.clip(share, 0.0, 1.0).astype(np.float32)
        penalty = np.float32(0.0 if config.kl_in_loss else -self.kl_coef) * self.token_kl
        last = np.arange(mask.shape[1])[None, :] == self.response_lengths[:, None] - 1
        rewards: FloatArray = np.where(mask, penalty, np.float32(0)) + np.where(last, final[:, None], np.float32(0))
        if (steps := self.step_rewards) is not None:
            rewards = rewards + steps
        return _whitened(rewards, mask) if config.whiten_rewards else rewards

    def per_token(self, x: ArrayLike) -> FloatArray:
        """Repeat one number per sample, (N,), at each of its response tokens. Returns (N, R) float32 that is 0
        elsewhere."""
        return np.where(self.mask, np.asarray(x, np.float32)[:, None], np.float32(0))

    def set_advantages(self, advantages: ArrayLike, returns: ArrayLike | None = None) -> None:
        """Replace the job's estimator. Both arrays are (N, R) float32. Entries after a response's end are ignored. The
        critic learns `returns`. Without them, returns are advantages + values. Raises ValueError for another shape."""
        shape = self.arrays["rollout_logprobs"].shape
        for name, value in (("advantages", advantages), ("returns", returns)):
            if value is None:
                continue
            array = np.asarray(value, np.float32)
            if array.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, not {array.shape}")
            self.arrays[name] = array


# Returns the advantages of an iteration's samples, (N, R), or these and the returns that the critic learns, (N, R).
AdvantageFunction = Callable[[Experience], Any]


def advantages_of(
    function: AdvantageFunction, experience: Experience, who: str
) -> tuple[FloatArray, FloatArray | None]:
    """Call the function and check its result. Returns (advantages, returns), both (N, R) float32 and 0 after a
    response's end. Returns default to advantages + values. They are None if there are no values. Raises ValueError for
    another shape and for a value that is not finite. The sentence begins with `who`. Errors of the function itself are
    not caught."""
    result = function(experience)
    pair = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    mask = experience.mask
    tables: list[FloatArray | None] = []
    for what, value in zip(("advantages", "returns"), pair, strict=True):
        if value is None and what == "returns":
            tables.append(None)
            continue
        try:
            table = np.asarray(value, np.float32)
        except (TypeError, ValueError):
            raise ValueError(f"{who} returned {what} as {type(value).__name__}; return an array {mask.shape}") from None
        if table.shape != mask.shape:
            raise ValueError(f"{who} returned {what} of shape {table.shape}; return one number a token, {mask.shape}")
        if not np.isfinite(table[mask]).all():
            raise ValueError(f"{who} returned {what} that are not finite")
        tables.append(np.where(mask, table, np.float32(0)))
    advantages, returns = tables
    assert advantages is not None
    if returns is None and experience.values is not None:
        returns = np.where(mask, advantages + experience.values, np.float32(0))
    return advantages, returns


def kl_per_sample(arrays: Mapping[str, NDArray[np.generic]]) -> FloatArray | None:
    """The sum over response tokens of rollout_logprobs - ref_logprobs, (N,) float32. None without a reference."""
    if "ref_logprobs" not in arrays:
        return None
    lengths = arrays["response_lengths"].astype(np.int32)
    logprobs, reference = arrays["rollout_logprobs"], arrays["ref_logprobs"]
    found = np.zeros(len(lengths), np.float32)
    for start in range(0, len(lengths), KL_ROWS):
        rows = slice(start, start + KL_ROWS)
        mask = _mask(arrays, rows)
        difference = logprobs[rows].astype(np.float32) - reference[rows].astype(np.float32)
        found[rows] = np.where(mask, difference, 0.0).sum(axis=1)
    return found


def _mask(arrays: Mapping[str, NDArray[np.generic]], rows: slice) -> NDArray[np.bool_]:
    lengths = arrays["response_lengths"][rows].astype(np.int32)
    mask: NDArray[np.bool_] = np.arange(arrays["rollout_logprobs"].shape[1])[None, :] < lengths[:, None]
    return mask & (arrays["learnt"][rows] == LEARNT) if "learnt" in arrays else mask


def _whitened(x: FloatArray, mask: NDArray[np.bool_]) -> FloatArray:
    """Scale to variance 1 over the tokens of `mask`. The mean stays the same."""
    inside = x[mask].astype(np.float64)
    mean = inside.mean() if inside.size else 0.0
    variance = ((inside - mean) ** 2).sum() / max(1, inside.size - 1)
    scaled = (x.astype(np.float64) - mean) / np.sqrt(variance + WHITEN_EPS) + mean
    return np.where(mask, scaled, 0.0).astype(np.float32)
