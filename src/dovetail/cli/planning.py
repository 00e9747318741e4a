"""`dovetail plan`: shows a job's plan on its own groups, and the best placement on an inventory of GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console

from dovetail.cli.common.plan_inputs import configurations, hardware, inventory, local_profile
from dovetail.cli.common.plan_tables import plan_tables, pod_memory_table, prediction_tables
from dovetail.cli.job_arguments import (
    class_option,
    load_job,
    manifest_argument,
    new_file,
    read_class,
    read_job,
    set_option,
)
from dovetail.gpus.gpu_products import GPU
from dovetail.gpus.inventory import Inventory
from dovetail.manifest.sizes import owner
from dovetail.manifest.types import RLHFJob, RLHFJobSpec, Stage
from dovetail.planner.cpus import mismatch
from dovetail.planner.placements import Unknown, cheapest, fragment, place, recommend
from dovetail.planner.planned_job import Chosen, ConfigError, Infeasible, PlannedJob, needed, worth
from dovetail.protocol.errors import UsageError
from dovetail.protocol.plan import Plan

SEARCH_SECONDS = 60.0


def on_groups(spec: RLHFJobSpec, configs: Mapping[str, Any], measured: Mapping[str, GPU]) -> Chosen | None:
    """The placement from which a plan's prediction is made. None if the plan has no prediction."""
    try:
        placed = place(PlannedJob(spec, configs, measured=measured))
    except (Infeasible, ConfigError):
        return None
    return None if placed is None else placed.chosen


def on_inventory(
    spec: RLHFJobSpec,
    configs: Mapping[str, Any],
    there: Inventory,
    by_cost: bool = False,
) -> Chosen:
    """Search at most SEARCH_SECONDS for the best placement on an inventory. `by_cost`: by price and not by time. Raises
    UsageError."""
    end = time.monotonic() + SEARCH_SECONDS
    try:
        return (cheapest if by_cost else recommend)(spec, configs, there, lambda: time.monotonic() >= end)
    except Infeasible as error:
        raise UsageError(f"the inventory has not enough memory: {error}.") from error
    except (ConfigError, Unknown) as error:
        raise UsageError(f"{error}.") from error


def unpredicted(manifest: Path, job: RLHFJob, configs: Mapping[str, Any], profile_path: Path | None) -> str:
    """Why a job's plan has no prediction, and how to get one."""
    spec, run_dir = job.spec, Path("runs") / job.metadata.name
    command = f"dovetail profile {manifest} --iterations -o {profile_path or run_dir / 'profile.json'}"
    if Stage.PPO not in spec.stages and any(group.on_cpu for group in spec.groups):
        return "the job has no PPO iterations (spec.stages), and times of other stages are predicted on GPUs alone"
    for model in ("actor", "reference", "reward", "critic"):
        name = owner(spec, model) if needed(spec, model) else None
        source = getattr(spec.models, name).source if name is not None else None
        if source is not None and source.scratch is None and name not in configs:
            where = source.hugging_face or source.path or f"claim {source.pvc}"
            get = f"; get it with: hf download {where} config.json" if source.hugging_face else ""
            return f"the configuration of spec.models.{name}, {where}, is not on this machine{get}"
    cpu = [g.name for g in spec.groups if g.on_cpu]
    if len(cpu) < len(spec.groups):
        return f"group {cpu[0]} runs on CPUs and others on GPUs; give all of them gpu.product, or none"
    profile = local_profile(profile_path, run_dir)
    if profile is None or profile.machine is None:
        return f"its groups run on CPUs, and this machine has not been measured; measure it with: {command}"
    if (other := mismatch(PlannedJob(spec, configs, profile=profile))) is not None:
        return f"this machine was measured with another {other}; measure it again with: {command}"
    return "actor and critic are pinned to different layouts; pin both of spec.plan.parallelism alike"


def server_pods(spec: RLHFJobSpec, plan: Plan, planned: Callable[[RLHFJobSpec], Plan]) -> Iterator[str]:
    """For each rollout group whose pods have several GPUs: what runs on them, and whether smaller pods on the same GPUs
    are faster. `planned` plans a job like this one, and may raise PlanError."""
    from dovetail.planner.make_plan import PlanError

    if plan.prediction is None:
        return
    own = plan.prediction.iteration_seconds
    for index, group in enumerate(spec.groups):
        count, here = group.gpu.per_pod, [rollout for rollout in plan.rollouts if rollout.group == group.name]
        if not here or count == 1:
            continue
        stages = f", {here[0].pp} pipeline stages of {count // here[0].pp}" if here[0].pp > 1 else ""
        places: dict[int, list[str]] = {}
        for model in dict.fromkeys(model for each in here for model in each.scores):
            places.setdefault(here[0].split.get(model, 1), []).append(model)
        beside = [f"{', '.join(m)} on the first {n if n > 1 else 'of them'}" for n, m in places.items()]
        scored = f", with {' and '.join(beside)}" if beside else ""
        found: dict[float, str] = {}
        for size in (size for size in range(1, count) if count % size == 0):
            gpus, pods = group.gpu.model_copy(update={"per_pod": size}), group.pods * count // size
            smaller = group.model_copy(update={"gpu": gpus, "replicas": pods})
            groups = [*spec.groups[:index], smaller, *spec.groups[index + 1 :]]
            with suppress(PlanError):
                if (other := planned(spec.model_copy(update={"groups": groups})).prediction) is not None:
                    found[other.iteration_seconds] = f"gpu.perPod {size} and replicas {pods}"
        best = min(found, default=own)
        yield f"Each pod of group {group.name} is one server on its {count} GPUs{stages}{scored}. " + (
            f"With {found[best]} an iteration would take {best:.3g} s, not {own:.3g} s."
            if worth(best, own, 1)
            else "Smaller pods on the same GPUs would not be faster."
        )


def show_groups(
    console: Console, plan: Plan, spec: RLHFJobSpec, pods: Iterable[str], why_not: Callable[[], str]
) -> None:
    """Show the plan on the manifest's own groups. `pods`: sentences about these. `why_not` returns why there is no
    prediction."""
    console.print(plan_tables(plan))
    if plan.prediction is not None:
        console.print(prediction_tables(plan.prediction))
    elif not plan.stages:
        text = f"Nothing is predicted: {why_not()}.\nThe layouts follow from the batch sizes."
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if plan.memory:
        templates = {group.name: group.pod_template for group in spec.groups}
        console.print("", pod_memory_table(plan.memory, templates), sep="\n")
    for sentence in pods:
        console.print(f"\n{sentence}", highlight=False, markup=False, soft_wrap=True)


def show_inventory(console: Console, chosen: Chosen, groups: Plan | str) -> None:
    """Show the best placement on the inventory, and the plan on the manifest's own groups, or why there is none."""
    console.print(prediction_tables(chosen.prediction, "Best on this inventory, a PPO iteration"))
    if isinstance(groups, str):
        own = f"The manifest's own groups do not fit: {groups}."
    elif groups.prediction is not None:
        seconds = groups.prediction.iteration_seconds
        own = f"The manifest's own groups take {seconds:.3g} s an iteration ({groups.prediction.placement})."
    else:
        own = "Nothing is predicted for the manifest's own groups."
    console.print(f"\n{own}", highlight=False)
    console.print("\nIn the manifest:\n", highlight=False)
    text = yaml.safe_dump({"spec": fragment(chosen)}, sort_keys=False, default_flow_style=None, width=110)
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def write(path: Path, text: str) -> None:
    """Write a file. Raises UsageError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error


def write_html(path: Path, name: str, chosen: Chosen | None) -> None:
    """Write the page of a predicted iteration. Raises UsageError if there is no prediction."""
    if chosen is None:
        raise UsageError("--html shows a predicted iteration, but nothing is predicted for this job; give --inventory.")
    from dovetail.cli.timeline_command import timeline_page

    write(path, timeline_page(name, chosen).decode())


@click.command()
@manifest_argument
@set_option
@class_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("-o", "--output", type=new_file, help="Write the plan as JSON to this file.")
@click.option(
    "--html",
    "html_path",
    type=new_file,
    help="Write a web page with the timeline of a predicted iteration, GPU by GPU.",
)
@click.option(
    "--inventory",
    "inventory_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also find the best placement on these GPUs. The file is YAML or JSON; docs/planner.md describes it.",
)
@click.option(
    "--optimize",
    type=click.Choice(["time", "cost"]),
    default="time",
    show_default=True,
    help="What is best on an inventory: the shortest iteration, or the lowest price of a sample.",
)
@click.option("--cluster", is_flag=True, help="Like --inventory, with the nodes that kubectl shows.")
@click.option(
    "--hardware",
    "hardware_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measured figures of GPUs, written by dovetail profile. They replace those of the data sheets.",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="This machine's times, written by dovetail profile --iterations, for groups on CPUs.  [default: profile.json "
    "in runs/<job name>, if there is one]",
)
def plan(
    manifest: Path,
    overrides: tuple[str, ...],
    class_path: Path | None,
    as_json: bool,
    output: Path | None,
    html_path: Path | None,
    inventory_path: Path | None,
    optimize: str,
    cluster: bool,
    hardware_path: Path | None,
    profile_path: Path | None,
) -> None:
    """Show what would run where.

    You see the processes, the parallelism and the batches of a job, with predicted times and memory. Nothing starts.

    \b
      dovetail plan job.yaml --inventory gpus.yaml --html plan.html
    """
    from dovetail.manifest.checks.files import layer_counts
    from dovetail.planner.make_plan import PlanError, make_plan

    if inventory_path is not None and cluster:
        raise UsageError("--inventory and --cluster both name the GPUs; give one of them")
    if optimize == "cost" and inventory_path is None:
        raise UsageError("--optimize cost needs prices; give an --inventory with pricePerGPUHour")
    measured = hardware(hardware_path)
    there = inventory(inventory_path, cluster, measured)
    job_class = read_class(manifest, overrides, class_path)
    groups: Plan | str
    try:
        job, groups = load_job(
            manifest,
            overrides,
            hardware_path=hardware_path,
            profile_path=profile_path,
            planned=True,
            job_class=job_class,
        )
    except PlanError as error:
        if there is None or as_json or output is not None:
            raise
        _, job, _ = read_job(manifest, overrides)
        groups = str(error)
    base = manifest.resolve().parent
    configs = configurations(job.spec, base)
    if isinstance(groups, Plan):
        text = groups.model_dump_json(by_alias=True, indent=2)
        if output is not None:
            write(output, text + "\n")
        if as_json:
            click.echo(text)
    console = Console()
    if job_class is not None and not as_json:
        console.print(f"The pods are of {job_class.told()}.", highlight=False, markup=False, soft_wrap=True)
    chosen = None
    if there is not None:
        chosen = on_inventory(job.spec, configs, there, by_cost=optimize == "cost")
        if not as_json:
            show_inventory(console, chosen, groups)
    elif isinstance(groups, Plan):
        chosen = on_groups(job.spec, configs, measured) if html_path is not None else None
        if not as_json:
            layers = layer_counts(job.spec, base)
            pods = server_pods(job.spec, groups, lambda spec: make_plan(spec, layers, configs, measured))
            show_groups(console, groups, job.spec, pods, lambda: unpredicted(manifest, job, configs, profile_path))
    if html_path is not None:
        write_html(html_path, job.metadata.name, chosen)
