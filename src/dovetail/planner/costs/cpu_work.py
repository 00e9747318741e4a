"""What one PPO iteration does on a machine, down to its samples' lengths."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """`prompts`, `responses`: tokens of each sample. `scores`: the models of each rollout's scorer. `models`: those
    that are trained, on `dp` ranks or, with `pp` above 1, in as many pipeline stages. `fusion`: shares of the samples
    left at which generation's tail may gather, 0: scorers of idle rollouts work, but nobody migrates, None: scoring
    waits for generation; the best one counts. `values_first`: a forward pass of the actor over all samples before the
    steps makes the values (a shared body)."""

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
    values_first: bool = False

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
        """Micro-batches of a rank, a model and an optimizer step."""
        return self.mini_batch // (self.dp * self.micro_batch)

    @property
    def passes(self) -> float:
        """Passes over all samples, forward and backward. A forward pass alone counts as a third."""
        return self.epochs + (1 / 3 if self.values_first else 0)

    @property
    def tokens(self) -> float:
        """Tokens of a rank in all passes of a model. Micro-batches are packed, and ranks get equal parts."""
        return self.passes * (sum(self.prompts) + sum(self.responses)) / self.dp

    @property
    def executed(self) -> float:
        """Micro-batches of a rank in all passes of a model."""
        return self.passes / self.epochs * self.steps * self.micro_batches


def slowdown(busy_cores: float, cores: int) -> float:
    """How many times longer everything takes if processes want more cores than there are."""
    return max(1.0, busy_cores / cores)
