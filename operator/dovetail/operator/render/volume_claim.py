"""The PersistentVolumeClaim for the job's files."""

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
    """Labels that name the job, and the job's folder."""
    metadata = context.metadata(names.volume_claim(context.name), "files")
    metadata["annotations"] = {names.FOLDER: names.folder(context.job, context.uid)}
    if context.job.spec.storage.retain == "Keep":
        del metadata["ownerReferences"]
    return metadata
