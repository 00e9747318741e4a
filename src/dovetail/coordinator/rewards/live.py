"""Calls a reward function that was passed to the Python API. It runs in this process, one call at a time. A coroutine
function is awaited. Any other function runs in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dovetail.coordinator.rewards.calls import Call, CallFailed, Function, RewardAnswer, RewardError
from dovetail.coordinator.rewards.values import WrongRewards, checked, describe
from dovetail.coordinator.user_code.user_requests import FRAMES, raised

RewardCallable = Callable[..., Sequence[float] | Awaitable[Sequence[float]]]


class LiveFunction:
    """A reward function of the Python API. A call must end within `seconds`. A call that takes longer continues in its
    thread, because a thread cannot be ended."""

    def __init__(self, function: RewardCallable, seconds: float) -> None:
        self._function = function
        self._seconds = seconds
        self._one = asyncio.Lock()
        self._raw = False

    async def open(self) -> list[Function]:
        """Return the one function. Raises RewardError if its attribute `needs` is wrong."""
        title = getattr(self._function, "__name__", type(self._function).__name__)
        try:
            found = describe(self._function)
        except ValueError as error:
            raise RewardError(f"reward function {title}: {error}") from error
        where = title if found["file"] is None else f"{found['file']}:{found['line']}"
        self._raw = bool(found["raw"])
        return [Function(title, 1.0, where, found["needs"] or "Group", self._raw)]

    async def call(self, function: int, call: Call) -> RewardAnswer:
        """Call the function. Raises CallFailed."""
        # A function may change its arguments. Another try and the check need them as they were.
        prompts, responses, fields = copy.deepcopy((call.prompts, call.responses, call.keywords(self._raw)))
        work: Callable[[], Any] = functools.partial(self._function, prompts, responses, **fields)
        async with self._one:
            started = time.time()
            thread: _Thread | None = None
            try:
                async with asyncio.timeout(self._seconds) as limit:
                    if inspect.iscoroutinefunction(self._function):
                        result = await work()
                    else:
                        thread = _Thread(work)
                        # It is raised here, because a coroutine cannot raise StopIteration.
                        result, failure = await thread.result()
                        if failure is not None:
                            raise failure
                found = checked(result, call.responses)
            except WrongRewards as error:
                raise CallFailed(str(error), retry=False) from error
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                if limit.expired():
                    text = f"gave no answer within {self._seconds:g} s (spec.models.reward.timeoutSeconds)"
                    raise CallFailed(text, [] if thread is None else thread.frames()) from error
                what = raised(error, {__file__})
                raise CallFailed(f"raised {what['what']}", what["frames"], outside=what["outside"]) from error
            return RewardAnswer(found.rewards, started, time.time(), found.steps)

    async def close(self) -> None:
        """Do nothing, because there is no process to end."""


class _Thread:
    """Runs `work` in a daemon thread, so that the interpreter does not wait for it when it exits."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="reward function", daemon=True)
        self._thread.start()

    async def result(self) -> tuple[Any, BaseException | None]:
        """Wait for the thread. Returns what `work` returned and None, or None and what it raised."""
        return await self._done

    def frames(self) -> list[str]:
        """The last frames of the code that the thread runs now."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        found = []
        while frame is not None and frame.f_code.co_filename != __file__:
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        return found[:FRAMES][::-1]

    def _run(self) -> None:
        try:
            self._tell(self._work(), None)
        # SystemExit may come from the function too.
        except BaseException as error:
            self._tell(None, error)

    def _tell(self, result: Any, error: BaseException | None) -> None:
        def tell() -> None:
            if not self._done.done():
                self._done.set_result((result, error))

        # The result may come late, when the event loop is closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(tell)
