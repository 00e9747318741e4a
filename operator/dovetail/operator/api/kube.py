"""The few calls of the Kubernetes API that the status API makes, as plain JSON."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client, config

from dovetail.api.crd import GROUP, PLURAL, VERSION

Object = dict[str, Any]


class KubeError(Exception):
    """The API server refused or did not answer; `status` is its HTTP status, 0 without an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
        settings = client.Configuration()
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config(settings)
        else:
            # The package reads KUBECONFIG when it is imported.
            await config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=settings)
        self._api = client.ApiClient(settings)
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
            raise KubeError(int(error.status or 0), _sentence(error.body or str(error.reason))) from error
        if reply.status >= 300:
            raise KubeError(reply.status, _sentence(content.decode(errors="replace")))
        return content


async def get(kube: Kube, path: str, query: dict[str, str] | None = None) -> Object:
    return dict(json.loads(await kube.request("GET", path, query)))


async def create(kube: Kube, path: str, body: Object) -> Object:
    return dict(json.loads(await kube.request("POST", path, None, body)))


def jobs_path(namespace: str, name: str = "") -> str:
    """Of the RLHFJobs of a namespace, or one of them."""
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{quote(namespace, safe='')}/{PLURAL}"
    return f"{path}/{quote(name, safe='')}" if name else path


def core_path(namespace: str, kind: str, name: str = "") -> str:
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/{kind}"
    return f"{path}/{quote(name, safe='')}" if name else path


def _sentence(body: str) -> str:
    """The message of a metav1.Status, or the text as it is."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()
