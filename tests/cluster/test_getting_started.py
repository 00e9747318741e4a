"""docs/getting-started-cluster.md as it is written: its commands, one after the other, on real kubelets, where
NetworkPolicies are executed. So all that a job needs of others passes the policies of the chart and of the operator."""

from __future__ import annotations

import base64
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
from urllib.parse import urlsplit

import pytest
import yaml
from devcluster import binaries, images
from devcluster.settings import NODES, find
from safetensors import safe_open

from helpers import policies
from helpers.chart_tools import CHART
from helpers.cluster import REPOSITORY, KubeCluster, external, running, wait_for
from helpers.earlier_chart import earlier_chart
from helpers.fake_hub import FakeHub, folder_files
from helpers.free_ports import free_port
from helpers.patience import PATIENCE
from helpers.tiny_qwen import save_tiny_qwen

pytestmark = [
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
    with running("dovetail-start", policies=policies.lacking() is None) as cluster:
        yield cluster


@contextmanager
def registry(host: str, folder: Path) -> Iterator[str]:
    """A registry without TLS at this address of the machine; host:port."""
    address = f"{host}:{free_port(host)}"
    (folder / "registry").mkdir()
    serve = ["registry", "serve", "--address", address, "--disk", str(folder / "registry")]
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen([str(binaries.path_of("crane")), *serve], stdout=log, stderr=subprocess.STDOUT)
    try:

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex((host, int(address.rsplit(":", 1)[1]))) == 0

        wait_for("the registry", listens)
        yield address
    finally:
        process.terminate()
        process.wait(PATIENCE)


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
    # As a hub does, this one sends clients elsewhere for large files.
    ports = [{"protocol": "TCP", "port": server.server_address[1]} for server in hub.servers]
    open_to = {"to": [{"ipBlock": {"cidr": f"{state.host}/32"}}], "ports": ports}
    site = {
        "networkPolicy": {"jobEgress": {"more": [open_to]}},
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
    (operator,) = own.items("deployments", "-n", "dovetail-system", "-l", "app.kubernetes.io/component=operator")
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


@pytest.mark.nightly
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

        wait_for(f"{reason} and {words!r}", told, 1200, 1.0)
        own.kubectl("delete", "rlhfjob", "first", "-n", namespace)


HELD = """
import pathlib, time

_score = score

def score(*arguments, **fields):
    while pathlib.Path(__file__).with_name("hold").exists():
        time.sleep(0.2)
    return _score(*arguments, **fields)
"""


def logs_of_coordinators(own: KubeCluster, mine: tuple[str, ...]) -> str:
    """The last lines of every coordinator's pod that is left."""
    return own.kubectl("logs", "-l", "app.kubernetes.io/component=coordinator", "--tail=20", "--prefix", *mine)


def release(own: KubeCluster, *words: str) -> None:
    """Another version of the chart, and operators of it that work."""
    own.helm(*words, "--namespace", "dovetail-system", "--force-conflicts")
    rollout = ("rollout", "status", "deployment/dovetail-operator", "--namespace", "dovetail-system", "--timeout=900s")
    own.kubectl(*rollout, timeout=930)


def operator_pods(own: KubeCluster) -> list[str]:
    words = ("pods", "-n", "dovetail-system", "-l", "app.kubernetes.io/component=operator")
    return [pod["metadata"]["name"] for pod in own.items(*words)]


def metrics(own: KubeCluster, namespace: str, pod: str, port: int) -> str:
    """As a Prometheus in the cluster would read them."""
    return own.kubectl("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/metrics")


@pytest.mark.nightly
def test_a_model_in_a_shared_cache_and_code_on_a_claim_while_the_chart_is_upgraded(
    own: KubeCluster, place: dict[str, Any], tmp_path: Path
) -> None:
    """The hub is asked for nothing, and the coordinator's pod is as the manifest wants it. An upgrade of the chart and
    its rollback restart no pod of the job. The results are where spec.output says, and the claim outlives the job."""
    assert own.get("crd", "rlhfjobs.dovetail.dev"), "the first test did not come so far"
    snapshot = tmp_path / "hub" / f"models--{REPOSITORY_ID.replace('/', '--')}" / "snapshots" / place["commit"]
    shutil.copytree(place["folder"] / "model", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text(place["commit"])
    for name in ("rewards/grader.py", "prompts.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / "examples/cluster" / Path(name).name, tmp_path / name)
    with (tmp_path / "rewards/grader.py").open("a") as code:
        code.write(HELD)
    (tmp_path / "rewards/hold").touch()
    document = yaml.safe_load((REPOSITORY / "examples/cluster/getting-started.yaml").read_text())
    spec = document["spec"]
    spec["hub"] = {"cacheClaim": "my-data"}
    spec["models"]["reward"]["code"] = {"pvc": "my-data/rewards"}
    spec["models"]["reward"]["timeoutSeconds"] = 1800
    spec["ppo"]["iterations"] = 1
    spec["output"] = {"pvc": "my-data/trained"}
    patch = {"name": "dovetail", "env": [{"name": "GREETING", "value": "hello"}]}
    spec["coordinator"] = {"podTemplate": {"metadata": {"labels": {"team": "blue"}}, "spec": {"containers": [patch]}}}
    with own.namespace() as namespace:
        mine = ("--namespace", namespace)
        own.upload(tmp_path, namespace)
        place["hub"].asked.clear()
        (older := tmp_path / "older").mkdir()
        chart = str(earlier_chart(older))
        release(own, "upgrade", "dovetail", chart, "--reuse-values", "--set", "operator.podLabels.release=older")
        own.apply(document, namespace=namespace)

        def pods() -> dict[str, str]:
            found = own.items("pods", "-l", "dovetail.dev/job=first", *mine)
            return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}

        def conditions() -> dict[str, Any]:
            status = own.get("rlhfjob", "first", *mine).get("status", {})
            return {each["type"]: each for each in status.get("conditions", [])}

        def runs() -> bool:
            held = conditions()
            assert held.get("Failed", {}).get("status") != "True", held["Failed"]
            return held.get("Running", {}).get("status") == "True"

        wait_for("all pods", runs, 900, 1.0)
        before, operators = pods(), operator_pods(own)
        release(own, "upgrade", "dovetail", str(CHART), "--reuse-values", "--set", "operator.podLabels.release=newer")
        wait_for("the old operators' end", lambda: not set(operator_pods(own)) & set(operators))
        patch = ("patch", "rlhfjob", "first", *mine, "--type=merge", "-p", '{"spec":{"retry":1}}')
        own.kubectl(*patch)
        wait_for("the new operator", lambda: own.get("rlhfjob", "first", *mine)["status"].get("retry") == 1)
        release(own, "rollback", "dovetail", "2")
        assert "retry" not in own.get("rlhfjob", "first", *mine)["spec"], "the older definition does not know it"
        assert runs()
        assert pods() == before, "neither the upgrade nor the rollback restarted a pod"
        for pod in before:
            port = 8000 if "-coordinator-" in pod else 9000 if "-trainers-" in pod else 8001
            assert re.search("^(dovetail|vllm)[_:]", metrics(own, namespace, pod, port), re.MULTILINE), pod
        only_where_values_say(own, place["hub"].url, namespace, sorted(before)[0])
        live_in_the_api(own, namespace)
        own.kubectl("exec", "upload", *mine, "--", "rm", "/data/rewards/hold")

        def ends() -> list[str]:
            status = own.get("rlhfjob", "first", *mine).get("status", {})
            return [c["type"] for c in status.get("conditions", []) if c["status"] == "True"]

        wait_for("the end", lambda: {"Completed", "Failed"} & set(ends()), 1200, 1.0)
        assert "Completed" in ends(), own.kubectl("describe", "rlhfjob", "first", *mine)
        assert place["hub"].asked == []
        # Those of the trainers go at the end.
        assert pods().items() <= before.items(), logs_of_coordinators(own, mine)
        (trained,) = own.get("rlhfjob", "first", *mine)["status"]["artifacts"]
        assert (trained["path"], trained["copy"]) == ("first/models/actor", "my-data/trained/actor")
        there = own.kubectl("exec", "upload", *mine, "--", "ls", "/data/trained/actor").split()
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(there)
        the_operators_word(own, f"{namespace}/first")
        (pod,) = own.items("pods", "-l", "team=blue", *mine)
        variables = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        assert variables["GREETING"] == "hello"
        assert "HF_TOKEN" not in variables
        expires = ("patch", "rlhfjob", "first", *mine, "--type=merge", "-p", '{"spec":{"ttlSecondsAfterFinished":1}}')
        own.kubectl(*expires)
        wait_for("the job gone", lambda: own.get("rlhfjob", "first", *mine) is None)
        wait_for("its pods gone", lambda: not pods())
        claim = own.get("pvc", "first-files", *mine)["metadata"]
        assert claim["annotations"]["dovetail.dev/folder"] == "first"
        assert "deletionTimestamp" not in claim


def live_in_the_api(own: KubeCluster, namespace: str) -> None:
    """A user of the namespace reads the job's progress from the chart's status API, which asks the coordinator."""
    own.kubectl("create", "serviceaccount", "reader", "-n", namespace)
    bound = ("--clusterrole=view", f"--serviceaccount={namespace}:reader")
    own.kubectl("create", "rolebinding", "reader", "-n", namespace, *bound)
    token = own.kubectl("create", "token", "reader", "-n", namespace).strip()
    url = f"http://dovetail-api.dovetail-system/api/v1/namespaces/{namespace}/rlhfjobs/first"
    ask = ("exec", "upload", "-n", namespace, "--", "wget", "-qO-", "--header", f"Authorization: Bearer {token}", url)

    def told() -> dict[str, Any]:
        done = own.try_kubectl(*ask)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    wait_for("the status API", told)
    wait_for("live progress", lambda: told().get("live", {}).get("reachable"))


def only_where_values_say(own: KubeCluster, hub: str, namespace: str, pod: str) -> None:
    """A pod of the job connects to the hub, but not to the API server. This shows that the policies are executed."""
    assert own.name is not None
    state = find(own.name)
    assert state is not None
    address = urlsplit(hub)
    assert address.hostname is not None
    assert address.port is not None
    places = [(address.hostname, address.port), (state.address, 6443)]
    assert policies.reached(own, namespace, pod, places) == [True, policies.lacking() is not None]


def the_operators_word(own: KubeCluster, job: str) -> None:
    """What the operator that leads wrote and counted of a job that is over."""
    namespace, name = job.split("/")
    told = {pod: own.kubectl("logs", pod, "-n", "dovetail-system") for pod in operator_pods(own)}
    lines = {pod: [json.loads(line) for line in text.splitlines()] for pod, text in told.items()}
    for line in (line for each in lines.values() for line in each):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]), line
        assert {"level", "event"} <= line.keys()
    # The lease may have gone from one pod to the other: the last one that told of the job.
    of_job = {pod: [line["time"] for line in each if line.get("job") == job] for pod, each in lines.items()}
    leader = max((pod for pod, times in of_job.items() if times), key=lambda pod: of_job[pod][-1])
    states = [line["state"] for line in lines[leader] if line.get("job") == job and line["event"] == "job.state"]
    assert states[-1] == "Completed", states
    text = metrics(own, "dovetail-system", leader, 8080)
    labels = f'namespace="{namespace}",reason="AllStagesDone",rlhfjob="{name}",state="Completed"'
    (state,) = (line for line in text.splitlines() if line.startswith("dovetail_job_state{") and name in line)
    assert set(re.findall(r'\w+="[^"]*"', state)) == set(labels.split(","))
    assert state.endswith(" 1.0")
    assert re.search(r"^dovetail_operator_leading 1.0$", text, re.MULTILINE)


@pytest.mark.nightly  # it builds cosign
def test_a_release_is_signed_with_the_packages_of_its_images(tmp_path: Path) -> None:
    """Whoever has the public key checks images, chart and lists with the commands that `make release` prints."""
    thin_images(tmp_path)
    cosign = binaries.path_of("cosign")
    environment = {**os.environ, "COSIGN_PASSWORD": "", "PATH": f"{cosign.parent}:{os.environ['PATH']}"}

    def run(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    run(cosign, "generate-key-pair")
    with registry("127.0.0.1", tmp_path) as address:
        options = f"--insecure --tag {TAG} --folder {tmp_path / 'release'}"
        key = tmp_path / "cosign.key"
        made = run("make", "-s", "-C", REPOSITORY, "release", f"REGISTRY={address}/team", f"KEY={key}",
                   f"RELEASE_ARGS={options}")  # fmt: skip
        checks = [line.split() for line in made.stdout.splitlines() if line.startswith("cosign ")]
        assert len(checks) == 7, "three images with their lists, and the chart"
        for words in checks:
            run(*words)
        # Another's signature does not count.
        for name in ("other", "pulled"):
            (tmp_path / name).mkdir()
        run("sh", "-c", f"cd other && {cosign} generate-key-pair")
        other = [str(tmp_path / "other/cosign.pub") if word.endswith("cosign.pub") else word for word in checks[0]]
        assert run(*other, check=False).returncode != 0
        # The list of an image is in the registry, and names what its lock names.
        (words,) = (w for w in checks if w[1] == "verify-attestation" and "/operator@" in w[-1])
        payload = json.loads(run(*words).stdout.splitlines()[0])["payload"]
        listed = json.loads(base64.b64decode(payload))["predicate"]["components"]
        locked = re.findall(r"^([\w.-]+)==([\w.+-]+)", (REPOSITORY / "requirements/operator.txt").read_text(), re.M)
        assert {(p["name"].lower(), p["version"]) for p in listed} == {(name.lower(), v) for name, v in locked}
        # The chart that was signed is the one that is installed, and its pods have the signed images.
        chart, digest = checks[-1][-1].split("@")
        pulled = run(
            binaries.path_of("helm"), "pull", f"oci://{chart}@{digest}", "--plain-http", "-d", tmp_path / "pulled"
        )
        assert digest in pulled.stdout + pulled.stderr
        (package,) = (tmp_path / "pulled").iterdir()
        made_of = run(binaries.path_of("helm"), "template", package, "-f", tmp_path / "release/values.yaml").stdout
        for words in checks[:-1]:
            assert words[-1] in made_of
