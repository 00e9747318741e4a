"""Finds out why pods, Jobs, JobSets and claims wait. Kubernetes says it in Events, and Kueue in its Workloads."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from dovetail.kube.connection import KubeError
from dovetail.kube.names import JOB_UID_LABEL
from dovetail.kube.resources import EVENT, VOLUME_CLAIM, WORKLOAD
from dovetail.operator.cluster.client import Client, Object
from dovetail.operator.cluster.object_cache import Key
from dovetail.operator.reconcile.children import Children
from dovetail.operator.reconcile.queueing import waiting, why
from dovetail.operator.reconcile.rootcause import (
    LOOK_SECONDS,
    LOOK_SELDOM_SECONDS,
    UNMOUNTED,
    claim_of,
    stuck,
    waiting_pods,
)

# Other answers may stay the same for days.
_SOON = {*UNMOUNTED, "FailedCreate"}
# The API server reads all Events of a namespace for each answer. It should spend at most a twentieth of its time on
# this.
REST = 20.0


# A tenant may make any number of Events, about any number of objects. Meanwhile workers wait.
MOST_COMPLAINTS, MOST_CHARACTERS, MOST_TEXT, MOST_SECONDS = 10_000, 2000, 2_000_000, 10.0
PATIENCE_SECONDS = 1.0
KEPT_SECONDS = 600.0  # after the answer no longer counts


def _take(event: Object, of_mounts: bool, said: dict[str, tuple[bool, str, str]]) -> int:
    """Keep the message of an Event about its object, unless the earlier one is preferred. The newer one is preferred,
    but if the Events are `of_mounts`, a message about something that is missing comes first. Returns the number of
    characters by which `said` has grown."""
    at, about = str(event.get("lastTimestamp") or event.get("eventTime") or ""), event["involvedObject"]
    message = str(event.get("message") or "")[:MOST_CHARACTERS]
    found = {str(about.get("uid")): message}
    if about.get("kind") == VOLUME_CLAIM.kind:
        name = f"{VOLUME_CLAIM.kind} {about.get('name')}"
        found[name] = f"{name}: {message}"
    size = 0
    for key, text in found.items():
        size -= len(key) + len(said[key][2]) if key in said else 0
        # A busy kubelet also complains of time-outs, which pass. They must not hide what is missing.
        said[key] = max(said.get(key, (False, "", "")), (of_mounts and "not found" in text, at, text))
        size += len(key) + len(said[key][2])
    return size


@dataclass(frozen=True)
class _Told:
    """The messages of the Events of one namespace, with their times, by the object's uid, and the time to ask again."""

    complaints: dict[str, tuple[str, str]] = field(default_factory=dict)
    until: float = float("-inf")


_NOTHING = _Told()


@dataclass
class _Turn:
    """Makes sure that only one worker at a time asks about a namespace, and says since when it asks."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    since: float = float("-inf")


class Mounts:
    """Looks for Events about objects that have been stuck for LOOK_SECONDS (`rootcause.stuck`). It asks for all Events
    of a namespace at once, because that costs about the same. `clock` returns monotonic seconds."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._stuck: dict[Key, dict[str, float]] = {}  # since when, by job and pod
        self._told: dict[tuple[str, str], _Told] = {}
        self._turns: defaultdict[str, _Turn] = defaultdict(_Turn)

    async def problems(self, key: Key, children: Children, claims: Iterable[str] = ()) -> dict[str, str]:
        """The messages of other controllers and of kubelets about stuck objects of this job, by the object's uid.
        `claims` has the claims that its pods name. Messages about these are by kind and name, because the claims may
        belong to somebody else."""
        now, before = self._clock(), self._stuck.pop(key, {})
        asked = stuck(children, claims) | ({queued: ()} if (queued := waiting(children)) else {})
        if not asked:
            return {}
        self._stuck[key] = {uid: before.get(uid, now) for uid in asked}
        long = [uid for uid, since in self._stuck[key].items() if now - since >= LOOK_SECONDS]
        pods = waiting_pods(children)
        told: dict[str, list[tuple[str, str]]] = {}
        for reason in sorted({reason for uid in long for reason in asked[uid]}):
            for about, said in (await self._complaints(key[0], reason)).items():
                uid = claim_of(about, pods) or about
                if reason in asked.get(uid, ()):
                    told.setdefault(uid, []).append(said)
        found = {uid: max(told[uid])[1] for uid in long if uid in told}
        if queued in long and (said_by_kueue := (await self._workloads(key[0])).get(str(queued))):
            found[str(queued)] = said_by_kueue
        return found

    def forget(self, key: Key) -> None:
        self._stuck.pop(key, None)

    async def _complaints(self, namespace: str, reason: str) -> dict[str, tuple[str, str]]:
        """The newest message about each object, by uid. `_take` has the rule for messages about mounts. Empty if the
        Events cannot be read."""

        async def read(began: float) -> dict[str, tuple[str, str]]:
            said: dict[str, tuple[bool, str, str]] = {}
            size = 0
            with suppress(KubeError):
                async for page in self._client.pages(EVENT, namespace, fields=f"reason={reason}"):
                    for event in page.items:
                        size += _take(event, reason in UNMOUNTED, said)
                    if len(said) >= MOST_COMPLAINTS or size >= MOST_TEXT or self._clock() - began >= MOST_SECONDS:
                        break
            return {uid: each[1:] for uid, each in said.items()}

        return await self._once(namespace, reason, read, LOOK_SECONDS if reason in _SOON else LOOK_SELDOM_SECONDS)

    async def _workloads(self, namespace: str) -> dict[str, str]:
        """The reason why Kueue does not admit each Workload, by the uid of the object that the Workload was made for.
        Empty if Workloads cannot be read."""

        async def read(began: float) -> dict[str, tuple[str, str]]:
            found: dict[str, tuple[str, str]] = {}
            with suppress(KubeError):
                async for page in self._client.pages(WORKLOAD, namespace, JOB_UID_LABEL):
                    for workload in page.items:
                        if said := why(workload):
                            found[workload["metadata"]["labels"][JOB_UID_LABEL]] = ("", said[:MOST_CHARACTERS])
                    if self._clock() - began >= MOST_SECONDS:
                        break
            return found

        found = await self._once(namespace, WORKLOAD.kind, read, LOOK_SECONDS)
        return {uid: said for uid, (_, said) in found.items()}

    async def _once(
        self,
        namespace: str,
        what: str,
        read: Callable[[float], Awaitable[dict[str, tuple[str, str]]]],
        rest: float,
    ) -> dict[str, tuple[str, str]]:
        """The result of `read`. All jobs of the namespace share it for at least `rest` seconds. While the worker of
        another job still reads, the older result is returned."""
        place, turn = (namespace, what), self._turns[namespace]
        if turn.lock.locked() and self._clock() - turn.since >= PATIENCE_SECONDS:
            return self._told.get(place, _NOTHING).complaints
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await turn.lock.acquire()
        except TimeoutError:
            return self._told.get(place, _NOTHING).complaints
        try:
            turn.since = began = self._clock()
            if began < (told := self._told.get(place, _NOTHING)).until:
                return told.complaints
            found = await read(began)
            now = self._clock()
            self._told = {key: each for key, each in self._told.items() if now < each.until + KEPT_SECONDS}
            self._told[place] = _Told(found, max(began + rest, now + REST * (now - began)))
            return found
        finally:
            turn.lock.release()
