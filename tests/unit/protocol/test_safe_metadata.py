"""A checkpoint whose list of tensors is a malicious pickle is refused, and nothing in it runs."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dovetail.manifest.types import Stage
from dovetail.protocol.messages import Load, Save
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job, load_command


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.target),)


@pytest.fixture(scope="module")
def trainer() -> Iterator[LocalTrainer]:
    with LocalTrainer(job()) as made:
        yield made


@pytest.fixture
def saved(trainer: LocalTrainer, tmp_path: Path) -> Path:
    trainer.metrics(load_command(Stage.SFT))
    folder = tmp_path / "checkpoint"
    trainer.metrics(Save(id="s", path=str(folder)))
    return folder


def resume(trainer: LocalTrainer, folder: Path) -> str | None:
    command: Load = load_command(Stage.SFT)
    return trainer.execute(command.model_copy(update={"checkpoint": str(folder)})).error


def rewrite(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata)))
    forge(folder)


def forge(folder: Path) -> None:
    """Who writes a list of tensors can write its checksum, too."""
    state = json.loads((folder / "state.json").read_text())
    del state["files"], state["checksum"]
    (folder / "state.json").write_text(json.dumps(state))


def test_a_checkpoint_of_ours_is_read(trainer: LocalTrainer, saved: Path) -> None:
    assert resume(trainer, saved) is None


def test_code_in_the_list_of_tensors_does_not_run(trainer: LocalTrainer, saved: Path, tmp_path: Path) -> None:
    def change(metadata: Metadata) -> Metadata:
        metadata.planner_data = {**metadata.planner_data, "more": Evil(tmp_path / "it-ran")}
        return metadata

    rewrite(saved, change)
    error = resume(trainer, saved)
    assert not (tmp_path / "it-ran").exists()
    assert error is not None
    assert str(saved) in error
    assert "posix.mkdir" in error
    assert "not run" in error
    assert "\n" not in error


def test_code_in_a_shard_does_not_run(trainer: LocalTrainer, saved: Path, tmp_path: Path) -> None:
    """DCP unpickles entries that are no tensors, if the list of tensors says that they are none."""
    evil = {"weight": Evil(tmp_path / "it-ran")}

    def change(metadata: Metadata) -> Metadata:
        name = next(iter(metadata.state_dict_metadata))
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        for index, info in list(metadata.storage_data.items()):
            if index.fqn == name:
                torch.save(evil, saved / info.relative_path)
                info.offset, info.length = 0, (saved / info.relative_path).stat().st_size
                metadata.storage_data[type(index)(name)] = info
        return metadata

    rewrite(saved, change)
    error = resume(trainer, saved)
    assert not (tmp_path / "it-ran").exists()
    assert error is not None
    assert "BytesStorageMetadata" in error


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"\x80\x04]q\x00(K\x01"])
def test_a_list_that_is_none_is_one_sentence(trainer: LocalTrainer, saved: Path, content: bytes) -> None:
    (saved / ".metadata").write_bytes(content)
    error = resume(trainer, saved)
    assert error is not None
    assert ".metadata" in error
    assert "\n" not in error


def test_tensors_outside_of_the_checkpoint_are_not_read(trainer: LocalTrainer, saved: Path) -> None:
    def change(metadata: Metadata) -> Metadata:
        for info in metadata.storage_data.values():
            info.relative_path = f"../{saved.name}/{info.relative_path}"
        return metadata

    rewrite(saved, change)
    assert "outside of the checkpoint" in str(resume(trainer, saved))


def test_every_data_type_is_allowed(tmp_path: Path) -> None:
    from dovetail.trainer.files.safe_metadata import SafeReader

    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]
    dcp.save(
        {str(kind): torch.zeros(2).to(kind) for kind in kinds},
        storage_writer=dcp.FileSystemWriter(tmp_path),
        no_dist=True,
    )
    read = SafeReader(tmp_path).read_metadata()
    assert [read.state_dict_metadata[str(kind)].properties.dtype for kind in kinds] == kinds  # type: ignore[union-attr]
