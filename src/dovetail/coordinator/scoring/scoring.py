"""Reference, reward and critic inference: scorers take finished samples in chunks, the longest first.

Samples may be added while others are scored; inter-stage fusion (RLHFuse section 4) adds them as they finish. A scorer
takes its next chunk when it has finished the last one, so faster devices get more. If a scorer fails, its chunk goes to
another one."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import aiohttp
import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.tokenize import ppo_batch
from dovetail.coordinator.store.samples import Key
from dovetail.planner.chunks import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS, chunk_rows
from dovetail.protocol.messages import ModelRef, Span
from dovetail.protocol.wire import CONTENT_TYPE, pack, unpack

RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Scorer:
    """A scorer's process. A restarted one has another `incarnation`."""

    name: str
    url: str
    incarnation: str = ""


@dataclass(frozen=True)
class Finished:
    """One finished sample: the token ids of prompt and response, int32."""

    key: Key
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class Scores:
    """The results of one sample: float32 arrays over response tokens, each None if it is not wanted, and the sequence's
    score."""

    key: Key
    ref_logprobs: NDArray[np.float32] | None
    values: NDArray[np.float32] | None
    score: float | None


class Waiting:
    """Finished samples that wait for a scorer, by prompt."""

    def __init__(self, samples: Iterable[Finished] = ()) -> None:
        self._groups: dict[tuple[int, int], list[Finished]] = {}
        # (-length, order, prompt) of every sample; those of samples that were taken are dropped when they come up.
        self._longest: list[tuple[int, int, tuple[int, int]]] = []
        self._added = 0
        self._tokens = 0
        self.add(samples)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, samples: Iterable[Finished]) -> None:
        for sample in samples:
            prompt = (sample.key.iteration, sample.key.prompt)
            self._groups.setdefault(prompt, []).append(sample)
            heapq.heappush(self._longest, (-len(sample), self._added, prompt))
            self._added += 1
            self._tokens += len(sample)

    def take(self, scorers: int, least: int = MIN_CHUNK_TOKENS, most: int = MAX_CHUNK_TOKENS) -> list[Finished]:
        """The next chunk for one of `scorers` scorers: as many samples as `chunk_rows` says, prompt by prompt, the
        longest first. It is empty if nothing waits.

        A scorer computes a prompt once for all its samples in a chunk. So the samples of one prompt go together, also
        if the chunk gets a few samples more. They are only divided if both parts are large enough for a chunk (`least`)
        and each has at least as many response tokens as the prompt has."""
        chunk: list[Finished] = []
        rows = 0
        while self._groups and (not chunk or len(chunk) < rows):
            prompt = self._next()
            group = self._groups.pop(prompt)
            group.sort(key=lambda sample: -len(sample))
            rows = rows or chunk_rows(len(group[0]), self._tokens, scorers, least, most)
            count = _cut(group, rows - len(chunk), least)
            chunk += group[:count]
            if count < len(group):
                self._groups[prompt] = group[count:]
        self._tokens -= sum(map(len, chunk))
        return chunk

    def _next(self) -> tuple[int, int]:
        """The prompt of the longest sample."""
        while True:
            length, _, prompt = heapq.heappop(self._longest)
            if -length == max(map(len, self._groups.get(prompt, ())), default=0):
                return prompt


def _cut(group: Sequence[Finished], rows: int, least: int) -> int:
    """How many of a prompt's samples go into a chunk that has room for `rows`: see `Waiting.take`."""
    prompt = len(group[0].prompt)
    enough = max(prompt, least - prompt)
    taken = sum(len(sample.response) for sample in group[:rows])
    left = sum(len(sample.response) for sample in group[rows:])
    count = min(rows, len(group))
    while count < len(group) and min(taken, left) < enough:
        taken += len(group[count].response)
        left -= len(group[count].response)
        count += 1
    return count


async def load_models(
    session: aiohttp.ClientSession, scorer: Scorer, models: dict[str, ModelRef], timeout: float
) -> None:
    """Tell a scorer which models to load. Raises aiohttp.ClientError or TimeoutError."""
    body = {"models": {name: ref.model_dump() for name, ref in models.items()}}
    async with session.post(
        f"{scorer.url}/v1/load", json=body, timeout=aiohttp.ClientTimeout(total=timeout)
    ) as response:
        if response.status != 200:
            raise aiohttp.ClientError(f"{scorer.name} could not load its models: {(await response.text())[:500]}")


class Inference:
    """Scores samples as they are added. It is an async context manager; outside of it nothing runs.

    `want`: some of "reference", "reward" and "critic". `scorers` returns the scorers that may take a chunk now; `poke`
    says that its answer may have changed. `everyone` returns the number of all scorers, which decides the size of
    chunks. `gone` says that a process will never answer; then its chunk goes to another one. `on_scores` gets the
    scores of each chunk. What these functions raise is raised by `check` and `finish`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        want: Sequence[str],
        scorers: Callable[[], Sequence[Scorer]],
        on_scores: Callable[[list[Scores]], None],
        on_failure: Callable[[Scorer, str], None],
        on_success: Callable[[Scorer], None] = lambda _: None,
        on_span: Callable[[Span], None] = lambda _: None,
        chunk_seconds: float = 900.0,
        everyone: Callable[[], int] = lambda: 1,
        gone: Callable[[Scorer], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._want = list(want)
        self._scorers = scorers
        self._on_scores, self._on_failure, self._on_success, self._on_span = on_scores, on_failure, on_success, on_span
        self._chunk_seconds = chunk_seconds
        self._everyone = everyone
        self._gone = gone
        self._clock = clock
        self._waiting = Waiting()
        self._left = 0
        self._wake = asyncio.Event()
        self._done = asyncio.Event()
        self._done.set()
        self._busy: dict[str, _Chunk] = {}
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._last_failure = "no scorer is ready"
        self._progress = clock()

    async def __aenter__(self) -> Inference:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [*(chunk.task for chunk in self._busy.values()), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, samples: Iterable[Finished]) -> None:
        """Add samples to be scored."""
        new = list(samples)
        self._waiting.add(new)
        self._left += len(new)
        if self._left:
            self._done.clear()
        self.poke()

    def poke(self) -> None:
        """Call `scorers` again."""
        self._wake.set()

    def check(self) -> None:
        """Raise what a function that was passed in raised."""
        if self._error is not None:
            raise self._error

    async def finish(self, deadline_seconds: float) -> None:
        """Returns when all added samples are scored. Raises TimeoutError with the last failure if nothing was scored
        for `deadline_seconds`."""
        self.poke()
        self._progress = self._clock()
        while not self._done.is_set():
            if self._clock() - self._progress > deadline_seconds:
                raise TimeoutError(
                    f"inference scored nothing for {deadline_seconds:.0f} s, {self._left} samples are left; "
                    f"last failure: {self._last_failure}"
                )
            await _wait(self._done, min(RETRY_SECONDS, deadline_seconds))
        self.check()

    async def _run(self) -> None:
        try:
            await self._hand_out()
        except Exception as error:
            self._error = error
            self._done.set()

    async def _hand_out(self) -> None:
        while True:
            self._wake.clear()
            for name, chunk in list(self._busy.items()):
                if chunk.task.done():
                    del self._busy[name]
                elif self._gone(chunk.scorer):
                    self._take_back(chunk)
            if self._waiting:
                allowed = self._scorers()
                for scorer in allowed:
                    if self._waiting and scorer.name not in self._busy:
                        samples = self._waiting.take(max(len(allowed), self._everyone()))
                        task = asyncio.create_task(self._score(scorer, samples))
                        self._busy[scorer.name] = _Chunk(scorer, samples, task)
            # While samples are left it looks again without being woken, also when all of them are being scored: a
            # failed chunk comes back without a word, as a scorer that always fails must not be asked in a tight loop.
            await _wait(self._wake, RETRY_SECONDS if self._left else None)

    def _take_back(self, chunk: _Chunk) -> None:
        """Take back the chunk of a scorer that will never answer. Its connection may stay open, as with a lost node."""
        chunk.task.cancel()
        del self._busy[chunk.scorer.name]
        self._last_failure = f"{chunk.scorer.name}: it went away with {len(chunk.samples)} samples"
        self._waiting.add(chunk.samples)

    async def _score(self, scorer: Scorer, samples: list[Finished]) -> None:
        try:
            if not await self._try(scorer, samples):
                self._waiting.add(samples)
                return
        except Exception as error:
            self._error = error
            self._done.set()
        self._progress = self._clock()
        self._left -= len(samples)
        if not self._left:
            self._done.set()
        # This task has ended when `_hand_out` looks at it.
        self._wake.set()

    async def _try(self, scorer: Scorer, chunk: list[Finished]) -> bool:
        started = time.time()
        try:
            answer = await _score_chunk(self._session, scorer, chunk, self._want, self._chunk_seconds)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._last_failure = f"{scorer.name}: {error or type(error).__name__}"
            self._on_failure(scorer, self._last_failure)
            return False
        self._on_success(scorer)
        args = {"n": len(chunk), "tokens": sum(len(s) for s in chunk)}
        self._on_span(Span(name="inference", process=scorer.name, start=started, end=time.time(), args=args))
        self._on_scores(answer)
        return True


@dataclass(frozen=True)
class _Chunk:
    """The chunk that a scorer works on."""

    scorer: Scorer
    samples: list[Finished]
    task: asyncio.Task[None]


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for the event, at most `seconds`. Not `asyncio.wait_for`: on Python 3.11 it can swallow a cancellation."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _score_chunk(
    session: aiohttp.ClientSession,
    scorer: Scorer,
    samples: Sequence[Finished],
    want: Sequence[str],
    timeout: float,
) -> list[Scores]:
    async with session.post(
        f"{scorer.url}/v1/score",
        params={"want": ",".join(want)},
        data=pack(ppo_batch([s.prompt for s in samples], [s.response for s in samples], 0)),
        headers={"Content-Type": CONTENT_TYPE},
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=10),
    ) as response:
        body = await response.read()
        if response.status != 200:
            raise aiohttp.ClientError(f"status {response.status}: {body[:300].decode(errors='replace')}")
    arrays = unpack(body)
    needed = [
        name
        for name, what in (("ref_logprobs", "reference"), ("values", "critic"), ("scores", "reward"))
        if what in want
    ]
    for name in needed:
        if name not in arrays or len(arrays[name]) != len(samples) or not np.isfinite(arrays[name]).all():
            raise ValueError(f"the answer's {name} is missing, of the wrong length or not finite")
    return [
        Scores(
            key=s.key,
            ref_logprobs=arrays["ref_logprobs"][i, : len(s.response)].astype(np.float32)
            if "reference" in want
            else None,
            values=arrays["values"][i, : len(s.response)].astype(np.float32) if "critic" in want else None,
            score=float(arrays["scores"][i]) if "reward" in want else None,
        )
        for i, s in enumerate(samples)
    ]
