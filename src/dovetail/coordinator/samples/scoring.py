"""Runs reference, reward and critic inference. Scorers take finished samples in batches, the longest first. If the
trainers learn from the samples meanwhile, the shortest come first, in the trainers' order.

Samples may be added while others are scored. Inter-stage fusion (RLHFuse section 4) adds them as they finish. A scorer
takes its next batch when it has finished the last one, so faster devices score more. If a scorer fails, its batch goes
to another one.

In the tail, scorers also compute parts of samples that are still generated (`streams`), unless a longer one waits."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import aiohttp
import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.text.tokenize import ppo_batch
from dovetail.coordinator.samples.streams import Growing, Streams
from dovetail.coordinator.store.samples import Key
from dovetail.fusion.profile import MAX_BATCH_TOKENS, MIN_BATCH_TOKENS, STREAMED_PER_SCORER, batch_target
from dovetail.protocol.errors import error_text
from dovetail.protocol.http.client_session import resend
from dovetail.protocol.messages import ModelRef, Span
from dovetail.protocol.process.endings import cancel
from dovetail.protocol.wire import CONTENT_TYPE, pack, unpack

RETRY_SECONDS = 0.5
# The interval at which it looks for new blocks of unfinished samples.
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Scorer:
    """A scorer's process. A restarted one has another `incarnation`. It can keep `room` tokens of unfinished
    samples."""

    name: str
    url: str
    incarnation: str = ""
    room: int = 0

    @property
    def process(self) -> tuple[str, str]:
        return self.name, self.incarnation


@dataclass(frozen=True)
class Finished:
    """One finished sample: the token ids of its prompt (P,) and response (R,), int32."""

    key: Key
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class Scores:
    """The results of one sample. The log-probabilities (nats) and values are float32 arrays (R,) over the R response
    tokens. The score is one number for the sequence. Each is None if it was not requested."""

    key: Key
    ref_logprobs: NDArray[np.float32] | None
    values: NDArray[np.float32] | None
    score: float | None


class Waiting:
    """Finished samples that wait for a scorer, grouped by prompt."""

    def __init__(self, samples: Iterable[Finished] = ()) -> None:
        self._groups: dict[tuple[int, int], list[Finished]] = {}
        # (-length, order, prompt) of every sample. Entries of samples that were taken are dropped when they
        # reach the top.
        self._order: list[tuple[int, int, tuple[int, int]]] = []
        self._added = 0
        self._tokens = 0
        self.add(samples)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, samples: Iterable[Finished]) -> None:
        for sample in samples:
            prompt = (sample.key.iteration, sample.key.prompt)
            self._groups.setdefault(prompt, []).append(sample)
            heapq.heappush(self._order, (-len(sample), self._added, prompt))
            self._added += 1
            self._tokens += len(sample)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest waiting sample. 0 if none waits."""
        while self._order:
            length, _, prompt = self._order[0]
            if -length == max(map(len, self._groups.get(prompt, ())), default=0):
                return -length
            heapq.heappop(self._order)
        return 0

    def take(self, scorers: int, least: int = MIN_BATCH_TOKENS, most: int = MAX_BATCH_TOKENS) -> list[Finished]:
        """The next batch for one of `scorers` scorers. It has as many samples as `batch_target` has room
        for, prompt by prompt, the longest first. It is empty if no sample waits.

        A scorer computes a prompt once for all its samples in a batch. So the samples of one prompt stay together, even
        if the batch then gets a few samples more. They are divided only if both parts are large enough for a batch
        (`least`), and each has at least as many response tokens as the prompt has tokens."""
        batch: list[Finished] = []
        if not self._groups:
            return batch
        rows = max(1, batch_target(self._tokens, scorers, least, most) // self.longest)
        while self._groups and len(batch) < rows:
            prompt = self._next()
            heapq.heappop(self._order)
            group = self._groups.pop(prompt)
            group.sort(key=len, reverse=True)
            count = _cut(group, rows - len(batch), least)
            batch += group[:count]
            if count < len(group):
                self._groups[prompt] = group[count:]
        self._tokens -= sum(map(len, batch))
        return batch

    def _next(self) -> tuple[int, int]:
        """The prompt of the longest sample. Its entry stays at the top."""
        while True:
            length, _, prompt = self._order[0]
            if -length == max(map(len, self._groups.get(prompt, ())), default=0):
                return prompt
            heapq.heappop(self._order)


def _cut(group: Sequence[Finished], rows: int, least: int) -> int:
    """The number of a prompt's samples that go into a batch with room for `rows` samples, as `Waiting.take`
    describes."""
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
    """Tell a scorer which models to load. `timeout` is in seconds. Raises aiohttp.ClientError or TimeoutError."""
    body = {"models": {name: ref.model_dump() for name, ref in models.items()}}
    async with session.post(
        f"{scorer.url}/v1/load", json=body, timeout=aiohttp.ClientTimeout(total=timeout), middlewares=[resend]
    ) as response:
        if response.status != 200:
            raise aiohttp.ClientError(f"{scorer.name} could not load its models: {(await response.text())[:500]}")


class ScorerPool(Protocol):
    """The scorers that `Inference` asks."""

    @property
    def session(self) -> aiohttp.ClientSession:
        """It sends the job's token."""

    def scorers(self) -> Sequence[Scorer]:
        """The scorers that may take a batch now."""

    def everyone(self) -> int:
        """The number of all scorers, which decides the size of batches."""

    def gone(self, scorer: Scorer) -> bool:
        """Whether a process will never answer. Then its batch goes to another one."""

    def failed(self, scorer: Scorer, reason: str) -> None: ...
    def succeeded(self, scorer: Scorer) -> None: ...


class Inference:
    """Scores samples as they are added. It is an async context manager. Outside of it nothing runs.

    `want` has some of "reference", "reward" and "critic". `poke` says that `pool.scorers` may have changed. `on_scores`
    gets the scores of each batch. `batch_seconds` is the time limit of a batch. `clock` returns monotonic seconds.
    `check` and `finish` raise what `pool` and these functions raised."""

    def __init__(
        self,
        pool: ScorerPool,
        want: Sequence[str],
        on_scores: Callable[[list[Scores]], None],
        on_span: Callable[[Span], None] = lambda _: None,
        batch_seconds: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._want = list(want)
        self._on_scores, self._on_span = on_scores, on_span
        self._batch_seconds = batch_seconds
        self._clock = clock
        self._waiting = Waiting()
        self._streams = Streams()
        self._growing: Sequence[Growing] = ()
        # Finished samples that wait for the scorer which has computed a part of them.
        self._at_home: dict[Key, Finished] = {}
        self._left = 0
        self._wake = asyncio.Event()
        self._done = asyncio.Event()
        self._done.set()
        self._busy: dict[str, _Batch] = {}
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
        tasks = [batch.task for batch in self._busy.values()]
        await cancel(tasks if self._task is None else [*tasks, self._task])

    def add(self, samples: Iterable[Finished]) -> None:
        """Add samples to be scored."""
        new = list(samples)
        for sample in new:
            if self._streams.home(sample.key) is None:
                # A scorer may be computing its first part. It is not waited for.
                self._streams.end([sample.key])
                self._waiting.add([sample])
            else:
                self._at_home[sample.key] = sample
        done = {sample.key for sample in new}
        self._growing = [each for each in self._growing if each.key not in done]
        self._left += len(new)
        if self._left:
            self._done.clear()
        self.poke()

    def follow(self, left: int, growing: Callable[[], Sequence[Growing]]) -> None:
        """Record that `left` samples are not generated yet. If they are few enough, idle scorers may compute parts
        of them."""
        self._growing = growing() if 0 < left <= STREAMED_PER_SCORER * self._pool.everyone() else ()

    def poke(self) -> None:
        """Ask the pool again which scorers are free."""
        self._wake.set()

    def check(self) -> None:
        """Raise what a function that was passed in has raised."""
        if self._error is not None:
            raise self._error

    async def finish(self, deadline_seconds: float) -> None:
        """Wait until all added samples are scored. Raises TimeoutError with the last failure if nothing was scored for
        `deadline_seconds`, and what `check` raises."""
        self.poke()
        self._progress = self._clock()
        while not self._done.is_set():
            # A sample that was added after an error has cleared `_done`.
            self.check()
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
            for name, batch in list(self._busy.items()):
                if batch.task.done():
                    del self._busy[name]
                elif self._pool.gone(batch.scorer):
                    self._take_back(batch)
            if self._waiting or self._at_home or self._growing:
                self._hand_to(self._pool.scorers())
            # While samples are left, this loop wakes up by itself, even if all of them are being scored. A failed batch
            # comes back without a signal, because a scorer that always fails must not be asked in a tight loop.
            idle = RETRY_SECONDS if self._left else None
            await _wait(self._wake, LOOK_SECONDS if self._growing else idle)

    def _hand_to(self, allowed: Sequence[Scorer]) -> None:
        """Give each idle scorer of `allowed` a batch of finished samples, or parts of unfinished ones."""
        busy = [batch.scorer for batch in self._busy.values()]
        self._streams.stay({scorer.process for scorer in [*allowed, *busy]})
        # A home is lost when its scorer goes, fails, or says that it keeps nothing of the sample. Any scorer may then
        # score it.
        lost = [key for key in self._at_home if self._streams.home(key) is None]
        self._waiting.add(self._at_home.pop(key) for key in lost)
        free = [scorer for scorer in allowed if scorer.name not in self._busy]
        for number, scorer in enumerate(free):
            samples = [s for s in self._at_home.values() if self._streams.home(s.key) == scorer.process]
            for sample in samples:
                del self._at_home[sample.key]
            growing: list[Growing] = []
            if not samples:
                # The longest sample comes first, finished or not, because it would be the last one to end.
                least = self._waiting.longest + 1
                growing = self._streams.take(scorer.process, scorer.room, self._growing, len(free) - number, least)
            if growing:
                self._begin(scorer, [], self._look(scorer, growing))
                continue
            if not samples and self._waiting:
                samples = self._waiting.take(max(len(allowed), self._pool.everyone()))
            if samples:
                self._begin(scorer, samples, self._score(scorer, samples))

    def _begin(self, scorer: Scorer, samples: list[Finished], work: Coroutine[None, None, None]) -> None:
        self._busy[scorer.name] = _Batch(scorer, samples, asyncio.create_task(work))

    async def _look(self, scorer: Scorer, growing: Sequence[Growing]) -> None:
        """Let a scorer compute parts of unfinished samples."""
        started = time.time()
        tokens = [len(g.prompt) + g.blocks - self._streams.seen(g.key) for g in growing]
        samples = [
            Finished(g.key, np.asarray(g.prompt, np.int32), np.asarray(g.response[: g.blocks + 1], np.int32))
            for g in growing
        ]
        try:
            held = await _show(self._pool.session, scorer, samples, self._want, self._batch_seconds)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._last_failure = f"{scorer.name}: {error_text(error)}"
            self._pool.failed(scorer, self._last_failure)
            # The scorer may have lost what it computed before.
            self._streams.end([sample.key for sample in samples])
            return
        except Exception as error:
            self._error = error
            self._done.set()
            return
        self._pool.succeeded(scorer)
        for sample, count in zip(samples, held, strict=True):
            self._streams.held(scorer.process, sample.key, len(sample.prompt), count)
        args = {"n": len(samples), "tokens": sum(tokens), "unfinished": True}
        self._on_span(Span(name="inference", process=scorer.name, start=started, end=time.time(), args=args))
        self._wake.set()

    def _take_back(self, batch: _Batch) -> None:
        """Take back the batch of a scorer that will never answer. Its connection may stay open, for example if a node
        is lost."""
        batch.task.cancel()
        del self._busy[batch.scorer.name]
        self._last_failure = f"{batch.scorer.name}: it went away with {len(batch.samples)} samples"
        self._waiting.add(batch.samples)

    async def _score(self, scorer: Scorer, samples: list[Finished]) -> None:
        try:
            if not await self._try(scorer, samples):
                self._streams.end([sample.key for sample in samples])
                self._waiting.add(samples)
                return
        except Exception as error:
            self._error = error
            self._done.set()
        self._progress = self._clock()
        self._left -= len(samples)
        if not self._left:
            self._done.set()
        # This task will have ended when `_hand_out` looks at it.
        self._wake.set()

    async def _try(self, scorer: Scorer, batch: list[Finished]) -> bool:
        started = time.time()
        try:
            answer = await _score_batch(self._pool.session, scorer, batch, self._want, self._batch_seconds)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._last_failure = f"{scorer.name}: {error_text(error)}"
            self._pool.failed(scorer, self._last_failure)
            return False
        self._pool.succeeded(scorer)
        args = {"n": len(batch), "tokens": sum(len(s) - self._streams.seen(s.key) for s in batch)}
        self._streams.end([sample.key for sample in batch])
        self._on_span(Span(name="inference", process=scorer.name, start=started, end=time.time(), args=args))
        self._on_scores(answer)
        return True


@dataclass(frozen=True)
class _Batch:
    """The batch that a scorer is scoring."""

    scorer: Scorer
    samples: list[Finished]
    task: asyncio.Task[None]


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for the event, for at most `seconds`. It does not use `asyncio.wait_for`, which can swallow a cancellation
    on Python 3.11."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _show(
    session: aiohttp.ClientSession,
    scorer: Scorer,
    samples: Sequence[Finished],
    want: Sequence[str],
    timeout: float,
) -> list[int]:
    """Let a scorer compute parts of samples. Returns how many response tokens of each it has computed."""
    body = json.loads(await _ask(session, scorer, "begin", samples, want, timeout))
    held = body.get("held") if isinstance(body, dict) else None
    if not isinstance(held, list) or len(held) != len(samples) or not all(isinstance(n, int) for n in held):
        raise ValueError("the answer does not say what of each sample is held")
    return held


async def _ask(
    session: aiohttp.ClientSession,
    scorer: Scorer,
    route: str,
    samples: Sequence[Finished],
    want: Sequence[str],
    timeout: float,
) -> bytes:
    async with session.post(
        f"{scorer.url}/v1/{route}",
        params={"want": ",".join(want)},
        data=pack(ppo_batch([s.prompt for s in samples], [s.response for s in samples], 0)),
        headers={"Content-Type": CONTENT_TYPE},
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=10),
        middlewares=[resend],
    ) as response:
        body = await response.read()
        if response.status != 200:
            raise aiohttp.ClientError(f"status {response.status}: {body[:300].decode(errors='replace')}")
        return body


async def _score_batch(
    session: aiohttp.ClientSession,
    scorer: Scorer,
    samples: Sequence[Finished],
    want: Sequence[str],
    timeout: float,
) -> list[Scores]:
    arrays = unpack(await _ask(session, scorer, "score", samples, want, timeout))
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
