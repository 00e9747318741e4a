"""The run's store: nothing lost, nothing twice, and errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.samples import Assignment, Delta, IllegalTransition, Key, NewSample, ScoreRow, State
from dovetail.coordinator.store.store import Store
from helpers.patience import PATIENCE


def new(prompt: int = 0, sample: int = 0, tokens: tuple[int, ...] = (5, 6, 7), seed: int = 11) -> NewSample:
    return NewSample(prompt, sample, np.array(tokens, np.int32), seed, {"answer": "42"})


def assign(store: Store, key: Key, keep: int = 0, instance: str = "r0", version: int = 1) -> int:
    return store.samples.assign([Assignment(key, instance, "one", version, keep)])[0]


KEY = Key(1, 0, 0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    store.samples.begin_iteration(1, [new()])
    return store


def test_a_response_streams_in_and_becomes_experience(store: Store) -> None:
    attempt = assign(store, KEY)
    assert store.samples.record([Delta(KEY, attempt, 0, [1, 2], [-0.5, -1.5])]) == [True]
    assert store.samples.get(KEY).tokens.tolist() == [1, 2]
    assert store.samples.record([Delta(KEY, attempt, 2, [3], [-2.5], "stop")]) == [True]
    assert store.samples.score([ScoreRow(KEY, np.zeros(3, np.float32), np.ones(3, np.float32), 0.25, 7)]) == 1
    (sample,) = store.samples.experience(1)
    assert sample.tokens.tolist() == [1, 2, 3]
    assert sample.logprobs.tolist() == [-0.5, -1.5, -2.5]
    assert sample.finished
    assert (sample.reward, sample.critic_version, sample.weight_version) == (0.25, 7, 1)
    assert sample.values is not None
    assert sample.values.tolist() == [1, 1, 1]
    assert sample.fields == {"answer": "42"}
    store.samples.advance(1, State.IN_BATCH)
    store.samples.advance(1, State.IN_BATCH)
    store.samples.advance(1, State.TRAINED)
    store.samples.advance(1, State.IN_BATCH)  # a coordinator that repeats itself after a crash changes nothing
    assert store.samples.counts(1) == {State.TRAINED: 1}


def test_beginning_an_iteration_again_changes_nothing(store: Store) -> None:
    attempt = assign(store, KEY)
    store.samples.record([Delta(KEY, attempt, 0, [1], [-1.0], "stop")])
    assert store.samples.begin_iteration(1, [new()]) is False
    assert store.samples.get(KEY).state is State.GENERATED
    for other in ([new(seed=12)], [new(tokens=(5,))], [new(), new(prompt=1)]):
        with pytest.raises(StoreError, match="other prompts or seeds"):
            store.samples.begin_iteration(1, other)


def test_late_tokens_of_an_old_assignment_are_refused(store: Store) -> None:
    first = assign(store, KEY)
    store.samples.record([Delta(KEY, first, 0, [1], [-1.0])])
    store.samples.release([(KEY, first)])
    assert store.samples.record([Delta(KEY, first, 1, [9], [-9.0])]) == [False]
    second = assign(store, KEY, keep=1, instance="r1")
    assert store.samples.record([Delta(KEY, first, 1, [9], [-9.0], "stop")]) == [False]
    assert store.samples.record([Delta(KEY, second, 1, [2], [-2.0], "stop")]) == [True]
    assert store.samples.record([Delta(KEY, second, 2, [3], [-3.0], "stop")]) == [False]
    assert store.samples.get(KEY).tokens.tolist() == [1, 2]


def test_a_gap_or_an_overlap_is_an_error_and_stores_nothing_of_its_batch(store: Store) -> None:
    attempt = assign(store, KEY)
    for start in (1, -1):
        with pytest.raises(StoreError, match="0 tokens are stored"):
            store.samples.record([Delta(KEY, attempt, start, [1], [-1.0])])
    with pytest.raises(StoreError):
        store.samples.record([Delta(KEY, attempt, 0, [1], [-1.0]), Delta(KEY, attempt, 0, [1], [-1.0])])
    assert len(store.samples.get(KEY).tokens) == 0


def test_a_migrating_sample_takes_the_end_of_its_stream_and_goes_on_elsewhere(store: Store) -> None:
    first = assign(store, KEY, version=1)
    store.samples.migrate([(KEY, first)])
    assert store.samples.record([Delta(KEY, first, 0, [1, 2, 3, 4], [-1, -2, -3, -4])]) == [True]
    second = assign(store, KEY, keep=3, instance="r1", version=2)
    sample = store.samples.get(KEY)
    assert (sample.tokens.tolist(), sample.first_version, sample.weight_version) == ([1, 2, 3], 1, 2)
    store.samples.record([Delta(KEY, second, 3, [7], [-7.0], "length")])
    assert store.samples.get(KEY).tokens.tolist() == [1, 2, 3, 7]
    assert not store.samples.get(KEY).finished


def test_illegal_transitions_are_refused(store: Store) -> None:
    with pytest.raises(IllegalTransition, match=r"is pending: it cannot become scored"):
        store.samples.score([ScoreRow(KEY, None, None, 1.0)])
    with pytest.raises(IllegalTransition, match="1 are pending"):
        store.samples.advance(1, State.IN_BATCH)
    with pytest.raises(IllegalTransition, match="no samples"):
        store.samples.advance(2, State.IN_BATCH)
    assign(store, KEY)
    with pytest.raises(IllegalTransition):
        assign(store, KEY)
    with pytest.raises(StoreError, match="not in the store"):
        assign(store, Key(9, 9, 9))


def test_scores_must_fit_and_be_finite_and_the_first_ones_stay(store: Store) -> None:
    attempt = assign(store, KEY)
    store.samples.record([Delta(KEY, attempt, 0, [1, 2], [-1, -2], "stop")])
    with pytest.raises(StoreError, match="2 finite numbers"):
        store.samples.score([ScoreRow(KEY, np.zeros(3, np.float32), None, 1.0)])
    with pytest.raises(StoreError, match="2 finite numbers"):
        store.samples.score([ScoreRow(KEY, None, np.array([1, np.nan], np.float32), 1.0)])
    with pytest.raises(StoreError, match="nan"):
        store.samples.score([ScoreRow(KEY, None, None, float("nan"))])
    assert store.samples.score([ScoreRow(KEY, None, None, 1.0)]) == 1
    assert store.samples.score([ScoreRow(KEY, None, None, 2.0)]) == 0
    assert store.samples.get(KEY).reward == 1.0


def test_experience_needs_every_sample_scored(store: Store) -> None:
    with pytest.raises(StoreError, match="1 of 1 samples are not scored"):
        store.samples.experience(1)


def test_reopening_keeps_tokens_and_tells_what_was_on_servers(store: Store, tmp_path: Path) -> None:
    attempt = assign(store, KEY)
    store.samples.record([Delta(KEY, attempt, 0, [1, 2], [-1, -2])])
    store.close()
    again = Store(tmp_path)
    (was,) = again.take_interrupted()
    assert (was.instance, was.incarnation, was.attempt, was.state) == ("r0", "one", attempt, State.GENERATING)
    assert again.take_interrupted() == []
    now = again.samples.get(KEY)
    assert (now.state, now.tokens.tolist(), now.seed) == (State.PENDING, [1, 2], 11)
    assert assign(again, KEY, keep=2) == attempt + 1


def test_forgetting_deletes_only_older_iterations(store: Store) -> None:
    store.samples.begin_iteration(2, [new()])
    store.samples.forget_before(2)
    assert store.samples.samples(1) == []
    assert len(store.samples.samples(2)) == 1


def test_records_survive(store: Store, tmp_path: Path) -> None:
    store.put("driver/phase", {"iteration": 3})
    store.put_all({"driver/kl": 0.05, "drivers/x": 1, "gone": 1})
    store.put("gone", None)
    store.close()
    again = Store(tmp_path)
    assert again.get("driver/phase") == {"iteration": 3}
    assert again.get("gone") is None
    assert again.items("driver") == {"driver/phase": {"iteration": 3}, "driver/kl": 0.05}


def test_a_failed_transaction_leaves_no_trace(store: Store) -> None:
    with pytest.raises(TypeError):
        store.put_all({"a": 1, "b": object()})
    assert store.get("a") is None


def test_a_full_disk_is_one_clear_sentence_and_the_store_goes_on(store: Store) -> None:
    pages = store._db._connection.execute("PRAGMA page_count").fetchone()[0]
    store._db._connection.execute(f"PRAGMA max_page_count={pages}")  # SQLite's own SQLITE_FULL
    with pytest.raises(StoreError, match=r"the disk that holds .*store\.sqlite is full; free some space"):
        store.put("big", "x" * 100_000)
    assert store.get("big") is None
    store._db._connection.execute("PRAGMA max_page_count=1000000")
    store.put("big", "x" * 100_000)
    assert len(store.get("big")) == 100_000


def test_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "store.lock").mkdir()
    with pytest.raises(StoreError, match="the run directory cannot be written"):
        Store(tmp_path)


def test_a_read_only_store_is_one_clear_sentence(store: Store) -> None:
    store._db._connection.execute("PRAGMA query_only=1")
    with pytest.raises(StoreError, match="cannot be written"):
        store.put("a", 1)


def test_a_damaged_file_and_a_foreign_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "store.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="is damaged"):
        Store(tmp_path / "a")
    store = Store(tmp_path / "b")
    store._db._connection.execute("PRAGMA user_version=99")
    store.close()
    with pytest.raises(StoreError, match="schema version 99"):
        Store(tmp_path / "b")


def test_two_coordinators_cannot_share_a_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from dovetail.coordinator.store.database import StoreError
        from dovetail.coordinator.store.store import Store
        try:
            Store(Path(sys.argv[1]))
        except StoreError as error:
            print(error)
    """)
    command = [sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    assert "another coordinator is using" in told
    store.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout == ""


def test_a_killed_process_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from dovetail.coordinator.store.store import Store
        store = Store(Path(sys.argv[1]))
        for i in range(50):
            store.put("count", i)
        with store._db.transaction() as db:
            db.execute("UPDATE kv SET value='-1'")
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=PATIENCE, check=False)
    assert done.returncode == -9
    assert Store(tmp_path).get("count") == 49


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_clear_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="the run directory cannot be written"):
        Store(tmp_path)
    tmp_path.chmod(0o700)
