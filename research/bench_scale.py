"""Schedules of 64 ranks and 256 micro-batches, on paper: how far from the bound they are after so many seconds.

Actor of 70B in 64 stages, critic of 8B in two pipelines of 32, one sequence of 4,096 tokens a micro-batch: H100s at
400 TFLOP/s, links of 50 GB/s with 20 microseconds. Activations of a rank are limited to 40 and 80 GB (1F1B of the
actor alone takes about 110). FAMILIES (fused-v); LIMITS in GB (40,80); SECONDS (2,10,30,60); SEED (0);
WORKERS (all cores); CLOCK=cpu: seconds of the processor, as in bench_table3."""

from __future__ import annotations

import os
from dataclasses import replace

from bench_table3 import clock_of, zero_bubble_limit

from dovetail.manifest.model_shape import ModelShape
from dovetail.pipelines import (
    ProblemError,
    ScheduleProblem,
    SearchEffort,
    check_steps,
    family_of,
    find,
    fused_problem,
    serial_memory,
    steps,
)

TOKENS, FLOPS, BANDWIDTH, DELAY = 4096, 4e14, 5e10, 2e-5
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
SIZES = {
    "actor": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "critic": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
RANKS, MICRO_BATCHES = 64, 256


def problem() -> ScheduleProblem:
    """Seconds and GB."""
    shapes = {name: ModelShape.of({**LLAMA, **size}) for name, size in SIZES.items()}
    forward = {name: 2 * shape.parameters() * TOKENS / FLOPS / RANKS for name, shape in shapes.items()}
    held = {name: shape.layers * shape.saved_bytes(2) * TOKENS / RANKS / 1e9 for name, shape in shapes.items()}
    boundary = TOKENS * SIZES["actor"]["hidden_size"] * 2
    return fused_problem(
        RANKS,
        RANKS // 2,
        MICRO_BATCHES,
        forward["actor"],
        forward["critic"],
        actor_activation=held["actor"],
        critic_activation=held["critic"],
        communication=DELAY + boundary / BANDWIDTH,
    )


def main() -> None:
    free = problem()
    workers, seed = int(os.environ.get("WORKERS", str(os.cpu_count() or 1))), int(os.environ.get("SEED", "0"))
    clock = clock_of(workers)
    print(f"seed {seed}, {workers} threads, load average before: {os.getloadavg()[0]:.1f}")
    serial = find(free, family_of("serial"), SearchEffort())
    print(
        f"serial 1F1B {serial.makespan:.2f} s, {serial_memory(free):.0f} GB; no bubbles {zero_bubble_limit(free):.2f} s"
    )
    print(
        f"  {'family':16}{'limit GB':>9}{'seconds':>9}{'took':>7}{'s':>9}{'over bound':>11}{'speed-up':>9}{'GB':>6}  by"
    )
    for family in os.environ.get("FAMILIES", "fused-v").split(","):
        for limit in os.environ.get("LIMITS", "40,80").split(","):
            for seconds in os.environ.get("SECONDS", "2,10,30,60").split(","):
                limited = replace(free, memory_limit=float(limit))
                begun = clock()
                effort = SearchEffort(float(seconds), clock, workers, seed, memory=False)
                try:
                    found = find(limited, family_of(family), effort)
                except ProblemError as error:
                    print(f"  {family:16}{limit:>9}{seconds:>9}  {error}")
                    continue
                check_steps(limited, steps(found))
                print(
                    f"  {family:16}{limit:>9}{seconds:>9}{clock() - begun:7.1f}{found.makespan:9.3f}"
                    f"{found.makespan / found.bound - 1:11.2%}{serial.makespan / found.makespan:9.3f}{found.peak:6.0f}"
                    f"  {found.how}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
