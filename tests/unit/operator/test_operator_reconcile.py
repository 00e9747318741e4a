"""`reconcile` on a fake cluster: a job's life, its ends, and what its status says of them."""

import json
import re
from dataclasses import replace
from datetime import timedelta

import pytest

from dovetail.kube import names
from dovetail.kube.owners import left_by
from dovetail.manifest.describe.crd import crd
from dovetail.operator.cluster.object_cache import trim
from dovetail.operator.reconcile import progress
from dovetail.operator.reconcile.disruption import Taking, takings
from dovetail.operator.reconcile.progress import judged
from dovetail.operator.reconcile.reconcile import PlanRefused, reconcile
from dovetail.operator.reconcile.refusals import left_over
from dovetail.protocol.process.process_names import COORDINATOR
from helpers.fake_cluster import a_cluster, restarting, running

CORDONED = [Taking("was cordoned by kubectl")]


def kinds(things):
    return [thing["kind"] for thing in things]


def test_a_job_starts_runs_and_completes():
    cluster = a_cluster()
    first = cluster.reconcile()
    assert first.token
    assert kinds(first.apply)[-1] == "JobSet"
    assert cluster.condition("Planned")["status"] == "True"
    assert cluster.document["status"]["plan"]["actor"] == "pp1 tp1 dp1"
    cluster.settle()
    status = cluster.document["status"]
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Planned": "True",
        "Suspended": "False",
        "Scheduled": "True",
        "Running": "True",
        "Degraded": "False",
        "Completed": "False",
    }
    assert status["groups"] == [
        {"name": "train", "desired": 1, "ready": 1},
        {"name": "gen", "desired": 2, "ready": 2},
    ]
    assert status["observedGeneration"] == 1
    assert status["startTime"] == "2026-11-21T12:00:00Z"
    word = '{"stage": "ppo", "iteration": 12, "total_iterations": 12, "metrics": {"reward": 1.2345678, "kl": 0.1}}'
    cluster.end(cluster.pod(COORDINATOR), 0, word)
    cluster.reconcile()
    assert cluster.condition("Running")["status"] == "True", "the JobSet does not know yet"
    cluster.settle()
    status = cluster.document["status"]
    assert cluster.condition("Completed")["status"] == "True"
    assert cluster.condition("Running")["reason"] == "JobFinished"
    assert (status["stage"], status["iteration"], status["iterations"], status["reward"]) == ("ppo", 12, 12, 1.23457)
    assert [group["ready"] for group in status["groups"]] == [0, 0]
    assert cluster.objects["JobSet", "demo"], "its logs stay"
    assert not [p for p in cluster.pods() if p["status"]["phase"] == "Running"]


def test_a_steady_state_writes_nothing():
    cluster = running()
    before = cluster.document["status"]
    for _ in range(3):
        cluster.pass_time(60)
        result = cluster.reconcile()
        assert (result.apply, result.delete, result.events) == ([], [], [])
        assert cluster.document["status"] == before
        assert result.requeue is None


def test_progress_is_reported():
    cluster = running()
    cluster.reported = {"stage": "sft", "step": 7, "total_steps": 20, "metrics": {"loss": 3.0}, "weight_version": None}
    cluster.reconcile()
    assert cluster.document["status"]["iteration"] == 7
    assert "reward" not in cluster.document["status"]
    cluster.reported = {
        "stage": "ppo",
        "step": 20,
        "iteration": 2,
        "total_iterations": 9,
        "weight_version": 2,
        "metrics": {"reward": 0.5, "kl": float("nan"), "samples_per_second": 12.0, "iteration_seconds": 8.5},
        "checkpoint": {"stage": "ppo", "step": 1, "path": "/var/dovetail/x/checkpoints/ppo-1"},
        "models": {"actor": {"repository": "Qwen/Qwen3-0.6B", "commit": "c" * 40}},
    }
    cluster.reconcile()
    status = cluster.document["status"]
    assert (status["stage"], status["iteration"], status["iterations"], status["weightVersion"]) == ("ppo", 2, 9, 2)
    assert (status["samplesPerSecond"], status["measuredIterationSeconds"]) == (12.0, 8.5)
    assert status["lastCheckpoint"]["step"] == 1
    assert status["models"] == [{"name": "actor", "repository": "Qwen/Qwen3-0.6B", "commit": "c" * 40}]
    assert "kl" not in status
    cluster.reported = None  # the coordinator is away: what is known stays
    cluster.reconcile()
    assert cluster.document["status"]["iteration"] == 2


def test_a_download_is_told_as_long_as_it_lasts():
    cluster = running()
    cluster.reported = judged({"stage": None, "message": "downloading Qwen/Qwen3-8B: 1.20 of 16.40 GB"})
    cluster.reconcile()
    ready = cluster.condition("Running")["message"].partition("; ")[0]
    assert cluster.condition("Running")["message"] == f"{ready}; downloading Qwen/Qwen3-8B: 1.20 of 16.40 GB"
    cluster.reported = judged({"stage": "sft", "message": "step 1"})
    cluster.reconcile()
    assert cluster.condition("Running")["message"] == ready


def test_a_plan_that_is_off_is_told_until_it_holds_again():
    cluster = running()
    problem = "an iteration takes 15 s, 50% more than the 10 s predicted"
    cluster.reported = {"stage": "ppo", "metrics": {"iteration_seconds": 15.0}}
    cluster.reported["plan"] = {"expected_iteration_seconds": 15.0, "problem": problem}
    result = cluster.reconcile()
    planned = cluster.condition("Planned")
    assert (planned["status"], planned["reason"]) == ("True", "PlanOff")
    assert planned["message"].startswith(problem)
    assert [(e.type, e.reason) for e in result.events] == [("Warning", "PlanOff")]
    assert cluster.document["status"]["predictedIterationSeconds"] == 15.0
    cluster.reported, away = None, cluster.reported
    assert cluster.reconcile().events == []
    assert cluster.condition("Planned")["reason"] == "PlanOff"
    cluster.reported = {**away, "plan": {"expected_iteration_seconds": 15.0, "problem": None}}
    cluster.reconcile()
    assert cluster.condition("Planned")["reason"] == "Planned"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("JobSet", "demo"),
        ("ConfigMap", "demo-plan"),
        ("Service", "demo-coordinator"),
        ("ServiceAccount", "demo-pods"),
        ("Role", "demo-pods"),
        ("RoleBinding", "demo-pods"),
        ("NetworkPolicy", "demo"),
        ("PodDisruptionBudget", "demo"),
        ("PersistentVolumeClaim", "demo-files"),
        ("Job", "demo-gen-s1"),
    ],
)
def test_children_deleted_by_hand_come_back(kind, name):
    cluster = running()
    cluster.remove(kind, name)
    cluster.settle()
    assert (kind, name) in cluster.objects
    assert cluster.condition("Running")["status"] == "True"


def test_drift_is_corrected():
    cluster = running()
    cluster.objects["NetworkPolicy", "demo"]["spec"]["ingress"] = [{}]
    cluster.objects["Service", "demo-coordinator"]["metadata"]["annotations"] = {"somebody": "else's"}
    assert kinds(cluster.reconcile().apply) == ["NetworkPolicy"]


def test_a_running_job_keeps_its_plan():
    cluster = running()
    cluster.objects["ConfigMap", "demo-plan"]["data"]["job.json"] = '{"of": "another operator"}'
    assert cluster.reconcile().apply == []


# ---------------------------------------------------------------- suspension


def test_suspend_deletes_pods_and_resume_starts_them_again():
    cluster = running()
    cluster.edit(suspend=True)
    cluster.settle()
    assert cluster.condition("Suspended") == cluster.condition("Suspended") | {
        "status": "True",
        "reason": "SuspendedByUser",
    }
    assert cluster.condition("Running")["status"] == "False"
    assert cluster.pods() == []
    assert not [kind for kind, _ in cluster.objects if kind in ("JobSet", "Job")]
    assert ("PersistentVolumeClaim", "demo-files") in cluster.objects
    assert "startTime" not in cluster.document["status"]
    cluster.edit(suspend=False)
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    assert cluster.condition("Suspended")["status"] == "False"


def ranks(cluster):
    return json.loads(cluster.objects["ConfigMap", "demo-plan"]["data"]["plan.json"])["worldSize"]


@pytest.mark.parametrize("in_a_hurry", [False, True])
def test_a_suspended_job_may_get_other_trainers(in_a_hurry):
    """It is planned anew, and its pods read the new plan. The coordinator then shares out the checkpoint anew."""
    cluster = running()
    train, gen = cluster.document["spec"]["groups"]
    assert (train["replicas"], ranks(cluster)) == (1, 1)
    cluster.edit(suspend=True)
    if not in_a_hurry:
        cluster.settle()
    cluster.edit(suspend=False, groups=[train | {"replicas": 2}, gen])
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    assert [pod["metadata"]["labels"].get(names.GROUP_LABEL) for pod in cluster.pods()].count("train") == 2
    assert ranks(cluster) == 2


def test_a_suspended_job_may_get_more_iterations():
    cluster = running()
    cluster.edit(suspend=True)
    cluster.settle()
    cluster.edit(ppo={"iterations": 250})
    cluster.settle()
    assert cluster.pods() == []
    cluster.edit(suspend=False)
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    read = json.loads(cluster.objects["ConfigMap", "demo-plan"]["data"]["job.json"])
    assert read["spec"]["ppo"]["iterations"] == 250


def test_a_job_made_suspended_starts_nothing():
    cluster = a_cluster(suspend=True)
    cluster.settle()
    assert cluster.pods() == []
    assert cluster.condition("Planned")["status"] == "True"


def test_waiting_for_quota_is_told_from_a_users_suspension():
    cluster = a_cluster()
    cluster.document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    cluster.queueing = True
    cluster.settle()
    assert cluster.condition("Suspended")["reason"] == "WaitingForQuota"
    assert "research" in cluster.condition("Suspended")["message"]
    cluster.objects["JobSet", "demo"]["spec"]["suspend"] = False  # Kueue admits it
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    assert cluster.objects["Job", "demo-gen-s1"]
    cluster.objects["JobSet", "demo"]["spec"]["suspend"] = True  # and evicts it
    cluster.settle()
    assert cluster.pods() == []
    assert cluster.condition("Suspended")["reason"] == "WaitingForQuota"


# ---------------------------------------------------------------- scaling


@pytest.mark.parametrize("key", [names.QUEUE_LABEL, names.PRIORITY_LABEL])
def test_a_job_that_waits_in_a_queue_may_be_given_another(key):
    cluster = a_cluster()
    cluster.queueing = True
    labels = {names.QUEUE_LABEL: "team", names.PRIORITY_LABEL: "low"}
    cluster.document["metadata"]["labels"] = labels
    cluster.settle()
    assert cluster.look().delete == []
    cluster.document["metadata"]["labels"] = labels | {key: "other"}
    cluster.settle()
    assert cluster.objects["JobSet", "demo"]["metadata"]["labels"][key] == "other"
    assert cluster.condition("Suspended")["reason"] == "WaitingForQuota"
    cluster.objects["JobSet", "demo"]["spec"]["suspend"] = False
    cluster.settle()
    cluster.document["metadata"]["labels"] = labels
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True", "a job that runs keeps its place"
    assert cluster.objects["JobSet", "demo"]["metadata"]["labels"][key] == "other"


@pytest.mark.parametrize("key", [names.QUEUE_LABEL, names.PRIORITY_LABEL])
def test_a_queue_that_the_cluster_chose_is_kept(key):
    """Kueue labels JobSets that name no queue where the namespace has one of the name `default`."""
    cluster = a_cluster()
    cluster.queueing = True
    cluster.reconcile()
    jobset = cluster.objects["JobSet", "demo"]
    jobset["metadata"]["labels"][key] = "default"
    cluster.settle()
    assert cluster.objects["JobSet", "demo"] is jobset, "it was made anew, which would go on for ever"
    assert cluster.condition("Suspended")["reason"] == "WaitingForQuota"
    jobset["spec"]["suspend"] = False
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"


def test_surplus_rollouts_start_after_the_coordinator_and_follow_the_spec():
    cluster = a_cluster()
    cluster.reconcile()
    cluster.step()
    cluster.reconcile()
    assert ("Job", "demo-gen-s1") not in cluster.objects, "the coordinator does not run yet"
    cluster.settle()
    groups = cluster.document["spec"]["groups"]
    cluster.edit(groups=[groups[0], groups[1] | {"maxReplicas": 4}])
    cluster.settle()
    assert {name for kind, name in cluster.objects if kind == "Job" and "-s" in name} == {
        *("demo-gen-s1", "demo-gen-s2", "demo-gen-s3")
    }
    cluster.edit(groups=[groups[0], groups[1] | {"maxReplicas": 1}])
    cluster.settle()
    assert not [name for kind, name in cluster.objects if kind == "Job" and "-s" in name]
    assert cluster.condition("Running")["status"] == "True"


def test_a_raised_minimum_is_met_without_touching_what_runs():
    cluster = running()
    pods = {p["metadata"]["name"] for p in cluster.pods()}
    groups = cluster.document["spec"]["groups"]
    cluster.edit(groups=[groups[0], groups[1] | {"minReplicas": 2, "maxReplicas": 3}])
    cluster.settle()
    assert pods < {p["metadata"]["name"] for p in cluster.pods()}
    assert cluster.document["status"]["groups"][1] == {"name": "gen", "desired": 3, "ready": 3}


# ---------------------------------------------------------------- causes


def test_an_invalid_spec_is_refused_and_can_be_mended():
    groups = [{"name": "train", "roles": ["trainer"], "replicas": 3}, {"name": "gen", "roles": ["rollout"]}]
    cluster = a_cluster(groups=groups, ppo={"globalBatchSize": 3, "miniBatchSize": 2})
    result = cluster.reconcile()
    assert (result.apply, result.token) == ([], False)
    planned = cluster.condition("Planned")
    assert (planned["status"], planned["reason"]) == ("False", "InvalidSpec")
    assert "spec.ppo.globalBatchSize" in planned["message"]
    assert [e.reason for e in result.events] == ["InvalidSpec"]
    cluster.edit(ppo={"globalBatchSize": 12, "miniBatchSize": 12, "microBatchSize": 1, "iterations": 1}, groups=groups)
    cluster.settle()
    assert cluster.condition("Planned")["status"] == "True"


@pytest.mark.parametrize(
    ("output", "copies"),
    [
        (None, [None, None]),
        ({"pvc": "shared/chat/"}, ["shared/chat/reward", "shared/chat/actor"]),
        ({"s3": {"bucket": "models", "prefix": "/chat"[1:]}}, ["s3://models/chat/reward", "s3://models/chat/actor"]),
    ],
)
def test_the_status_says_where_the_models_are(output, copies):
    """The coordinator says which there are; the rest is the operator's own knowledge."""
    cluster = running(output=output, storage={"folder": "first"})
    word = {"stage": "ppo", "iteration": 1, "total_iterations": 1, "artifacts": ["actor", "reward", "../../etc"]}
    cluster.end(cluster.pod(COORDINATOR), 0, json.dumps(word))
    cluster.settle()
    found = cluster.document["status"]["artifacts"]
    assert [(each["name"], each["claim"], each["path"]) for each in found] == [
        ("reward", "demo-files", "first/models/reward"),
        ("actor", "demo-files", "first/models/actor"),
    ]
    assert [each.get("copy") for each in found] == copies


def test_the_coordinators_pod_alone_writes_the_copies():
    cluster = running(output={"pvc": "shared/chat"})
    jobs = cluster.objects["JobSet", "demo"]["spec"]["replicatedJobs"]
    pods = {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}
    mounts = {name: [m["name"] for m in pod["containers"][0]["volumeMounts"]] for name, pod in pods.items()}
    assert [name for name, found in mounts.items() if "output" in found] == [COORDINATOR]
    job = json.loads(cluster.objects["ConfigMap", "demo-plan"]["data"]["job.json"])
    assert job["spec"]["output"] == {"path": "/var/dovetail-output/chat"}
    keys = running(output={"s3": {"bucket": "models", "credentialsSecret": "keys"}})
    jobs = keys.objects["JobSet", "demo"]["spec"]["replicatedJobs"]
    secrets = {
        job["name"]: [
            (each["name"], each["valueFrom"]["secretKeyRef"]["optional"])
            for each in job["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
            if each.get("valueFrom", {}).get("secretKeyRef", {}).get("name") == "keys"
        ]
        for job in jobs
    }
    names = [("AWS_ACCESS_KEY_ID", False), ("AWS_SECRET_ACCESS_KEY", False), ("AWS_SESSION_TOKEN", True)]
    assert secrets == {COORDINATOR: names, "train": [], "gen": []}


def test_a_planner_that_had_trouble_is_asked_again_ever_more_seldom():
    """Nothing else would look at the job: no event tells that the planner has time now."""
    cluster = a_cluster()
    trouble = replace(cluster.seen(), planned=PlanRefused("PlannerTimeout", "the planner found no plan within 60 s"))
    waits = []
    for _ in range(4):
        result = reconcile(replace(trouble, document=cluster.document), cluster.now)
        cluster.document["status"] = json.loads(result.status.model_dump_json(by_alias=True, exclude_none=True))
        waits.append(result.requeue)
        cluster.pass_time(result.requeue + 60)
    assert waits == [20, 80, 220, 500]
    infeasible = replace(trouble, planned=PlanRefused("PlanInfeasible", "it needs 41.2 GiB"))
    assert reconcile(infeasible, cluster.now).requeue is None
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"


def test_what_has_no_effect_yet_is_said():
    cluster = a_cluster()
    cluster.document["spec"]["models"]["reference"] = {"dtype": "bfloat16"}
    cluster.reconcile()
    assert "spec.models.reference.dtype is not executed yet" in cluster.condition("Planned")["message"]


# ---------------------------------------------------------------- the end


def test_the_network_policy_outlives_the_job_until_its_pods_have_ended():
    """Pods live as long as their template's grace period when their job is deleted. They also own the policy, and the
    garbage collector deletes it with the last of its owners."""
    cluster = running()
    policy = cluster.objects["NetworkPolicy", "demo"]["metadata"]

    def owners():
        return {owner["uid"] for owner in policy["ownerReferences"] if owner["kind"] == "Pod"}

    pods = {pod["metadata"]["uid"] for pod in cluster.pods()}
    assert len(pods) == 4
    assert owners() == pods
    assert [owner["kind"] for owner in policy["ownerReferences"] if owner.get("controller")] == ["RLHFJob"]
    cluster.end(cluster.pod("rollout"), 1)
    cluster.settle()
    policy = cluster.objects["NetworkPolicy", "demo"]["metadata"]
    assert len(owners() - pods) == 1, "the next pod, too"
    # The garbage collector has removed the owner that is gone. A new job of that name waits, and takes nothing over.
    left = {"metadata": policy | {"ownerReferences": [o for o in policy["ownerReferences"] if o["kind"] == "Pod"]}}
    assert left_by(left, "demo", "of-the-next")
    assert not left_by(left, "demo", cluster.document["metadata"]["uid"])
    assert not left_by(left, "other", "of-the-next")
    pods = [owner["name"] for owner in left["metadata"]["ownerReferences"]]
    assert f"it stays until pod {pods[0]} has ended" in left_over("NetworkPolicy", "demo", pods)


def test_the_budget_protects_the_coordinator_that_copies_the_models():
    """Its trainers are done by then."""
    cluster = running()
    needed = cluster.objects["PodDisruptionBudget", "demo"]["spec"]["minAvailable"]
    cluster.end(cluster.pod("trainer"), 0)
    for _ in range(3):
        cluster.reconcile()
        cluster.step()
    assert cluster.objects["PodDisruptionBudget", "demo"]["spec"]["minAvailable"] == needed > 0


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("spec", "spec.algorithm"),
        ("queue", "waits for quota in queue team"),
        ("nodes", "2 of 3 pods are ready; pod demo-gen-0"),
        ("suspend", "spec.suspend is true"),
    ],
)
def test_the_wide_view_says_why_a_job_waits(why, told):
    (column,) = (c for c in crd()["spec"]["versions"][0]["additionalPrinterColumns"] if c["name"] == "Waits for")
    (kind,) = re.fullmatch(r'\.status\.conditions\[\?\(@\.type=="(\w+)"\)\]\.message', column["jsonPath"]).groups()
    cluster = a_cluster(**({"algorithm": "unknown"} if why == "spec" else {"suspend": why == "suspend"}))
    if why == "queue":
        cluster.queueing = True
        cluster.document["metadata"]["labels"] = {names.QUEUE_LABEL: "team"}
    cluster.settle()
    if why == "nodes":
        cluster.unschedulable(cluster.pod("rollout"))
        cluster.reconcile()
    assert told in cluster.condition(kind)["message"]


@pytest.mark.parametrize("role", ["trainer", "coordinator", "rollout"])
def test_a_drain_of_two_trainers_ends(role):
    """A trainer that was evicted has no other node, and training stands. The budget would refuse the next one for
    ever. Rollouts still go one at a time."""
    groups = [{"name": "train", "roles": ["trainer"], "replicas": 2}, {"name": "gen", "roles": ["rollout"]}]
    cluster = running(groups=groups)

    def needed():
        return cluster.objects["PodDisruptionBudget", "demo"]["spec"]["minAvailable"]

    assert needed() == 3
    cluster.end(cluster.pod(role), 143, disrupted=True)
    for _ in range(3):
        cluster.reconcile()
        cluster.step()
    assert [pod["status"]["phase"] for pod in cluster.pods()].count("Pending") == 1
    assert needed() == (3 if role == "rollout" else 0)
    cluster.settle()
    assert needed() == 3, "the gang is whole again"
    assert cluster.look().apply == []


def test_a_disrupted_job_names_the_pod_the_node_and_who_drains_it():
    groups = [{"name": "train", "roles": ["trainer"], "replicas": 2}, {"name": "gen", "roles": ["rollout"]}]
    cluster = running(groups=groups)
    assert cluster.condition("Disrupted") == {}, "nothing to tell of a job that was never disturbed"
    pod = on_node(cluster, "train", "node-1")
    cluster.leaving = {"node-1": CORDONED}
    cluster.end(pod, 143, disrupted=True)
    events = cluster.reconcile().events
    told = cluster.condition("Disrupted")
    assert (told["status"], told["reason"]) == ("True", "EvictionByEvictionAPI")
    assert (
        f"pod {pod['metadata']['name']} of group train left node node-1, which was cordoned by kubectl"
        in told["message"]
    )
    assert told["message"].endswith("training stops until they are back")
    assert [event.message for event in events if event.reason == told["reason"]] == [told["message"]]
    cluster.remove("Pod", pod["metadata"]["name"])
    cluster.leaving = {}
    cluster.step()
    cluster.reconcile()
    assert cluster.condition("Disrupted") == told, "the pod and its node may be gone before its successor is there"
    cluster.settle()
    assert cluster.condition("Disrupted")["status"] == "False"


def test_an_old_disruption_is_not_told_of_another_pods_failure():
    cluster = running()
    cluster.end(cluster.pod("rollout"), 143, disrupted=True, ran=600)
    cluster.settle()
    assert cluster.condition("Disrupted")["status"] == "False"
    cluster.end(cluster.pod("trainer"), 1)
    cluster.reconcile()
    assert cluster.condition("Degraded")["reason"] == "TrainerFailed"
    assert cluster.condition("Disrupted")["status"] == "False"


def budget(cluster):
    return cluster.objects["PodDisruptionBudget", "demo"]["spec"]["minAvailable"]


def wait_in_vain(cluster, pod, seconds):
    """The pod is evicted, and its successor finds no node for so long."""
    cluster.end(pod, 143, disrupted=True)
    for _ in range(3):
        cluster.reconcile()
        cluster.step()
    (waiting,) = (p for p in cluster.pods() if p["status"]["phase"] == "Pending")
    cluster.unschedulable(waiting)
    cluster.pass_time(seconds)
    return cluster.reconcile()


@pytest.mark.parametrize("told", ["other", "seconds", "key", "value", "all"])
def test_a_taint_that_pods_tolerate_takes_none_of_them(told):
    """Administrators keep nodes for some pods by a taint with NoExecute. These pods stay, and their budget holds."""
    tolerations = {
        "other": [{"key": "reserved", "value": "lab"}, {"key": "spot", "operator": "Exists"}],
        "seconds": [{"key": "reserved", "operator": "Exists", "tolerationSeconds": 300}],
        "key": [{"key": "reserved", "operator": "Exists", "effect": "NoExecute"}],
        "value": [{"key": "reserved", "operator": "Equal", "value": "team"}],
        "all": [{"operator": "Exists"}],
    }[told]
    node = {"metadata": {}, "spec": {"taints": [{"key": "reserved", "value": "team", "effect": "NoExecute"}]}}
    cluster = running()
    for pod in cluster.pods():
        pod["spec"] = trim(pod | {"spec": {"nodeName": "node", "tolerations": tolerations}})["spec"]
    before, stays = budget(cluster), told in ("key", "value", "all")
    cluster.leaving = {"node": takings(node, frozenset())}
    cluster.reconcile()
    assert budget(cluster) == (before if stays else 0)
    cluster.leaving = {"node": takings(node, frozenset({"reserved"}))}
    cluster.reconcile()
    assert budget(cluster) == 0, "nobody tolerates the end of a node"
    cluster.leaving = {"node": takings(node, frozenset())}
    cluster.end(cluster.pod("trainer"), 143, disrupted=True)
    cluster.reconcile()
    assert ("has the taint reserved:NoExecute" in cluster.condition("Disrupted")["message"]) is not stays


def test_drains_of_all_nodes_in_turn_end():
    """All nodes of the job are cordoned first, so no pod finds another node, and none is waited for."""
    cluster = running()
    pods = [p for p in cluster.pods() if names.SURPLUS_LABEL not in p["metadata"]["labels"]]
    for number, pod in enumerate(cluster.pods()):
        pod["spec"] = {"nodeName": f"node-{number}"}
    cluster.leaving = {f"node-{number}": CORDONED for number in range(len(pods))}
    cluster.reconcile()
    assert budget(cluster) > 0, "a node is left"
    cluster.leaving = {f"node-{number}": CORDONED for number in range(len(cluster.pods()))}
    cluster.reconcile()
    assert budget(cluster) == 0
    cluster.leaving = {}
    cluster.reconcile()
    assert budget(cluster) > 0


@pytest.mark.parametrize(("seconds", "lifted"), [(60, False), (301, True)])
def test_a_rollout_that_finds_no_node_holds_no_other_drain_up_for_ever(seconds, lifted):
    cluster = running(groups=TWO_ROLLOUTS)
    wait_in_vain(cluster, cluster.pod("rollout"), seconds)
    assert (budget(cluster) == 0) is lifted
    assert cluster.condition("Disrupted")["message"].endswith("the job goes on without them")
    cluster.settle()
    assert budget(cluster) > 0


TWO_ROLLOUTS = [{"name": "train", "roles": ["trainer"]}, {"name": "gen", "roles": ["rollout"], "replicas": 2}]


@pytest.mark.parametrize(
    ("role", "queue", "gang", "seconds", "requeued"),
    [
        ("trainer", "team", "", 301, True),
        ("coordinator", "team", "", 301, True),
        ("trainer", "", "Volcano", 301, True),
        ("trainer", "team", "", 60, False),
        ("rollout", "team", "", 301, False),
        ("trainer", "", "", 301, False),
    ],
)
def test_a_broken_gang_gives_its_gpus_back_and_waits_again(role, queue, gang, seconds, requeued):
    cluster = a_cluster(groups=TWO_ROLLOUTS)
    cluster.settings = replace(cluster.settings, gang=gang)
    cluster.document["metadata"]["labels"] = {names.QUEUE_LABEL: queue} if queue else {}
    cluster.settle()
    result = wait_in_vain(cluster, cluster.pod(role), seconds)
    assert (("JobSet", "demo") in result.delete) is requeued
    if requeued:
        told = cluster.condition("Disrupted")
        assert (told["status"], told["reason"]) == ("False", "Requeued")
        assert "cannot be scheduled" in told["message"]
        cluster.queueing = bool(queue)
        for _ in range(3):
            cluster.step()
            cluster.reconcile()
        if queue:
            assert cluster.condition("Suspended")["reason"] == "WaitingForQuota"
            assert not [pod for pod in cluster.pods() if pod["status"]["phase"] == "Running"]
        cluster.pass_time(400)
        assert cluster.look().delete == [], "once: it waits like a job that has not started"


def test_a_broken_gang_in_the_default_queue_waits_again_too():
    """Kueue puts a JobSet without a queue into the queue `default`. The job itself names none."""
    cluster = running(groups=TWO_ROLLOUTS)
    cluster.objects["JobSet", "demo"]["metadata"]["labels"][names.QUEUE_LABEL] = "default"
    assert ("JobSet", "demo") in wait_in_vain(cluster, cluster.pod("trainer"), 301).delete


def test_nothing_is_made_after_the_end():
    cluster = running(failurePolicy=restarting(0))
    cluster.end(cluster.pod("trainer"), 1, "died")
    cluster.settle()
    assert cluster.condition("Failed")["status"] == "True"
    made = len(cluster.made)
    for place in list(cluster.objects):
        cluster.remove(*place)
    cluster.edit(suspend=True)
    cluster.settle()
    cluster.edit(suspend=False)
    cluster.settle()
    assert len(cluster.made) == made
    assert cluster.objects == {}


def test_a_finished_job_goes_when_its_time_is_up():
    cluster = running(ttlSecondsAfterFinished=60)
    cluster.end(cluster.pod(COORDINATOR), 0)
    cluster.settle()
    result = cluster.reconcile()
    assert not cluster.gone
    assert 0 < result.requeue <= 60
    cluster.pass_time(61)
    cluster.reconcile()
    assert cluster.gone


def test_a_job_that_is_being_deleted_is_left_alone():
    cluster = running()
    cluster.document["metadata"]["deletionTimestamp"] = cluster.stamp()
    cluster.remove("Service", "demo-coordinator")
    result = cluster.look()
    assert (result.apply, result.delete) == ([], [])


def test_the_objects_of_an_earlier_job_are_not_this_jobs():
    cluster = running()
    cluster.document["metadata"] |= {"uid": "11111111-2222-3333-4444-555555555555"}
    cluster.document.pop("status")
    result = cluster.look()
    assert kinds(result.apply)[-1] == "JobSet"
    assert cluster.look().delete == []
    assert [group.ready for group in result.status.groups] == [0, 0]
    for place in list(cluster.objects):
        cluster.remove(*place)
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    env = cluster.objects["JobSet", "demo"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {"name": "DOVETAIL_RUN_DIR", "value": "/var/dovetail/demo-11111111"} in env["containers"][0]["env"]


def test_an_unhealthy_iteration_is_told_until_one_is_healthy():
    cluster = running()
    assert cluster.condition("Healthy") == {}
    verdicts = [{"reason": "KLRunaway", "message": "KL is 30 nats"}, {"reason": "RewardsEqual", "message": "all are 1"}]
    cluster.reported = {"stage": "ppo", "health": {"iteration": 3, "verdicts": verdicts}}
    result = cluster.reconcile()
    healthy = cluster.condition("Healthy")
    assert (healthy["status"], healthy["reason"]) == ("False", "KLRunaway")
    assert healthy["message"] == "iteration 3: KL is 30 nats; all are 1"
    assert [(e.type, e.reason) for e in result.events] == [("Warning", "KLRunaway")]
    cluster.reported, away = None, cluster.reported
    assert cluster.reconcile().events == []
    assert cluster.condition("Healthy")["status"] == "False"
    cluster.reported = {**away, "health": {"iteration": 4, "verdicts": []}}
    assert cluster.reconcile().events == []
    assert cluster.condition("Healthy")["status"] == "True"


@pytest.mark.parametrize(
    "health",
    [3, {"iteration": "1", "verdicts": []}, {"iteration": 1}, {"iteration": 1, "verdicts": [{"reason": "no reason"}]}],
)
def test_a_verdict_that_no_condition_can_hold_is_no_answer(health):
    with pytest.raises(ValueError, match="verdict"):
        progress.judged({"stage": "ppo", "health": health})
    long = {"iteration": 1, "verdicts": [{"reason": "X", "message": "y" * 10_000}] * 100}
    kept = progress.judged({"stage": "ppo", "health": long})["health"]["verdicts"]
    assert len(kept) * len(kept[0]["message"]) <= 16_000


EVALUATION = {
    "iteration": 10,
    "metric": "exactMatch",
    "metrics": {"exactMatch": {"mean": 0.7512345678, "ci95": 0.05}, "reward": {"mean": 1.0, "ci95": 0.1}},
    "best": {"iteration": 5, "mean": 0.8, "ci95": 0.04},
}


def test_the_status_has_the_last_evaluation_and_the_best():
    cluster = running()
    cluster.reported = judged({"stage": "ppo", "iteration": 10, "total_iterations": 20, "evaluation": EVALUATION})
    cluster.reconcile()
    assert cluster.document["status"]["evaluation"] == {
        "iteration": 10,
        "metric": "exactMatch",
        "value": 0.751235,
        "bestIteration": 5,
        "bestValue": 0.8,
    }


@pytest.mark.parametrize(
    "evaluation", [3, {"iteration": 1}, EVALUATION | {"iteration": -1}, EVALUATION | {"metrics": {"exactMatch": {}}}]
)
def test_an_evaluation_that_no_status_can_hold_is_no_answer(evaluation):
    with pytest.raises(ValueError, match="evaluation"):
        judged({"stage": "ppo", "evaluation": evaluation})


def surplus_pod(cluster):
    return next(p for p in cluster.pods() if names.SURPLUS_LABEL in p["metadata"]["labels"])


@pytest.mark.slow
@pytest.mark.parametrize(("code", "ran", "anew"), [(1, 600, True), (0, 600, True), (0, 5, True), (1, 5, False)])
def test_a_surplus_rollout_that_worked_starts_again_at_once(code, ran, anew):
    """Its Job would wait 10 s and more, and would make no pod after a drain. One that is broken keeps these pauses."""
    cluster = running()
    before = cluster.objects["Job", "demo-gen-s1"]["metadata"]["uid"]
    cluster.end(surplus_pod(cluster), code, ran=ran)
    if code == 0:
        cluster.step()  # the Job notices
    result = cluster.reconcile()
    assert (("Job", "demo-gen-s1") in result.delete) is anew
    cluster.settle()
    assert (cluster.objects["Job", "demo-gen-s1"]["metadata"]["uid"] != before) is anew
    assert cluster.condition("Running")["status"] == "True", "and it counts as no failure"


def test_a_surplus_rollout_whose_pod_somebody_deleted_starts_again_at_once():
    cluster = running()
    job = cluster.objects["Job", "demo-gen-s1"]
    cluster.remove("Pod", surplus_pod(cluster)["metadata"]["name"])
    assert ("Job", "demo-gen-s1") not in cluster.look().delete, "perhaps its Job has not made it yet"
    job["status"]["failed"] = 1
    assert ("Job", "demo-gen-s1") in cluster.look().delete


# ---------------------------------------------------------------- rollouts whose node ends


def on_node(cluster, group, node):
    """The pod of a group that is not a surplus rollout's, on this node."""
    pods = [p for p in cluster.pods() if p["metadata"]["labels"].get(names.GROUP_LABEL) == group]
    pod = next(p for p in pods if names.SURPLUS_LABEL not in p["metadata"]["labels"])
    pod["spec"] = {"nodeName": node}
    return pod


def test_rollouts_leave_a_node_that_will_end_and_trainers_stay():
    cluster = running()
    guaranteed, surplus = on_node(cluster, "gen", "spot-1"), surplus_pod(cluster)
    surplus["spec"] = {"nodeName": "spot-2"}
    on_node(cluster, "train", "spot-1")
    cluster.pass_time(60)
    cluster.ending = {"spot-1": cluster.now}
    assert cluster.look().delete == [("Pod", guaranteed["metadata"]["name"])]
    cluster.ending["spot-2"] = cluster.now
    leaving = {("Pod", p["metadata"]["name"]) for p in (guaranteed, surplus)}
    assert set(cluster.reconcile().delete) == leaving
    assert cluster.look().delete == [], "they are on their way"


def test_a_pod_that_came_after_the_notice_stays():
    """It tolerates the taint: were it deleted too, pods would come and go until the node ends."""
    cluster = running()
    on_node(cluster, "gen", "spot-1")
    cluster.ending = {"spot-1": cluster.now - timedelta(seconds=1)}
    assert cluster.look().delete == []


@pytest.mark.parametrize(("failed", "anew"), [(0, False), (1, True)])
def test_a_rollout_of_the_jobset_whose_pod_was_deleted_starts_again_at_once(failed, anew):
    """Its Job would wait for 10 s, and after some more such ends for up to 10 minutes."""
    cluster = running()
    cluster.remove("Pod", on_node(cluster, "gen", "spot-1")["metadata"]["name"])
    cluster.objects["Job", "demo-gen-0"]["status"]["failed"] = failed
    assert (("Job", "demo-gen-0") in cluster.look().delete) is anew


@pytest.mark.parametrize(("disrupted", "anew"), [(True, True), (False, False)])
def test_a_rollout_of_the_jobset_that_was_disrupted_starts_again_and_one_that_failed_counts(disrupted, anew):
    cluster = running()
    cluster.end(on_node(cluster, "gen", "spot-1"), 143, disrupted=disrupted, ran=600)
    assert (("Job", "demo-gen-0") in cluster.reconcile().delete) is anew
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"


def test_a_job_with_several_rollouts_or_a_trainer_is_left_to_kubernetes():
    groups = [
        {"name": "train", "roles": ["trainer"], "replicas": 1},
        {"name": "gen", "roles": ["rollout"], "replicas": 2},
    ]
    cluster = running(groups=groups)
    for group in ("gen", "train"):
        cluster.end(on_node(cluster, group, "spot-1"), 143, disrupted=True, ran=600)
    assert cluster.reconcile().delete == []


def test_each_rollout_of_a_preemptible_group_has_a_job_that_is_made_anew():
    groups = [
        {"name": "train", "roles": ["trainer"], "replicas": 1},
        {"name": "gen", "roles": ["rollout"], "replicas": 3, "preemptible": True},
    ]
    cluster = running(groups=groups)
    mine = [f"demo-gen-{i}" for i in range(3)]
    assert sum(label["name"] == "gen" for label in cluster.document["status"]["groups"]) == 1
    assert {len(cluster.pods(name)) for name in mine} == {1}
    (pod,) = cluster.pods("demo-gen-1")
    cluster.end(pod, 143, disrupted=True, ran=600)
    assert cluster.reconcile().delete == [("Job", "demo-gen-1")]
    others = {name: cluster.objects["Job", name]["metadata"]["uid"] for name in mine if name != "demo-gen-1"}
    cluster.settle()
    assert {len(cluster.pods(name)) for name in mine} == {1}
    assert {name: cluster.objects["Job", name]["metadata"]["uid"] for name in others} == others
    assert cluster.condition("Running")["status"] == "True"
