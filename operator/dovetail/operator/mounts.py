"""Why pods wait for their volumes: kubelets tell it in Events only, not in a pod's status."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.operator.children import Children, Object
from dovetail.operator.client import Client, KubeError
from dovetail.operator.resources import EVENT
from dovetail.operator.rootcause import LOOK_SECONDS, creating
from dovetail.operator.store import Key


class Mounts:
    """Asks about pods that have had a node and no container for LOOK_SECONDS, and as often. `clock`: monotonic."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        # By job and pod: when it was first seen or last asked about, and the answer.
        self._known: dict[Key, dict[str, tuple[float, str]]] = {}

    async def problems(self, key: Key, children: Children) -> dict[str, str]:
        """What kubelets say of the mounts of this job's stuck pods, by the pod's uid."""
        before = self._known.pop(key, {})
        known: dict[str, tuple[float, str]] = {}
        for pod in children.of("Pod"):
            if not creating(pod):
                continue
            uid = str(pod["metadata"]["uid"])
            at, told = before.get(uid, (self._clock(), ""))
            if self._clock() - at >= LOOK_SECONDS:
                at, told = self._clock(), await self._ask(pod)
            known[uid] = at, told
        if known:
            self._known[key] = known
        return {uid: told for uid, (_, told) in known.items() if told}

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    async def _ask(self, pod: Object) -> str:
        """The newest complaint, of something that is not there if there is one; none when it cannot be had."""
        metadata = pod["metadata"]
        fields = f"involvedObject.uid={metadata['uid']},reason=FailedMount"
        try:
            events = await self._client.list(EVENT, metadata["namespace"], fields=fields)
        except KubeError:
            return ""
        said = [(str(e.get("lastTimestamp") or e.get("eventTime") or ""), str(e.get("message") or "")) for e in events]
        # A busy kubelet complains of time-outs, too, which pass.
        return max(said, key=lambda s: ("not found" in s[1], s[0]), default=("", ""))[1]
