"""The status API over real HTTP: a coordinator's own routes behind it, and a Kubernetes API that the test fills."""

import asyncio
import base64
import json
import re
import socket
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import pytest

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.kube.names import ITERATIONS_KEY
from dovetail.operator.reconcile.history import JobHistory
from dovetail.protocol.messages import Span
from dovetail.protocol.process.process_names import COORDINATOR
from dovetail.statusapi import app as status_app
from dovetail.statusapi import coordinator_reader as coordinators
from dovetail.statusapi.api_settings import ApiSettings
from dovetail.statusapi.coordinator_pods import CoordinatorPods
from dovetail.statusapi.fair_room import FairRoom, TooMany
from helpers.fake_jobs_api import ALL, JOBS, PODS, Api, child, condition, coordinator_pod, job, of_job, wait
from helpers.patience import PATIENCE

BASE = "/api/v1/namespaces/lab/rlhfjobs"
SECRET = "/api/v1/namespaces/lab/secrets/job-token"


@pytest.fixture
def api(tmp_path, monkeypatch):
    served = Api(tmp_path, monkeypatch)
    yield served
    served.close()


# ---------------------------------------------------------------- who may


@pytest.mark.parametrize(
    "path", ["", "/job", "/job/iterations", "/job/plan", "/job/run/overview", "/job/events", "/job/logs", "/job/logs/p"]
)
def test_every_route_asks_for_a_token_and_for_rights(api, path):
    reply = api.get(BASE + path, token=None)
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert "bearer token" in reply.json()["detail"]
    assert api.get(BASE + path, token="wrong").status_code == 401
    api.kube.users["eve-token"] = "eve"
    refused = api.get(BASE + path, token="eve-token")
    assert refused.status_code == 403
    assert "user 'eve' may not" in refused.json()["detail"]
    assert "in namespace lab" in refused.json()["detail"]


def test_rbac_is_asked_about_exactly_this_user_and_job(api):
    assert api.get(f"{BASE}/job").status_code == 200
    review = next(r["spec"] for r in api.kube.reviews if r["kind"] == "SubjectAccessReview")
    assert review["resourceAttributes"] == {
        "verb": "get",
        "namespace": "lab",
        "name": "job",
        "group": "dovetail.dev",
        "resource": "rlhfjobs",
    }
    assert (review["user"], review["groups"], review["extra"]) == ("ada", ["system:authenticated"], {"k": ["v"]})


def test_answers_about_rights_are_remembered_for_a_while(tmp_path, monkeypatch):
    api = Api(tmp_path, monkeypatch, auth_cache_seconds=600.0)
    try:
        for _ in range(5):
            assert api.get(BASE).status_code == 200
        assert [r["kind"] for r in api.kube.reviews] == ["TokenReview", "SubjectAccessReview"]
        assert api.get(f"{BASE}/job").status_code == 200
        assert len([r for r in api.kube.reviews if r["kind"] == "TokenReview"]) == 1
    finally:
        api.close()


def test_namespaces_that_are_not_shown(tmp_path, monkeypatch):
    api = Api(tmp_path, monkeypatch, namespaces=("other",))
    try:
        reply = api.get(BASE)
        assert (reply.status_code, reply.json()["detail"]) == (404, "jobs in namespace lab are not shown here")
    finally:
        api.close()


# ---------------------------------------------------------------- answers


def test_list_pages_through_jobs(api):
    for number in range(5):
        api.kube.objects[f"{JOBS}/n{number}"] = job(f"n{number}", f"u{number}", conditions=[condition("Failed")])
    page = api.get(BASE, params={"limit": 4}).json()
    rest = api.get(BASE, params={"limit": 4, "continue": page["continue"]}).json()
    assert [j["name"] for j in page["items"] + rest["items"]] == ["job", "n0", "n1", "n2", "n3", "n4"]
    assert rest["continue"] is None
    assert [j["state"] for j in page["items"]] == ["Running", "Failed", "Failed", "Failed"]
    assert page["items"][0]["iteration"] == 2


def test_all_namespaces_are_listed_for_whoever_may(api):
    api.kube.objects[f"{JOBS.replace('/lab/', '/other/')}/far"] = job("far", "u2")
    found = api.get("/api/v1/rlhfjobs").json()["items"]
    assert [item["name"] for item in found] == ["job", "far"]
    assert "namespace" not in api.kube.reviews[-1]["spec"]["resourceAttributes"], "all namespaces"
    api.kube.rights.discard(("ada", "list", "rlhfjobs"))
    refused = api.get("/api/v1/rlhfjobs")
    assert refused.status_code == 403
    assert refused.json()["detail"] == "user 'ada' may not list rlhfjobs.dovetail.dev in all namespaces"


def test_detail_joins_the_jobs_status_with_what_the_coordinator_says(api):
    events = [
        {"metadata": {"name": f"e{i}"}, "lastTimestamp": f"2026-11-21T10:0{i}:00Z", "reason": r, "message": "m"}
        for i, r in enumerate(("First", "Second"))
    ]
    for event in events:
        api.kube.objects[f"/api/v1/namespaces/lab/events/{event['metadata']['name']}"] = event
    found = api.get(f"{BASE}/job").json()
    assert found["state"] == "Running"
    assert found["live"] == {"reachable": True, "message": "", "status": api.run.document}
    assert found["conditions"][0]["message"] == "because"
    assert [event["reason"] for event in found["events"]] == ["Second", "First"], "newest first"
    assert found["links"]["plan"] == f"{BASE}/job/plan"
    api.kube.rights -= {("ada", "list", "events")}
    assert api.get(f"{BASE}/job").json()["events"] is None


def test_a_status_that_does_not_fit_is_no_error(api):
    api.kube.objects[f"{JOBS}/job"]["status"] = {"conditions": [{"type": "Odd"}], "iteration": "many"}
    assert api.get(f"{BASE}/job").json()["state"] == "Pending"


def test_iterations_in_order_with_the_last_of_a_replayed_step(api):
    for step, reward in ((1, 0.1), (2, 0.2), (2, 0.25), (3, 0.3)):
        api.run.add(step, reward=reward)
    found = api.get(f"{BASE}/job/iterations").json()
    assert [(row["step"], row["metrics"]["reward"]) for row in found["items"]] == [(1, 0.1), (2, 0.25), (3, 0.3)]
    assert (found["next"], found["complete"]) == (4, True)
    api.run.add(4, reward=0.4)

    def newer():
        return api.get(f"{BASE}/job/iterations", params={"after": found["next"]}).json()

    wait(lambda: newer()["items"], "the row: an answer may be as old as poll_seconds")
    assert [row["step"] for row in newer()["items"]] == [4]
    for stage in ("sft", "dpo"):
        assert api.get(f"{BASE}/job/iterations", params={"stage": stage}).json()["items"] == []
    api.run.history.add("evaluation", 4, {"exactMatch": 0.5})

    def evaluations():
        return api.get(f"{BASE}/job/iterations", params={"stage": "evaluation"}).json()["items"]

    wait(evaluations, "the evaluation")
    rows = evaluations()
    assert [(row["step"], row["metrics"]) for row in rows] == [(4, {"exactMatch": 0.5})]
    first = api.get(f"{BASE}/job/iterations", params={"limit": 1}).json()
    assert ([row["step"] for row in first["items"]], first["next"]) == ([1], 1)


def test_what_is_known_outlives_the_coordinator(api):
    api.run.add(1, reward=0.1)
    assert api.get(f"{BASE}/job/iterations").json()["complete"] is True
    api.coordinator.close()
    wait(lambda: not api.get(f"{BASE}/job/iterations").json()["complete"], "the loss of the coordinator")
    found = api.get(f"{BASE}/job/iterations").json()
    assert [row["step"] for row in found["items"]] == [1]
    live = api.get(f"{BASE}/job").json()["live"]
    assert live["reachable"] is False
    assert "coordinator does not answer" in live["message"]
    assert live["status"]["state"] == "running", "the last that was heard"
    api.coordinator = type("Closed", (), {"close": lambda self: None})()


@pytest.mark.parametrize(("uid", "steps"), [("uid-1", [1, 2]), ("another", [])])
def test_what_the_operator_kept_of_a_finished_job_is_shown_after_a_restart(tmp_path, monkeypatch, uid, steps):
    """To a replica that never saw it run; not what an earlier job of this name left."""
    api, history = Api(tmp_path, monkeypatch, poll_seconds=0.0), JobHistory("secret")
    history.take({"stage": "ppo", "step": step, "time": 1e9, "metrics": {"reward": 0.5}} for step in (1, 2))
    kept = child("job-history", uid, data={ITERATIONS_KEY: history.text()})
    api.kube.objects["/api/v1/namespaces/lab/configmaps/job-history"] = kept
    api.coordinator.close()
    assert api.get(f"{BASE}/job/iterations").json()["items"] == [], "it still runs"
    api.kube.objects[f"{JOBS}/job"] = job(conditions=[condition("Completed")])
    found = api.get(f"{BASE}/job/iterations").json()
    assert [row["step"] for row in found["items"]] == steps
    assert all(row["metrics"] == {"reward": 0.5} for row in found["items"])
    assert found["complete"] is False
    api.coordinator = type("Closed", (), {"close": lambda self: None})()
    api.close()


def test_running_jobs_are_watched_before_anybody_asks(tmp_path, monkeypatch):
    api = Api(tmp_path, monkeypatch, watch_seconds=0.05)
    try:
        api.run.add(1, reward=0.1)
        secret = SECRET
        asked = api.kube.asked.get(secret, 0)
        wait(lambda: api.kube.asked.get(secret, 0) >= asked + 2, "two looks")
        api.coordinator.close()
        api.kube.objects[f"{JOBS}/job"] = job(conditions=[condition("Completed")])
        found = api.get(f"{BASE}/job/iterations").json()
        assert [row["step"] for row in found["items"]] == [1]
        api.coordinator = type("Closed", (), {"close": lambda self: None})()
    finally:
        api.close()


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(coordinators, "REMEMBERED_JOBS", 3)
    monkeypatch.setattr(coordinators, "REMEMBERED_ROWS", 10)

    async def fill(rows):
        found = coordinators.CoordinatorReader(NoKube(), None, None, 0.0, lambda: 0.0)
        for number in range(5):
            (await found.progress(job(uid=f"u{number}"))).rows += [None] * rows
        return list(found._jobs)

    assert asyncio.run(fill(0)) == ["u2", "u3", "u4"]
    assert asyncio.run(fill(6)) == ["u3", "u4"], "the newest is kept whatever its size"


class NoKube:
    async def request(self, *_):
        raise KubeError(404, "there is nothing")


def test_a_new_job_of_the_same_name_starts_without_the_old_ones_rows(api):
    api.run.add(1, reward=0.1)
    assert len(api.get(f"{BASE}/job/iterations").json()["items"]) == 1
    api.kube.objects[f"{JOBS}/job"] = job(uid="uid-2")
    found = api.get(f"{BASE}/job/iterations").json()
    assert found == {"items": [], "next": 0, "complete": False}
    live = api.get(f"{BASE}/job").json()["live"]
    assert live["message"] == "the Secret job-token is not this job's", "a token goes to its own job alone"


def test_the_coordinator_is_asked_at_its_pods_address(api):
    """Not by the name of the job's Service, which the job's tenant may point anywhere."""
    live = lambda: api.get(f"{BASE}/job").json()["live"]  # noqa: E731
    first = f"{PODS}/job-coordinator-0-0-abcde"

    def asked(wanted):
        wait(lambda: live()["message"] == wanted, f"the message {wanted!r}")

    assert live()["reachable"] is True
    # What another job's coordinator, or a pod that has ended, had once may be somebody else's by now.
    api.kube.objects[first] = coordinator_pod(uid="uid-2")
    asked("the coordinator's pod does not run")
    api.kube.objects[first] = coordinator_pod(phase="Failed")
    asked("the coordinator's pod does not run")
    api.kube.objects[f"{PODS}/job-coordinator-0-0-fghij"] = coordinator_pod("job-coordinator-0-0-fghij")
    asked("")
    assert live()["reachable"] is True
    listed = api.kube.asked[PODS]
    secret = api.kube.asked[SECRET]
    wait(lambda: live()["reachable"] and api.kube.asked[SECRET] > secret + 1, "newer answers")
    assert api.kube.asked[PODS] == listed, "one pod is read each time, not a list of them"


FORGED = {
    "no owner": lambda metadata: metadata.pop("ownerReferences"),
    "a ReplicaSet": lambda metadata: metadata["ownerReferences"][0].update(kind="ReplicaSet", apiVersion="apps/v1"),
    "another Job": lambda metadata: metadata["ownerReferences"][0].update(name="tenants"),
    "a Job that is gone": lambda metadata: metadata["ownerReferences"][0].update(uid="gone"),
    "no controller": lambda metadata: metadata["ownerReferences"][0].update(controller=False),
    "another job's label": lambda metadata: metadata["labels"].update({names.JOB_LABEL: "tenants"}),
    "a group of that name": lambda metadata: metadata["labels"].update({names.GROUP_LABEL: COORDINATOR}),
    "a later pod": lambda metadata: None,
}


@pytest.mark.parametrize("way", FORGED)
def test_a_pod_that_a_tenant_labels_as_the_coordinators_gets_no_token(way):
    forged = coordinator_pod("forged", podIP="10.6.6.6")
    forged["metadata"]["creationTimestamp"] = f"2026-11-21T{10 if way == 'a later pod' else '08'}:00:00Z"
    FORGED[way](forged["metadata"])
    items = [forged, coordinator_pod(podIP="10.2.0.7")]

    class Kube:
        async def request(self, *_):
            return json.dumps({"items": items}).encode()

    assert asyncio.run(CoordinatorPods(Kube()).url(job())) == "http://10.2.0.7:8000"


@pytest.mark.parametrize(
    ("address", "url"), [("10.2.0.7", "http://10.2.0.7:8000"), ("fd00::7", "http://[fd00::7]:8000")]
)
def test_a_pods_address_is_of_either_family(address, url):
    class Kube:
        async def request(self, *_):
            return json.dumps({"items": [coordinator_pod(podIP=address)]}).encode()

    assert asyncio.run(CoordinatorPods(Kube()).url(job())) == url


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        (None, "the job has not started yet"),
        (child("job-token", data={"token": "***"}), "the Secret job-token holds no token"),
        (child("job-token"), "the Secret job-token holds no token"),
        (
            child("job-token", data={"token": base64.b64encode(b"old").decode()}),
            "the coordinator answers 401: the job's token is missing or wrong",
        ),
        (403, "the job has not started yet"),
        (500, "as the test wants it"),
    ],
)
def test_why_there_is_no_live_progress(api, secret, message):
    api.kube.objects[SECRET] = secret
    found = api.get(f"{BASE}/job")
    assert found.status_code == 200
    assert found.json()["live"]["message"] == message


def test_plan_is_the_jobs_own_document(api):
    path = "/api/v1/namespaces/lab/configmaps/job-plan"
    api.kube.objects[f"{JOBS}/job"] = job(conditions=[condition("Planned", "False", "critic needs 41.2 GiB")])
    reply = api.get(f"{BASE}/job/plan")
    assert (reply.status_code, reply.json()["detail"]) == (404, "job job has no plan yet: critic needs 41.2 GiB")
    api.kube.objects[path] = child("job-plan", data={"plan.json": '{"version": 1}'})
    assert api.get(f"{BASE}/job/plan").json() == {"version": 1}
    api.kube.objects[path] = child("job-plan", uid="another", data={"plan.json": '{"version": 2}'})
    assert api.get(f"{BASE}/job/plan").status_code == 404


def test_trace_is_what_the_coordinator_wrote(api):
    api.run.timeline.add([Span(name="generation", process="coordinator", start=1.0, end=2.0)])
    api.run.timeline.write(7)
    found = api.get(f"{BASE}/job/iterations/7/trace")
    assert found.headers["content-type"] == "application/json"
    assert "generation" in {event.get("name") for event in found.json()["traceEvents"]}
    missing = api.get(f"{BASE}/job/iterations/8/trace")
    assert (missing.status_code, missing.json()["detail"]) == (
        502,
        "the coordinator answers 404: no trace of iteration 8",
    )


def test_logs_are_listed_and_read_with_rights_to_each(api):
    pods = "/api/v1/namespaces/lab/pods"
    for name, owner, uid in (
        ("job-rollouts-0-0-x", "job", "uid-1"),
        ("other-0", "other", "uid-1"),
        ("job-rollouts-0-0-old", "job", "uid-0"),
        ("tenants", "job", "uid-1"),
    ):
        metadata = {"name": name, **of_job(f"{owner}-rollouts-0")}
        if name == "tenants":  # with the labels of a pod of the job, of no Job
            del metadata["ownerReferences"]
        metadata["labels"] |= names.labels(owner, uid, "rollout") | {"dovetail.dev/group": "rollouts"}
        api.kube.objects[f"{pods}/{name}"] = {
            "metadata": metadata,
            "spec": {"nodeName": "v100"},
            "status": {"phase": "Running"},
        }
        api.kube.objects[f"{pods}/{name}/log"] = f"<b>{name}</b>\n"
    of_coordinator, line = api.get(f"{BASE}/job/logs").json()["items"]
    assert of_coordinator["pod"] == "job-coordinator-0-0-abcde"
    assert (line["pod"], line["group"], line["phase"], line["node"]) == (
        "job-rollouts-0-0-x",
        "rollouts",
        "Running",
        "v100",
    )
    assert line["kubectl"] == "kubectl logs -n lab job-rollouts-0-0-x"
    assert api.get(line["log"]).status_code == 403, "to list pods is not to read their logs"
    api.kube.rights.add(("ada", "get", "pods/log"))
    text = api.get(line["log"], params={"lines": 5})
    assert (text.text, text.headers["content-type"]) == ("<b>job-rollouts-0-0-x</b>\n", "text/plain; charset=utf-8")
    assert text.headers["x-content-type-options"] == "nosniff"
    for pod in ("other-0", "job-rollouts-0-0-old", "tenants"):
        assert api.get(f"{BASE}/job/logs/{pod}").status_code == 404, "no pod of this job"


# ---------------------------------------------------------------- live


def test_events_bring_rows_status_and_the_end(api):
    api.run.add(1, reward=0.1)
    first = api.events(f"{BASE}/job/events", until=lambda kind, _: kind == "status")
    assert [(kind, number) for kind, _, number in first] == [("iteration", "1"), ("status", None)]
    assert first[0][1]["metrics"] == {"reward": 0.1}
    assert first[1][1] == api.get(f"{BASE}/job").json(), "the same document"
    api.run.add(2, reward=0.2)
    api.kube.objects[f"{JOBS}/job"] = job(conditions=[condition("Completed")], stage="ppo")
    rest = api.events(f"{BASE}/job/events", until=lambda *_: False, last=1)
    assert [(kind, number) for kind, _, number in rest] == [("iteration", "2"), ("status", None), ("end", None)]
    assert rest[-1][1] == {"reason": "Completed"}


def test_events_follow_changes_and_end_with_the_rights(api):
    def then(kind, data):
        if kind == "status" and data["live"]["status"]["phase"] == "generation":
            api.run.document = {**api.run.document, "phase": "training"}
            api.run.add(1, reward=0.5)
        elif kind == "status":
            api.kube.rights.discard(("ada", "get", "rlhfjobs"))
        return False

    found = api.events(f"{BASE}/job/events", until=then)
    kinds = [kind for kind, _, _ in found]
    assert kinds[0] == "status"
    assert kinds.count("iteration") == 1
    assert found[-1][0] == "end"
    assert "user 'ada' may not get rlhfjobs.dovetail.dev job" in found[-1][1]["reason"]


def test_streams_are_bounded(tmp_path, monkeypatch):
    api = Api(tmp_path, monkeypatch, streams=0)
    try:
        reply = api.get(f"{BASE}/job/events")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    finally:
        api.close()


ACCOUNTS = "system:serviceaccount:lab"


@pytest.mark.parametrize(
    "users", [("ada", "ada"), (f"{ACCOUNTS}:one", f"{ACCOUNTS}:two"), (f"{ACCOUNTS}:one", f"{ACCOUNTS}-2:one")]
)
def test_whoever_takes_all_streams_gives_some_to_the_next_tenant(tmp_path, monkeypatch, users):
    """Whoever may make ServiceAccounts makes any number of them, maybe in several namespaces."""
    api = Api(tmp_path, monkeypatch, streams=4)
    api.kube.users |= {"one": users[0], "two": users[1], "bob-token": "bob"}
    api.kube.rights |= {(user, verb, resource) for _, verb, resource in ALL for user in (*users, "bob")}
    try:
        with ExitStack() as stack:

            def opened(token):
                headers = {"Authorization": f"Bearer {token}"}
                reply = stack.enter_context(api.client.stream("GET", f"{BASE}/job/events", headers=headers))
                if reply.status_code != 200:
                    return json.loads(reply.read())["detail"]
                lines = reply.iter_lines()
                next(lines)
                return lines

            theirs = [opened(token) for token in ("one", "two", "one", "two")]
            bobs = opened("bob-token")
            with pytest.raises(httpx.RemoteProtocolError):
                list(theirs[3])  # the newest ended
            assert "are in use, and" in opened("two"), "they may not take it back"
            api.kube.objects[f"{JOBS}/job"] = job(conditions=[condition("Running")], stage="ppo", iteration=7)
            for lines in (*theirs[:2], bobs):
                until(lines, '"iteration":7')
        wait(lambda: open_one_and_close(api, "one"), "the streams to be free again")
    finally:
        api.close()


def open_one_and_close(api, token):
    headers = {"Authorization": f"Bearer {token}"}
    with api.client.stream("GET", f"{BASE}/job/events", headers=headers) as reply:
        return reply.status_code == 200


def test_all_streams_of_a_job_share_one_watch_that_an_idle_job_leaves_alone(api):
    with ExitStack() as stack:
        streams = []
        for _ in range(10):
            headers = {"Authorization": "Bearer ada-token"}
            reply = stack.enter_context(api.client.stream("GET", f"{BASE}/job/events", headers=headers))
            streams.append(reply.iter_lines())
            until(streams[-1], '"iteration":2')
        polls = api.kube.asked["/apis/authorization.k8s.io/v1/subjectaccessreviews"]
        wait(lambda: api.kube.asked["/apis/authorization.k8s.io/v1/subjectaccessreviews"] > polls + 100, "many looks")
        told = {"metadata": {"name": "e"}, "reason": "Told", "lastTimestamp": "2026-11-21T10:00:00Z"}
        api.kube.objects["/api/v1/namespaces/lab/events/e"] = told
        for stream in streams:
            until(stream, '"Told"')
        api.kube.objects[f"{JOBS}/job"] = job(conditions=[condition("Running")], stage="ppo", iteration=3)
        for stream in streams:
            until(stream, '"iteration":3')
        assert api.kube.asked[f"{JOBS}/job"] == 11, "each stream when it begins, and the one watch"
        assert api.kube.asked[JOBS] == 1
        assert api.kube.asked["/api/v1/namespaces/lab/events"] <= 4, "the version, the watch, and what is new twice"
        del api.kube.objects[f"{JOBS}/job"]
        for stream in streams:
            until(stream, "there is no RLHFJob job in namespace lab")


def until(lines, text):
    """Reads a stream up to the line that has this text."""
    while text not in next(lines):
        pass


def test_any_number_of_events_is_read_in_parts(api):
    """A tenant can make any number of them. The newest may be anywhere in the list."""
    for n in range(1200):
        name, minute = f"job.{n:04}", n % 60
        at = f"2026-11-21T10:{minute:02}:00Z" if n != 1100 else "2026-11-21T12:00:00Z"
        event = {"metadata": {"name": name}, "reason": "Flood", "message": name, "lastTimestamp": at}
        api.kube.objects[f"/api/v1/namespaces/lab/events/{name}"] = event
    api.kube.asked.clear()
    found = api.get(f"{BASE}/job").json()["events"]
    assert len(found) == 20
    assert found[0]["message"] == "job.1100"
    assert api.kube.asked["/api/v1/namespaces/lab/events"] == 3


def test_a_list_of_jobs_is_read_in_parts(api):
    """Each may have a megabyte, and more than 20 times as much in memory."""
    for n in range(11):
        api.kube.objects[f"{JOBS}/job-{n:02}"] = job(f"job-{n:02}") | {"spec": {"large": "x" * 1_000_000}}
    api.kube.asked.clear()
    found = api.get(BASE, params={"limit": 10}).json()
    assert len(found["items"]) == 10
    assert api.kube.asked[JOBS] > 10, "each answer was small in the end"
    rest = api.get(BASE, params={"limit": 10, "continue": found["continue"]}).json()
    assert len(rest["items"]) == 2
    assert rest["continue"] is None


TRACE = b"[" + b" " * (7 << 20) + b"]"


@contextmanager
def an_api_with_room_for(answers, tmp_path, monkeypatch):
    api = Api(tmp_path, monkeypatch, answer_bytes=answers * (8 << 20))
    api.run.trace = lambda iteration: TRACE
    try:
        yield api
    finally:
        api.close()


@contextmanager
def a_reader_who_stops(api, token="ada-token"):
    """Somebody who has asked for the trace and has read the head of the answer, and no more than the kernel took."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        slow.settimeout(PATIENCE)
        slow.connect(("127.0.0.1", api.port))
        path = f"{BASE}/job/iterations/7/trace"
        slow.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        assert slow.recv(12) == b"HTTP/1.1 200"
        yield slow


def rest_of(slow):
    """The number of bytes that a reader who stopped gets when he goes on."""
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    found = 0
    while got := slow.recv(1 << 20):
        found += len(got)
    return found


def test_large_answers_that_nobody_reads_are_bounded(tmp_path, monkeypatch):
    with an_api_with_room_for(1, tmp_path, monkeypatch) as api:
        ask = partial(api.get, f"{BASE}/job/iterations/7/trace")
        with a_reader_who_stops(api):
            refused = ask()
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "are in use, and ada would have most" in refused.json()["detail"]
            assert api.get(f"{BASE}/job").status_code == 200, "others are small"
        wait(lambda: ask().status_code == 200, "the room to be free again")
        assert ask().content == TRACE
        for _ in range(3):
            assert ask().status_code == 200, "whoever has read an answer has given its room back"


@pytest.mark.slow
def test_a_reader_who_takes_too_long_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(status_app, "SEND_SECONDS", 0.5)
    with an_api_with_room_for(1, tmp_path, monkeypatch) as api, a_reader_who_stops(api) as slow:
        wait(lambda: api.get(f"{BASE}/job/iterations/7/trace").status_code == 200, "the room to be free again")
        assert rest_of(slow) < len(TRACE), "the answer is not whole"


def test_two_tenants_who_read_slowly_leave_room_for_a_third(tmp_path, monkeypatch):
    with an_api_with_room_for(2, tmp_path, monkeypatch) as api:
        api.kube.users |= {"eve-token": "eve", "bob-token": "bob"}
        api.kube.rights |= {(user, verb, resource) for _, verb, resource in ALL for user in ("eve", "bob")}
        with a_reader_who_stops(api), a_reader_who_stops(api, "eve-token") as slow:
            refused = api.get(f"{BASE}/job/iterations/7/trace")
            assert refused.status_code == 503, "ada has as much as eve"
            assert api.get(f"{BASE}/job/iterations/7/trace", token="bob-token").content == TRACE
            assert rest_of(slow) < len(TRACE), "the newer answer of the two ended"


def test_nobody_takes_all_the_room_from_others():
    room = FairRoom(10, "10 bytes")
    ada, bob = room.share("ada"), room.share("bob")
    ada.take(4)
    newest = room.share("ada")
    newest.take(6)
    bob.take(3)
    assert room.held() == {"ada": 4, "bob": 3}, "ada's newest ended"
    with pytest.raises(TooMany, match="ada has most"):
        newest.take(1)
    bob.take(3)
    with pytest.raises(TooMany, match="all 10 bytes are in use, and bob would have most"):
        bob.take(1)
    with pytest.raises(TooMany):
        room.share("ada").take(2)
    room.share("carol").take(2)
    assert room.held()["carol"] == 2
    ada.leave()
    ada.leave()
    bob.settle(1)
    assert "ada" not in room.held()
    with pytest.raises(TooMany):
        room.share("dan").take(11)


def test_who_is_refused_has_ended_nothing():
    """Two answers of ada could end for bob, but not three, and only three would be enough."""
    room = FairRoom(100, "100 bytes")
    answers = [room.share("ada") for _ in range(5)]
    for each in answers:
        each.take(18)
    with pytest.raises(TooMany, match="bob would have most"):
        room.share("bob").take(60)
    assert room.held() == {"ada": 90}
    for each in answers:
        each.settle(17)
        each.take(1)


# ---------------------------------------------------------------- errors and the rest


def test_what_is_not_there(api):
    reply = api.get(f"{BASE}/nope")
    assert (reply.status_code, reply.json()["detail"]) == (404, "there is no RLHFJob nope in namespace lab")


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/api/v1/namespaces/La_b/rlhfjobs", "namespace"),
        ("/api/v1/namespaces/lab/rlhfjobs/A..", "name"),
        (f"{BASE}?limit=0", "limit"),
        (f"{BASE}/job/iterations?stage=x", "stage"),
        (f"{BASE}/job/iterations/x/trace", "iteration"),
        (f"{BASE}/job/logs/a%3Fb", "pod"),
        (f"{BASE}/job/run/samples%2F..%2Foverview", "question"),
        (f"{BASE}/job/run/status", "question"),
    ],
)
def test_wrong_parameters_get_one_sentence_and_no_request(api, path, parameter):
    reply = api.get(path)
    assert reply.status_code == 400
    assert reply.json()["detail"].startswith(f"{parameter}: ")
    assert not any("rlhfjobs" in asked for asked in api.kube.asked)


def test_kubernetes_that_is_down_is_503(api):
    assert api.get("/readyz").status_code == 200
    api.kube.close()
    for path in (BASE, "/readyz"):
        reply = api.get(path)
        assert reply.status_code == 503
        assert "Kubernetes API does not answer" in reply.json()["detail"]
    assert api.get("/healthz").status_code == 200, "a restart would not help"
    api.kube.close = lambda: None


def test_the_page_loads_nothing_from_elsewhere(api):
    reply = api.get("/", token=None)
    assert reply.status_code == 200
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", reply.text)
    policy = reply.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    for name in re.findall(r"""(?:src|href)="(static/[^"]+)""", reply.text):
        file = api.get(f"/{name}", token=None)
        assert (file.status_code, file.headers["content-security-policy"]) == (200, policy)
    assert api.get("/static/..%2Fpage_files.py", token=None).status_code == 404
    assert api.get("/api/v1/about", token=None).json() == {"source": "cluster", "token": False}


def test_the_page_asks_the_coordinator_about_the_run(api):
    api.run.add(1, reward=1.5)
    found = api.get(f"{BASE}/job/run/overview").json()
    assert (found["state"], found["reward"], found["health"]["iteration"]) == ("running", 1.5, 1)
    for texts in ("samples/3", "samples/3/rows/0", "sample/3/0/0", "evaluation/3", "evaluation/3/rows/0"):
        refused = api.get(f"{BASE}/job/run/{texts}")
        assert refused.status_code == 403, "prompts and responses, which may be secret, are in logs too"
        assert "pods/log" in refused.json()["detail"]
    api.kube.rights.add(("ada", "get", "pods/log"))
    missing = api.get(f"{BASE}/job/run/samples/3")
    assert missing.status_code == 502
    assert "the samples of iteration 3 are not kept" in missing.json()["detail"]


def test_metrics_have_bounded_labels(api):
    for name in ("a", "b", "c"):
        api.get(f"{BASE}/{name}")
    text = api.get("/metrics", token=None).text
    template = "/api/v1/namespaces/{namespace}/rlhfjobs/{name}"
    assert f'dovetail_api_requests_total{{code="404",route="{template}"}} 3.0' in text
    assert f"{BASE}/a" not in text


def test_settings_come_from_the_environment():
    found = ApiSettings.read({"DOVETAIL_API_PORT": "81", "DOVETAIL_API_NAMESPACES": "a, b", "DOVETAIL_API_TLS_KEY": ""})
    assert (found.port, found.namespaces) == (81, ("a", "b"))
    with pytest.raises(ValueError, match="DOVETAIL_API_PORT is 'x', not a number"):
        ApiSettings.read({"DOVETAIL_API_PORT": "x"})
    with pytest.raises(ValueError, match="belong together"):
        ApiSettings.read({"DOVETAIL_API_TLS_KEY": "k"})
