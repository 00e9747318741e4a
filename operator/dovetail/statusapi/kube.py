"""The few calls of the Kubernetes API that the status API makes, as plain JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client

from dovetail.manifest.describe.crd import GROUP, PLURAL, VERSION
from dovetail.operator.client import KubeError, connect, sentence

Object = dict[str, Any]


class Kube(Protocol):
    """Paths are those of the Kubernetes API. Raises KubeError."""

    async def request(
        self, method: str, path: str, query: dict[str, str] | None = None, body: Object | None = None
    ) -> bytes: ...


class KubeClient:
    """The `kubernetes` package's connection, without its generated types. Use as an async context manager."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    async def __aenter__(self) -> KubeClient:
        self._api = await connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    async def request(
        self, method: str, path: str, query: dict[str, str] | None = None, body: Object | None = None
    ) -> bytes:
        resource = path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "*/*", "Content-Type": "application/json"}
        try:
            arguments = await self._api.param_serialize(
                method, resource, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            async with asyncio.timeout(self._timeout):
                reply = await self._api.call_api(*arguments)
                content = bytes(await reply.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeError(0, f"the Kubernetes API does not answer: {error or type(error).__name__}") from error
        except client.ApiException as error:
            raise KubeError(int(error.status or 0), sentence(error.body or str(error.reason))) from error
        if reply.status >= 300:
            raise KubeError(reply.status, sentence(content.decode(errors="replace")))
        return content


async def get(kube: Kube, path: str, query: dict[str, str] | None = None) -> Object:
    return dict(json.loads(await kube.request("GET", path, query)))


async def create(kube: Kube, path: str, body: Object) -> Object:
    return dict(json.loads(await kube.request("POST", path, None, body)))


def jobs_path(namespace: str | None, name: str = "") -> str:
    """Of the RLHFJobs of a namespace (None: of all), or one of them."""
    space = f"/namespaces/{quote(namespace, safe='')}" if namespace is not None else ""
    path = f"/apis/{GROUP}/{VERSION}{space}/{PLURAL}"
    return f"{path}/{quote(name, safe='')}" if name else path


def core_path(namespace: str, kind: str, name: str = "") -> str:
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/{kind}"
    return f"{path}/{quote(name, safe='')}" if name else path
