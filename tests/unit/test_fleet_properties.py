"""Whatever happens to instances: who may work holds the current weights, and every live process gets back to work."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dovetail.coordinator.fleet.fleet import Fleet, InstanceHealth, Timeouts
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

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        p = self.processes[name]
        p.life, p.ready, p.held = p.life + 1, False, None

    @rule(name=st.sampled_from(NAMES))
    def report(self, name: str) -> None:
        p = self.processes[name]
        p.report(self.fleet, p.held)
        self.reported[name] = p.life
        p.ready = True

    @rule(seconds=st.sampled_from([0.5, 3.0, 12.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.fleet.publish(self.version)

    @rule(name=st.sampled_from(NAMES))
    def transfer(self, name: str) -> None:
        if self.version == 0:
            return
        for target in self.fleet.stale_targets(self.version):
            p = self.processes[name]
            if target.name == name and target.incarnation == str(p.life):
                p.held = self.version
                self.fleet.weights_acked(name, str(p.life), self.version)

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
                assert i.weight_version == self.version
                assert self.now - i.seen <= T.suspect
                if i.incarnation == str(p.life):
                    assert p.held == self.version
                assert i.name not in {t.name for t in self.fleet.stale_targets(self.version)}

    def teardown(self) -> None:
        """Once nothing goes wrong any more, all come back, each with the current weights."""
        self.version += 1
        for _ in range(60):
            for name in NAMES:
                self.report(name)
                self.report(name)
                self.transfer(name)
            self.now += 1
        for name in NAMES:
            self.report(name)
        self.fleet.stale_targets(self.version)
        assert {i.name for k in ("rollout", "scorer") for i in self.fleet.eligible(k)} == set(NAMES)
        self.workers_hold_the_current_weights()


FleetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFleet = FleetMachine.TestCase
