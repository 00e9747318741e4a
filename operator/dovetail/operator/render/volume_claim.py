"""The PersistentVolumeClaim for the job's files, and the volumes of a pod's claims."""

from __future__ import annotations

from dovetail.kube import names
from dovetail.kube.resources import VOLUME_CLAIM
from dovetail.operator.render.context import Object, RenderContext


def claim_name(context: RenderContext) -> str:
    """The claim of the manifest, or else the job's own."""
    return context.job.spec.checkpoint.volume or names.volume_claim(context.name)


def volume_claim(context: RenderContext) -> Object | None:
    """The claim. None if the manifest names a claim, because that belongs to the user and outlives the job. A claim
    that will be kept has no owner, so the garbage collector does not delete it."""
    if context.job.spec.checkpoint.volume is not None:
        return None
    settings = context.settings
    spec: Object = {
        "accessModes": [settings.volume_access_mode],
        "resources": {"requests": {"storage": settings.volume_size}},
    }
    if settings.volume_class:
        spec["storageClassName"] = settings.volume_class
    return {
        **VOLUME_CLAIM.type_meta,
        "metadata": claim_metadata(context),
        "spec": spec,
    }


def claim_metadata(context: RenderContext) -> Object:
    """Labels that name the job, and the job's folder. A claim that is kept has no owner. A GitOps tool that finds what
    it made by the label `app.kubernetes.io/instance` would delete it, with the models on it."""
    metadata = context.metadata(names.volume_claim(context.name), "files")
    del metadata["labels"][names.INSTANCE_LABEL]
    metadata["annotations"] = {names.FOLDER: names.folder(context.job, context.uid)} | names.NEVER_PRUNED
    if context.job.spec.storage.retain == "Keep":
        del metadata["ownerReferences"]
    return metadata


def share_claims(spec: Object) -> Object:
    """The pod specification `spec` with one volume for each claim. The volume is read-only if all volumes of the claim
    were. A mount of a read-only volume stays read-only. `spec` is not changed.

    A kubelet mounts a claim only once in a pod. If a pod had two volumes of one claim, chance would decide whether the
    claim can be written."""
    claims: dict[str, list[Object]] = {}
    for volume in spec.get("volumes") or ():
        if (source := volume.get("persistentVolumeClaim")) is not None:
            claims.setdefault(source["claimName"], []).append(volume)
    shared = {claim: volumes for claim, volumes in claims.items() if len(volumes) > 1}
    if not shared:
        return spec
    kept: dict[str, Object] = {}  # by the names of all volumes of its claim
    read_only: set[str] = set()
    for claim, volumes in shared.items():
        readers = {volume["name"] for volume in volumes if volume["persistentVolumeClaim"].get("readOnly")}
        only = {"readOnly": True} if len(readers) == len(volumes) else {}
        one = {"name": volumes[0]["name"], "persistentVolumeClaim": {"claimName": claim, **only}}
        kept |= {volume["name"]: one for volume in volumes}
        read_only |= readers

    def mount(given: Object) -> Object:
        if given["name"] not in kept:
            return given
        only = {"readOnly": True} if given["name"] in read_only else {}
        return {**given, "name": kept[given["name"]]["name"], **only}

    def container(given: Object) -> Object:
        mounts = given.get("volumeMounts")
        return given if mounts is None else {**given, "volumeMounts": [mount(each) for each in mounts]}

    found = [kept.get(volume["name"], volume) for volume in spec["volumes"]]
    volumes = list({volume["name"]: volume for volume in found}.values())
    kinds = [kind for kind in ("containers", "initContainers") if kind in spec]
    return {**spec, **{kind: [container(each) for each in spec[kind]] for kind in kinds}, "volumes": volumes}
