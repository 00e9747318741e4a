"""Lets the trainers learn from the first samples of an iteration while the others are generated (`ppo.streaming`).

The order of the samples depends only on the samples. Prompts are sorted by their longest response, the shortest first.
Equal prompts keep their order. Generation ends in about the same order. The next prompt is known early, because a
response that is still generated will be at least as long as it is now. So a prompt is known to be next when all its
samples are scored, and every other prompt has or will have a longer response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from dovetail.coordinator.reporting.run_records import RunRecords
from dovetail.coordinator.store.samples import Sample
from dovetail.coordinator.workers.trainer_group import TrainerError, TrainerLost
from dovetail.coordinator.workers.trainer_session import TrainerSession
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.protocol import clock
from dovetail.protocol.messages import Accumulate, Step
from dovetail.protocol.wire import Arrays, pack

# The interval at which it looks for a complete part.
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class PromptProgress:
    """The state of one prompt. `longest` is the number of response tokens of its longest sample so far. `scored` says
    whether all its samples are scored."""

    prompt: int
    longest: int
    scored: bool


def known_first(progress: Iterable[PromptProgress]) -> list[int]:
    """The prompts that are known to come first in the order of learning. They are returned in that order."""
    found = []
    for each in sorted(progress, key=lambda p: (p.longest, p.prompt)):
        if not each.scored:
            break
        found.append(each.prompt)
    return found


def in_learning_order(arrays: Arrays) -> Arrays:
    """The rows of a PPO batch, sorted by the order of learning. `arrays["groups"]` has the prompt of each row."""
    groups, lengths = arrays["groups"], arrays["response_lengths"]
    longest: dict[int, int] = {}
    for group, length in zip(groups.tolist(), lengths.tolist(), strict=True):
        longest[group] = max(length, longest.get(group, 0))
    key = np.array([longest[group] for group in groups.tolist()])
    order = np.lexsort((groups, key))
    return {name: np.ascontiguousarray(array[order]) for name, array in arrays.items()}


@dataclass
class Streamed:
    """The work of the trainers for an iteration while its samples were made. It counts from the last loss of the
    trainers.

    They learnt `parts` parts. Until the last sample was there, that took `seconds`."""

    seconds: float = 0.0
    parts: int = 0


class Streaming:
    """Lets the trainers learn from parts of an iteration. An iteration is cut into `parts` parts. `arrays_of(iteration,
    samples)` returns the batch of some of its samples, and `step(iteration)` the command of the whole step."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        parts: int,
        records: RunRecords,
        session: TrainerSession,
        arrays_of: Callable[[int, Sequence[Sample]], Arrays],
        step: Callable[[int], Step],
    ) -> None:
        self._parts, self._records, self._session = parts, records, session
        self._arrays_of, self._step = arrays_of, step
        self._prompts = spec.ppo.global_batch_size // spec.ppo.samples_per_prompt // parts
        self._samples = records.store.samples

    @asynccontextmanager
    async def beside(self, iteration: int) -> AsyncIterator[Streamed]:
        """While the body generates the iteration's samples, the trainers learn from those that are known to be next.
        When the context ends, they are idle."""
        found, over = Streamed(), asyncio.Event()
        task = asyncio.create_task(self._stream(iteration, found, over))
        try:
            yield found
            over.set()
            last = clock.now()
            await task
            # The time that a part takes after the last sample is no gain.
            found.seconds = max(0.0, found.seconds - (clock.now() - last))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._records.batches.forget_parts()

    async def _stream(self, iteration: int, found: Streamed, over: asyncio.Event) -> None:
        while not over.is_set():
            first = known_first(PromptProgress(*row) for row in self._samples.progress(iteration))
            ready = len(first) // self._prompts
            if ready == self._parts:
                return  # all samples are scored, so the step trains the rest
            if ready > found.parts:
                chosen = first[found.parts * self._prompts :][: self._prompts]
                try:
                    result = await self._session.accumulate(await self._command(iteration, found.parts, chosen))
                except TrainerLost as lost:
                    self._records.log("trainers.recover", stage=Stage.PPO.value, step=iteration, reason=str(lost))
                    found.parts, found.seconds = 0, 0.0
                except TrainerError:
                    return  # the step will fail in the same way, and report it
                else:
                    found.parts += 1
                    found.seconds += result.metrics.get("seconds", 0.0)
                    self._records.timeline.add(s.model_copy(update={"iteration": iteration}) for s in result.spans)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await over.wait()

    async def _command(self, iteration: int, part: int, prompts: Sequence[int]) -> Accumulate:
        """The command for one part. From now on the trainers may fetch its batch."""
        place = {prompt: number for number, prompt in enumerate(prompts)}
        key = f"ppo-part/{iteration}/{part}"

        def batch() -> bytes:
            rows = self._samples.of_prompts(iteration, prompts)
            ordered = sorted(rows, key=lambda s: (place[s.key.prompt], s.key.sample))
            return pack(self._arrays_of(iteration, ordered))

        self._records.batches.show_part(key, await asyncio.to_thread(batch))
        return Accumulate(id=f"ppo/{iteration}/accumulate/{part}", step=self._step(iteration), part=part, batch=key)
