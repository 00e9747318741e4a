"""`reconcile` as a state machine: whatever happens, in whatever order, it settles, and an end is an end."""

import copy

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.operator.reconcile.children import deleting
from helpers.fake_cluster import FakeCluster, manifest

FATES = ["start", "unschedulable", "image", "fail", "oom", "evict", "refuse", "hopeless"]


class Life(RuleBasedStateMachine):
    """A job to which anything may happen."""

    @initialize(
        restarts=st.integers(0, 3),
        deadline=st.none() | st.integers(50, 500),
        timeout=st.none() | st.integers(50, 500),
        suspend=st.booleans(),
    )
    def create(self, restarts, deadline, timeout, suspend):
        policy = {"maxRestarts": restarts} | ({"startTimeoutSeconds": timeout} if timeout else {})
        spec = {"failurePolicy": policy, "suspend": suspend} | ({"activeDeadlineSeconds": deadline} if deadline else {})
        self.cluster = FakeCluster(manifest(**spec))
        self.end = None

    @rule()
    def operator(self):
        self.cluster.reconcile()

    @rule()
    def controllers(self):
        self.cluster.step()

    @rule(seconds=st.integers(1, 200))
    def time(self, seconds):
        self.cluster.pass_time(seconds)

    @rule(data=st.data(), how=st.sampled_from(FATES))
    def pod(self, data, how):
        living = [p for p in self.cluster.pods() if p["status"]["phase"] in ("Pending", "Running") and not deleting(p)]
        if not living:
            return
        pod = data.draw(st.sampled_from(living))
        if how == "start":
            self.cluster.start(pod)
        elif how == "unschedulable" and pod["status"]["phase"] == "Pending":
            self.cluster.unschedulable(pod)
        elif how == "image" and pod["status"]["phase"] == "Pending":
            self.cluster.waiting(pod, "ErrImagePull", "not found")
        elif how == "fail":
            self.cluster.end(pod, 1, "died")
        elif how == "oom":
            self.cluster.end(pod, 137, reason="OOMKilled")
        elif how == "evict":
            self.cluster.end(pod, 143, disrupted=True)
        elif how == "refuse":
            self.cluster.refuse(pod, "OutOfpods", "Node didn't have enough resource: pods")
        elif how == "hopeless":
            self.cluster.end(pod, 2, "wrong configuration")

    @rule()
    def coordinator_succeeds(self):
        for pod in self.cluster.pods():
            if "coordinator" in pod["metadata"]["name"] and pod["status"]["phase"] == "Running":
                self.cluster.end(pod, 0)

    @rule(data=st.data())
    def somebody_deletes(self, data):
        if self.cluster.objects:
            self.cluster.remove(*data.draw(st.sampled_from(sorted(self.cluster.objects))))

    @rule(suspend=st.booleans())
    def user_suspends(self, suspend):
        self.cluster.edit(suspend=suspend)

    @rule(most=st.integers(1, 4))
    def user_scales(self, most):
        groups = copy.deepcopy(self.cluster.document["spec"]["groups"])
        groups[1]["maxReplicas"] = most
        self.cluster.edit(groups=groups)

    # ------------------------------------------------------------ what always holds

    @invariant()
    def looking_changes_nothing(self):
        if not hasattr(self, "cluster"):
            return
        before = copy.deepcopy((self.cluster.document, self.cluster.objects))
        assert self.cluster.look() == self.cluster.look()
        assert (self.cluster.document, self.cluster.objects) == before

    @invariant()
    def an_end_is_an_end(self):
        if not hasattr(self, "cluster"):
            return
        if self.end is None and self.cluster.over():
            self.end = copy.deepcopy(self.cluster.document["status"]), len(self.cluster.made)
        if self.end is not None:
            assert self.cluster.document["status"] == self.end[0]
            assert len(self.cluster.made) == self.end[1]
            assert self.cluster.look().apply == []

    @invariant()
    def conditions_are_whole(self):
        if not hasattr(self, "cluster"):
            return
        conditions = self.cluster.document.get("status", {}).get("conditions", [])
        assert len({c["type"] for c in conditions}) == len(conditions)
        true = {c["type"] for c in conditions if c["status"] == "True"}
        assert not {"Completed", "Failed"} <= true
        assert not ({"Completed", "Failed"} & true and "Running" in true)
        assert not {"Suspended", "Running"} <= true
        assert all(c["reason"] for c in conditions)

    @precondition(lambda self: hasattr(self, "cluster"))
    @rule()
    def left_alone_it_settles(self):
        """Without further faults it runs, rests suspended or is over, and then nothing is written any more."""
        self.cluster.settle()
        first = self.cluster.document["status"]
        result = self.cluster.reconcile()
        assert (result.apply, result.events) == ([], [])
        assert self.cluster.document["status"] == first
        if self.cluster.over():
            assert not [p for p in self.cluster.pods() if p["status"]["phase"] in ("Pending", "Running")]
        elif self.cluster.document["spec"]["suspend"]:
            assert self.cluster.pods() == []
        else:
            assert self.cluster.condition("Running")["status"] == "True"
            assert self.cluster.condition("Degraded")["status"] == "False"


Life.TestCase.settings = settings(
    max_examples=8, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLife = pytest.mark.slow(Life.TestCase)
