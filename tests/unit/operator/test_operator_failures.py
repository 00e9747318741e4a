"""`reconcile` on a fake cluster: what goes wrong with pods, how it is explained, and when it ends the job."""

import json
from dataclasses import replace

import pytest

from dovetail.coordinator.main import verdict
from dovetail.coordinator.reporting.health import UnhealthyError
from dovetail.kube import names
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.reconcile.reconcile import SENT_SECONDS
from dovetail.operator.reconcile.rootcause import lost_node
from dovetail.protocol.process.endings import JOB_FAILED
from dovetail.protocol.process.process_names import COORDINATOR
from helpers.fake_cluster import FakeCluster, a_cluster, manifest, restarting, running


def test_a_dead_pod_degrades_the_job_until_it_is_replaced():
    cluster = running()
    cluster.end(cluster.pod("trainer"), 1, "trainer-0 ended (exit code 1): CUDA error: device lost")
    cluster.reconcile()
    degraded = cluster.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "TrainerFailed")
    assert "of group train failed with exit code 1" in degraded["message"]
    assert "CUDA error: device lost" in degraded["message"]
    assert cluster.condition("Running")["reason"] == "TrainerFailed"
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"
    assert cluster.condition("Running")["status"] == "True"
    assert not cluster.over()


def test_a_failure_that_was_mended_is_not_blamed_for_a_pod_that_starts():
    """The pod that failed stays for its log, maybe for days."""
    cluster = running()
    cluster.end(cluster.pod("trainer"), 1, "CUDA error: device lost")
    cluster.settle()
    cluster.remove("Pod", cluster.pod("rollout")["metadata"]["name"])
    cluster.step()
    cluster.reconcile()
    starting = cluster.condition("Running")
    assert (starting["status"], starting["reason"]) == ("False", "PodsStarting")
    assert "device lost" not in starting["message"]
    assert cluster.condition("Degraded")["status"] == "False"


@pytest.mark.parametrize(
    ("role", "code", "extra", "reason", "words"),
    [
        ("coordinator", 3, {"message": "spec.models.actor: /m is no model"}, "CoordinatorFailed", "/m is no model"),
        ("trainer", 2, {"message": "bad plan"}, "TrainerFailed", "bad plan"),
        ("rollout", 2, {"message": "line one\nno such group\n"}, "RolloutFailed", "no such group"),
    ],
)
def test_exit_codes_that_no_restart_mends_fail_the_job(role, code, extra, reason, words):
    cluster = running()
    cluster.end(cluster.pod(role), code, **extra)
    cluster.settle()
    failed = cluster.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", reason)
    assert words in failed["message"]
    assert f"exit code {code}" in failed["message"]
    assert not [p for p in cluster.pods() if p["status"]["phase"] in ("Pending", "Running")]
    assert cluster.document["status"]["completionTime"]


def test_an_unhealthy_job_ends_with_its_verdict():
    cluster = running()
    cluster.reported = {"stage": "ppo", "health": {"iteration": 1, "verdicts": []}}
    cluster.reconcile()
    found = {"iteration": 2, "verdicts": [{"reason": "LogProbMismatch", "message": "8.1 nats"}]}
    sentence = "iteration 2 is stopped and does not count (LogProbMismatch): 8.1 nats"
    last = verdict({"health": found}, UnhealthyError(sentence)) + sentence
    cluster.end(cluster.pod("coordinator"), JOB_FAILED, last)
    cluster.settle()
    assert cluster.condition("Failed")["message"].endswith(sentence)
    healthy = cluster.condition("Healthy")
    assert (healthy["status"], healthy["reason"]) == ("False", "LogProbMismatch")


def test_running_out_of_memory_is_told():
    cluster = running(failurePolicy=restarting(0))
    cluster.end(cluster.pod("trainer"), 137, reason="OOMKilled")
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "OOMKilled"
    assert "raise it in the podTemplate" in cluster.condition("Failed")["message"]


def test_restarts_are_counted_over_all_pods():
    cluster = running(failurePolicy=restarting(2))
    for role in ("trainer", "rollout", "trainer"):
        assert not cluster.over()
        cluster.pass_time(1)
        cluster.end(cluster.pod(role), 1, f"{role} died")
        cluster.settle()
    failed = cluster.condition("Failed")
    assert failed["reason"] == "TrainerFailed"
    assert failed["message"].endswith("(failures of pods within an hour: 3, failurePolicy.maxRestarts: 2)")
    assert "trainer died" in failed["message"]
    assert ("JobSet", "demo") not in cluster.objects, "it would hold GPUs"


@pytest.mark.slow
def test_a_long_run_may_lose_a_pod_now_and_then():
    """Restarts are counted by the hour: by Kubernetes's own count, over a run's life, the third one would end it."""
    cluster = running(failurePolicy=restarting(2))
    for _ in range(10):
        cluster.pass_time(1900)
        cluster.end(cluster.pod("trainer"), 1, "trainer died")
        cluster.settle()
        assert not cluster.over()
    cluster.end(cluster.pod("rollout"), 1, "rollout died")
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "RolloutFailed"


def test_disruptions_do_not_count():
    cluster = running(failurePolicy=restarting(0))
    cluster.end(cluster.pod("trainer"), 143, disrupted=True)
    cluster.reconcile()
    assert cluster.condition("Degraded")["reason"] == "PodEvicted"
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"


def test_a_pod_that_is_preempted_says_so_while_it_ends():
    cluster = running(failurePolicy={"maxRestarts": 0})
    pod = cluster.pod("trainer")
    told = "default-scheduler: preempting to accommodate a higher priority pod"
    pod["metadata"]["deletionTimestamp"] = cluster.stamp()
    disruption = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": told}
    pod["status"]["conditions"] += [disruption | {"lastTransitionTime": cluster.stamp()}]
    cluster.reconcile()
    assert cluster.condition("Degraded")["reason"] == "PodEvicted"
    assert cluster.condition("Degraded")["message"].endswith(f"was ended: {told}")
    assert not cluster.over()


def test_a_pod_that_exceeds_its_own_storage_says_so_and_counts():
    """The kubelet gives it a reason and an exit code, and no condition."""
    cluster = running(failurePolicy=restarting(0))
    pod = cluster.pod("trainer")
    cluster.end(pod, 137, "the last line of its log")
    told = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "
    pod["status"] |= {"reason": "Evicted", "message": told}
    cluster.settle()
    failed = cluster.condition("Failed")
    assert failed["reason"] == "PodEvicted"
    assert f"of group train was ended: {told.strip()} (failures of pods" in failed["message"]


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("Evicted", "The node had condition: [DiskPressure]."),
        ("OutOfmemory", "Node didn't have enough resource: memory, requested: 2, used: 1, capacity: 2"),
        ("OutOfnvidia.com/gpu", "Node didn't have enough resource: nvidia.com/gpu, requested: 8, used: 1, capacity: 8"),
        ("UnexpectedAdmissionError", "Allocate failed due to no healthy devices present, which is unexpected"),
        ("NodeAffinity", "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"),
        ("NodeShutdown", "Pod was rejected as the node is shutting down."),
    ],
)
@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_pod_that_its_node_refuses_is_a_disruption_and_no_failure_of_the_job(role, reason, why):
    """The kubelet gives it no condition DisruptionTarget. Its Job's pauses stay, because it may be refused again."""
    cluster = running(failurePolicy=restarting(0))
    pod = cluster.pod(role)
    pod["spec"] = {"nodeName": "gpu-7"}
    cluster.refuse(pod, reason, why)
    result = cluster.reconcile()
    assert not [place for place in result.delete if place[0] == "Job"], "it would come back at once, again and again"
    told = cluster.condition("Disrupted")
    assert told["status"] == "True"
    assert told["reason"] == (reason if reason.isalnum() else "PodEvicted")
    assert f"left node gpu-7: Pod was rejected: {why}"[:200] in told["message"]
    assert cluster.condition("Degraded")["reason"] == "PodEvicted"
    cluster.settle()
    assert not cluster.over()
    assert cluster.condition("Running")["status"] == "True"
    assert cluster.condition("Disrupted")["status"] == "False"


def test_a_pod_that_no_such_node_takes_counts():
    """It asks for what its node cannot give, and the next one would be refused, too."""
    cluster = running(failurePolicy=restarting(0))
    pod = cluster.pod("trainer")
    cluster.refuse(pod, "SysctlForbidden", 'forbidden sysctl: "net.core.somaxconn" not allowlisted')
    pod["status"]["containerStatuses"] = []  # none has run
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "PodFailed"
    assert "net.core.somaxconn" in cluster.condition("Failed")["message"]


UNKNOWN = {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-11-21T12:03:00Z"}
NOT_READY = UNKNOWN | {"status": "False", "message": "container runtime is down"}


@pytest.mark.parametrize(
    ("ready", "words"),
    [
        (UNKNOWN, "has not answered since 2026-11-21T12:03:00Z"),
        (NOT_READY, "is not ready since 2026-11-21T12:03:00Z: container runtime is down"),
    ],
)
@pytest.mark.parametrize("deleted", [False, True])
def test_a_node_that_is_lost_is_named_until_it_is_back(ready, words, deleted):
    """Kubernetes only says that the pod is not ready, and five minutes later that it is being deleted."""
    cluster = running(failurePolicy=restarting(0))
    pod = cluster.pod("trainer")
    pod["spec"] = {"nodeName": "gpu-7"}
    lost = lost_node({"metadata": {"name": "gpu-7"}, "status": {"conditions": [ready]}})
    assert lost is not None
    cluster.lost = {"gpu-7": lost}
    was = pod["status"]["conditions"]
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}]
    if deleted:
        pod["metadata"]["deletionTimestamp"] = cluster.stamp()
        told = {
            "type": "DisruptionTarget",
            "status": "True",
            "message": "Taint manager: deleting due to NoExecute taint",
        }
        pod["status"]["conditions"].append(told)
    cluster.pass_time(3600)
    cluster.reconcile()
    for kind in ("Running", "Degraded"):
        found = cluster.condition(kind)
        assert found["reason"] == "NodeNotReady"
        assert f"pod {pod['metadata']['name']} of group train is on node gpu-7, which {words}" in found["message"]
        assert "kubectl delete node gpu-7" in found["message"]
    cluster.edit(suspend=True)
    cluster.reconcile()
    cluster.edit(suspend=False)
    cluster.reconcile()
    assert "gpu-7" in cluster.condition("Running")["message"], "its pod holds up the next JobSet"
    cluster.lost = {}
    pod["status"]["conditions"] = was
    pod["metadata"].pop("deletionTimestamp", None)
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"
    assert not cluster.over()


def test_images_that_the_chart_corrected_are_offered_to_a_job_that_waits_for_the_old_ones():
    cluster = running()
    cluster.settings = replace(cluster.settings, trainer_image="dovetail/trainer:0.1.1")
    cluster.reconcile()
    assert "0.1.1" not in json.dumps(cluster.document["status"]), "what runs keeps its image"
    cluster.waiting(cluster.pod("trainer"), "ImagePullBackOff", "Back-off pulling image")
    cluster.reconcile()
    message = cluster.condition("Running")["message"]
    assert "pods that are made now get dovetail/trainer:0.1.1: set spec.suspend to true, and then to false" in message
    cluster.edit(suspend=True)
    cluster.settle()
    cluster.edit(suspend=False)
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    assert "dovetail/trainer:0.1.1" in json.dumps(cluster.objects["JobSet", "demo"])


def test_an_unschedulable_pod_is_explained_and_fails_the_job_in_time():
    cluster = a_cluster(failurePolicy={"startTimeoutSeconds": 60})
    cluster.reconcile()
    cluster.step()
    cluster.unschedulable(cluster.pod("trainer"))
    cluster.pass_time(20)
    result = cluster.reconcile()
    scheduled = cluster.condition("Scheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
    assert "3 Insufficient nvidia.com/gpu" in scheduled["message"]
    assert result.requeue <= 40.0
    cluster.pass_time(41)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "Unschedulable"
    assert "startTimeoutSeconds, 60 s" in cluster.condition("Failed")["message"]
    assert cluster.pods() == [], "half-started jobs hold no GPUs"


def test_without_a_timeout_it_waits():
    cluster = a_cluster()
    cluster.reconcile()
    cluster.step()
    cluster.unschedulable(cluster.pod("trainer"))
    cluster.pass_time(1e6)
    cluster.reconcile()
    assert not cluster.over()


@pytest.mark.parametrize(
    ("waiting", "reason", "words"),
    [
        (("ImagePullBackOff", 'Back-off pulling image "some/image:1"'), "ImagePullFailed", "some/image:1"),
        (
            ("CreateContainerConfigError", 'secret "hub" not found'),
            "SecretOrConfigMapMissing",
            'secret "hub" not found',
        ),
    ],
)
def test_pods_that_cannot_start_are_explained(waiting, reason, words):
    cluster = a_cluster()
    cluster.reconcile()
    cluster.step()
    cluster.waiting(cluster.pod("rollout"), *waiting)
    events = cluster.reconcile().events
    condition = cluster.condition("Running")
    assert (condition["status"], condition["reason"]) == ("False", reason)
    assert words in condition["message"]
    assert [(e.type, e.reason) for e in events if e.reason == reason] == [("Warning", reason)]


@pytest.mark.parametrize("seconds", [10**12, 2**63 - 1])
def test_any_number_of_seconds_is_a_deadline(seconds):
    """Some people write a large number for never. The sum with the time of day is no date then."""
    policy = {"startTimeoutSeconds": seconds}
    cluster = running(activeDeadlineSeconds=seconds, ttlSecondsAfterFinished=seconds, failurePolicy=policy)
    assert cluster.reconcile().requeue <= 86400, "timers cannot take more than some years"
    cluster.end(cluster.pod(COORDINATOR), 0)
    cluster.settle()
    assert cluster.condition("Completed")["status"] == "True"
    assert cluster.reconcile().requeue <= 86400
    waiting = a_cluster(failurePolicy=policy)
    waiting.reconcile()
    waiting.step()
    waiting.unschedulable(waiting.pod("trainer"))
    waiting.reconcile()
    assert waiting.condition("Scheduled")["reason"] == "Unschedulable"
    assert not waiting.over()


def test_the_deadline_counts_from_the_last_start():
    cluster = running(activeDeadlineSeconds=100)
    cluster.pass_time(90)
    cluster.edit(suspend=True)
    cluster.settle()
    cluster.pass_time(90)
    cluster.edit(suspend=False)
    cluster.settle()
    assert not cluster.over()
    assert cluster.reconcile().requeue <= 100
    cluster.pass_time(101)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "DeadlineExceeded"
    assert cluster.pods() == []


# ---------------------------------------------------------------- no plan


def test_a_pod_that_somebody_deletes_is_no_failure():
    cluster = running(failurePolicy=restarting(0))
    pod = cluster.pod("trainer")
    cluster.end(pod, 143, "terminated")
    pod["metadata"]["deletionTimestamp"] = cluster.stamp()
    cluster.reconcile()
    assert not cluster.over()
    assert cluster.condition("Degraded")["status"] == "False"
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"


def failed(**spec):
    cluster = running(failurePolicy=restarting(0), **spec)
    cluster.end(cluster.pod("trainer"), 1, "died")
    cluster.settle()
    assert cluster.condition("Failed")["status"] == "True"
    return cluster


def test_a_failed_job_starts_again_when_retry_is_raised():
    cluster = failed(retry=1)
    assert cluster.document["status"]["retry"] == 1, "what the manifest began with"
    cluster.edit(retry=2, failurePolicy=restarting(1))
    cluster.reconcile()
    assert cluster.condition("Failed")["reason"] == "TriedAgain"
    assert "completionTime" not in cluster.document["status"]
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    assert cluster.condition("Failed")["status"] == "False"
    cluster.end(cluster.pod("trainer"), 1, "died")
    cluster.settle()
    assert not cluster.over(), "the failures of before do not count, and maxRestarts is raised"
    cluster.end(cluster.pod("trainer"), 1, "died")
    cluster.settle()
    assert cluster.condition("Failed")["status"] == "True", "it is tried again once"


def test_a_job_is_tried_again_only_when_its_old_pods_are_gone():
    cluster = running()
    cluster.end(cluster.pod("coordinator"), 3, "no model")
    cluster.step()
    cluster.step()
    cluster.reconcile()
    assert cluster.condition("Failed")["status"] == "True"
    old = cluster.objects["JobSet", "demo"]["metadata"]["uid"]
    cluster.edit(retry=1)
    cluster.reconcile()
    assert cluster.condition("Failed")["status"] == "True"
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    assert cluster.objects["JobSet", "demo"]["metadata"]["uid"] != old


def test_retry_means_nothing_to_a_job_that_has_not_failed():
    cluster = running()
    before = cluster.objects["JobSet", "demo"]["metadata"]["uid"]
    cluster.edit(retry=5)
    cluster.settle()
    assert cluster.objects["JobSet", "demo"]["metadata"]["uid"] == before
    cluster.end(cluster.pod("coordinator"), 3, "no model")
    cluster.settle()
    assert cluster.condition("Failed")["status"] == "True"


def test_pods_are_made_anew_from_a_template_that_changed_while_the_job_was_suspended():
    """Also if it was suspended for so short a time that the operator did not see it."""
    cluster = running()
    groups = cluster.document["spec"]["groups"]
    cluster.edit(groups=[groups[0] | {"image": "other:2"}, groups[1]])
    cluster.settle()
    jobs = {job["name"]: job["template"]["spec"] for job in cluster.objects["JobSet", "demo"]["spec"]["replicatedJobs"]}
    assert jobs["train"]["template"]["spec"]["containers"][0]["image"] == "other:2"
    assert cluster.condition("Running")["status"] == "True"


QUOTA = 'Error creating: pods "demo-train-0-0-" is forbidden: exceeded quota: none, requested: pods=1, used: pods=0'


def without_pods(**spec):
    """A job whose trainers' Job may not make its pod."""
    cluster = a_cluster(**spec)
    cluster.reconcile()
    cluster.step()
    cluster.remove("Pod", cluster.pod("trainer")["metadata"]["name"])
    cluster.mounts["demo-train-0"] = QUOTA
    return cluster


def test_a_job_that_may_not_make_its_pods_is_explained():
    cluster = without_pods()
    assert cluster.reconcile().requeue == 10, "Events tell of it, which are not watched"
    for kind in ("Scheduled", "Running"):
        assert cluster.condition(kind)["reason"] == "PodsRefused"
    said = cluster.condition("Scheduled")["message"]
    assert said == "Job demo-train-0 cannot make its pods: " + QUOTA.removeprefix("Error creating: ")


def test_the_start_timeout_counts_from_when_the_job_wants_pods():
    cluster = without_pods(failurePolicy={"startTimeoutSeconds": 60})
    cluster.reconcile()
    for pod in cluster.pods():
        cluster.unschedulable(pod)
    cluster.pass_time(50)
    cluster.reconcile()
    assert not cluster.over()
    for pod in cluster.pods():  # new pods do not wait anew
        pod["metadata"]["creationTimestamp"] = cluster.stamp()
    cluster.pass_time(11)
    cluster.reconcile()
    assert cluster.condition("Failed")["status"] == "True"
    assert "startTimeoutSeconds, 60 s" in cluster.condition("Failed")["message"]


def test_the_administrator_says_how_long_a_job_waits_that_does_not_say_it():
    for own, words in (
        (None, "the chart's jobs.startTimeoutSeconds, 90 s"),
        (60, "failurePolicy.startTimeoutSeconds, 60"),
    ):
        cluster = a_cluster(failurePolicy={"startTimeoutSeconds": own} if own else {})
        cluster.settings = OperatorSettings.read({"DOVETAIL_START_TIMEOUT_SECONDS": "90"})
        cluster.reconcile()
        cluster.step()
        cluster.unschedulable(cluster.pod("trainer"))
        cluster.pass_time((own or 90) - 1)
        cluster.reconcile()
        assert not cluster.over()
        cluster.pass_time(2)
        cluster.reconcile()
        assert words in cluster.condition("Failed")["message"]


def test_the_start_timeout_counts_anew_when_a_job_is_tried_again():
    """The time in which it ran and lay there as failed does not count."""
    cluster = running(failurePolicy={"startTimeoutSeconds": 60, "maxRestarts": 0})
    cluster.pass_time(3600)
    cluster.end(cluster.pod("trainer"), 1, "died")
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "TrainerFailed"
    cluster.pass_time(3600)
    cluster.edit(retry=1)
    for _ in range(3):
        cluster.reconcile()
        cluster.step()
    fails_after_waiting_for_a_minute(cluster)


def fails_after_waiting_for_a_minute(cluster):
    for pod in cluster.pods():
        cluster.unschedulable(pod)
    cluster.pass_time(50)
    assert 0 < cluster.reconcile().requeue <= 10
    assert not cluster.over()
    cluster.pass_time(11)
    cluster.reconcile()
    assert cluster.condition("Failed")["status"] == "True"
    assert "startTimeoutSeconds, 60 s" in cluster.condition("Failed")["message"]


def test_the_time_without_a_jobset_is_no_waiting_for_nodes():
    """A name was taken, or the JobSet controller was not there."""
    cluster = a_cluster(failurePolicy={"startTimeoutSeconds": 60})
    cluster.reconcile()
    cluster.remove("JobSet", "demo")
    cluster.pass_time(3600)
    cluster.reconcile()
    cluster.step()
    fails_after_waiting_for_a_minute(cluster)


def test_the_jobset_of_a_job_that_multikueue_sent_outlives_its_end_for_a_while():
    """With the JobSet its Workload would go, and with this Kueue could not copy the status any more."""
    document = manifest(failurePolicy={"startTimeoutSeconds": 60}, ttlSecondsAfterFinished=0)
    document["metadata"]["labels"] = {names.ORIGIN_LABEL: "multikueue"}
    cluster = FakeCluster(document)
    for _ in range(2):
        cluster.reconcile()
        cluster.step()
    for pod in cluster.pods():
        cluster.unschedulable(pod)
    cluster.pass_time(61)
    result = cluster.reconcile()
    assert cluster.condition("Failed")["status"] == "True"
    assert result.requeue == SENT_SECONDS
    cluster.pass_time(SENT_SECONDS - 1)
    assert 0 < cluster.reconcile().requeue <= 1
    cluster.step()
    assert ("JobSet", "demo") in cluster.objects
    cluster.pass_time(1)
    cluster.reconcile()
    cluster.step()
    assert cluster.pods() == []
    cluster.pass_time(1000)
    cluster.reconcile()
    assert not cluster.gone, "the other cluster deletes it"


def test_a_running_job_whose_manifest_can_no_longer_be_read_may_be_suspended():
    """Its pods would hold their GPUs for ever."""
    cluster = running()
    cluster.edit(nonsense=1)
    cluster.settle()
    assert cluster.condition("Planned")["reason"] == "InvalidSpec"
    assert cluster.pods(), "what runs goes on"
    cluster.edit(suspend=True)
    cluster.settle()
    assert not cluster.pods()
    assert cluster.condition("Suspended")["status"] == "True"
    del cluster.document["spec"]["nonsense"]
    cluster.edit(suspend=False)
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    assert cluster.condition("Suspended")["status"] == "False"


def test_a_suspended_job_does_not_want_pods():
    cluster = without_pods(failurePolicy={"startTimeoutSeconds": 60})
    cluster.reconcile()
    cluster.edit(suspend=True)
    cluster.reconcile()
    cluster.step()
    cluster.pass_time(1000)
    cluster.edit(suspend=False)
    cluster.reconcile()
    cluster.step()
    cluster.reconcile()
    assert not cluster.over()


def test_only_the_words_of_our_own_container_are_quoted():
    """A container of the user's may have pointed the kubelet at a Secret."""
    cluster = running()
    pod = cluster.pod("trainer")
    cluster.end(pod, 1, "password: hunter2")
    pod["status"]["containerStatuses"][0]["name"] = "sidecar"
    cluster.reconcile()
    told = cluster.condition("Degraded")
    assert told["reason"] == "TrainerFailed"
    assert told["message"].endswith("failed with exit code 1")
