"""Jobs on real kubelets: a whole one with real vLLM on three kinds of nodes, and what each failure is called."""

from __future__ import annotations

import json
import runpy
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.cluster import REPOSITORY, KubeCluster, wait_for
from helpers.cluster_jobs import ClusterJob
from helpers.jobs import MANIFEST, events, history
from helpers.operator_process import OperatorProcess, established, install, kubeconfig, operator

JOB_SECONDS = 1500.0
GROUPS = [
    {"name": "a100", "roles": ["trainer"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 1}},
    {"name": "v100", "roles": ["rollout"], "gpu": {"product": "Tesla-V100-SXM2-32GB", "perPod": 1}},
    {"name": "a10", "roles": ["rollout"], "gpu": {"product": "NVIDIA-A10", "perPod": 1}},
]


@pytest.fixture(scope="module")
def leader(cluster: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """The operator, on this machine with the rights of the chart's account."""
    install(cluster, [])
    established(cluster, "rlhfjobs.dovetail.dev")
    folder = tmp_path_factory.mktemp("operator")
    images = {f"DOVETAIL_{name.upper()}_IMAGE": f"dovetail-dev/{name}:dev" for name in ("trainer", "rollout")}
    images["DOVETAIL_COORDINATOR_IMAGE"] = "dovetail-dev/operator:dev"
    with operator(kubeconfig(cluster, folder), folder, "leader", [], **images) as process:
        wait_for("leadership", process.leads)
        yield process


def manifest(namespace: str, groups: list[dict[str, Any]] | None = None, **spec: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(MANIFEST)
    document["metadata"]["namespace"] = namespace
    document["spec"] |= {"groups": groups or GROUPS} | spec
    return document


def job(cluster: KubeCluster, namespace: str) -> dict[str, Any]:
    return dict(cluster.get("rlhfjob", "tiny", "-n", namespace) or {})


def condition(cluster: KubeCluster, namespace: str, kind: str) -> dict[str, Any]:
    found = job(cluster, namespace).get("status", {}).get("conditions") or []
    return next((c for c in found if c["type"] == kind), {})


def unless_failed(cluster: KubeCluster, namespace: str, kind: str) -> dict[str, Any]:
    """`condition`; fails the test if the job has failed, as it would wait in vain."""
    failed = condition(cluster, namespace, "Failed")
    assert failed.get("status") != "True", failed
    return condition(cluster, namespace, kind)


def wait_end(cluster: KubeCluster, namespace: str, seconds: float = JOB_SECONDS) -> str:
    """Completed, or the reason of the failure."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition(cluster, namespace, "Completed").get("status") == "True":
            return "Completed"
        if failed := condition(cluster, namespace, "Failed"):
            return f"{failed['reason']}: {failed['message']}"
        time.sleep(2)
    pods = cluster.kubectl("get", "pods", "-n", namespace, "-o", "wide")
    raise AssertionError(f"not over within {seconds:.0f} s: {json.dumps(job(cluster, namespace)['status'])}\n{pods}")


def test_a_job_runs_to_completion_on_three_kinds_of_nodes(
    cluster: KubeCluster, namespace: str, leader: OperatorProcess
) -> None:
    cluster.apply(
        manifest(namespace, ppo={"iterations": 3, "globalBatchSize": 16, "miniBatchSize": 8}), namespace=namespace
    )
    # Not Running: one rollout is enough for a job so short, and the other may be ready only when all is done.
    wait_for("nodes", lambda: unless_failed(cluster, namespace, "Scheduled").get("status") == "True", JOB_SECONDS)
    pods = cluster.items("pods", "-n", namespace)
    where = {p["metadata"]["labels"].get("dovetail.dev/group", "coordinator"): p["spec"]["nodeName"] for p in pods}
    products = {
        n["metadata"]["name"]: n["metadata"]["labels"]["nvidia.com/gpu.product"] for n in cluster.items("nodes")
    }
    for group in GROUPS:
        assert products[where[group["name"]]] == group["gpu"]["product"]
    assert wait_end(cluster, namespace) == "Completed"
    status = job(cluster, namespace)["status"]
    assert (status["stage"], status["iteration"], status["iterations"]) == ("ppo", 3, 3)
    assert isinstance(status["reward"], float)
    assert status["samplesPerSecond"] > 0
    wait_for(
        "no pod left running",
        lambda: (
            not [p for p in cluster.items("pods", "-n", namespace) if p["status"]["phase"] in ("Pending", "Running")]
        ),
    )
    # JobSet ends what still runs when the coordinator has ended. That is no failure of a trainer.
    trainers = cluster.items("pods", "-n", namespace, "-l", "dovetail.dev/group=a100")
    assert {pod["status"]["phase"] for pod in trainers} <= {"Succeeded"}
    row = cluster.kubectl("get", "rlhfjobs", "-n", namespace)
    assert "ppo" in row
    cluster.kubectl("delete", "rlhfjob", "tiny", "-n", namespace)
    kinds = "jobsets,jobs,pods,configmaps,services,secrets,serviceaccounts,networkpolicies"
    selector = ("-l", "dovetail.dev/job=tiny", "-o", "name")
    wait_for("nothing left", lambda: cluster.kubectl("get", kinds, "-n", namespace, *selector) == "")
    assert cluster.kubectl("get", "pvc", "-n", namespace, *selector).strip() == "persistentvolumeclaim/tiny-files"


def trainer_alone(namespace: str, more: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A job of SFT whose trainer has this. A server that starts in vain beside it would import for long."""
    return manifest(namespace, [GROUPS[0] | more], stages=["sft"], **spec)


def container(**more: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "dovetail", **more}]}}


# What the trainer has; the condition, its reason and its words.
CAUSES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "a product that no node has": (
        {"gpu": {"product": "NVIDIA-H100-PCIe", "perPod": 1}},
        "Scheduled",
        "Unschedulable",
        "nodes are available",
    ),
    "more GPUs than a node has": (
        {"gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 64}},
        "Scheduled",
        "Unschedulable",
        "Insufficient nvidia.com/gpu",
    ),
    "an image that does not exist": (
        {"image": "dovetail-dev/nothing:here"},
        "Running",
        "ImagePullFailed",
        "dovetail-dev/nothing:here",
    ),
    "a secret that is missing": (
        {
            "podTemplate": container(
                env=[{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]
            )
        },
        "Running",
        "SecretOrConfigMapMissing",
        'secret "hub" not found',
    ),
    "a secret to mount that is missing": (
        {
            "podTemplate": {
                "spec": {
                    "volumes": [{"name": "keys", "secret": {"secretName": "hub-keys"}}],
                    "containers": [{"name": "dovetail", "volumeMounts": [{"name": "keys", "mountPath": "/keys"}]}],
                }
            }
        },
        "Running",
        "SecretOrConfigMapMissing",
        'secret "hub-keys" not found',
    ),
    "a pod that no API server takes": (
        {"podTemplate": {"spec": {"dnsPolicy": "Nonsense"}}},
        "Scheduled",
        "PodsRefused",
        'JobSet tiny cannot make its Jobs: job "tiny-a100-0" creation failed with error: ',
    ),
    "a field that Kubernetes does not know": (
        {"podTemplate": {"spec": {"nodeselector": {"disk": "fast"}}}},
        "Scheduled",
        "ObjectRejected",
        # The second part of the JobSet is that of a100.
        'unknown field "spec.replicatedJobs[1].template.spec.template.spec.nodeselector"',
    ),
    "a claim that is missing": (
        {"podTemplate": {"spec": {"volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "hub"}}]}}},
        "Scheduled",
        "VolumeClaimMissing",
        'persistentvolumeclaim "hub" not found',
    ),
}


# Of each reason one; the others differ in the words of Kubernetes.
ALWAYS = (
    "a claim that is missing",
    "a product that no node has",
    "a secret that is missing",
    "an image that does not exist",
)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.nightly) for each in sorted(CAUSES)]
)
def test_pods_that_cannot_start_are_explained(
    cluster: KubeCluster, namespace: str, leader: OperatorProcess, name: str
) -> None:
    more, kind, reason, words = CAUSES[name]
    cluster.apply(trainer_alone(namespace, more), namespace=namespace)
    wait_for(reason, lambda: condition(cluster, namespace, kind).get("reason") == reason, 1200)

    def explained() -> bool:
        # Another pod may be the first to be refused, for as long as the job's own volume is being made.
        message = condition(cluster, namespace, kind).get("message", "")
        return words in message and ("a100" in message or reason == "ObjectRejected")

    wait_for(f"{words!r} of a100's pod", explained, 1200)
    wait_for("kubectl describe", lambda: described(cluster, namespace, "tiny", reason, words))


def described(cluster: KubeCluster, namespace: str, name: str, *words: str) -> bool:
    """Whether a person who asks for the job with kubectl reads all this."""
    text = cluster.kubectl("describe", "rlhfjob", name, "-n", namespace)
    return all(each in text for each in words)


HUGE = {"requests": {"memory": "2Ti"}, "limits": {"memory": "2Ti"}}
# What an admission plug-in says of the pods of a job with such a template.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "security": ({"spec": {"hostNetwork": True}}, 'violates PodSecurity "baseline:latest": host namespaces'),
    "limits": (container(resources=HUGE), "maximum memory usage per Container is 1Ti, but limit is 2Ti"),
    "priority": ({"spec": {"priorityClassName": "urgent"}}, "no PriorityClass with name urgent was found"),
    "runtime": ({"spec": {"runtimeClassName": "gvisor"}}, 'RuntimeClass "gvisor" not found'),
    # The quota looks at what everything else lets through.
    "quota": ({"metadata": {"labels": {"any": "one"}}}, "exceeded quota: none"),
}


def test_what_admission_plug_ins_refuse_is_told(cluster: KubeCluster, namespace: str, leader: OperatorProcess) -> None:
    """All at once. None of these jobs gets a pod, so nothing is computed."""
    kinds = {
        "LimitRange": {"limits": [{"type": "Container", "max": {"memory": "1Ti"}}]},
        "ResourceQuota": {"hard": {"pods": "0"}},
    }
    for kind, spec in kinds.items():
        cluster.apply(
            {"apiVersion": "v1", "kind": kind, "metadata": {"name": "none"}, "spec": spec}, namespace=namespace
        )
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=baseline")
    for name, (template, _) in REFUSED.items():
        document = manifest(namespace, [group | {"podTemplate": template} for group in GROUPS])
        document["metadata"]["name"] = name
        document["spec"]["coordinator"] = {"podTemplate": template}
        cluster.apply(document, namespace=namespace)
    for name, (_, words) in REFUSED.items():
        why = ("PodsRefused", f"Job {name}-", "cannot make its pods: ", words)
        wait_for(f"why {name} waits", lambda name=name, why=why: described(cluster, namespace, name, *why))
    assert not cluster.items("pods", "-n", namespace)


@pytest.mark.nightly
def test_a_job_that_finds_no_node_gives_up_in_time_and_holds_no_gpus(
    cluster: KubeCluster, namespace: str, leader: OperatorProcess
) -> None:
    # The rollout finds its node, and must leave it.
    groups = [GROUPS[0] | {"gpu": {"product": "NVIDIA-H100-PCIe", "perPod": 1}}, GROUPS[1]]
    document = manifest(namespace, groups, failurePolicy={"startTimeoutSeconds": 30})
    cluster.apply(document, namespace=namespace)
    assert wait_end(cluster, namespace, 600).startswith("Unschedulable: pod tiny-a100-0-0-")
    wait_for("no pods", lambda: not (cluster.get("pods", "-n", namespace) or {}).get("items"))


def test_running_out_of_memory_fails_the_job_with_its_name(
    cluster: KubeCluster, namespace: str, leader: OperatorProcess
) -> None:
    memory = {kind: {"memory": "64Mi"} for kind in ("requests", "limits")}
    more = {"podTemplate": container(resources=memory)}
    document = trainer_alone(namespace, more, failurePolicy={"maxRestarts": 0})
    cluster.apply(document, namespace=namespace)
    end = wait_end(cluster, namespace, 600)
    assert end.startswith("OOMKilled: pod tiny-a100-0-0-"), end


def test_a_missing_model_fails_the_job_with_the_coordinators_sentence(
    cluster: KubeCluster, namespace: str, leader: OperatorProcess
) -> None:
    models = {"actor": {"source": {"path": "/models/nothing"}}, "tokenizer": {"path": "/models/nothing"}}
    cluster.apply(trainer_alone(namespace, {}, models=models), namespace=namespace)
    end = wait_end(cluster, namespace, 600)
    assert end.startswith("CoordinatorFailed: pod tiny-coordinator-0-0-"), end
    assert "/models/nothing" in end


@pytest.mark.nightly
def test_suspending_a_running_job_frees_its_gpus_and_it_goes_on_where_it_was(
    cluster: KubeCluster, namespace: str, leader: OperatorProcess
) -> None:
    """By hand; tests/cluster/test_kueue.py has a job with rollouts that is evicted."""
    sft = yaml.safe_load(MANIFEST)["spec"]["sft"] | {"steps": 1000}
    trainers, checkpoint = [g for g in GROUPS if "trainer" in g["roles"]], {"everySteps": 5, "keep": 2}
    document = manifest(namespace, trainers, stages=["sft"], sft=sft, checkpoint=checkpoint)
    cluster.apply(document, namespace=namespace)

    def checkpoint_step() -> int:
        unless_failed(cluster, namespace, "Running")
        return int(job(cluster, namespace).get("status", {}).get("lastCheckpoint", {}).get("step") or 0)

    kept = wait_for("a checkpoint", checkpoint_step, JOB_SECONDS)
    cluster.kubectl("patch", "rlhfjob", "tiny", "-n", namespace, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    wait_for("no pods", lambda: not (cluster.get("pods", "-n", namespace) or {}).get("items"))
    wait_for("Suspended", lambda: condition(cluster, namespace, "Suspended").get("status") == "True")
    cluster.kubectl("patch", "rlhfjob", "tiny", "-n", namespace, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    assert wait_end(cluster, namespace) == "Completed"
    assert job(cluster, namespace)["status"]["iteration"] == 1000
    loads = [e for e in events(ClusterJob(cluster, namespace).run_dir(), "trainers.load") if e["stage"] == "sft"]
    assert kept <= loads[-1]["checkpoint_step"] < 1000


def agent(namespace: str, sandbox: str) -> dict[str, Any]:
    """examples/agent.yaml with what docs/how-to/agents.md changes in it for a cluster, and fewer steps."""
    document: dict[str, Any] = yaml.safe_load((REPOSITORY / "examples/agent.yaml").read_text())
    document["metadata"] = {"name": "tiny", "namespace": namespace}
    spec = document["spec"]
    spec["models"]["tokenizer"] = {"pvc": "my-data/agent/tokenizer"}
    spec["models"]["reward"].pop("importPath")
    spec["models"]["reward"]["code"] = {"pvc": "my-data/agent"}
    for kind in ("demonstrations", "prompts"):
        spec["data"][kind] = [{"pvc": f"my-data/agent/{kind}.jsonl"}]
    spec["sessions"]["sandbox"] = sandbox
    spec["sft"]["steps"] = 100
    spec["ppo"] |= {"iterations": 3, "globalBatchSize": 64, "miniBatchSize": 32}
    return document


@pytest.mark.nightly
def test_an_agent_with_tools_on_a_cluster(
    cluster: KubeCluster, namespace: str, leader: OperatorProcess, tmp_path: Path
) -> None:
    """The example. Its pods may make no sandbox, and the job says so before anything is trained."""
    shutil.copytree(REPOSITORY / "examples/agent", tmp_path / "agent", ignore=shutil.ignore_patterns("*.jsonl"))
    runpy.run_path(str(tmp_path / "agent/make.py"))["write_task"](tmp_path / "agent")
    cluster.upload(tmp_path, namespace, image="dovetail-dev/busybox:dev")
    cluster.apply(agent(namespace, "Bubblewrap"), namespace=namespace)
    said = wait_end(cluster, namespace)
    assert "spec.sessions.sandbox: " in said, said
    assert "or write sandbox: None" in said
    cluster.delete("rlhfjob", "tiny", "-n", namespace)
    cluster.apply(agent(namespace, "None"), namespace=namespace)
    assert wait_end(cluster, namespace) == "Completed"
    rows = history(ClusterJob(cluster, namespace).run_dir(), "ppo")
    assert [step for step in sorted(rows) if rows[step]["episode_calls"] > 0] == [1, 2, 3]
