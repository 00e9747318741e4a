"""How the operator learns that a node will end."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest

from dovetail.kube.resources import NODE
from dovetail.operator.cluster.client import Client
from dovetail.operator.cluster.notices import Notices
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.reconcile.disruption import source
from dovetail.operator.render import spot

NOW = datetime(2026, 11, 23, 8, 0, 0, tzinfo=UTC)
ITN = "aws-node-termination-handler/spot-itn"


def node(name, *taints):
    return {"metadata": {"name": name}, "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]}}


class Nodes(Client):
    def __init__(self, *items):
        super().__init__(None)
        self.items = items

    async def _content(self, method, path, query=None, body=None, content=""):
        return json.dumps({"items": self.items, "metadata": {"resourceVersion": "7"}}).encode()


@pytest.fixture
def notices():
    told = []

    async def changed():
        told.append(set(found.ending))

    found = Notices(Nodes(), {*spot.NOTICES, "example.com/leaving"}, changed, lambda: NOW)
    return found, told


def see(notices, *things, deleted=False):
    for thing in things:
        asyncio.run(notices.observe(thing, deleted))


@pytest.mark.parametrize("key", [*sorted(spot.NOTICES), "example.com/leaving"])
def test_each_taint_is_a_notice_and_is_told_once(notices, key):
    found, told = notices
    see(found, node("a", "nvidia.com/gpu"), node("b", "nvidia.com/gpu", key), node("b", key))
    assert (dict(found.ending), told) == ({"b": NOW}, [{"b"}])


@pytest.mark.parametrize("seconds", [-30, 30])
def test_a_notice_is_dated_by_the_api_servers_clock_as_pods_are(notices, seconds):
    """The operator's clock is 30 s slow or fast. By it, a pod of before the notice seemed to be made after it."""
    found, _ = notices
    at = (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    managed = [
        {"time": "2026-11-23T09:00:00Z", "subresource": "status", "fieldsV1": {"f:status": {"f:conditions": {}}}},
        {"time": "2026-11-23T09:00:00Z", "fieldsV1": {"f:spec": {"f:podCIDR": {}}}},
        {"time": at, "fieldsV1": {"f:spec": {"f:taints": {}}}},
    ]
    told = node("a", ITN)
    told["metadata"]["managedFields"] = managed
    see(found, told)
    assert dict(found.ending) == {"a": NOW + timedelta(seconds=seconds)}


@pytest.mark.parametrize("key", ["node.kubernetes.io/unschedulable", "cloud.google.com/gke-spot", "nvidia.com/gpu"])
def test_a_cordoned_or_spot_node_is_none(notices, key):
    see(notices[0], node("a", key))
    assert notices == (notices[0], [])


def test_a_notice_that_is_taken_back_and_a_node_that_is_gone_are_forgotten(notices):
    found, told = notices
    see(found, node("a", ITN), node("b", ITN), node("a"))
    see(found, node("b", ITN), deleted=True)
    assert not found.ending
    see(found, node("a", ITN))
    assert told == [{"a"}, {"a", "b"}, {"b"}, set(), {"a"}]


def test_a_list_tells_what_a_broken_watch_missed(notices):
    found, told = notices
    see(found, node("gone", ITN))
    found._client.items = (node("new", ITN), node("fine"))
    assert asyncio.run(found.relist(NODE, None)) == "7"
    assert set(found.ending) == {"new"}
    assert told[-1] >= {"new"}


def test_nodes_that_are_lost_or_back_are_told_once(notices):
    found, told = notices

    def aged(name, status, since="2026-11-23T08:00:00Z"):
        ready = {"type": "Ready", "status": status, "lastTransitionTime": since, "message": "no network"}
        return node(name) | {"status": {"conditions": [ready]}}

    see(found, aged("a", "True"), node("new"), aged("b", "Unknown"), aged("b", "Unknown"))
    assert {name: lost.told for name, lost in found.lost.items()} == {
        "b": "has not answered since 2026-11-23T08:00:00Z"
    }
    assert len(told) == 1
    see(found, aged("b", "False"))
    assert "no network" in found.lost["b"].told
    see(found, aged("b", "True"))
    assert (dict(found.lost), len(told)) == ({}, 2)
    see(found, aged("b", "Unknown"))
    see(found, aged("b", "Unknown"), deleted=True)
    assert (dict(found.lost), len(told)) == ({}, 4)
    see(found, aged("c", "Unknown"))
    found._client.items = (aged("a", "True"),)
    asyncio.run(found.relist(NODE, None))
    assert not found.lost


def test_an_administrator_names_more_taints():
    assert OperatorSettings.read({"DOVETAIL_NOTICE_TAINTS": "a/b, c"}).notice_taints == ("a/b", "c")


def test_who_takes_a_node_is_told_as_long_as_it_does(notices):
    found, told = notices
    cordoned = node("a")
    cordoned["spec"]["unschedulable"] = True
    cordoned["metadata"]["managedFields"] = [
        {"manager": "kubelet", "fieldsV1": {"f:status": {}}},
        {"manager": "kubectl", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}},
    ]
    banned = node("b")
    banned["spec"]["taints"] = [{"key": "example.com/repair", "effect": "NoExecute"}]
    see(found, cordoned, banned, node("c", ITN), node("d", "nvidia.com/gpu"))
    assert {name: source(takings) for name, takings in found.leaving.items()} == {
        "a": "was cordoned by kubectl",
        "b": "has the taint example.com/repair:NoExecute",
        "c": f"has the taint {ITN}:NoSchedule",
    }
    assert len(told) == 3
    see(found, node("a"))
    see(found, banned, deleted=True)
    assert set(found.leaving) == {"c"}
    asyncio.run(found.relist(NODE, None))
    assert not found.leaving
