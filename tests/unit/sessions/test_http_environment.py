"""Environments behind HTTP: each call has its effect once, whatever fails between the coordinator and the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dovetail.coordinator.sessions import http_environment
from dovetail.coordinator.sessions.effects import EpisodeLost, Failed, ToolCall, observe
from dovetail.coordinator.sessions.http_environment import HttpEnvironment
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.store.tool_calls import CallKey
from helpers.cluster import wait_for
from helpers.example_server import EXAMPLE, example
from helpers.free_ports import free_port
from helpers.patience import PATIENCE

CALLS = [
    ToolCall(CallKey(1, 0, 3, 0, turn, 0), "guess", {"number": number}) for turn, number in enumerate((50, 25, 37))
]
ANSWERS = ["lower", "higher", "right"]


def effects(log: Path) -> list[str]:
    """The keys of the calls that the server made, without the run's name."""
    events = [json.loads(line) for line in log.read_text().splitlines() if line]
    return [event["key"].partition("-")[2] for event in events if "key" in event]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Faults:
    """What goes wrong with the next requests to a path: (path, what), each once."""

    def __init__(self, *planned: tuple[str, str]) -> None:
        self.planned, self.seen = list(planned), list[tuple[str, str]]()

    def middleware(self) -> Any:
        @web.middleware
        async def faulty(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.seen.append((request.method, request.path))
            fault = next((each for each in self.planned if request.path.startswith(each[0])), None)
            if fault is None:
                return await handler(request)
            self.planned.remove(fault)
            when, _, what = fault[1].partition(" ")
            if when == "after":
                await handler(request)
            if what == "hangs":
                await asyncio.sleep(3600)
            if what == "drops":
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(0)
            if what == "garbage":
                return web.Response(text="{")
            if what == "huge":
                return web.Response(body=b"a" * (17 << 20))
            if what == "number":
                return web.json_response({"observation": 3, "reward": "much"})
            return web.Response(status=int(what) if what.isdigit() else 500, text="the shop is closed")

        return faulty


def played(log: Path, faults: Faults, work: Callable[[HttpEnvironment], Awaitable[Any]], seconds: float = 120.0) -> Any:
    """What `work` finds with the example's server, where the faults happen."""

    async def main() -> Any:
        module = example()
        app = module.app(module.Games(log))
        app.middlewares.append(faults.middleware())
        async with TestServer(app) as server:
            environment = HttpEnvironment(str(server.make_url("/")), "run", seconds)
            try:
                return await work(environment)
            finally:
                await environment.close()

    return asyncio.run(main())


async def game(environment: HttpEnvironment) -> tuple[list[str], float | None]:
    await environment.open()
    begun = await environment.begin("1-0-3-0", [], {"secret": 37})
    answers = [await begun.make(call) for call in CALLS]
    earned = await begun.reward()
    await begun.end()
    return answers, earned


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_environment, "BACKOFF_SECONDS", 0.01)


PASSING = ["before 500", "after 500", "before 503", "after 502", "before drops", "after drops"]


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("path", ["/v1/tools", "/v1/reset", "/v1/step", "/v1/steps/", "/v1/episodes/"])
def test_what_passes_changes_nothing(tmp_path: Path, path: str, fault: str) -> None:
    log = tmp_path / "log"
    # The server is asked for a step only if its answer was lost.
    faults = Faults(*([("/v1/step", "after drops")] if path == "/v1/steps/" else []), (path, fault))
    assert played(log, faults, game) == (ANSWERS, pytest.approx(1 / 3))
    assert faults.planned == []
    assert effects(log) == [str(call.key) for call in CALLS]


def test_a_step_that_hangs_after_its_effect_is_asked_for(tmp_path: Path) -> None:
    faults = Faults(("/v1/step", "after hangs"))
    assert played(tmp_path / "log", faults, game, seconds=5.0)[0] == ANSWERS
    assert effects(tmp_path / "log") == [str(call.key) for call in CALLS]
    assert ("GET", f"/v1/steps/run-{CALLS[0].key}") in faults.seen


@pytest.mark.parametrize(
    ("planned", "says"),
    [
        (
            [("/v1/step", "before 500")] * 9,
            r"^the environment answered 500: the shop is closed, when tool guess",
        ),
        (
            [("/v1/step", "before 422")],
            r"^the environment answered 422: the shop is closed, when tool guess",
        ),
        (
            [("/v1/step", "after garbage")],
            r"^the environment answered with what is no JSON, when tool guess",
        ),
        ([("/v1/step", "after huge")], r"^the environment answered with more than 16,777,216 bytes, when tool guess"),
        ([("/v1/step", "after number")], r"^/v1/step answered without an observation, which is a text"),
        ([("/v1/reset", "before 500")] * 9, r"^POST .*/v1/reset answered 500: the shop is closed, 6 times$"),
        ([("/v1/reset", "before 404")], r"^POST .*/v1/reset answered 404: the shop is closed$"),
        ([("/v1/reset", "after number")], r"^/v1/reset answered without an observation"),
        ([("/v1/episodes/", "after number")], r"^GET /v1/episodes/run-1-0-3-0/result answers with no finite reward"),
        # Nobody can say whether the call was made.
        (
            [("/v1/step", "after drops"), *[("/v1/steps/", "before 501")] * 9],
            r"^the environment lost its connection \(ServerDisconnectedError\), when tool guess was called \(1-0-3-0-0",
        ),
    ],
)
def test_what_lasts_is_the_environments_failure(tmp_path: Path, planned: list[tuple[str, str]], says: str) -> None:
    log = tmp_path / "log"
    with pytest.raises(Failed, match=says):
        played(log, Faults(*planned), game)
    made = effects(log) if log.exists() else []
    assert len(made) == len(set(made))


def test_a_server_that_is_not_there_and_one_that_is_none_are_refused_at_the_beginning(tmp_path: Path) -> None:
    async def nobody() -> None:
        await HttpEnvironment(f"http://127.0.0.1:{free_port()}", "run", 120.0).open()

    with pytest.raises(ValueError, match=r"^spec.sessions.environment.url: GET http.*/v1/tools cannot connect: "):
        asyncio.run(nobody())
    for fault, says in (
        ("after number", "does not answer with a list of function schemas"),
        ("after 404", "answered 404"),
    ):
        with pytest.raises(ValueError, match=rf"^spec.sessions.environment.url: .*{says}"):
            played(tmp_path / "log", Faults(("/v1/tools", fault)), lambda environment: environment.open())


def test_a_server_that_was_there_has_its_time_to_come_back(tmp_path: Path) -> None:
    """A pod that is replaced takes longer than some tries."""
    log, port, tried, often = tmp_path / "log", free_port(), 0, asyncio.Event()

    async def served() -> web.AppRunner:
        runner = web.AppRunner(example().app(example().Games(log)))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    class Counted(HttpEnvironment):
        async def once(self, *arguments: Any) -> Any:
            nonlocal tried
            tried += 1
            if tried > 2 * http_environment.TRIES:
                often.set()
            return await super().once(*arguments)

    async def main() -> None:
        nonlocal tried
        environment, runner = Counted(f"http://127.0.0.1:{port}", "run", 120.0), await served()
        await environment.open()
        begun = await environment.begin("1-0-3-0", [], {"secret": 37})
        await runner.cleanup()
        tried, making = 0, asyncio.create_task(begun.make(CALLS[0]))
        async with asyncio.timeout(PATIENCE):
            await often.wait()
        runner = await served()
        try:
            assert await making == ANSWERS[0]
        finally:
            await environment.close()
            await runner.cleanup()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_environment, "_LONGEST_BACKOFF_SECONDS", 0.05)
        asyncio.run(main())
    assert effects(log) == [str(CALLS[0].key)]


def test_an_episode_that_the_server_forgot_is_lost(tmp_path: Path) -> None:
    async def work(environment: HttpEnvironment) -> None:
        begun = await environment.begin("1-0-3-0", [], {"secret": 37})
        with pytest.raises(EpisodeLost, match="does not know episode run-1-0-3-0 any more"):
            await begun.make(CALLS[0])

    played(tmp_path / "log", Faults(("/v1/step", "before 410")), work)

    async def late(environment: HttpEnvironment) -> None:
        begun = await environment.begin("1-0-3-0", [], {"secret": 37})
        with pytest.raises(EpisodeLost, match="/result answered 410"):
            await begun.reward()

    played(tmp_path / "log", Faults(("/v1/episodes", "before 410")), late)


@pytest.mark.parametrize("forgot", ["404", "410", "otherwise"])
def test_an_episode_whose_server_has_lost_its_state_does_not_go_on(tmp_path: Path, forgot: str) -> None:
    """Coordinator and server were restarted. The server begins the episode anew, without the calls that were made."""
    store = Store(tmp_path / "run")

    async def first(environment: HttpEnvironment) -> None:
        begun = await environment.begin("1-0-3-0", [], {"secret": 37})
        assert await observe(store.tool_calls, CALLS[0], begun, False) == ANSWERS[0]

    async def second(environment: HttpEnvironment) -> None:
        begun = await environment.begin("1-0-3-0", [], {"secret": 37})
        with pytest.raises(EpisodeLost, match=r"does not know episode run-1-0-3-0 any more|answers 1-0-3-0-0-0 other"):
            await observe(store.tool_calls, CALLS[0], begun, False)

    try:
        played(tmp_path / "log", Faults(), first)
        if forgot == "otherwise":
            (tmp_path / "log").write_text((tmp_path / "log").read_text().replace('"secret": 37', '"secret": 73'))
        faults = Faults() if forgot == "otherwise" else Faults(("/v1/steps/", f"before {forgot}"))
        played(tmp_path / "log", faults, second)
    finally:
        store.close()


@pytest.mark.parametrize("where", ["before the call", "after its effect"])
@pytest.mark.parametrize("can_say", [True, False])
def test_after_the_coordinators_death_the_server_is_asked(tmp_path: Path, where: str, can_say: bool) -> None:
    store, log, key = Store(tmp_path / "run"), tmp_path / "log", CALLS[0].key

    async def first(environment: HttpEnvironment) -> None:
        begun = await environment.begin("1-0-3-0", [], {"secret": 37})
        store.tool_calls.intend(key, CALLS[0].name, CALLS[0].arguments)
        if where == "after its effect":
            await begun.make(CALLS[0])

    async def second(environment: HttpEnvironment) -> tuple[list[str], float | None]:
        begun = await environment.begin("1-0-3-0", [], {"secret": 37})
        return [await observe(store.tool_calls, call, begun, False) for call in CALLS], await begun.reward()

    played(log, Faults(), first)
    try:
        if can_say:
            assert played(log, Faults(), second) == (ANSWERS, pytest.approx(1 / 3))
            # A third life has all observations in the store, and the server's state is as it was.
            faults = Faults()
            assert played(log, faults, second) == (ANSWERS, pytest.approx(1 / 3))
            assert ("POST", "/v1/step") not in faults.seen
        else:
            with pytest.raises(EpisodeLost, match="the environment cannot say whether it was"):
                played(log, Faults(*[("/v1/steps/", "before 501")] * 9), second)
    finally:
        store.close()
    made = effects(log)
    assert made == ([str(call.key) for call in CALLS] if can_say else [str(key)] * (where == "after its effect"))


@pytest.mark.slow
def test_the_example_server_survives_its_own_death(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(EXAMPLE), str(port), str(log)])

    async def main() -> tuple[list[str], float | None]:
        environment = HttpEnvironment(f"http://127.0.0.1:{port}", "run", 120.0)
        server, answers = start(), []
        try:
            await asyncio.to_thread(wait_for, "the server", lambda: answers_at(port), 120)
            begun = await environment.begin("1-0-3-0", [], {"secret": 37})
            for call in CALLS:
                answers.append(await begun.make(call))
                os.kill(server.pid, signal.SIGKILL)
                server.wait()
                server = start()
                await asyncio.to_thread(wait_for, "the server", lambda: answers_at(port), 120)
            assert await begun.recall(CALLS[1]) == ANSWERS[1]
            return answers, await begun.reward()
        finally:
            server.kill()
            server.wait()
            await environment.close()

    assert asyncio.run(main()) == (ANSWERS, pytest.approx(1 / 3))
    assert effects(log) == [str(call.key) for call in CALLS]


def answers_at(port: int) -> bool:
    async def ask() -> bool:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/v1/tools") as answer:
            return answer.status == 200

    try:
        return asyncio.run(ask())
    except aiohttp.ClientError:
        return False
