"""The command for a training step of each stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dovetail.manifest.checks.batching import batch_rules
from dovetail.manifest.sizes import has_critic, world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Stage
from dovetail.pipelines import ALONE, ModelPipelines, ScheduleError, ScheduleProblem, interleaved_family, one_f_one_b
from dovetail.pipelines.families import fixed_schedule
from dovetail.protocol.messages import Action, Kind, Step
from dovetail.protocol.plan import Plan, chunks_of, coordinates, holds, loops


def serial_1f1b(
    layouts: Mapping[str, Parallelism],
    micro_batches: Mapping[str, int],
    order: Sequence[str],
    world: int | None = None,
    split: bool = True,
) -> list[list[Action]]:
    """The actions of each rank, which run 1F1B of one model after another, in `order`. A rank has the actions of the
    models that it holds. A model with several stages per rank uses ZB-V or interleaved 1F1B instead of 1F1B.

    `micro_batches[model]` is the number of micro-batches of one data-parallel rank. `world` is the number of ranks. It
    is needed if models have ranks of their own. `split` says whether backward passes may be split. Raises ScheduleError
    if the layouts have different numbers of ranks and `world` is None, or if a model has no micro-batch."""
    sizes = {model: world_size(layout) for model, layout in layouts.items()}
    if world is None and len(set(sizes.values())) != 1:
        raise ScheduleError(f"all models must occupy the same trainer ranks; these layouts occupy {sizes}")
    for model in order:
        if micro_batches[model] < 1:
            raise ScheduleError(f"{model} has {micro_batches[model]} micro-batches; a schedule needs at least 1")
    lists: list[list[Action]] = []
    for rank in range(next(iter(sizes.values())) if world is None else world):
        mine: list[Action] = []
        for model in (each for each in order if holds(rank, layouts[each])):
            layout, count = layouts[model], micro_batches[model]
            if chunks_of(layout) > 1:
                places = _several_stages(model, layout.pp, chunks_of(layout), loops(layout), count, split)
                mine += places[coordinates(rank, layout).pp]
            else:
                mine += _of_one_model(model, rank, layout, count)
        lists.append(mine)
    return lists


@lru_cache(maxsize=16)
def _several_stages(
    model: str, pp: int, chunks: int, loop: bool, micro_batches: int, split: bool
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each pipeline rank, for ranks that hold several stages. Two stages per rank run ZB-V, and stages
    in a loop interleaved 1F1B. Other stages run one micro-batch after another. The result is cached, because each step
    asks for it, even a step with another schedule."""
    family = replace(ALONE["zb-v"], name="zb-v" if chunks == 2 else "one by one", chunks=chunks, split=split)
    if loop:
        family = interleaved_family(chunks, 1)
    found = fixed_schedule(ScheduleProblem((ModelPipelines(model, pp, micro_batches, 1.0, 2.0),)), family)
    lists: list[list[Action]] = [[] for _ in range(pp)]
    for p in found.passes():
        kind: Kind = p.kind  # type: ignore[assignment]
        lists[p.rank].append(Action(model=model, micro_batch=p.micro_batch, kind=kind, chunk=p.stage // pp))
    return tuple(map(tuple, lists))


def _of_one_model(model: str, rank: int, layout: Parallelism, micro_batches: int) -> Iterator[Action]:
    forwards = backwards = 0
    for code in one_f_one_b(layout.pp, coordinates(rank, layout).pp, micro_batches):
        if code == 0:
            yield Action(model=model, micro_batch=forwards, kind="F")
            forwards += 1
        else:
            yield Action(model=model, micro_batch=backwards, kind="B")
            backwards += 1


def optimizer_steps(spec: RLHFJobSpec) -> int:
    """The number of optimizer steps of the whole PPO stage."""
    return spec.ppo.iterations * spec.ppo.steps_per_iteration


def schedule(
    spec: RLHFJobSpec,
    plan: Plan,
    stage: Stage,
    models: Sequence[str],
    placed: Mapping[str, Parallelism] | None = None,
) -> dict[str, Any]:
    """The fields of a step that say how a mini-batch is divided, and the actions of each rank for it. The ranks run
    1F1B of one model after another. `placed` has layouts that replace the plan's."""
    rules = {rule.model: rule for rule in batch_rules(spec) if rule.stage is stage}
    layouts = {name: (placed or {}).get(name) or plan.parallelism[name] for name in models}
    counts = {name: rules[name].batch // (layout.batch_shares * rules[name].micro) for name, layout in layouts.items()}
    split = not plan.recomputed(stage) and not plan.gathered_by_layer(stage)
    fields: dict[str, Any] = {"actions": serial_1f1b(layouts, counts, list(models), plan.world_size, split)}
    if (tokens := rules[models[0]].tokens) is not None:
        chosen = [row.micro_batch_tokens for row in plan.batching if row.stage is stage and row.model in models]
        fields["micro_batch_tokens"] = min((each for each in chosen if each is not None), default=tokens)
    return fields


@dataclass(frozen=True)
class StepFacts:
    """The facts that make an exact replay of a PPO step possible. `schedule` is a `StoredSchedule` as JSON, or None for
    the serial schedule."""

    kl_coef: float
    train_actor: bool
    schedule: dict[str, Any] | None = None

    def as_json(self) -> dict[str, object]:
        return {"kl_coef": self.kl_coef, "train_actor": self.train_actor, "schedule": self.schedule}


def ppo_step(
    spec: RLHFJobSpec,
    plan: Plan,
    iteration: int,
    facts: StepFacts,
    placed: Mapping[str, Parallelism] | None = None,
) -> Step:
    """The command that trains one iteration with the serial schedule. `placed` has layouts that replace the plan's."""
    models = ["actor"] if facts.train_actor else []
    if has_critic(spec):
        models.append("critic")
    return Step(
        id=f"ppo/{iteration}/step",
        stage=Stage.PPO,
        step=iteration,
        batch=f"ppo/{iteration}",
        **schedule(spec, plan, Stage.PPO, models, placed),
        kl_coef=facts.kl_coef,
        train_actor=facts.train_actor,
    )


def supervised_step(
    spec: RLHFJobSpec, plan: Plan, stage: Stage, step: int, placed: Mapping[str, Parallelism] | None = None
) -> Step:
    """The command of one SFT, reward or DPO step with the serial schedule. `placed` is that of `ppo_step`."""
    return Step(
        id=f"{stage.value}/{step}/step",
        stage=stage,
        step=step,
        batch=f"{stage.value}/{step}",
        **schedule(spec, plan, stage, [stage.model], placed),
    )
