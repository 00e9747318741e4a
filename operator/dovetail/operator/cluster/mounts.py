"""Why pods wait for their volumes, and why Jobs get no pods. Kubernetes tells this in Events only."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from dovetail.kube.connection import KubeError
from dovetail.kube.resources import EVENT, POD
from dovetail.operator.cluster.client import Client
from dovetail.operator.cluster.object_cache import Key
from dovetail.operator.reconcile.children import Children
from dovetail.operator.reconcile.rootcause import LOOK_SECONDS, creating, lacking

# The API server reads all Events of a namespace for each answer: it is to spend a twentieth of its time on it at most.
REST = 20.0


@dataclass
class _Told:
    """In a namespace, by the pod's uid; when to ask again."""

    complaints: dict[str, str] = field(default_factory=dict)
    until: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Mounts:
    """Looks for Events about pods that have a node but no container for LOOK_SECONDS, and about Jobs that have too few
    pods for so long. It asks for all of a namespace at once, because that costs about the same. `clock`: monotonic
    seconds."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._stuck: dict[Key, dict[str, float]] = {}  # since when, by job and pod
        self._told: defaultdict[tuple[str, str], _Told] = defaultdict(_Told)

    async def problems(self, key: Key, children: Children) -> dict[str, str]:
        """What kubelets report about the volumes of this job's waiting pods, and the Job controller about pods that it
        may not make, by the uid of the pod or Job."""
        now, before = self._clock(), self._stuck.pop(key, {})
        stuck = {str(pod["metadata"]["uid"]): "FailedMount" for pod in children.of(POD.kind) if creating(pod)}
        stuck |= {str(job["metadata"]["uid"]): "FailedCreate" for job in lacking(children)}
        if not stuck:
            return {}
        self._stuck[key] = {uid: before.get(uid, now) for uid in stuck}
        long = [uid for uid, since in self._stuck[key].items() if now - since >= LOOK_SECONDS]
        told: dict[str, str] = {}
        for reason in sorted({stuck[uid] for uid in long}):
            told |= await self._complaints(key[0], reason)
        return {uid: told[uid] for uid in long if told.get(uid)}

    def forget(self, key: Key) -> None:
        self._stuck.pop(key, None)

    async def _complaints(self, namespace: str, reason: str) -> dict[str, str]:
        """By the object's uid the newest, of something that is not there if there is one. Empty if they cannot be
        had."""
        told = self._told[namespace, reason]
        async with told.lock:
            if (began := self._clock()) < told.until:
                return told.complaints
            try:
                events = await self._client.list(EVENT, namespace, fields=f"reason={reason}")
            except KubeError:
                events = []
            said: defaultdict[str, list[tuple[bool, str, str]]] = defaultdict(list)
            for e in events:
                at, message = str(e.get("lastTimestamp") or e.get("eventTime") or ""), str(e.get("message") or "")
                # A busy kubelet complains of time-outs, too, which pass.
                said[str(e["involvedObject"].get("uid"))].append(("not found" in message, at, message))
            told.complaints = {uid: max(each)[2] for uid, each in said.items()}
            told.until = max(began + LOOK_SECONDS, self._clock() + REST * (self._clock() - began))
            return told.complaints
