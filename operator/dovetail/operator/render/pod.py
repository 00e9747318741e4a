"""Pod templates. It has the parts that all pods share, the coordinator's template, and that of a group."""

from __future__ import annotations

import math
from typing import Any

from dovetail.gpus.gpu_products import GPU_RESOURCE, PRODUCT_LABEL
from dovetail.kube import names
from dovetail.manifest.accelerators import SLEEP
from dovetail.manifest.checks.pod_templates import memory_limit
from dovetail.manifest.merge import merge
from dovetail.manifest.types import DataSource, Group, RLHFJobSpec, Role
from dovetail.operator.render import spot
from dovetail.operator.render.context import Object, RenderContext
from dovetail.operator.render.volume_claim import claim_name, share_claims
from dovetail.protocol.plan import Plan
from dovetail.protocol.process import env
from dovetail.protocol.process.process_names import CONTAINER, COORDINATOR, COORDINATOR_MODULE, POD_MODULE

GRACE_SECONDS = 45
GPU_CLAIM = "gpus"  # in a pod that gets its GPUs through a claim
# The writable folders of a read-only root. The caches of Hugging Face, vLLM, Triton and torch.inductor are below HOME.
HOME = "/tmp"
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
HUB_TOKEN = "HF_TOKEN"  # huggingface_hub and datasets read it


def coordinator_pod(context: RenderContext) -> Object:
    """The pod template of the coordinator. It alone reads data and reward functions, and has the hub's token."""
    port = env.COORDINATOR_PORT
    spec = context.job.spec
    container = _container(context, image(context, None), COORDINATOR_MODULE)
    container["env"] += [variable(env.NAME, COORDINATOR), variable(env.PORT, port)]
    if (secret := spec.hub.token_secret) is not None:
        reference = {"name": secret.name, "key": secret.key}
        container["env"].append({"name": HUB_TOKEN, "valueFrom": {"secretKeyRef": reference}})
    container["volumeMounts"] += _claim_mounts(context, coordinator_claims(spec))
    volumes = _claim_volumes(context, coordinator_claims(spec))
    if (code := spec.models.reward.code) is not None and code.config_map is not None:
        container["volumeMounts"].append({"name": "reward-code", "mountPath": names.CODE_MOUNT, "readOnly": True})
        volumes.append({"name": "reward-code", "configMap": {"name": code.config_map}})
    if (output := spec.output) is not None and output.pvc is not None:
        container["volumeMounts"].append({"name": "output", "mountPath": names.OUTPUT_MOUNT})
        volumes.append({"name": "output", "persistentVolumeClaim": {"claimName": _claim(output.pvc)}})
    if output is not None and output.s3 is not None and (keys := output.s3.credentials_secret) is not None:
        container["env"] += [_key(keys, name) for name in CREDENTIALS]
    if secrets := sorted({tracker.secret for tracker in spec.trackers if tracker.secret is not None}):
        container["envFrom"] = [{"secretRef": {"name": name}} for name in secrets]
    container |= {
        "ports": [{"name": "http", "containerPort": port}],
        "startupProbe": _probe("/healthz", port, period=2, failures=150),
        "readinessProbe": _probe("/healthz", port, period=5, failures=3),
        "livenessProbe": _probe("/healthz", port, period=15, failures=8),
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
    }
    return _template(context, None, container, patch=spec.coordinator.pod_template, extra={"volumes": volumes})


def group_pod(context: RenderContext, group: Group, index: int | None = None) -> Object:
    """The pod template of a group. `index` is the number of a surplus rollout in its group. If it is None, the pod
    belongs to the JobSet, and its number is its Job's (`comes_and_goes`) or its completion index."""
    container = _container(context, image(context, group), POD_MODULE)
    annotation = names.REPLICA_ANNOTATION if comes_and_goes(group) else names.INDEX_ANNOTATION
    where: Object = {"fieldPath": f"metadata.annotations['{annotation}']"}
    number = {"name": env.INDEX, "valueFrom": {"fieldRef": where}} if index is None else variable(env.INDEX, index)
    container["env"] += [number, variable(env.GROUP, group.name)]
    if index is not None:
        container["env"].append(variable(env.SURPLUS, 1))
    container["ports"] = []
    # The coordinator gives rollouts no more work, and others continue their samples. Trainers write a checkpoint.
    container["lifecycle"] = {"preStop": {"exec": {"command": ["python", "-P", "-m", POD_MODULE, "--drain"]}}}
    if Role.ROLLOUT in group.roles:
        container["ports"] += [
            {"name": "http", "containerPort": env.SERVER_PORT},
            {"name": "scorer", "containerPort": env.SCORER_PORT},
        ]
        # A server starts when the coordinator has written the model's configuration, and may compile for long.
        container |= {
            "startupProbe": _probe("/health", env.SERVER_PORT, period=5, failures=360),
            "readinessProbe": _probe("/health", env.SERVER_PORT, period=5, failures=3),
            # The pod's main process ends a server that hangs, and starts it again, which may take as long as the first
            # start.
            "livenessProbe": _probe("/health", env.SERVER_PORT, period=15, failures=120),
        }
    if Role.TRAINER in group.roles:
        count = max(1, group.gpu.per_pod)
        first = env.TRAINER_METRICS_PORT
        container["ports"] += [{"name": f"metrics-{i}", "containerPort": first + i} for i in range(count)]
        if Role.ROLLOUT not in group.roles:
            container["readinessProbe"] = _probe("/metrics", first, period=5, failures=3)
    # Without a request of CPU and memory a pod gets only what is left, and is evicted first, whatever its GPUs cost.
    container["resources"] = {"requests": {"cpu": f"{500 * max(1, group.gpu.per_pod)}m"}}
    if memory_limit(given_template(context, group)) is None:
        container["resources"]["requests"]["memory"] = memory_request(context.plan, group)
    extra: Object = {}
    if not group.on_cpu:
        # For extended resources, requests must equal limits, so they need not be written.
        product = str(group.gpu.product)
        described = context.settings.gpu_products.get(product)
        resource = described.resource if described else GPU_RESOURCE
        taints = dict.fromkeys((GPU_RESOURCE, resource))
        if (template_name := group.gpu.claim_template) is not None:
            # The template's requests decide which nodes are suitable.
            container["resources"]["claims"] = [{"name": GPU_CLAIM}]
            extra["resourceClaims"] = [{"name": GPU_CLAIM, "resourceClaimTemplateName": template_name}]
        else:
            container["resources"]["limits"] = {resource: str(group.gpu.per_pod)}
            extra["nodeSelector"] = {PRODUCT_LABEL: (described and described.node_product) or product}
        extra["tolerations"] = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints]
    if group.preemptible:
        extra["tolerations"] = extra.get("tolerations", []) + spot.TOLERATIONS
        extra |= {"affinity": spot.AFFINITY, "terminationGracePeriodSeconds": spot.GRACE_SECONDS}
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    extra["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    template = _template(context, group, container, patch=group.pod_template, extra=extra)
    template["metadata"]["labels"][names.GROUP_LABEL] = group.name
    return template


def comes_and_goes(group: Group) -> bool:
    """Whether each pod of the group in the JobSet has a Job of its own."""
    return group.preemptible and Role.TRAINER not in group.roles


def image(context: RenderContext, group: Group | None) -> str:
    """The image of the group, or of the coordinator. If pods of a group run, it is theirs, because all pods of a job
    have one version. Otherwise it is the manifest's image, or else the class's, or else the operator's default. The
    rollout image can train, too."""
    settings, given = context.settings, context.job_class.image(group) if context.job_class else None
    if group is None:
        return context.job.spec.coordinator.image or given or settings.coordinator_image
    default = settings.rollout_image if Role.ROLLOUT in group.roles else settings.trainer_image
    return context.images.get(group.name) or group.image or given or default


def claims(spec: RLHFJobSpec) -> list[str]:
    """The claims with models, which all pods read."""
    sources = (spec.models.actor, spec.models.critic, spec.models.reward, spec.models.reference)
    return sorted({_claim(m.source.pvc) for m in sources if m.source and m.source.pvc})


def coordinator_claims(spec: RLHFJobSpec) -> list[str]:
    """The claims that only the coordinator reads: data, tokenizer and reward functions."""
    paths = [spec.models.tokenizer.pvc, spec.models.reward.code.pvc if spec.models.reward.code else None]
    paths += [source.pvc for source in _data_sources(spec)]
    return sorted({_claim(path) for path in paths if path} - set(claims(spec)))


def _data_sources(spec: RLHFJobSpec) -> list[DataSource]:
    data = spec.data
    return [*data.demonstrations, *data.preferences, *data.prompts, *spec.evaluation.prompts]


def _claim(path: str) -> str:
    """The claim in a text claim/path."""
    return path.strip("/").partition("/")[0]


def _claim_mounts(context: RenderContext, wanted: list[str]) -> list[Object]:
    return [
        {"name": _claim_volume(context, claim), "mountPath": f"{names.CLAIMS_MOUNT}/{claim}", "readOnly": True}
        for claim in wanted
    ]


def _claim_volumes(context: RenderContext, wanted: list[str]) -> list[Object]:
    return [
        {"name": _claim_volume(context, claim), "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for claim in wanted
    ]


def _claim_volume(context: RenderContext, claim: str) -> str:
    spec = context.job.spec
    return f"claim-{[*claims(spec), *coordinator_claims(spec)].index(claim)}"


def _cache(context: RenderContext) -> str | None:
    """The claim with a hub cache, which all pods read."""
    return context.job.spec.hub.cache_claim


def _container(context: RenderContext, image: str, module: str) -> Object:
    job = context.name
    secret = {"name": names.token_secret(job), "key": names.TOKEN_KEY}
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["python", "-P", "-m", module],
        "env": [
            variable(env.JOB, job),
            variable(env.RUN_DIR, names.run_dir(context.job, context.uid)),
            variable(env.CONFIG_DIR, names.CONFIG_MOUNT),
            variable(env.COORDINATOR, names.coordinator_url(job, context.namespace)),
            {"name": env.TOKEN, "valueFrom": {"secretKeyRef": secret}},
            {"name": env.HOST, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            variable("HOME", HOME),
            variable("USER", "dovetail"),  # the image has no entry for this user's number
            variable("PYTHONUNBUFFERED", 1),
            variable("TOKENIZERS_PARALLELISM", "false"),
        ],
        "volumeMounts": [
            {"name": "files", "mountPath": names.VOLUME_MOUNT},
            {"name": "plan", "mountPath": names.CONFIG_MOUNT, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *_claim_mounts(context, claims(context.job.spec)),
            *([{"name": "hub-cache", "mountPath": names.HUB_MOUNT, "readOnly": True}] if _cache(context) else []),
        ],
        "securityContext": CONTAINER_SECURITY,
        # A process that dies leaves its last line here. Without one, it is the end of its log. The job's status quotes
        # it.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _template(
    context: RenderContext, group: Group | None, container: Object, patch: dict[str, Any], extra: Object
) -> Object:
    more, component = dict(extra), COORDINATOR if group is None else "-".join(group.roles)
    volumes = [
        {"name": "files", "persistentVolumeClaim": {"claimName": claim_name(context)}},
        {"name": "plan", "configMap": {"name": names.plan_config_map(context.name)}},
        {"name": "tmp", "emptyDir": {}},
        *_claim_volumes(context, claims(context.job.spec)),
        *(
            [{"name": "hub-cache", "persistentVolumeClaim": {"claimName": cache, "readOnly": True}}]
            if (cache := _cache(context))
            else []
        ),
        *more.pop("volumes", []),
    ]
    template: Object = {
        "metadata": {"labels": context.labels(component) | {names.ROLE_LABEL: component}},
        "spec": {
            "serviceAccountName": names.account(context.name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",  # its Job replaces it, so that exit codes can decide whether to
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": security(context.settings.pod_user),
            "containers": [container],
            "volumes": volumes,
            **more,
        },
    }
    if context.settings.pull_secrets:
        template["spec"]["imagePullSecrets"] = [{"name": name} for name in context.settings.pull_secrets]
    merged = _patched(template, context, group, patch)
    return {**merged, "spec": share_claims(_own_words(merged["spec"], container["command"]))}


def given_template(context: RenderContext, group: Group) -> Object:
    """What the administrator, the job and its class say of a group's pods, without the operator's own parts."""
    return _patched({}, context, group, group.pod_template)


def _patched(template: Object, context: RenderContext, group: Group | None, patch: dict[str, Any]) -> Object:
    """The template with the parts of the administrator's settings, of the job, and of its class. Later ones win."""
    template = merge(merge(template, context.settings.pod_template), patch)
    return template if context.job_class is None else context.job_class.patched(template, group)


def _own_words(spec: Object, command: list[str]) -> Object:
    """The pod with the places fixed from which the kubelet takes a container's last words, which the job's status
    quotes. A template could name a mounted Secret there. The end of the log counts only for Dovetail's own command."""
    containers = []
    for container in spec["containers"]:
        if container["name"] == CONTAINER:
            container = {key: value for key, value in container.items() if key != "terminationMessagePath"}
            if container.get("command") != command or container.get("args"):
                container.pop("terminationMessagePolicy", None)
        containers.append(container)
    return {**spec, "containers": containers}


def _key(secret: str, name: str) -> Object:
    """A variable from a Secret's key of the same name. Only the session token may be missing."""
    reference = {"name": secret, "key": name, "optional": name == CREDENTIALS[-1]}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def security(user: int) -> Object:
    """The security context. All images run as the same user, because all pods write the job's files. It is not root. If
    `user` is 0, the platform chooses the user for the namespace."""
    fixed = {"runAsUser": user, "runAsGroup": user, "fsGroup": user, "fsGroupChangePolicy": "OnRootMismatch"}
    return {"runAsNonRoot": True, **(fixed if user else {}), "seccompProfile": {"type": "RuntimeDefault"}}


def variable(name: str, value: object) -> Object:
    return {"name": name, "value": str(value)}


def _probe(path: str, port: int, *, period: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


GIB = 2**30
# This is the smallest request. The prediction of a plan is rounded up to parts of a GiB.
LEAST_BYTES = GIB
STEP_BYTES = GIB / 4
# Peaks of running jobs were at most a tenth above the prediction.
MARGIN = 1.1
# This is the assumed host memory of Python, torch and the CUDA runtime in each process of a pod with GPUs.
GPU_PROCESS_BYTES = 2.0 * GIB
# torch rounds page-locked memory up to powers of two. On average that takes 1.44 times the size.
PAGE_LOCKED = 1.5
# The processes of a server beside one worker for each GPU: the API server, the engine core and the scorer.
SERVER_PROCESSES = 3


def memory_request(plan: Plan, group: Group) -> str:
    """The memory that a group's pods request, if neither the manifest nor the operator's settings say it: the predicted
    memory of the largest pod, as a Kubernetes quantity.

    It is in none of the hashes that decide whether running pods are replaced, because a new plan or a new version of
    the operator may compute another number."""
    if group.on_cpu:
        wanted = MARGIN * max((pod.used for pod in plan.memory if pod.group == group.name), default=0.0)
    else:
        wanted = _on_gpus(plan, group)
    steps = math.ceil(max(wanted, LEAST_BYTES) / STEP_BYTES)
    return f"{steps // 4}Gi" if steps % 4 == 0 else f"{steps * 256}Mi"


def _on_gpus(plan: Plan, group: Group) -> float:
    """The host memory of a pod's processes and of each GPU's data there. These data are optimizer moments, models that
    are offloaded, and weights of a server that sleeps."""
    rollout, trainer = Role.ROLLOUT in group.roles, Role.TRAINER in group.roles
    processes = (trainer + rollout) * group.gpu.per_pod + SERVER_PROCESSES * rollout
    sleeps = rollout and (trainer or SLEEP in group.vllm_args)
    each = 0.0
    for found in plan.prediction.memory if plan.prediction is not None else ():
        if group.name in found.group.split("+"):
            asleep = found.parts.get("generation: weights", 0.0) if sleeps else 0.0
            each = max(each, sum(found.host.values()) + asleep)
    return processes * GPU_PROCESS_BYTES + group.gpu.per_pod * PAGE_LOCKED * each
