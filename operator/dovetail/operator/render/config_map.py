"""The ConfigMap that every pod mounts: the manifest with defaults, and the plan."""

from __future__ import annotations

import json

from dovetail.kube import names
from dovetail.kube.resources import CONFIG_MAP
from dovetail.manifest.types import RLHFJob
from dovetail.operator.render.context import Object, RenderContext, digest


def config_map(context: RenderContext) -> Object:
    """job.json and plan.json, with the hash of the spec that they were made from."""
    metadata = context.metadata(names.plan_config_map(context.name), "plan")
    metadata["annotations"] = {names.SPEC_HASH: spec_hash(context.job)}
    if context.room:
        metadata["annotations"][names.ROOM] = json.dumps(context.room, sort_keys=True)
    return {
        **CONFIG_MAP.type_meta,
        "metadata": metadata,
        "data": {
            "job.json": json.dumps(in_pods(context.job), indent=2) + "\n",
            "plan.json": context.plan.model_dump_json(by_alias=True, indent=2) + "\n",
        },
    }


def spec_hash(job: RLHFJob) -> str:
    """A hash of everything that a plan may depend on."""
    spec = job.spec.model_dump(mode="json", by_alias=True)
    for name in (
        "suspend",
        "retry",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "failurePolicy",
        "checkpoint",
        "samples",
    ):
        spec.pop(name, None)
    for group in spec["groups"]:
        group.pop("podTemplate", None)
        group.pop("image", None)
    return digest(spec)


def in_pods(job: RLHFJob) -> Object:
    """The manifest as the job's processes read it: models on claims are folders there."""
    document = job.model_dump(mode="json", by_alias=True, exclude={"status"})
    metadata = document["metadata"]
    document["metadata"] = {key: metadata[key] for key in ("name", "namespace") if metadata.get(key)}
    for model in document["spec"]["models"].values():
        source = model.get("source")
        if source and source.get("pvc"):
            source["path"] = f"{names.CLAIMS_MOUNT}/{source.pop('pvc').strip('/')}"
    return document
