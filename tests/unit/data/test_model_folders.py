"""Model folders that change while a run goes on are refused, by the file's name; others are read once."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.coordinator.data import fingerprints
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.fingerprints import ModelFolders
from helpers.records import Records

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]

FILES = [
    *SHARDS,
    *("config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
    *("generation_config.json", "modeling.py", "value_head/model.safetensors"),
]


def a_model(folder: Path) -> Path:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def edit(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        """As many bytes, and the time of before: what `cp -p` and `rsync` leave."""
        path = folder / name
        about = path.stat()
        path.write_bytes(path.read_bytes()[::-1])
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))

    change.__name__ = name
    return change


def append(folder: Path) -> None:
    with (folder / SHARDS[1]).open("a") as file:
        file.write("more")


def remove(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()


def add_code(folder: Path) -> None:
    (folder / "more.py").write_text("")


def replace(folder: Path) -> None:
    """As training into the same folder does."""
    (folder / "new").write_text("trained")
    (folder / "new").rename(folder / SHARDS[0])


def one_file(folder: Path) -> None:
    """Another index names one file of all weights."""
    (folder / "model.safetensors").write_text("all")
    (folder / "model.safetensors.index.json").unlink()


CHANGES = {
    **{name: edit(name) for name in FILES},
    **{each.__name__: each for each in (append, remove, add_code, replace, one_file)},
}


@pytest.mark.parametrize("aged", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_anything_that_is_loaded_is_refused(tmp_path: Path, change: str, aged: bool) -> None:
    folder, records = a_model(tmp_path / "model"), Records()
    if aged:  # the times of its files can be relied on
        _wait_for_the_clock(folder)

    def checked() -> None:
        asyncio.run(ModelFolders(tmp_path / "run", {"reward": folder}, records).check([folder]))

    checked()
    checked()
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    CHANGES[change](folder)
    for _ in range(2):
        with pytest.raises(DataError, match=rf"spec\.models\.reward: {folder}/.* since the run began.*start a new run"):
            checked()
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.unlink()
    for name, data in before.items():
        (folder / name).write_bytes(data)
    checked()


def test_files_that_nobody_loads_may_come_and_go(tmp_path: Path) -> None:
    folder, records = a_model(tmp_path / "run" / "models" / "sft"), Records()
    folders = ModelFolders(tmp_path / "run", {}, records)
    asyncio.run(folders.remember(folder))
    # The run writes the first three itself at its end.
    for name in ("README.md", "generation_config.json", "chat_template.jinja", "model.gguf", "other.safetensors"):
        (folder / name).write_text("new")
    asyncio.run(folders.check_all())
    (folder.parent.parent).rename(tmp_path / "moved")
    moved = ModelFolders(tmp_path / "moved", {}, records)
    asyncio.run(moved.check_all())
    (tmp_path / "moved/models/sft" / SHARDS[0]).write_text("other weights")
    with pytest.raises(DataError, match=r"^models/sft: .*/moved/.*/model-00001-of-00002\.safetensors has changed"):
        asyncio.run(moved.check_all())


def test_files_that_did_not_change_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def digest(path: Path, real: Callable[[Path], str] = fingerprints.content_digest) -> str:
        read.append(path.name)
        return real(path)

    folder, records = a_model(tmp_path / "model"), Records()
    _wait_for_the_clock(folder)
    monkeypatch.setattr(fingerprints, "content_digest", digest)
    for _ in range(3):
        asyncio.run(ModelFolders(tmp_path, {"actor": folder}, records).check([folder, folder]))
    assert len(read) == len([path for path in folder.rglob("*") if path.is_file()])
    (folder / SHARDS[0]).touch()
    for _ in range(2):
        asyncio.run(ModelFolders(tmp_path, {"actor": folder}, records).check([folder]))
    assert set(read[len(FILES) + 1 :]) == {SHARDS[0]}


def _wait_for_the_clock(folder: Path) -> None:
    newest = max(path.stat().st_ctime_ns for path in folder.rglob("*"))
    while time.time_ns() - newest < 2 * fingerprints._TICK_NS:
        time.sleep(0.01)
