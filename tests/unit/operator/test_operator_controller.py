"""What the controller does when the API server refuses, conflicts or is away; the rest is tested on a real one."""

import asyncio
import base64
import copy
import gc
import json
import logging
import re
import weakref
from datetime import timedelta

import pytest
from golden import make_objects
from prometheus_client import generate_latest

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.manifest.status import RLHFJobStatus
from dovetail.operator.cluster.client import Page
from dovetail.operator.cluster.multikueue import END_SECONDS, LOOK_SECONDS, Dispatch
from dovetail.operator.cluster.tokens import KEY_SECRET
from dovetail.operator.job_controller import GATHER_SECONDS, Controller, _gpus
from dovetail.operator.job_metrics import JobMetrics
from dovetail.operator.log import log_libraries
from dovetail.operator.operator_metrics import OperatorMetrics
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import read_job
from dovetail.operator.reconcile.children import Children
from dovetail.operator.reconcile.history import JobHistory
from dovetail.operator.reconcile.reconcile import AGAIN_SECONDS, PlanRefused
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import jobset, surplus_jobs
from dovetail.operator.render.objects import supporting_objects
from dovetail.operator.status_rate import STATUS_SECONDS, StatusRate
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.process.process_names import COORDINATOR
from helpers.fake_cluster import DRAINED, START, controlled, manifest, running

KEY = ("default", "demo")


def jobs_objects():
    """What a job has in a cluster, as lists have it: the rendered objects, and a pod of each template."""
    job = read_job(manifest())
    context = RenderContext(job, "uid-1", make_plan(job.spec), OperatorSettings())
    things = [*supporting_objects(context), made := jobset(context), *surplus_jobs(context)]
    for part in made["spec"]["replicatedJobs"]:
        metadata = part["template"]["spec"]["template"]["metadata"] | {"name": part["name"], "namespace": "default"}
        things.append({"kind": "Pod", "metadata": metadata})
    return [
        thing | {"metadata": thing["metadata"] | {"uid": f"uid-{n}", "resourceVersion": "1"}}
        for n, thing in enumerate(things)
    ]


JOBS_OBJECTS = jobs_objects()


class Planner:
    async def planned(self, document, children):
        job = read_job(document)
        return job, make_plan(job.spec)

    made = None

    def variant(self, key, spec, done):
        self.asked = key, spec, done
        return self.made

    def forget(self, key):
        return None


class Coordinators:
    def __init__(self):
        self.told = JobHistory("secret")

    def report(self, key, children, token):
        return None

    def history(self, key):
        return self.told

    def forget(self, key):
        self.told = None


class Client:
    """Keeps what it is given; `refuse` maps kinds to the error of their next write, `others` to what others made."""

    def __init__(self, job):
        self.requests = 0
        self.job = job
        self.calls = []
        self.refuse = {}
        self.others = {}
        self.made = {}
        self.nodes = 0
        self.now = START
        self.workload = None

    async def get(self, resource, namespace, name):
        assert resource.kind == "RLHFJob"
        return copy.deepcopy(self.job)

    async def find(self, kind, namespace, name):
        if kind == "Workload":
            return copy.deepcopy(self.workload)
        if kind == "RLHFJob":
            return copy.deepcopy(self.job)
        return self.others.get(kind) or self.made.get(name)

    async def pages(self, resource, namespace, selector="", fields="", size=0):
        gpus = {"nvidia.com/gpu": "1"}
        ready = [{"type": "Ready", "status": "True"}]
        metadata = {"labels": {"nvidia.com/gpu.product": "NVIDIA-A10"}}
        yield Page([{"metadata": metadata, "status": {"allocatable": gpus, "conditions": ready}}] * self.nodes)

    async def create(self, thing):
        return self._write("create", thing)

    async def apply(self, thing, uid):
        assert uid == f"{thing['kind']}-uid"
        return self._write("apply", thing)

    def _write(self, call, thing):
        error = self.refuse.get(thing["kind"])
        if error is None and call == "create" and thing["kind"] in self.others:
            error = KubeError(409, "already exists")
        if error is not None:
            raise error
        self.calls.append((call, thing["kind"]))
        made = copy.deepcopy(dict(thing))
        made["metadata"] |= {"uid": f"{thing['kind']}-uid", "resourceVersion": "5"}
        if "stringData" in thing:
            data = {key: base64.b64encode(value.encode()).decode() for key, value in thing["stringData"].items()}
            made["data"] = data
        self.made[thing["metadata"]["name"]] = made
        return made

    async def delete(self, kind, namespace, name, uid=""):
        self.calls.append(("delete", kind))

    async def write_status(self, job, status):
        self.calls.append(("status", ""))
        if job["metadata"]["resourceVersion"] != self.job["metadata"]["resourceVersion"]:
            raise KubeError(422, "the server rejected our request due to an error in our request")
        self.job = copy.deepcopy(self.job) | {"status": status}
        self.job["metadata"]["resourceVersion"] = str(int(self.job["metadata"]["resourceVersion"]) + 1)
        return copy.deepcopy(self.job)


def a_controller(**spec):
    job = manifest(**spec)
    job["metadata"]["resourceVersion"] = "1"
    client = Client(job)
    controller = Controller(client, Planner(), Coordinators(), OperatorSettings(), OperatorMetrics(), now=lambda: START)
    controller.store.put(copy.deepcopy(job))
    return controller, client


def condition(client, kind):
    return next(c for c in client.job["status"]["conditions"] if c["type"] == kind)


def test_a_job_of_another_controller_is_left_alone():
    controller, client = a_controller(managedBy="kueue.x-k8s.io/multikueue")
    assert asyncio.run(controller.process(KEY)) is None
    assert client.calls == []
    controller, client = a_controller(managedBy=names.MANAGER)
    asyncio.run(controller.process(KEY))
    assert ("create", "JobSet") in client.calls


def sent(**spec):
    """A controller in the cluster of the queues, a job that MultiKueue sends elsewhere, and Kueue's Workloads."""
    controller, client = a_controller(managedBy=names.MULTIKUEUE, **spec)
    client.job["metadata"]["labels"] = {names.QUEUE_LABEL: "team"}
    client.job["metadata"]["resourceVersion"] = "2"
    controller.store.put(copy.deepcopy(client.job))
    settings = OperatorSettings(multi_kueue=True)
    controller._dispatch = Dispatch(client, Planner(), settings, controller._classes, lambda: client.now)
    return controller, client


def workload_of(client, *conditions):
    """The job's Workload, with conditions of the time when its test begins."""
    owner = controlled("RLHFJob", client.job["metadata"]["uid"]) | {"apiVersion": "dovetail.dev/v1alpha1"}
    since = {"lastTransitionTime": START.strftime("%Y-%m-%dT%H:%M:%SZ"), "status": "True"}
    status = {"conditions": [since | each for each in conditions]}
    return {"metadata": {"name": "w", "uid": "u", "ownerReferences": [owner]}, "spec": {}, "status": status}


def told(controller, client, **status):
    """A status that Kueue copied."""
    client.job["status"] = status
    client.job["metadata"]["resourceVersion"] = str(int(client.job["metadata"]["resourceVersion"]) + 1)
    controller.store.put(copy.deepcopy(client.job))


def a_status(kind, **more):
    since = START.strftime("%Y-%m-%dT%H:%M:%SZ")
    said = {"type": kind, "status": "True", "reason": "x", "message": "y", "lastTransitionTime": since}
    return {"conditions": [said], "completionTime": since, **more}


def test_the_workload_of_a_job_that_is_sent_elsewhere():
    controller, client = sent()
    assert asyncio.run(controller.process(KEY)) == LOOK_SECONDS
    assert client.calls == [("create", "Workload")]
    (made,) = client.made.values()
    uid = client.job["metadata"]["uid"]
    assert made["metadata"]["name"] == f"demo-{uid[:8]}"
    client.workload = made
    asyncio.run(controller.process(KEY))
    assert client.calls == [("create", "Workload")], "it is there"
    client.workload = made | {"status": {"conditions": [{"type": "Evicted", "status": "True"}]}}
    asyncio.run(controller.process(KEY))
    assert client.calls[1:] == [("delete", "Workload")], "it enters the queue anew"
    client.workload = None
    asyncio.run(controller.process(KEY))
    assert client.calls[2:] == [("create", "Workload")]


def test_a_job_whose_workload_kueue_has_ended_says_why_once():
    controller, client = sent()
    client.workload = workload_of(client, {"type": "Finished", "reason": "OutOfSync", "message": "other containers"})
    for _ in range(2):
        asyncio.run(controller.process(KEY))
    assert client.calls == [("create", "Event")]
    (event,) = client.made.values()
    assert event["reason"] == "WorkloadEnded"
    assert "OutOfSync: other containers" in event["message"]


def test_a_failed_job_that_was_sent_elsewhere_is_tried_again():
    controller, client = sent(retry=1)
    client.workload = workload_of(client, {"type": "Finished", "reason": "Failed"})
    told(controller, client, **a_status("Failed"))
    assert asyncio.run(controller.process(KEY)) == AGAIN_SECONDS
    assert client.calls == [("delete", "Workload")]
    client.workload = None
    assert asyncio.run(controller.process(KEY)) == AGAIN_SECONDS
    assert client.calls[1:] == [("status", ""), ("create", "Event")]
    assert condition(client, "Failed")["reason"] == "TriedAgain"
    assert client.job["status"]["retry"] == 1
    assert "completionTime" not in client.job["status"]
    controller.store.put(copy.deepcopy(client.job))
    asyncio.run(controller.process(KEY))
    assert client.calls[3:] == [("create", "Workload")]
    # The same number is no new wish, should it fail again.
    client.workload = workload_of(client, {"type": "Finished", "reason": "Failed"})
    told(controller, client, **a_status("Failed", retry=1))
    assert asyncio.run(controller.process(KEY)) is None
    assert len(client.calls) == 4


def test_the_workload_of_a_job_that_its_operator_ended_goes_after_a_moment():
    """Else Kueue would find no Workload in the other cluster, and send the failed job again."""
    controller, client = sent()
    client.workload = workload_of(client, {"type": "Admitted"})
    told(controller, client, **a_status("Failed"))
    assert asyncio.run(controller.process(KEY)) == END_SECONDS
    assert client.calls == []
    client.now += timedelta(seconds=END_SECONDS)
    asyncio.run(controller.process(KEY))
    assert client.calls == [("delete", "Workload")]


@pytest.mark.parametrize(("reason", "kind"), [("Succeeded", "Completed"), ("Failed", "Failed")])
def test_a_job_whose_last_status_did_not_come_has_an_end(reason, kind):
    controller, client = sent()
    client.workload = workload_of(client, {"type": "Finished", "reason": reason, "message": "jobset over"})
    told(controller, client, **a_status("Running", completionTime=None, iteration=7))
    assert asyncio.run(controller.process(KEY)) == END_SECONDS
    assert client.calls == []
    client.now += timedelta(seconds=END_SECONDS)
    asyncio.run(controller.process(KEY))
    assert client.calls == [("status", ""), ("create", "Event")]
    assert condition(client, kind)["status"] == "True"
    assert "jobset over" in condition(client, kind)["message"]
    assert condition(client, "Running")["status"] == "False"
    assert client.job["status"]["state"] == kind
    assert client.job["status"]["iteration"] == 7
    assert client.job["status"]["completionTime"]


def test_a_job_that_ended_elsewhere_expires():
    controller, client = sent(ttlSecondsAfterFinished=100)
    client.workload = workload_of(client, {"type": "Finished", "reason": "Succeeded"})
    told(controller, client, **a_status("Completed"))
    assert asyncio.run(controller.process(KEY)) == 100
    assert client.calls == []
    client.now += timedelta(seconds=100)
    asyncio.run(controller.process(KEY))
    assert client.calls == [("delete", "RLHFJob")]


def test_a_suspended_job_has_no_workload():
    controller, client = sent(suspend=True)
    asyncio.run(controller.process(KEY))
    assert client.calls == []
    owner = controlled("RLHFJob", client.job["metadata"]["uid"]) | {"apiVersion": "dovetail.dev/v1alpha1"}
    client.workload = {"metadata": {"name": "w", "uid": "u", "ownerReferences": [owner]}, "spec": {}}
    asyncio.run(controller.process(KEY))
    assert client.calls == [("delete", "Workload")]


def test_a_workload_of_somebody_else_is_left_alone_and_told_once():
    controller, client = sent()
    client.workload = {"metadata": {"name": "w", "uid": "u"}, "spec": {}}
    for _ in range(2):
        asyncio.run(controller.process(KEY))
    assert client.calls == [("create", "Event")]
    (event,) = client.made.values()
    assert event["reason"] == "NameConflict"
    assert "exists and does not belong to this job" in event["message"]


def test_of_two_jobs_with_the_same_names_for_their_jobs_the_older_one_starts():
    """Also if the operator looks at the younger one first."""
    controller, client = a_controller()
    groups = [group | {"name": f"x-{group['name']}"} for group in client.job["spec"]["groups"]]
    older = manifest(groups=groups)
    older["metadata"] |= {"uid": "older", "creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "1"}
    client.job["metadata"] |= {"name": "demo-x", "creationTimestamp": "2026-01-01T00:00:01Z"}
    controller.store.put(copy.deepcopy(client.job))
    controller.store.put(copy.deepcopy(older))
    asyncio.run(controller.process(("default", "demo-x")))
    assert ("create", "JobSet") not in client.calls
    assert condition(client, "Scheduled")["reason"] == "NameConflict"
    assert "of RLHFJob demo, group x-train" in condition(client, "Scheduled")["message"]
    client.job = copy.deepcopy(older)
    asyncio.run(controller.process(KEY))
    assert ("create", "JobSet") in client.calls


def a_job(controller):
    """A Job of the JobSet; returns the owner reference of its pods."""
    owner = controlled("JobSet", "JobSet-uid")
    metadata = {"name": "j", "namespace": "default", "uid": "job-uid", "resourceVersion": "9"}
    metadata |= {"labels": {names.JOB_LABEL: "demo"}, "ownerReferences": [owner]}
    controller.store.put({"kind": "Job", "metadata": metadata})
    return controlled("Job", "job-uid")


def test_a_running_job_goes_on_without_the_object_whose_name_is_taken():
    controller, client = a_controller()
    asyncio.run(controller.process(KEY))
    pod = {"name": "p", "namespace": "default", "uid": "p", "resourceVersion": "9", "labels": {names.JOB_LABEL: "demo"}}
    pod["ownerReferences"] = [a_job(controller)]
    controller.store.put({"kind": "Pod", "metadata": pod, "spec": {}, "status": {"phase": "Running"}})
    client.others["PodDisruptionBudget"] = {"metadata": {"name": "demo"}}
    asyncio.run(controller.process(KEY))
    assert 0 < asyncio.run(controller.process(KEY)) <= OperatorSettings().conflict_seconds
    assert condition(client, "Degraded")["reason"] == "NameConflict"
    assert condition(client, "Degraded")["message"].startswith("PodDisruptionBudget demo exists and does not belong")
    assert condition(client, "Running")["reason"] == "PodsStarting"
    client.job["spec"]["suspend"] = True
    client.job["metadata"] |= {"generation": 2}
    controller.store.put(copy.deepcopy(client.job))
    client.calls.clear()
    asyncio.run(controller.process(KEY))
    assert ("delete", "JobSet") in client.calls, "it can be suspended all the same"


def test_an_earlier_jobs_objects_are_waited_for():
    controller, client = a_controller()
    owner = {"apiVersion": "dovetail.dev/v1alpha1", "kind": "RLHFJob", "name": "demo", "uid": "old", "controller": True}
    client.others["JobSet"] = {"metadata": {"name": "demo", "ownerReferences": [owner]}}
    controller._status_rate._wrote[KEY] = float("-inf")
    asyncio.run(controller.process(KEY))
    assert condition(client, "Scheduled")["reason"] == "CreatingPods"
    assert "JobSet demo of an earlier job" in condition(client, "Scheduled")["message"]
    del client.others["JobSet"]
    asyncio.run(controller.process(KEY))
    assert ("create", "JobSet") in client.calls


def test_the_secret_is_there_before_the_pods_and_the_status_comes_last():
    controller, client = a_controller()
    clock = [100.0]
    controller._status_rate = StatusRate(lambda: clock[0])
    assert asyncio.run(controller.process(KEY)) == GATHER_SECONDS, "to see what became of it all"
    assert "status" not in client.job, "it starts well: its pods may be there in a moment"
    clock[0] += STATUS_SECONDS
    asyncio.run(controller.process(KEY))
    kinds = [kind for _, kind in client.calls if kind != "Event"]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(kinds, 1) | {"Secret": 2}, "one call each"
    assert kinds.index("Service") < kinds.index("Secret") < kinds.index("JobSet")
    assert kinds.index("ConfigMap") < kinds.index("JobSet") < kinds.index("")
    assert kinds.index("Role") < kinds.index("RoleBinding") < kinds.index("JobSet")
    assert ("create", "Event") in client.calls
    client.calls.clear()
    assert asyncio.run(controller.process(KEY)) == 10, "to see why the JobSet has no Jobs"
    assert client.calls == [], "its own replies are remembered, before any watch event"


def a_token(*owners):
    return {
        "metadata": {"name": "demo-token", "ownerReferences": list(owners)},
        "data": {names.TOKEN_KEY: base64.b64encode(b"known").decode()},
    }


OWNER = {"apiVersion": "dovetail.dev/v1alpha1", "kind": "RLHFJob", "name": "demo", "controller": True}
OWNER |= {"uid": make_objects.UID}


def a_condition(kind, status, reason):
    at = "2026-11-21T12:00:00Z"
    return {"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": at}


def conflict(client):
    found = condition(client, "Scheduled")
    return found["message"] if found["reason"] == "NameConflict" else ""


@pytest.mark.parametrize(
    "status",
    [
        {"stage": "ppo", "iteration": 3},  # suspended, and resumed
        {"conditions": [a_condition("Failed", "False", "TriedAgain")]},
    ],
)
def test_a_job_that_has_run_goes_on_with_the_token_of_an_operator_with_another_key(status):
    """The key's Secret was lost, or the chart is installed in another namespace."""
    controller, client = a_controller()
    client.job["status"] = status
    controller.store.put(copy.deepcopy(client.job))
    client.others["Secret"] = a_token(OWNER)
    client.find = own_key(client)
    asyncio.run(controller.process(KEY))
    assert ("create", "JobSet") in client.calls
    assert controller._tokens.known(make_objects.UID) == "known"


@pytest.mark.parametrize("owners", [[OWNER], []])
def test_another_token_is_refused_before_a_job_has_run(owners):
    """Whatever its user writes: the status alone is the operator's. And nobody gets a right to read the Secret."""
    controller, client = a_controller(retry=3)
    client.others["Secret"] = a_token(*owners)
    client.find = own_key(client)
    asyncio.run(controller.process(KEY))
    assert "Secret demo-token" in conflict(client)
    assert not {"Role", "RoleBinding", "JobSet"} & {kind for _, kind in client.calls}
    assert ("create", "Service") in client.calls
    client.job["spec"]["suspend"] = True
    client.job["metadata"]["generation"] = 2
    controller.store.put(copy.deepcopy(client.job))
    asyncio.run(controller.process(KEY))
    assert not {"Role", "RoleBinding"} & {kind for _, kind in client.calls}, "nor of a suspended job"


def own_key(client):
    """The operator's namespace has its key; only the job's namespace has the other Secret."""
    find, key = client.find, {"data": {"key": base64.b64encode(bytes(32)).decode()}}

    async def found(kind, namespace, name):
        return key if name == KEY_SECRET else await find(kind, namespace, name)

    return found


@pytest.mark.parametrize("status", [403, 422, 500])
def test_a_refused_object_is_told_and_tried_again(status):
    controller, client = a_controller()
    client.refuse["JobSet"] = KubeError(status, "webhook says no")
    with pytest.raises(KubeError):
        asyncio.run(controller.process(KEY))
    assert condition(client, "Scheduled")["reason"] == "ObjectRejected"
    assert condition(client, "Scheduled")["message"] == "webhook says no"
    assert condition(client, "Planned")["status"] == "True"
    version = client.job["metadata"]["resourceVersion"]
    with pytest.raises(KubeError):
        asyncio.run(controller.process(KEY))
    assert client.job["metadata"]["resourceVersion"] == version, "said once"
    client.refuse.clear()
    asyncio.run(controller.process(KEY))
    assert condition(client, "Scheduled")["reason"] == "CreatingPods"


def test_a_cluster_without_jobset_is_told_from_a_manifest_that_is_wrong():
    """Its administrator gets an alert."""
    controller, client = a_controller()
    client.refuse["JobSet"] = KubeError(404, "page not found")
    with pytest.raises(KubeError):
        asyncio.run(controller.process(KEY))
    found = condition(client, "Scheduled")
    assert found["reason"] == "KindMissing"
    assert found["message"].endswith("install the JobSet controller")
    client.refuse.clear()
    asyncio.run(controller.process(KEY))
    assert condition(client, "Scheduled")["reason"] == "CreatingPods"


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [(None, "NodesUnknown"), (1, "NoNodeFits"), (2, "Unschedulable")],
    ids=["not seen", "too few", "in use"],
)
def test_metrics_tell_whether_any_nodes_have_what_a_waiting_job_asks_for(nodes, reason):
    gpu = {"product": "NVIDIA-A10", "perPod": 1}
    train = {"name": "train", "roles": ["trainer"], "replicas": 1, "gpu": gpu}
    gen = {"name": "gen", "roles": ["rollout"], "replicas": 1, "gpu": gpu}
    controller, client = a_controller(groups=[train, gen])
    if nodes is not None:
        client.nodes = nodes
        asyncio.run(controller.nodes.look())
    asyncio.run(controller.process(KEY))
    pod = {"name": "p", "namespace": "default", "uid": "p", "resourceVersion": "9", "labels": {names.JOB_LABEL: "demo"}}
    pod["ownerReferences"] = [a_job(controller)]
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    controller.store.put({"kind": "Pod", "metadata": pod, "spec": {}, "status": {"conditions": [told]}})
    asyncio.run(controller.process(KEY))
    assert f'dovetail_job_state{{namespace="default",reason="{reason}"' in shown_by(controller)


def shown_by(controller):
    return generate_latest(controller._metrics.jobs).decode()


def test_an_api_server_that_is_away_is_no_news():
    controller, client = a_controller()
    client.refuse["JobSet"] = KubeError(0, "no answer")
    with pytest.raises(KubeError):
        asyncio.run(controller.process(KEY))
    assert "status" not in client.job


def test_a_job_that_changed_meanwhile_is_looked_at_again():
    controller, client = a_controller()
    controller._status_rate._wrote[KEY] = float("-inf")  # its first status is due
    client.job["metadata"]["resourceVersion"] = "7"
    client.job["spec"]["suspend"] = True
    with pytest.raises(KubeError) as error:
        asyncio.run(controller.process(KEY))
    assert error.value.status == 409
    asyncio.run(controller.process(KEY))
    assert condition(client, "Suspended")["status"] == "True"


def test_a_history_that_cannot_be_kept_holds_up_nothing():
    controller, client = a_controller()
    asyncio.run(controller.process(KEY))
    client.refuse["ConfigMap"] = KubeError(403, "exceeded quota")
    jobset = copy.deepcopy(controller.store.children(KEY).get("JobSet", "demo"))
    jobset["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
    controller.store.put(jobset)
    word = {"stage": "ppo", "iteration": 4, "metrics": {"reward": 2.0}}
    ended = {"exitCode": 0, "message": json.dumps(word), "finishedAt": "2026-11-21T12:30:00Z"}
    labels = jobset["metadata"]["labels"] | {names.ROLE_LABEL: COORDINATOR}
    metadata = {"name": "c", "namespace": "default", "uid": "p", "resourceVersion": "9", "labels": labels}
    metadata["ownerReferences"] = [a_job(controller)]
    status = {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": ended}}]}
    controller.store.put({"kind": "Pod", "metadata": metadata, "spec": {}, "status": status})
    asyncio.run(controller.process(KEY))
    assert condition(client, "Completed")["status"] == "True"


def test_the_end_is_written_before_anything_is_deleted():
    controller, client = a_controller(failurePolicy={"maxRestarts": 0})
    asyncio.run(controller.process(KEY))
    jobset = copy.deepcopy(controller.store.children(KEY).get("JobSet", "demo"))
    labels = jobset["metadata"]["labels"] | {names.ROLE_LABEL: "trainer"}
    at = START.isoformat(timespec="seconds").replace("+00:00", "Z")
    metadata = {"name": "p", "namespace": "default", "uid": "j", "resourceVersion": "9", "labels": labels}
    metadata["ownerReferences"] = [a_job(controller)]
    status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 1, "finishedAt": at}}}]}
    controller.store.put({"kind": "Pod", "metadata": metadata, "spec": {}, "status": status})
    client.calls.clear()
    metrics = {"reward": 1.0}
    controller._coordinators.told.take([{"stage": "ppo", "step": 1, "time": 1.0, "metrics": metrics}])
    asyncio.run(controller.process(KEY))
    assert condition(client, "Failed")["reason"] == "TrainerFailed"
    calls = [call for call in client.calls if call[1] != "Event"]
    assert calls == [("create", "ConfigMap"), ("status", ""), ("delete", "JobSet")], "its history before that"
    kept = controller.store.children(KEY).get("ConfigMap", "demo-history")
    assert json.loads(kept["data"]["iterations.json"])[0]["metrics"] == metrics
    assert kept["metadata"]["ownerReferences"][0]["uid"] == client.job["metadata"]["uid"]
    client.calls.clear()
    asyncio.run(controller.process(KEY))
    assert client.calls == [("delete", "JobSet")], "until it is gone"
    assert json.dumps(client.job["status"])


def test_the_plan_for_other_nodes_is_waited_for_by_nobody():
    gpu = {"product": "NVIDIA-A10", "perPod": 1}
    train = {"name": "train", "roles": ["trainer"], "replicas": 1, "gpu": gpu}
    gen = {"name": "gen", "roles": ["rollout"], "minReplicas": 1, "maxReplicas": 4, "gpu": gpu}
    controller, client = a_controller(groups=[train, gen])
    controller._status_rate._wrote[KEY] = float("-inf")

    def see(nodes):
        client.nodes = nodes
        for _ in range(2):
            asyncio.run(controller.nodes.look())
        controller._status_rate._wrote[KEY] = float("-inf")
        asyncio.run(controller.process(KEY))
        return condition(client, "Planned")

    assert see(2)["message"].startswith("1 trainer ranks, 1 rollouts")
    before = client.job["status"]["plan"]
    assert see(4)["reason"] == "Planned", "the new plan is not made yet"
    assert client.job["status"]["plan"] == before
    key, spec, _ = controller._planner.asked
    assert key == KEY
    assert [group.replicas for group in spec.groups] == [1, 3]
    controller._planner.made = make_plan(spec)
    found = see(4)
    assert found["reason"] == "Replanned"
    assert found["message"].startswith("rollouts of group gen 1 -> 3: nodes with NVIDIA-A10 have more room; 1 trainer")
    assert client.job["status"]["plan"]["rollouts"] == 3
    controller._planner.made = PlanRefused("PlannerTimeout", "the planner found no plan within 60 s")
    assert "no plan for the GPUs that there are now: the planner found no plan within 60 s" in see(4)["message"]


def test_what_a_reply_told_is_no_news():
    controller, _ = a_controller()

    async def check():
        await controller.process(KEY)
        made = controller.store.children(KEY).get("ConfigMap", "demo-plan")
        await controller.observe(made, deleted=False)
        assert len(controller.queue) == 0
        newer = made | {"metadata": made["metadata"] | {"resourceVersion": "6"}}
        await controller.observe(newer, deleted=False)
        assert len(controller.queue) == 1

    asyncio.run(check())


@pytest.mark.parametrize("template", [{}, {"spec": {"template": {"spec": {"containers": 7}}}}, 7])
def test_an_odd_object_of_a_tenant_stops_nobody_elses_jobs(template):
    """JobSet's schema takes the first. It has our labels, and so the operator sees it."""
    controller, client = a_controller()
    labels = {"dovetail.dev/job-uid": "none", "dovetail.dev/job": "odd"}
    metadata = {"name": "odd", "namespace": "default", "uid": "u", "resourceVersion": "9", "labels": labels}
    odd = {"kind": "JobSet", "metadata": metadata, "spec": {"replicatedJobs": [{"name": "a", "template": template}]}}
    asyncio.run(controller.observe(odd, deleted=False))
    asyncio.run(controller.process(KEY))
    assert ("create", "JobSet") in client.calls
    asyncio.run(controller.observe(odd, deleted=True))


RECOMMENDED = ("name", "instance", "version", "component", "part-of", "managed-by")


@pytest.mark.parametrize("name", RECOMMENDED)
@pytest.mark.parametrize("value", [None, "team"])
def test_labels_that_templates_and_webhooks_write_hide_nothing(name, value):
    """A webhook may write any of the recommended labels on any object, or remove it."""
    controller, client = a_controller()
    things = [dict(thing) for thing in JOBS_OBJECTS]
    for thing in things:
        labels = thing["metadata"]["labels"] | {f"app.kubernetes.io/{name}": value}
        thing["metadata"] = thing["metadata"] | {"labels": {key: v for key, v in labels.items() if v is not None}}

    async def pages(resource, namespace, selector="", fields="", size=0):
        assert not re.search("[=,!]", selector), "the key of a label that must be there"
        mine = [thing for thing in things if thing["kind"] == resource.kind]
        yield Page([thing for thing in mine if not selector or selector in thing["metadata"]["labels"]], "7")

    client.pages = pages
    asyncio.run(controller.resync())
    names_there = {(thing["kind"], thing["metadata"]["name"]) for thing in things}
    assert set(controller.store.children(KEY).objects) == names_there


def test_what_a_list_lacks_is_gone():
    """A watch that was cut off may have missed the deletion."""
    controller, client = a_controller()
    listed = []

    async def pages(resource, namespace, selector="", fields="", size=0):
        yield Page([thing for thing in listed if thing["kind"] == resource.kind], "7")

    async def check():
        await controller.process(KEY)
        listed.append(copy.deepcopy(client.job))
        things = controller.store.children(KEY).objects.values()
        listed.extend(copy.deepcopy(thing) for thing in things if thing["kind"] != "NetworkPolicy")
        client.pages = pages
        await controller.resync()
        assert {thing["kind"] for thing in things} - {kind for kind, _ in controller.store.children(KEY).objects} == {
            "NetworkPolicy"
        }
        client.calls.clear()
        await controller.process(KEY)
        assert [kind for call, kind in client.calls if call == "create"] == ["NetworkPolicy"]

    asyncio.run(check())


def test_a_job_whose_deletion_was_missed_is_forgotten():
    """kopf does not tell of what was deleted while it reconnected. The status that cannot be written does."""
    controller, client = a_controller(suspend=True)

    tried = []

    async def gone(job, status):
        tried.append(status)
        raise KubeError(404, "not found")

    async def check():
        client.write_status = gone
        await controller.process(KEY)
        assert tried
        assert controller.store.job(KEY) is None
        client.calls.clear()
        await controller.process(KEY)
        assert client.calls == []

    asyncio.run(check())


@pytest.mark.parametrize("case", ["gone", "another job", "left alone", "not gone", "ending"])
def test_pods_do_not_outlive_their_job(case):
    """Kubernetes' garbage collector misses a job that is deleted while its API goes back to an older version."""
    controller, client = a_controller(suspend=case == "another job")
    asyncio.run(controller.process(KEY))
    before = client.job
    owner = {"apiVersion": "dovetail.dev/v1alpha1", "kind": "RLHFJob", "name": "demo", "controller": True}
    owner["uid"] = before["metadata"]["uid"]
    metadata = {"name": "demo", "namespace": "default", "uid": "old", "resourceVersion": "9"}
    metadata |= {"labels": {names.JOB_LABEL: "demo"}, "ownerReferences": [owner]}
    jobset = {"kind": "JobSet", "metadata": metadata}
    client.others["JobSet"] = jobset
    if case == "ending":
        jobset["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    controller.store.put(copy.deepcopy(jobset))
    controller.store.remove(before)
    if case == "another job":
        client.job = copy.deepcopy(before)
        client.job["metadata"]["uid"] = "another"
        controller.store.put(copy.deepcopy(client.job))
    elif case != "not gone":
        client.job = None
    if case == "left alone":  # kubectl delete --cascade=orphan; no watch has told of it yet
        jobset["metadata"]["ownerReferences"] = []
    client.calls.clear()
    asyncio.run(controller.process(KEY))
    assert (("delete", "JobSet") in client.calls) == (case in ("gone", "another job"))


@pytest.mark.slow
def test_of_a_job_that_is_gone_nothing_is_kept():
    """A manifest and its plan take megabytes, and a tenant may make and delete any number of them."""
    controller, client = a_controller()
    read = []

    async def planned(document, children):
        job = read_job(document)
        read.append(weakref.ref(job))
        return job, make_plan(job.spec)

    controller._planner.planned = planned
    for _ in range(2):
        asyncio.run(controller.process(KEY))
    controller.store.remove(client.job)
    asyncio.run(controller.process(KEY))
    gc.collect()
    assert [each() for each in read] == [None, None]


def test_the_log_tells_a_jobs_life(capsys):
    """One line for each thing that was done, with its reason, and for each event that users see."""
    controller, client = a_controller(ttlSecondsAfterFinished=0, groups=manifest()["spec"]["groups"])
    controller._status_rate = StatusRate(lambda: 0.0)
    controller._status_rate.wait = lambda *_: 0.0

    def told():
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        for line in lines:
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
            assert (line.pop("process"), line.pop("job")) == ("operator", "default/demo")
            line.pop("level")
        return [" ".join(str(value) for value in line.values() if value is not None) for line in lines]

    asyncio.run(controller.process(KEY))
    assert told() == [
        "object.created PersistentVolumeClaim/demo-files the job needs it",
        "object.created ConfigMap/demo-plan the job needs it",
        "object.created ServiceAccount/demo-pods the job needs it",
        "object.created Service/demo-coordinator the job needs it",
        "object.created NetworkPolicy/demo the job needs it",
        "object.created Role/demo-pods the job needs it",
        "object.created RoleBinding/demo-pods the job needs it",
        "object.created JobSet/demo the job needs it",
        "job.state Planned",
        "job.event Planned 1 trainer ranks, 1 rollouts",
    ]
    client.job["spec"]["suspend"] = True
    client.job["metadata"] |= {"generation": 2}
    controller.store.put(copy.deepcopy(client.job))
    asyncio.run(controller.process(KEY))
    assert told() == [
        "object.deleted JobSet/demo SuspendedByUser: spec.suspend is true",
        "job.state Suspended",
        "job.event SuspendedByUser spec.suspend is true",
    ]
    shown = generate_latest(controller._metrics.registry).decode()
    assert (
        'dovetail_job_state{namespace="default",reason="SuspendedByUser",rlhfjob="demo",state="Suspended"} 1.0' in shown
    )
    controller.store.remove({"kind": "RLHFJob", **client.job})
    asyncio.run(controller.process(KEY))
    assert told() == ["job.gone"]
    assert 'rlhfjob="demo"' not in generate_latest(controller._metrics.registry).decode()


def test_kopfs_lines_look_like_our_own(capsys):
    before = logging.root.handlers[:]
    try:
        log_libraries()
        logging.getLogger("kopf._core.reactor").warning("Not enough permissions to list %s", "namespaces")
        logging.getLogger("kopf.objects").info("nothing that matters")
    finally:
        logging.root.handlers[:] = before
    (line,) = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (line["level"], line["event"]) == ("warning", "kopf._core.reactor")
    assert line["message"] == "Not enough permissions to list namespaces"


def test_seconds_of_waiting_are_counted_by_reason():
    now = [0.0]
    metrics = JobMetrics(lambda: now[0])

    def shown():
        return {
            (
                sample.name,
                *(value for key, value in sorted(sample.labels.items()) if key in ("reason", "state")),
            ): sample.value
            for metric in metrics.collect()
            for sample in metric.samples
        }

    def status(kind, value, reason):
        at = START.isoformat()
        return RLHFJobStatus.model_validate(
            {"conditions": [{"type": kind, "status": value, "reason": reason, "message": "", "lastTransitionTime": at}]}
        )

    metrics.look(KEY, status("Scheduled", "False", "CreatingPods"))
    now[0] = 10
    metrics.look(KEY, status("Scheduled", "False", "Unschedulable"))
    now[0] = 40
    metrics.fits(KEY, False)
    metrics.look(KEY, status("Scheduled", "False", "Unschedulable"))
    now[0] = 45
    name = "dovetail_job_pending_seconds_total"
    assert shown() == {
        ("dovetail_job_state", "NoNodeFits", "Pending"): 1,
        (name, "CreatingPods"): 10,
        (name, "Unschedulable"): 30,
        (name, "NoNodeFits"): 5,
    }
    metrics.look(KEY, status("Running", "True", "AllPodsReady"))
    now[0] = 1000
    assert shown()[name, "NoNodeFits"] == 5
    assert metrics.forget(KEY)
    assert shown() == {}


def test_gpu_seconds_are_counted_by_queue_product_and_use():
    now = [0.0]
    metrics = JobMetrics(lambda: now[0])

    def shown():
        return {
            tuple(sample.labels[key] for key in ("queue", "product", "use")): sample.value
            for metric in metrics.collect()
            for sample in metric.samples
            if sample.name == "dovetail_job_gpu_seconds_total"
        }

    metrics.hold(KEY, "team", {}, works=False)
    assert shown() == {}, "a job without pods holds nothing"
    metrics.hold(KEY, "team", {"A100": 8}, works=False)
    now[0] = 10
    metrics.hold(KEY, "team", {"A100": 8, "A10": 2}, works=True)
    now[0] = 40
    assert shown() == {("team", "A100", "idle"): 80, ("team", "A100", "working"): 240, ("team", "A10", "working"): 60}
    metrics.hold(KEY, "", {}, works=False)
    now[0] = 1000
    assert shown()["team", "A100", "working"] == 240, "it is over"
    metrics.forget(KEY)
    assert shown() == {}


def test_the_gpus_of_pods_on_nodes_are_held():
    groups = [
        {"name": "train", "roles": ["trainer"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 8}},
        {"name": "gen", "roles": ["rollout"], "gpu": {"product": "NVIDIA-A10", "perPod": 1}, "replicas": 2},
    ]
    cluster = running(groups=groups)
    for pod in cluster.pods():
        pod["spec"] = {"nodeName": "node-1"}
    (waiting, *_) = [p for p in cluster.pods() if p["metadata"]["labels"].get(names.GROUP_LABEL) == "gen"]
    waiting["spec"] = {}
    job, _ = cluster.seen().planned
    assert _gpus(job, Children(cluster.objects)) == {"NVIDIA-A100-SXM4-80GB": 8, "NVIDIA-A10": 1}


def test_a_pod_that_was_ended_is_told_when_it_is_gone_and_a_strangers_is_not():
    """Kubernetes deletes an evicted pod within seconds, maybe before the job is looked at."""
    controller, _ = a_controller()

    def owned(kind, name, by):
        metadata = {"name": name, "namespace": "default", "uid": name, "labels": {names.JOB_LABEL: "demo"}}
        return {"kind": kind, "metadata": metadata | {"ownerReferences": [by]}}

    async def test():
        await controller.process(KEY)
        jobset = controller.store.children(KEY).get("JobSet", "demo")["metadata"]["uid"]
        controller.store.put(owned("Job", "demo-train-0", controlled("JobSet", jobset)))
        for name, of in (("demo-train-0-0", "demo-train-0"), ("forged", "another")):
            pod = owned("Pod", name, controlled("Job", of)) | {"spec": {"nodeName": "node-1"}}
            await controller.observe(pod | {"status": {"phase": "Running", "conditions": [DRAINED]}}, deleted=True)
        return controller._disruptions(KEY)

    (found,) = asyncio.run(test())
    assert found.sentence() == "pod demo-train-0-0 left node node-1: drained"
