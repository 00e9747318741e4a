"""Plays a stored episode again, offline. No environment and no agent is asked, because the store has what they said.

A turn's tokens are a function of the weights, the prompt's ids and the sample's seed. So a server with the weights of
the episode draws them again. If they are not those of the run, something else had an influence."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.prepare import texts_of_run
from dovetail.coordinator.sessions.agent import AgentPlayer
from dovetail.coordinator.sessions.bridge import Bridge
from dovetail.coordinator.sessions.episode import Episode, StoredRequest, joined
from dovetail.coordinator.sessions.play import SampledTurn
from dovetail.coordinator.store.database import ReadOnlyDatabase, StoreError
from dovetail.coordinator.store.episodes import EpisodeTable, StoredEpisode
from dovetail.coordinator.store.samples import Key, Sample, SampleTable
from dovetail.coordinator.workers.offers import ReceiverError, post
from dovetail.gpus.kernel_check import my_capability
from dovetail.gpus.kernels import serving_dtype
from dovetail.manifest.types import RLHFJobSpec, Role
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.http.client_session import client_session
from dovetail.protocol.sampling import COUNTER_SAMPLER, Sampler, sampling_params
from dovetail.protocol.wire import LEARNT
from dovetail.tools.checkpoint_export import policy, read_job
from dovetail.tools.serving.served_result import own_server

TURN_SECONDS = 3600.0

# Draws the answer to a prompt of token ids, of at most so many tokens.
Draw = Callable[[list[int], int], Awaitable[SampledTurn]]


class KeptEpisode(NamedTuple):
    """An episode that was trained, its sample, and what its turns were asked with."""

    sample: Sample
    episode: StoredEpisode
    requests: Sequence[StoredRequest]


def kept_episode(run_dir: Path, key: Key) -> KeptEpisode:
    """The episode of a run, which may be at work. Raises UsageError if it cannot be played again."""
    which = f"episode {key.prompt}/{key.sample} of iteration {key.iteration}"
    try:
        database = ReadOnlyDatabase(run_dir / "store.sqlite")
        samples = SampleTable(database)
        table = EpisodeTable(database, samples)
        found, requests = table.get(key), table.requests(key)
        if found is None:
            raise UsageError(
                f"{run_dir} has no {which}. A run keeps the episodes since its oldest checkpoint; a higher "
                "spec.checkpoint.keep keeps more"
            )
        if found.discarded:
            why = f"{found.ending}: {found.why}".removesuffix(": ")
            raise UsageError(f"{which} was discarded ({why}), so its tokens are not kept; name another one")
        if not requests:
            raise UsageError(f"{which} was drawn by a release that did not keep what its turns were asked with")
        return KeptEpisode(samples.get(key), found, requests)
    except StoreError as error:
        raise UsageError(str(error)) from error


def replay_episode(run_dir: Path, kept: KeptEpisode, log: Path, tell: Callable[[str], None]) -> None:
    """Play an episode again with a vLLM server on this machine, whose output goes to `log`. `tell` gets a line for each
    turn. The run directory is not changed. Raises RunError with the first thing that differs, and UsageError if the run
    does not keep the weights that drew the episode."""
    spec, version, capability = read_job(run_dir).spec, kept.sample.weight_version, my_capability()
    assert version is not None
    on_cpu = capability is None
    group = next(group for group in spec.groups if Role.ROLLOUT in group.roles)
    given = ["--generation-config", "vllm", "--tokenizer", str(run_dir / "tokenizer"), "--enable-scale-out"]
    given += ["--dtype", serving_dtype(group.dtype, spec.models.actor.dtype, capability).value]
    given += ["--logits-processors", COUNTER_SAMPLER] if on_cpu else []
    invariant = {"VLLM_BATCH_INVARIANT": "1"} if spec.generation.batch_invariant and not on_cpu else {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            tokenizer, chat = texts_of_run(spec, run_dir)
            folder = policy(run_dir, version, Path(scratch))
        except DataError as error:
            raise RunError(str(error)) from error
        player = AgentPlayer.of(Bridge(chat, tokenizer), tokenizer, chat, len(kept.requests))
        server = own_server(folder, "actor", on_cpu, log, tell, [*given, *group.vllm_args], invariant)
        with server as (url, key):
            asyncio.run(_played_with(_Server(url, key, spec, on_cpu), kept, player, tell))


class _Server(NamedTuple):
    url: str
    key: str
    spec: RLHFJobSpec
    on_cpu: bool


async def _played_with(server: _Server, kept: KeptEpisode, player: AgentPlayer, tell: Callable[[str], None]) -> None:
    sampler: Sampler = "counter" if server.on_cpu else "native"
    async with client_session(headers={"Authorization": f"Bearer {server.key}"}) as session:

        async def draw(prompt: list[int], most: int) -> SampledTurn:
            params = sampling_params(server.spec.generation, kept.sample.seed, most, sampler)
            body = {"model": "actor", "token_ids": prompt, "sampling_params": params}
            try:
                answer = await post(session, f"{server.url}/inference/v1/generate", TURN_SECONDS, body)
            except ReceiverError as error:
                raise RunError(f"vLLM failed: {error}") from error
            (choice,) = answer["choices"]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            return SampledTurn(choice["token_ids"], logprobs, choice["finish_reason"] == "stop")

        await play_again(kept, player, draw, tell)


async def play_again(kept: KeptEpisode, player: AgentPlayer, draw: Draw, tell: Callable[[str], None]) -> None:
    """Ask for each turn as the environment or the agent did, draw it with `draw`, and compare prompts, sampled tokens
    and the whole sample with what is stored. Raises RunError with the first difference."""
    episode, branches = Episode(player.bridge), _branches(kept)
    for number, request in enumerate(kept.requests):
        exchange = episode.ask_again(request)
        asked = exchange.prompt
        then = _answer(number, asked, branches)[: request["written"]]
        drawn = await draw(asked, len(then))
        if list(drawn.tokens) != then:
            at = _common(drawn.tokens, then)
            now, before = _shown(drawn.tokens, at), _shown(then, at)
            raise RunError(f"turn {number}: token {at} is {now} drawn again, and {before} in the run")
        answer, _ = player.read(number, exchange, drawn, request.get("stops", ()))
        episode.answer(exchange, answer)
        branch = " of a new branch" if exchange.before is None and number else ""
        tell(
            f"turn {number}: {len(asked)} tokens of its prompt{branch} and {len(then)} drawn again are those of the run"
        )
    made, sample = joined(episode.branches()), kept.sample
    same = {
        "prompt": np.array_equal(made.prompt, sample.prompt_tokens),
        "response": np.array_equal(made.response, sample.tokens),
        "mask": np.array_equal(made.marks, kept.episode.learnt),
    }
    for what, equal in same.items():
        if not equal:
            raise RunError(f"all turns are those of the run, but the {what} that was trained is not what they make")


def _branches(kept: KeptEpisode) -> list[tuple[list[int], list[int]]]:
    """The token ids of each branch, and their marks (`protocol.wire.LEARNT`)."""
    prompt = kept.sample.prompt_tokens.tolist()
    tokens, marks = [*prompt, *kept.sample.tokens.tolist()], [*([0] * len(prompt)), *kept.episode.learnt.tolist()]
    places = [
        slice(each.begin + len(prompt) if each.begin else 0, each.end + len(prompt)) for each in kept.episode.branches
    ]
    return [(tokens[place], marks[place]) for place in places]


def _answer(number: int, prompt: list[int], branches: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    """What follows a prompt in the branch that learns it. Raises RunError if none has this prompt."""
    end = len(prompt)
    for tokens, marks in branches:
        if tokens[:end] == prompt and marks[end : end + 1] == [LEARNT]:
            return tokens[end:]
    then = max((tokens for tokens, _ in branches), key=lambda tokens: _common(prompt, tokens))
    at = _common(prompt, then)
    raise RunError(
        f"turn {number}: token {at} of the prompt is {_shown(prompt, at)} made again, and {_shown(then, at)} in the run"
    )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _shown(tokens: Sequence[int], at: int) -> str:
    return str(tokens[at]) if at < len(tokens) else "missing"
