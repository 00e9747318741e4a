"""What the operator says of an API server that does not answer."""

import asyncio

import pytest
from kubernetes.aio import client

from dovetail.kube.connection import KubeError, request, stream


async def silent(reader, writer):
    await reader.read()


async def asked(ask):
    """`ask` with a client of a server that takes connections and says nothing."""
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    settings = client.Configuration(host=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    api = client.ApiClient(settings)
    try:
        await ask(api)
    finally:
        await api.close()
        server.close()


async def read(api):
    await request(api, "GET", "/version", seconds=0.1)


async def watch(api):
    async for _ in stream(api, "/api/v1/pods", {"watch": "1"}, silence=0.1):
        pass


@pytest.mark.parametrize("ask", [read, watch])
def test_an_api_server_that_says_nothing_is_named_with_a_reason(ask):
    with pytest.raises(KubeError, match=r"^the Kubernetes API does not answer: \S+") as error:
        asyncio.run(asked(ask))
    assert error.value.status == 0
