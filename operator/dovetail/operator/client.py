"""The calls that the operator makes over the `kubernetes` package's connection: plain objects, no generated types."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config
from pydantic_core import from_json

from dovetail.operator import names
from dovetail.operator.resources import BY_KIND, Resource

Object = dict[str, Any]
APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
PAGE = 100  # a pod is 10 KB of JSON, and several times that in memory


class KubeError(Exception):
    """The API server refused, or did not answer (`status` 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def rejected(self) -> bool:
        """Asking again for the same would give the same answer, until somebody changes something."""
        return self.status in (400, 403, 404, 405, 422)


async def connect() -> client.ApiClient:
    """In a pod by its ServiceAccount, elsewhere by KUBECONFIG."""
    settings = client.Configuration()
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        config.load_incluster_config(settings)
    else:
        await config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=settings)
    # Else aiohttp looks for a .netrc file with every request; a proxy is what the kubeconfig says.
    settings.client_session_kwargs = {"trust_env": False}
    return client.ApiClient(settings)


class Client:
    """`seconds`: the deadline of each call. `requests` counts them. Every method raises KubeError."""

    def __init__(self, api: client.ApiClient, seconds: float = 30.0) -> None:
        self._api = api
        self._seconds = seconds
        self.requests = 0

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return await self._call("GET", resource.path(namespace, name))

    async def list(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = ""
    ) -> Sequence[Object]:
        """All, page by page, with kind and apiVersion that lists leave out."""
        return [item async for page in self.pages(resource, namespace, selector, fields) for item in page]

    async def pages(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = "", size: int = PAGE
    ) -> AsyncIterator[Sequence[Object]]:
        """As `list`, `size` objects at a time."""
        query = {"limit": str(size)} | ({"labelSelector": selector} if selector else {})
        query |= {"fieldSelector": fields} if fields else {}
        while True:
            page = await self._call("GET", resource.path(namespace), query)
            yield [{"apiVersion": resource.api_version, "kind": resource.kind, **item} for item in page["items"]]
            token = page["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def create(self, thing: Object) -> Object:
        resource, metadata = BY_KIND[thing["kind"]], thing["metadata"]
        return await self._call("POST", resource.path(metadata["namespace"]), {"fieldManager": _MANAGER}, thing)

    async def apply(self, thing: Mapping[str, Any]) -> Object:
        """Server-side apply; fields of ours that others took are taken back."""
        resource, metadata = BY_KIND[thing["kind"]], thing["metadata"]
        query = {"fieldManager": _MANAGER, "force": "true"}
        path = resource.path(metadata["namespace"], metadata["name"])
        return await self._call("PATCH", path, query, dict(thing), APPLY)

    async def delete(self, kind: str, namespace: str, name: str, uid: str = "") -> None:
        """In the foreground: it is gone when all that it owned is. Nothing happens if it is gone already, or is another
        object than the one with that uid."""
        body: Object = {"propagationPolicy": "Foreground"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self._call("DELETE", BY_KIND[kind].path(namespace, name), None, body)
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    async def write_status(self, job: Mapping[str, Any], status: Object) -> Object:
        """Of the RLHFJob as it was read: refused (409 or 422) when it has changed since."""
        metadata = job["metadata"]
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
            {"op": "add", "path": "/status", "value": status},
        ]
        path = BY_KIND[job["kind"]].path(metadata["namespace"], metadata["name"], "status")
        return await self._call("PATCH", path, {"fieldManager": _MANAGER}, patch, JSON_PATCH)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = "application/json",
    ) -> Object:
        self.requests += 1
        url = path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json", "Content-Type": content}
        try:
            async with asyncio.timeout(self._seconds):
                # Without the body, which is plain: it would be copied item by item.
                verb, address, *more = await self._api.param_serialize(
                    method, url, header_params=headers, auth_settings=["BearerToken"]
                )
                reply = await self._api.call_api(verb, address, more[0], body)
                text = bytes(await reply.read())
        except client.ApiException as error:
            raise KubeError(int(error.status or 0), sentence(error.body or str(error.reason))) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeError(0, f"the Kubernetes API does not answer: {error or type(error).__name__}") from error
        if reply.status >= 300:
            raise KubeError(int(reply.status), sentence(text.decode(errors="replace")))
        return dict(from_json(text))


_MANAGER = names.FIELD_MANAGER


def sentence(body: str) -> str:
    """The message of a metav1.Status, or the text as it is."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()
