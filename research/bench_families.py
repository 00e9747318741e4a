"""Every family's speed-up over serial 1F1B and its peak memory, under serial memory and uncapped.

For the rows of RLHFuse's Table 3, and for two models of one size with one and six mini-batches. Each cell is the
speed-up and, in brackets, the peak activation memory in units of serial 1F1B's. ROWS: which problems, by number
(0,3,12; default all); FAMILIES: which families (default all); SECONDS_EACH: time to search a cell (3); SEED (0);
WORKERS: threads (all cores); CLOCK=cpu: seconds of the processor, as in bench_table3."""

from __future__ import annotations

import os
import time

from bench_table3 import PAPER, clock_of, row_problem, serial_time, zero_bubble_limit

from dovetail.pipelines import (
    ProblemError,
    ScheduleProblem,
    SearchEffort,
    check_steps,
    family_names,
    family_of,
    find,
    fused_problem,
    serial_memory,
    steps,
)

EQUAL = [(stages, count, mini) for stages, count in ((4, 4), (8, 8), (8, 16), (16, 16), (16, 32)) for mini in (1, 6)]


def problems() -> list[tuple[str, ScheduleProblem]]:
    listed = [(f"{r[0]} {r[1]}/{r[2]} MB{r[3]}", row_problem(i)) for i, r in enumerate(PAPER)]
    for stages, count, mini in EQUAL:
        problem = fused_problem(stages, stages, count, 1, 1, mini_batches=mini)
        listed.append((f"equal {stages}/{stages} MB{count} x{mini}", problem))
    return listed


def cell(problem: ScheduleProblem, family: str, limit: float | None, effort: SearchEffort) -> str:
    limited = ScheduleProblem(problem.models, problem.communication, problem.mini_batches, limit)
    try:
        found = find(limited, family_of(family), effort)
    except ProblemError:
        return "-"
    check_steps(limited, steps(found))
    return f"{serial_time(problem) / found.makespan:.3f} ({found.peak / serial_memory(problem):.2f})"


def main() -> None:
    chosen = problems()
    numbers = [int(x) for x in os.environ.get("ROWS", "").split(",") if x] or list(range(len(chosen)))
    seconds, seed = float(os.environ.get("SECONDS_EACH", "3")), int(os.environ.get("SEED", "0"))
    wanted = os.environ.get("FAMILIES", "").split(",") if os.environ.get("FAMILIES") else []
    workers = int(os.environ.get("WORKERS", str(os.cpu_count() or 1)))
    print(f"seed {seed}, {workers} threads, {seconds:g} s a cell, load average before: {os.getloadavg()[0]:.1f}")
    begun = time.monotonic()
    effort = SearchEffort(seconds, clock_of(workers), workers, seed, memory=False)
    for number in numbers:
        name, problem = chosen[number]
        bound = serial_time(problem) / zero_bubble_limit(problem)
        print(f"\n{name}: no bubbles {bound:.3f}\n  {'family':20}{'serial memory':>18}{'uncapped':>18}")
        # The rounding of the paper's two decimals is allowed.
        capped = serial_memory(problem) * 1.0045
        for family in family_names(problem, chunked=True):
            if wanted and family not in wanted:
                continue
            cells = [cell(problem, family, limit, effort) for limit in (capped, None)]
            print(f"  {family:20}{cells[0]:>18}{cells[1]:>18}", flush=True)
    print(f"\n{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
