"""Writes the objects of a job, and never those of somebody else."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.kube.connection import KubeError
from dovetail.kube.names import FOLDER
from dovetail.kube.owners import controlled_by, kept_for, labelled_for, left_by
from dovetail.kube.resources import JOBSET, VOLUME_CLAIM
from dovetail.operator.cluster.client import Client, Object
from dovetail.operator.log import log
from dovetail.operator.reconcile.refusals import kept, left_over, taken
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.volume_claim import claim_metadata

NO_JOBSET = f"the cluster has no {JOBSET.kind} ({JOBSET.api_version}); install the JobSet controller"


class NameTaken(Exception):
    """The job needs names that other objects have. `leaving`: all of them are of an earlier job of the same name, and
    will be deleted. `things`: kind and name of those that are somebody else's."""

    def __init__(self, problem: str, leaving: bool, things: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(problem)
        self.leaving = leaving
        self.things = things

    @staticmethod
    def all_of(problems: Sequence[NameTaken]) -> NameTaken:
        """One exception for several."""
        things = [thing for each in problems for thing in each.things]
        others = [str(each) for each in problems if not each.things and not each.leaving]
        if things or others:
            return NameTaken(" ".join([*([taken(things)] if things else []), *others]), False, things)
        return NameTaken("; ".join(str(each) for each in problems), leaving=True)


async def create(client: Client, thing: Object, context: RenderContext) -> Object:
    """Create an object of a job. If this job controls an object of that name, return that one. A claim that was kept of
    an earlier job is taken up if the manifest says which folder to use. Raises NameTaken if another has the name, and
    KubeError."""
    try:
        return await client.create(thing)
    except KubeError as error:
        if error.status == 404 and thing["kind"] == JOBSET.kind:
            raise KubeError(404, NO_JOBSET) from error
        if error.status == 404 and thing["kind"] == "PodGroup":
            lacking = f"the cluster has no PodGroup ({thing['apiVersion']})"
            raise KubeError(404, f"{lacking}; install that scheduler, or change jobs.gangScheduler") from error
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
    """Label a kept claim for this job. It gets no owner, so it is never deleted with the job. Its kind's `spec` is left
    as it is."""
    metadata = claim["metadata"]
    if labelled_for(claim, context.uid):
        return claim
    if metadata.get("deletionTimestamp"):
        raise NameTaken(left_over(VOLUME_CLAIM.kind, metadata["name"]), leaving=True)
    if context.job.spec.storage.folder is None:
        folder = str((metadata.get("annotations") or {}).get(FOLDER, ""))
        raise NameTaken(kept(metadata["name"], folder), leaving=False)
    mine = {key: value for key, value in claim_metadata(context).items() if key != "ownerReferences"}
    log("claim.taken_up", job=f"{context.namespace}/{context.name}", claim=metadata["name"])
    return await client.apply({**VOLUME_CLAIM.type_meta, "metadata": mine}, str(metadata["uid"]))


def not_ours(found: Object, kind: str, context: RenderContext) -> NameTaken:
    """`found`: an object that another controls, or nobody."""
    name = found["metadata"]["name"]
    if left_by(found, context.name, context.uid):
        return NameTaken(left_over(kind, name), leaving=True)
    return NameTaken(taken([(kind, name)]), False, [(kind, name)])
