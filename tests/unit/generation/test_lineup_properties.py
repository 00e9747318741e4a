"""Several open iterations on servers that die, come back and refuse weights, in any order: each sample is drawn with
one version of the weights, from its first token to its last, and every iteration is completed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from dovetail.coordinator.samples.allotment import Allotment, Left
from dovetail.coordinator.samples.lineup import Lineup, Turn
from dovetail.coordinator.workers.fleet import Fleet, Timeouts
from dovetail.protocol.messages import Register
from helpers.coordinated import NoWeights, silent

SERVERS = ["r0", "r1", "r2"]
SAMPLES, MOST_OPEN, LAG = 8, 3, 1
T = Timeouts(suspect=10, dead=60, back_off=1, back_off_max=1, revive=1, max_failures=10**6)
server = st.sampled_from(SERVERS)


class Process:
    """The truth about a server."""

    def __init__(self, name: str) -> None:
        self.name, self.life, self.alive = name, 0, False
        self.held: int | None = None
        self.updating: int | None = None

    def report(self, fleet: Fleet) -> None:
        message = {"name": self.name, "kind": "rollout", "group": "g", "url": "http://x", "incarnation": str(self.life)}
        if self.alive:
            fleet.register(Register.model_validate({**message, "ready": True, "weight_version": self.held}))


class Drawing:
    """As the real one: it assigns, moves and loses samples. `at`: the server and its life, by sample on a server."""

    def __init__(self, turn: Turn, stack: ExitStack) -> None:
        self.turn, self.stack = turn, stack
        self.tokens = {sample: 1 + (3 * sample + turn.iteration) % 7 for sample in range(SAMPLES)}
        self.at: dict[int, tuple[str, int]] = {}
        self.ending: set[int] = set()

    def remaining(self) -> tuple[int, Mapping[str, int]]:
        names = [name for name, _ in self.at.values()]
        return len(self.tokens) - len(self.at), {name: names.count(name) for name in names}

    def on(self, name: str) -> bool:
        return name in self.remaining()[1]

    def turn_over(self, fleet: Fleet, processes: dict[str, Process]) -> None:
        for sample, (name, life) in list(self.at.items()):
            if processes[name].life != life or not processes[name].alive:
                self.leave(sample)
        self.turn.settle()
        self.ending |= {sample for sample, (name, _) in self.at.items() if self.turn.lost(name)}
        able = [i for i in fleet.eligible("rollout") if self.turn.has(i)]
        for sample in self.tokens:
            if sample not in self.at and able:
                best = min(able, key=lambda i: self.remaining()[1].get(i.name, 0))
                self.at[sample] = best.name, int(best.incarnation)

    def leave(self, sample: int) -> None:
        self.at.pop(sample, None)
        self.ending.discard(sample)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fleet = Fleet(lambda: self.now, lambda *_, **__: None, T)
        self.processes = {name: Process(name) for name in SERVERS}
        self.lineup = Lineup(self.fleet, NoWeights(), Allotment(100, True), LAG, silent)
        self.open: dict[int, Drawing] = {}
        self.last = self.done = 0
        for name in SERVERS:
            self.start(name)
        for _ in range(2):
            self.open_next()
        self.go_on(SERVERS[1], True)

    @rule(slow=server, ends=st.booleans(), arrives=st.booleans())
    def go_on(self, slow: str, ends: bool, arrives: bool = True) -> None:
        """What usually happens, while one server is slow, aborts take their time, or transfers do."""
        self.report()
        for which in range(MOST_OPEN):
            self.turn_over(which)
        if ends:
            self.requests_end()
        if all(p.updating is None for p in self.processes.values()) and self.open:
            self.begin_transfer()
        for name in SERVERS:
            if name != slow:
                self.decode(name)
            if arrives:
                self.end_transfer(name, True)
        if len(self.open) < MOST_OPEN:
            self.open_next()

    @rule(name=server)
    def start(self, name: str) -> None:
        """It dies if it lives, and comes back without weights."""
        p = self.processes[name]
        p.life, p.alive, p.held, p.updating = p.life + 1, True, None, None
        self.fleet.update(name, False)
        p.report(self.fleet)

    @rule(name=server)
    def die(self, name: str) -> None:
        p = self.processes[name]
        if p.updating is not None:
            self.end_transfer(name, False)
        p.alive, p.held = False, None

    @rule(seconds=st.sampled_from([1.0, 1.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.report()

    @rule()
    def report(self) -> None:
        for p in self.processes.values():
            p.report(self.fleet)

    def open_next(self) -> None:
        self.last += 1
        stack = ExitStack()
        version = max(0, self.last - 1 - LAG)
        turn = stack.enter_context(self.lineup.open(self.last, version, SAMPLES, SAMPLES))
        self.open[self.last] = drawing = Drawing(turn, stack)
        turn.draws(drawing)

    @rule(which=st.integers(0, MOST_OPEN - 1))
    def turn_over(self, which: int) -> None:
        for drawing in sorted(self.open.items())[which : which + 1]:
            drawing[1].turn_over(self.fleet, self.processes)

    @rule()
    def requests_end(self) -> None:
        for drawing in self.open.values():
            for sample in list(drawing.ending):
                drawing.leave(sample)

    @rule(name=server)
    def decode(self, name: str) -> None:
        p = self.processes[name]
        drawn = {number for number, drawing in self.open.items() if drawing.on(name)}
        assert len(drawn) <= 1, "a server draws one iteration at a time"
        for number in drawn:
            drawing = self.open[number]
            for sample, (where, life) in list(drawing.at.items()):
                if where == name and life == p.life and p.alive:
                    assert p.held == drawing.turn.version == max(0, number - 1 - LAG)
                    assert p.updating is None
                    drawing.tokens[sample] -= 1
                    if not drawing.tokens[sample]:
                        drawing.leave(sample)
                        del drawing.tokens[sample]
        self.close()

    def close(self) -> None:
        for number in sorted(self.open):
            if self.open[number].tokens or not self.open[number].turn.first:
                return
            self.open.pop(number).stack.close()
            self.done += 1

    @precondition(lambda self: self.open and all(p.updating is None for p in self.processes.values()))
    @rule()
    def begin_transfer(self) -> None:
        assert self.fleet.version is not None
        targets = self.fleet.stale_targets(self.fleet.version)
        oldest = min((t.version for t in targets if t.version is not None), default=None)
        for target in targets:
            p = self.processes[target.name]
            if target.version == oldest and p.alive and str(p.life) == target.incarnation:
                assert not any((p.name, p.life) in d.at.values() for d in self.open.values())
                self.fleet.update(p.name, True)
                p.updating = oldest

    @rule(name=server, works=st.booleans())
    def end_transfer(self, name: str, works: bool) -> None:
        """One that fails may have arrived all the same."""
        p = self.processes[name]
        if p.updating is None:
            return
        p.held = p.updating
        if works:
            self.fleet.weights_acked(name, str(p.life), p.updating)
        else:
            self.fleet.transfer_failed(name, str(p.life), True)
        p.updating = None
        self.fleet.update(name, False)

    def teardown(self) -> None:
        """Once one server takes weights, everything is completed, also if the others refuse them."""
        if not self.processes["r0"].alive:
            self.start("r0")
        for _ in range(200):
            if not self.open:
                break
            self.wait(1.0)
            self.report()
            for which in range(MOST_OPEN):
                self.turn_over(which)
            self.requests_end()
            for name in SERVERS:
                self.decode(name)
            if all(p.updating is None for p in self.processes.values()) and self.open:
                self.begin_transfer()
            for name in SERVERS:
                self.end_transfer(name, name == "r0")
        assert not self.open
        assert self.done == self.last


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestLineup = pytest.mark.slow(Machine.TestCase)


def left(iteration: int, waiting: int = 0, **on: int) -> Left:
    return Left(iteration, max(0, iteration - 2), 16, waiting, on)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (left(3, waiting=16), left(4, waiting=16), {"a": 3, "b": 3, "c": 3, "d": 3}),
        # It needs three of four servers: no reason to move samples.
        (left(3, a=3, b=3, c=2, d=2), left(4, waiting=16), {"a": 3, "b": 3, "c": 3, "d": 3}),
        # What is left has room on two, those with most of it.
        (left(3, a=1, b=3, c=2, d=2), left(4, waiting=16), {"a": 4, "b": 3, "c": 3, "d": 4}),
        # A server without samples goes, if those that stay are enough.
        (left(3, a=3, b=3, c=3), left(4, waiting=16), {"a": 3, "b": 3, "c": 3, "d": 4}),
        (left(3, a=1), left(4, waiting=16), {"a": 3, "b": 4, "c": 4, "d": 4}),
        # What waits gets a server first.
        (left(3, waiting=2, a=1), left(4, waiting=16), {"a": 3, "b": 3, "c": 3, "d": 3}),
    ],
)
def test_servers_go_on_when_the_tail_needs_fewer(first: Left, second: Left, expected: dict[str, int]) -> None:
    allotment = Allotment(256, gather=True)
    servers = dict.fromkeys("abcd", 1)
    allotment.settle([left(3, waiting=16), left(4, waiting=16)], servers)
    allotment.settle([first, second], servers)
    assert {s: allotment.of(s) for s in servers} == expected


def test_without_moves_only_idle_servers_go_on() -> None:
    allotment = Allotment(256, gather=False)
    servers = dict.fromkeys("abcd", 1)
    allotment.settle([left(3, waiting=16), left(4, waiting=16)], servers)
    allotment.settle([left(3, a=1, b=1, c=1), left(4, waiting=16)], servers)
    assert {s: allotment.of(s) for s in servers} == {"a": 3, "b": 3, "c": 3, "d": 4}


def test_a_tail_without_servers_takes_one_back_the_one_that_still_holds_its_weights() -> None:
    allotment = Allotment(256, gather=True)
    servers = {"a": 1, "b": 1, "c": 1, "d": 1}
    allotment.settle([left(3, waiting=16), left(4, waiting=16)], servers)
    allotment.settle([left(3, a=2), left(4, waiting=16)], servers)
    held = {"b": 2, "c": 1, "d": 2}
    allotment.settle([left(3, waiting=2), left(4, b=6, c=5, d=5)], held)
    assert {s: allotment.of(s) for s in "abcd"} == {"a": None, "b": 4, "c": 3, "d": 4}


def test_a_newcomer_helps_the_oldest_iteration_that_lacks_servers_else_the_next() -> None:
    allotment = Allotment(256, gather=True)
    allotment.settle([left(3, waiting=16), left(4, waiting=16)], {"a": 1, "b": 1})
    allotment.settle([left(3, a=7, b=7), left(4, waiting=16)], {"a": 1, "b": 1, "c": None})
    assert allotment.of("c") == 3
    allotment.settle([left(3, a=2, b=1, c=1), left(4, waiting=16)], {"a": 1, "b": 1, "c": 1})
    allotment.settle([left(3, a=4), left(4, waiting=8, b=4, c=4)], {"a": 1, "b": 2, "c": 2, "d": None})
    assert allotment.of("d") == 4


def test_a_server_that_nobody_needs_keeps_its_weights_for_what_comes_next() -> None:
    allotment = Allotment(256, gather=True)
    held: dict[str, int | None] = {"a": 1, "b": 2}
    allotment.settle([left(3, waiting=16), left(4, waiting=16)], {"a": 1, "b": 1})
    allotment.settle([left(3, a=2), left(4, waiting=16)], held)
    assert (allotment.of("a"), allotment.of("b")) == (3, 4)
    allotment.settle([left(3, a=2), left(4)], held)
    assert (allotment.of("a"), allotment.of("b")) == (3, None), "iteration 4 was faster; 3 needs no second server"
    allotment.settle([left(3, a=2), left(5, waiting=16)], held)
    assert (allotment.of("a"), allotment.of("b")) == (3, 5)
