"""Trained models are copied to where spec.output says: a folder, or an S3 server that is a real one."""

import json
import socket
import subprocess
from pathlib import Path

import pytest

from dovetail.coordinator.loop.failure import is_final
from dovetail.coordinator.store.delivery import OutputError, check, deliver, deliver_history
from dovetail.manifest.types import ObjectStorage, Output, Stage
from helpers.chart_tools import tool
from helpers.cluster import wait_for
from helpers.free_ports import free_port

STAGES = [Stage.SFT, Stage.PPO]
KEYS = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "something"}
BIG = bytes(range(256)) * (80 << 10)  # more than one part of an upload


@pytest.fixture
def models(tmp_path):
    """What a run leaves: two models, the configuration of one, and one that is not whole."""
    folder = tmp_path / "models"
    for name, content in {"actor": BIG, "sft": b"weights"}.items():
        (folder / name / "value_head").mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        (folder / name / "dovetail.json").write_text(json.dumps({"run": "a", "step": 3}))
        (folder / name / "model.safetensors").write_bytes(content)
        (folder / name / "value_head" / "model.safetensors").write_bytes(b"head")
    (folder / "actor-config").mkdir()
    (folder / "actor-config" / "config.json").write_text("{}")
    (folder / "critic").mkdir()
    return folder


def read(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_gets_the_models_and_those_of_before_are_replaced(models, tmp_path):
    target = tmp_path / "published" / "chat"
    output = Output(path=str(target))
    check(output, STAGES, "a")
    assert list(target.iterdir()) == []
    assert deliver(output, models, "a") == ["sft", "actor"]
    (models / "actor" / "model.safetensors").write_bytes(b"better")
    (models / "actor" / "value_head" / "model.safetensors").unlink()
    assert deliver(output, models, "a") == ["sft", "actor"]
    assert sorted(path.name for path in target.iterdir()) == ["actor", "sft"]
    for name in ("actor", "sft"):
        assert read(target / name) == read(models / name)
    assert deliver(None, models, "a") == ["sft", "actor"]


def test_the_history_goes_beside_the_models(models, tmp_path):
    run_dir, output = tmp_path, Output(path=str(tmp_path / "published"))
    (run_dir / "history.jsonl").write_text('{"step": 1}\n')
    for rows in ('{"step": 1}\n', '{"step": 1}\n{"step": 2}\n'):
        (run_dir / "history.jsonl").write_text(rows)
        deliver_history(output, run_dir, "a")
        assert read(tmp_path / "published") == {"runs/a/history.jsonl": rows.encode()}
    deliver_history(None, run_dir, "a")


def a_base_model(folder):
    """Someone's own model, of no run."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("the only copy")


def a_model_of_another_run(folder):
    a_base_model(folder)
    (folder / "dovetail.json").write_text('{"run": "b"}')


def notes_beside_a_delivered_model(folder):
    a_base_model(folder)
    (folder / "dovetail.json").write_text('{"run": "a"}')
    (folder / "notes.md").write_text("mine")


def notes_alone(folder):
    folder.mkdir(parents=True)
    (folder / "notes.md").write_text("mine")


def a_link(folder):
    a_base_model(folder.parent.parent / "base")
    folder.parent.mkdir()
    folder.symlink_to(folder.parent.parent / "base")


FOREIGN = [a_base_model, a_model_of_another_run, notes_beside_a_delivered_model, notes_alone, a_link]


@pytest.mark.parametrize("make", FOREIGN)
def test_what_the_run_has_not_copied_there_is_not_replaced(models, tmp_path, make):
    target = tmp_path / "models-of-mine"
    make(target / "actor")
    before, output = read(tmp_path), Output(path=str(target))
    for refused in (lambda: check(output, STAGES, "a"), lambda: deliver(output, models, "a")):
        with pytest.raises(
            OutputError, match=rf"spec\.output: {target}/actor.* move it away, or set another"
        ) as caught:
            refused()
        assert is_final(caught.value)
        assert {
            name: content for name, content in read(tmp_path).items() if not name.startswith("models-of-mine/sft")
        } == before
    check(output, [Stage.SFT], "a")


def test_a_folder_that_cannot_be_is_told_at_once(models, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"spec\.output: the models cannot be copied to .*/file/models: "):
        check(Output(path=str(tmp_path / "file" / "models")), STAGES, "a")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of an S3 server with the bucket `models`."""
    root = tmp_path_factory.mktemp("s3")
    (root / "models").mkdir()
    address = f"127.0.0.1:{free_port()}"
    keys = ("--access", KEYS["AWS_ACCESS_KEY_ID"], "--secret", KEYS["AWS_SECRET_ACCESS_KEY"])
    words = (tool("versitygw"), *keys, "--port", address, "posix", str(root))
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    host, port = address.split(":")

    def answers():
        assert process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    try:
        wait_for("the S3 server", answers, interval=0.05)
        yield f"http://{address}", root
    finally:
        process.terminate()
        process.wait()


def storage(server, **more):
    return Output(s3=ObjectStorage(**{"bucket": "models", "prefix": "team/chat/", "endpoint": server[0]} | more))


@pytest.mark.slow
def test_object_storage_gets_the_models_in_parts(server, models, monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    root: Path = server[1] / "models" / "team" / "chat"
    check(storage(server), STAGES, "a")
    assert not root.exists() or read(root) == {}
    assert deliver(storage(server), models, "a") == ["sft", "actor"]
    (models / "actor" / "model.safetensors").write_bytes(b"better" + BIG)
    assert deliver(storage(server), models, "a") == ["sft", "actor"]
    for name in ("actor", "sft"):
        assert read(root / name) == read(models / name)
    (models / "events.jsonl").write_text("{}\n")
    deliver_history(storage(server), models, "a")
    assert read(root / "runs") == {"a/events.jsonl": b"{}\n"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [a_base_model, a_model_of_another_run])
def test_a_model_of_another_in_object_storage_is_not_replaced(server, models, monkeypatch, make):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    output = storage(server, prefix=make.__name__)
    folder: Path = server[1] / "models" / make.__name__ / "actor"
    make(folder)
    before = read(folder)
    for refused in (lambda: check(output, STAGES, "a"), lambda: deliver(output, models, "a")):
        with pytest.raises(OutputError, match=rf"s3://models/{make.__name__}/actor is .*nothing was replaced"):
            refused()
    assert read(folder) == before


@pytest.mark.parametrize(
    ("changed", "keys"),
    [({"bucket": "mistyped"}, KEYS), ({}, KEYS | {"AWS_SECRET_ACCESS_KEY": "wrong"})],
    ids=["bucket", "key"],
)
def test_a_wrong_bucket_or_key_ends_the_job_before_it_trains(server, monkeypatch, changed, keys):
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    output = storage(server, **changed)
    where = f"s3://{output.s3.bucket}/team/chat"
    with pytest.raises(OutputError, match=rf"spec\.output: the models cannot be copied to {where}: ") as caught:
        check(output, STAGES, "a")
    assert is_final(caught.value)


@pytest.mark.slow
def test_a_server_that_is_away_is_tried_again(server, monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(OSError, match=r"spec\.output: the models cannot be copied to s3://models/") as caught:
            check(storage(server, endpoint=address), STAGES, "a")
    assert not is_final(caught.value)
