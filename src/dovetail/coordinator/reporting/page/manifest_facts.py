"""Summarises a manifest in a few lines for people. The functions are pure."""

from __future__ import annotations

from dovetail.manifest.critic import has_critic
from dovetail.manifest.training_types import Optimizer
from dovetail.manifest.types import RLHFJob, RLHFJobSpec, Stage, TrainedModel


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
