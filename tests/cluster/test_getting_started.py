"""docs/getting-started-cluster.md as it is written: its commands, one after the other, on real kubelets."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from devcluster import binaries, images
from devcluster.settings import NODES, find
from safetensors import safe_open

from helpers.cluster import REPOSITORY, KubeCluster, external, running, wait_for
from helpers.fake_hub import FakeHub, folder_files
from helpers.tiny_qwen import save_tiny_qwen

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(external() is not None, reason="it needs nodes that may pull from a registry without TLS"),
]
PAGE = REPOSITORY / "docs/getting-started-cluster.md"
# What this machine cannot do, and what devcluster did before.
NOT_RUN = ("export REGISTRY=", "make images ", "helm install jobset ")
BUSYBOX = "docker.io/library/busybox:1.37"
REPOSITORY_ID = "Qwen/Qwen3-0.6B"
TOKEN = "hf_testing"
# Not the tag of images that somebody has built here.
TAG = "thin"


def steps() -> list[str]:
    """The shell blocks of the page, without the commands of NOT_RUN."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    left_out = [line for block in blocks for line in block.splitlines() if line.startswith(NOT_RUN)]
    assert len(left_out) == len(NOT_RUN)
    return ["\n".join(line for line in block.splitlines() if line not in left_out) for block in blocks]


@pytest.fixture(scope="module")
def own() -> Iterator[KubeCluster]:
    """A cluster to which nothing was installed yet."""
    with running("dovetail-start") as cluster:
        yield cluster


@contextmanager
def registry(host: str, folder: Path) -> Iterator[str]:
    """A registry without TLS at this address of the machine; host:port."""
    with socket.socket() as free:
        free.bind((host, 0))
        address = f"{host}:{free.getsockname()[1]}"
    (folder / "registry").mkdir()
    serve = ["registry", "serve", "--address", address, "--disk", str(folder / "registry")]
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen([str(binaries.path_of("crane")), *serve], stdout=log, stderr=subprocess.STDOUT)
    try:

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex((host, int(address.rsplit(":", 1)[1]))) == 0

        wait_for("the registry", listens, 60)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def thin_images(folder: Path) -> None:
    """In place of `make images`, which takes gigabytes and an hour: the images of hack/devcluster, by the same names.
    A busybox is put where the examples' pods look for it."""
    archive = folder / "application.tar"
    images.write_archive(archive, [images.application()])
    done = subprocess.run(
        ["buildah", "pull", "--quiet", f"docker-archive:{archive}:dovetail-dev/operator:dev"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in ("operator", "trainer", "rollout"):
        subprocess.run(["buildah", "tag", done.stdout.strip(), f"localhost/dovetail/{name}:{TAG}"], check=True)


@pytest.fixture(scope="module")
def place(own: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Where the commands run, and with which variables: a folder that looks like a checkout."""
    assert own.name is not None
    tmp_path = tmp_path_factory.mktemp("checkout")
    state = find(own.name)
    assert state is not None
    for name in ("Makefile", "hack", "helm", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "config").write_text(own.kubeconfig.read_text())
    for node in NODES:
        words = ("ctr", "-n", "k8s.io", "images", "tag", "--force", "docker.io/dovetail-dev/busybox:dev", BUSYBOX)
        own.devcluster("exec", "--node", node.name, "--", *words)
    hub = FakeHub(state.host)
    hub.tokens = {TOKEN}
    save_tiny_qwen(tmp_path / "model")
    repository = hub.repository(REPOSITORY_ID)
    repository.readers = {TOKEN}
    commit = repository.push(folder_files(tmp_path / "model") | {"pytorch_model.bin": b"pickle"})
    thin_images(tmp_path)
    template = {"spec": {"containers": [{"name": "dovetail", "env": [{"name": "HF_ENDPOINT", "value": hub.url}]}]}}
    # The GPUs here are names only.
    site = {
        "jobs": {"podTemplate": template},
        "images": {name: {"capabilities": ["any"]} for name in ("trainer", "rollout")},
    }
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    with hub.running(), registry(state.host, tmp_path) as address:
        own.devcluster("registry", address)
        environment = {
            **os.environ,
            "KUBECONFIG": str(tmp_path / "config"),
            "PATH": f"{binaries.link_folder()}:{os.environ['PATH']}",
            "REGISTRY": f"{address}/team",
            "PUSH_ARGS": f"--insecure --tag {TAG}",
            "PYTHON": sys.executable,
            "HF_TOKEN": TOKEN,
        }
        try:
            yield {"folder": tmp_path, "environment": environment, "hub": hub, "commit": commit}
        finally:
            names = [f"localhost/dovetail/{name}:{TAG}" for name in ("operator", "trainer", "rollout")]
            names.append("localhost/dovetail-dev/operator:dev")
            subprocess.run(["buildah", "rmi", *names], check=False, capture_output=True)


def test_the_page_as_it_is_written(own: KubeCluster, place: dict[str, Any]) -> None:
    said = []
    for step in steps():
        # A job that fails would be waited for in vain.
        done = subprocess.run(
            ["timeout", "1500", "bash", "-euxo", "pipefail", "-c", step],
            cwd=place["folder"],
            env=place["environment"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            jobs = own.kubectl("describe", "rlhfjobs,pods", "-A", check=False)
            raise AssertionError(f"{step}\n{done.stdout}\n{done.stderr}\n{jobs[-8000:]}")
        said.append(done.stdout)
    hub = place["hub"]
    # The operator came from the registry, by digest.
    (operator,) = own.get("deployments", "-n", "dovetail-system", "-l", "app.kubernetes.io/component=operator")["items"]
    image = operator["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image.startswith(f"{place['environment']['REGISTRY']}/dovetail/operator@sha256:")
    # The model was downloaded once, with the token, and is what the status says.
    models, artifacts = map(json.loads, said[3].splitlines()[-2:])
    assert models == [{"name": "actor", "repository": REPOSITORY_ID, "commit": place["commit"]}]
    assert {(each["name"], each["claim"], each["path"]) for each in artifacts} == {
        ("actor", "first-files", "first/models/actor")
    }
    assert hub.downloads().count("model.safetensors") == 1
    assert not [name for name in hub.downloads() if name.endswith(".bin")]
    # The results are those of training, read after the job's deletion.
    trained = {"config.json", "model.safetensors", "tokenizer.json"}
    assert trained <= set(said[4].split())
    before, after = (safe_open(place["folder"] / name / "model.safetensors", "pt") for name in ("model", "first-model"))
    assert json.loads((place["folder"] / "first-model/config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in after.keys()  # noqa: SIM118 - it is no dict
    old, new = (each.get_tensor("model.embed_tokens.weight") for each in (before, after))
    assert old.shape == new.shape
    assert not old.equal(new)
    assert own.get("rlhfjobs", "-n", "team-a") is None


@pytest.mark.parametrize(
    ("token", "reason", "words"),
    [
        (
            "hf_refused",
            "CoordinatorFailed",
            "does not accept the token for Qwen/Qwen3-0.6B; give a valid one in the key",
        ),
        (None, "SecretOrConfigMapMissing", 'secret "hf-token" not found'),
    ],
)
def test_a_token_that_is_refused_or_missing_is_told_in_a_condition(
    own: KubeCluster, place: dict[str, Any], token: str | None, reason: str, words: str
) -> None:
    """With the operator that the page has installed."""
    assert own.get("crd", "rlhfjobs.dovetail.dev"), "the first test did not come so far"
    document = yaml.safe_load((REPOSITORY / "examples/cluster/getting-started.yaml").read_text())
    # No grader and no data: the hub is asked before they are read.
    document["spec"]["models"]["reward"] = {"function": "grader:score"}
    document["spec"]["data"]["prompts"] = [{"synthetic": {}}]
    with own.namespace() as namespace:
        if token is not None:
            own.kubectl("create", "secret", "generic", "hf-token", f"--from-literal=token={token}", "-n", namespace)
        own.apply(document, namespace=namespace)

        def told() -> bool:
            text = own.kubectl("describe", "rlhfjob", "first", "-n", namespace)
            return reason in text and words in text

        wait_for(f"{reason} and {words!r}", told, 600, 1.0)
        own.kubectl("delete", "rlhfjob", "first", "-n", namespace)


def test_a_model_in_a_shared_cache_and_code_on_a_claim(own: KubeCluster, place: dict[str, Any], tmp_path: Path) -> None:
    """The hub is asked for nothing, and the coordinator's pod is as the manifest wants it."""
    assert own.get("crd", "rlhfjobs.dovetail.dev"), "the first test did not come so far"
    snapshot = tmp_path / "hub" / f"models--{REPOSITORY_ID.replace('/', '--')}" / "snapshots" / place["commit"]
    shutil.copytree(place["folder"] / "model", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text(place["commit"])
    for name in ("rewards/grader.py", "prompts.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / "examples/cluster" / Path(name).name, tmp_path / name)
    document = yaml.safe_load((REPOSITORY / "examples/cluster/getting-started.yaml").read_text())
    spec = document["spec"]
    spec["hub"] = {"cacheClaim": "my-data"}
    spec["models"]["reward"]["code"] = {"pvc": "my-data/rewards"}
    spec["ppo"]["iterations"] = 1
    patch = {"name": "dovetail", "env": [{"name": "GREETING", "value": "hello"}]}
    spec["coordinator"] = {"podTemplate": {"metadata": {"labels": {"team": "blue"}}, "spec": {"containers": [patch]}}}
    with own.namespace() as namespace:
        mine = ("--namespace", namespace)
        own.kubectl("apply", "-f", str(REPOSITORY / "examples/cluster/data-claim.yaml"), *mine)
        own.kubectl("wait", "--for=condition=Ready", "pod/upload", "--timeout=300s", *mine, timeout=330)
        packed = subprocess.run(["tar", "-C", str(tmp_path), "-cf", "-", "."], check=True, capture_output=True).stdout
        unpack = (str(binaries.path_of("kubectl")), "--kubeconfig", str(own.kubeconfig), "exec", "-i", "upload", *mine)
        subprocess.run([*unpack, "--", "tar", "-C", "/data", "-xof", "-"], input=packed, check=True, timeout=120)
        place["hub"].asked.clear()
        own.apply(document, namespace=namespace)

        def ends() -> list[str]:
            status = own.get("rlhfjob", "first", *mine).get("status", {})
            return [c["type"] for c in status.get("conditions", []) if c["status"] == "True"]

        wait_for("the end", lambda: {"Completed", "Failed"} & set(ends()), 1200, 1.0)
        assert "Completed" in ends(), own.kubectl("describe", "rlhfjob", "first", *mine)
        assert place["hub"].asked == []
        (pod,) = own.get("pods", "-l", "team=blue", *mine)["items"]
        variables = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        assert variables["GREETING"] == "hello"
        assert "HF_TOKEN" not in variables
        own.kubectl("delete", "rlhfjob", "first", *mine)
