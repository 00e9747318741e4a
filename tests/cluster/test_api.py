"""The status API under the chart's ServiceAccount, against a real API server: who may see what, and what they see."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry

from dovetail.coordinator.reporting.telemetry import MetricsHistory
from dovetail.coordinator.serving.coordinator_routes import make_app
from dovetail.kube import names
from dovetail.manifest.types import Stage
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import read_job
from dovetail.operator.reconcile.reconcile import PlanRefused
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.objects import role, role_binding
from dovetail.planner.make_plan import make_plan
from helpers.chart_tools import CHART
from helpers.cluster import KubeCluster, wait_for
from helpers.fake_kube import ServerThread
from helpers.free_ports import free_port
from helpers.operator_process import SYSTEM, install, kubeconfig
from helpers.patience import PATIENCE
from helpers.rlhfjobs import install_crd, mark_planned

LAB, OTHER = "api-lab", "api-other"
EVERYTHING = "/api/v1/rlhfjobs"
TOKEN = "the-jobs-own"


class Coordinator:
    """A coordinator's own routes over a real run directory."""

    trainers: Any = None

    def __init__(self, folder: Path) -> None:
        self.history = MetricsHistory(folder)
        self.server = ServerThread(make_app(self, TOKEN, CollectorRegistry()))  # type: ignore[arg-type]

    def status(self) -> dict[str, Any]:
        return {"state": "running", "stage": "ppo", "phase": "training", "instances": {}}

    def history_since(self, offset: int) -> dict[str, Any]:
        return self.history.since(offset)


@pytest.fixture(scope="module")
def server(api_server: KubeCluster) -> KubeCluster:
    spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}} for n in (LAB, OTHER)]
    api_server.apply(*spaces)
    install_crd(api_server)
    install(api_server, [LAB, OTHER], "rbac.userRoles=false")
    return api_server


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    found = Coordinator(tmp_path_factory.mktemp("run"))
    yield found
    found.server.close()


@pytest.fixture(scope="module")
def job(server: KubeCluster) -> dict[str, Any]:
    """A job with what the operator makes for it, in LAB; one of the same name without, in OTHER."""
    manifest = yaml.safe_load((CHART.parents[1] / "examples" / "quickstart.yaml").read_text())
    for namespace in (LAB, OTHER):
        server.apply(manifest, namespace=namespace)
    name = manifest["metadata"]["name"]
    mark_planned(server, LAB, name)
    found: dict[str, Any] = server.get("rlhfjob", name, "-n", LAB)
    owner = {key: found[key] for key in ("apiVersion", "kind")} | {"name": name, "uid": found["metadata"]["uid"]}
    metadata = {"namespace": LAB, "ownerReferences": [owner | {"controller": True}]}
    data = {names.TOKEN_KEY: base64.b64encode(TOKEN.encode()).decode()}
    server.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {**metadata, "name": names.token_secret(name)},
            "data": data,
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {**metadata, "name": names.plan_config_map(name)},
            "data": {"plan.json": '{"version": 1}'},
        },
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "planned", "namespace": LAB},
            "involvedObject": owner | {"namespace": LAB},
            "reason": "Planned",
            "message": "The plan holds.",
            "type": "Normal",
            "lastTimestamp": "2026-01-01T00:00:00Z",
        },
        namespace=LAB,
    )
    read = read_job(found)
    assert not isinstance(read, PlanRefused)
    settings = OperatorSettings(namespace=SYSTEM, api_account="dovetail-api")
    context = RenderContext(read, found["metadata"]["uid"], make_plan(read.spec), settings)
    server.apply(role(context), role_binding(context), namespace=LAB)
    return found


@contextmanager
def serving(config: Path, coordinator: Coordinator, namespaces: str) -> Iterator[httpx.Client]:
    """The process of the chart's Deployment, with a ServiceAccount's kubeconfig. `namespaces`: "" means all."""
    port = free_port()
    environ = os.environ | {
        "KUBECONFIG": str(config),
        "DOVETAIL_API_HOST": "127.0.0.1",
        "DOVETAIL_API_PORT": str(port),
        "DOVETAIL_API_NAMESPACES": namespaces,
        "DOVETAIL_API_COORDINATOR_URL": coordinator.server.url,
        "DOVETAIL_API_POLL_SECONDS": "0.1",
        "DOVETAIL_API_AUTH_CACHE_SECONDS": "0.5",
    }
    log = config.with_suffix(".log").open("wb")
    process = subprocess.Popen([sys.executable, "-m", "dovetail.statusapi"], env=environ, stdout=log, stderr=log)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)

    def ready() -> bool:
        assert process.poll() is None, config.with_suffix(".log").read_text()
        try:
            return client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for("the API", ready)
        yield client
        process.terminate()
        assert process.wait(PATIENCE) in (0, -15)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE)
        client.close()
        log.close()


@pytest.fixture(scope="module")
def api(
    server: KubeCluster, coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Of a release for two namespaces."""
    config = kubeconfig(server, tmp_path_factory.mktemp("api"), "dovetail-api")
    with serving(config, coordinator, f"{LAB},{OTHER}") as client:
        yield client


@pytest.fixture(scope="module")
def everywhere(
    server: KubeCluster, coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Of a release for all namespaces."""
    system = "dovetail-everywhere"
    install(server, [], "rbac.userRoles=false", name="wide", system=system)
    config = kubeconfig(server, tmp_path_factory.mktemp("everywhere"), "wide-dovetail-api", system)
    try:
        with serving(config, coordinator, "") as client:
            yield client
    finally:
        server.kubectl("delete", "clusterrole,clusterrolebinding", "-l", "app.kubernetes.io/instance=wide")
        server.kubectl("delete", "lease", "-n", "default", "-l", "app.kubernetes.io/instance=wide")


@pytest.fixture(scope="module")
def token(server: KubeCluster) -> Callable[[str], dict[str, str]]:
    """Headers of a new account in LAB that is bound to a built-in ClusterRole there ("": to none)."""

    def make(role: str, name: str = "") -> dict[str, str]:
        name = name or f"some-{role or 'body'}"
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": LAB}}
        server.apply(account, namespace=LAB)
        if role:
            server.apply(_binding(name, role), _reader(), namespace=LAB)
        return {"Authorization": f"Bearer {server.kubectl('create', 'token', name, '-n', LAB).strip()}"}

    return make


def _binding(name: str, role: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name, "namespace": LAB},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": LAB}],
    }


def _reader() -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "reader", "namespace": LAB},
        "rules": [
            {"apiGroups": ["dovetail.dev"], "resources": ["rlhfjobs"], "verbs": ["get", "list"]},
            {"apiGroups": [""], "resources": ["events", "pods"], "verbs": ["list"]},
        ],
    }


def path(namespace: str, name: str = "", part: str = "") -> str:
    return "/".join(filter(None, [f"/api/v1/namespaces/{namespace}/rlhfjobs", name, part]))


def test_a_reader_sees_the_job_and_its_progress(server, api, job, coordinator, token):
    reader, name = token("reader"), job["metadata"]["name"]
    wait_for("the right", lambda: api.get(path(LAB), headers=reader).status_code == 200)
    assert [item["name"] for item in api.get(path(LAB), headers=reader).json()["items"]] == [name]
    coordinator.history.add(Stage.PPO, 1, {"reward": 0.5, "kl": 0.25})
    detail = api.get(path(LAB, name), headers=reader).json()
    assert detail["state"] == "Planned"
    assert detail["uid"] == job["metadata"]["uid"]
    assert detail["live"]["status"]["phase"] == "training", detail["live"]
    assert [event["reason"] for event in detail["events"]] == ["Planned"]

    def rows() -> Any:
        return api.get(path(LAB, name, "iterations"), headers=reader).json()["items"]

    assert wait_for("the row", rows)[0]["metrics"] == {"reward": 0.5, "kl": 0.25}
    assert api.get(path(LAB, name, "plan"), headers=reader).json() == {"version": 1}
    assert api.get(path(LAB, name, "logs"), headers=reader).json() == {"items": []}


# What proxies send beside the token, and what the Kubernetes API takes from those that it trusts.
FORGED = {
    "X-Forwarded-User": "admin",
    "X-Forwarded-Groups": "system:masters",
    "X-Auth-Request-User": "admin",
    "X-Remote-User": "admin",
    "X-Remote-Group": "system:masters",
    "Remote-User": "admin",
    "Impersonate-User": "admin",
    "Impersonate-Group": "system:masters",
}


def test_rights_are_those_of_rbac(server, api, job, token):
    name = job["metadata"]["name"]
    nobody = token("")
    for where in (path(LAB), path(LAB, name), path(LAB, name, "events"), path(LAB, name, "plan")):
        assert api.get(where).status_code == 401
        assert api.get(where, headers={"Authorization": "Bearer not.a.token"}).status_code == 401
        assert api.get(where, headers=FORGED).status_code == 401, "headers that only name a user are not trusted"
        assert api.get(where, headers=nobody | FORGED).status_code == 403, "nor beside a token"
        refused = api.get(where, headers=nobody)
        assert refused.status_code == 403
        assert f"system:serviceaccount:{LAB}:some-body" in refused.json()["detail"]
    reader = token("reader")
    wait_for("the right", lambda: api.get(path(LAB), headers=reader).status_code == 200)
    assert api.get(path(OTHER), headers=reader).status_code == 403, "the same name in another namespace"
    assert api.get(path(OTHER, name), headers=reader).status_code == 403
    assert api.get(path(LAB, "nope"), headers=reader).status_code == 404


def test_all_namespaces_are_for_whoever_may_list_them(server, api, everywhere, job, token):
    name, reader = job["metadata"]["name"], token("reader")
    wait_for("the right", lambda: everywhere.get(path(LAB), headers=reader).status_code == 200)
    refused = everywhere.get(EVERYTHING, headers=reader)
    assert refused.status_code == 403
    assert refused.json()["detail"].endswith("may not list rlhfjobs.dovetail.dev in all namespaces")
    server.kubectl("create", "clusterrole", "all-jobs", "--verb=list", "--resource=rlhfjobs.dovetail.dev")
    words = ("--clusterrole=all-jobs", f"--serviceaccount={LAB}:some-reader")
    server.kubectl("create", "clusterrolebinding", "all-jobs", *words)
    try:
        wait_for("the right", lambda: everywhere.get(EVERYTHING, headers=reader).status_code == 200)
        items = everywhere.get(EVERYTHING, headers=reader).json()["items"]
        assert {(LAB, name), (OTHER, name)} <= {(item["namespace"], item["name"]) for item in items}
        assert everywhere.get(path(OTHER, name), headers=reader).status_code == 403, "to list is not to get"
        hidden = api.get(EVERYTHING, headers=reader)
        assert (hidden.status_code, hidden.json()["detail"]) == (404, "jobs in all namespaces are not shown here")
    finally:
        server.kubectl("delete", "clusterrolebinding/all-jobs", "clusterrole/all-jobs")


def count(server: KubeCluster, metric: str, verb: str) -> float:
    """A metric of the API server about RLHFJobs."""
    lines = server.kubectl("get", "--raw", "/metrics").splitlines()
    mine = [line for line in lines if line.startswith(metric + "{") and f'verb="{verb}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in mine if 'resource="rlhfjobs"' in line)


def test_all_streams_of_a_job_share_one_watch(server, everywhere, job, token):
    """What the API server is asked does not grow with streams, nor with time."""
    name, headers = job["metadata"]["name"], token("reader", name="follower")
    wait_for("the right", lambda: everywhere.get(path(LAB, name), headers=headers).status_code == 200)
    watches = count(server, "apiserver_longrunning_requests", "WATCH")
    with ExitStack() as stack:
        streams = []
        for _ in range(5):
            reply = stack.enter_context(everywhere.stream("GET", path(LAB, name, "events"), headers=headers))
            streams.append(reply.iter_lines())
            until(streams[-1], '"state":"Planned"')
        wait_for("one watch", lambda: count(server, "apiserver_longrunning_requests", "WATCH") == watches + 1)
        asked = count(server, "apiserver_request_total", "GET")
        status = {"status": {"iteration": 7}}
        words = ("rlhfjob", name, "-n", LAB, "--subresource=status", "--type=merge", "-p", json.dumps(status))
        server.kubectl("patch", *words)
        for lines in streams:
            until(lines, '"iteration":7')
        assert count(server, "apiserver_request_total", "GET") <= asked + 2, "kubectl's own"


def until(lines: Iterator[str], text: str) -> None:
    """Reads a stream up to the line that has this text."""
    while text not in next(lines):
        pass


def test_a_right_that_is_taken_away_ends_within_the_cache_time_streams_too(server, api, job, token):
    name = job["metadata"]["name"]
    headers = token("reader", name="leaver")
    wait_for("the right", lambda: api.get(path(LAB, name), headers=headers).status_code == 200)
    kinds: list[str] = []
    with api.stream("GET", path(LAB, name, "events"), headers=headers) as reply:
        for line in reply.iter_lines():
            if line.startswith("event: "):
                kinds.append(line.removeprefix("event: "))
                if kinds[-1] == "status" and kinds.count("status") == 1:
                    server.kubectl("delete", "rolebinding", "leaver", "-n", LAB)
    assert kinds[-1] == "end"
    wait_for("no right", lambda: api.get(path(LAB, name), headers=headers).status_code == 403)


def test_the_accounts_own_rights_suffice_and_are_all_it_has(api, job, server):
    """Secrets of other namespaces stay closed to the API, and the namespace is not shown even to an administrator."""
    user = f"system:serviceaccount:{SYSTEM}:dovetail-api"
    assert server.try_kubectl("auth", "can-i", "get", "secrets", "-n", "default", "--as", user).returncode == 1
    token = f"secret/{names.token_secret(job['metadata']['name'])}"
    may_read = ("auth", "can-i", "get", token, "-n", LAB, "--as", user)
    wait_for("the job's own right", lambda: server.try_kubectl(*may_read).returncode == 0)
    for kind in ("secrets", "secret/hf-token", "configmaps"):
        assert server.try_kubectl("auth", "can-i", "get", kind, "-n", LAB, "--as", user).returncode == 1, kind
    words = ("clusterrolebinding", "api-admin")
    account = f"--serviceaccount={LAB}:default"
    server.kubectl("create", *words, "--clusterrole=cluster-admin", account)
    try:
        admin = {"Authorization": f"Bearer {server.kubectl('create', 'token', 'default', '-n', LAB).strip()}"}
        wait_for("the right", lambda: api.get(path(LAB), headers=admin).status_code == 200)
        hidden = api.get(path("default"), headers=admin)
        assert (hidden.status_code, hidden.json()["detail"]) == (404, "jobs in namespace default are not shown here")
    finally:
        server.kubectl("delete", *words)
