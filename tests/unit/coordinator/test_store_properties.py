"""Whatever the order of events and crashes: each sample answered exactly once, none lost, no token twice."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dovetail.coordinator.store.samples import Assignment, Delta, Key, NewSample, ScoreRow, State
from dovetail.coordinator.store.store import Store

LENGTHS = [1, 4, 9]
KEYS = [Key(1, i, 0) for i in range(len(LENGTHS))]


def true_token(key: Key, position: int) -> int:
    return 100 * key.prompt + position


class Crash(Exception):
    """A process that dies in the middle of a transaction."""


class Exactly(RuleBasedStateMachine):
    """Servers generate the true tokens of each sample; old ones go on talking after they lost it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = Store(self.folder)
        self.begin()
        # (key, attempt) -> next position that this assignment's server would send; servers never stop by themselves.
        self.servers: dict[tuple[Key, int], int] = {}
        self.answers: dict[Key, int] = dict.fromkeys(KEYS, 0)

    def begin(self) -> None:
        self.store.samples.begin_iteration(1, [NewSample(k.prompt, k.sample, np.arange(3) + k.prompt, 7) for k in KEYS])

    @rule(key=st.sampled_from(KEYS), lost=st.integers(0, 2))
    def assign(self, key: Key, lost: int) -> None:
        sample = self.store.samples.get(key)
        if sample.state in (State.PENDING, State.MIGRATING):
            keep = max(0, len(sample.tokens) - lost)
            (attempt,) = self.store.samples.assign([Assignment(key, "r", "i", 1, keep)])
            assert (key, attempt) not in self.servers
            self.servers[key, attempt] = keep

    @rule(data=st.data(), count=st.integers(0, 3), crash=st.booleans())
    def stream(self, data: st.DataObject, count: int, crash: bool) -> None:
        """Several servers' tokens in one batch; a crash may hit before its commit."""
        if not self.servers:
            return
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.servers)), unique=True, max_size=3))
        deltas = []
        for key, attempt in chosen:
            start = self.servers[key, attempt]
            end = min(start + count, LENGTHS[key.prompt])
            tokens = [true_token(key, p) for p in range(start, end)]
            reason = "stop" if end == LENGTHS[key.prompt] else None
            deltas.append(Delta(key, attempt, start, tokens, [-float(t) for t in tokens], reason))
        if crash:
            try:
                with self.store._db.transaction():
                    self.store.samples.record(deltas)
                    raise Crash
            except Crash:
                self.reopen()
            return
        for delta, accepted in zip(deltas, self.store.samples.record(deltas), strict=True):
            if accepted:
                self.servers[delta.key, delta.attempt] = delta.start + len(delta.tokens)
                self.answers[delta.key] += delta.finish_reason is not None

    @rule(data=st.data(), planned=st.booleans())
    def lose_server(self, data: st.DataObject, planned: bool) -> None:
        if self.servers:
            key, attempt = data.draw(st.sampled_from(sorted(self.servers)))
            (self.store.samples.migrate if planned else self.store.samples.release)([(key, attempt)])

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self.folder)
        self.begin()

    @rule(key=st.sampled_from(KEYS))
    def score(self, key: Key) -> None:
        sample = self.store.samples.get(key)
        if sample.state is State.GENERATED:
            n = len(sample.tokens)
            self.store.samples.score([ScoreRow(key, np.zeros(n, np.float32), None, 1.0)])

    @invariant()
    def tokens_are_a_prefix_of_the_truth(self) -> None:
        samples = self.store.samples.samples(1)
        assert [s.key for s in samples] == KEYS
        for sample in samples:
            length = len(sample.tokens)
            assert sample.tokens.tolist() == [true_token(sample.key, p) for p in range(length)]
            assert sample.logprobs.tolist() == [-float(t) for t in sample.tokens]
            answered = sample.state in (State.GENERATED, State.SCORED)
            assert self.answers[sample.key] == answered
            assert (length == LENGTHS[sample.key.prompt]) >= answered

    def teardown(self) -> None:
        """From wherever we are, everything can be finished."""
        self.reopen()
        for sample in self.store.samples.samples(1, State.PENDING):
            kept = len(sample.tokens)
            (attempt,) = self.store.samples.assign([Assignment(sample.key, "r", "i", 1, kept)])
            rest = [true_token(sample.key, p) for p in range(kept, LENGTHS[sample.key.prompt])]
            assert self.store.samples.record(
                [Delta(sample.key, attempt, kept, rest, [-float(t) for t in rest], "stop")]
            ) == [True]
        assert State.PENDING not in self.store.samples.counts(1)
        self.tokens_are_complete()
        self.store.close()
        shutil.rmtree(self.folder)

    def tokens_are_complete(self) -> None:
        for sample in self.store.samples.samples(1):
            assert len(sample.tokens) == LENGTHS[sample.key.prompt]


Exactly.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestExactlyOnce = pytest.mark.slow(Exactly.TestCase)
