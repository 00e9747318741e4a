"""Pods that wait for volumes: what kubelets say of them, asked for at a bounded rate."""

import asyncio

import pytest

from dovetail.kube.connection import KubeError
from dovetail.operator.cluster.client import Page
from dovetail.operator.cluster.mounts import Mounts
from dovetail.operator.reconcile.children import Children
from dovetail.operator.reconcile.queueing import why
from helpers.fake_cluster import FakeCluster

KEY = ("default", "demo")
TOLD = 'MountVolume.SetUp failed for volume "keys" : secret "hub-keys" not found'
NO_KEY = 'MountVolume.SetUp failed for volume "keys" : references non-existent secret key: token'
NO_SERVER = 'MountVolume.SetUp failed for volume "files" : mount failed: exit status 32: Connection timed out'


@pytest.fixture
def cluster():
    cluster = FakeCluster()
    cluster.reconcile()
    cluster.step()
    return cluster


def stuck(cluster):
    pod = cluster.pod("trainer")
    cluster.waiting(pod, "ContainerCreating", "")
    return pod


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (TOLD, "SecretOrConfigMapMissing"),
        (TOLD.replace("secret", "configmap"), "SecretOrConfigMapMissing"),
        (NO_KEY, "SecretOrConfigMapMissing"),
        (NO_SERVER, "MountFailed"),
    ],
)
def test_a_volume_that_cannot_be_mounted_is_explained(cluster, told, reason):
    """A Secret that is missing is a mistake of the manifest, and a server that does not answer is not."""
    pod = stuck(cluster)
    assert cluster.reconcile().requeue == 10, "kubelets tell of it in Events, which are not watched"
    assert cluster.condition("Running")["reason"] == "PodsStarting"
    cluster.mounts[pod["metadata"]["uid"]] = told
    cluster.reconcile()
    condition = cluster.condition("Running")
    assert condition["reason"] == reason
    assert condition["message"].endswith(f"waits for a volume: {told}")


def test_a_claim_that_is_missing_has_a_reason_of_its_own(cluster):
    """It is a mistake of the manifest, unlike nodes that are full."""
    cluster.unschedulable(cluster.pod("trainer"), '0/3 nodes are available: persistentvolumeclaim "hub" not found.')
    cluster.reconcile()
    for kind in ("Scheduled", "Running"):
        assert cluster.condition(kind)["reason"] == "VolumeClaimMissing"
    assert 'persistentvolumeclaim "hub" not found' in cluster.condition("Scheduled")["message"]


class Client:
    """Some complaints, or an API server that does not answer."""

    def __init__(self):
        self.asked = []
        self.away = False
        self.uid = ""

    async def list(self, resource, namespace, selector="", fields=""):
        self.asked.append((resource.kind, namespace, fields))
        if self.away:
            raise KubeError(0, "no answer")
        times = (
            ("2026-01-01T00:00:00Z", 'secret "old" not found'),
            ("2026-01-01T00:02:00Z", TOLD),
            ("2026-01-01T00:03:00Z", "failed to sync secret cache: timed out waiting for the condition"),
        )
        about = {"involvedObject": {"uid": self.uid}}
        other = {
            "involvedObject": {"uid": "another"},
            "lastTimestamp": "2026-01-01T00:09:00Z",
            "message": "a not found",
        }
        return [other, *({"lastTimestamp": at, "message": message, **about} for at, message in times)]

    async def pages(self, resource, namespace, selector="", fields=""):
        yield Page(await self.list(resource, namespace, selector, fields))


def test_kubelets_are_asked_about_stuck_pods_only_and_not_at_once(cluster):
    now, client = [100.0], Client()
    mounts = Mounts(client, lambda: now[0])

    def problems():
        return asyncio.run(mounts.problems(KEY, Children(cluster.objects)))

    assert problems() == {}, "no pod has a node"
    uid = client.uid = stuck(cluster)["metadata"]["uid"]
    assert problems() == {}
    assert client.asked == [], "most pods start within seconds"
    now[0] += 10
    assert problems() == {uid: TOLD}
    asked = [("Event", "default", f"reason={reason}") for reason in ("FailedAttachVolume", "FailedMount")]
    assert client.asked == asked
    now[0] += 9
    assert problems() == {uid: TOLD}
    assert len(client.asked) == 2
    now[0] += 1
    client.away = True
    assert problems() == {}
    cluster.start(cluster.pod("trainer"))
    now[0] += 60
    assert problems() == {}
    assert len(client.asked) == 4


def test_the_newest_reason_why_jobs_are_not_made_is_told(cluster):
    """A webhook that does not know the JobSet yet refuses the first Job once, with the words "not found"."""
    start = 'job "demo-{}-0" creation failed with error: '
    passing = start.format("coordinator") + 'admission webhook "mjob.kb.io" denied: JobSet "demo" not found'
    lasting = start.format("train") + "Job.batch is invalid: dnsPolicy"
    now, client = [100.0], Client()
    uid = cluster.objects["JobSet", "demo"]["metadata"]["uid"]
    for key in [key for key in cluster.objects if key[0] == "Job"]:
        del cluster.objects[key]

    async def answer(resource, namespace, selector="", fields=""):
        times = (("2026-01-01T00:00:01Z", passing), ("2026-01-01T00:00:02Z", lasting))
        said = [{"involvedObject": {"uid": uid}, "lastTimestamp": at, "message": text} for at, text in times]
        return said if fields == "reason=JobCreationFailed" else []

    client.list = answer
    mounts = Mounts(client, lambda: now[0])
    for _ in range(2):
        found = asyncio.run(mounts.problems(KEY, Children(cluster.objects)))
        now[0] += 10
    assert found == {uid: lasting}


def test_a_flood_of_events_is_not_read_to_its_end(cluster):
    """A tenant can make any number of them, about objects that are not there."""
    now, read = [100.0], []

    class Flooded(Client):
        async def pages(self, resource, namespace, selector="", fields=""):
            yield Page(await self.list(resource, namespace, selector, fields))
            for number in range(1000):
                read.append(number)
                events = [{"involvedObject": {"uid": f"{number}-{n}"}, "message": "x" * 90_000} for n in range(100)]
                yield Page(events)

    client = Flooded()
    mounts = Mounts(client, lambda: now[0])
    uid = client.uid = stuck(cluster)["metadata"]["uid"]
    asyncio.run(mounts.problems(KEY, Children(cluster.objects)))
    now[0] += 10
    assert asyncio.run(mounts.problems(KEY, Children(cluster.objects))) == {uid: TOLD}
    assert len(read) <= 200, "about 10,000 objects for each of two reasons"
    kept = sum(len(text) for told in mounts._told.values() for _, text in told.complaints.values())
    assert kept < 5_000_000, "of each of two reasons"


def test_events_without_end_about_one_object_hold_no_worker(cluster):
    """Jobs of the namespace wait for one answer, each with a worker."""
    now = [100.0]

    class Endless(Client):
        async def pages(self, resource, namespace, selector="", fields=""):
            yield Page(await self.list(resource, namespace, selector, fields))
            for _ in range(100_000):
                now[0] += 0.05
                yield Page([{"involvedObject": {"uid": "another"}, "message": "x"}] * 100)

    client = Endless()
    mounts = Mounts(client, lambda: now[0])
    uid = client.uid = stuck(cluster)["metadata"]["uid"]
    asyncio.run(mounts.problems(KEY, Children(cluster.objects)))
    began = now[0] = now[0] + 10
    assert asyncio.run(mounts.problems(KEY, Children(cluster.objects))) == {uid: TOLD}
    assert now[0] - began < 30, "10 s for each of two reasons"


def test_a_slow_answer_holds_one_worker_of_a_namespace(cluster, monkeypatch):
    monkeypatch.setattr("dovetail.operator.cluster.mounts.PATIENCE_SECONDS", 0.05)
    now, asked, go = [100.0], [], asyncio.Event()

    class Stuck(Client):
        async def pages(self, resource, namespace, selector="", fields=""):
            asked.append(fields)
            await go.wait()
            yield Page([])

    mounts = Mounts(Stuck(), lambda: now[0])
    keys = [KEY, ("default", "second"), ("default", "third")]
    stuck(cluster)
    children = Children(cluster.objects)

    async def test():
        for key in keys:
            await mounts.problems(key, children)
        now[0] += 10
        first = asyncio.create_task(mounts.problems(keys[0], children))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            others = [await mounts.problems(key, children) for key in keys[1:]]
        held = not first.done()
        go.set()
        return held, others, await first

    assert asyncio.run(test()) == (True, [{}, {}], {})


def test_one_question_answers_for_all_jobs_of_a_namespace_and_an_expensive_one_for_longer(cluster):
    now, client = [100.0], Client()
    mounts, children = Mounts(client, lambda: now[0]), Children(cluster.objects)
    client.uid = stuck(cluster)["metadata"]["uid"]
    keys = [("default", f"job-{number}") for number in range(50)]
    real = client.list

    async def slow(*arguments, **options):
        now[0] += 2
        return await real(*arguments, **options)

    async def all_of_them():
        return await asyncio.gather(*(mounts.problems(key, children) for key in keys))

    client.list = slow
    asyncio.run(all_of_them())
    now[0] += 10
    assert asyncio.run(all_of_them()) == [{client.uid: TOLD}] * len(keys)
    assert len(client.asked) == 2
    now[0] += 37
    asyncio.run(all_of_them())
    assert len(client.asked) == 2, "each took two seconds"
    now[0] += 3
    asyncio.run(all_of_them())
    assert len(client.asked) == 4


QUOTA = "couldn't assign flavors to pod set train: insufficient unused quota for nvidia.com/gpu in flavor a100"
EVICTED = "Preempted to accommodate a workload (UID: 1, JobUID: 2) due to prioritization in the ClusterQueue"


def workload(uid, **status):
    return {"metadata": {"labels": {"kueue.x-k8s.io/job-uid": uid}}, "status": status}


def said(kind, status, message):
    return {"type": kind, "status": status, "message": message}


class Kueue(Client):
    workloads = ()

    async def pages(self, resource, namespace, selector="", fields="", size=0):
        if resource.kind == "Event":
            yield Page(await self.list(resource, namespace, selector, fields))
            return
        self.asked.append((resource.kind, namespace, selector))
        yield Page(self.workloads)


def test_why_kueue_does_not_admit_a_job_is_told():
    cluster = FakeCluster()
    cluster.document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    cluster.queueing = True
    cluster.settle()
    assert cluster.condition("Suspended")["message"] == "waits for quota in queue team"
    assert cluster.reconcile().requeue == 10
    now, client, uid = [100.0], Kueue(), cluster.objects["JobSet", "demo"]["metadata"]["uid"]
    mounts = Mounts(client, lambda: now[0])
    waits = said("QuotaReserved", "False", QUOTA)
    client.workloads = [workload("another", conditions=[said("QuotaReserved", "False", "x")])]
    client.workloads.append(workload(uid, conditions=[said("Evicted", "True", EVICTED), waits]))
    assert asyncio.run(mounts.problems(KEY, Children(cluster.objects))) == {}
    assert client.asked == [], "most jobs are admitted at once"
    now[0] += 10
    cluster.mounts = asyncio.run(mounts.problems(KEY, Children(cluster.objects)))
    assert client.asked == [("Workload", "default", "kueue.x-k8s.io/job-uid")]
    cluster.pass_time(30)
    assert cluster.reconcile().requeue == 60, "it may wait for days"
    assert cluster.condition("Suspended")["message"] == f"waits for quota in queue team: {EVICTED}; {QUOTA}"
    assert cluster.condition("Suspended")["reason"] == "WaitingForQuota"
    checks = [{"name": "multikueue", "state": "Pending", "message": "no cluster answers"}]
    told = why(workload(uid, conditions=[said("QuotaReserved", "True", "Quota reserved")], admissionChecks=checks))
    assert told == "admission check multikueue: no cluster answers"


def test_a_claim_that_was_made_for_a_pod_is_named(cluster):
    """From a template in the pod. It has no label of the job, and Kubernetes names it after the pod."""
    pod = cluster.pod("trainer")
    cluster.unschedulable(pod, "pod has unbound immediate PersistentVolumeClaims")
    now, client, name = [100.0], Kueue(), f"{pod['metadata']['name']}-scratch"
    about = {"kind": "PersistentVolumeClaim", "name": name, "uid": "claim"}
    missing = {"lastTimestamp": "2026-01-01T00:09:00Z", "message": 'storageclass "fast" not found'}

    async def answer(resource, namespace, selector="", fields=""):
        return [{"involvedObject": about, **missing}] if fields == "reason=ProvisioningFailed" else []

    client.list = answer
    mounts = Mounts(client, lambda: now[0])
    for _ in range(2):
        cluster.mounts = asyncio.run(mounts.problems(KEY, Children(cluster.objects)))
        now[0] += 10
    cluster.reconcile()
    told = cluster.condition("Scheduled")["message"]
    assert told.endswith(f'PersistentVolumeClaim {name}: storageclass "fast" not found')


def test_a_claim_of_the_user_that_cannot_bind_is_named(cluster):
    """It has no label of the job, as the job does not own it."""
    cluster.unschedulable(cluster.pod("trainer"), "pod has unbound immediate PersistentVolumeClaims")
    now, client = [100.0], Kueue()
    told = {
        name: {"involvedObject": {"kind": "PersistentVolumeClaim", "name": name, "uid": name}, "message": message}
        for name, message in (("data", 'storageclass "fast" not found'), ("another-jobs", "no"))
    }

    async def answer(resource, namespace, selector="", fields=""):
        return list(told.values()) if fields == "reason=ProvisioningFailed" else []

    client.list = answer
    mounts = Mounts(client, lambda: now[0])
    for _ in range(2):
        cluster.mounts = asyncio.run(mounts.problems(KEY, Children(cluster.objects), ["data", "weights"]))
        now[0] += 10
    cluster.reconcile()
    said = cluster.condition("Scheduled")["message"]
    assert said.endswith('PersistentVolumeClaims; PersistentVolumeClaim data: storageclass "fast" not found')
    cluster.start(cluster.pod("trainer"))
    assert asyncio.run(mounts.problems(KEY, Children(cluster.objects), ["data"])) == {}
