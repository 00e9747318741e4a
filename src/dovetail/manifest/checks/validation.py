"""Reads manifests. `load_manifest` returns a job that can run, or raises ManifestError with sentences for the user.
`warnings` tells of fields that are set but have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dovetail.manifest.checks.name_rules import check_name
from dovetail.manifest.checks.rules import check
from dovetail.manifest.documents import ManifestError, is_file, parse, read_yaml, with_home
from dovetail.manifest.field_policy import NoEffect, without_effect
from dovetail.manifest.resolve import absolute_paths, resolve
from dovetail.manifest.sizes import has_critic, pod_count
from dovetail.manifest.types import Dtype, Evaluation, RLHFJob, RLHFJobSpec, Role, Stage


def parse_manifest(path_or_text: str | Path) -> RLHFJob:
    """The job as written. Its fields and the rules between them are checked. Raises ManifestError."""
    return _checked(parse(read_yaml(path_or_text)))


def _checked(job: RLHFJob) -> RLHFJob:
    if errors := [*check_name(job.metadata.name, job.spec), *check(job.spec)]:
        raise ManifestError(errors)
    return job


def load_manifest(path_or_text: str | Path, base_dir: Path | None = None) -> RLHFJob:
    """The job from which a run starts. It is the result of `parse_manifest` with every default filled in (`resolve`)
    and absolute local paths.

    `~` is the home folder. Relative paths start at `base_dir`. Its default is the manifest's folder, or the working
    directory for a manifest given as text. Call `warnings` with the job as written (`parse_manifest`), because
    resolving removes what some warnings are about. `check_files` checks the files themselves. Raises ManifestError."""
    job = _checked(parse(with_home(read_yaml(path_or_text))))
    if base_dir is None:
        base_dir = Path(path_or_text).parent if is_file(path_or_text) else Path()
    return absolute_paths(job.model_copy(update={"spec": resolve(job.spec)}), base_dir)


def warnings(spec: RLHFJobSpec, *, cluster: bool = False) -> list[str]:
    """One sentence for each field that is set but has no effect. Either no process executes it yet (with `cluster`, the
    operator does not either), or other fields make it useless. The job still runs, unless the sentence says
    otherwise."""
    found = [
        f"{path} {mark.told}: {mark.why}."
        for path, mark in without_effect(spec, "spec")
        if not cluster or isinstance(mark, NoEffect)
    ]
    return found + list(_pointless(spec))


def _pointless(spec: RLHFJobSpec) -> Iterator[str]:
    ppo = Stage.PPO in spec.stages
    if Stage.REWARD in spec.stages and spec.models.reward.calls:
        yield "spec.stages: the reward stage is dropped, for spec.models.reward.function replaces the reward model."
    if not ppo and spec.evaluation != Evaluation():
        yield "spec.evaluation has no effect: its prompts are answered during PPO, which is not among the stages."
    critic = spec.models.critic
    if ppo and spec.ppo.advantage != "gae" and (critic.source or critic.lora or critic.share_actor_body):
        yield f"spec.models.critic has no effect: {spec.ppo.advantage} uses no critic."
    if ppo and not spec.ppo.reads_reference and spec.models.reference.source:
        yield "spec.models.reference has no effect: spec.ppo.kl.coef is 0, so nothing reads it."
    if ppo and spec.plan.placement == "Interleaving":
        if sum(pod_count(group) for group in spec.groups if Role.ROLLOUT in group.roles) < 2:
            yield "spec.plan.placement Interleaving has no effect: it takes two rollouts to place models apart."
        elif not spec.ppo.reads_reference or (spec.models.reward.calls and not has_critic(spec)):
            yield "spec.plan.placement Interleaving has no effect: scorers run no model beside the reference."
    trainers = [group for group in spec.groups if Role.TRAINER in group.roles]
    if trainers and all(group.on_cpu for group in trainers):
        optimizers = {
            "spec.sft.optimizer": (spec.sft.optimizer, Stage.SFT),
            "spec.reward.optimizer": (spec.reward.optimizer, Stage.REWARD),
            "spec.dpo.optimizer": (spec.dpo.optimizer, Stage.DPO),
            "spec.ppo.actorOptimizer": (spec.ppo.actor_optimizer, Stage.PPO),
            "spec.ppo.criticOptimizer": (spec.ppo.critic_optimizer, Stage.PPO),
        }
        for field, (optimizer, stage) in optimizers.items():
            if optimizer.offload and stage in spec.stages:
                yield f"{field}.offload has no effect on CPUs: optimizer state is in host memory anyway."
    for index, group in enumerate(spec.groups):
        if Role.ROLLOUT not in group.roles and group.dtype is not Dtype.AUTO:
            yield f"spec.groups[{index}].dtype has no effect without the role rollout; see spec.models.actor.dtype."
    for stage in (Stage.SFT, Stage.REWARD, Stage.DPO):
        supervised = spec.supervised(stage)
        if stage in spec.stages and supervised.steps is not None and supervised.epochs > 1:
            yield (
                f"spec.{stage.value}.epochs has no effect beside spec.{stage.value}.steps, which ends the stage; "
                "remove one of them."
            )
    if spec.data.held_out == 0:
        yield "spec.data.heldOut is 0: losses and accuracy before and after training cannot be measured."
