"""Draws the samples of a job with sessions. A sample is an episode, and each turn of the model is drawn as a sample.

All turns are stored as they are drawn, and so are the calls of tools. A restarted coordinator plays the episode again
from what is stored, up to where it was."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dovetail.coordinator.data.prepare import Prepared
from dovetail.coordinator.data.text.chat_template import NotWritten, TemplateRefused
from dovetail.coordinator.job import Job
from dovetail.coordinator.samples.drawing import Drawing, DrawingFollower
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import Generated, GenerationError
from dovetail.coordinator.samples.lineup import Turn
from dovetail.coordinator.samples.scoring import Finished
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.sessions.agent import AgentPlayer
from dovetail.coordinator.sessions.answer_reader import Unreadable
from dovetail.coordinator.sessions.effects import EpisodeLost, Failed
from dovetail.coordinator.sessions.episode import ModelExchange, joined
from dovetail.coordinator.sessions.job_sessions import job_player
from dovetail.coordinator.sessions.play import (
    AskedTurn,
    Ending,
    Environment,
    Played,
    Player,
    SampledTurn,
    check_opening,
)
from dovetail.coordinator.store.episodes import MOST_TURNS, EndedEpisode, Transcript
from dovetail.coordinator.store.samples import Key, Sample, State
from dovetail.manifest.training_types import Generation, Sessions
from dovetail.protocol.process.endings import cancel

# Draws a turn, which is a pending sample, with at most so many tokens. Returns it when it is generated.
Draw = Callable[[Sample, int], Awaitable[Sample]]
# An episode is begun so often in all, if its state is lost while it is played.
MOST_ATTEMPTS = 3
# An agent waits for the model most of the time, and takes about 100 MB.
AGENTS_PER_CORE = 16


class Episodes:
    """Plays the samples of a job as episodes. It takes the place of `generator`, which draws the turns."""

    def __init__(
        self, job: Job, sessions: Sessions, prepared: Prepared, environment: Environment, generator: Generator
    ) -> None:
        self._store, self._log, self._sessions, self._prepared = job.store, job.log, sessions, prepared
        self._environment, self._generator = environment, generator
        self._most = job.spec.generation.max_tokens
        self._compares = job.spec.ppo.compares_samples
        self._player: Player | AgentPlayer | None = None
        self._opening = asyncio.Lock()
        processes = sessions.agent is not None and sessions.agent.command is not None
        usual = AGENTS_PER_CORE * len(os.sched_getaffinity(0)) if processes else sys.maxsize
        # First come, first served: an iteration goes before those after it.
        self._places = asyncio.Semaphore(sessions.max_concurrent or usual)

    @contextmanager
    def open(self, iteration: int, version: int) -> Iterator[Turn]:
        """As `Generator.open`."""
        with self._generator.open(iteration, version) as turn:
            yield turn

    def idle(self, name: str) -> bool:
        """As `Generator.idle`."""
        return self._generator.idle(name)

    def growing(self, iteration: int) -> list[Growing]:
        """No sample is scored before its episode has ended."""
        return []

    async def generate(
        self, turn: Turn, follower: DrawingFollower | None = None, generation: Generation | None = None
    ) -> Generated:
        """Play every pending sample of the iteration, and store it. It raises what `Generator.generate` raises, and
        GenerationError if an episode cannot be played."""
        await self._open()
        pending = self._store.samples.samples(turn.iteration, State.PENDING)
        playing = _Playing(pending, self._play, follower or DrawingFollower(), self._store.samples.get)
        try:
            done = await self._generator.draw(turn, [], playing, generation)
        finally:
            await playing.close()
        self._check(turn.iteration)
        return replace(done, samples=len(pending), tail=playing.tail)

    async def _open(self) -> None:
        async with self._opening:
            if self._player is None:
                self._player = await self._opened()

    async def _opened(self) -> Player | AgentPlayer:
        try:
            await self._environment.open()
        except ValueError as error:
            raise GenerationError(str(error)) from error
        try:
            return job_player(self._sessions, self._prepared, self._environment, self._store.tool_calls)
        except Unreadable as error:
            raise GenerationError(f"spec.sessions: {error}") from error

    async def _play(self, sample: Sample, draw: Draw) -> list[Sample]:
        """Play one sample's episode to its end, and store it. Returns what is to be scored."""
        async with self._places:
            return await self._played(sample, draw)

    async def _played(self, sample: Sample, draw: Draw) -> list[Sample]:
        key, player = sample.key, self._player
        # An environment outside of the job remembers earlier episodes, also those of samples that were forgotten.
        earlier = MOST_ATTEMPTS * self._store.drawings(key.iteration)
        attempt = earlier + sample.attempt
        assert player is not None
        fields = {name: value for name, value in sample.fields.items() if name != "messages"}
        asked = sample.fields["messages"]

        latest: ModelExchange | None = None
        drawn = 0

        async def policy(turn: AskedTurn) -> SampledTurn:
            nonlocal latest, drawn
            latest, prompt = turn.exchange, turn.exchange.prompt
            check_opening(turn, self._prepared.spec.data.max_prompt_tokens)
            left = self._most - turn.before
            limit = min(left, self._sessions.max_tokens or left, turn.most or left)
            if limit < 1:
                return SampledTurn([], [], False)
            number = self._store.episodes.number_of(key, prompt) if turn.number is None else turn.number
            otherwise = f"the {player.whose} began or answered otherwise than before the coordinator died"
            if number >= MOST_TURNS:
                raise EpisodeLost(otherwise)
            found = self._store.episodes.turn(key, number, prompt, sample.seed)
            if found.prompt_tokens.tolist() != list(prompt):
                raise EpisodeLost(otherwise)
            if found.state is not State.GENERATED:
                found = await draw(found, limit)
            drawn += 1
            return SampledTurn(found.tokens.tolist(), found.logprobs.tolist(), found.finished)

        found: list[Sample] | None = None
        while found is None:
            begun: Any = None
            latest, drawn = None, 0
            try:
                begun = await self._environment.begin("-".join(map(str, (*key, attempt))), asked, fields)
                found = self._end(key, await player.play(key, attempt, asked, begun, policy))
            except EpisodeLost as lost:
                attempt += 1
                if attempt == earlier + MOST_ATTEMPTS:
                    found = self._discard(key, f"{player.whose} failed", str(lost), _transcript(latest, drawn))
                else:
                    self._log("episode.again", sample=list(key), reason=str(lost))
                    self._store.episodes.again(key)
            except Failed as failure:
                found = self._discard(key, f"{player.whose} failed", str(failure), _transcript(latest, drawn))
            except (TemplateRefused, NotWritten) as error:
                raise GenerationError(
                    f"the tokenizer's chat template refuses the episode of sample {key.sample} of prompt {key.prompt}: "
                    f"{error}"
                ) from error
            # Only what is stored has ended. A coordinator that goes on with the episode needs its environment.
            if begun is not None:
                await begun.end()
        return found

    def _end(self, key: Key, played: Played) -> list[Sample]:
        failed = played.ending is not Ending.ANSWERED
        if (failed and self._sessions.on_failure == "Discard") or not played.branches:
            transcript = Transcript(played.messages, played.turns, played.calls)
            return self._discard(key, played.ending, played.why, transcript)
        self._store.episodes.end(
            key,
            EndedEpisode(
                *joined(played.branches),
                finished=not failed,
                ending=played.ending,
                why=played.why,
                reward=0.0 if failed else played.reward,
                messages=played.messages,
                turns=played.turns,
                calls=played.calls,
                requests=played.requests,
            ),
        )
        return [self._store.samples.get(key)]

    def _discard(self, key: Key, ending: str, why: str, transcript: Transcript) -> list[Sample]:
        self._log("episode.discarded", sample=list(key), ending=ending, reason=why)
        self._store.episodes.discard(key, ending, why, transcript)
        return []

    def _check(self, iteration: int) -> None:
        """Raise GenerationError if nothing of an iteration can be trained. An evaluation trains nothing."""
        if iteration < 1:
            return
        found = self._store.episodes.of(iteration)
        left = Counter(key.prompt for key, each in found.items() if not each.discarded)
        if found and max(left.values(), default=0) < (2 if self._compares else 1):
            gone = [each for each in found.values() if each.discarded]
            causes = "; ".join(sorted({f"{each.ending}: {each.why}".removesuffix(": ") for each in gone})[:3])
            some = "all" if not left else f"{len(gone)} of"
            rest = ", and no prompt has two others to compare" if left else ""
            raise GenerationError(f"{some} {len(found)} episodes of iteration {iteration} failed{rest}; {causes}")


def _transcript(latest: ModelExchange | None, turns: int) -> Transcript:
    """What is known of an episode that was given up after so many turns. `latest` is the last one that was asked."""
    if latest is None:
        return Transcript([], 0, 0)
    answers = [] if latest.answer is None else [latest.answer.message]
    calls = sum(message["role"] == "tool" for message in latest.messages)
    return Transcript([*latest.messages, *answers], turns, calls)


class _Playing(DrawingFollower):
    """The episodes of one iteration that are being played. `stored` reads a turn. `tail` has pairs (seconds since the
    epoch, episodes left)."""

    def __init__(
        self,
        samples: Sequence[Sample],
        play: Callable[[Sample, Draw], Coroutine[Any, Any, list[Sample]]],
        follower: DrawingFollower,
        stored: Callable[[Key], Sample],
    ) -> None:
        self._samples, self._play, self._follower, self._stored = samples, play, follower, stored
        self._tasks = set[asyncio.Task[list[Sample]]]()
        self._turns: dict[Key, asyncio.Future[Sample]] = {}
        self._error: BaseException | None = None
        self.tail: list[tuple[float, int]] = []

    def begun(self, drawing: Drawing) -> None:
        self._drawing = drawing
        for sample in self._samples:
            task = asyncio.create_task(self._play(sample, self._draw))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        self._note()

    async def close(self) -> None:
        """End the episodes that are still played."""
        await cancel(self._tasks)

    def waiting(self) -> int:
        return len(self._tasks) - len(self._turns)

    def finished(self, samples: Sequence[Finished]) -> None:
        for sample in samples:
            self._turns.pop(sample.key).set_result(self._stored(sample.key))

    def progress(self, done: int, total: int, tokens: int) -> None:
        if self._error is not None:
            raise self._error
        count = len(self._samples)
        self._follower.progress(count - len(self._tasks), count, tokens)

    def _draw(self, sample: Sample, limit: int) -> asyncio.Future[Sample]:
        found = self._turns[sample.key] = asyncio.get_running_loop().create_future()
        self._drawing.add(sample, limit)
        return found

    def _ended(self, task: asyncio.Task[list[Sample]]) -> None:
        self._tasks.discard(task)
        self._drawing.wake()
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._error = self._error or error
            return
        self._note()
        self._follower.finished([Finished(s.key, s.prompt_tokens, s.tokens) for s in task.result()])

    def _note(self) -> None:
        self.tail.append((time.time(), len(self._tasks)))
