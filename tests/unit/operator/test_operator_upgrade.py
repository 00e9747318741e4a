"""A running job keeps its pods when another version of the operator takes over, newer or older."""

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from golden import make_objects
from pydantic import Field

from dovetail.kube import names
from dovetail.manifest.base import Model
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.manifest.training_types import PPO
from dovetail.manifest.types import Group, RLHFJob, RLHFJobSpec
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import Planner, read_job
from dovetail.operator.reconcile.children import Children
from dovetail.operator.reconcile.plans import plan_status
from dovetail.operator.reconcile.reconcile import PlanRefused
from dovetail.operator.render.config_map import config_map, in_pods, spec_hash
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import pods_changed, pods_labels
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.plan import Layout, Plan
from helpers.fake_cluster import FakeCluster, running

# What the operator of 23 November 2026 made of the example of that time. The files never change.
EARLIER = Path(make_objects.__file__).parent / "earlier"


def earlier() -> FakeCluster:
    """A cluster where an earlier operator started the job, and all its pods run."""
    document = yaml.safe_load((EARLIER / "manifest.yaml").read_text())
    document["metadata"] = {"name": "demo", "namespace": "default", "uid": make_objects.UID, "generation": 1}
    cluster = FakeCluster(document)
    # The images that a new chart brings.
    cluster.settings = replace(OperatorSettings(), coordinator_image="new/operator:2", rollout_image="new/rollout:2")
    for thing in yaml.safe_load_all((EARLIER / "objects.yaml").read_text()):
        if thing["kind"] not in ("Secret", "Job"):
            cluster.apply(thing)
    cluster.made.clear()
    for _ in range(2):
        cluster.step()
        for pod in cluster.pods():
            cluster.start(pod)
    return cluster


def uids(cluster: FakeCluster) -> dict[tuple[str, str], str]:
    return {
        place: thing["metadata"]["uid"] for place, thing in cluster.objects.items() if place[0] in ("JobSet", "Pod")
    }


def test_a_new_operator_leaves_running_pods_alone():
    cluster = earlier()
    before, plan = uids(cluster), copy.deepcopy(cluster.objects["ConfigMap", "demo-plan"]["data"])
    cluster.settle()
    assert {place: uid for place, uid in uids(cluster).items() if place in before} == before
    jobs = {job["name"]: job["template"]["spec"] for job in cluster.objects["JobSet", "demo"]["spec"]["replicatedJobs"]}
    for name in ("a10", "a100"):
        container = jobs[name]["template"]["spec"]["containers"][0]
        # What the new operator would ask for is no reason to replace them.
        assert container["resources"]["requests"]["memory"] == "1Gi"
    assert cluster.objects["ConfigMap", "demo-plan"]["data"] == plan, "its processes are of the earlier version"
    assert cluster.condition("Running")["status"] == "True"
    assert cluster.made[:1] == ["Job"], "a surplus rollout, and nothing a second time"


def test_a_surplus_rollout_has_the_image_of_the_running_ones():
    """The processes of one job speak one version of its protocol."""
    cluster = earlier()
    cluster.settle()
    surplus = cluster.objects["Job", "demo-a10-s1"]["spec"]["template"]["spec"]["containers"][0]["image"]
    (group,) = (g for g in cluster.objects["JobSet", "demo"]["spec"]["replicatedJobs"] if g["name"] == "a10")
    assert (
        surplus == group["template"]["spec"]["template"]["spec"]["containers"][0]["image"] == "dovetail/rollout:0.1.0"
    )


@pytest.mark.slow
def test_what_the_user_changes_while_suspended_makes_new_pods():
    cluster = earlier()
    cluster.settle()
    before = cluster.objects["JobSet", "demo"]["metadata"]["uid"]
    groups = copy.deepcopy(cluster.document["spec"]["groups"])
    groups[1]["image"] = "registry.example.com/other:1"
    cluster.edit(groups=groups)  # so shortly suspended that the operator did not see it
    cluster.settle()
    assert cluster.objects["JobSet", "demo"]["metadata"]["uid"] != before


def test_the_hash_of_an_earlier_version_is_computed_as_it_was():
    cluster = earlier()
    labels = cluster.objects["JobSet", "demo"]["metadata"]["labels"]
    job = read_job(cluster.document)
    assert not isinstance(job, PlanRefused)
    assert pods_labels(job.spec)[names.PODS_LABEL] == labels[names.PODS_LABEL], "else all running jobs restart"


@pytest.mark.slow
def test_a_plan_that_an_earlier_operator_made_is_not_made_again():
    """Of a job that waits: its job.json has the defaults of that time, and none of later fields."""
    cluster = earlier()
    del cluster.objects["JobSet", "demo"]
    made = cluster.objects["ConfigMap", "demo-plan"]
    planned = Planner(1.0, make=never)  # its process would fail
    found = asyncio.run(planned.planned(cluster.document, Children(cluster.objects)))
    assert not isinstance(found, PlanRefused)
    assert json.loads(made["data"]["plan.json"])["rollouts"] == found[1].model_dump(mode="json")["rollouts"]
    cluster.edit(seed=5)
    assert isinstance(asyncio.run(planned.planned(cluster.document, Children(cluster.objects))), PlanRefused)
    asyncio.run(planned.close())


def never(spec: RLHFJobSpec) -> Plan:
    raise AssertionError("the planner was asked again")


class LaterPart(Model):
    size: int = 3


class LaterPPO(PPO):
    added: bool = False
    limit: int | None = None
    part: LaterPart = Field(default_factory=LaterPart)
    parts: list[LaterPart] = Field(default_factory=list)


class LaterGroup(Group):
    added: str = "Auto"


class LaterSpec(RLHFJobSpec):
    ppo: LaterPPO = Field(default_factory=LaterPPO)
    groups: list[LaterGroup]  # type: ignore[assignment]
    later: LaterPart = Field(default_factory=LaterPart)


class LaterJob(RLHFJob):
    spec: LaterSpec


def test_a_field_of_a_later_release_changes_no_job_that_does_not_use_it():
    job, settings = make_objects.jobs()["colocated"]
    document = job.model_dump(mode="json", by_alias=True, exclude={"status"})
    later = LaterJob.model_validate(document)
    assert later.spec.ppo.part.size == 3
    assert spec_hash(later) == spec_hash(job)
    assert make_objects.rendered(later, settings) == make_objects.rendered(job, settings)
    used = LaterJob.model_validate(document | {"spec": document["spec"] | {"later": {"size": 4}}})
    assert spec_hash(used) != spec_hash(job)


def test_job_json_has_no_defaults_and_says_the_same():
    """Of all examples: processes of another release, with other fields, can read it."""
    for path in sorted(make_objects.EXAMPLES.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document.get("kind") != "RLHFJob":
                continue
            job = parse(document)
            job = job.model_copy(update={"spec": resolve(job.spec)})
            written = in_pods(job)
            again = RLHFJob.model_validate_json(json.dumps(written))
            assert in_pods(again) == written, path
            assert spec_hash(again) == spec_hash(job), path
            assert again.spec.ppo == job.spec.ppo, path
            assert "lag" in document["spec"].get("ppo", {}) or "lag" not in written["spec"].get("ppo", {}), path


LATER_PLAN_FIELDS = {"chunks"}


def test_a_plan_has_no_later_field_that_its_job_does_not_use():
    """Pods of an earlier release refuse a plan with a field that they do not know."""
    for name, (job, _) in make_objects.jobs().items():
        written = json.loads(make_plan(job.spec).model_dump_json(by_alias=True))
        assert not LATER_PLAN_FIELDS & written.keys(), name
        assert all("zero3" not in row for row in written["batching"]), name
    job, _ = make_objects.jobs()["colocated"]
    plan = make_plan(job.spec)
    used = plan.model_copy(update={"chunks": 2})
    for by_alias in (True, False):
        again = type(plan).model_validate_json(used.model_dump_json(by_alias=by_alias))
        assert again == used
        assert type(plan).model_validate_json(plan.model_dump_json(by_alias=by_alias)) == plan


def test_layouts_of_dedicated_ranks_keep_the_name_that_earlier_releases_know():
    job, _ = make_objects.jobs()["colocated"]
    plan = make_plan(job.spec).model_copy(update={"dedicated": {"actor": Layout(pp=2), "critic": Layout(first=2)}})
    for by_alias in (True, False):
        assert Plan.model_validate_json(plan.model_dump_json(by_alias=by_alias)) == plan
    written = json.loads(plan.model_dump_json(by_alias=True))
    assert written["apart"]["critic"]["first"] == 2
    assert "dedicated" not in written


def test_pods_get_no_times_of_stages():
    """No process reads them, and pods of an earlier release refuse a plan that has them."""
    for name, (job, settings) in make_objects.jobs().items():
        plan = make_plan(job.spec)
        text = config_map(RenderContext(job, make_objects.UID, plan, settings))["data"]["plan.json"]
        assert "stages" not in json.loads(text), name
        read = Plan.model_validate_json(text)
        assert read == plan.model_copy(update={"stages": []}), name
        # Else the status would change as soon as the plan is read from the ConfigMap.
        assert plan_status(read, read).hash == plan_status(plan, plan).hash, name


def test_the_coordinator_has_a_hash_of_its_own():
    cluster = running(coordinator={"image": "mine:1"})
    labels = cluster.objects["JobSet", "demo"]["metadata"]["labels"]
    spec = resolve(parse(cluster.document | {"spec": cluster.document["spec"] | {"coordinator": {}}}).spec)
    assert pods_changed(labels, spec)
    del labels[names.COORDINATOR_PODS_LABEL]
    assert not pods_changed(labels, spec), "an earlier version did not know the field"
    assert not pods_changed(labels | {"dovetail.dev/later-pods": "00"}, spec), "a later version knows more"


def test_rules_of_a_later_version_do_not_stop_a_job_that_runs():
    cluster = running()
    cluster.document["spec"]["ppo"]["globalBatchSize"] = 100  # as if the rule about batches were new
    assert isinstance(read_job(cluster.document), PlanRefused)
    assert not isinstance(read_job(cluster.document, started=True), PlanRefused)


def test_a_plan_of_a_later_version_is_read_after_a_rollback():
    cluster = running()
    made = cluster.objects["ConfigMap", "demo-plan"]["data"]
    made["plan.json"] = made["plan.json"].replace("{", '{"later": {"version": 9}, ', 1)
    found = asyncio.run(Planner(1.0).planned(cluster.document, Children(cluster.objects)))
    assert not isinstance(found, PlanRefused), "and the planner was not asked again"
