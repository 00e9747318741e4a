"""Kinds of objects that the API server may not have: other people install and remove them."""

from __future__ import annotations

import asyncio

from dovetail.kube.connection import KubeError
from dovetail.kube.resources import JOBSET, RLHFJOB, Resource
from dovetail.operator.cluster.client import Client

# The others belong to Kubernetes itself.
CUSTOM = (RLHFJOB, JOBSET)
LOOK_SECONDS = 2.0


async def missing_kinds(client: Client) -> frozenset[Resource]:
    """Those of CUSTOM that the API server does not have. Raises KubeError."""
    there = [await client.serves(resource) for resource in CUSTOM]
    return frozenset(resource for resource, served in zip(CUSTOM, there, strict=True) if not served)


async def until_changed(client: Client, missing: frozenset[Resource]) -> None:
    """Return when the API server has one of `missing`. If none is missing, nothing is asked: never return."""
    while True:
        await asyncio.sleep(LOOK_SECONDS if missing else 3600.0)
        try:
            if missing and await missing_kinds(client) != missing:
                return
        except KubeError:
            continue  # it does not answer just now
