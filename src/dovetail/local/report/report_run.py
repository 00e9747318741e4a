"""The report's section on what was run: manifest, versions and learning rates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dovetail.coordinator.telemetry.summary_rows import get
from dovetail.manifest.critic import has_critic
from dovetail.manifest.training_types import Optimizer
from dovetail.manifest.types import RLHFJob, RLHFJobSpec, Stage, TrainedModel


def read_job(run_dir: Path) -> RLHFJob | None:
    """job.json of the run, or None if it cannot be read."""
    try:
        return RLHFJob.model_validate(json.loads((run_dir / "job.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None


def run_section(job: RLHFJob | None, summary: Mapping[str, Any]) -> str:
    """The section as HTML, or '' if nothing is known. Pure."""
    rows = [] if job is None else _manifest_rows(job)
    versions = get(summary, "versions")
    if isinstance(versions, Mapping) and versions:
        rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    if not rows:
        return ""
    body = "".join(f'<tr><td>{escape(a)}</td><td class="text">{escape(b)}</td></tr>' for a, b in rows)
    whole = "" if job is None else f"<details><summary>The manifest</summary><pre>{escape(_yaml(job))}</pre></details>"
    return f"<h2>The run</h2><table><tbody>{body}</tbody></table>{whole}"


def _manifest_rows(job: RLHFJob) -> list[tuple[str, str]]:
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


def _yaml(job: RLHFJob) -> str:
    """The manifest without what has its default."""
    document = job.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"status"})
    head = {"apiVersion": job.api_version, "kind": job.kind}
    return yaml.safe_dump(head | document, sort_keys=False, width=100)
