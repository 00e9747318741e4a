"""The PPO stage's arithmetic and commands, apart from I/O: actions of a step, statistics of an iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.coordinator.telemetry.summary import mean_ci95
from dovetail.manifest.critic import has_critic
from dovetail.manifest.types import Parallelism, RLHFJobSpec, Stage
from dovetail.pipelines import serial_1f1b
from dovetail.protocol.experience import kl_per_sample
from dovetail.protocol.messages import Action, Step
from dovetail.protocol.plan import Plan
from dovetail.protocol.wire import Arrays


def optimizer_steps(spec: RLHFJobSpec) -> int:
    """Optimizer steps of the whole PPO stage."""
    ppo = spec.ppo
    return ppo.iterations * ppo.epochs * (ppo.global_batch_size // ppo.mini_batch_size)


def schedule(
    plan: Plan,
    models: Sequence[str],
    sequences: int,
    micro_batch_size: int,
    placed: Mapping[str, Parallelism] | None = None,
) -> list[list[Action]]:
    """Serial 1F1B of `models`, one after another, over a mini-batch of `sequences` sequences. `placed`: layouts that
    replace the plan's."""
    layouts = {name: (placed or {}).get(name) or plan.parallelism[name] for name in models}
    counts = {name: sequences // (layout.dp * micro_batch_size) for name, layout in layouts.items()}
    return serial_1f1b(layouts, counts, list(models), plan.world_size)


@dataclass(frozen=True)
class StepFacts:
    """What a PPO step needs to be replayed exactly. `schedule`: a stored `scheduling.Chosen`; None: serial."""

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
    """The command of one iteration's training, serial."""
    models = ["actor"] if facts.train_actor else []
    if has_critic(spec):
        models.append("critic")
    return Step(
        id=f"ppo/{iteration}/step",
        stage=Stage.PPO,
        step=iteration,
        batch=f"ppo/{iteration}",
        actions=schedule(plan, models, spec.ppo.mini_batch_size, spec.ppo.micro_batch_size, placed),
        kl_coef=facts.kl_coef,
        train_actor=facts.train_actor,
    )


def iteration_metrics(
    arrays: Arrays,
    trained: Mapping[str, float],
    phases: Mapping[str, float],
    wall_seconds: float | None,
    temperature: float = 1.0,
) -> dict[str, float]:
    """One row of history.jsonl: rewards, KL, lengths, the trainers' own metrics, and (with `wall_seconds`) where the
    time went."""
    scores = arrays["scores"].tolist()
    reward, kl = mean_ci95(scores), mean_kl(arrays, trained, temperature)
    lengths = arrays["response_lengths"].astype(np.float64)
    metrics = {
        **trained,
        "samples": float(len(scores)),
        "reward": reward["mean"],
        "reward_ci95": reward["ci95"],
        "reward_min": min(scores),
        "reward_max": max(scores),
        "equal_reward_groups": equal_groups(arrays),
        "distinct_responses": float(distinct_responses(arrays)),
        "kl": kl["mean"],
        "kl_ci95": kl["ci95"],
        "response_length": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "finished_fraction": float(arrays["finished"].astype(np.float64).mean()),
    }
    if wall_seconds is not None:
        metrics |= {"samples_per_second": len(scores) / wall_seconds, "iteration_seconds": wall_seconds}
        metrics |= {f"seconds_{name}": seconds for name, seconds in phases.items()}
    return metrics


def mean_kl(arrays: Arrays, trained: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Mean KL per sample to the reference, nats, and its interval. Rollouts report log-probabilities at temperature 1,
    so at another the trainers' own count."""
    if temperature != 1.0 and "kl" in trained:
        return {"mean": trained["kl"], "ci95": trained.get("kl_ci95", 0.0)}
    return mean_ci95(kl_per_sample(arrays).tolist())


def distinct_responses(arrays: Arrays) -> int:
    """How many different responses there are, by their tokens."""
    begin, length = arrays["prompt_lengths"].tolist(), arrays["response_lengths"].tolist()
    rows = zip(arrays["tokens"], begin, length, strict=True)
    return len({np.ascontiguousarray(row[first : first + count]).tobytes() for row, first, count in rows})


def equal_groups(arrays: Arrays) -> float:
    """Share of the prompts with several samples whose samples all have the same score; 0 where there is none."""
    _, group, sizes = np.unique(arrays["groups"], return_inverse=True, return_counts=True)
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, group, arrays["scores"])
    np.maximum.at(high, group, arrays["scores"])
    several = sizes > 1
    return float((low == high)[several].mean()) if several.any() else 0.0


def other_seconds(wall: float, phases: Mapping[str, float]) -> float:
    """Time of an iteration that is none of its named phases."""
    return max(0.0, wall - sum(phases.values()))
