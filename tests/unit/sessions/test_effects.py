"""Calls of tools: each has its effect once, wherever the coordinator dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.sessions.effects import EpisodeLost, MayBeMade, NotMade, ToolCall, observe
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.samples import Key, NewSample
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.store.tool_calls import CallKey
from helpers.patience import PATIENCE

CALLS = [ToolCall(CallKey(1, 0, 3, 0, n // 2, n % 2), "pay", {"amount": n}) for n in range(4)]


class Crash(BaseException):
    """The coordinator dies."""


class ToolServer:
    """A tool whose log is the effect. It outlives coordinators. `dies` is called before and after each call."""

    def __init__(self, log: Path, remembers: bool, dies=lambda where, call: None) -> None:
        self.log, self._remembers, self._dies = log, remembers, dies

    def made(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    async def make(self, call: ToolCall) -> str:
        self._dies("before", call)
        with self.log.open("a") as file:
            file.write(f"{call.key}\n")
        self._dies("after", call)
        return f"paid {call.arguments['amount']}"

    async def restore(self, call: ToolCall, observation: str) -> None:
        assert observation == f"paid {call.arguments['amount']}"

    async def recall(self, call: ToolCall) -> str:
        if not self._remembers:
            raise MayBeMade
        if str(call.key) not in self.made():
            raise NotMade
        return f"paid {call.arguments['amount']}"


def play(folder: Path, server: ToolServer, repeatable: bool = False) -> list[str]:
    """One life of a coordinator, which makes all calls in their order."""
    store = Store(folder)
    try:
        return [asyncio.run(observe(store.tool_calls, call, server, repeatable)) for call in CALLS]
    finally:
        store.close()


EXPECTED = [f"paid {call.arguments['amount']}" for call in CALLS]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["before", "after"]), st.integers(0, len(CALLS) - 1)), unique=True))
def test_each_call_is_made_once_wherever_the_coordinator_dies(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[tuple[str, int]]
) -> None:
    folder, left = tmp_path_factory.mktemp("run"), {(where, CALLS[place].key) for where, place in deaths}

    def dies(where: str, call: ToolCall) -> None:
        if (where, call.key) in left:
            left.remove((where, call.key))
            raise Crash

    server = ToolServer(folder / "log", remembers=True, dies=dies)
    for _ in range(len(deaths) + 1):
        try:
            assert play(folder, server) == EXPECTED
            break
        except Crash:
            continue
    else:
        raise AssertionError("it never ended")
    assert server.made() == [str(call.key) for call in CALLS]
    assert play(folder, server) == EXPECTED, "what is stored is replayed"
    assert server.made() == [str(call.key) for call in CALLS]


def play_and_die(folder: Path, where: str) -> None:
    """A life that is killed at its third call. It runs in a process of its own."""

    def dies(here: str, call: ToolCall) -> None:
        if here == where and call is CALLS[2]:
            os.kill(os.getpid(), signal.SIGKILL)

    play(folder, ToolServer(folder / "log", True, dies))


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_killed_coordinator_leaves_what_is_needed(tmp_path: Path, where: str) -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    killed = subprocess.run([sys.executable, __file__, tmp_path, where], timeout=PATIENCE, env=environ)
    assert killed.returncode == -signal.SIGKILL
    server = ToolServer(tmp_path / "log", remembers=True)
    assert len(server.made()) == (2 if where == "before" else 3)
    assert play(tmp_path, server) == EXPECTED
    assert server.made() == [str(call.key) for call in CALLS]


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_environment_that_cannot_say_costs_the_episode_or_a_second_call(tmp_path: Path, where: str) -> None:
    def dies(here: str, call: ToolCall) -> None:
        if here == where and call is CALLS[0]:
            raise Crash

    with pytest.raises(Crash):
        play(tmp_path, ToolServer(tmp_path / "log", True, dies))
    forgetful = ToolServer(tmp_path / "log", remembers=False)
    before = forgetful.made()
    with pytest.raises(
        EpisodeLost, match=r"died while tool pay was called \(1-0-3-0-0-0\), and the environment cannot"
    ):
        play(tmp_path, forgetful)
    assert forgetful.made() == before, "nothing is made that may have been made"
    assert play(tmp_path, forgetful, repeatable=True) == EXPECTED
    assert forgetful.made().count(str(CALLS[0].key)) == len(before) + 1


def test_the_store_refuses_another_call_and_another_answer(tmp_path: Path) -> None:
    store = Store(tmp_path)
    key = CALLS[0].key
    with pytest.raises(StoreError, match="1-0-3-0-0-0 is not in the store, so it must not have been made"):
        store.tool_calls.observe(key, "paid")
    assert store.tool_calls.intend(key, "pay", {"amount": 1, "to": "a"}) is None
    known = store.tool_calls.intend(key, "pay", {"to": "a", "amount": 1})
    assert known is not None, "the order of arguments says nothing"
    assert known.observation is None
    with pytest.raises(StoreError, match=r"was \[\"pay\", .*and now it is \[\"pay\", .*begin a new run"):
        store.tool_calls.intend(key, "pay", {"amount": 2, "to": "a"})
    store.tool_calls.observe(key, "paid")
    store.tool_calls.observe(key, "paid")
    with pytest.raises(StoreError, match="another observation in the store"):
        store.tool_calls.observe(key, "refused")
    store.close()


def test_calls_are_forgotten_with_their_iteration(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.samples.begin_iteration(1, [NewSample(0, 3, [1, 2], 7)])
    assert store.samples.get(Key(1, 0, 3)).prompt_tokens.tolist() == [1, 2]
    store.tool_calls.intend(CALLS[0].key, "pay", {"amount": 0})
    store.forget(1, [])
    assert store.tool_calls.intend(CALLS[0].key, "pay", {"amount": 99}) is None, "another call may be made there"
    store.close()


if __name__ == "__main__":
    play_and_die(Path(sys.argv[1]), sys.argv[2])
