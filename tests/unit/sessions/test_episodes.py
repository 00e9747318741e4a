"""Episodes that a generator draws on servers: what they wrote is what is trained, and each call has its effect once."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.loop.iteration_report import iteration_metrics
from dovetail.coordinator.reporting.health import Rules, judge
from dovetail.coordinator.rewards.earned import earned
from dovetail.coordinator.samples import session_drawing
from dovetail.coordinator.samples.in_flight import GenerationError
from dovetail.coordinator.sessions.agent import AgentEpisode, Until
from dovetail.coordinator.sessions.effects import ToolCall
from dovetail.coordinator.store.episodes import Transcript, episode_facts
from dovetail.coordinator.store.experience_files import episode_arrays, experience_arrays
from dovetail.coordinator.store.samples import Assignment, Delta, Key, NewSample, Sample, ScoreRow, State
from dovetail.coordinator.store.store import Store
from dovetail.protocol.sampling import SEED
from dovetail.protocol.wire import LEARNT, OF_RESPONSE, pack, unpack
from helpers.episode_life import (
    EACH,
    END,
    PROMPTS,
    TOOLS,
    Begun,
    Life,
    World,
    call,
    drawn,
    facts,
    forgetful,
    thinks,
    tokenizer,
)
from helpers.fake_vllm import logprob_of


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


@pytest.mark.slow
def test_episodes_that_wait_for_a_place_are_the_same(tmp_path: Path) -> None:
    whole = drawn(tmp_path / "whole", maxTurns=20)
    assert whole.world.most_open == PROMPTS * EACH
    few = drawn(tmp_path / "few", maxTurns=20, maxConcurrent=2)
    assert few.world.most_open == 2
    assert facts(few) == facts(whole)


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
        self.turned, self.playing, self.most = turned, 0, 0
        self.known: dict[str, AgentEpisode] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def begin(self, episode: str, asked: Any, fields: Mapping[str, Any]) -> AgentEpisode:
        return AgentEpisode(partial(self._run, fields), 1000.0, self.known)

    async def _run(self, record: Mapping[str, Any], key: str) -> None:
        self.playing += 1
        self.most = max(self.most, self.playing)
        try:
            games = [partial(self._game, self.known[key], record["secret"], asked) for asked in ("Guess.", "Guess it.")]
            won = await asyncio.gather(*(game() for game in (games[::-1] if self.turned else games)))
            self.known[key].reward = float(sum(won))
        finally:
            self.playing -= 1

    async def _game(self, episode: AgentEpisode, secret: int, asked: str) -> float:
        messages: list[Any] = [{"role": "user", "content": asked}]
        for turn in count():
            exchange = await episode.ask(messages, TOOLS, Until())
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
def test_a_machine_with_few_cores_gets_few_agents_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(session_drawing, "AGENTS_PER_CORE", 2)
    life, agents = Life(tmp_path, World(), maxTurns=40, agent={"command": ["a"]}), Gamblers(False)
    life.environment = lambda: agents
    asyncio.run(life.run())
    assert agents.most == 4 < PROMPTS * EACH
    assert {ended.ending for ended in life.ended.values()} == {"answered"}


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
        transcript = Transcript([{"role": "user", "content": "Guess."}], 1, 0)
        store.episodes.discard(key, "environment failed", "the dice fell off the table", transcript)
        assert [(each.kept, each.lost) for each in store.episodes.asked(1)] == [(0, 1)]
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


def test_an_episode_that_begins_with_too_much_is_discarded_and_named(tmp_path: Path) -> None:
    """The others are trained."""

    class Talks(Begun):
        def __init__(self, world: World, secret: int, sample: Key) -> None:
            super().__init__(world, secret, sample)
            self.observation *= 1 + 99 * (sample.prompt == 1)

    life = Life(tmp_path, World(), maxTurns=20)
    life.begins, life.room = Talks, 800
    asyncio.run(life.run())
    assert [key.prompt for key, ended in life.ended.items() if ended.discarded] == [1] * EACH
    ended = life.ended[Key(1, 1, 0)]
    assert ended.ending == "environment failed"
    assert ended.why.startswith("the episode begins with ")
    assert "tokens, but spec.data.maxPromptTokens is 800; raise it" in ended.why
    assert life.world.open == 0


def test_a_job_may_take_what_the_environment_says_as_its_reward() -> None:
    fields = {"messages": [[], []], "ending": ["answered", "turns"], "secret": [3, 4]}
    assert earned(["p", "p"], ["r", "s"], earned=[0.5, 0.0], **fields) == [0.5, 0.0]
    with pytest.raises(ValueError, match="give the environment's class a method get_reward"):
        earned(["p", "p"], ["r", "s"], earned=[0.5, None], **fields)
