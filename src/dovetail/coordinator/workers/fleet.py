"""Tracks the health of every rollout and scorer with one state machine per instance. It does no I/O, and its clock is
injected.

    restarting --ready--> stale --weights acknowledged--> healthy <--heartbeat after back-off-- suspect
                            ^                                |  failure, silence                   |
                            |                                +-------------------------------------+
                            +--- reports again --- dead <------- silence, too many failures -------+

An instance becomes `healthy` only with the weight version that it must hold. That is the current version. While several
iterations are open, it is the version that `want` names for the instance. A `retired` instance never gets work
again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from dovetail.coordinator.reporting.sample_files import weights_name
from dovetail.coordinator.workers.publishing import Target
from dovetail.protocol.messages import Register

# The maximum number of instances that a message describes.
MOST_NAMED = 8
# A process that slept before this coordinator knew it says so in its first report. A later claim is believed after this
# many reports in a row.
ASLEEP_REPORTS = 2


class InstanceHealth(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"


@dataclass(frozen=True)
class Timeouts:
    """The limits of an instance's health, in seconds. Instances report every 2 s, but machines may be busy."""

    suspect: float = 15.0
    dead: float = 120.0
    back_off: float = 0.5
    back_off_max: float = 15.0
    revive: float = 30.0
    max_failures: int = 6


@dataclass(frozen=True)
class Instance:
    """The known facts about one process. `weight_version` is the version that it holds, as far as is known. It is None
    if it holds no complete version.

    `until` is the end of the back-off after a failure, in monotonic seconds. `doubts` counts the reports in a row that
    contradict `weight_version`. `asleep` counts the reports in a row since it was last woken that say that it sleeps. A
    process that already slept when it registered is believed at once. `updating` says that a transfer of weights to it
    is running, and `refused` that the last transfer failed because of it."""

    name: str
    kind: str
    group: str
    url: str
    incarnation: str
    health: InstanceHealth
    ready: bool
    weight_version: int | None
    abilities: dict[str, Any]
    seen: float
    reason: str
    failures: int = 0
    until: float = 0.0
    doubts: int = 0
    draining: bool = False
    asleep: int = 0
    updating: bool = False
    refused: bool = False

    @property
    def state(self) -> str:
        """The state in one word."""
        return "draining" if self.draining else "asleep" if self.sleeps else self.health.value

    @property
    def sleeps(self) -> bool:
        """Whether it surely sleeps. One report alone does not prove it, because it may have been written before the
        process was woken."""
        return self.asleep >= ASLEEP_REPORTS


class Fleet:
    """The rollouts and scorers of a job. `clock` returns monotonic seconds. `log(event, **fields)` gets every change.
    `versioned` has the kinds whose instances must hold the current weight version before they may work. Scorers of a
    job without a critic are not among them. `exempt` names instances of these kinds that need no version, such as
    scorers without a critic. `expected` has the names of each kind in the plan, for messages about instances that never
    reported."""

    def __init__(
        self,
        clock: Callable[[], float],
        log: Callable[..., None],
        timeouts: Timeouts | None = None,
        versioned: Collection[str] = ("rollout", "scorer"),
        exempt: Collection[str] = (),
        expected: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._clock = clock
        self._log = log
        self._timeouts = timeouts or Timeouts()
        self.versioned = frozenset(versioned)
        self.exempt = frozenset(exempt)
        self._expected = dict(expected or {})
        self._instances: dict[str, Instance] = {}
        self._version: int | None = None
        self._own: dict[str, int] = {}
        # Before this time, in monotonic seconds, `tick` has nothing to change.
        self._due = -math.inf
        self.listeners: list[Callable[[], None]] = []

    # ------------------------------------------------------------ events

    def register(self, message: Register) -> None:
        """Take an instance's report. Instances report at their start and every 2 s."""
        now = self._clock()
        old = self._instances.get(message.name)
        if old is not None and old.health is InstanceHealth.RETIRED and old.incarnation == message.incarnation:
            self._instances[message.name] = replace(old, seen=now)
            return
        if old is None or old.incarnation != message.incarnation:
            # A new process holds the weights that it reports. It reports none, unless only the coordinator restarted.
            fresh = Instance(
                name=message.name,
                kind=message.kind,
                group=message.group,
                url=message.url.rstrip("/"),
                incarnation=message.incarnation,
                health=InstanceHealth.RESTARTING,
                ready=message.ready,
                weight_version=message.weight_version,
                abilities=message.abilities,
                seen=now,
                reason="it has not reported ready yet",
                asleep=ASLEEP_REPORTS if message.asleep else 0,
            )
            self._log(
                "instance.registered",
                instance=message.name,
                kind=message.kind,
                incarnation=message.incarnation,
                restarted=old is not None,
            )
            self._set(self._settled(fresh, now))
            return
        self._set(self._settled(self._heard(old, message, now), now))

    def _heard(self, old: Instance, message: Register, now: float) -> Instance:
        version, doubts = old.weight_version, 0
        if message.weight_version != version and not old.updating:
            # One such report may have been written before the acknowledgement that it seems to contradict.
            doubts = old.doubts + 1
            if doubts >= 2:
                version, doubts = message.weight_version, 0
        asleep = old.asleep + 1 if message.asleep else 0
        health, failures = old.health, old.failures
        if health is InstanceHealth.DEAD:
            if now < old.until:
                return replace(old, seen=now, ready=message.ready, doubts=doubts, asleep=asleep)
            # The instance was dead, and its process may be in any state. So it must get the weights again.
            health, failures, version = InstanceHealth.STALE, 0, None
        return replace(
            old,
            seen=now,
            ready=message.ready,
            url=message.url.rstrip("/"),
            abilities=message.abilities,
            weight_version=version,
            doubts=doubts,
            asleep=asleep,
            health=health,
            failures=failures,
        )

    def publish(self, version: int) -> None:
        """Make `version` the current one. Instances without it become stale, unless they must hold another version."""
        if version != self._version:
            self._version, self._due = version, -math.inf
            self.tick()

    def want(self, versions: Mapping[str, int]) -> None:
        """Set the version that each of these instances must hold. All others must hold the current version."""
        if versions != self._own:
            self._own, self._due = dict(versions), -math.inf
            self.tick()

    def update(self, name: str, updating: bool) -> None:
        """Record that a transfer of weights to an instance begins or has ended. It gets no work meanwhile."""
        if name in self._instances:
            self._set(replace(self._instances[name], updating=updating))

    def transfer_failed(self, name: str, incarnation: str, blamed: bool) -> None:
        """Record that a transfer failed. `blamed` says whether this instance may be the cause. It is unknown which
        version it holds until it has reported that twice."""
        instance = self._instances.get(name)
        if instance is not None and instance.incarnation == incarnation:
            unknown = replace(instance, weight_version=None, doubts=0, refused=instance.refused or blamed)
            self._set(self._settled(unknown, self._clock()))

    def weights_acked(self, name: str, incarnation: str, version: int) -> None:
        """Record that an instance holds a complete version. The call is ignored if the process has ended."""
        instance = self._instances.get(name)
        if instance is None or instance.incarnation != incarnation:
            return
        updated = replace(instance, weight_version=version, doubts=0, failures=0, until=0.0, refused=False)
        if updated.health is InstanceHealth.SUSPECT:
            updated = replace(updated, health=InstanceHealth.STALE)
        self._set(self._settled(updated, self._clock()))

    def failed(self, name: str, reason: str) -> None:
        """Record that a request or a transfer failed. Failures during the back-off after an earlier failure are not
        counted again."""
        instance = self._instances.get(name)
        now = self._clock()
        if instance is None or instance.health in (InstanceHealth.DEAD, InstanceHealth.RETIRED) or now < instance.until:
            return
        t, failures = self._timeouts, instance.failures + 1
        if failures >= t.max_failures:
            self._set(
                replace(instance, health=InstanceHealth.DEAD, failures=failures, until=now + t.revive, reason=reason),
            )
            return
        until = now + min(t.back_off_max, t.back_off * 2 ** (failures - 1))
        health = InstanceHealth.SUSPECT if instance.health is InstanceHealth.HEALTHY else instance.health
        self._set(replace(instance, health=health, failures=failures, until=until, reason=reason))

    def succeeded(self, name: str) -> None:
        """Record that a request succeeded. Earlier failures are forgotten."""
        instance = self._instances.get(name)
        if instance is not None and instance.failures and instance.health is not InstanceHealth.DEAD:
            self._instances[name] = replace(instance, failures=0)

    def retire(self, name: str, host: str | None = None) -> None:
        """Record that the instance will be removed. This incarnation never gets work again. `host` is the address of
        the pod that will end. An instance at another address is its successor, and stays. If it is None, the address
        does not matter."""
        instance = self._instances.get(name)
        if instance is not None and host in (None, urlsplit(instance.url).hostname):
            self._set(replace(instance, health=InstanceHealth.RETIRED, reason="retired"))

    def drain(self, name: str, draining: bool = True) -> None:
        """Give an instance no new work while it is `draining`. Its health does not change."""
        if name in self._instances:
            self._set(replace(self._instances[name], draining=draining))

    def woken(self, name: str, incarnation: str) -> None:
        """Record that a process was told to wake up. It may get work. A single report that it sleeps is ignored,
        because it may have been written before."""
        instance = self._instances.get(name)
        if instance is not None and instance.incarnation == incarnation:
            self._set(replace(instance, draining=False, asleep=0))

    def tick(self) -> None:
        """Apply the changes that time brings: silence, and the end of back-offs. Every query calls this first."""
        now = self._clock()
        if now < self._due:
            return
        self._due = self._next_change(now)
        for instance in list(self._instances.values()):
            self._set(self._settled(instance, now))

    # ------------------------------------------------------------ queries

    @property
    def version(self) -> int | None:
        return self._version

    def eligible(self, kind: str) -> list[Instance]:
        """The instances that may take work, ordered by name. They are healthy, ready and not draining, and hold the
        weights that they must hold."""
        self.tick()
        found = (i for i in self._instances.values() if i.kind == kind and self._may_work(i))
        return sorted(found, key=lambda i: i.name)

    def usable(self, kind: str) -> list[Instance]:
        """The instances that may take work once they hold the right weights, ordered by name."""
        able = (InstanceHealth.HEALTHY, InstanceHealth.SUSPECT, InstanceHealth.STALE)
        recent = self._clock() - self._timeouts.suspect
        awake = (i for i in self.instances(kind) if not i.draining and not i.sleeps)
        return [i for i in awake if i.health in able and i.seen >= recent]

    def holds(self, instance: Instance, version: int) -> bool:
        """Whether an instance holds this version, or needs none."""
        return not self._versioned(instance) or instance.weight_version == version

    def has_current(self, kind: str) -> bool:
        """Whether an instance of that kind may take work. If instances of that kind hold weight versions, exempt ones
        do not count."""
        return any(kind not in self.versioned or self._versioned(i) for i in self.eligible(kind))

    def has_come(self, kind: str) -> bool:
        """Whether an instance of that kind is running, with any weights."""
        up = (i for i in self.instances(kind) if self._versioned(i) or kind not in self.versioned)
        return any(i.ready and i.health not in (InstanceHealth.DEAD, InstanceHealth.RETIRED) for i in up)

    def stale_targets(self, version: int) -> list[Target]:
        """Make `version` the current one. Returns the instances that need weights. They are running, not in a back-off,
        and lack the version that they must hold."""
        self.publish(version)
        self.tick()
        now = self._clock()
        return [
            _target(i, self._wanted(i))
            for i in sorted(self._instances.values(), key=lambda i: i.name)
            if self._versioned(i)
            and i.ready
            and i.weight_version != self._wanted(i)
            and i.health in (InstanceHealth.STALE, InstanceHealth.SUSPECT)
            and now >= i.until
            and now - i.seen <= self._timeouts.suspect
        ]

    def holders(self, version: int) -> list[Target]:
        """The rollouts that serve this version."""
        return [_target(i, version) for i in self.eligible("rollout") if i.weight_version == version]

    def gone(self, name: str, incarnation: str) -> bool:
        """Whether this process will never answer, because it is dead, it has been silent for too long, or another
        process replaced it."""
        instance = self.get(name)
        return instance is None or instance.incarnation != incarnation or instance.health is InstanceHealth.DEAD

    def get(self, name: str) -> Instance | None:
        self.tick()
        return self._instances.get(name)

    def instances(self, kind: str | None = None) -> list[Instance]:
        """All known instances of a kind, ordered by name. If `kind` is None, they are of all kinds."""
        self.tick()
        return [i for _, i in sorted(self._instances.items()) if kind is None or i.kind == kind]

    def describe(self, kind: str | None = None) -> str:
        """One line about every instance, for error messages."""
        lines = [f"{i.name} is {i.state}" + (f" ({i.reason})" if i.reason else "") for i in self.instances(kind)]
        kinds = self._expected if kind is None else [kind]
        absent = [name for k in kinds for name in self._expected.get(k, ()) if name not in self._instances]
        if absent:
            more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
            lines.append(f"{', '.join(absent[:MOST_NAMED])}{more} never registered")
        return "; ".join(lines) or f"no {kind or 'instance'} has registered"

    # ------------------------------------------------------------ inner parts

    def _may_work(self, instance: Instance) -> bool:
        idle = not instance.draining and not instance.updating and not instance.sleeps
        return instance.health is InstanceHealth.HEALTHY and instance.ready and idle

    def _wanted(self, instance: Instance) -> int | None:
        return self._own.get(instance.name, self._version)

    def _versioned(self, instance: Instance) -> bool:
        return instance.kind in self.versioned and instance.name not in self.exempt

    def _current(self, instance: Instance) -> bool:
        if not self._versioned(instance):
            return True
        wanted = self._wanted(instance)
        return wanted is not None and instance.weight_version == wanted

    def _next_change(self, now: float) -> float:
        """When the first instance is silent for too long or ends its back-off, if nothing else happens before."""
        t, instances = self._timeouts, self._instances.values()
        silences = [i.seen + limit for i in instances for limit in (t.suspect, t.dead) if now - i.seen <= limit]
        return min([*silences, *(i.until for i in instances if now < i.until)], default=math.inf)

    def _settled(self, i: Instance, now: float) -> Instance:
        """The health that follows from the facts of an instance at `now` (monotonic seconds)."""
        t, silence = self._timeouts, now - i.seen
        if i.health in (InstanceHealth.DEAD, InstanceHealth.RETIRED):
            return i
        if silence > t.dead:
            return replace(i, health=InstanceHealth.DEAD, until=0.0, reason=f"silent for {silence:.0f} s")
        if not i.ready:
            return replace(i, health=InstanceHealth.RESTARTING, reason="it has not reported ready yet")
        if not self._current(i):
            held = "no weights" if i.weight_version is None else weights_name(i.weight_version)
            wanted = self._wanted(i)
            reason = f"holds {held}" + (f", it must hold {weights_name(wanted)}" if wanted is not None else "")
            # After a failed transfer, the reason of that failure says more.
            return replace(i, health=InstanceHealth.STALE, reason=i.reason if i.failures else reason)
        if silence > t.suspect:
            return replace(i, health=InstanceHealth.SUSPECT, reason=f"silent for {silence:.0f} s")
        if now < i.until:
            return replace(i, health=InstanceHealth.SUSPECT)
        if i.health is InstanceHealth.HEALTHY and not i.reason:
            return i
        return replace(i, health=InstanceHealth.HEALTHY, reason="")

    def _set(self, instance: Instance) -> None:
        old = self._instances.get(instance.name)
        if instance == old:
            return
        self._instances[instance.name] = instance
        # A report without news brings no change forward.
        if old is None or replace(old, seen=instance.seen) != instance:
            self._due = -math.inf
        if old is None or old.health is not instance.health:
            self._log(
                "instance.health",
                instance=instance.name,
                health=instance.health.value,
                before=None if old is None else old.health.value,
                reason=instance.reason,
            )
        if old is None or (old.health, old.draining, old.sleeps, old.updating, old.incarnation) != (
            instance.health,
            instance.draining,
            instance.sleeps,
            instance.updating,
            instance.incarnation,
        ):
            for listener in list(self.listeners):
                listener()


def _target(i: Instance, version: int | None) -> Target:
    return Target(
        name=i.name,
        kind=i.kind,
        url=i.url,
        incarnation=i.incarnation,
        world=int(i.abilities.get("world", 1)),
        max_model_len=i.abilities.get("max_model_len"),
        dtype=i.abilities.get("dtype"),
        engines=int(i.abilities.get("engines", 1)),
        version=version,
        sends=bool(i.abilities.get("sends_weights")),
    )
