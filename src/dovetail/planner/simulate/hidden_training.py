"""What of an iteration's training is hidden behind the samples that are still made (`ppo.streaming`)."""

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
    """Seconds of training before the samples' stage ends.

    `scored` (N,): when each sample's scores are there; `lengths` (N,): response tokens; `tokens` (N,): of the whole
    sample, by which training takes its time. `each`: samples of a prompt, one after another. `parts`: into how many the
    iteration is cut; they are learnt in the order of the prompts' longest responses. `training`: seconds of all.
    `end`: when the stage ends. All in seconds since the stage began."""
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
        # A part that is under way at the end goes on.
        done += min(seconds, end - now)
        now += seconds
    return done
