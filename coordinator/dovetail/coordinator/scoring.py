"""Reference, reward and critic inference: finished samples in length-sorted chunks over all scorers.

Each scorer takes the next chunk when it is done with its last, so unlike devices get work by their speed. A chunk
whose scorer fails goes back to the queue."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
from numpy.typing import NDArray

from dovetail.api.messages import ModelRef, Span
from dovetail.api.wire import CONTENT_TYPE, pack, unpack
from dovetail.coordinator.data.tokenize import ppo_batch

MAX_CHUNK_TOKENS = 16_384
CHUNKS_PER_SCORER = 3
RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Scorer:
    name: str
    url: str


@dataclass(frozen=True)
class Finished:
    """One finished sample: prompt and response token ids, int32."""

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class Scores:
    """Per response token float32 arrays (None where not wanted) and the sequence's score."""

    ref_logprobs: NDArray[np.float32] | None
    values: NDArray[np.float32] | None
    score: float | None


def chunks(lengths: Sequence[int], parts: int, max_tokens: int = MAX_CHUNK_TOKENS) -> list[list[int]]:
    """Indices in chunks of like length, longest first, of about total/parts tokens and at most `max_tokens` padded."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    target = min(max_tokens, max(1, sum(lengths) // max(1, parts)))
    result: list[list[int]] = []
    for i in order:
        if result and (len(result[-1]) + 1) * lengths[result[-1][0]] <= target:
            result[-1].append(i)
        else:
            result.append([i])
    return result


async def load_models(
    session: aiohttp.ClientSession, scorer: Scorer, models: dict[str, ModelRef], timeout: float
) -> None:
    """Tell a scorer which models to hold. Raises aiohttp.ClientError or TimeoutError."""
    body = {"models": {name: ref.model_dump() for name, ref in models.items()}}
    async with session.post(
        f"{scorer.url}/v1/load", json=body, timeout=aiohttp.ClientTimeout(total=timeout)
    ) as response:
        if response.status != 200:
            raise aiohttp.ClientError(f"{scorer.name} could not load its models: {(await response.text())[:500]}")


async def score(
    session: aiohttp.ClientSession,
    samples: Sequence[Finished],
    want: Sequence[str],
    scorers: Callable[[], Sequence[Scorer]],
    on_failure: Callable[[Scorer, str], None],
    deadline_seconds: float,
    on_success: Callable[[Scorer], None] = lambda _: None,
    on_span: Callable[[Span], None] = lambda _: None,
) -> list[Scores]:
    """Scores of every sample, in order.

    `want`: of "reference", "reward", "critic". `scorers` is asked again whenever one may have come or gone.
    Raises TimeoutError with the last failure when the whole takes longer than `deadline_seconds`."""
    results: list[Scores | None] = [None] * len(samples)
    parts = max(1, len(scorers())) * CHUNKS_PER_SCORER
    queue = deque(chunks([len(s) for s in samples], parts))
    waiting = len(queue)
    finished = asyncio.Event()
    last_failure = "no scorer is ready"

    async def worker(scorer: Scorer) -> None:
        nonlocal waiting, last_failure
        while queue:
            chunk = queue.popleft()
            started = time.time()
            try:
                answer = await _score_chunk(session, scorer, [samples[i] for i in chunk], want, deadline_seconds)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                queue.append(chunk)
                last_failure = f"{scorer.name}: {error or type(error).__name__}"
                on_failure(scorer, last_failure)
                return
            except BaseException:
                queue.append(chunk)
                raise
            for i, scores in zip(chunk, answer, strict=True):
                results[i] = scores
            waiting -= 1
            on_success(scorer)
            on_span(
                Span(
                    name="inference",
                    process=scorer.name,
                    start=started,
                    end=time.time(),
                    args={"n": len(chunk)},
                )
            )
        if waiting == 0:
            finished.set()

    busy: dict[str, asyncio.Task[None]] = {}
    try:
        async with asyncio.timeout(deadline_seconds):
            while waiting:
                for scorer in scorers():
                    task = busy.get(scorer.name)
                    if queue and (task is None or task.done()):
                        busy[scorer.name] = asyncio.create_task(worker(scorer))
                wake = asyncio.create_task(finished.wait())
                await asyncio.wait(
                    {wake, *(t for t in busy.values() if not t.done())},
                    timeout=RETRY_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                wake.cancel()
    except TimeoutError:
        raise TimeoutError(
            f"inference did not finish within {deadline_seconds:.0f} s; last failure: {last_failure}"
        ) from None
    finally:
        for task in busy.values():
            task.cancel()
        await asyncio.gather(*busy.values(), return_exceptions=True)
    return [r for r in results if r is not None]


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
            ref_logprobs=arrays["ref_logprobs"][i, : len(s.response)].astype(np.float32)
            if "reference" in want
            else None,
            values=arrays["values"][i, : len(s.response)].astype(np.float32) if "critic" in want else None,
            score=float(arrays["scores"][i]) if "reward" in want else None,
        )
        for i, s in enumerate(samples)
    ]
