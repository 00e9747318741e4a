"""How the operator looks at nodes, and what it does with what it sees."""

import asyncio
import json

import pytest

from dovetail.kube.connection import KubeError
from dovetail.operator.cluster.client import Client
from dovetail.operator.cluster.gpu_nodes import Nodes
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import Planner, read_job
from dovetail.operator.reconcile import reasons
from dovetail.operator.reconcile.children import Children
from dovetail.operator.reconcile.reconcile import PlanRefused
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.pod import group_pod
from dovetail.planner.make_plan import PlanError, make_plan
from helpers.fake_cluster import manifest

A100, A10 = "NVIDIA-A100-SXM4-80GB", "NVIDIA-A10"
SECONDS = 600.0


def node(product, gpus, ready="True", **spec):
    return {
        "metadata": {"labels": {"nvidia.com/gpu.product": product}},
        "spec": spec,
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}, "conditions": [{"type": "Ready", "status": ready}]},
    }


class Cluster(Client):
    """Two nodes a page; `items` may be the error that comes instead."""

    def __init__(self, *items):
        super().__init__(None)
        self.items = items
        self.asked = []

    async def _content(self, method, path, query=None, body=None, content=""):
        self.asked.append((method, path, dict(query)))
        if isinstance(self.items, KubeError):
            raise self.items
        start = int(query.get("continue", 0))
        rest = {"continue": str(start + 2)} if start + 2 < len(self.items) else {}
        return json.dumps({"items": self.items[start : start + 2], "metadata": rest}).encode()


def look(cluster, *answers):
    """The pools after each answer, whether it was told, and the Nodes."""

    async def test():
        calls = []

        async def changed():
            calls.append(1)

        nodes, found = Nodes(cluster, 60.0, changed), []
        for items in answers:
            cluster.items = items
            before = len(calls)
            await nodes.look()
            found.append((nodes.pools, len(calls) > before))
        return found, nodes

    return asyncio.run(test())


ONE, TWO = [node(A10, 1)], [node(A10, 1), node(A10, 1)]
HAVE_ONE, HAVE_TWO = {(A10, 1): 1}, {(A10, 1): 2}


def test_only_gpu_nodes_that_take_pods_are_asked_for_and_counted():
    cluster = Cluster()
    nodes = [node(A100, 8), node(A100, 8, "False"), node(A100, 8), node(A10, 0), node(A10, 1, unschedulable=True)]
    [(pools, told)], _ = look(cluster, nodes)
    assert (pools, told) == ({(A100, 8): 2}, True)
    assert len(cluster.asked) == 3, "page by page"
    for method, path, query in cluster.asked:
        assert (method, path) == ("GET", "/api/v1/nodes")
        assert query["labelSelector"] == "nvidia.com/gpu.product"
        assert query["fieldSelector"] == "spec.unschedulable=false"


def test_a_change_counts_once_two_lists_agree():
    found, _ = look(Cluster(), ONE, ONE, TWO, ONE, TWO, TWO, TWO)
    assert [pools for pools, _ in found] == [HAVE_ONE] * 5 + [HAVE_TWO] * 2
    assert [told for _, told in found] == [True, False, False, False, False, True, False]


def test_a_node_that_comes_and_goes_changes_nothing():
    found, _ = look(Cluster(), *[ONE, TWO] * 20)
    assert [told for _, told in found] == [True] + [False] * 39


def test_a_list_that_cannot_be_had_changes_nothing(capsys):
    found, nodes = look(Cluster(), ONE, KubeError(500, "busy"), KubeError(0, "no answer"), ONE)
    assert [pools for pools, _ in found] == [HAVE_ONE] * 4
    assert [told for _, told in found] == [True, False, False, False]
    assert not nodes.refused
    assert capsys.readouterr().err.count('"nodes.failed"') == 2


def test_a_refusal_is_said_once_and_ends_when_the_right_is_there(capsys):
    no = KubeError(403, 'nodes is forbidden: User "operator" cannot list resource "nodes"')
    found, nodes = look(Cluster(), no, no, no)
    assert nodes.refused
    assert [told for _, told in found] == [True, False, False]
    assert found[-1][0] is None
    assert capsys.readouterr().err.count('"nodes.refused"') == 1
    found, nodes = look(Cluster(), ONE, no, ONE)
    assert not nodes.refused
    assert found == [(HAVE_ONE, True)] * 3, "the pools stay as they were"


# ---------------------------------------------------------------- the planner's other plans


def impossible(spec):
    raise PlanError("the critic needs 41.2 GiB")


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_plan, impossible])
def test_a_variant_is_made_once_for_all_that_wait(make):
    spec = read_job(manifest()).spec

    async def test():
        planner, done = Planner(SECONDS, make), asyncio.Queue()
        try:
            for job in ("one", "two", "two"):
                assert planner.variant(("default", job), spec, done.put) is None
            async with asyncio.timeout(SECONDS):
                told = {await done.get(), await done.get()}
            assert told == {("default", "one"), ("default", "two")}
            found = planner.variant(("default", "three"), spec, done.put)
            assert planner.variant(("default", "one"), spec, done.put) is found, "a refusal is remembered, too"
            assert done.empty()
            return found
        finally:
            await planner.close()

    found = asyncio.run(test())
    if make is make_plan:
        assert found == make_plan(spec)
    else:
        assert found == PlanRefused(reasons.INFEASIBLE, "the critic needs 41.2 GiB")


def test_closing_ends_what_is_being_planned():
    spec = read_job(manifest()).spec

    async def test():
        planner, done = Planner(SECONDS, make_plan), asyncio.Queue()
        planner.variant(("default", "one"), spec, done.put)
        await asyncio.sleep(0)
        await planner.close()
        assert done.empty()

    asyncio.run(test())


# ---------------------------------------------------------------- GPUs that no table knows

ACME = "ACME-X1"
LABELS = {
    "nvidia.com/gpu.product": ACME,
    "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.compute.major": "9",
    "nvidia.com/gpu.compute.minor": "0",
}


def planned(document, given=None, found=None, guess=False):
    async def test():
        planner = Planner(SECONDS)
        planner.use(given, found)
        planner.guess = lambda: guess
        try:
            return await planner.planned(document, Children())
        finally:
            await planner.close()

    return asyncio.run(test())


@pytest.mark.slow
def test_a_product_that_only_nodes_know_is_planned_with_a_warning():
    document = manifest()
    for group in document["spec"]["groups"]:
        group["gpu"] = {"product": ACME, "perPod": 1}
    refused = planned(document)
    assert "spec.groups[0].gpu.product: GPU product ACME-X1 is unknown" in refused.message
    ready = {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]}
    _, nodes = look(Cluster(), [{"metadata": {"labels": LABELS}, "status": ready}])
    _, plan = planned(document, found=nodes.unknown)
    assert plan.warnings[0].startswith("spec.groups[0].gpu.product ACME-X1 is in no table of GPUs: its figures are ")
    assert "estimated from the labels of its nodes and NVIDIA-H" in plan.warnings[0]
    assert "with 80 GiB" in plan.warnings[0]
    _, plan = planned(document, guess=True)
    assert "estimated from its name" in plan.warnings[0]


@pytest.mark.slow
def test_an_administrators_products_reach_planner_and_pods():
    figures = {"tflops": {"bfloat16": 300}, "memory_gib": 40, "memory_gbps": 1500, "nvlink_gbps": 0, "pcie_gbps": 32}
    figures |= {"capability": [8, 0], "resource": "nvidia.com/mig-3g.40gb", "node_product": "NVIDIA-A100-SXM4-80GB"}
    settings = OperatorSettings.read({"DOVETAIL_GPU_PRODUCTS": json.dumps({ACME: figures})})
    document = manifest()
    for group in document["spec"]["groups"]:
        group["gpu"] = {"product": ACME, "perPod": 1}
    job, plan = planned(document, given=settings.gpu_products)
    assert not any(ACME in warning for warning in plan.warnings)
    pod = group_pod(RenderContext(job, "uid", plan, settings), job.spec.groups[0])["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "1"}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu", "nvidia.com/mig-3g.40gb"]
    del figures["memory_gib"]
    with pytest.raises(ValueError, match=r"DOVETAIL_GPU_PRODUCTS: \[ACME-X1\] in the hardware file misses memory_gib"):
        OperatorSettings.read({"DOVETAIL_GPU_PRODUCTS": json.dumps({ACME: figures})})
