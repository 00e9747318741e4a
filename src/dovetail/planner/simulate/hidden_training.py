"""Computes how much of an iteration's training is hidden behind samples that are still generated (`ppo.streaming`)."""

from __future__ import annotations

from collections.abc import Sequence


def hidden(
    scored: Sequence[float],
    lengths: Sequence[int],
    tokens: Sequence[int],
    each: int,
    parts: int,
    training: float,
    end: float,
) -> float:
    """The seconds of training before the stage of generation and inference ends.

    `scored` (N,): when each sample was scored. `lengths` (N,): response tokens. `tokens` (N,): tokens of prompt and
    response; the time of training is in proportion to them. `each`: the samples of a prompt, which are neighbours.
    `parts`: the number of parts of the iteration. They are learnt in the order of the prompts' longest responses.
    `training`: the seconds of training all samples. `end`: when the stage ends. Times are seconds since the stage
    began."""
    prompts = range(len(lengths) // each)
    longest = {p: max(lengths[p * each : (p + 1) * each]) for p in prompts}
    order = sorted(prompts, key=lambda p: (longest[p], p))
    size, whole, now, done = len(order) // parts, sum(tokens), 0.0, 0.0
    for number in range(parts):
        rows = [row for p in order[number * size : (number + 1) * size] for row in range(p * each, (p + 1) * each)]
        now = max(now, *(scored[row] for row in rows))
        if now >= end:
            break
        seconds = training * sum(tokens[row] for row in rows) / whole
        # A part that has begun before the end counts up to the end.
        done += min(seconds, end - now)
        now += seconds
    return done
