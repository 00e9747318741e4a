"""What one PPO iteration does on a machine, down to its samples' lengths."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """`prompts`, `responses`: tokens of each sample. `scores`: the models of each rollout's scorer. `models`: those
    that are trained, on `dp` ranks or, with `pp` above 1, in as many pipeline stages. `fusion`: shares of the samples
    left at which generation's tail may gather, 0: scorers of idle rollouts work, but nobody migrates, None: scoring
    waits for generation; the best one counts."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    scores: tuple[tuple[str, ...], ...]
    models: tuple[str, ...]
    mini_batch: int
    micro_batch: int
    epochs: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "Serial"
    fusion: tuple[float | None, ...] = field(default=(None,))
    max_concurrent: int = 256

    @property
    def rollouts(self) -> int:
        return len(self.scores)

    @property
    def ranks(self) -> int:
        return self.pp * self.dp

    @property
    def steps(self) -> int:
        """Optimizer steps of each model."""
        return self.epochs * (len(self.responses) // self.mini_batch)

    @property
    def micro_batches(self) -> int:
        """Of a rank, model and optimizer step."""
        return self.mini_batch // (self.dp * self.micro_batch)

    @property
    def tokens(self) -> float:
        """Of a rank in all optimizer steps of a model: micro-batches are packed, and ranks get equal shares."""
        return self.epochs * (sum(self.prompts) + sum(self.responses)) / self.dp


def slowdown(busy_cores: float, cores: int) -> float:
    """How much longer everything takes while more cores are wanted than there are."""
    return max(1.0, busy_cores / cores)
