"""Episodes that a generator draws on servers: what they wrote is what is trained, and each call has its effect once."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.data.text.chat_template import chat_format
from dovetail.coordinator.loop.iteration_report import iteration_metrics
from dovetail.coordinator.reporting.health import Rules, judge
from dovetail.coordinator.rewards.earned import earned
from dovetail.coordinator.samples.drawing import DrawingFollower
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import Generated, GenerationError
from dovetail.coordinator.samples.scoring import Finished
from dovetail.coordinator.samples.session_drawing import Episodes
from dovetail.coordinator.sessions.agent import AgentEpisode
from dovetail.coordinator.sessions.effects import Failed, MayBeMade, NotMade, ToolCall
from dovetail.coordinator.store.episodes import episode_facts
from dovetail.coordinator.store.experience_files import episode_arrays, experience_arrays
from dovetail.coordinator.store.samples import Assignment, Delta, Key, NewSample, Sample, ScoreRow, State
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet, Timeouts
from dovetail.manifest.training_types import Sessions
from dovetail.protocol.sampling import SEED
from dovetail.protocol.wire import LEARNT, OF_RESPONSE, pack, unpack
from helpers.chat_templates import byte_tokens, shipped, with_ends
from helpers.coordinated import NoWeights, drawn_with, job_of
from helpers.fake_vllm import TOKEN, FakeVllm, logprob_of
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

    def __init__(self, name: str, says: Any = said_by, **options: Any) -> None:
        super().__init__(name, **options)
        self.says = says

    def next_token(self, seed: int, tokens: list[int]) -> tuple[int, bool]:
        text = tokenizer().decode(tokens, skip_special_tokens=False)
        head, mark, turn = text.rpartition("<|im_start|>assistant\n")
        ids = tokenizer()(self.says(seed, head + mark))["input_ids"]
        written = len(tokenizer()(turn)["input_ids"]) if turn else 0
        return ids[written], written + 1 == len(ids)


class World:
    """What the tools work on. It outlives the coordinator, as a tool server does, and has a log of all effects."""

    def __init__(self, knows: bool = True) -> None:
        self.knows, self.effects, self.begun = knows, Counter[str](), 0
        self.answers: dict[str, str] = {}
        self.fails: set[tuple[int, int]] = set()
        self.open = 0


class Begun:
    def __init__(self, world: World, secret: int, sample: Key) -> None:
        self.world, self.secret, self.sample = world, secret, sample
        self.observation, self.tries, self.found = "Between 1 and 9.", 0, False
        world.open += 1

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

    async def begin(self, episode: str, record: Mapping[str, Any]) -> Begun:
        self.world.begun += 1
        return self.begins(self.world, record["secret"], Key(*map(int, episode.split("-")[:3])))


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
                    NewSample(p, s, [1, 2, 3], 100 * p + s, {"secret": 3 + p, "messages": asked})
                    for p in range(PROMPTS)
                    for s in range(EACH)
                ],
            )
            timeouts = Timeouts(suspect=1000, dead=2000, back_off=0.02, back_off_max=0.1, revive=0.1, max_failures=100)
            self.fleet = Fleet(time.monotonic, lambda event, **fields: None, timeouts)
            self.fleet.publish(1)
            spec = drawn_with(Generation.model_validate({"maxTokens": self.most, "maxConcurrent": 64}))
            spec = spec.model_copy(update={"ppo": spec.ppo.model_copy(update=self.ppo)})
            job = job_of(self.store, spec=spec, clock=time.monotonic)
            self.servers = [Model(f"r{n}", self.says, step=0.0) for n in range(2)]
            for server in self.servers:
                await server.start()
                server.join(self.fleet)
            prepared: Any = SimpleNamespace(
                tokenizer=self.tokenizer(),
                chat=chat_format(self.tokenizer()),
                spec=SimpleNamespace(data=SimpleNamespace(max_prompt_tokens=self.room)),
            )
            async with Generator(job, self.fleet, NoWeights(), TOKEN, settings=FAST) as generator:
                episodes = Episodes(job, self.sessions, prepared, self.environment(), generator)
                with episodes.open(1, 1) as turn:
                    work = asyncio.create_task(episodes.generate(turn, self.told))
                    while dies is not None and not work.done():
                        if dies(self):
                            work.cancel()
                        await asyncio.sleep(0)
                    async with asyncio.timeout(120):
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


@pytest.mark.slow
def test_what_the_model_wrote_is_learnt_and_nothing_else(tmp_path: Path) -> None:
    life = drawn(tmp_path, maxTurns=20)
    assert [s.key for s in life.found] == [Key(1, p, s) for p in range(PROMPTS) for s in range(EACH)]
    assert sorted(s.key for s in life.told.samples) == [s.key for s in life.found]
    assert life.world.open == 0
    for sample in life.found:
        ended = life.ended[sample.key]
        assert (sample.state, sample.finish_reason, ended.ending) == (State.GENERATED, "stop", "answered")
        seed, secret = sample.seed, sample.fields["secret"]
        guesses = [(seed + n) % 9 + 1 for n in range(ended.calls)]
        assert guesses[-1] == secret
        assert secret not in guesses[:-1]
        assert (ended.turns, ended.reward) == (len(guesses) + 1, pytest.approx(1 / len(guesses)))
        wrote = "".join([*map(call, guesses), f"I won.{END}"])
        assert tokenizer().decode(sample.tokens[ended.learnt == LEARNT]) == wrote
        logprobs = np.where(ended.learnt == LEARNT, [logprob_of(t) for t in sample.tokens.tolist()], 0.0)
        assert sample.logprobs.tolist() == logprobs.tolist()
        whole = tokenizer().decode([*sample.prompt_tokens, *sample.tokens])
        assert "Guess.\n\nBetween 1 and 9." in whole
        assert whole.count("<tool_response>") == len(guesses)
        assert (sample.first_version, sample.weight_version) == (1, 1)
    asked = [r for server in life.servers for r in server.requests]
    assert len(asked) == sum(ended.turns for ended in life.ended.values()), "each turn is drawn once"
    assert set(life.world.effects.values()) == {1}


@pytest.mark.slow
def test_a_coordinator_that_dies_changes_nothing(tmp_path: Path) -> None:
    whole = drawn(tmp_path / "whole", maxTurns=20)
    world, every = World(), sum(whole.world.effects.values())
    for effects in (1, 2, every // 3, every // 2, every - 1):
        life = Life(tmp_path / "killed", world, maxTurns=20)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(life.run(dies=lambda life, effects=effects: sum(life.world.effects.values()) >= effects))
    life = Life(tmp_path / "killed", world, maxTurns=20)
    asyncio.run(life.run())
    assert facts(life) == facts(whole)
    assert set(world.effects.values()) == {1}, "each call has its effect once"
    assert sorted(world.effects) == sorted(whole.world.effects)
    # Run again, it has nothing to do.
    before = world.begun
    again = Life(tmp_path / "killed", world, maxTurns=20)
    asyncio.run(again.run())
    assert (facts(again), world.begun, again.told.samples) == (facts(whole), before, [])


def thinks(seed: int, text: str) -> str:
    """As `said_by`, after a thought if the seed and the turn want one."""
    heard = text.count("</tool_response>")
    return ("I guess.</think>" if (seed + heard) % 3 else "") + said_by(seed, text)


@pytest.mark.slow
def test_a_template_that_forgets_begins_branches_and_nothing_is_encoded_again(tmp_path: Path) -> None:
    """Each turn after a thought is a branch. Deaths change nothing."""

    def life(folder: str, world: World) -> Life:
        made = Life(tmp_path / folder, world, thinks, maxTurns=20)
        made.tokenizer = forgetful
        return made

    whole = life("whole", World())
    asyncio.run(whole.run())
    wrote = Counter[tuple[int, ...]]()
    for sample in whole.found:
        ended = whole.ended[sample.key]
        thoughts = sum((sample.seed + turn) % 3 > 0 for turn in range(ended.turns - 1))
        assert ended.ending == "answered"
        assert len(ended.branches) == 1 + thoughts
        logprobs = np.where(ended.learnt == LEARNT, [logprob_of(t) for t in sample.tokens.tolist()], 0.0)
        assert sample.logprobs.tolist() == logprobs.tolist()
        for number, place in enumerate(ended.branches):
            prompt = sample.tokens[place.begin : place.answer] if number else sample.prompt_tokens
            assert "think" not in tokenizer().decode(prompt), "it is forgotten"
            ids = sample.tokens[place.answer : place.end]
            learnt = ended.learnt[place.answer : place.end] == LEARNT
            for turn in np.split(ids, np.flatnonzero(np.diff(learnt.astype(int))) + 1)[::2]:
                wrote[tuple(turn.tolist())] += 1
    asked = [r for server in whole.servers for r in server.requests]
    texts = [tokenizer().decode(r["token_ids"], skip_special_tokens=False) for r in asked]
    seeds = [r["sampling_params"]["extra_args"][SEED] for r in asked]
    sampled = Counter(tuple(tokenizer()(thinks(*each))["input_ids"]) for each in zip(seeds, texts, strict=True))
    assert wrote == sampled, "what the servers sampled is learnt, each token once"
    world, every = World(), sum(whole.world.effects.values())
    for effects in (1, every // 2, every - 1):
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(life("killed", world).run(dies=lambda life, n=effects: sum(life.world.effects.values()) >= n))
    killed = life("killed", world)
    asyncio.run(killed.run())
    assert facts(killed) == facts(whole)
    assert set(world.effects.values()) == {1}


class Gamblers:
    """Agents that play two games at once. `turned` is the order in which they ask."""

    tools = ()

    def __init__(self, turned: bool) -> None:
        self.turned, self.playing = turned, 0
        self.known: dict[str, AgentEpisode] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def begin(self, episode: str, record: Mapping[str, Any]) -> AgentEpisode:
        return AgentEpisode(partial(self._run, record), 1000.0, self.known)

    async def _run(self, record: Mapping[str, Any], key: str) -> None:
        self.playing += 1
        try:
            games = [partial(self._game, self.known[key], record["secret"], asked) for asked in ("Guess.", "Guess it.")]
            won = await asyncio.gather(*(game() for game in (games[::-1] if self.turned else games)))
            self.known[key].reward = float(sum(won))
        finally:
            self.playing -= 1

    async def _game(self, episode: AgentEpisode, secret: int, asked: str) -> float:
        messages: list[Any] = [{"role": "user", "content": asked}]
        for turn in count():
            exchange = await episode.ask(messages, TOOLS, None)
            assert exchange.answer is not None
            messages.append(exchange.answer.message)
            if "tool_calls" not in messages[-1]:
                return 1 / turn
            for made in messages[-1]["tool_calls"]:
                number = made["function"]["arguments"]["number"]
                told = "right" if number == secret else "higher" if number < secret else "lower"
                messages.append({"role": "tool", "content": told, "tool_call_id": made["id"]})
        raise AssertionError


@pytest.mark.slow
def test_an_agents_own_program_begins_anew_and_gets_what_was_stored(tmp_path: Path) -> None:
    """It asks in another order in each life. The coordinator's deaths change no token, and no turn is drawn twice."""
    agent, lives = {"command": ["a"]}, list[Gamblers]()

    def life(folder: str) -> Life:
        made = Life(tmp_path / folder, World(), maxTurns=40, agent=agent)
        lives.append(Gamblers(len(lives) % 2 == 1))
        made.environment = lambda: lives[-1]
        return made

    whole = life("whole")
    asyncio.run(whole.run())
    assert {ended.ending for ended in whole.ended.values()} == {"answered"}
    for sample in whole.found:
        ended = whole.ended[sample.key]
        guesses = [(sample.seed + n) % 9 + 1 for n in range(9)].index(sample.fields["secret"]) + 1
        assert (ended.turns, ended.calls) == (2 * guesses + 2, 2 * guesses)
        assert ended.reward == pytest.approx(2 / guesses)
        assert len(ended.branches) == 2
    every, asked = sum(ended.turns for ended in whole.ended.values()), 0
    for turns in (1, every // 4, every // 3):
        killed = life("killed")
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(killed.run(dies=lambda life, n=turns: sum(len(s.requests) for s in life.servers) >= n))
        asked += sum(len(server.requests) for server in killed.servers)
    killed = life("killed")
    asyncio.run(killed.run())
    asked += sum(len(server.requests) for server in killed.servers)
    assert facts(killed) == facts(whole)
    # A turn that was under way at a death is asked for again, with its tokens so far.
    assert every <= asked <= every + 3 * PROMPTS * EACH
    assert [each.playing for each in lives] == [0] * len(lives)


@pytest.mark.slow
def test_an_iteration_that_is_drawn_again_gives_its_calls_other_names(tmp_path: Path) -> None:
    """A server of tools would answer a name that it knows with what it answered before, and do nothing."""
    world, effects = World(), 0
    for _ in range(2):
        life = drawn(tmp_path, world, maxTurns=20)
        assert {ended.ending for ended in life.ended.values()} == {"answered"}
        assert set(world.effects.values()) == {1}
        effects += sum(ended.calls for ended in life.ended.values())
        assert len(world.effects) == effects
        store = Store(tmp_path)
        store.forget(1, [])
        store.close()


@pytest.mark.slow
def test_an_episode_is_given_up_where_nobody_knows_whether_a_call_was_made(tmp_path: Path) -> None:
    """The coordinator dies in the midst of a call, and the environment cannot say whether it was made."""
    world = World(knows=False)
    hangs = asyncio.Event()

    class Hangs(Begun):
        async def make(self, made: ToolCall) -> str:
            found = await super().make(made)
            if (self.sample.prompt, made.key.turn, made.key.attempt) == (1, 1, 0):
                hangs.set()
                await asyncio.Event().wait()
            return found

    life = Life(tmp_path, world, maxTurns=20, effects="AtMostOnce")
    life.begins = Hangs
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(life.run(dies=lambda _: hangs.is_set()))
    life = Life(tmp_path, world, maxTurns=20, effects="AtMostOnce")
    asyncio.run(life.run())
    assert set(world.effects.values()) == {1}, "no call has its effect twice"
    again = {Key(*map(int, key.split("-")[:3])) for key in world.effects if key.split("-")[3] == "1"}
    assert again & {Key(1, 1, 0), Key(1, 1, 1)}
    for sample in life.found:
        assert (life.ended[sample.key].ending, sample.attempt) == ("answered", int(sample.key in again))


@pytest.mark.slow
def test_an_episode_that_begins_otherwise_after_a_death_is_played_again(tmp_path: Path) -> None:
    world = World()

    class Random(Begun):
        def __init__(self, world: World, secret: int, sample: Key) -> None:
            super().__init__(world, secret, sample)
            self.observation = f"This is game {world.begun}."

    for dies in (lambda life: sum(life.world.effects.values()) >= 8, None):
        life = Life(tmp_path, world, maxTurns=20)
        life.begins = Random
        if dies is None:
            asyncio.run(life.run())
        else:
            with pytest.raises(asyncio.CancelledError):
                asyncio.run(life.run(dies=dies))
    assert {life.ended[s.key].ending for s in life.found} == {"answered"}
    assert {s.attempt for s in life.found} >= {1}
    for sample in life.found:
        text = tokenizer().decode([*sample.prompt_tokens, *sample.tokens])
        assert text.count("This is game") == 1
        assert text.count("<tool_response>") == life.ended[sample.key].calls


@pytest.mark.slow
def test_an_environment_is_told_of_the_end_when_that_is_stored(tmp_path: Path) -> None:
    """A server may then forget the episode. Until then a coordinator may come back to it."""
    world, told = World(), list[tuple[Key, State]]()
    world.fails = {(1, 1)}

    for dies in (lambda life: sum(life.world.effects.values()) >= 8, None):
        life = Life(tmp_path, world, maxTurns=20)

        class Noted(Begun):
            async def end(self) -> None:
                told.append((self.sample, life.store.samples.get(self.sample).state))  # noqa: B023

        life.begins = Noted
        if dies is None:
            asyncio.run(life.run())
        else:
            with pytest.raises(asyncio.CancelledError):
                asyncio.run(life.run(dies=dies))
            assert len(told) < PROMPTS * EACH
    assert sorted(told) == [
        (sample.key, State.SCORED if sample.key[1:] in world.fails else State.GENERATED) for sample in life.found
    ]


def scored(folder: Path, critic: bool) -> list[Sample]:
    store = Store(folder)
    try:
        for s in store.samples.samples(1, State.GENERATED):
            none = np.zeros(len(s.tokens), np.float32)
            store.samples.score([ScoreRow(s.key, none if critic else None, none if critic else None, 1.0)])
        return store.samples.experience(1)
    finally:
        store.close()


def test_an_episode_is_discarded_whose_next_turn_no_server_has_begun(tmp_path: Path) -> None:
    """The coordinator died then, and its successor finds that the environment has failed."""
    store, key = Store(tmp_path), Key(1, 0, 0)
    try:
        store.samples.begin_iteration(1, [NewSample(0, 0, [1, 2, 3], 7)])
        first = store.episodes.turn(key, 0, [1, 2, 3, 4], 7)
        (attempt,) = store.samples.assign([Assignment(first.key, "r0", "i", 5, 0)])
        assert store.samples.record([Delta(first.key, attempt, 0, [9], [-0.5], "stop")]) == [True]
        store.episodes.turn(key, 1, [1, 2, 3, 4, 9, 8], 7)
        store.episodes.discard(key, "environment failed", "the dice fell off the table")
        (found,) = store.samples.samples(1)
        assert (found.state, found.weight_version, found.instance) == (State.SCORED, 5, "r0")
    finally:
        store.close()


@pytest.mark.parametrize("critic", [False, True])
def test_what_the_environment_fails_is_in_no_baseline(tmp_path: Path, critic: bool) -> None:
    world = World()
    world.fails = {(0, 1), (1, 0), (1, 1)}
    life = drawn(tmp_path, world, maxTurns=20)
    assert world.open == 0
    failed = [key for key, ended in life.ended.items() if ended.discarded]
    assert [(key.prompt, key.sample) for key in failed] == sorted(world.fails)
    for key in failed:
        assert (life.ended[key].ending, life.ended[key].why) == ("environment failed", "the dice fell off the table")
    assert sorted(s.key for s in life.told.samples) == [s.key for s in life.found if s.key not in failed]
    samples = scored(tmp_path, critic)
    arrays = experience_arrays(samples, 0)
    arrays |= episode_arrays(samples, life.ended, compares=True)
    read = {name: table.shape for name, table in unpack(pack(arrays)).items()}
    assert {"values", "ref_logprobs"} & set(read) == ({"values", "ref_logprobs"} if critic else set())
    assert len({read[name] for name in read if name in OF_RESPONSE}) == 1
    # The prompt 0 has one episode left, to which nothing can be compared, and 1 has none.
    assert arrays["learnt"].any(axis=1).tolist() == [False, False, False, False, True, True]
    assert arrays["groups"].tolist() == [0, -2, -3, -4, 2, 2]
    # Nor is it in any figure of the iteration.
    told = iteration_metrics(arrays, {})
    assert (told["reward"], told["reward_min"], told["finished_fraction"], told["samples"]) == (1.0, 1.0, 1.0, 6.0)
    facts = episode_facts(life.ended, compares=True)
    assert facts["episodes_discarded"] == facts["discarded/environment_failed"] == pytest.approx(1 / 2)
    assert facts["groups_dropped"] == pytest.approx(2 / 3)
    assert facts["episode_turns"] == facts["episode_calls"] + 1
    (verdict,) = judge(facts, {}, {}, Rules())
    assert verdict.reason == "EpisodesDiscarded"
    assert "50% of the episodes are not trained (environment failed 50%;" in verdict.message
    alone = episode_arrays(samples, life.ended, compares=False)
    assert alone["learnt"].any(axis=1).tolist() == [True, False, False, False, True, True]


def test_an_iteration_of_failures_ends_the_job_with_their_cause(tmp_path: Path) -> None:
    world = World()
    world.fails = {(p, s) for p in range(PROMPTS) for s in range(EACH)}
    with pytest.raises(GenerationError, match=r"^all 6 episodes of iteration 1 failed; environment failed: the dice"):
        drawn(tmp_path, world)


def test_an_iteration_without_two_episodes_to_compare_ends_the_job_too(tmp_path: Path) -> None:
    world = World()
    world.fails = {(p, 0) for p in range(PROMPTS)}
    life = Life(tmp_path, world)
    life.ppo = {"advantage": "grpo"}
    says = r"^3 of 6 episodes of iteration 1 failed, and no prompt has two others to compare; environment failed: the"
    with pytest.raises(GenerationError, match=says):
        asyncio.run(life.run())


@pytest.mark.parametrize("failure", ["Zero", "Discard"])
@pytest.mark.parametrize(
    ("says", "sessions", "ending"),
    [
        (lambda seed, text: call(1), {"maxTurns": 2}, "turns"),
        (lambda seed, text: f"<tool_call>\nguess{END}", {"maxTurns": 20}, "wrong call"),
        (lambda seed, text: "I think that " * 20 + END, {"maxTurns": 20, "maxTokens": 90}, "cut"),
    ],
    ids=["turns", "wrong call", "cut"],
)
def test_what_the_model_fails_earns_nothing_or_is_discarded(
    tmp_path: Path, says: Any, sessions: dict[str, Any], ending: str, failure: str
) -> None:
    def mixed(seed: int, text: str) -> str:
        return says(seed, text) if seed % 100 else f"I do not know.{END}"

    life = drawn(tmp_path, says=mixed, onFailure=failure, **sessions)
    for sample in life.found:
        ended = life.ended[sample.key]
        if sample.key.sample == 0:
            assert (ended.ending, ended.discarded, ended.reward) == ("answered", False, 0.0)
        else:
            assert (ended.ending, ended.discarded) == (ending, failure == "Discard")
            assert sample.finish_reason == ("length" if failure == "Zero" else "discarded")
            assert len(sample.tokens) == 0 if ended.discarded else ended.reward == 0.0


@pytest.mark.slow
def test_all_that_follows_the_prompt_is_within_the_limit(tmp_path: Path) -> None:
    life = drawn(tmp_path, most=300, maxTurns=20)
    lengths = {s.key: len(s.tokens) for s in life.found}
    assert max(lengths.values()) <= 300
    cut = {key for key, ended in life.ended.items() if ended.ending == "cut"}
    assert cut
    assert {lengths[key] for key in cut} <= set(range(100, 301))


def test_a_prompt_beyond_its_limit_is_named(tmp_path: Path) -> None:
    life = Life(tmp_path, World())
    life.room = 64
    with pytest.raises(GenerationError, match=r"begins with \d+ tokens, but spec.data.maxPromptTokens is 64; raise it"):
        asyncio.run(life.run())


def test_a_job_may_take_what_the_environment_says_as_its_reward() -> None:
    fields = {"messages": [[], []], "ending": ["answered", "turns"], "secret": [3, 4]}
    assert earned(["p", "p"], ["r", "s"], earned=[0.5, 0.0], **fields) == [0.5, 0.0]
    with pytest.raises(ValueError, match="give the environment's class a method get_reward"):
        earned(["p", "p"], ["r", "s"], earned=[0.5, None], **fields)
