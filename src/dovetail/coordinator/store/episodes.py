"""The episodes of samples. While an episode is played, each turn of the model is a sample of its own, whose prompt is
all that came before. When it has ended, the sample has the whole episode, and its turns are deleted."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.store.database import Database, StoreError
from dovetail.coordinator.store.samples import WHERE, Key, Sample, SampleTable, State
from dovetail.protocol.wire import BRANCH, LEARNT

# An episode has at most so many turns (`spec.sessions.maxTurns`).
MOST_TURNS = 1000
# The finish reason of a sample that is not trained.
DISCARDED = "discarded"


@dataclass(frozen=True)
class EndedEpisode:
    """How an episode ended. `prompt` (P,) and `response` (R,) are its token ids, `logprobs` (R,) float32 in nats, and
    `learnt` (R,) uint8 says what of the response is learnt (`protocol.wire.LEARNT`). `finished` says whether
    it ended by itself. `ending` says in a word or two why it ended, and `why` in a sentence what was wrong. `reward` is
    the environment's, if it gave one. `turns` and `calls` count the model's turns and calls. `requests` says, as JSON,
    what the turns were asked with (`sessions.episode.StoredRequest`)."""

    prompt: Sequence[int] | NDArray[np.int32]
    response: Sequence[int] | NDArray[np.int32]
    logprobs: Sequence[float] | NDArray[np.float32]
    learnt: NDArray[np.uint8]
    finished: bool
    ending: str
    why: str
    reward: float | None
    messages: Sequence[Mapping[str, Any]]
    turns: int
    calls: int
    requests: Sequence[Mapping[str, Any]] = ()


class BranchPlace(NamedTuple):
    """A branch in a response. It has the tokens from `begin` to `end`. Those before `answer` are its prompt."""

    begin: int
    answer: int
    end: int


class AskedEpisode(NamedTuple):
    """The prompt that an ended episode was begun with, by its position and its token ids, and why the episode ended.
    The model wrote `kept` tokens in it, and `lost` ones in attempts that are not trained."""

    prompt: int
    tokens: NDArray[np.int32]
    ending: str
    kept: int
    lost: int


class Transcript(NamedTuple):
    """What is known of an episode: its messages, and the numbers of the model's turns and of answered calls."""

    messages: Sequence[Mapping[str, Any]]
    turns: int
    calls: int


@dataclass(frozen=True)
class StoredEpisode:
    """What is told of an ended episode, as `EndedEpisode` describes it. `discarded` says that it is not trained."""

    ending: str
    why: str
    reward: float | None
    messages: list[dict[str, Any]]
    turns: int
    calls: int
    learnt: NDArray[np.uint8]
    discarded: bool

    @property
    def branches(self) -> list[BranchPlace]:
        """Where the branches are in the response. The first one goes on after the sample's prompt."""
        begins = [0, *np.flatnonzero(self.learnt == BRANCH).tolist(), len(self.learnt)]
        return [
            BranchPlace(begin, begin + int((self.learnt[begin:end] == LEARNT).argmax()) if begin else 0, end)
            for begin, end in pairwise(begins)
        ]


def told_of(episode: StoredEpisode) -> dict[str, Any]:
    """What a row of a samples file says of an episode, for JSON. `tokens` says what the response is made of, in order:
    each number of tokens is "learnt", "told" or, for the prompt of a further branch, "asked anew"."""
    names = ("ending", "why", "reward", "messages", "turns", "calls", "discarded")
    kinds = np.where(episode.learnt == LEARNT, "learnt", "told").astype(object)
    for place in episode.branches[1:]:
        kinds[place.begin : place.answer] = "asked anew"
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return {name: getattr(episode, name) for name in names} | {"tokens": runs}


def episode_facts(episodes: Mapping[Key, StoredEpisode], compares: bool) -> dict[str, float]:
    """The metrics of an iteration's episodes. {} without any. `discarded/<ending>` is the share of all episodes that
    were discarded for this reason. `compares` says that the advantage compares the samples of a prompt."""
    if not episodes:
        return {}
    everyone, kept = len(episodes), [each for each in episodes.values() if not each.discarded]
    causes = Counter(each.ending.replace(" ", "_") for each in episodes.values() if each.discarded)
    left = Counter(key.prompt for key, each in episodes.items() if not each.discarded)
    prompts = {key.prompt for key in episodes}
    return {
        "episode_turns": sum(each.turns for each in kept) / max(1, len(kept)),
        "episode_calls": sum(each.calls for each in kept) / max(1, len(kept)),
        "episode_branches": sum(len(each.branches) for each in kept) / max(1, len(kept)),
        "episodes_discarded": 1.0 - len(kept) / everyone,
        "groups_dropped": sum(left[prompt] < (2 if compares else 1) for prompt in prompts) / len(prompts),
        **{f"discarded/{cause}": count / everyone for cause, count in sorted(causes.items())},
    }


def part_of(key: Key, number: int) -> Key:
    """The key of a turn of the episode of the sample `key`, or of a branch when it has ended. Both count from 0."""
    return key._replace(sample=-1 - MOST_TURNS * key.sample - number)


class EpisodeTable:
    """The table of episodes. Each method is one transaction and raises StoreError."""

    def __init__(self, database: Database, samples: SampleTable) -> None:
        self._db, self._samples = database, samples

    def branches(self, key: Key) -> list[BranchPlace]:
        """`StoredEpisode.branches` of an episode that has ended."""
        found = self.get(key)
        return [] if found is None else found.branches

    def turn(self, key: Key, turn: int, prompt: Sequence[int], seed: int) -> Sample:
        """The sample that is a turn of the model in the episode of the sample `key`. It is stored as pending if it is
        new. If it is not, it may have been begun with another prompt."""
        return self._samples.begin_turn(part_of(key, turn), prompt, seed)

    def number_of(self, key: Key, prompt: Sequence[int]) -> int:
        """The turn in the episode of the sample `key` that has this prompt, or the next one if none has. There may be
        no place left for that (MOST_TURNS)."""
        with self._db.reading() as db:
            turns = "FROM samples WHERE iteration=? AND prompt_index=? AND sample_index BETWEEN ? AND ?"
            asked = (*self._turns_of(key), np.asarray(prompt, "<i4").tobytes())
            found = db.execute(f"SELECT MAX(sample_index) {turns} AND prompt=?", asked).fetchone()[0]
            last = db.execute(f"SELECT MIN(sample_index) {turns}", asked[:-1]).fetchone()[0]
        first = part_of(key, 0).sample
        return int(first - found if found is not None else 0 if last is None else first - last + 1)

    def again(self, key: Key) -> None:
        """Give an episode up, and begin another attempt at it."""
        with self._db.transaction() as db:
            db.execute(f"UPDATE samples SET attempt=attempt+1 WHERE {WHERE}", key)
            self._lose_turns(key)

    def end(self, key: Key, found: EndedEpisode) -> None:
        """Store an episode as its sample, which is then generated. Its turns are deleted. Raises StoreError if these
        were not all drawn with one version of the weights."""
        reason = "stop" if found.finished else "length"
        self._end(key, State.GENERATED, reason, found)

    def discard(self, key: Key, ending: str, why: str, transcript: Transcript) -> None:
        """Store that the episode of a sample is not trained. The sample then counts as scored, without a token."""
        none = np.zeros(0, np.uint8)
        found = EndedEpisode([], [], [], none, False, ending, why, None, *transcript)
        self._end(key, State.SCORED, DISCARDED, found)

    def _end(self, key: Key, state: State, reason: str, found: EndedEpisode) -> None:
        empty = b"" if state is State.SCORED else None
        with self._db.transaction() as db:
            versions = db.execute(
                "SELECT DISTINCT first_version, weight_version, instance FROM samples WHERE iteration=? AND "
                "prompt_index=? AND sample_index BETWEEN ? AND ?",
                self._turns_of(key),
            ).fetchall()
            # A turn that no server has begun yet has no version.
            drawn = {version for row in versions for version in row[:2] if version is not None}
            if len(drawn) > 1:
                raise StoreError(f"the turns of the episode of {key} were drawn with the weight versions {drawn}")
            version = drawn.pop() if drawn else None
            instance = next((row[2] for row in reversed(versions) if row[2] is not None), None)
            before = db.execute(f"SELECT prompt, state FROM samples WHERE {WHERE}", key).fetchone()
            if before is None or before[1] != State.PENDING:
                raise StoreError(f"the episode of {key} cannot end: its sample is not pending")
            prompt = np.asarray(found.prompt, "<i4").tobytes() or before[0]
            response = np.asarray(found.response, "<i4")
            db.execute(
                "UPDATE samples SET state=?, prompt=?, response=?, logprobs=?, kept=?, finish_reason=?,"
                " first_version=?, weight_version=?, instance=?, ref_logprobs=?, value_estimates=?, reward=?"
                f" WHERE {WHERE}",
                (
                    state,
                    prompt,
                    response.tobytes(),
                    np.asarray(found.logprobs, "<f4").tobytes(),
                    len(response),
                    reason,
                    version,
                    version,
                    instance,
                    empty,
                    empty,
                    None if empty is None else 0.0,
                    *key,
                ),
            )
            db.execute(
                "INSERT INTO episodes VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    *key,
                    before[0],
                    found.ending,
                    found.why,
                    found.reward,
                    json.dumps(list(found.messages), ensure_ascii=False),
                    found.turns,
                    found.calls,
                    found.learnt.tobytes(),
                    reason == DISCARDED,
                ),
            )
            if reason == DISCARDED:
                self._lose_turns(key)
                return
            requests = json.dumps(list(found.requests), ensure_ascii=False).encode()
            db.execute("INSERT INTO turn_requests VALUES (?,?,?,?)", (*key, zlib.compress(requests, 1)))
            self._forget_turns(key)

    def of(self, iteration: int) -> dict[Key, StoredEpisode]:
        """The ended episodes of an iteration. {} in a job without sessions."""
        with self._db.reading() as db:
            rows = db.execute(
                "SELECT prompt_index, sample_index, ending, why, reward, messages, turns, calls, learnt, discarded"
                " FROM episodes WHERE iteration=? ORDER BY 1, 2",
                (iteration,),
            ).fetchall()
        return {Key(iteration, *row[:2]): self._stored(row[2:]) for row in rows}

    def asked(self, iteration: int) -> list[AskedEpisode]:
        """The ended episodes of an iteration, in order of (prompt, sample)."""
        with self._db.reading() as db:
            rows = db.execute(
                "SELECT prompt_index, asked, ending, learnt, COALESCE(tokens, 0) FROM episodes"
                " LEFT JOIN lost_tokens USING (iteration, prompt_index, sample_index)"
                " WHERE iteration=? ORDER BY 1, sample_index",
                (iteration,),
            ).fetchall()
        return [
            AskedEpisode(prompt, np.frombuffer(asked, "<i4"), ending, learnt.count(LEARNT), lost)
            for prompt, asked, ending, learnt, lost in rows
        ]

    def get(self, key: Key) -> StoredEpisode | None:
        """The episode of a sample. None if it has not ended."""
        with self._db.reading() as db:
            row = db.execute(
                f"SELECT ending, why, reward, messages, turns, calls, learnt, discarded FROM episodes WHERE {WHERE}",
                key,
            ).fetchone()
        return None if row is None else self._stored(row)

    def requests(self, key: Key) -> list[dict[str, Any]]:
        """`EndedEpisode.requests` of an episode. [] if it has not ended or was discarded, and in a store of an earlier
        release."""
        with self._db.reading() as db:
            if db.execute("SELECT 1 FROM sqlite_master WHERE name='turn_requests'").fetchone() is None:
                return []
            row = db.execute(f"SELECT requests FROM turn_requests WHERE {WHERE}", key).fetchone()
        return [] if row is None else list(json.loads(zlib.decompress(row[0])))

    @staticmethod
    def _stored(row: tuple[Any, ...]) -> StoredEpisode:
        ending, why, reward, messages, turns, calls, learnt, discarded = row
        marks = np.frombuffer(learnt, np.uint8)
        return StoredEpisode(ending, why, reward, json.loads(messages), turns, calls, marks, bool(discarded))

    @staticmethod
    def _turns_of(key: Key) -> tuple[int, int, int, int]:
        last = -1 - MOST_TURNS * key.sample
        return key.iteration, key.prompt, last - MOST_TURNS + 1, last

    def _lose_turns(self, key: Key) -> None:
        with self._db.transaction() as db:
            db.execute(
                "INSERT INTO lost_tokens SELECT ?, ?, ?, COALESCE(SUM(kept), 0) FROM samples WHERE iteration=? AND"
                " prompt_index=? AND sample_index BETWEEN ? AND ?"
                " ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens",
                (*key, *self._turns_of(key)),
            )
            self._forget_turns(key)

    def _forget_turns(self, key: Key) -> None:
        with self._db.transaction() as db:
            for table in ("samples", "chunks"):
                db.execute(
                    f"DELETE FROM {table} WHERE iteration=? AND prompt_index=? AND sample_index BETWEEN ? AND ?",
                    self._turns_of(key),
                )
