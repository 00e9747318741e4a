"""Calls reward functions. It defines the arguments of a call, how a call can fail, and when it is repeated.

Before training every function is called on two of the job's prompts, so a broken one fails within seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Literal, Protocol

from dovetail.coordinator.data.prepare import Prepared, PromptRecord
from dovetail.coordinator.rewards.values import Steps

BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 30.0


class RewardError(Exception):
    """The job ends because of a reward function. The message is one sentence for the user."""


@dataclass(eq=False)
class CallFailed(Exception):
    """A call of a function failed. `what` says what the function did, as a verb phrase. `retry` says whether another
    call may succeed. `outside` says whether a connection or a file failed, and not the code. `frames` has the last
    frames of the traceback, each as "file:line in name"."""

    what: str
    frames: Sequence[str] = ()
    retry: bool = True
    outside: bool = False


@dataclass(frozen=True)
class Function:
    """A reward function. `where` is its file and line. `needs` names the samples of one call, Sample or Group. `raw`
    says whether it has a parameter of this name. Messages call it `what`."""

    title: str
    weight: float
    where: str
    needs: Literal["Sample", "Group"]
    raw: bool = False
    what: str = "reward function"


@dataclass(frozen=True)
class Call:
    """The arguments of one call. They are lists of equal length of prompts, responses and the record's other fields.
    `raw` has the responses with the tokens that end them, or nothing if they are the same. All responses answer one
    prompt. `prompt` is the prompt's number in the iteration, from 0. `sample` is the sample's
    number if there is only one. `iteration` is below 1 in an evaluation (`evaluation_slot`)."""

    iteration: int
    prompt: int
    prompts: list[str]
    responses: list[str]
    fields: dict[str, list[Any]] = field(default_factory=dict)
    sample: int | None = None
    raw: list[str] = field(default_factory=list)

    def keywords(self, raw: bool) -> dict[str, list[Any]]:
        """The keyword arguments for a function. `raw` says whether it has a parameter of this name."""
        return {**self.fields, "raw": self.raw or self.responses} if raw else self.fields


@dataclass(frozen=True)
class RewardAnswer:
    """The result of a call. It has one reward for each response, and the steps of each response if the function gave
    any. `started` and `ended` are in seconds since the epoch."""

    rewards: list[float]
    started: float
    ended: float
    steps: list[Steps] | None = None


def evaluation_slot(version: int) -> int:
    """The iteration number of the evaluation of a weight version, in the table of samples and in calls. It is below 1,
    so training never reads what is stored there."""
    return -1 - version


class Caller(Protocol):
    """Runs the reward functions. `open` finds them and may raise RewardError. It may be called again. `call` may raise
    CallFailed."""

    async def open(self) -> list[Function]: ...
    async def call(self, function: int, call: Call) -> RewardAnswer: ...
    async def close(self) -> None: ...


def field_names(records: Sequence[PromptRecord]) -> list[str]:
    """The names of all fields that any of an iteration's records has. A call gets each of them."""
    return sorted(set().union(*(r.fields for r in records)))


def fields_of(names: Sequence[str], chosen: Sequence[PromptRecord]) -> dict[str, list[Any]]:
    """The fields `names` of the records `chosen`, each as a list. A record without a field has None there."""
    return {name: [r.fields.get(name) for r in chosen] for name in names}


class Calls:
    """A caller with retries. A function that raises, crashes or hangs is called again, up to `retries` times, after 1,
    2, 4, ... seconds. A function that returns wrong values is not called again, because it would return the same
    values."""

    def __init__(
        self,
        caller: Caller,
        retries: int,
        log: Callable[..., None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._caller = caller
        self._retries = retries
        self._log = log
        self._sleep = sleep
        self.functions: list[Function] = []
        self._running: dict[int, tuple[str, float]] = {}

    def running(self) -> dict[str, float]:
        """When the oldest unanswered call of each function began, in monotonic seconds."""
        found: dict[str, float] = {}
        for title, began in self._running.values():
            found[title] = min(found.get(title, began), began)
        return found

    async def open(self) -> list[Function]:
        """Find the functions, only once. Raises RewardError."""
        if not self.functions:
            self.functions = await self._caller.open()
        return self.functions

    async def close(self) -> None:
        """End the worker processes."""
        await self._caller.close()

    async def rewards(self, function: int, call: Call, rehearsal: bool = False) -> RewardAnswer:
        """The rewards of one call. A rehearsal repeats the call only if a connection or a file failed. Raises
        RewardError with one sentence."""
        asked = self.functions[function]
        for name in ("prompts", "responses", *(["raw"] if asked.raw else [])):
            if name in call.fields:
                raise RewardError(
                    f"spec.data.prompts: a record has the field {name!r}, but {asked.what} {asked.title} gets the "
                    f"{name} of a call by this name; rename the field"
                )
        tries = 0
        while True:
            tries += 1
            self._running[id(call)] = asked.title, time.monotonic()
            try:
                return await self._caller.call(function, call)
            except CallFailed as error:
                text = sentence(asked, call, error, tries, rehearsal)
                if not error.retry or tries > self._retries or (rehearsal and not error.outside):
                    raise RewardError(text) from error
                seconds = min(BACKOFF_SECONDS * 2 ** (tries - 1), MAX_BACKOFF_SECONDS)
                self._log("reward.failed", reason=text, again_in=seconds)
                await self._sleep(seconds)
            finally:
                self._running.pop(id(call), None)


def sentence(function: Function, call: Call, error: CallFailed, tries: int, rehearsal: bool = False) -> str:
    """One sentence that says what failed, where and on which prompt, with the last frames of the traceback."""
    place = f"iteration {call.iteration}"
    if call.iteration < 1:
        version = -1 - call.iteration
        place = "the evaluation before SFT" if version < 0 else f"the evaluation after iteration {version}"
    sample = "" if call.sample is None else f", sample {call.sample}"
    when = " (a rehearsal, before training)" if rehearsal else ""
    often = "" if tries == 1 else f", {tries} times in a row"
    frames = f"; last frames: {', '.join(error.frames)}" if error.frames else ""
    return (
        f"{function.what} {function.title} ({function.where}) {error.what}{often}, on prompt {call.prompt}{sample} of "
        f"{place}{when}{frames}"
    )


PROMPTS = 2
# These responses are used in a job without demonstrations.
RESPONSES = ["Yes, of course.", "I do not know."]


async def rehearse(calls: Calls, prepared: Prepared) -> None:
    """Call every function on the first prompts of iteration 1 with plausible responses. The results are checked and
    discarded. Raises RewardError."""
    functions = await calls.open()
    everyone = prepared.prompts(1)
    records = everyone[:PROMPTS]
    count = prepared.spec.ppo.samples_per_prompt
    demonstrations = prepared.data.demonstrations
    known = [d.response for d in demonstrations.batch(1, 2 * PROMPTS)] if demonstrations is not None else RESPONSES
    responses, names = cycle(known), field_names(everyone)
    for number, function in enumerate(functions):
        if prepared.spec.sessions is not None and function.needs == "Group":
            raise RewardError(
                f"{function.what} {function.title} ({function.where}) is called with all samples of a prompt, but some "
                f'of its episodes may be discarded; write {function.title}.needs = "Sample" below it'
            )
        for record in records:
            size = count if function.needs == "Group" else 1
            given = list(islice(responses, size))
            fields = fields_of(names, [record] * size)
            if prepared.spec.sessions is not None:
                spoken = [[*record.fields["messages"], {"role": "assistant", "content": each}] for each in given]
                fields |= {"messages": spoken, "earned": [0.0] * size, "ending": ["answered"] * size}
            call = Call(1, record.index, [record.text] * size, given, fields)
            await calls.rewards(number, call, rehearsal=True)
