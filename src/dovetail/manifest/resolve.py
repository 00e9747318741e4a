"""Fills in defaults that depend on other fields. job.json holds the result, so no process decides them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dovetail.manifest.fixed_names import DATA_KINDS
from dovetail.manifest.sizes import pod_count, shares_body
from dovetail.manifest.training_types import AUTO_LAG, PPO, REWARD_CLIP
from dovetail.manifest.types import Dtype, Group, RLHFJob, RLHFJobSpec, Role, Stage


def reward_clip(spec: RLHFJobSpec) -> float | None:
    """The limit to which scores are clipped, above and below 0. None if they are not clipped. The author of a function,
    or of a reward model from elsewhere, decides its scale. Clipping could make different rewards equal."""
    if spec.ppo.reward_clip != "Auto":
        return spec.ppo.reward_clip
    trained = not spec.models.reward.calls and Stage.REWARD in spec.stages
    return REWARD_CLIP if trained else None


def ppo_config(spec: RLHFJobSpec) -> PPO:
    """`spec.ppo` with `rewardClip: Auto` decided."""
    return spec.ppo.model_copy(update={"reward_clip": reward_clip(spec)})


def resolve(spec: RLHFJobSpec) -> RLHFJobSpec:
    """`spec` with the defaults that follow from its other fields. A second call changes nothing.

    - `stages` loses reward when a reward function replaces the model.
    - Groups without a GPU product have gpu.perPod 0. replicas becomes the number of pods at the start.
    - Auto dtypes become float32 on CPUs. On GPUs they stay, because only the device tells whether it has bfloat16.
    - `ppo.overlong.toTokens` becomes generation.maxTokens.
    - `ppo.oldLogProbs` Auto becomes Rollout if both sides compute the same numbers and there is no lag, else
      Recompute. With `ppo.lag` Auto it stays Auto until the lag is known (`with_lag`)."""
    groups = [_group(group) for group in spec.groups]
    stages = [s for s in spec.stages if s is not Stage.REWARD or not spec.models.reward.calls]
    trainers = [group for group in groups if Role.TRAINER in group.roles]
    models = spec.models
    if trainers and all(group.on_cpu for group in trainers):
        models = models.model_copy(
            update={
                name: model.model_copy(update={"dtype": Dtype.FLOAT32})
                for name in ("actor", "critic", "reward", "reference")
                if (model := getattr(models, name)).dtype is Dtype.AUTO
                and name != "reference"
                and not (name == "critic" and models.critic.share_actor_body)
            }
        )
    ppo = spec.ppo
    if ppo.overlong is not None and ppo.overlong.to_tokens is None:
        overlong = ppo.overlong.model_copy(update={"to_tokens": spec.generation.max_tokens})
        ppo = ppo.model_copy(update={"overlong": overlong})
    partly = spec.model_copy(update={"groups": groups, "stages": stages, "models": models, "ppo": ppo})
    if partly.ppo.old_log_probs != "Auto" or partly.ppo.lag == AUTO_LAG:
        return partly
    return partly.model_copy(update={"ppo": partly.ppo.model_copy(update={"old_log_probs": _old_log_probs(partly)})})


def with_lag(spec: RLHFJobSpec, lag: int) -> RLHFJobSpec:
    """`spec` with `lag` in place of `ppo.lag` Auto, and with the defaults that depend on it. Any other lag stays."""
    if spec.ppo.lag != AUTO_LAG:
        return spec
    return resolve(spec.model_copy(update={"ppo": spec.ppo.model_copy(update={"lag": lag})}))


def _group(group: Group) -> Group:
    update: dict[str, Any] = {"replicas": pod_count(group)}
    if group.on_cpu:
        update["gpu"] = group.gpu.model_copy(update={"per_pod": 0, "product": None})
        if Role.ROLLOUT in group.roles and group.dtype is Dtype.AUTO:
            update["dtype"] = Dtype.FLOAT32
    return group.model_copy(update=update)


def old_is_current(spec: RLHFJobSpec) -> bool:
    """Whether the forward pass of an iteration's only optimizer step also gives the old log-probabilities of the
    trainer, so that they need no pass of their own. Advantages that read them, and values of a shared body, are needed
    before the step."""
    ppo = spec.ppo
    in_advantages = ppo.advantage == "distillation" or (ppo.kl.coef > 0 and not ppo.kl_in_loss)
    early = in_advantages or ppo.advantage_function is not None or shares_body(spec)
    return ppo.lag == 0 and ppo.steps_per_iteration == 1 and not early


def _old_log_probs(spec: RLHFJobSpec) -> Literal["Rollout", "Recompute"]:
    """The value for Auto. The rollout is trusted only if its rounding and sampling distribution are the trainer's
    own."""
    generation = spec.generation
    exact = spec.models.actor.dtype is Dtype.FLOAT32 and all(
        group.dtype is Dtype.FLOAT32 for group in spec.groups if Role.ROLLOUT in group.roles
    )
    plain = generation.top_k == 0 and generation.top_p == 1.0
    return "Rollout" if exact and plain and spec.ppo.lag == 0 else "Recompute"


def absolute_paths(job: RLHFJob, base_dir: Path) -> RLHFJob:
    """`job` with absolute paths in place of all local paths that its spec names. They start at `base_dir`, the
    manifest's folder. A tokenizer path that is not a folder there stays unchanged, because it is a name on a hub."""
    data = job.model_dump(by_alias=True, mode="json")
    spec = data["spec"]
    sources = [model.get("source") for model in spec["models"].values()]
    sources += [source for name in DATA_KINDS for source in spec["data"][name]]
    sources += spec["evaluation"]["prompts"]
    for source in sources:
        if source and source.get("path"):
            source["path"] = str((base_dir / source["path"]).resolve())
    tokenizer = spec["models"]["tokenizer"]
    if tokenizer["path"] and (base_dir / tokenizer["path"]).is_dir():
        tokenizer["path"] = str((base_dir / tokenizer["path"]).resolve())
    reward = spec["models"]["reward"]
    if reward["function"] or reward["functions"] or job.spec.evaluation.functions:
        reward["importPath"] = str((base_dir / (reward["importPath"] or "")).resolve())
    if job.spec.ppo.names_functions:
        spec["ppo"]["importPath"] = str((base_dir / (spec["ppo"]["importPath"] or "")).resolve())
    return RLHFJob.model_validate(data)
