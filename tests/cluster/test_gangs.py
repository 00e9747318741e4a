"""Kubernetes' own gangs and its dynamic resource allocation: the real scheduler, on nodes that kwok plays."""

import json
from collections.abc import Iterator

import pytest

from helpers.cluster import KubeCluster, external, wait_for
from helpers.gang_jobs import A100, node, placed, pods, prepare, submit, thing, told
from helpers.operator_process import OperatorProcess, established, install, kubeconfig, operator
from helpers.rlhfjobs import condition

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(external() is not None, reason="it needs feature gates that are alpha"),
]
SPACE = "gangs"
DRIVER = "gpu.example.com"


@pytest.fixture(scope="module")
def server(gang_server: KubeCluster) -> KubeCluster:
    server = gang_server
    prepare(server, SPACE)
    install(server, [SPACE], "jobs.gangScheduler=Kubernetes")
    established(server, "rlhfjobs.dovetail.dev", "jobsets.jobset.x-k8s.io")
    return server


@pytest.fixture(scope="module", autouse=True)
def leader(server: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    config = kubeconfig(server, tmp_path_factory.mktemp("account"))
    folder = tmp_path_factory.mktemp("leader")
    with operator(config, folder, "leader", [SPACE], DOVETAIL_GANG="Kubernetes") as process:
        wait_for("leadership", process.leads)
        yield process


def test_a_gang_is_placed_as_a_whole_or_not_at_all(server: KubeCluster) -> None:
    """There is a GPU for one of two trainers: not even what needs no GPU is placed. The job says why."""
    server.apply(node("one", 1))
    submit(server, SPACE, "whole")
    found = wait_for("the gang", lambda: server.items("podgroups.scheduling.k8s.io", "-n", SPACE))
    (group,) = found
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 4}}
    wait_for("four pods", lambda: len(pods(server, SPACE, "whole")) == 4)
    wait_for("the scheduler's word", lambda: any(map(told, pods(server, SPACE, "whole"))))
    wait_for("a reason", lambda: condition(server, "Scheduled", "whole", SPACE).get("reason") == "Unschedulable")
    assert condition(server, "Scheduled", "whole", SPACE)["message"].startswith("pod whole-")
    assert placed(server, SPACE, "whole") == 0
    server.apply(node("two", 1))
    wait_for("all at once", lambda: placed(server, SPACE, "whole") == 4)
    wait_for("the condition", lambda: condition(server, "Scheduled", "whole", SPACE).get("status") == "True")
    server.kubectl("delete", "rlhfjob", "whole", "-n", SPACE, "--wait=true")
    server.kubectl("delete", "jobs", "--all", "-n", SPACE)


def test_gpus_come_through_a_claim(server: KubeCluster) -> None:
    """A driver that has published two GPUs, on a node without the resource nvidia.com/gpu."""
    server.apply(node("dynamic", 0))
    expression = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    server.apply(thing("DeviceClass", "resource.k8s.io/v1", DRIVER, spec={"selectors": [expression]}))
    devices = [{"name": f"gpu-{number}"} for number in range(2)]
    pool = {"name": "dynamic", "generation": 1, "resourceSliceCount": 1}
    slices = {"driver": DRIVER, "nodeName": "dynamic", "pool": pool, "devices": devices}
    server.apply(thing("ResourceSlice", "resource.k8s.io/v1", "dynamic", spec=slices))
    submit(server, SPACE, "claimed", claimTemplate="one-gpu")
    wait_for("four pods", lambda: len(pods(server, SPACE, "claimed")) == 4)
    wait_for("the missing template", lambda: "one-gpu" in json.dumps(server.get("events", "-n", SPACE)))
    assert placed(server, SPACE, "claimed") == 0
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER, "count": 1}}
    template = {"spec": {"devices": {"requests": [request]}}}
    server.apply(thing("ResourceClaimTemplate", "resource.k8s.io/v1", "one-gpu", spec=template), namespace=SPACE)
    wait_for("all at once", lambda: placed(server, SPACE, "claimed") == 4)
    wait_for("they run", lambda: condition(server, "Running", "claimed", SPACE).get("status") == "True")
    claims = server.items("resourceclaims", "-n", SPACE)
    given = {each["status"]["allocation"]["devices"]["results"][0]["device"] for each in claims}
    assert given == {"gpu-0", "gpu-1"}
    server.kubectl("delete", "rlhfjob", "claimed", "-n", SPACE, "--wait=true")
    server.kubectl("delete", "jobs", "--all", "-n", SPACE)


def test_a_pod_that_the_scheduler_preempts_is_told_and_no_failure(server: KubeCluster) -> None:
    """A pod of higher priority takes a trainer's GPU. The job, which may not restart once, waits and goes on."""
    for name in ("one", "two"):
        server.kubectl("delete", "node", name, "--ignore-not-found")
    server.apply(node("pair", 2))
    submit(server, SPACE, "preempted", {"maxRestarts": 0})
    wait_for("they run", lambda: condition(server, "Running", "preempted", SPACE).get("status") == "True")
    trainers = [
        pod["metadata"]["name"] for pod in pods(server, SPACE, "preempted") if "nvidia.com" in json.dumps(pod["spec"])
    ]
    assert len(trainers) == 2
    held = json.dumps({"metadata": {"finalizers": ["dovetail.dev/held-by-the-test"]}})
    for name in trainers:  # a kubelet would take a while to end it
        server.kubectl("patch", "pod", name, "-n", SPACE, "--type=merge", "-p", held)
    server.apply(thing("PriorityClass", "scheduling.k8s.io/v1", "urgent", value=1000000))
    container = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    spec = {"priorityClassName": "urgent", "nodeSelector": {"nvidia.com/gpu.product": A100}, "containers": [container]}
    server.apply(thing("Pod", "v1", "urgent", spec=spec), namespace=SPACE)

    def said() -> str:
        return json.dumps(server.get("rlhfjob", "preempted", "-n", SPACE).get("status", {}).get("conditions"))

    wait_for("the word of its end", lambda: "PodEvicted" in said() and "preempt" in said().lower())
    free = json.dumps({"metadata": {"finalizers": None}})
    for name in trainers:
        server.try_kubectl("patch", "pod", name, "-n", SPACE, "--type=merge", "-p", free)
    wait_for("the other pod's node", lambda: server.get("pod", "urgent", "-n", SPACE)["spec"].get("nodeName"))
    wait_for("why it waits", lambda: "Insufficient nvidia.com/gpu" in said())
    server.kubectl("delete", "pod", "urgent", "-n", SPACE, "--force", "--grace-period=0")
    wait_for("they run again", lambda: condition(server, "Running", "preempted", SPACE).get("status") == "True")
    assert condition(server, "Failed", "preempted", SPACE).get("status") != "True"
    again = {pod["metadata"]["name"] for pod in pods(server, SPACE, "preempted")}
    assert len(set(trainers) & again) == 1, "the other trainer's pod stayed"
    server.kubectl("delete", "rlhfjob", "preempted", "-n", SPACE, "--wait=true")
    server.kubectl("delete", "jobs", "--all", "-n", SPACE)
