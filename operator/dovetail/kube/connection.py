"""The connection to the API server, as the `kubernetes` package makes it. It uses plain JSON and no generated types."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config
from pydantic_core import from_json

from dovetail.protocol.errors import error_text

SILENCE_SECONDS = 75.0  # bookmarks come every minute


class KubeError(Exception):
    """The API server refused, or did not answer (`status` 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def rejected(self) -> bool:
        """Whether the same request would fail again until somebody changes something."""
        return self.status in (400, 403, 404, 405, 422)


async def connect() -> client.ApiClient:
    """A connection that uses the ServiceAccount in a pod, and KUBECONFIG elsewhere."""
    settings = client.Configuration()
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        config.load_incluster_config(settings)
    else:
        await config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=settings)
    # Otherwise aiohttp would look for a .netrc file with every request. The kubeconfig names the proxy.
    settings.client_session_kwargs = {"trust_env": False}
    settings.connection_pool_maxsize = 0  # no limit, because each watch keeps a connection of its own
    return client.ApiClient(settings)


async def request(
    api: client.ApiClient,
    method: str,
    path: str,
    query: Mapping[str, str] | None = None,
    body: Any = None,
    *,
    seconds: float,
    accept: str = "application/json",
    content_type: str = "application/json",
) -> bytes:
    """The body of the API server's answer. It comes within `seconds` of the call. `body` is plain JSON data. Raises
    KubeError, also for a time-out (`status` 0)."""
    url = path + (f"?{urlencode(query)}" if query else "")
    headers = {"Accept": accept, "Content-Type": content_type}
    try:
        async with asyncio.timeout(seconds):
            # The body is left out here, because it is plain data and would be copied item by item.
            verb, address, *more = await api.param_serialize(
                method, url, header_params=headers, auth_settings=["BearerToken"]
            )
            reply = await api.call_api(verb, address, more[0], body)
            content = bytes(await reply.read())
    except client.ApiException as error:
        raise KubeError(int(error.status or 0), status_message(error.body or str(error.reason))) from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise KubeError(0, f"the Kubernetes API does not answer: {error_text(error)}") from error
    if reply.status >= 300:
        raise KubeError(int(reply.status), status_message(content.decode(errors="replace")))
    return content


async def stream(
    api: client.ApiClient, path: str, query: Mapping[str, str], *, silence: float
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a watch as they come, until the API server ends it. Raises KubeError. If nothing comes for
    `silence` seconds, its `status` is 0."""
    limit: Any = aiohttp.ClientTimeout(sock_connect=silence, sock_read=silence)
    try:
        verb, address, *more = await api.param_serialize(
            "GET",
            f"{path}?{urlencode(query)}",
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        reply = (await api.call_api(verb, address, more[0], _request_timeout=limit)).response
        try:
            if reply.status >= 300:
                raise KubeError(int(reply.status), status_message((await reply.read()).decode(errors="replace")))
            rest = bytearray()
            async for chunk in reply.content.iter_any():
                rest += chunk
                *lines, last = rest.split(b"\n") if b"\n" in chunk else (rest,)
                for line in lines:
                    yield bytes(line)
                rest = last
        finally:
            reply.close()
    except client.ApiException as error:
        raise KubeError(int(error.status or 0), status_message(error.body or str(error.reason))) from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise KubeError(0, f"the Kubernetes API does not answer: {error_text(error)}") from error


async def watch(
    api: client.ApiClient, path: str, query: Mapping[str, str]
) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    """Yield each change of a list after the `resourceVersion` in `query`, until the API server ends the watch. It is
    ADDED, MODIFIED, DELETED or BOOKMARK, and the object. A bookmark has only the version. Raises KubeError."""
    query = {"watch": "1", "allowWatchBookmarks": "true", **query}
    async with aclosing(stream(api, path, query, silence=SILENCE_SECONDS)) as lines:
        async for line in lines:
            try:
                event = from_json(line)
                kind, thing = str(event["type"]), dict(event["object"])
            except (ValueError, KeyError, TypeError) as error:
                raise KubeError(0, "the API server sent a watch event that cannot be read") from error
            if kind == "ERROR":
                raise KubeError(int(thing.get("code") or 0), str(thing.get("message") or "the watch failed"))
            yield kind, thing


def status_message(body: str) -> str:
    """The message of a metav1.Status. Other text is returned as it is."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()
