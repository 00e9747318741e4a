"""Whatever happens to instances: who may work holds the current weights, and every live process gets back to work."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dovetail.coordinator.workers.fleet import Fleet, InstanceHealth, Timeouts
from dovetail.protocol.messages import Register

NAMES = ["r0", "r1", "s0"]
T = Timeouts(suspect=10, dead=60, back_off=1, back_off_max=8, revive=20, max_failures=3)


class Process:
    """The truth about one process, which the fleet only hears of."""

    def __init__(self, name: str) -> None:
        self.name, self.life, self.ready = name, 0, False
        self.held: int | None = None

    def report(self, fleet: Fleet, held: int | None) -> None:
        kind = "scorer" if self.name == "s0" else "rollout"
        message = {"name": self.name, "kind": kind, "group": "g", "url": "http://x", "incarnation": str(self.life)}
        fleet.register(Register.model_validate({**message, "ready": self.ready, "weight_version": held}))


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fleet = Fleet(lambda: self.now, lambda *_, **__: None, T)
        self.processes = {name: Process(name) for name in NAMES}
        self.version = 0
        self.reported: dict[str, int] = {}
        self.own: dict[str, int] = {}
        self.written: dict[str, tuple[int, int | None]] = {}

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        p = self.processes[name]
        p.life, p.ready, p.held = p.life + 1, False, None

    @rule(name=st.sampled_from(NAMES))
    def report(self, name: str) -> None:
        p = self.processes[name]
        p.report(self.fleet, p.held)
        self.written.pop(name, None)
        self.reported[name] = p.life
        p.ready = True

    @rule(name=st.sampled_from(NAMES))
    def write_report(self, name: str) -> None:
        """It is delivered later: after weights have come, perhaps."""
        self.written[name] = self.processes[name].life, self.processes[name].held

    @rule(name=st.sampled_from(NAMES))
    def late_report(self, name: str) -> None:
        life, held = self.written.pop(name, (-1, None))
        if life == self.processes[name].life and self.reported.get(name) == life:
            self.processes[name].report(self.fleet, held)
            # The next one is of its own time.
            self.report(name)

    @rule(seconds=st.sampled_from([0.5, 3.0, 12.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.fleet.publish(self.version)

    @rule(own=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3)))
    def want(self, own: dict[str, int]) -> None:
        """Instances are asked for versions of their own, older or newer than the one that they hold."""
        self.own = {name: max(1, self.version - back) for name, back in own.items() if self.version}
        self.fleet.want(self.own)

    @rule(name=st.sampled_from(NAMES), fails=st.sampled_from(["", "before it came", "after it came"]))
    def transfer(self, name: str, fails: str = "") -> None:
        if self.version == 0:
            return
        for target in self.fleet.stale_targets(self.version):
            p = self.processes[name]
            if target.name == name and target.incarnation == str(p.life) and target.version is not None:
                p.held = p.held if fails == "before it came" else target.version
                if fails:
                    self.fleet.transfer_failed(name, str(p.life), True)
                else:
                    self.fleet.weights_acked(name, str(p.life), target.version)

    @rule(name=st.sampled_from(NAMES))
    def get_to_work(self, name: str) -> None:
        self.report(name)
        self.report(name)
        self.transfer(name)

    @rule(name=st.sampled_from(NAMES))
    def late_acknowledgement(self, name: str) -> None:
        self.fleet.weights_acked(name, str(self.processes[name].life - 1), self.version)

    @rule(name=st.sampled_from(NAMES))
    def fail(self, name: str) -> None:
        self.fleet.failed(name, "failed")

    @rule(name=st.sampled_from(NAMES))
    def succeed(self, name: str) -> None:
        self.fleet.succeeded(name)

    @invariant()
    def workers_hold_the_current_weights(self) -> None:
        for kind in ("rollout", "scorer"):
            for i in self.fleet.eligible(kind):
                p = self.processes[i.name]
                assert i.health is InstanceHealth.HEALTHY
                assert i.ready
                wanted = self.own.get(i.name, self.version)
                assert i.weight_version == wanted
                assert self.now - i.seen <= T.suspect
                if i.incarnation == str(p.life):
                    assert p.held == wanted
                assert i.name not in {t.name for t in self.fleet.stale_targets(self.version)}

    @invariant()
    def what_time_changes_is_seen_at_once(self) -> None:
        for i in self.fleet.instances():
            silence = self.now - i.seen
            if silence > T.dead:
                assert i.health in (InstanceHealth.DEAD, InstanceHealth.RETIRED)
            elif i.health is InstanceHealth.SUSPECT:
                assert silence > T.suspect or self.now < i.until
            elif i.health is InstanceHealth.HEALTHY:
                assert silence <= T.suspect
                assert self.now >= i.until

    def teardown(self) -> None:
        """Once nothing goes wrong any more, all come back, each with the current weights."""
        self.version += 1
        self.fleet.want({})
        self.own = {}
        for _ in range(60):
            for name in NAMES:
                self.get_to_work(name)
            self.now += 1
        for name in NAMES:
            self.report(name)
        self.fleet.stale_targets(self.version)
        assert {i.name for k in ("rollout", "scorer") for i in self.fleet.eligible(k)} == set(NAMES)
        self.workers_hold_the_current_weights()


FleetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFleet = pytest.mark.slow(FleetMachine.TestCase)
