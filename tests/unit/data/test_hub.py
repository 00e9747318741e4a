"""Models of a hub, downloaded with the real client from a hub of our own."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.downloads import hub, proof
from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.coordinator.data.downloads.hub_client import Request, kind_of, make_room, small_files
from dovetail.manifest.checks.model_contents import weight_files
from dovetail.manifest.types import HubAccess as HubSpec
from dovetail.manifest.types import SecretKey
from helpers.fake_hub import FakeHub
from helpers.free_ports import free_port

FIELD = "spec.models.actor.source.huggingFace"
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": b"1" * 300_000,
    "model-00002-of-00002.safetensors": b"2" * 200_000,
    "consolidated.safetensors": b"12" * 250_000,
    "original/params.json": b"{}",
    "original/consolidated.00.pth": b"pickle",
    "pytorch_model.bin": b"pickle",
    "modeling_own.py": b"code",
    "README.md": b"text",
}
SMALL = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
WEIGHTS = set(INDEX["weight_map"].values())


class World(NamedTuple):
    """A hub with the repository a/b, and a run directory."""

    server: FakeHub
    run: Path
    waits: list[float]
    notes: list[str]

    def hub(self, spec: HubSpec | None = None, **options: Any) -> Hub:
        spec = spec or HubSpec(token_secret=SecretKey(name="hf"))
        return Hub(spec, self.run, pods=True, note=self.notes.append, sleep=self.waits.append, **options)

    def fetch(self, revision: str | None = None, repository: str = "a/b", **options: Any) -> tuple[Path, str]:
        models = self.hub(**options)
        folder = models.describe("actor", FIELD, repository, revision)
        models.download_weights()
        return folder, models.commits["actor"]["commit"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    server = FakeHub()
    server.tokens = {"good", "poor"}
    server.repository("a/b").push(FILES)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "good")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    run.mkdir()
    with server.running():
        yield World(server, run, [], [])


@pytest.mark.slow
def test_what_describes_a_model_comes_first_and_then_its_weights_alone(world: World) -> None:
    models = world.hub()
    folder = models.describe("actor", FIELD, "a/b", None)
    assert {path.name for path in folder.iterdir()} == SMALL
    assert models.files("actor") == sorted(FILES)
    models.download_weights()
    assert {path.name for path in folder.iterdir()} == SMALL | WEIGHTS
    assert all((folder / name).read_bytes() == FILES[name] for name in SMALL | WEIGHTS)
    # All pods see the run directory, and links in it lead nowhere else.
    assert all(world.run in path.resolve().parents for path in folder.iterdir())
    tokens = {path.startswith("/large/"): token for _, path, token, _ in world.server.asked}
    assert tokens == {False: "good", True: ""}


@pytest.mark.slow
def test_a_repository_of_thousands_of_files_is_described(world: World) -> None:
    """Their list is longer than what a pipe takes before somebody reads it."""
    steps = {f"checkpoints/global_step_{number:06d}/model.bin": b"" for number in range(3000)}
    world.server.repository("a/b").push({**FILES, **steps})
    hub = world.hub(HubSpec(timeout_seconds=90))
    hub.describe("actor", FIELD, "a/b", None)
    assert set(hub.files("actor")) == {*FILES, *steps}


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_its_commit_and_asks_the_hub_for_nothing(world: World) -> None:
    folder, commit = world.fetch()
    newer = world.server.repository("a/b").push({**FILES, "config.json": b'{"model_type": "qwen3"}'})
    world.server.asked.clear()
    assert world.fetch() == (folder, commit)
    assert world.server.asked == []
    (folder / "config.json").unlink()  # lost: it is fetched again, and of the same commit
    assert world.fetch() == (folder, commit)
    assert commit != newer
    assert (folder / "config.json").read_bytes() == FILES["config.json"]


@pytest.mark.slow
def test_a_download_that_breaks_off_goes_on_where_it_was(world: World) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"0123" * (6 << 20)}
    world.server.repository("a/large").push(files)
    world.server.cut = 1
    folder, _ = world.fetch(repository="a/large")
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert [asked for *_, asked in world.server.asked if re.match("bytes=[1-9]", asked)]


@pytest.mark.slow
def test_a_hub_that_fails_is_asked_again_and_then_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.server.status = [500, 500]
    world.fetch()
    world.waits.clear()
    monkeypatch.setattr(hub, "WAITS", (2.0,))
    world.server.status = [500] * 1000
    with pytest.raises(DataError, match=rf"^{FIELD}: a/c cannot be downloaded from {world.server.url}: ") as told:
        world.fetch(repository="a/c")
    assert world.waits == [2]
    assert "\n" not in str(told.value)
    assert str(told.value).endswith("; the chart lets pods connect to what networkPolicy.jobEgress.hub names alone")


@pytest.mark.slow
def test_an_address_that_does_not_answer_is_told_with_what_may_close_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine nothing is said of a chart."""
    monkeypatch.setattr(hub, "WAITS", ())
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    for pods in (True, False):
        models = Hub(HubSpec(), world.run, pods=pods, note=world.notes.append, sleep=world.waits.append)
        with pytest.raises(DataError, match="a/b cannot be downloaded from") as told:
            models.describe("actor", FIELD, "a/b", None)
        assert ("jobEgress.hub" in str(told.value)) is pods


def _private(world: World) -> None:
    world.server.repository("a/b").readers = {"good"}


def _gated(world: World) -> None:
    world.server.repository("a/b").gated = {"good"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "repository", "revision", "prepare", "sentence"),
    [
        ("poor", "a/b", None, _gated, "a/b is gated; ask for access on its page at {hub}, and give a token of that"),
        ("", "a/b", None, _private, "{hub} has no a/b, or it is private"),
        ("good", "a/none", None, None, "{hub} has no a/none, or it is private; correct the name"),
        ("good", "a/b", "v9", None, "a/b has no branch, tag or commit v9; correct the revision"),
        ("bad", "a/b", None, None, "{hub} does not accept the token for a/b; give a valid one in the key token of the"),
        ("good", "a//b", None, None, "a//b is no name of a repository; write owner/name"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    repository: str,
    revision: str | None,
    prepare: Any,
    sentence: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    if prepare is not None:
        prepare(world)
    with pytest.raises(DataError) as told:
        world.fetch(revision, repository)
    assert str(told.value).startswith(f"{FIELD}: {sentence.format(hub=world.server.url)}")
    assert world.waits == []
    assert "\n" not in str(told.value)


@pytest.mark.slow
def test_a_deadline_ends_a_download_that_hangs(world: World) -> None:
    now = [0.0]

    def clock() -> float:
        # Time passes once the hub was asked for the weights, which it holds back.
        now[0] += 100.0 if any("/large/" in path for _, path, *_ in world.server.asked) else 0.0
        return now[0]

    world.server.hold.clear()
    with pytest.raises(
        DataError, match=rf"^{FIELD}: a/b was not downloaded within 600 s \(0.00 of 0.00 GB\); raise spec"
    ):
        world.fetch(spec=HubSpec(timeout_seconds=600), clock=clock)
    assert any(note.startswith("downloading a/b: 0.00 of 0.00 GB") for note in world.notes)


@pytest.mark.slow
def test_too_small_a_disk_is_told_before_the_weights_are_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))  # type: ignore[attr-defined]
    with pytest.raises(
        DataError, match=r"the disk has no room for a/b \(it needs 0.00 GB, and 0.00 GB are free\); name"
    ):
        world.fetch()
    assert not WEIGHTS & set(world.server.downloads())


@pytest.mark.slow
def test_a_shared_cache_is_used_where_it_is_complete(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, commit = world.fetch()
    shared = tmp_path / "shared"
    shutil.move(world.run / "hub", shared / "hub")
    (world.run / "hub.json").unlink()
    world.server.asked.clear()
    monkeypatch.setattr(hub, "HUB_CACHE", str(shared))
    spec = HubSpec(cache_claim="models", token_secret=SecretKey(name="hf"))
    folder, found = world.fetch(spec=spec)
    assert (found, world.server.asked) == (commit, [])
    assert shared in folder.parents
    (folder / sorted(WEIGHTS)[0]).unlink()
    folder, found = world.fetch(spec=spec)
    assert found == commit
    assert world.run in folder.parents


@pytest.mark.slow
def test_on_one_machine_the_users_own_cache_is_used_and_will_do_without_a_network(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = Hub(HubSpec(), world.run)
    folder = first.describe("actor", FIELD, "a/b", None)
    first.download_weights()
    assert tmp_path / "home" in folder.parents
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "other").mkdir()
    other = Hub(HubSpec(), tmp_path / "other")
    assert other.describe("actor", FIELD, "a/b", None) == folder
    other.download_weights()
    assert other.commits == first.commits


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_told_and_gets_its_room_back(world: World, number: int) -> None:
    """As the client raises it: in the course of another error."""
    error = RuntimeError("the download broke off")
    error.__cause__ = OSError(number, "no space left")
    assert kind_of(error) == "full"
    half = world.run / "hub/models--a--b/blobs/x.incomplete"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    make_room(Request("a/b", "main", str(world.run / "hub")))
    assert not half.exists()


def _described(world: World, **config: Any) -> Hub:
    """The hub, with a described model of this config.json."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    content = json.dumps({"model_type": "llama", **small, **config}).encode()
    world.server.repositories["a/b"].push({**FILES, "config.json": content})
    hub = world.hub()
    hub.describe("actor", FIELD, "a/b", None)
    return hub


@pytest.mark.slow
def test_a_model_is_proved_once_before_its_weights_come(world: World) -> None:
    _described(world).prove(lambda name: False)
    record = world.run / "proofs" / "actor.json"
    told = json.loads(record.read_text())
    assert told["proved"]
    assert {"attention", "gradients", "vLLM"} <= {each["check"] for each in told["findings"]}
    assert not any(path.endswith(".safetensors") for _, path, _, _ in world.server.asked)
    written = record.stat().st_mtime_ns
    _described(world).prove(lambda name: False)  # a resumed run
    assert record.stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_model_that_fails_its_proof_is_refused(world: World) -> None:
    with pytest.raises(DataError, match=re.escape(FIELD) + ".* a/b: .*num_hidden_layers"):
        _described(world, num_hidden_layers="two").prove(lambda name: False)
    assert not json.loads((world.run / "proofs" / "actor.json").read_text())["ok"]


def test_a_coordinator_without_torch_says_that_nothing_was_proved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = _described(world)
    monkeypatch.setattr(proof, "installed_versions", lambda: {"python": "3.11.9"})
    hub.prove(lambda name: False)
    assert json.loads((world.run / "proofs" / "actor.json").read_text())["proved"] is False


def test_a_proof_holds_for_all_names_of_a_model_and_for_the_versions_that_made_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"python": "3.11.9"}
    proved: list[bool] = []

    def passes(folder: Path, field: str, trusted: bool, deadline: float) -> dict[str, Any]:
        proved.append(trusted)
        return {"ok": True, "findings": []}

    monkeypatch.setattr(proof, "installed_versions", lambda: dict(versions))
    monkeypatch.setattr(proof, "_proved", passes)

    def prove(*trusted: str) -> list[bool]:
        """The proofs that a process of the run makes: whether each may run the model's code."""
        hub = world.hub()
        for name in ("actor", "critic", "tokenizer"):
            hub.describe(name, FIELD, "a/b", None)
        proved.clear()
        hub.prove(lambda name: name in trusted)
        return list(proved)

    def records() -> dict[str, bool]:
        return {path.stem: json.loads(path.read_text())["proved"] for path in (world.run / "proofs").iterdir()}

    assert prove() == []
    assert records() == {"actor": False, "critic": False}
    versions["torch"] = "2.13.0"
    assert prove() == [False]
    assert records() == {"actor": True, "critic": True}
    assert prove() == []
    (world.run / "proofs" / "critic.json").unlink()
    assert prove() == []
    assert records() == {"actor": True, "critic": True}
    versions["transformers"] = "5.11.0"
    assert prove() == [False]
    assert prove("critic") == [True]


def test_which_files_are_the_models() -> None:
    names = list(FILES)
    assert set(small_files(names, code=False)) == SMALL
    assert set(small_files(names, code=True)) == {*SMALL, "modeling_own.py"}
    assert set(weight_files(names, INDEX)) == WEIGHTS
    assert weight_files(["model.safetensors", "consolidated.safetensors"], None) == ["model.safetensors"]
    assert weight_files(["pytorch_model.bin", "onnx/model.safetensors"], None) == []
