"""Compiles the kernels of the schedule search once into their cache. Otherwise several processes of a test run would
each compile the same kernels, which takes half a minute."""

from __future__ import annotations

from dovetail.pipelines import FAMILIES, ModelPipelines, ScheduleProblem, SearchEffort, find

EFFORT = SearchEffort(scale=0.001, exact=False)


def main() -> None:
    """Search with few ranks, and with many ranks and scarce memory. Together these searches need all kernels."""
    for ranks in (4, 32):
        models = [ModelPipelines(name, ranks, 4, time, 2 * time) for name, time in (("actor", 1.0), ("critic", 1.7))]
        limit = 4.0 if ranks > 4 else None
        find(ScheduleProblem((models[0], models[1]), 0.1, memory_limit=limit), FAMILIES["fused-split"], EFFORT)


if __name__ == "__main__":
    main()
