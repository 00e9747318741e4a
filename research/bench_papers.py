"""APP, PUZZLE, RLHFuse and NeMo-RL in the simulator, each on its own cluster, models and settings, beside what it
published.

One set of constants serves all (docs/planner.md, Time): nothing is fitted to a paper. Baselines do what their paper
says they do (research/papers/). PAPERS: which of app, puzzle, rlhfuse and nemo_rl (all). PLAN=0 leaves our own plans
out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from statistics import median

from papers import app, nemo_rl, planner, puzzle, rlhfuse
from papers.common import Section

from dovetail.planner import seconds

PAPERS = {"app": app.sections, "puzzle": puzzle.sections, "rlhfuse": rlhfuse.sections, "nemo_rl": nemo_rl.sections}
# A plan this much slower than the best published strategy, in the same model, is worse.
WORSE = 1.005


def summary(sections: list[Section]) -> Iterator[str]:
    """Order of strategies, errors, and our plans against the papers' best."""
    pairs = [pair for section in sections for pair in section.pairs()]
    agreed = sum(agrees for _, _, agrees in pairs)
    yield f"\norder of strategies: {agreed} of {len(pairs)} published pairs ({agreed / max(1, len(pairs)):.0%})"
    for section in sections:
        errors = [abs(f.error) for f in section.figures if f.error is not None]
        ours = [agrees for _, _, agrees in section.pairs()]
        if errors or ours:
            error = f"median error {median(errors):.0%}, largest {max(errors):.0%}" if errors else "no figures"
            yield f"  {section.title:55} {sum(ours):3} of {len(ours):3} pairs; {error}"
    plans = [plan for section in sections for plan in section.planned]
    if plans:
        worse = [(name, ours / theirs) for name, ours, theirs in plans if ours > WORSE * theirs]
        gains = sorted(theirs / ours for _, ours, theirs in plans)
        yield f"our plan against the paper's best, same model: {len(plans) - len(worse)} of {len(plans)} not slower"
        yield f"  {gains[0]:.2f} to {gains[-1]:.2f} times as fast, median {median(gains):.2f}"
        for name, ratio in worse:
            yield f"  slower: {name} ({ratio:.2f} times as long)"


def main() -> None:
    chosen = os.environ.get("PAPERS", ",".join(PAPERS)).split(",")
    if os.environ.get("PLAN", "1") == "0":
        planner.SEARCH = False
    constants = {
        name: value for name, value in vars(seconds).items() if name.isupper() and isinstance(value, float | int)
    }
    print(f"constants, the same for all: {constants}")
    sections = []
    for name in chosen:
        started = time.perf_counter()
        for section in PAPERS[name]():
            sections.append(section)
            print("\n".join(section.lines()), flush=True)
        print(f"  ({name}: {time.perf_counter() - started:.0f} s)")
    print("\n".join(summary(sections)))


if __name__ == "__main__":
    main()
