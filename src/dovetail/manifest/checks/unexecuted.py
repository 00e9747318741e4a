"""Lists the fields that are accepted but have no effect yet. This one table makes sure that each of them causes a
warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dovetail.manifest.critic import has_critic
from dovetail.manifest.fixed_names import DATA_KINDS
from dovetail.manifest.sizes import pod_count
from dovetail.manifest.types import Dtype, Evaluation, RLHFJobSpec, Role, Stage, Storage


@dataclass(frozen=True)
class Unexecuted:
    """A field without an effect. `used(spec)` yields the paths of the field where a spec sets it. `why` completes the
    sentence `<path>: <why>`.

    `on_cluster` says that the field has an effect in pods, but not on a single machine."""

    field: str
    used: Callable[[RLHFJobSpec], Iterator[str]]
    why: str
    on_cluster: bool = False


def _spec_field(name: str, path: str, default: object) -> Callable[[RLHFJobSpec], Iterator[str]]:
    def used(spec: RLHFJobSpec) -> Iterator[str]:
        if getattr(spec, name) != default:
            yield path

    return used


def _pvc(spec: RLHFJobSpec) -> Iterator[str]:
    for name in ("actor", "critic", "reward", "reference"):
        source = getattr(spec.models, name).source
        if source is not None and source.pvc is not None:
            yield f"spec.models.{name}.source.pvc"


def _other_claims(spec: RLHFJobSpec) -> Iterator[str]:
    for name in DATA_KINDS:
        for index, source in enumerate(getattr(spec.data, name)):
            if source.pvc is not None:
                yield f"spec.data.{name}[{index}].pvc"
    for index, source in enumerate(spec.evaluation.prompts):
        if source.pvc is not None:
            yield f"spec.evaluation.prompts[{index}].pvc"
    if spec.models.tokenizer.pvc is not None:
        yield "spec.models.tokenizer.pvc"


def _reward_code(spec: RLHFJobSpec) -> Iterator[str]:
    if spec.models.reward.code is not None:
        yield "spec.models.reward.code"


def _coordinator(spec: RLHFJobSpec) -> Iterator[str]:
    for name, alias in (("image", "image"), ("pod_template", "podTemplate")):
        if getattr(spec.coordinator, name):
            yield f"spec.coordinator.{alias}"


def _hub(spec: RLHFJobSpec) -> Iterator[str]:
    for name, alias in (("token_secret", "tokenSecret"), ("cache_claim", "cacheClaim")):
        if getattr(spec.hub, name) is not None:
            yield f"spec.hub.{alias}"


def _volume(spec: RLHFJobSpec) -> Iterator[str]:
    if spec.checkpoint.volume is not None:
        yield "spec.checkpoint.volume"


def _tracker_secrets(spec: RLHFJobSpec) -> Iterator[str]:
    for index, tracker in enumerate(spec.trackers):
        if tracker.secret is not None:
            yield f"spec.trackers[{index}].secret"


def _storage(spec: RLHFJobSpec) -> Iterator[str]:
    if spec.storage != Storage():
        yield "spec.storage"


def _output_claim(spec: RLHFJobSpec) -> Iterator[str]:
    if spec.output is not None and spec.output.pvc is not None:
        yield "spec.output.pvc"


def _start_timeout(spec: RLHFJobSpec) -> Iterator[str]:
    if spec.failure_policy.start_timeout_seconds is not None:
        yield "spec.failurePolicy.startTimeoutSeconds"


def _reference_dtype(spec: RLHFJobSpec) -> Iterator[str]:
    if spec.models.reference.dtype is not Dtype.AUTO:
        yield "spec.models.reference.dtype"


def _elastic(spec: RLHFJobSpec) -> Iterator[str]:
    for index, group in enumerate(spec.groups):
        if group.max_replicas is not None and group.max_replicas > pod_count(group):
            yield f"spec.groups[{index}].maxReplicas"


def _group_field(name: str, alias: str) -> Callable[[RLHFJobSpec], Iterator[str]]:
    def used(spec: RLHFJobSpec) -> Iterator[str]:
        for index, group in enumerate(spec.groups):
            if getattr(group, name):
                yield f"spec.groups[{index}].{alias}"

    return used


UNEXECUTED: tuple[Unexecuted, ...] = (
    Unexecuted(
        "spec.suspend", _spec_field("suspend", "spec.suspend", False), "the job starts all the same", on_cluster=True
    ),
    Unexecuted(
        "spec.ttlSecondsAfterFinished",
        _spec_field("ttl_seconds_after_finished", "spec.ttlSecondsAfterFinished", None),
        "the run directory is kept",
        on_cluster=True,
    ),
    Unexecuted(
        "spec.failurePolicy.startTimeoutSeconds", _start_timeout, "processes start at once or fail", on_cluster=True
    ),
    Unexecuted("spec.storage", _storage, "the run directory is kept; --resume goes on with it", on_cluster=True),
    Unexecuted("spec.output.pvc", _output_claim, "use path or s3; nothing is copied", on_cluster=True),
    Unexecuted("spec.trackers[].secret", _tracker_secrets, "set its environment variables yourself", on_cluster=True),
    Unexecuted("spec.checkpoint.volume", _volume, "checkpoints go to the run directory", on_cluster=True),
    Unexecuted("spec.groups[].image", _group_field("image", "image"), "processes run from this machine's Python", True),
    Unexecuted(
        "spec.groups[].podTemplate", _group_field("pod_template", "podTemplate"), "there are no pods to patch", True
    ),
    Unexecuted("spec.models.*.source.pvc", _pvc, "use path or huggingFace; the run will fail", on_cluster=True),
    Unexecuted("spec.data.*[].pvc", _other_claims, "use path; the run will fail", on_cluster=True),
    Unexecuted("spec.models.reward.code", _reward_code, "functions are imported from importPath", on_cluster=True),
    Unexecuted("spec.coordinator.*", _coordinator, "there is no pod of the coordinator", on_cluster=True),
    Unexecuted("spec.hub.*", _hub, "this machine's own token and cache are used", on_cluster=True),
    Unexecuted(
        "spec.models.reference.dtype", _reference_dtype, "scorers compute in float32 on CPUs and bfloat16 on GPUs"
    ),
    Unexecuted("spec.groups[].maxReplicas", _elastic, "the group keeps the number of pods it starts with", True),
)


def warnings(spec: RLHFJobSpec, *, cluster: bool = False) -> list[str]:
    """One sentence for each field that is set but has no effect. Either no process executes it yet (with `cluster`, the
    operator does not either), or other fields make it useless. The job still runs, unless the sentence says
    otherwise."""
    found = [
        f"{path} is not executed {'on a single machine' if entry.on_cluster else 'yet'}: {entry.why}."
        for entry in UNEXECUTED
        if not (cluster and entry.on_cluster)
        for path in entry.used(spec)
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
