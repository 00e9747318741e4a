"""The token ids of a job's records are made once. Batches are the same as those that are tokenised anew."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.data import token_table
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.prepare import Prepared, prepare
from dovetail.coordinator.data.records import Labelled
from dovetail.coordinator.data.text import tokenize
from dovetail.coordinator.data.text.tokenize import by_length
from dovetail.coordinator.serving import served_batches
from dovetail.coordinator.serving.served_batches import Batches
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.wire import Arrays, unpack

CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"How many are {i} and one?"},
            {"role": "assistant", "content": f"{i + 1}" * (1 + i % 5)},
            {"role": "user", "content": "And one more?"},
            {"role": "assistant", "content": f"{i + 2}"},
        ]
    }
    for i in range(30)
]
PAIRS = [{"prompt": f"Say {i}:", "chosen": f" {i} " * (i % 4 + 1), "rejected": " no"} for i in range(40)]
LABELS = [{"prompt": f"p{i} ", "completion": f"c{i}", "label": i % 3 == 0} for i in range(40)]


def job(folder: Path, preferences: list[dict[str, Any]] = PAIRS, **changes: Any) -> Prepared:
    for name, rows in (("chats", CHATS), ("judged", preferences)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields: dict[str, Any] = {
        "stages": ["sft", "reward", "ppo"],
        "models": {"actor": {"source": {"scratch": {"config": CONFIG}}}, "tokenizer": {"train": {"vocabSize": 300}}},
        "data": {
            "demonstrations": [{"path": "chats.jsonl"}, {"synthetic": {"size": 40}, "weight": 2.0}],
            "preferences": [{"path": "judged.jsonl"}],
            "prompts": [{"synthetic": {"size": 40}}],
            "maxTokens": 60,
            "maxPromptTokens": 40,
        },
        "sft": {"batchSize": 8, "steps": 5},
        "reward": {"batchSize": 4},
        "dpo": {"batchSize": 4},
        "ppo": {"iterations": 3, "globalBatchSize": 8, "samplesPerPrompt": 2, "miniBatchSize": 8, "ptxCoef": 1.0},
        "groups": [{"name": "all", "roles": ["trainer"]}],
    }
    made = RLHFJobSpec.model_validate({**fields, **changes})
    return prepare(made, folder / "run", folder)


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and np.array_equal(a[n], b[n]) for n in a)


def plain_dpo(job: Prepared, records: list[Any]) -> Arrays:
    rows, kto = [job.encoder.sequences(r) for r in records], job.spec.dpo.loss == "KTO"
    if isinstance(records[0], Labelled):
        return tokenize.labelled_batch([r[0] for r in rows], [r.good for r in records], job.pad_token_id, 60)
    return tokenize.dpo_batch([(r[0], r[1]) for r in rows], job.pad_token_id, 60 if kto else None)


def test_batches_of_demonstrations_are_those_that_are_tokenised_anew(tmp_path: Path) -> None:
    made = job(tmp_path)
    data, encoder, pad = made.data.demonstrations, made.encoder, made.pad_token_id
    assert data is not None
    for step in range(1, 6):
        rows = [encoder.demonstration(r) for r in data.batch(step, 8)]
        assert any(row.given for row in rows), "this must also be true of texts with several learnt parts"
        assert same(made.sft_batch(step), tokenize.sft_batch(rows, pad))
    for iteration in range(1, 4):
        rows = [encoder.demonstration(r) for r in data.batch(iteration, 8)]
        assert same(made.ptx_batch(iteration), tokenize.sft_batch(rows, pad, "ptx_"))
    held = [encoder.demonstration(r) for r in data.held_out()]
    for batches, size in ((made.sft_eval_batches(), 8), (made.scored_demonstrations(), 4)):
        groups = by_length([len(row.tokens) for row in held], size)
        expected = [tokenize.sft_batch([held[i] for i in group], pad) for group in groups]
        assert len(batches) == len(expected) > 0
        assert all(map(same, batches, expected))


@pytest.mark.parametrize(("loss", "labelled"), [("DPO", False), ("KTO", False), ("KTO", True)])
def test_batches_of_preferences_are_those_that_are_tokenised_anew(tmp_path: Path, loss: str, labelled: bool) -> None:
    made = job(tmp_path, LABELS if labelled else PAIRS, stages=["dpo"], dpo={"batchSize": 4, "loss": loss})
    data = made.data.preferences
    assert data is not None
    for step in range(1, 8):
        assert same(made.dpo_batch(step), plain_dpo(made, data.batch(step, 4)))
    held = data.held_out()
    groups = by_length([sum(len(s.tokens) for s in made.encoder.sequences(r)) for r in held], 4)
    expected = [plain_dpo(made, [held[i] for i in group]) for group in groups]
    assert len(made.dpo_eval_batches()) == len(expected) > 0
    assert all(map(same, made.dpo_eval_batches(), expected))


def test_batches_of_the_reward_model_are_those_that_are_tokenised_anew(tmp_path: Path) -> None:
    made = job(tmp_path)
    assert made.data.preferences is not None
    for step in range(1, 8):
        rows = [made.encoder.preference(r) for r in made.data.preferences.batch(step, 4)]  # type: ignore[arg-type]
        assert same(made.reward_batch(step), tokenize.reward_batch(rows, made.pad_token_id))


def test_records_that_no_step_uses_are_not_tokenised(tmp_path: Path) -> None:
    few = {"batchSize": 2, "steps": 1}
    made = job(tmp_path, stages=["sft"], sft=few)
    made.tokenise()
    written = json.loads((tmp_path / "run/cache/tokens/demonstrations.json").read_text())["counts"]["good"]
    assert made.data.demonstrations is not None
    assert written == 2 + len(made.data.demonstrations.held_out())
    with pytest.raises(LookupError, match="belongs to no step"):
        [made.sft_batch(step) for step in range(2, 9)]


def test_a_restart_reuses_the_tokens_and_a_change_or_damage_makes_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []

    def encode(encoder: Any, records: Any) -> Any:
        encoded.append(len(records))
        return original(encoder, records)

    original = token_table.encode
    monkeypatch.setattr(token_table, "encode", encode)
    first, path = job(tmp_path, stages=["sft"]), tmp_path / "run/cache/tokens/demonstrations.bin"
    batch = first.sft_batch(2)
    assert sum(encoded) > 0
    encoded.clear()
    again = job(tmp_path, stages=["sft"])
    assert same(again.sft_batch(2), batch)
    assert not encoded
    shorter = {**again.spec.data.model_dump(mode="json", by_alias=True), "maxTokens": 30}
    assert job(tmp_path, stages=["sft"], data=shorter).sft_batch(2)["tokens"].shape[1] <= 30
    assert sum(encoded) > 0
    assert same(job(tmp_path, stages=["sft"]).sft_batch(2), batch)
    for damage in (lambda data: data[:-8], lambda data: data[:40] + b"\xff" + data[41:], lambda _: b""):
        encoded.clear()
        path.write_bytes(damage(path.read_bytes()))
        assert same(job(tmp_path, stages=["sft"]).sft_batch(2), batch)
        assert sum(encoded) > 0
    encoded.clear()
    path.unlink()
    assert same(job(tmp_path, stages=["sft"]).sft_batch(2), batch)
    assert sum(encoded) > 0


def test_a_malformed_record_of_a_table_ends_the_preparation(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": "a", "response": "b"} for _ in range(20)] + [{"prompt": "a", "response": None}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    data = {"demonstrations": [{"path": "rows.parquet"}]}
    with pytest.raises(DataError, match="record 21"):
        job(tmp_path, stages=["sft"], data=data, sft={"epochs": 1}).tokenise()


def test_a_list_that_is_half_tokenised_takes_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(encoder: Any, records: Any) -> Any:
        raise DataError("record 21 is malformed")

    monkeypatch.setattr(token_table, "encode", encode)
    with pytest.raises(DataError, match="record 21"):
        job(tmp_path, stages=["sft"]).tokenise()
    assert not list((tmp_path / "run/cache/tokens").iterdir())


def test_a_loop_of_ones_own_goes_on_with_demonstrations_after_the_manifests_iterations(tmp_path: Path) -> None:
    made = job(tmp_path)
    demonstrations = made.data.demonstrations
    assert demonstrations is not None
    for iteration in (3, 4, 50):
        places = demonstrations.places(iteration, 8)
        rows = [r for s, i in places for r in made.encoder.sequences(demonstrations.parts[s].records[i])]
        assert same(made.ptx_batch(iteration), tokenize.sft_batch(rows, made.pad_token_id, "ptx_"))


@pytest.mark.slow
def test_processes_make_the_same_tokens_and_one_that_dies_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = job(tmp_path, stages=["sft"])
    batches = [alone.sft_batch(step) for step in range(1, 6)]
    (tmp_path / "run/cache/tokens/demonstrations.json").unlink()
    monkeypatch.setattr(token_table, "MANY_CHARACTERS", 0)
    monkeypatch.setattr(token_table, "CHUNK", 3)
    monkeypatch.setattr(token_table.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(token_table, "TOLD_SECONDS", 0.0)
    original, started = token_table._process, []

    def process(by: Any) -> Any:
        started.append(original(by))
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    monkeypatch.setattr(token_table, "_process", process)
    together, told = job(tmp_path, stages=["sft"]), []
    together.tokenise(told.append)
    assert len(started) == 2
    assert all(each.poll() is not None for each in started)
    assert told[-1].startswith("tokenising: ")
    assert all(map(same, batches, (together.sft_batch(step) for step in range(1, 6))))


def test_ranks_that_ask_at_once_get_one_batch_that_is_made_beside_the_event_loop(tmp_path: Path) -> None:
    made, threads = job(tmp_path), []

    class Counted:
        def sft_batch(self, step: int) -> Arrays:
            threads.append(threading.current_thread())
            return made.sft_batch(step)

    class Nothing(dict[str, Any]):
        def items(self, _: str = "") -> Any:
            return {}

    counted: Any = Counted()
    for name in ("reward_batch", "dpo_batch"):
        setattr(counted, name, None)
    store: Any = Nothing()
    batches = Batches(counted, ExperienceFiles(tmp_path / "run"), store)

    async def ask() -> list[bytes]:
        return await asyncio.gather(*(batches.fetch("sft/1") for _ in range(64)))

    answers = asyncio.run(ask())
    assert batches.buffered == len(answers[0])
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
    assert all(answer is answers[0] for answer in answers)
    assert same(unpack(answers[0]), made.sft_batch(1))


def test_a_batch_that_could_not_be_packed_is_packed_when_it_is_asked_for_again(tmp_path: Path) -> None:
    made = job(tmp_path)
    errors: list[Exception] = [OSError(28, "No space left on device"), MemoryError()]

    class Failing:
        reward_batch = dpo_batch = None

        def sft_batch(self, step: int) -> Arrays:
            if errors:
                raise errors.pop()
            return made.sft_batch(step)

    failing: Any = Failing()
    store: Any = type("Store", (), {"items": lambda *_: {}})()
    batches = Batches(failing, ExperienceFiles(tmp_path / "run"), store)

    async def ask() -> bytes:
        for error in (MemoryError, OSError):
            with pytest.raises(error):
                await batches.fetch("sft/1")
        found = await batches.fetch("sft/1")
        assert isinstance(found, bytes)
        return found

    assert same(unpack(asyncio.run(ask())), made.sft_batch(1))


def test_packed_batches_have_a_limit_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = type("Store", (), {"items": lambda *_: {}})()
    batches, most = Batches(job(tmp_path), ExperienceFiles(tmp_path / "run"), store), 0

    async def ask() -> None:
        nonlocal most
        for step in range(1, 6):
            await batches.fetch(f"sft/{step}")
            most = max(most, batches.buffered)

    asyncio.run(ask())
    whole = batches.buffered
    monkeypatch.setattr(served_batches, "KEPT_BYTES", whole // 2)
    asyncio.run(ask())
    newest = len(asyncio.run(batches.fetch("sft/5")))
    assert newest <= batches.buffered <= whole // 2 < most
