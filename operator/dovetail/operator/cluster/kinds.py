"""Waits for kinds of objects that the API server may not have, because others install and remove them."""

from __future__ import annotations

import asyncio

from dovetail.kube.connection import KubeError
from dovetail.kube.resources import Resource
from dovetail.operator.cluster.client import Client
from dovetail.operator.log import log

LOOK_SECONDS = 2.0


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
