"""Watches the RLHFJobClasses, and says which of them a job may use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dovetail.kube.connection import KubeError
from dovetail.kube.resources import RLHFJOB_CLASS, Resource
from dovetail.manifest.documents import ManifestError
from dovetail.manifest.job_class import RLHFJobClass, parse_class
from dovetail.manifest.merge import merge
from dovetail.manifest.types import RLHFJob
from dovetail.operator.cluster.client import Client, Object
from dovetail.operator.log import log
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.reconcile import PlanRefused
from dovetail.operator.template_mistakes import first_mistake


class Classes:
    """The classes of the cluster. `changed` is called when one is made, changed or deleted. `refused` says why the
    operator cannot see them. It is empty if the operator can."""

    def __init__(self, client: Client, changed: Callable[[], Awaitable[None]], refused: str = "") -> None:
        self._client = client
        self._changed = changed
        self._found: dict[str, tuple[str, RLHFJobClass | str]] = {}  # the version, and the class or its problem
        self._refused = refused

    def of(self, job: RLHFJob) -> RLHFJobClass | PlanRefused | None:
        """The class that the job names, or the reason why the job cannot have it. None if the job names none."""
        if (name := job.spec.job_class) is None:
            return None
        _, found = self._found.get(name, ("", None))
        if found is None and self._refused:
            return PlanRefused(reasons.CLASS_UNREADABLE, f"spec.class is {name}: {self._refused}.")
        if found is None:
            why = "the cluster has no such class; name another, or ask the administrator to make it"
            return PlanRefused(reasons.CLASS_MISSING, f"spec.class is {name}: {why}.")
        if isinstance(found, str):
            return PlanRefused(reasons.CLASS_INVALID, f"The administrator must correct the class {name}: {found}")
        if errors := found.problems(job):
            return PlanRefused(reasons.CLASS_REFUSES, " ".join(errors))
        return found

    async def relist(self, resource: Resource, namespace: str | None) -> str | None:
        """Take the list of all classes. Returns its version. None if the API server has no classes, or does not let the
        operator see them. Raises KubeError."""
        version, seen = "", set[str]()
        try:
            async for page in self._client.pages(RLHFJOB_CLASS, None):
                version = page.version
                for thing in page.items:
                    seen.add(thing["metadata"]["name"])
                    await self.observe(thing, deleted=False)
        except KubeError as error:
            if error.status not in (403, 404):
                raise
            self._refused = f"the operator cannot see classes ({error}); ask the administrator to upgrade the chart"
            return None
        self._refused = ""
        for name in self._found.keys() - seen:
            await self.observe({"metadata": {"name": name}}, deleted=True)
        return version

    async def observe(self, thing: Object, deleted: bool) -> None:
        """Take one class."""
        name, version = str(thing["metadata"]["name"]), str(thing["metadata"].get("resourceVersion"))
        if deleted:
            self._found.pop(name, None)
        elif self._found.get(name, ("", None))[0] == version:
            return
        else:
            self._found[name] = version, _read({**thing, **RLHFJOB_CLASS.type_meta})
        _, found = self._found.get(name, ("", None))
        if isinstance(found, str):
            log("class.invalid", level="warning", job_class=name, error=found)
        else:
            log("class.gone" if found is None else "class.seen", job_class=name)
        await self._changed()


def _read(thing: Object) -> RLHFJobClass | str:
    """The class, or a sentence with its first problem."""
    try:
        found = parse_class(thing)
    except ManifestError as error:
        return error.errors[0]
    spec = found.spec
    templates = {"spec": spec.pod_template}
    for name in ("coordinator", "trainer", "rollout"):
        templates[f"spec.{name}"] = merge(spec.pod_template, getattr(spec, name).pod_template)
    return next(filter(None, (first_mistake(template, path) for path, template in templates.items())), None) or found
