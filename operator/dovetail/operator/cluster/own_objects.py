"""Writes the objects of a job, and never those of somebody else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dovetail.kube.connection import KubeError
from dovetail.kube.names import EARLIER_FOLDERS, FOLDER
from dovetail.kube.owners import controlled_by, kept_for, labelled_for, left_by
from dovetail.kube.resources import JOBSET, POD, POD_GROUP, SANDBOX, VOLUME_CLAIM
from dovetail.operator.cluster.client import Client, Object
from dovetail.operator.log import log
from dovetail.operator.reconcile.refusals import left_over, taken
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.volume_claim import claim_metadata

MOST_FOLDERS = 20  # the maximum number of folders of earlier jobs that a claim names
_FOLDER = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._]{0,127}")  # as in spec.storage.folder
NO_JOBSET = f"the cluster has no {JOBSET.kind} ({JOBSET.api_version}); install the JobSet controller"


NO_SANDBOX = (
    f"spec.sessions.sandbox is Pod, and the cluster has no {SANDBOX.kind} ({SANDBOX.api_version}); install "
    "kubernetes-sigs/agent-sandbox"
)


class KindMissing(KubeError):
    """The cluster does not have a kind that the job needs."""

    def __init__(self, message: str) -> None:
        super().__init__(404, message)


class NameTaken(Exception):
    """The job needs names that other objects have. `leaving` says that all these objects belong to an earlier job of
    the same name, and will be deleted. `things` has kind and name of each object of somebody else."""

    def __init__(self, problem: str, leaving: bool, things: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(problem)
        self.leaving = leaving
        self.things = things

    @staticmethod
    def all_of(problems: Sequence[NameTaken]) -> NameTaken:
        """Combine several errors into one."""
        things = [thing for each in problems for thing in each.things]
        others = [str(each) for each in problems if not each.things and not each.leaving]
        if things or others:
            return NameTaken(" ".join([*([taken(things)] if things else []), *others]), False, things)
        return NameTaken("; ".join(str(each) for each in problems), leaving=True)


async def create(client: Client, thing: Object, context: RenderContext) -> Object:
    """Create an object of a job, or return the object of that name if this job controls it. A claim that an earlier job
    kept is used again. Raises NameTaken if somebody else has the name, and KubeError."""
    try:
        return await client.create(thing)
    except KubeError as error:
        if error.status == 404 and thing["kind"] == JOBSET.kind:
            raise KindMissing(NO_JOBSET) from error
        if error.status == 404 and thing["kind"] == SANDBOX.kind:
            raise KindMissing(NO_SANDBOX) from error
        if error.status == 404 and thing["kind"] == POD_GROUP:
            lacking = f"the cluster has no {POD_GROUP} ({thing['apiVersion']})"
            raise KindMissing(f"{lacking}; install that scheduler, or change jobs.gangScheduler") from error
        if error.status != 409:
            raise
        found = await client.find(thing["kind"], context.namespace, thing["metadata"]["name"])
        if found is None:
            raise
    if controlled_by(found, context.uid):
        return found
    if thing["kind"] == VOLUME_CLAIM.kind and kept_for(found, context.name):
        return await _taken_up(client, found, context)
    raise not_ours(found, thing["kind"], context)


async def _taken_up(client: Client, claim: Object, context: RenderContext) -> Object:
    """Label a kept claim for this job. The claim gets no owner, so it is never deleted with the job. Its `spec` stays
    as it is. If the manifest names no folder, the job gets one that no earlier job had."""
    metadata = claim["metadata"]
    if labelled_for(claim, context.uid):
        return claim
    if metadata.get("deletionTimestamp"):
        raise NameTaken(left_over(VOLUME_CLAIM.kind, metadata["name"]), leaving=True)
    mine = {key: value for key, value in claim_metadata(context).items() if key != "ownerReferences"}
    folder = mine["annotations"][FOLDER]
    if earlier := [each for each in _folders(metadata.get("annotations") or {}) if each != folder]:
        mine["annotations"][EARLIER_FOLDERS] = ", ".join(earlier[:MOST_FOLDERS])
    log("claim.taken_up", job=f"{context.namespace}/{context.name}", claim=metadata["name"])
    return await client.apply({**VOLUME_CLAIM.type_meta, "metadata": mine}, str(metadata["uid"]))


def _folders(annotations: Mapping[str, str]) -> list[str]:
    """Folders of earlier jobs on a claim, the last one first."""
    told = [annotations.get(FOLDER, ""), *annotations.get(EARLIER_FOLDERS, "").split(", ")]
    return [each for each in dict.fromkeys(told) if _FOLDER.fullmatch(each)]


def not_ours(found: Object, kind: str, context: RenderContext) -> NameTaken:
    """The error for a name that is taken. `found` has the name, and this job does not control it."""
    name = found["metadata"]["name"]
    if left_by(found, context.name, context.uid):
        owners = found["metadata"].get("ownerReferences") or ()
        pods = [each["name"] for each in owners if each.get("kind") == POD.kind]
        return NameTaken(left_over(kind, name, pods), leaving=True)
    return NameTaken(taken([(kind, name)]), False, [(kind, name)])
