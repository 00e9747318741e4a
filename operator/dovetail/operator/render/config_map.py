"""The ConfigMap that every pod mounts. It has the manifest and the plan."""

from __future__ import annotations

import json

from dovetail.kube import names
from dovetail.kube.resources import CONFIG_MAP
from dovetail.manifest.fixed_names import DATA_KINDS
from dovetail.manifest.types import RLHFJob
from dovetail.operator.render.context import Object, RenderContext, digest


def config_map(context: RenderContext) -> Object:
    """The ConfigMap with job.json and plan.json."""
    metadata = context.metadata(names.plan_config_map(context.name), "plan")
    if context.room:
        metadata["annotations"] = {names.ROOM: json.dumps(context.room, sort_keys=True)}
    return {
        **CONFIG_MAP.type_meta,
        "metadata": metadata,
        "data": {
            "job.json": json.dumps(in_pods(context.job), indent=2) + "\n",
            # No pod reads the times of stages, and pods of an earlier release refuse a field that they do not know.
            "plan.json": context.plan.model_dump_json(by_alias=True, indent=2, exclude={"stages"}) + "\n",
        },
    }


_NOT_PLANNED = (
    "hub",
    "suspend",
    "retry",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "failurePolicy",
    "checkpoint",
    "output",
    "samples",
    "trackers",
)


def spec_hash(job: RLHFJob) -> str:
    """A hash of everything that a plan may depend on. It is the same for a manifest and for the job.json made of it."""
    spec = {key: value for key, value in in_pods(job)["spec"].items() if key not in _NOT_PLANNED}
    spec["groups"] = [
        {key: value for key, value in group.items() if key not in ("podTemplate", "image")} for group in spec["groups"]
    ]
    return digest(spec)


def planned_hash(text: str) -> str | None:
    """The `spec_hash` of the job whose job.json this is. An earlier release wrote defaults into it. None if it cannot
    be read, because a later release may have written it."""
    try:
        return spec_hash(RLHFJob.model_validate_json(text))
    except ValueError:
        return None


def output_path(claim: str) -> str:
    """The path at which the coordinator's pod has claim/path of spec.output."""
    return "/".join([names.OUTPUT_MOUNT, *claim.strip("/").split("/")[1:]])


def in_pods(job: RLHFJob) -> Object:
    """The manifest as the job's processes read it. For them, the content of claims and ConfigMaps is in folders and
    files.

    Fields that have their default are left out. So fields that a later release adds change no job that does not use
    them, and coordinators of an earlier release can read it."""
    document = job.model_dump(mode="json", by_alias=True, exclude={"status"}, exclude_defaults=True)
    metadata = document["metadata"]
    document["metadata"] = {key: metadata[key] for key in ("name", "namespace") if metadata.get(key)}
    spec = document["spec"]
    models, data = spec["models"], spec.get("data", {})
    sources = [model.get("source") for name, model in models.items() if name != "tokenizer"]
    sources += [models.get("tokenizer"), *(source for name in DATA_KINDS for source in data.get(name, ()))]
    sources += spec.get("evaluation", {}).get("prompts", [])
    for source in sources:
        if source and source.get("pvc"):
            source["path"] = f"{names.CLAIMS_MOUNT}/{source.pop('pvc').strip('/')}"
    if code := models.get("reward", {}).pop("code", None):
        on_claim = code.get("pvc")
        folder = f"{names.CLAIMS_MOUNT}/{on_claim.strip('/')}" if on_claim else names.CODE_MOUNT
        models["reward"]["importPath"] = folder
    # No process reads the fields that are only about pods.
    for group in spec["groups"]:
        group.pop("preemptible", None)
        group.get("gpu", {}).pop("claimTemplate", None)
    for name in ("class", "coordinator", "storage", "managedBy"):
        spec.pop(name, None)
    if claim := spec.get("output", {}).pop("pvc", None):
        spec["output"]["path"] = output_path(claim)
    return document
