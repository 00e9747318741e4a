"""Describes the work of a PPO iteration, whatever it runs on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dovetail.fusion.lengths import Lengths
from dovetail.manifest.hashing import hashed_once
from dovetail.manifest.model_shape import Head, ModelShape
from dovetail.manifest.types import LoRA


@hashed_once
@dataclass(frozen=True)
class Workload:
    """The work of one iteration: `batch` samples are generated, scored and learnt. There are `epochs` passes of
    batch / mini_batch optimizer steps each.

    `critic`: None if there is no critic model (grpo, rloo, or a shared body). `reward`: None if there is a reward
    function. `reference`: None if nothing reads it.

    Actor and reference have a language-model head. Critic and reward have a head with one value per token.
    With `value_head` the actor has both heads in training. `prompt`, `response`: the distributions of lengths.
    `per_prompt`: the samples of each prompt. `actor_lora`, `critic_lora`: adapters are trained in place of all weights.
    `ema`: averaged weights of the actor are kept in host memory. `kept_versions`: how many versions of actor and critic
    are kept in host memory, to be sent while training goes on. `micro_batch_tokens`: training cuts micro-batches by
    tokens, and a share's `micro_batch` counts units of this size. None: it counts samples. `chunks`: the stages of
    actor and critic on each rank of their pipelines. `activation_limit`: the bytes of activations that schedules of
    actor and critic keep to on a rank. None: what serial 1F1B takes."""

    actor: ModelShape
    reference: ModelShape | None
    reward: ModelShape | None
    critic: ModelShape | None
    batch: int
    mini_batch: int
    epochs: int
    prompt: Lengths
    response: Lengths
    # Adapters are not part of the hash, because a LoRA holds a list.
    actor_lora: LoRA | None = field(default=None, hash=False)
    critic_lora: LoRA | None = field(default=None, hash=False)
    ema: bool = False
    value_head: bool = False
    per_prompt: int = 1
    kept_versions: int = 0
    micro_batch_tokens: int | None = None
    chunks: int = 1
    activation_limit: float | None = None

    def longest_micro_batch(self, dp: int, micro: int) -> int:
        """The most tokens of a micro-batch in training. `dp`: the data-parallel ranks. `micro`: `Share.micro_batch`."""
        if self.micro_batch_tokens is None:
            return min(micro, self._rows(dp)) * self.longest
        return min(micro * self.micro_batch_tokens, self._rows(dp) * self.longest)

    def micro_batches(self, dp: int, micro: int, longest: bool = False) -> int:
        """The micro-batches of a rank in an optimizer step. `longest`: all samples have the longest length."""
        if self.micro_batch_tokens is None:
            return -(-self._rows(dp) // micro)
        tokens = self.longest if longest else self.tokens
        return max(1, min(self._rows(dp), math.ceil(self._rows(dp) * tokens / (micro * self.micro_batch_tokens))))

    def samples_together(self, dp: int, micro: int) -> float:
        """The mean number of samples of a micro-batch."""
        return float(micro) if self.micro_batch_tokens is None else self._rows(dp) / self.micro_batches(dp, micro)

    def divides(self, dp: int, micro: int) -> bool:
        """Whether the data-parallel ranks get equal numbers of samples, in micro-batches of this size. If they are cut
        by tokens, a size is refused when half of it already holds all samples of a rank."""
        if self.micro_batch_tokens is None:
            return self.mini_batch % (dp * micro) == 0
        # Such a micro-batch is the same as one of half the size.
        whole = self.longest_micro_batch(dp, micro // 2) == self._rows(dp) * self.longest if micro > 1 else False
        return self.mini_batch % dp == 0 and not whole

    def _rows(self, dp: int) -> int:
        return -(-min(self.mini_batch, self.batch) // dp)

    @property
    def steps(self) -> int:
        """The optimizer steps of each trained model."""
        return self.epochs * max(1, self.batch // self.mini_batch)

    @property
    def tokens(self) -> float:
        """The mean tokens of a sample, prompt and response together."""
        return self.prompt.mean + self.response.mean

    @property
    def longest(self) -> int:
        """The most tokens of a sample, prompt and response together."""
        return self.prompt.longest + self.response.longest

    def lora(self, task: str) -> LoRA | None:
        """The adapters of the model that a training task trains. None: all its weights are trained."""
        return self.actor_lora if task == "actor_training" else self.critic_lora

    def model(self, task: str) -> tuple[ModelShape, Head] | None:
        """The shape and the head of the model of a task of `candidate.TASKS`. None if the job has no such task."""
        shapes: dict[str, tuple[ModelShape | None, Head]] = {
            "generation": (self.actor, "lm"),
            "actor_training": (self.actor, "lm+value" if self.value_head else "lm"),
            "reference": (self.reference, "lm"),
            "reward": (self.reward, "value"),
            "critic": (self.critic, "value"),
            "critic_training": (self.critic, "value"),
        }
        shape, head = shapes[task]
        return None if shape is None else (shape, head)

    def needed(self, task: str) -> tuple[ModelShape, Head]:
        """The same as `model`, for a task that the job has."""
        found = self.model(task)
        assert found is not None, f"the workload has no {task}"
        return found
