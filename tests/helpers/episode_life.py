"""A coordinator's life in which it draws episodes on servers whose model guesses numbers. The world outlives it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dovetail.coordinator.data.text.chat_template import chat_format
from dovetail.coordinator.samples.drawing import DrawingFollower
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import Generated
from dovetail.coordinator.samples.scoring import Finished
from dovetail.coordinator.samples.session_drawing import Episodes
from dovetail.coordinator.sessions.effects import Failed, MayBeMade, NotMade, ToolCall
from dovetail.coordinator.store.samples import Key, NewSample
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet, Timeouts
from dovetail.manifest.training_types import Sessions
from helpers.chat_templates import byte_tokens, shipped, with_ends
from helpers.coordinated import NoWeights, drawn_with, job_of
from helpers.fake_vllm import TOKEN, FakeVllm
from helpers.generation_job import FAST, Generation

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the number.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    }
]
END = "<|im_end|>"


@cache
def tokenizer() -> Any:
    return with_ends(byte_tokens(), shipped()["trl: qwen2_5"][0])


@cache
def forgetful() -> Any:
    """The same, with a template that leaves out what the model thought as soon as something follows."""
    template, writes = shipped()["trl: qwen2_5"][0], "'\\n' + message.content }}"
    forgets = "'\\n' + (message.content if loop.last else message.content.split('</think>')[-1]) }}"
    assert writes in template
    return with_ends(byte_tokens(), template.replace(writes, forgets))


def call(number: object) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {json.dumps(number)}}}}}\n</tool_call>{END}'


def said_by(seed: int, text: str) -> str:
    """What the model says next: it guesses, in its own order, until it hears that it was right."""
    heard = text.count("</tool_response>")
    if text.rstrip().endswith("right\n</tool_response><|im_end|>\n<|im_start|>assistant"):
        return f"I won.{END}"
    return call((seed + heard) % 9 + 1)


class Model(FakeVllm):
    """A server whose model says what `said_by` says. It keeps what it wrote, by its prompt."""

    def __init__(self, name: str, says: Any = said_by, tokens: Any = tokenizer, **options: Any) -> None:
        super().__init__(name, **options)
        self.says, self.tokens = says, tokens()
        # What it is about to say, by the seed and the tokens so far, with the number of ids that it has said.
        self._saying: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def next_token(self, seed: int, tokens: list[int]) -> tuple[int, bool]:
        ids, written = self._saying.pop((seed, *tokens), None) or self.turn(seed, tokens)
        self._saying[seed, *tokens, ids[written]] = ids, written + 1
        return ids[written], written + 1 == len(ids)

    def turn(self, seed: int, tokens: list[int]) -> tuple[list[int], int]:
        """The ids of the whole turn, and how many of them `tokens` end with."""
        text = self.tokens.decode(tokens, skip_special_tokens=False)
        head, mark, turn = text.rpartition("<|im_start|>assistant\n")
        ids = self.tokens(self.says(seed, head + mark))["input_ids"]
        return ids, len(self.tokens(turn)["input_ids"]) if turn else 0


class World:
    """What the tools work on. It outlives the coordinator, as a tool server does, and has a log of all effects."""

    def __init__(self, knows: bool = True) -> None:
        self.knows, self.effects, self.begun = knows, Counter[str](), 0
        self.answers: dict[str, str] = {}
        self.fails: set[tuple[int, int]] = set()
        self.open = self.most_open = 0


class Begun:
    def __init__(self, world: World, secret: int, sample: Key) -> None:
        self.world, self.secret, self.sample = world, secret, sample
        self.observation, self.tries, self.found = "Between 1 and 9.", 0, False
        world.open += 1
        world.most_open = max(world.most_open, world.open)

    async def make(self, made: ToolCall) -> str:
        await asyncio.sleep(0)
        if (self.sample.prompt, self.sample.sample) in self.world.fails:
            raise Failed("the dice fell off the table")
        self.world.effects[str(made.key)] += 1
        return self._answer(made)

    def _answer(self, made: ToolCall) -> str:
        number = made.arguments["number"]
        self.tries += 1
        self.found = number == self.secret
        found = "right" if self.found else "higher" if number < self.secret else "lower"
        return self.world.answers.setdefault(str(made.key), found)

    async def recall(self, made: ToolCall) -> str:
        if not self.world.knows:
            raise MayBeMade
        if str(made.key) not in self.world.answers:
            raise NotMade
        return self._answer(made)

    async def restore(self, made: ToolCall, observation: str) -> None:
        self._answer(made)

    async def reward(self) -> float | None:
        return 1.0 / self.tries if self.found else 0.0

    async def end(self) -> None:
        self.world.open -= 1


class Games:
    """An environment of numbers to be guessed."""

    tools = TOOLS

    def __init__(self, world: World, begins: type[Begun]) -> None:
        self.world, self.begins = world, begins

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def begin(self, episode: str, asked: Any, fields: Mapping[str, Any]) -> Begun:
        self.world.begun += 1
        return self.begins(self.world, fields["secret"], Key(*map(int, episode.split("-")[:3])))


class Told(DrawingFollower):
    def __init__(self) -> None:
        self.samples: list[Finished] = []

    def finished(self, samples: Sequence[Finished]) -> None:
        self.samples += samples


PROMPTS, EACH = 3, 2


class Life:
    """A coordinator's life with two servers, over a store that stays."""

    def __init__(self, folder: Path, world: World, says: Any = said_by, most: int = 4096, **sessions: Any) -> None:
        self.folder, self.world, self.says, self.most = folder, world, says, most
        self.prompts, self.each, self.slots, self.step = PROMPTS, EACH, 64, 0.0
        self.seconds, self.settings = 120.0, FAST
        played = {} if "agent" in sessions else {"environment": {"function": "m:C"}}
        self.sessions = Sessions.model_validate({**played, **sessions})
        self.servers: list[Model] = []
        self.told = Told()
        self.begins, self.room = Begun, 1024
        self.environment: Any = lambda: Games(self.world, self.begins)
        self.ppo: dict[str, Any] = {}
        self.tokenizer = tokenizer

    async def run(self, dies: Any = None) -> Generated:
        """Draw the iteration. It ends with CancelledError when `dies(self)` is true."""
        self.store = Store(self.folder)
        try:
            asked = [{"role": "user", "content": "Guess."}]
            self.store.samples.begin_iteration(
                1,
                [
                    NewSample(p, s, [1, 2, 3], 100 * p + s, {"secret": 3 + p % 7, "messages": asked})
                    for p in range(self.prompts)
                    for s in range(self.each)
                ],
            )
            timeouts = Timeouts(suspect=1e7, dead=2e7, back_off=0.02, back_off_max=0.1, revive=0.1, max_failures=100)
            clock = asyncio.get_running_loop().time
            self.fleet = Fleet(clock, lambda event, **fields: None, timeouts)
            self.fleet.publish(1)
            spec = drawn_with(Generation.model_validate({"maxTokens": self.most, "maxConcurrent": self.slots}))
            spec = spec.model_copy(update={"ppo": spec.ppo.model_copy(update=self.ppo)})
            job = job_of(self.store, spec=spec, clock=clock)
            self.servers = [Model(f"r{n}", self.says, self.tokenizer, step=self.step) for n in range(2)]
            for server in self.servers:
                await server.start()
                server.join(self.fleet)
            prepared: Any = SimpleNamespace(
                tokenizer=self.tokenizer(),
                chat=chat_format(self.tokenizer()),
                spec=SimpleNamespace(data=SimpleNamespace(max_prompt_tokens=self.room)),
            )
            async with Generator(job, self.fleet, NoWeights(), TOKEN, settings=self.settings) as generator:
                episodes = Episodes(job, self.sessions, prepared, self.environment(), generator)
                with episodes.open(1, 1) as turn:
                    work = asyncio.create_task(episodes.generate(turn, self.told))
                    while dies is not None and not work.done():
                        if dies(self):
                            work.cancel()
                        await asyncio.sleep(0)
                    async with asyncio.timeout(self.seconds):
                        return await work
        finally:
            for server in self.servers:
                await server.stop()
            self.found = self.store.samples.samples(1)
            self.ended = self.store.episodes.of(1)
            self.store.close()


def drawn(folder: Path, world: World | None = None, **options: Any) -> Life:
    life = Life(folder, world or World(), **options)
    asyncio.run(life.run())
    return life


def facts(life: Life) -> list[Any]:
    return [
        (
            *(s.key, s.state, s.prompt_tokens.tolist(), s.tokens.tolist(), s.logprobs.tolist(), s.finish_reason),
            *(life.ended[s.key].ending, life.ended[s.key].reward, life.ended[s.key].learnt.tolist()),
        )
        for s in life.found
    ]


def thinks(seed: int, text: str) -> str:
    """As `said_by`, after a thought if the seed and the turn want one."""
    heard = text.count("</tool_response>")
    return ("I guess.</think>" if (seed + heard) % 3 else "") + said_by(seed, text)
