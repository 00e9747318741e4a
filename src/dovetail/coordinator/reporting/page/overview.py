"""Makes the run page's first document. It has a run's progress, its health, and the data that the page can show."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from dovetail.coordinator.reporting.health import Rules
from dovetail.coordinator.reporting.page.page_health import health
from dovetail.coordinator.reporting.summary_rows import (
    PHASES,
    duration,
    fusion_rows,
    get,
    outcome,
    overlap_sentence,
    rows,
    stage_seconds,
)
from dovetail.coordinator.reporting.time_left import TimeLeft
from dovetail.manifest.sizes import has_critic
from dovetail.manifest.training_types import Optimizer
from dovetail.manifest.types import RLHFJob, RLHFJobSpec, Stage, TrainedModel
from dovetail.protocol.prediction import MEASURED_NAMES


def manifest_facts(job: RLHFJob) -> list[tuple[str, str]]:
    """Lines (what, how) about the job's models, batches and learning rates."""
    spec = job.spec
    names = {Stage.SFT: "SFT", Stage.REWARD: "reward model", Stage.DPO: spec.dpo.loss, Stage.PPO: spec.ppo.method}
    rows = [
        ("Manifest", f"{job.metadata.name} ({job.kind} {job.api_version})"),
        ("Stages", ", ".join(names[stage] for stage in spec.stages)),
        ("Actor", _source(spec.models.actor)),
    ]
    if Stage.PPO in spec.stages:
        calls = ", ".join(function.function for function in spec.models.reward.calls)
        rows.append(("Reward", calls or _reward(spec)))
        ppo = spec.ppo
        size = f"{ppo.global_batch_size} samples an iteration, {ppo.samples_per_prompt} to a prompt"
        steps = f"mini-batches of {ppo.mini_batch_size}, {ppo.epochs} {'epoch' if ppo.epochs == 1 else 'epochs'}"
        rows.append((f"{ppo.method}", f"{size}; {steps}; KL coefficient {ppo.kl.coef:g}; lag {ppo.lag}"))
    optimizers: dict[str, tuple[Stage, Optimizer]] = {
        "SFT": (Stage.SFT, spec.sft.optimizer),
        "reward model": (Stage.REWARD, spec.reward.optimizer),
        spec.dpo.loss: (Stage.DPO, spec.dpo.optimizer),
        "actor": (Stage.PPO, spec.ppo.actor_optimizer),
    }
    if has_critic(spec) and not spec.models.critic.share_actor_body:
        optimizers["critic"] = (Stage.PPO, spec.ppo.critic_optimizer)
    rates = [
        f"{name} {o.learning_rate:g} ({o.schedule})" for name, (stage, o) in optimizers.items() if stage in spec.stages
    ]
    rows.append(("Learning rates", ", ".join(rates)))
    return rows


def _reward(spec: RLHFJobSpec) -> str:
    return "a model trained in this run" if Stage.REWARD in spec.stages else _source(spec.models.reward)


def _source(model: TrainedModel) -> str:
    source = model.source
    if source is None:
        return "from the stage before"
    if source.scratch is not None:
        return f"{source.scratch.architecture} from random weights"
    return " at ".join(part for part in (source.hugging_face or source.path or source.pvc, source.revision) if part)


Document = dict[str, Any]


@dataclass(frozen=True)
class SeenRun:
    """The known facts about a run. `rows` has the rows of history.jsonl. `alive` says whether its coordinator is
    running, and is None if that is unknown. `now` is in seconds since the epoch. `kept` has the data that the page can
    show, by kind."""

    folder: str
    job: Mapping[str, Any]
    parsed: RLHFJob | None
    plan: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Sequence[Document]
    alive: bool | None
    now: float
    kept: Mapping[str, Any] = field(default_factory=dict)


def last_of_each_step(rows: Sequence[Document], stage: str) -> dict[int, Document]:
    """The rows of a stage by step. If a step was repeated, its last row counts."""
    return {row["step"]: row for row in rows if row["stage"] == stage}


def state(seen: SeenRun) -> str:
    """The run's state. It is `succeeded`, `failed` or `interrupted` if the run itself has recorded that. Otherwise it
    is `running`, or `stopped` if its coordinator has ended without a record."""
    said = str(seen.summary.get("state") or "")
    if said:
        return said
    return "stopped" if seen.alive is False else "running"


def line(seen: SeenRun) -> Document:
    """The run's line in the list."""
    spec = _of(seen.job, "spec")
    last = seen.rows[-1] if seen.rows else None
    stage = str(last["stage"]) if last is not None else None
    if stage == "evaluation":
        stage = Stage.PPO.value
    steps = last_of_each_step(seen.rows, stage) if stage else {}
    figures = steps[max(steps)]["metrics"] if steps else {}
    return {
        "id": seen.folder,
        "name": job_name(seen.job, seen.folder),
        "group": group(seen.job),
        "seed": spec.get("seed"),
        "state": state(seen),
        "stage": stage,
        "done": max(steps, default=0),
        "total": _total(seen, stage),
        "method": seen.parsed.spec.ppo.method if seen.parsed is not None else None,
        **{name: _number(figures.get(name)) for name in ("reward", "kl", "samples_per_second")},
        "seconds": _seconds(seen),
        "began": _number(seen.rows[0].get("time")) if seen.rows else None,
        "ended": _number(last.get("time")) if last is not None else None,
    }


def job_name(job: Mapping[str, Any], folder: str) -> str:
    """The name in the manifest `job`. If it has none, the name of the run's folder."""
    return str(_of(job, "metadata").get("name") or folder)


def group(job: Mapping[str, Any]) -> str:
    """A text that is equal for runs of one manifest that differ only in their seed and name."""
    spec = {name: value for name, value in _of(job, "spec").items() if name != "seed"}
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:12]


def overview(seen: SeenRun) -> Document:
    """All that the page's first view shows."""
    ppo = last_of_each_step(seen.rows, Stage.PPO.value)
    prediction = seen.plan.get("prediction") if isinstance(seen.plan.get("prediction"), Mapping) else None
    spec = seen.parsed.spec if seen.parsed is not None else None
    found = line(seen)
    running = found["state"] == "running"
    return {
        **found,
        "reason": _why(found["state"], seen.summary),
        "seconds_left": _left(seen, found) if running else None,
        "health": health(
            [(step, row["metrics"]) for step, row in sorted(ppo.items())],
            [row["time"] for row in seen.rows if isinstance(row.get("time"), int | float)],
            rules=Rules.of(spec) if spec is not None else Rules(),
            lag=spec.ppo.lag if spec is not None else 0,
            predicted=prediction.get("iterationSeconds") if prediction else None,
            now=seen.now if running else None,
        ),
        "outcome": outcome(seen.summary),
        "audit": get(seen.summary, "audit") or {},
        "results": [list(row) for row in _results(seen.summary)],
        "phases": _phases(ppo.values()),
        "overlap": overlap_sentence(seen.summary),
        "facts": [list(row) for row in manifest_facts(seen.parsed)] if seen.parsed is not None else [],
        "manifest": "" if seen.parsed is None else _manifest(seen.parsed),
        "versions": get(seen.summary, "versions") or {},
        "changes": seen.summary.get("changes") or [],
        "plan": plan_against_actual(prediction, [row["metrics"] for _, row in sorted(ppo.items())]),
        "placement": {
            "trainers": [entry.get("name") for entry in seen.plan.get("trainers") or []],
            "rollouts": [entry.get("name") for entry in seen.plan.get("rollouts") or []],
            "parallelism": seen.plan.get("parallelism") or {},
            "lag": seen.plan.get("lag"),
            "alternatives": (prediction or {}).get("alternatives") or [],
        },
        **seen.kept,
    }


def _results(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    times = [(f"Time of stage {name}", "", duration(seconds)) for name, seconds in stage_seconds(summary)]
    return [*rows(summary), *fusion_rows(summary), *times]


def _phases(ppo: Iterable[Document]) -> list[tuple[str, float]]:
    """The seconds of each phase, over all iterations."""
    found: dict[str, float] = {}
    for row in ppo:
        for metric, seconds in row["metrics"].items():
            name = metric.removeprefix("seconds_")
            if name != metric and _number(seconds) is not None:
                found[name] = found.get(name, 0.0) + seconds
    return sorted(found.items(), key=lambda item: PHASES.index(item[0]) if item[0] in PHASES else len(PHASES))


def _manifest(job: RLHFJob) -> str:
    """The manifest without the fields that have their defaults."""
    document = job.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"status"})
    head = {"apiVersion": job.api_version, "kind": job.kind}
    return yaml.safe_dump(head | document, sort_keys=False, width=100)


# The mean of this many last iterations is compared with the plan.
COMPARED = 10


def plan_against_actual(prediction: Mapping[str, Any] | None, metrics: Sequence[Mapping[str, float]]) -> list[Document]:
    """The seconds of each phase, as predicted, as measured in the last iteration, and as the mean of the last COMPARED
    iterations. If the plan has no prediction, the coordinator's own prediction of generation with inference is used."""
    if not metrics:
        return []
    last, recent = metrics[-1], metrics[-COMPARED:]
    phases = (prediction or {}).get("phases") or {}
    planned = {MEASURED_NAMES.get(name, name): seconds for name, seconds in phases.items()}
    total = {"iteration": (prediction or {}).get("iterationSeconds")}

    def entry(name: str, metric: str, predicted: Any) -> Document | None:
        values = [row[metric] for row in recent if row.get(metric) is not None]
        if not values and predicted is None:
            return None
        mean = sum(values) / len(values) if values else None
        return {"phase": name, "planned": predicted, "last": last.get(metric), "mean": mean}

    names = [name.removeprefix("seconds_") for name in last if name.startswith("seconds_")]
    found = [entry(name, f"seconds_{name}", planned.get(name)) for name in dict.fromkeys([*planned, *names])]
    found.append(entry("iteration", "iteration_seconds", total["iteration"]))
    if last.get("fusion_predicted_seconds") is not None:
        found.append(entry("generation and inference", "fusion_stage_seconds", last["fusion_predicted_seconds"]))
    return [one for one in found if one is not None]


def _why(state: str, summary: Mapping[str, Any]) -> str:
    if state == "stopped":
        return "the run's processes are gone and left no result; dovetail run --resume goes on"
    return str(summary.get("reason") or "")


def _total(seen: SeenRun, stage: str | None) -> int | None:
    if seen.parsed is None or stage is None:
        return None
    spec = seen.parsed.spec
    if stage == Stage.PPO.value:
        return spec.ppo.iterations
    return {"sft": spec.sft.steps, "reward": spec.reward.steps, "dpo": spec.dpo.steps}.get(stage)


def _left(seen: SeenRun, found: Mapping[str, Any]) -> float | None:
    """The seconds until the current stage ends, if its next steps take as long as the last ones."""
    if found["total"] is None or found["stage"] is None:
        return None
    estimate = TimeLeft()
    for step, row in sorted(last_of_each_step(seen.rows, found["stage"]).items()):
        if isinstance(row.get("time"), int | float):
            estimate.see(Stage(found["stage"]), step, found["total"], row["time"])
    return estimate.left(seen.now)


def _seconds(seen: SeenRun) -> float | None:
    """How long the run took, over all its resumes. During a run, the seconds between its first and last step."""
    if (known := _number(seen.summary.get("wall_seconds"))) is not None:
        return known
    began, ended = (_number(row.get("time")) for row in (seen.rows[0], seen.rows[-1])) if seen.rows else (None, None)
    return None if began is None or ended is None else ended - began


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _of(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = document.get(name)
    return value if isinstance(value, Mapping) else {}
