"""The operator's calls to the API server, with plain JSON objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from kubernetes.aio import client
from pydantic_core import from_json

from dovetail.kube import names
from dovetail.kube.connection import KubeError, request, watch
from dovetail.kube.resources import BY_KIND, JOB, JOBSET, SANDBOX, SECRET, WORKLOAD, Resource
from dovetail.operator.log import log

Object = dict[str, Any]
APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
PAGE = 100  # a pod is 10 KB of JSON, and several times that in memory
# A larger page is not read. It is asked for again in smaller parts, because its objects may have 1 MB each.
PAGE_BYTES = 4 << 20


class Page(NamedTuple):
    """A part of a list, and the version of the whole list."""

    items: Sequence[Object]
    version: str = ""


class Client:
    """The operator's client of the API server. `seconds` is the deadline of each call, and `requests` counts the calls.
    `gang` is the kind of PodGroups, if a gang scheduler is used. Every method raises KubeError."""

    def __init__(self, api: client.ApiClient, seconds: float = 30.0, gang: Resource | None = None) -> None:
        self._kinds = BY_KIND | ({gang.kind: gang} if gang else {})
        self._api = api
        self._seconds = seconds
        self.requests = 0

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return await self._call("GET", resource.path(namespace, name))

    async def serves(self, resource: Resource) -> bool:
        """Whether the API server has this kind of objects."""
        try:
            found = await self._call("GET", resource.base)
        except KubeError as error:
            if error.status != 404:
                raise
            return False
        return any(each["name"] == resource.plural for each in found["resources"])

    async def find(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object with that name, or None. The operator may list most kinds but not `get` them, so this lists."""
        resource = self._kinds[kind]
        if resource not in (SECRET, WORKLOAD):
            found = await self.list(resource, namespace, fields=f"metadata.name={name}")
            return found[0] if found else None
        try:
            return await self.get(resource, namespace, name)
        except KubeError as error:
            if error.status != 404:
                raise
            return None

    async def list(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = ""
    ) -> Sequence[Object]:
        """All objects, with kind and apiVersion, which the API server leaves out in lists."""
        return [item async for page in self.pages(resource, namespace, selector, fields) for item in page.items]

    async def pages(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[Page]:
        """Do the same as `list`, but yield at most PAGE objects at a time."""
        size = PAGE
        query = {"limit": str(size)} | ({"labelSelector": selector} if selector else {})
        query |= {"fieldSelector": fields} if fields else {}
        while True:
            content = await self._content("GET", resource.path(namespace), query)
            if len(content) > PAGE_BYTES and size > 1:
                size = max(1, size // 10)
                query["limit"] = str(size)
                continue
            page = from_json(content)
            metadata, kind = page["metadata"], {"apiVersion": resource.api_version, "kind": resource.kind}
            yield Page([{**kind, **item} for item in page["items"]], str(metadata.get("resourceVersion", "")))
            token = metadata.get("continue")
            if not token:
                return
            query["continue"] = token

    def watch(
        self, resource: Resource, namespace: str | None, selector: str, version: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """Yield each change after `version`, as `connection.watch` does."""
        query = {"resourceVersion": version} | ({"labelSelector": selector} if selector else {})
        self.requests += 1
        return watch(self._api, resource.path(namespace), query)

    async def create(self, thing: Object) -> Object:
        """Create the object. The API server answers 409 if an object with that name exists. It is asked to refuse
        fields of pods that it does not know. Otherwise it would drop them, and a misspelt nodeSelector would have no
        effect."""
        resource, metadata = self._kinds[thing["kind"]], thing["metadata"]
        query = {"fieldManager": _MANAGER} | (
            {"fieldValidation": "Strict"} if resource in (JOBSET, JOB, SANDBOX) else {}
        )
        return await self._call("POST", resource.path(metadata["namespace"]), query, thing)

    async def apply(self, thing: Mapping[str, Any], uid: str) -> Object:
        """Apply (server-side) to the object with this uid. Fields that other managers have changed are taken back. The
        API server answers 409 if the object does not exist or another object has its name."""
        resource, metadata = self._kinds[thing["kind"]], thing["metadata"]
        query = {"fieldManager": _MANAGER, "force": "true"}
        path = resource.path(metadata["namespace"], metadata["name"])
        return await self._call("PATCH", path, query, {**thing, "metadata": {**metadata, "uid": uid}}, APPLY)

    async def delete(self, kind: str, namespace: str, name: str, uid: str = "") -> None:
        """Delete the object in the foreground, so that it is gone when all that it owned is gone. Nothing happens if
        the object is already gone, or has another uid."""
        body: Object = {"propagationPolicy": "Foreground"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self._call("DELETE", self._kinds[kind].path(namespace, name), None, body)
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    async def release(self, kind: str, thing: Mapping[str, Any]) -> Object:
        """Make the object outlive its owner: remove its owner references, and the label by which a GitOps tool could
        take it for its own. The API server answers 422 if it has changed since it was read."""
        metadata = thing["metadata"]
        patch = [{"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]}]
        if metadata.get("ownerReferences"):
            patch.append({"op": "remove", "path": "/metadata/ownerReferences"})
        if names.INSTANCE_LABEL in (metadata.get("labels") or {}):
            patch.append({"op": "remove", "path": f"/metadata/labels/{names.INSTANCE_LABEL.replace('/', '~1')}"})
        kept = (metadata.get("annotations") or {}) | names.NEVER_PRUNED
        patch.append({"op": "add", "path": "/metadata/annotations", "value": kept})
        path = self._kinds[kind].path(metadata["namespace"], metadata["name"])
        return await self._call("PATCH", path, {"fieldManager": _MANAGER}, patch, JSON_PATCH)

    async def write_status(self, job: Mapping[str, Any], status: Object) -> Object:
        """Write the status of the RLHFJob as it was read. The API server refuses (409 or 422) if the job has changed
        since."""
        metadata = job["metadata"]
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
            {"op": "add", "path": "/status", "value": status},
        ]
        path = self._kinds[job["kind"]].path(metadata["namespace"], metadata["name"], "status")
        return await self._call("PATCH", path, {"fieldManager": _MANAGER}, patch, JSON_PATCH)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        return dict(from_json(await self._content(method, path, query, body, content_type)))

    async def _content(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> bytes:
        self.requests += 1
        return await request(self._api, method, path, query, body, seconds=self._seconds, content_type=content_type)


_MANAGER = names.FIELD_MANAGER
LOOK_SECONDS = 2.0  # between two looks for a kind that others install


async def until_served(client: Client, resource: Resource) -> None:
    """Return when the API server has this kind."""
    told = False
    while True:
        try:
            if await client.serves(resource):
                return
        except KubeError as error:
            log("kind.unknown", level="warning", kind=resource.kind, error=str(error))
        else:
            if not told:
                log("kind.missing", level="warning", kind=resource.kind, api_version=resource.api_version)
            told = True
        await asyncio.sleep(LOOK_SECONDS)
