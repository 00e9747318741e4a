"""Who gets the weights with whom, and when again after a failure: one that cannot be reached holds up nobody."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from dovetail.coordinator.reporting.sample_files import BEFORE_SFT
from dovetail.coordinator.workers.publishing import Published, Target
from dovetail.coordinator.workers.trainer_group import TrainerLost
from dovetail.coordinator.workers.weights import Weights
from dovetail.protocol.messages import CommandResult
from helpers.coordinated import job_of
from helpers.generation_job import until

DEADLINE, START = 20.0, 900.0


class World:
    """Fleet, publisher and trainers at once. `cut`: instances that no transfer reaches; `along`: those that fail at the
    same moment as they, and are blamed too; `unproved`: those that take the weights and serve others."""

    step = 1

    def __init__(self, *names, deadline=300.0):
        self.now = 0.0
        hosts = {name: name.split("-")[1] for name in names}
        self.targets = {name: self.target(name, hosts[name]) for name in names}
        self.held = dict.fromkeys(names, 0)
        self.cut, self.along, self.rounds, self.failures = set(), set(), [], []
        self.unproved, self.events = set(), []
        self.gone, self.mute, self.relays, self.updates = False, set(), [], []
        self.versioned, self.keeps_versions = frozenset({"rollout", "scorer"}), False
        job = job_of(None, log=self.log, start_seconds=START, clock=lambda: self.now)
        self.weights = Weights(job, self, self, self, self, deadline)

    @staticmethod
    def target(name, host="x", incarnation="first"):
        return Target(name, name.split("-")[0], f"http://{host}:1", incarnation, sends=True)

    def log(self, event, **fields):
        self.events.append((event, fields))

    async def prepare(self, target):
        await self.prepare_one(target)

    async def prepare_one(self, target):
        pass

    def want(self, versions):
        assert not versions, "all must hold the current one"

    def need(self, version):
        pass

    def stale_targets(self, version):
        return [t for name, t in self.targets.items() if self.held[name] != version]

    def has_current(self, kind):
        return any(self.held[n] == self.step for n, t in self.targets.items() if t.kind == kind)

    def has_come(self, kind):
        return any(t.kind == kind for t in self.targets.values())

    def weights_acked(self, name, incarnation, version):
        self.held[name] = version

    def failed(self, name, reason):
        self.failures.append(name)

    def transfer_failed(self, name, incarnation, blamed):
        pass

    def update(self, name, updating):
        self.updates.append((name, updating))

    def describe(self):
        return "fine"

    async def at_target(self, work):
        return await work()

    def holders(self, version):
        return [t for name, t in self.targets.items() if t.kind == "rollout" and self.held[name] == version]

    def can_send(self, version):
        return not self.gone

    def has_probe(self, version):
        return True

    async def relay(self, version, sender, receiver):
        self.relays.append((sender.name, receiver.name))
        await asyncio.sleep(0)
        return f"version {version} did not come from {sender.name}" if sender.name in self.mute else None

    async def publish(self, version, targets, beside=False):
        names = {t.name for t in targets}
        self.rounds.append((self.now, sorted(names)))
        lost = names & self.cut
        self.now += DEADLINE if lost else 1.0
        if lost:
            return Published(dict.fromkeys(names, "the connection broke"), None, frozenset(lost | names & self.along))
        found = {name: "it serves others" if name in self.unproved else None for name in names}
        return Published(found, CommandResult(id="publish", ok=True), frozenset(names & self.unproved))

    def publish_version(self, version):
        self.step = version
        asyncio.run(self.weights.publish(version))

    def join(self, name, incarnation="first"):
        """A process that holds no weights."""
        self.targets[name], self.held[name] = self.target(name, incarnation=incarnation), None

    async def relayed(self, rounds):
        """As many rounds as the background task makes."""
        for _ in range(rounds):
            await self.weights._round()
            await asyncio.sleep(0.01)

    def hold(self, seconds):
        """As the background task does."""
        end = self.now + seconds
        while self.now < end:
            asyncio.run(self.weights._round())
            self.now += 0.25


def turn_of(version, missing):
    return SimpleNamespace(version=version, missing=missing, first=True)


@pytest.fixture
def world():
    world = World("rollout-a", "rollout-b", "scorer-a", "scorer-b")
    world.publish_version(1)
    return world


def test_all_are_served_together(world):
    assert world.rounds == [(0.0, ["rollout-a", "rollout-b", "scorer-a", "scorer-b"])]


def test_one_that_cannot_be_reached_costs_the_others_one_attempt(world):
    world.cut = {"rollout-b", "scorer-b"}
    world.publish_version(2)
    assert [names for _, names in world.rounds[1:]] == [
        ["rollout-a", "rollout-b", "scorer-a", "scorer-b"],
        ["rollout-a", "scorer-a"],
    ]
    assert world.failures == ["rollout-b", "scorer-b"], "the others did nothing wrong"
    world.publish_version(3)
    assert world.rounds[-1][1] == ["rollout-a", "scorer-a"], "no second attempt before the others have been served"


def test_one_that_serves_other_weights_gets_no_work_and_is_told_of(world):
    world.unproved = {"rollout-b"}
    world.publish_version(2)
    assert world.held == {"rollout-a": 2, "rollout-b": 1, "scorer-a": 2, "scorer-b": 2}
    assert world.failures == ["rollout-b"]
    reason = {"instance": "rollout-b", "version": 2, "reason": "it serves others"}
    assert ("weights.failed", reason) in world.events
    world.publish_version(3)
    assert world.rounds[-1][1] == ["rollout-a", "scorer-a", "scorer-b"], "by itself, after the others"
    world.unproved = set()
    world.hold(60)
    assert world.held["rollout-b"] == 3


@pytest.mark.slow
def test_what_is_alone_at_its_address_is_tried_before_a_whole_pod(world):
    world.cut, world.along, before = {"rollout-a", "scorer-a"}, {"scorer-b"}, world.now
    world.publish_version(2)
    assert [names for _, names in world.rounds[-2:]] == [["rollout-b"], ["scorer-b"]]
    assert world.now - before == DEADLINE + 2.0


@pytest.mark.slow
def test_attempts_become_rarer(world):
    world.cut = {"rollout-b"}
    world.publish_version(2)
    began = len(world.rounds)
    world.hold(3600)
    attempts = [at for at, names in world.rounds[began:] if names == ["rollout-b"]]
    assert len(attempts) > 3
    pauses = [later - before - DEADLINE for before, later in itertools.pairwise(attempts)]
    assert pauses[0] >= 4 * DEADLINE
    assert pauses == sorted(pauses)
    assert pauses[-1] <= 601


def test_who_is_reached_again_is_trusted_again(world):
    world.cut = {"rollout-b"}
    world.publish_version(2)
    world.hold(30)
    world.cut = set()
    world.hold(200)
    assert world.held["rollout-b"] == 2
    world.publish_version(3)
    assert world.rounds[-1][1] == ["rollout-a", "rollout-b", "scorer-a", "scorer-b"]


def test_many_that_were_all_cut_off_are_soon_served_again():
    names = [f"rollout-{i}" for i in range(64)]
    world = World(*names, "scorer-a")
    world.publish_version(1)
    world.cut = set(names)
    world.step = 2
    world.weights._version = 2
    asyncio.run(world.weights._round())
    world.cut = set()
    before = len(world.rounds)
    world.publish_version(2)
    world.hold(60)
    assert set(world.held.values()) == {2}
    assert len(world.rounds) - before < 12


def test_a_new_process_is_not_to_blame_for_the_one_before(world):
    world.cut = {"rollout-b"}
    world.publish_version(2)
    world.hold(30)
    world.cut = set()
    world.targets["rollout-b"] = Target("rollout-b", "rollout", "http://x", "second")
    world.publish_version(3)
    assert world.rounds[-1][1] == ["rollout-a", "rollout-b", "scorer-a", "scorer-b"]


@pytest.mark.slow
def test_the_only_one_is_tried_until_it_works():
    world = World("rollout-a", "scorer-a", deadline=3000.0)
    world.cut = {"rollout-a"}
    tries = []
    fine = world.publish

    async def publish(version, targets, beside=False):
        tries.append(len(targets))
        if len(tries) == 3:
            world.cut = set()
        world.now += 200  # the pauses pass
        return await fine(version, targets)

    world.publish = publish
    world.publish_version(1)
    assert world.held == {"rollout-a": 1, "scorer-a": 1}


def late(monkeypatch, world, seconds):
    """Time passes as it is slept; rollout-late comes up after `seconds`."""
    target = Target("rollout-late", "rollout", "http://late:1", "first")

    async def sleep(pause):
        world.now += max(pause, 1.0)
        if world.now >= seconds and target.name not in world.targets:
            world.targets[target.name], world.held[target.name] = target, 0

    monkeypatch.setattr("dovetail.coordinator.workers.weights.asyncio.sleep", sleep)


def test_a_first_rollout_that_pulls_its_image_for_long_is_waited_for(monkeypatch):
    world = World("scorer-a")
    late(monkeypatch, world, 800.0)
    world.publish_version(1)
    assert world.held == {"scorer-a": 1, "rollout-late": 1}


def test_who_never_came_is_named(monkeypatch):
    world = World("scorer-a")
    late(monkeypatch, world, 5000.0)
    with pytest.raises(TimeoutError, match=r"no rollout came up within 900 s; see its log: fine"):
        world.publish_version(1)


def test_one_that_is_up_and_never_takes_its_weights_has_less_time(monkeypatch):
    world = World("scorer-a")
    late(monkeypatch, world, 500.0)
    world.cut = {"rollout-late"}
    with pytest.raises(TimeoutError, match="no rollout took weight version 1 within 300 s"):
        world.publish_version(1)
    assert world.now >= 800


def test_the_model_before_sft_goes_to_rollouts_alone_and_not_after_ppo_has_begun():
    world = World("rollout-a", "rollout-b", "scorer-a")
    world.step = BEFORE_SFT
    asyncio.run(world.weights.publish(BEFORE_SFT))
    assert world.held == {"rollout-a": BEFORE_SFT, "rollout-b": BEFORE_SFT, "scorer-a": 0}

    async def late(work):
        world.publish_soon()
        return await work()

    # A transfer to a late rollout waits for the trainers, and meanwhile they load what PPO begins with.
    world.held["rollout-b"], world.at_target = None, late
    world.publish_soon = lambda: world.weights.begin(0)
    asyncio.run(world.weights._round())
    assert world.held["rollout-b"] is None
    world.publish_soon, world.held["scorer-a"] = (lambda: None), None
    world.publish_version(0)
    assert set(world.held.values()) == {0}


def test_late_servers_get_their_version_from_others_while_the_trainers_are_restored(world):
    world.gone = True
    world.join("rollout-c")
    world.join("rollout-d")
    before = len(world.rounds)
    asyncio.run(world.relayed(2))
    assert world.relays == [("rollout-a", "rollout-c"), ("rollout-b", "rollout-d")], "each sends to one"
    assert world.held["rollout-c"] == world.held["rollout-d"] == 1
    assert len(world.rounds) == before, "nobody waited for the trainers"
    told = [fields for event, fields in world.events if event == "weights.relayed"]
    assert {(t["instance"], t["sender"], t["version"]) for t in told} == {
        ("rollout-c", "rollout-a", 1),
        ("rollout-d", "rollout-b", 1),
    }


def test_trainers_that_hold_the_version_send_it(world):
    world.join("rollout-c")
    asyncio.run(world.relayed(1))
    assert (world.relays, world.rounds[-1][1]) == ([], ["rollout-c"])


def test_a_server_that_cannot_send_is_named_and_another_does(world):
    world.gone, world.mute = True, {"rollout-a"}
    world.join("rollout-c")
    asyncio.run(world.relayed(3))
    assert world.relays == [("rollout-a", "rollout-c"), ("rollout-b", "rollout-c")]
    assert world.held["rollout-c"] == 1
    (failed,) = [fields for event, fields in world.events if event == "weights.relay_failed"]
    assert failed["sender"] == "rollout-a"
    assert failed["reason"] == "version 1 did not come from rollout-a"
    world.join("rollout-d")
    asyncio.run(world.relayed(2))
    assert world.relays[-1] == ("rollout-b", "rollout-d"), "who has failed somebody comes last"


def test_one_to_whom_two_servers_could_not_send_waits_for_the_trainers(world):
    world.gone, world.mute = True, {"rollout-a", "rollout-b", "rollout-c"}
    world.held["rollout-c"] = 1
    world.targets["rollout-c"] = world.target("rollout-c")
    world.join("rollout-d")
    asyncio.run(world.relayed(4))
    assert world.relays == [("rollout-a", "rollout-d"), ("rollout-b", "rollout-d")]
    assert world.rounds[-1][1] == ["rollout-d"]
    assert world.held["rollout-d"] == 1


@pytest.mark.slow
def test_a_server_that_comes_while_a_round_waits_for_the_trainers_does_not_wait(world):
    """The scorer of a pod is up before its server."""

    async def scenario():
        world.gone, back = True, asyncio.Event()
        at_target = world.at_target

        async def waiting(work):
            await back.wait()
            return await at_target(work)

        world.at_target = waiting
        world.join("scorer-c")
        holding = asyncio.create_task(world.weights.hold())
        await until(world.weights._lock.locked)
        world.join("rollout-c")
        await until(lambda: world.held["rollout-c"] == 1)
        assert world.held["scorer-c"] is None
        back.set()
        await until(lambda: world.held["scorer-c"] == 1)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)

    asyncio.run(scenario())
    assert world.relays == [("rollout-a", "rollout-c")]


def test_trainers_that_are_lost_while_they_send_leave_it_to_servers(world):
    """The transfer to a late server began, and a rank died."""
    world.join("rollout-c")
    fine = world.publish

    async def publish(version, targets, beside):
        world.publish, world.gone = fine, True
        raise TrainerLost("rank 1 died")

    world.publish = publish
    asyncio.run(world.relayed(3))
    assert world.relays == [("rollout-a", "rollout-c")]
    assert world.held["rollout-c"] == 1


def test_a_process_that_replaces_one_to_which_a_server_still_sends_does_not_wait_for_that(world):
    """Its node has died, so that nobody hears of the end."""
    world.gone, working = True, world.relay

    async def relay(version, sender, receiver):
        if receiver.incarnation == "first":
            await asyncio.Event().wait()
        return await working(version, sender, receiver)

    async def scenario():
        world.relay = relay
        world.join("rollout-c")
        await world.relayed(2)
        world.join("rollout-c", "second")
        world.updates.clear()
        await world.relayed(2)
        await world.weights._relays.close()

    asyncio.run(scenario())
    assert world.held["rollout-c"] == 1
    assert world.updates == [("rollout-c", True), ("rollout-c", False)], "the old transfer's end says nothing of it"


def test_the_time_in_which_a_server_sends_does_not_count(monkeypatch, world):
    """The last server that holds the version is about to leave, and sends it slowly."""
    world.gone, real = True, asyncio.sleep

    async def relay(version, sender, receiver):
        for name in ("rollout-a", "rollout-b"):
            del world.targets[name]
        while world.now < 700.0:
            await real(0)
        return

    async def sleep(pause):
        world.now += 1.0
        await real(0)

    monkeypatch.setattr("dovetail.coordinator.workers.weights.asyncio.sleep", sleep)
    world.relay = relay
    world.join("rollout-c")
    missing = lambda: [] if world.has_current("rollout") else ["rollout"]  # noqa: E731

    async def scenario():
        await world.weights._round()
        await real(0)
        await world.weights.reach(turn_of(1, missing))

    asyncio.run(scenario())
    assert world.held["rollout-c"] == 1
    world.join("rollout-c", "second")
    world.cut = {"rollout-c"}
    with pytest.raises(TimeoutError, match="no rollout took weight version 1 within 300 s"):
        asyncio.run(world.weights.reach(turn_of(1, missing)))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("lost_while_sending", [False, True])
def test_the_time_until_the_trainers_are_restored_does_not_count(monkeypatch, beside, lost_while_sending):
    """The only rollout is replaced while the trainers load a checkpoint. The first transfer after that fails."""
    world, real = World("rollout-a", "scorer-b"), asyncio.sleep
    world.keeps_versions = beside
    restored = []

    async def at_target(work):
        if not restored:
            restored.append(True)
            if lost_while_sending:
                with pytest.raises(TrainerLost):
                    await work()
            world.now += 1000.0
            world.join("rollout-a", "second")
            world.cut = {"rollout-a"}
        return await work()

    published = world.publish

    async def publish(version, targets, beside=False):
        if lost_while_sending and not world.cut and len(world.rounds) == 0:
            world.now += 400.0
            world.rounds.append((world.now, []))
            raise TrainerLost("trainer-1 is silent")
        return await published(version, targets, beside)

    async def sleep(pause):
        world.now += 1.0
        world.cut = set()
        await real(0)

    monkeypatch.setattr("dovetail.coordinator.workers.weights.asyncio.sleep", sleep)
    world.at_target, world.publish = at_target, publish
    world.at_version = lambda version, work: at_target(work)
    world.publish_version(1)
    assert world.held == {"rollout-a": 1, "scorer-b": 1}


def test_the_time_in_which_another_round_waits_for_the_trainers_does_not_count(monkeypatch, world):
    """`hold` has begun to send to a late server when the trainers are lost."""
    real = asyncio.sleep
    world.step, holding = 2, asyncio.Event()

    async def at_target(work):
        if not holding.is_set():
            holding.set()
            for _ in range(5):
                await real(0)
            world.now += 1000.0
            world.cut = {"rollout-a", "rollout-b"}
        return await work()

    async def sleep(pause):
        world.now += 1.0
        world.cut = set()
        await real(0)

    monkeypatch.setattr("dovetail.coordinator.workers.weights.asyncio.sleep", sleep)
    world.at_target = at_target
    missing = lambda: [] if world.has_current("rollout") else ["rollout"]  # noqa: E731

    async def scenario():
        world.weights.begin(2)
        held = asyncio.create_task(world.weights._round())
        await holding.wait()
        await world.weights.reach(turn_of(2, missing))
        await held

    asyncio.run(scenario())
    assert world.held["rollout-a"] == 2


def slow_to_prepare(world, monkeypatch, name, seconds, fails=False):
    """One instance needs so many seconds, as a scorer that loads large models, or one that hangs."""
    real, ready = asyncio.sleep, set()

    async def prepare(target):
        end = world.now + seconds
        while target.name == name and name not in ready and world.now < end:
            await real(0.001)
        if target.name == name and fails:
            raise OSError("it hangs")
        ready.add(target.name)

    async def sleep(pause):
        world.now += 1.0
        await real(0.002)

    monkeypatch.setattr("dovetail.coordinator.workers.weights.asyncio.sleep", sleep)
    monkeypatch.setattr("dovetail.coordinator.workers.weights.PREPARE_SECONDS", 0.01)
    world.prepare_one = prepare


def test_an_instance_that_loads_its_models_holds_up_nobody(monkeypatch, world):
    world.join("scorer-c")
    slow_to_prepare(world, monkeypatch, "scorer-c", 500.0)
    began = world.now
    world.publish_version(2)
    assert world.now - began < 10
    assert [name for name, held in sorted(world.held.items()) if held == 2] == [
        "rollout-a",
        "rollout-b",
        "scorer-a",
        "scorer-b",
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_one_that_is_prepared_gets_its_weights_then(monkeypatch, world, fails):
    world.join("scorer-c")
    slow_to_prepare(world, monkeypatch, "scorer-c", 20.0, fails)

    async def scenario():
        await world.weights.publish(1)
        holding = asyncio.create_task(world.weights.hold())
        await until(lambda: world.held["scorer-c"] == 1 or world.failures)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)

    asyncio.run(scenario())
    assert (world.held["scorer-c"], world.failures[:1]) == ((None, ["scorer-c"]) if fails else (1, []))


@pytest.mark.slow
def test_the_time_in_which_the_only_scorer_loads_its_models_does_not_count(monkeypatch):
    world = World("rollout-a", "scorer-b")
    slow_to_prepare(world, monkeypatch, "scorer-b", 500.0)
    world.publish_version(1)
    assert world.held == {"rollout-a": 1, "scorer-b": 1}


@pytest.mark.slow
def test_one_that_never_can_be_prepared_is_named(monkeypatch):
    world = World("rollout-a", "scorer-b")
    slow_to_prepare(world, monkeypatch, "scorer-b", 600.0, fails=True)
    with pytest.raises(TimeoutError, match="no scorer took weight version 1 within 300 s"):
        world.publish_version(1)
    assert world.now < 2500
