"""What more and fewer GPU nodes mean for a job, and what its status says of it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.kube import names
from dovetail.operator.reconcile.replan import Need, counted, honoured, news, remembered, resized, room
from dovetail.planner.make_plan import make_plan
from helpers.fake_cluster import FakeCluster, manifest

A100, A10, T4 = "NVIDIA-A100-SXM4-80GB", "NVIDIA-A10", "Tesla-T4"
TRAIN = {"name": "train", "roles": ["trainer"], "replicas": 1, "gpu": {"product": A100, "perPod": 4}}
GEN = {
    "name": "gen",
    "roles": ["rollout"],
    "minReplicas": 1,
    "maxReplicas": 4,
    "gpu": {"product": A10, "perPod": 1},
}
SMALL, LARGE = {(A100, 4): 1, (A10, 1): 2}, {(A100, 4): 1, (A10, 1): 9}


def planned(cluster):
    return cluster.condition("Planned")


def started(pools, *groups):
    cluster = FakeCluster(manifest(groups=[TRAIN, *(groups or [GEN])]))
    cluster.pools = pools
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    return cluster


def told(result):
    return [(event.type, event.message) for event in result.events if event.reason == "Replanned"]


# ---------------------------------------------------------------- pure


@st.composite
def a_group(draw, number):
    least, trains = draw(st.integers(1, 4)), draw(st.booleans())
    planned = least + (0 if trains else draw(st.integers(0, 3)))
    most = planned + (0 if trains else draw(st.integers(0, 4)))
    product, per_pod = draw(st.sampled_from([A100, A10, T4])), draw(st.sampled_from([1, 2, 3, 4, 8]))
    return Need(f"g{number}", product, per_pod, least, most, planned, trains)


some_needs = st.integers(1, 4).flatmap(lambda count: st.tuples(*(a_group(number) for number in range(count))))
some_pools = st.dictionaries(
    st.tuples(st.sampled_from([A100, A10, T4]), st.sampled_from([1, 2, 4, 8])), st.integers(1, 6)
)


@given(wanted=some_needs, pools=some_pools)
@settings(deadline=None)
def test_room_is_within_the_gpus_and_what_a_group_wants(wanted, pools):
    there = room(wanted, pools)
    for product in (A100, A10, T4):
        used = sum(there[need.group] * need.per_pod for need in wanted if need.product == product)
        assert used <= sum(gpus * nodes for (name, gpus), nodes in pools.items() if name == product)
    for need in wanted:
        assert 0 <= there[need.group] <= need.most
        assert need.least <= counted(need, there) <= need.most
        if not any(name == need.product and gpus >= need.per_pod for name, gpus in pools):
            assert there[need.group] == 0
    assert there == room(wanted, dict(reversed(pools.items()))), "the order of nodes means nothing"


@given(wanted=some_needs, pools=some_pools, node=st.sampled_from([(A100, 8), (A10, 8), (T4, 8)]))
@settings(deadline=None)
def test_nodes_that_nobody_needs_to_share_are_filled(wanted, pools, node):
    """With one group, room is what whole nodes hold, and never less with another node."""
    need = wanted[0]
    there = room([need], pools)[need.group]
    holds = sum(nodes * (gpus // need.per_pod) for (name, gpus), nodes in pools.items() if name == need.product)
    assert there == min(need.most, holds)
    assert room([need], {**pools, node: pools.get(node, 0) + 1})[need.group] >= there


@pytest.mark.slow
@given(wanted=some_needs, before=some_pools, after=some_pools)
@settings(deadline=None)
def test_the_same_nodes_are_no_news(wanted, before, after):
    then, now = room(wanted, before), room(wanted, after)
    assert not news(wanted, then, then).changed
    assert not news(wanted, then, None).sentence
    told = news(wanted, then, now)
    assert told == news(wanted, then, now)
    differs = any(counted(need, then) != counted(need, now) for need in wanted)
    lost = any(now[need.group] < need.least <= then[need.group] for need in wanted)
    assert told.changed == (differs or lost)
    assert bool(told.sentence) or not told.changed
    short = [need.group for need in wanted if now[need.group] < need.least]
    assert told.short == bool(short)
    assert all(f"group {group}: " in told.sentence for group in short)


def test_pods_that_a_job_starts_with_come_before_more_of_another_group():
    eager = Need("a", A10, 1, 1, 8, 1, False)
    wide = Need("b", A10, 4, 1, 1, 1, True)
    assert room([eager, wide], {(A10, 4): 1, (A10, 1): 1}) == {"a": 1, "b": 1}
    twin = Need("c", A10, 1, 1, 8, 1, False)
    assert room([eager, twin], {(A10, 8): 1}) == {"a": 4, "c": 4}


def test_what_remains_possible_without_a_product():
    train, first = Need("train", A100, 8, 2, 2, 2, True), Need("a10", A10, 1, 1, 2, 1, False)
    second = Need("t4", T4, 1, 1, 2, 1, False)
    every = [train, first, second]
    then = {"train": 2, "a10": 1, "t4": 1}
    gone = news(every, then, {**then, "a10": 0})
    assert "no ready node with NVIDIA-A10" in gone.sentence
    assert gone.sentence.endswith("meanwhile only these groups generate: t4")
    assert news(every, then, {"train": 2, "a10": 0, "t4": 0}).sentence.endswith("and generation waits with it")
    assert "its last checkpoint" in news(every, then, {**then, "train": 0}).sentence
    assert "have room for 1 of its 2 pods" in news(every, then, {**then, "train": 1}).sentence


@pytest.mark.slow
def test_what_runs_is_not_planned_away():
    cluster = started(SMALL)
    job, plan = cluster.seen().planned
    need = Need("gen", A10, 1, 1, 4, 1, False)
    assert resized(job.spec, plan, [need], {"gen": 1}) is None
    other = make_plan(resized(job.spec, plan, [need], {"gen": 9}))
    shown = honoured(plan, other)
    assert [len(p.rollouts) for p in (plan, shown)] == [1, 4]
    assert shown.parallelism == plan.parallelism
    assert shown.prediction.placement == plan.prediction.placement
    assert shown.prediction.iteration_seconds != plan.prediction.iteration_seconds
    deeper = other.model_copy(update={"rollouts": [r.model_copy(update={"pp": 2}) for r in other.rollouts]})
    assert honoured(plan, deeper).prediction is None, "servers run with one pipeline stage"
    split = {"split": {"reference": 2}}
    wider = other.model_copy(update={"rollouts": [r.model_copy(update=split) for r in other.rollouts]})
    assert honoured(plan, wider).prediction is None, "scorers run with whole models"
    assert resized(job.spec, plan, [need], {"gen": 9}).plan.recompute == "Never"
    again = other.model_copy(
        update={"batching": [row.model_copy(update={"recompute": True}) for row in other.batching]}
    )
    assert honoured(plan, again).prediction is None, "trainers keep their activations"


@pytest.mark.parametrize("gathered", [(), ("critic",), ("actor", "critic")])
def test_a_job_that_is_planned_again_keeps_its_order_of_sums(gathered):
    """Also if one of its models has no ranks to share its weights with. Auto might find the other way faster."""
    job, plan = started(SMALL).seen().planned
    rows = [row.model_copy(update={"zero3": row.model in gathered}) for row in plan.batching]
    plan = plan.model_copy(update={"batching": rows})
    need = Need("gen", A10, 1, 1, 4, 1, False)
    assert resized(job.spec, plan, [need], {"gen": 9}).plan.zero3 == ("Always" if gathered else "Never")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": "x"}', "null", '{"a": null}'])
def test_a_note_that_cannot_be_read_is_none(text):
    assert remembered({"metadata": {"annotations": {names.ROOM: text}}}) is None
    assert remembered({"metadata": {}}) is None


# ---------------------------------------------------------------- in the status


def test_a_pool_that_grows_is_told_once():
    cluster = started(SMALL)
    assert planned(cluster)["reason"] == "Planned"
    assert cluster.document["status"]["plan"]["rollouts"] == 2
    before = cluster.document["status"]["plan"]
    config_map = cluster.objects["ConfigMap", "demo-plan"]
    assert json.loads(config_map["metadata"]["annotations"][names.ROOM]) == {"train": 1, "gen": 2}
    cluster.pools = LARGE
    result = cluster.reconcile()
    sentence = "rollouts of group gen 2 -> 4: nodes with NVIDIA-A10 have more room"
    assert told(result) == [("Normal", sentence)]
    assert result.apply == [], "running pods keep the plan they started with"
    assert planned(cluster)["reason"] == "Replanned"
    assert planned(cluster)["message"].startswith(f"{sentence}; 4 trainer ranks, 4 rollouts; Separation")
    assert cluster.document["status"]["plan"] == before | {"rollouts": 4}
    after = cluster.document["status"]
    for _ in range(2):
        again = cluster.reconcile()
        assert (again.events, again.apply, again.delete) == ([], [], [])
        assert cluster.document["status"] == after
    cluster.pools = SMALL
    cluster.reconcile()
    assert planned(cluster)["reason"] == "Planned"
    assert cluster.document["status"]["plan"] == before


def test_a_product_that_is_gone_is_a_warning():
    cluster = started(SMALL)
    cluster.pools = {(A100, 4): 1}
    [(kind, message)] = told(cluster.reconcile())
    assert kind == "Warning"
    assert message.startswith("group gen: no ready node with NVIDIA-A10")
    assert cluster.condition("Running")["status"] == "True"
    assert cluster.document["status"]["plan"]["rollouts"] == 1, "never fewer than the job starts with"
    assert told(cluster.reconcile()) == []


def test_nodes_that_were_missing_when_the_job_began_are_no_news():
    cluster = FakeCluster(manifest(groups=[TRAIN, GEN]))
    cluster.pools = {(A100, 4): 1}
    first = cluster.reconcile()
    assert planned(cluster)["reason"] == "Planned"
    assert "no ready node with NVIDIA-A10" in planned(cluster)["message"]
    assert told(first) == []
    cluster.settle()
    cluster.pools = {(A100, 4): 1, (A10, 1): 1}  # an autoscaler's
    assert told(cluster.reconcile()) == []
    assert "no ready node" not in planned(cluster)["message"]


@pytest.mark.slow
def test_a_job_that_resumes_is_planned_for_the_nodes_of_that_time():
    cluster = started(SMALL)
    cluster.pools = LARGE
    cluster.edit(suspend=True)
    cluster.settle()
    cluster.edit(suspend=False)
    cluster.settle()
    assert planned(cluster)["reason"] == "Planned"
    assert cluster.document["status"]["plan"]["rollouts"] == 4
    assert remembered(cluster.objects["ConfigMap", "demo-plan"]) == {"train": 1, "gen": 4}


def test_news_is_told_beside_a_plan_that_is_off():
    cluster = started(SMALL)
    cluster.reported = {"stage": "ppo", "plan": {"expected_iteration_seconds": 15.0, "problem": "an iteration is slow"}}
    cluster.reconcile()
    cluster.pools = LARGE
    assert len(told(cluster.reconcile())) == 1
    assert planned(cluster)["reason"] == "PlanOff"
    assert planned(cluster)["message"].startswith("an iteration is slow (rollouts of group gen 2 -> 4")
    assert told(cluster.reconcile()) == []


def test_without_the_right_to_list_nodes_the_plan_stays_and_says_so():
    cluster = FakeCluster(manifest(groups=[TRAIN, GEN]))
    cluster.nodes_refused = True
    cluster.settle()
    assert planned(cluster)["message"].endswith("the operator may not list nodes")
    assert cluster.document["status"]["plan"]["rollouts"] == 1
    assert "annotations" not in cluster.objects["ConfigMap", "demo-plan"]["metadata"], "of the room"
    on_cpus = FakeCluster()
    on_cpus.nodes_refused = True
    on_cpus.settle()
    assert "nodes" not in planned(on_cpus)["message"]


def test_a_job_of_an_older_operator_is_compared_with_its_plan():
    cluster = started(SMALL)
    del cluster.objects["ConfigMap", "demo-plan"]["metadata"]["annotations"][names.ROOM]
    assert told(cluster.reconcile()) == [
        ("Normal", "rollouts of group gen 1 -> 2: nodes with NVIDIA-A10 have more room")
    ]


any_nodes = st.none() | st.dictionaries(st.sampled_from([(A100, 4), (A100, 8), (A10, 1), (A10, 4)]), st.integers(1, 3))


@pytest.mark.slow
@given(seen=st.lists(any_nodes, min_size=1, max_size=4), resting=st.booleans())
@settings(deadline=None, max_examples=15)
def test_whatever_nodes_come_and_go_pods_and_their_plan_stay(seen, resting):
    cluster = started(SMALL)
    if resting:
        cluster.edit(suspend=True)
        cluster.settle()
    kept = set(cluster.objects)
    plan = cluster.objects["ConfigMap", "demo-plan"]["data"]["plan.json"]
    for pools in seen:
        cluster.pools = pools
        result = cluster.reconcile()
        assert [thing["kind"] for thing in result.apply] in ([], ["ConfigMap"] if resting else [])
        assert result.delete == []
        assert set(cluster.objects) == kept
        assert cluster.objects["ConfigMap", "demo-plan"]["data"]["plan.json"] == plan
        assert 1 <= cluster.document["status"]["plan"]["rollouts"] <= 4
        status = cluster.document["status"]
        again = cluster.reconcile()
        assert (again.events, again.apply, again.delete) == ([], [], [])
        assert cluster.document["status"] == status
