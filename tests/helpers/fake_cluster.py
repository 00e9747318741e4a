"""Kubernetes as far as `reconcile` can tell: an API server's store, and in a few lines the controllers of JobSets and
Jobs. Carries out what `reconcile` says, and can be stepped and broken by tests."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, cast

import yaml
from golden import make_objects

from dovetail.gpus.gpu_products import Pools
from dovetail.kube import names
from dovetail.kube.owners import controller
from dovetail.kube.resources import RLHFJOB
from dovetail.manifest.types import RLHFJob, RLHFJobSpec
from dovetail.operator.cluster.classes import Classes
from dovetail.operator.cluster.client import Client
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import read_job
from dovetail.operator.reconcile.children import Children, deleting, is_gone, is_true, sizes
from dovetail.operator.reconcile.disruption import Disruption, Taking, disruption, source
from dovetail.operator.reconcile.reconcile import PlanRefused, Reconciled, Seen, reconcile
from dovetail.operator.reconcile.replan import Outlook, honoured, needs, resized, room
from dovetail.operator.reconcile.rootcause import LostNode
from dovetail.operator.render.context import RenderContext
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.process_names import CONTAINER

START = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
JOBSET_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
JOB_NAME = "batch.kubernetes.io/job-name"


DRAINED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}


def plan_of(spec: RLHFJobSpec) -> Plan:
    """Made once for a spec."""
    return _plan(spec.model_dump_json())


@cache
def _plan(text: str) -> Plan:
    return make_plan(RLHFJobSpec.model_validate_json(text))


def manifest(**spec: Any) -> dict[str, Any]:
    """An RLHFJob as the API server has it: one trainer pod, one guaranteed rollout and a surplus one."""
    document = yaml.safe_load((make_objects.EXAMPLES / "quickstart-cluster.yaml").read_text()) | RLHFJOB.type_meta
    document["metadata"] = {"name": "demo", "namespace": "default", "uid": make_objects.UID, "generation": 1}
    document["spec"]["groups"] = [
        {"name": "train", "roles": ["trainer"], "replicas": 1},
        {"name": "gen", "roles": ["rollout"], "minReplicas": 1, "maxReplicas": 2},
    ]
    document["spec"] |= spec
    return document


def controlled(kind: str, uid: str) -> dict[str, Any]:
    """An owner reference."""
    return {"apiVersion": "x/v1", "kind": kind, "uid": uid, "controller": True}


class FakeCluster:
    """One RLHFJob and its children."""

    def __init__(self, document: dict[str, Any] | None = None) -> None:
        self.document = document or manifest()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.now = START
        self.reported: dict[str, Any] | None = None
        self.mounts: dict[str, str] = {}
        self.pools: Pools | None = None
        self.nodes_refused = False
        self.ending: dict[str, datetime] = {}
        self.leaving: dict[str, Sequence[Taking]] = {}
        self.lost: dict[str, LostNode] = {}
        self.disrupted: dict[str, Disruption] = {}
        self.gone = False
        self.made: list[str] = []
        self.queueing = False
        self.settings = OperatorSettings()
        self.classes = Classes(cast(Client, None), self._unheard)
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------ the operator

    def seen(self) -> Seen:
        job = read_job(self.document, started=("JobSet", "demo") in self.objects)
        planned: tuple[RLHFJob, Any] | PlanRefused = job if isinstance(job, PlanRefused) else (job, plan_of(job.spec))
        children = Children(copy.deepcopy(self.objects)).of_job(self.document["metadata"]["uid"])
        outlook = Outlook()
        if not isinstance(planned, PlanRefused):
            outlook = self._outlook(*planned)
        more: dict[str, Any] = {"outlook": outlook, "ending": self.ending, "leaving": self.leaving, "lost": self.lost}
        more["disrupted"] = self._disruptions()
        if not isinstance(job, PlanRefused):
            more["job_class"] = self.classes.of(job)
        return Seen(self.document, planned, children, self.reported, self.settings, self.mounts, **more)

    async def _unheard(self) -> None:
        """The next look sees the change."""

    def give_class(self, name: str, **spec: Any) -> None:
        """Make the class, or change it."""
        metadata = {"name": name, "resourceVersion": str(next(self._numbers))}
        asyncio.run(self.classes.observe({"metadata": metadata, "spec": spec}, deleted=False))

    def take_class(self, name: str) -> None:
        asyncio.run(self.classes.observe({"metadata": {"name": name}}, deleted=True))

    def _disruptions(self) -> list[Disruption]:
        """As the controller's."""
        for pod in self.pods():
            if (found := disruption(pod)) is not None:
                known = self.disrupted.setdefault(pod["metadata"]["uid"], found)
                told = known.source or source(self.leaving.get(known.node, ()), known.tolerations)
                self.disrupted[pod["metadata"]["uid"]] = replace(known, source=told)
        return list(self.disrupted.values())

    def _outlook(self, job: RLHFJob, plan: Plan) -> Outlook:
        """As the controller's, without waiting for the planner."""
        made = sizes(self.objects.get(("JobSet", "demo")))
        wanted = needs(RenderContext(job, self.document["metadata"]["uid"], plan, OperatorSettings(), made))
        there = room(wanted, self.pools) if self.pools is not None and wanted else None
        spec = resized(job.spec, plan, wanted, there) if there is not None else None
        other = honoured(plan, plan_of(spec)) if spec is not None else None
        return Outlook(there, other, refused=self.nodes_refused and bool(wanted))

    def look(self) -> Reconciled:
        """What reconcile says, not carried out."""
        return reconcile(self.seen(), self.now)

    def reconcile(self) -> Reconciled:
        """Carried out, as the controller does."""
        result = self.look()
        for place in result.release:
            self.objects[place]["metadata"].pop("ownerReferences", None)
            self.objects[place]["metadata"]["labels"].pop(names.INSTANCE_LABEL, None)
        for thing in result.apply:
            self.apply(dict(thing))
        for kind, name in result.delete:
            self.delete(kind, name)
        self.document["status"] = json.loads(result.status.model_dump_json(by_alias=True, exclude_none=True))
        if self.condition("Disrupted").get("status") != "True":
            self.disrupted.clear()
        self.gone = self.gone or result.expired
        return result

    def condition(self, kind: str) -> dict[str, Any]:
        found = self.document.get("status", {}).get("conditions", [])
        return next((c for c in found if c["type"] == kind), {})

    def over(self) -> bool:
        return any(self.condition(kind).get("status") == "True" for kind in ("Completed", "Failed"))

    def edit(self, **spec: Any) -> None:
        """What a user does with kubectl edit."""
        self.document["spec"] = self.document["spec"] | spec
        self.document["metadata"]["generation"] += 1

    # ------------------------------------------------------------ the API server

    def apply(self, thing: dict[str, Any]) -> None:
        place = (thing["kind"], thing["metadata"]["name"])
        there = self.objects.get(place)
        assert there is None or not deleting(there), f"{place} is applied while it is being deleted"
        if there is None:
            self.made.append(thing["kind"])
        made = copy.deepcopy(thing)
        made["metadata"] |= {
            "uid": there["metadata"]["uid"] if there else f"uid-{next(self._numbers)}",
            "creationTimestamp": self.stamp(),
        }
        made["status"] = there.get("status", {}) if there else {}
        if thing["kind"] == "JobSet" and there is None and self.queueing:
            made["spec"]["suspend"] = True
        self.objects[place] = made

    def delete(self, kind: str, name: str) -> None:
        """In the foreground: pods and Jobs first, and the owner at the next `step`."""
        thing = self.objects.get((kind, name))
        if thing is not None:
            thing["metadata"]["deletionTimestamp"] = self.stamp()

    def remove(self, kind: str, name: str) -> None:
        """At once, by somebody else."""
        self.objects.pop((kind, name), None)

    def stamp(self) -> str:
        return self.now.strftime("%Y-%m-%dT%H:%M:%SZ")

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # ------------------------------------------------------------ the other controllers

    def step(self) -> None:
        """One round of garbage collector, JobSet controller and Job controller."""
        for (kind, name), thing in list(self.objects.items()):
            if deleting(thing) and kind in ("JobSet", "Job"):
                self._remove_owned(name, kind)
                del self.objects[kind, name]
            elif deleting(thing):
                del self.objects[kind, name]
        for place in ("Job", "Pod"):  # whose owner somebody removed
            for (kind, name), thing in list(self.objects.items()):
                if kind == place and thing.get("owner") and not self._owner_lives(thing):
                    del self.objects[kind, name]
        jobset = self.objects.get(("JobSet", "demo"))
        if jobset is not None:
            self._step_jobset(jobset)
        for (kind, name), job in list(self.objects.items()):
            if kind == "Job" and not is_true(job, "Failed") and not is_true(job, "Complete"):
                self._step_job(name, job)

    def _owner_lives(self, thing: dict[str, Any]) -> bool:
        owner = self.objects.get(thing["owner"])
        return owner is not None and owner["metadata"]["uid"] == controller(thing)["uid"]

    def _remove_owned(self, name: str, kind: str) -> None:
        for place, thing in list(self.objects.items()):
            owner = thing.get("owner")
            if owner == (kind, name):
                if place[0] == "Job":
                    self._remove_owned(place[1], "Job")
                self.objects.pop(place, None)

    def _step_jobset(self, jobset: dict[str, Any]) -> None:
        if is_true(jobset, "Completed") or is_true(jobset, "Failed"):
            return
        if jobset["spec"].get("suspend"):
            self._remove_owned("demo", "JobSet")
            return
        wanted = [
            (f"demo-{each['name']}-{i}", each)
            for each in jobset["spec"]["replicatedJobs"]
            for i in range(each["replicas"])
        ]
        for name, group in wanted:
            if ("Job", name) not in self.objects:
                template = copy.deepcopy(group["template"])
                self.objects["Job", name] = {
                    "kind": "Job",
                    "metadata": {"name": name, "namespace": "default", "uid": name, **template["metadata"]}
                    | {
                        "creationTimestamp": self.stamp(),
                        "ownerReferences": [controlled("JobSet", jobset["metadata"]["uid"])],
                    },
                    "spec": template["spec"],
                    "status": {},
                    "owner": ("JobSet", "demo"),
                }
        jobs = {name: job for (kind, name), job in self.objects.items() if job.get("owner") == ("JobSet", "demo")}
        if is_true(jobs["demo-coordinator-0"], "Complete"):
            jobset["status"]["conditions"] = [{"type": "Completed", "status": "True"}]
        elif any(is_true(job, "Failed") for job in jobs.values()):
            jobset["status"]["conditions"] = [{"type": "Failed", "status": "True", "message": "a job failed"}]
        if is_true(jobset, "Completed") or is_true(jobset, "Failed"):
            for name, job in jobs.items():
                if not is_true(job, "Complete") and not is_true(job, "Failed"):
                    self._remove_owned(name, "Job")
                    del self.objects["Job", name]

    def _step_job(self, name: str, job: dict[str, Any]) -> None:
        pods = self.pods(name)
        failed = [p for p in pods if p["status"]["phase"] == "Failed"]
        counted = [p for p in failed if not is_true(p, "DisruptionTarget")]
        hopeless = job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
        if any(p["status"]["phase"] == "Succeeded" for p in pods):
            job["status"]["conditions"] = [{"type": "Complete", "status": "True"}]
            return
        job["status"]["failed"] = len(counted)
        codes = [c["state"]["terminated"]["exitCode"] for p in counted for c in p["status"]["containerStatuses"]]
        if len(counted) > job["spec"]["backoffLimit"] or set(codes) & set(hopeless):
            job["status"]["conditions"] = [{"type": "Failed", "status": "True", "lastTransitionTime": self.stamp()}]
            return
        for _ in range(job["spec"]["parallelism"] - (len(pods) - len(failed))):
            self._make_pod(name, job)

    def _make_pod(self, name: str, job: dict[str, Any]) -> None:
        pod = f"{name}-{next(self._numbers)}"
        template = job["spec"]["template"]
        taken = {p["metadata"]["labels"][names.INDEX_ANNOTATION] for p in self.pods(name) if not is_gone(p)}
        index = next(str(i) for i in itertools.count() if str(i) not in taken)
        labels = dict(template["metadata"]["labels"]) | {JOB_NAME: name, names.INDEX_ANNOTATION: index}
        self.objects["Pod", pod] = {
            "kind": "Pod",
            "metadata": {
                "name": pod,
                "namespace": "default",
                "uid": pod,
                "creationTimestamp": self.stamp(),
                "labels": labels,
                "ownerReferences": [controlled("Job", job["metadata"]["uid"])],
            },
            "status": {"phase": "Pending", "conditions": []},
            "owner": ("Job", name),
        }

    def pods(self, job: str | None = None) -> list[dict[str, Any]]:
        found = [thing for (kind, _), thing in sorted(self.objects.items()) if kind == "Pod"]
        return [p for p in found if job is None or p["metadata"]["labels"][JOB_NAME] == job]

    # ------------------------------------------------------------ kubelets and the scheduler

    def start(self, pod: dict[str, Any]) -> None:
        pod["status"] = {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")],
        }

    def unschedulable(
        self, pod: dict[str, Any], why: str = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    ) -> None:
        pod["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
        ]

    def waiting(self, pod: dict[str, Any], reason: str, message: str) -> None:
        pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        state = {"waiting": {"reason": reason, "message": message}}
        pod["status"]["containerStatuses"] = [{"name": CONTAINER, "image": "some/image:1", "state": state}]

    def end(
        self,
        pod: dict[str, Any],
        code: int,
        message: str = "",
        reason: str = "Error",
        disrupted: bool = False,
        ran: float = 0.0,
    ) -> None:
        """`ran`: seconds since its container started."""
        started = (self.now - timedelta(seconds=ran)).strftime("%Y-%m-%dT%H:%M:%SZ")
        ended = {"exitCode": code, "reason": reason, "message": message}
        ended |= {"startedAt": started, "finishedAt": self.stamp()}
        pod["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "conditions": [DRAINED | {"lastTransitionTime": self.stamp()}] if disrupted else [],
            "containerStatuses": [{"name": CONTAINER, "state": {"terminated": ended}}],
        }

    def refuse(self, pod: dict[str, Any], reason: str, why: str) -> None:
        """By a kubelet that was restarted, to which the pod was given before."""
        self.end(pod, 143, "the last line of its log")
        pod["status"] |= {"reason": reason, "message": f"Pod was rejected: {why}"}

    def settle(self, rounds: int = 12) -> None:
        """Let everybody work, every pod start, until nothing happens any more."""
        for _ in range(rounds):
            self.reconcile()
            self.step()
            for pod in self.pods():
                if pod["status"]["phase"] == "Pending":
                    self.start(pod)
        self.reconcile()

    def pod(self, role: str) -> dict[str, Any]:
        """The first living pod of a role that the job cannot do without."""
        return next(
            p
            for p in self.pods()
            if p["metadata"]["labels"][names.ROLE_LABEL] == role
            and names.SURPLUS_LABEL not in p["metadata"]["labels"]
            and p["status"]["phase"] in ("Pending", "Running")
        )


def a_cluster(**spec: Any) -> FakeCluster:
    """With a job of this spec, and nothing else yet."""
    return FakeCluster(manifest(**spec))


def running(**spec: Any) -> FakeCluster:
    """With a job of this spec that runs."""
    cluster = a_cluster(**spec)
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    return cluster


def restarting(most: int) -> dict[str, int]:
    """A failure policy."""
    return {"maxRestarts": most}
