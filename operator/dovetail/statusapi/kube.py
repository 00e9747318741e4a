"""The status API's few calls to the Kubernetes API, as plain JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import quote

from dovetail.kube.connection import connect, request, watch
from dovetail.manifest.describe.crd import GROUP, PLURAL, STORED_VERSION

Object = dict[str, Any]
PAGE_BYTES = 4 << 20  # JSON takes up to 25 times as much memory


class KubeClient:
    """A connection to the API server. Use it as an async context manager."""

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
        return await request(self._api, method, path, query, body, seconds=self._timeout, accept="*/*")

    def watch(self, path: str, query: dict[str, str]) -> AsyncGenerator[tuple[str, Object], None]:
        return watch(self._api, path, query)


async def get(kube: KubeClient, path: str, query: dict[str, str] | None = None) -> Object:
    return dict(json.loads(await kube.request("GET", path, query)))


async def page(kube: KubeClient, path: str, query: dict[str, str], most: int) -> Object:
    """Read at most `most` objects of a list. If a page is larger than PAGE_BYTES, it is asked for again in smaller
    parts."""
    while True:
        content = await kube.request("GET", path, query | {"limit": str(most)})
        if len(content) <= PAGE_BYTES or most == 1:
            return dict(json.loads(content))
        most = max(1, most // 10)


async def create(kube: KubeClient, path: str, body: Object) -> Object:
    return dict(json.loads(await kube.request("POST", path, None, body)))


def jobs_path(namespace: str, name: str = "") -> str:
    """The path of all RLHFJobs if `namespace` is empty, of those of a namespace, or of one."""
    space = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    path = f"/apis/{GROUP}/{STORED_VERSION}{space}/{PLURAL}"
    return f"{path}/{quote(name, safe='')}" if name else path


def core_path(namespace: str, kind: str, name: str = "") -> str:
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/{kind}"
    return f"{path}/{quote(name, safe='')}" if name else path
