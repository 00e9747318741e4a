"""Writes the objects of a job, and never those of somebody else."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.kube.connection import KubeError
from dovetail.kube.owners import controlled_by, left_by
from dovetail.kube.resources import JOBSET
from dovetail.operator.cluster.client import Client, Object
from dovetail.operator.reconcile.refusals import left_over, taken
from dovetail.operator.render.context import RenderContext

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
        if things:
            return NameTaken(taken(things), False, things)
        return NameTaken("; ".join(str(each) for each in problems), all(each.leaving for each in problems))


async def create(client: Client, thing: Object, context: RenderContext) -> Object:
    """Create an object of a job. If this job controls an object of that name, return that one. Raises NameTaken if
    another has the name, and KubeError."""
    try:
        return await client.create(thing)
    except KubeError as error:
        if error.status == 404 and thing["kind"] == JOBSET.kind:
            raise KubeError(404, NO_JOBSET) from error
        if error.status != 409:
            raise
        found = await client.find(thing["kind"], context.namespace, thing["metadata"]["name"])
        if found is None:
            raise
    if controlled_by(found, context.uid):
        return found
    raise not_ours(found, thing["kind"], context)


def not_ours(found: Object, kind: str, context: RenderContext) -> NameTaken:
    """`found`: an object that another controls, or nobody."""
    name = found["metadata"]["name"]
    if left_by(found, context.name, context.uid):
        return NameTaken(left_over(kind, name), leaving=True)
    return NameTaken(taken([(kind, name)]), False, [(kind, name)])
