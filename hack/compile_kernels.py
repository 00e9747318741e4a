"""Compiles the kernels of the schedule search once into their cache. Otherwise several processes of a test run would
each compile the same kernels, which takes half a minute."""

from __future__ import annotations

from dovetail.pipelines import FAMILIES, ModelPipelines, ScheduleProblem, SearchEffort, find

EFFORT = SearchEffort(scale=0.001, exact=False)


def main() -> None:
    """Search a family with split backwards. This needs all kernels."""
    models = [ModelPipelines(name, 4, 4, time, 2 * time) for name, time in (("actor", 1.0), ("critic", 1.7))]
    find(ScheduleProblem((models[0], models[1]), 0.1), FAMILIES["fused-split"], EFFORT)


if __name__ == "__main__":
    main()
