"""The ConfigMap that every pod mounts: the manifest with defaults, and the plan."""

from __future__ import annotations

import json

from dovetail.kube import names
from dovetail.kube.resources import CONFIG_MAP
from dovetail.manifest.types import Hub, RLHFJob
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
        "coordinator",
        "hub",
        "suspend",
        "retry",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "failurePolicy",
        "checkpoint",
        "storage",
        "output",
        "samples",
    ):
        spec.pop(name, None)
    for group in spec["groups"]:
        group.pop("podTemplate", None)
        group.pop("image", None)
        group.pop("preemptible", None)
    _without_later_fields(spec)
    return digest(spec)


_DATA = ("demonstrations", "preferences", "prompts")


def _without_later_fields(spec: Object) -> None:
    """Remove the fields of later releases that have their default: jobs that ran before keep the hash that they had,
    and coordinators of that time can read their job.json."""
    later: list[tuple[Object, str]] = [(spec["models"]["tokenizer"], "pvc"), (spec["models"]["reward"], "code")]
    later += [(source, "pvc") for name in _DATA for source in spec["data"][name]]
    later += [(spec["models"][name], "routerAuxLossCoef") for name in ("actor", "critic", "reward", "reference")]
    later += [(spec["ppo"], "routingReplay")]
    for parent, field in later:
        if parent.get(field) is None or parent[field] is False:
            parent.pop(field, None)


def output_path(claim: str) -> str:
    """Where the coordinator's pod finds claim/path of spec.output."""
    return "/".join([names.OUTPUT_MOUNT, *claim.strip("/").split("/")[1:]])


def in_pods(job: RLHFJob) -> Object:
    """The manifest as the job's processes read it: what is on claims and in ConfigMaps are folders and files there."""
    document = job.model_dump(mode="json", by_alias=True, exclude={"status"})
    metadata = document["metadata"]
    document["metadata"] = {key: metadata[key] for key in ("name", "namespace") if metadata.get(key)}
    spec = document["spec"]
    models = spec["models"]
    sources = [model.get("source") for name, model in models.items() if name != "tokenizer"]
    sources += [models["tokenizer"], *(source for name in _DATA for source in spec["data"][name])]
    for source in sources:
        if source and source.get("pvc"):
            source["path"] = f"{names.CLAIMS_MOUNT}/{source.pop('pvc').strip('/')}"
    if code := models["reward"].get("code"):
        del models["reward"]["code"]
        on_claim = code.get("pvc")
        folder = f"{names.CLAIMS_MOUNT}/{on_claim.strip('/')}" if on_claim else names.CODE_MOUNT
        models["reward"]["importPath"] = folder
    # No process reads what is said of pods alone.
    for group in spec["groups"]:
        del group["preemptible"]
    del spec["coordinator"], spec["storage"]
    if (output := spec["output"]) is None:
        del spec["output"]
    elif claim := output.pop("pvc"):
        output["path"] = output_path(claim)
    if job.spec.hub == Hub():
        del spec["hub"]
    _without_later_fields(spec)
    return document
