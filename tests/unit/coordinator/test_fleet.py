"""Health of rollouts and scorers: who may take work, who needs weights, and what is logged."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest

from dovetail.coordinator.workers.fleet import Fleet, InstanceHealth, Timeouts
from dovetail.protocol.messages import Register

T = Timeouts(suspect=10, dead=100, back_off=1, back_off_max=8, revive=30, max_failures=3)


class World:
    """A fleet, its clock, and what it logged."""

    def __init__(self, version: int | None = 1, versioned: tuple[str, ...] = ("rollout", "scorer")) -> None:
        self.now = 1000.0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.fleet = Fleet(lambda: self.now, lambda e, **f: self.events.append((e, f)), T, versioned)
        if version is not None:
            self.fleet.publish(version)

    def report(self, name: str = "r0", incarnation: str = "a", ready: bool = True, version: int | None = None) -> None:
        kind = "scorer" if name.startswith("s") else "rollout"
        message = {"name": name, "kind": kind, "group": "g", "url": f"http://{name}/", "incarnation": incarnation}
        self.fleet.register(Register.model_validate({**message, "ready": ready, "weight_version": version}))

    def health(self, name: str = "r0") -> InstanceHealth:
        instance = self.fleet.get(name)
        assert instance is not None
        return instance.health

    def eligible(self) -> list[str]:
        return [i.name for i in self.fleet.eligible("rollout")]

    def stale(self, version: int = 1) -> list[str]:
        return [t.name for t in self.fleet.stale_targets(version)]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def healthy(world: World) -> World:
    world.report()
    world.fleet.weights_acked("r0", "a", 1)
    return world


def test_an_instance_works_only_once_it_is_ready_and_has_the_current_weights(world: World) -> None:
    world.report(ready=False)
    assert (world.health(), world.eligible(), world.stale()) == (InstanceHealth.RESTARTING, [], [])
    world.report()
    assert (world.health(), world.eligible(), world.stale()) == (InstanceHealth.STALE, [], ["r0"])
    assert not world.fleet.has_current("rollout")
    world.fleet.weights_acked("r0", "a", 1)
    assert (world.health(), world.eligible(), world.stale()) == (InstanceHealth.HEALTHY, ["r0"], [])


def test_before_the_first_publication_nobody_works() -> None:
    world = World(version=None)
    world.report()
    assert world.eligible() == []
    assert world.stale(3) == ["r0"]  # asking for a version makes it the current one
    assert world.fleet.version == 3


def test_a_new_version_makes_everyone_stale_and_an_old_acknowledgement_helps_nobody(healthy: World) -> None:
    healthy.fleet.publish(2)
    assert (healthy.health(), healthy.eligible(), healthy.stale(2)) == (InstanceHealth.STALE, [], ["r0"])
    healthy.fleet.weights_acked("r0", "a", 1)
    assert healthy.eligible() == []
    healthy.fleet.weights_acked("r0", "b", 2)
    assert healthy.eligible() == []
    healthy.fleet.weights_acked("r0", "a", 2)
    assert healthy.eligible() == ["r0"]


def test_a_target_carries_what_its_probe_needs(world: World) -> None:
    message = {"name": "r0", "kind": "rollout", "group": "g", "url": "http://r0/", "incarnation": "a", "ready": True}
    abilities = {"world": 2, "max_model_len": 96, "dtype": "bfloat16", "engines": 2}
    world.fleet.register(Register.model_validate({**message, "abilities": abilities}))
    (target,) = world.fleet.stale_targets(1)
    assert (target.world, target.max_model_len, target.dtype, target.engines) == (2, 96, "bfloat16", 2)


def test_holders_of_a_version_are_the_rollouts_that_serve_it(world: World) -> None:
    for name in ("r0", "r1", "r2", "s0"):
        world.report(name)
        world.fleet.weights_acked(name, "a", 1)
    world.fleet.update("r1", True)
    world.fleet.want({"r2": 2})
    world.fleet.weights_acked("r2", "a", 2)
    assert [t.name for t in world.fleet.holders(1)] == ["r0"]
    assert [(t.name, t.sends) for t in world.fleet.holders(2)] == [("r2", False)]


def test_a_restarted_process_is_stale(healthy: World) -> None:
    healthy.report(incarnation="b", ready=False)
    assert healthy.health() is InstanceHealth.RESTARTING
    healthy.report(incarnation="b")
    assert healthy.health() is InstanceHealth.STALE
    assert healthy.eligible() == []


def test_after_a_coordinators_restart_an_instance_that_still_holds_the_weights_works_on(world: World) -> None:
    world.report(version=1)
    assert world.eligible() == ["r0"]


def test_one_report_written_before_the_acknowledgement_is_not_believed_two_are(healthy: World) -> None:
    healthy.report(version=None)
    assert healthy.eligible() == ["r0"]
    healthy.report(version=None)
    assert healthy.health() is InstanceHealth.STALE
    healthy.report(version=1)
    assert healthy.eligible() == []
    healthy.report(version=1)
    assert healthy.eligible() == ["r0"]


def test_instances_may_be_asked_for_weights_of_their_own_and_for_older_ones_again(healthy: World) -> None:
    healthy.fleet.want({"r0": 2})
    assert (healthy.eligible(), healthy.fleet.version) == ([], 1)
    (target,) = healthy.fleet.stale_targets(1)
    assert target.version == 2
    healthy.fleet.weights_acked("r0", "a", 2)
    assert healthy.eligible() == ["r0"]
    healthy.fleet.want({})
    assert healthy.stale() == ["r0"], "version 1 is asked for again"


def test_an_instance_gets_no_work_while_weights_are_sent_to_it(healthy: World) -> None:
    """It may be asked back for the weights that it held, after the transfer of others has begun."""
    healthy.fleet.want({"r0": 2})
    healthy.fleet.update("r0", True)
    healthy.fleet.want({})
    assert healthy.eligible() == []
    healthy.fleet.transfer_failed("r0", "a", blamed=True)
    healthy.fleet.update("r0", False)
    assert healthy.eligible() == [], "it may hold either"
    healthy.report(version=1)
    healthy.report(version=1)
    assert healthy.eligible() == ["r0"]


def test_a_failed_request_makes_it_suspect_until_the_back_off_ends(healthy: World) -> None:
    healthy.fleet.failed("r0", "connection refused")
    assert (healthy.health(), healthy.eligible()) == (InstanceHealth.SUSPECT, [])
    assert "connection refused" in healthy.fleet.describe()
    for _ in range(20):  # all requests of a server fail together: that is one failure
        healthy.fleet.failed("r0", "connection refused")
    healthy.now += 1
    assert healthy.eligible() == ["r0"]
    healthy.fleet.failed("r0", "again")
    healthy.now += 1
    assert healthy.eligible() == []
    healthy.now += 1
    assert healthy.eligible() == ["r0"]


def test_success_forgives_failures(healthy: World) -> None:
    for _ in range(10):
        healthy.fleet.failed("r0", "x")
        healthy.now += 1
        healthy.report(version=1)
        assert healthy.eligible() == ["r0"]
        healthy.fleet.succeeded("r0")


def test_too_many_failures_are_death_and_the_way_back_leads_over_new_weights(healthy: World) -> None:
    for _ in range(3):
        healthy.fleet.failed("r0", "broken")
        healthy.now += 8
        healthy.report(version=1)
    assert healthy.health() is InstanceHealth.DEAD
    healthy.now += 29
    healthy.report(version=None)
    assert (healthy.health(), healthy.stale()) == (InstanceHealth.STALE, ["r0"])
    healthy.fleet.weights_acked("r0", "a", 1)
    assert healthy.eligible() == ["r0"]


def test_silence_is_suspect_then_dead(healthy: World) -> None:
    healthy.now += 9
    assert healthy.eligible() == ["r0"]
    healthy.now += 2
    assert (healthy.health(), healthy.eligible()) == (InstanceHealth.SUSPECT, [])
    healthy.report(version=1)
    assert healthy.eligible() == ["r0"]
    healthy.now += 11
    assert (healthy.health(), healthy.eligible()) == (InstanceHealth.SUSPECT, [])
    healthy.now += 90
    assert healthy.health() is InstanceHealth.DEAD
    assert "silent for 101 s" in healthy.fleet.describe()
    healthy.report()
    assert healthy.health() is InstanceHealth.STALE


def test_failed_transfers_are_tried_again_after_a_back_off(world: World) -> None:
    world.report()
    world.fleet.failed("r0", "checksum")
    assert world.stale() == []
    assert world.health() is InstanceHealth.STALE
    assert "checksum" in world.fleet.describe()
    world.now += 1
    assert world.stale() == ["r0"]


def test_retired_and_draining_instances_get_no_work(healthy: World) -> None:
    healthy.fleet.drain("r0")
    assert healthy.eligible() == []
    healthy.fleet.drain("r0", False)
    assert healthy.eligible() == ["r0"]
    healthy.fleet.retire("r0")
    healthy.report(version=1)
    healthy.fleet.weights_acked("r0", "a", 1)
    assert (healthy.health(), healthy.eligible(), healthy.stale()) == (InstanceHealth.RETIRED, [], [])
    healthy.report(incarnation="b", version=1)
    assert healthy.eligible() == ["r0"]


def test_a_pod_that_ends_does_not_retire_its_successor(healthy: World) -> None:
    """The coordinator was frozen: it reads the request of the old pod's hook after the new pod's first report."""
    (old,) = healthy.fleet.instances()
    healthy.report(incarnation="b", version=1)
    here = urlsplit(old.url).hostname
    healthy.fleet.retire("r0", f"not-{here}")
    assert healthy.eligible() == ["r0"]
    healthy.fleet.retire("r0", here)
    assert (healthy.health(), healthy.eligible()) == (InstanceHealth.RETIRED, [])


def test_kinds_that_take_no_weights_work_as_soon_as_they_are_ready() -> None:
    world = World(version=1, versioned=("rollout",))
    world.report("s0")
    assert [i.name for i in world.fleet.eligible("scorer")] == ["s0"]
    assert world.stale() == []


def test_every_change_of_health_is_logged_with_its_reason_once(healthy: World) -> None:
    healthy.fleet.failed("r0", "boom")
    healthy.fleet.tick()
    healthy.fleet.tick()
    changes = [(f["before"], f["health"], f["reason"]) for e, f in healthy.events if e == "instance.health"]
    assert changes[-1] == ("healthy", "suspect", "boom")
    assert [c[:2] for c in changes] == [(None, "stale"), ("stale", "healthy"), ("healthy", "suspect")]


def test_listeners_hear_of_changes(world: World) -> None:
    heard: list[int] = []
    world.fleet.listeners.append(lambda: heard.append(1))
    world.report()
    world.fleet.weights_acked("r0", "a", 1)
    assert len(heard) == 2


def test_describe_names_what_is_missing(world: World) -> None:
    assert world.fleet.describe("rollout") == "no rollout has registered"
    world.report()
    assert world.fleet.describe() == "r0 is stale (holds no weights, it must hold weight version 1)"


def test_those_that_never_came_are_named_in_sentences() -> None:
    planned = {"rollout": ["v100-0", "v100-1"], "scorer": ["v100-0-scorer"]}
    fleet = Fleet(lambda: 0.0, lambda *_, **__: None, T, expected=planned)
    assert fleet.describe("rollout") == "v100-0, v100-1 never registered"
    assert not fleet.has_come("rollout")
    message = {"name": "v100-1", "kind": "rollout", "group": "v100", "url": "http://x/", "incarnation": "a"}
    fleet.register(Register.model_validate({**message, "ready": False}))
    assert fleet.describe() == (
        "v100-1 is restarting (it has not reported ready yet); v100-0, v100-0-scorer never registered"
    )
    assert not fleet.has_come("rollout")
    fleet.register(Register.model_validate({**message, "ready": True}))
    assert fleet.has_come("rollout")
    assert not fleet.has_current("rollout")
