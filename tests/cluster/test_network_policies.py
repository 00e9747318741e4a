"""NetworkPolicies executed by kube-router on real kubelets: what the chart and the operator make keeps others out, and
jobs' pods in."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from devcluster.settings import find

from dovetail.kube import names
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.objects import network_policy
from dovetail.operator.render.sandboxes import sandbox_objects
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.process import env
from dovetail.protocol.process.process_names import COORDINATOR
from helpers import policies
from helpers.chart_tools import CHART
from helpers.cluster import KubeCluster, external, wait_for
from helpers.patience import PATIENCE
from helpers.rlhfjobs import quickstart

pytestmark = pytest.mark.skipif(external() is not None, reason="another's cluster may execute no policies")
PRODUCTS = {"a100": "NVIDIA-A100-SXM4-80GB", "v100": "Tesla-V100-SXM2-32GB", "a10": "NVIDIA-A10"}
OTHER = 7777  # no process of Dovetail's listens there
API = 8080
SERVED = (env.COORDINATOR_PORT, env.SERVER_PORT, env.AGENTS_PORT, env.TRAINER_METRICS_PORT, OTHER)
UID = "0" * 36
HUB, CLOSED, DNS = 443, 8443, 53
SERVE = """
import selectors, socket, sys
selector = selectors.DefaultSelector()
for port in map(int, sys.argv[1:]):
    server = socket.create_server(("", port))
    selector.register(server, selectors.EVENT_READ)
while True:
    for key, _ in selector.select():
        key.fileobj.accept()[0].close()
"""


def a_pod(name: str, node: str, labels: dict[str, str]) -> dict[str, Any]:
    command = ["python", "-c", SERVE, *map(str, (*SERVED, API))]
    spec = {
        "terminationGracePeriodSeconds": 1,
        "nodeSelector": {"nvidia.com/gpu.product": PRODUCTS[node]},
        "containers": [{"name": "main", "image": "dovetail-dev/operator:dev", "command": command}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


@contextmanager
def listening(host: str, *ports: int) -> Iterator[None]:
    """This machine, as the cluster sees it."""
    with ExitStack() as stack:
        for port in ports:
            server = stack.enter_context(socket.create_server((host, port)))

            def accept(server: socket.socket = server) -> None:
                while True:
                    try:
                        server.accept()[0].close()
                    except OSError:
                        return

            threading.Thread(target=accept, daemon=True).start()
            stack.callback(server.shutdown, socket.SHUT_RDWR)
        yield


def made(cluster: KubeCluster, space: str, system: str, values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The chart's, installed with these values, and the job's, as its operator makes it."""
    (folder / "values.yaml").write_text(yaml.safe_dump({"networkPolicy": values}))
    text = cluster.helm("template", "d", str(CHART), "--namespace", system, "--values", str(folder / "values.yaml"))
    things = [thing for thing in yaml.safe_load_all(text) if thing]
    found = [thing for thing in things if thing["kind"] == "NetworkPolicy"]
    (operator,) = (t for t in things if t["kind"] == "Deployment" and t["metadata"]["name"].endswith("-operator"))
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    settings = OperatorSettings.read({key: given[key] for key in ("DOVETAIL_EGRESS", "DOVETAIL_METRICS_FROM")})
    settings = OperatorSettings(namespace=system, egress=settings.egress, metrics_from=settings.metrics_from)
    document = quickstart("job", space)
    document["spec"]["models"]["reward"] = {"function": "dovetail.coordinator.rewards.earned:earned"}
    document["spec"]["sessions"] = {"environment": {"function": "game:Game"}, "sandbox": "Pod"}
    job = parse(document)
    job = job.model_copy(update={"spec": resolve(job.spec)})
    context = RenderContext(job, UID, make_plan(job.spec), settings)
    mine = [network_policy(context), *(t for t in sandbox_objects(context, None) if t["kind"] == "NetworkPolicy")]
    for each in mine:
        del each["metadata"]["ownerReferences"]
    return [*found, *mine]


def test_pods_reach_whom_the_chart_says_and_nobody_else(cluster: KubeCluster, tmp_path: Path) -> None:
    if reason := policies.lacking():
        pytest.skip(reason)
    assert cluster.name is not None
    state = find(cluster.name)
    assert state is not None
    mine = {names.JOB_LABEL: "job"}
    chart = {"app.kubernetes.io/name": "dovetail", "app.kubernetes.io/instance": "d"}
    with (
        cluster.namespace() as space,
        cluster.namespace() as tenant,
        cluster.namespace() as system,
        listening(state.host, HUB, CLOSED, DNS),
    ):
        where = {
            "coordinator": (
                space,
                a_pod("coordinator", "a100", mine | {names.UID_LABEL: UID, names.ROLE_LABEL: COORDINATOR}),
            ),
            "sandbox": (space, a_pod("sandbox", "v100", {names.SANDBOX_LABEL: UID})),
            "rollout": (space, a_pod("rollout", "v100", mine)),
            "neighbour": (space, a_pod("neighbour", "a100", {"app": "other"})),
            "tenant": (tenant, a_pod("tenant", "a10", mine)),
            "prometheus": (tenant, a_pod("prometheus", "a10", {"app": "prometheus"})),
            "operator": (system, a_pod("operator", "v100", chart | {"app.kubernetes.io/component": "operator"})),
            "api": (system, a_pod("api", "a10", chart | {"app.kubernetes.io/component": "api"})),
        }
        for namespace, pod in where.values():
            cluster.apply(pod, namespace=namespace)
        address = {
            name: cluster.wait_pod(namespace, name, "Running")["status"]["podIP"]
            for name, (namespace, _) in where.items()
        }
        places: list[tuple[str, str, int]] = [
            *(("coordinator", address["coordinator"], port) for port in SERVED),
            *(("rollout", address["rollout"], port) for port in SERVED),
            ("tenant", address["tenant"], OTHER),
            ("sandbox", address["sandbox"], OTHER),
            *((name, address[name], port) for name in ("operator", "api") for port in (API, OTHER)),
            ("name server", state.dns, 53),
            ("hub", state.host, HUB),
            ("machine", state.host, CLOSED),
            ("another name server", state.host, DNS),
            ("API server", state.address, 6443),
        ]

        def reached(name: str) -> set[tuple[str, int]]:
            answers = policies.reached(cluster, where[name][0], name, [place[1:] for place in places])
            return {(to, port) for (to, _, port), yes in zip(places, answers, strict=True) if yes}

        everything = {(to, port) for to, _, port in places}
        wait_for("all to serve", lambda: reached("neighbour") == everything)

        block = {"ipBlock": {"cidr": f"{state.host}/32"}}
        space_of = {"matchLabels": {"kubernetes.io/metadata.name": tenant}}
        scraper = {"namespaceSelector": space_of, "podSelector": {"matchLabels": {"app": "prometheus"}}}
        values = {"metricsFrom": [scraper], "jobEgress": {"hub": [block]}}
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": made(cluster, space, system, values, tmp_path)})
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=text)
        # Without a plug-in that executes it, a policy says nothing.
        wait_for("everything", lambda: reached("tenant") == everything)
        cluster.devcluster("up", "--policies", timeout=PATIENCE)
        try:
            inside = {(to, port) for to in ("coordinator", "rollout") for port in SERVED}
            ours = {(to, port) for to in ("operator", "api") for port in (API, OTHER)}
            # The status API is for everybody, on its port.
            outside = everything - inside - ours - {("sandbox", OTHER)} | {("api", API)}
            metrics = {(to, port) for to, port in inside if port not in (OTHER, env.AGENTS_PORT)}
            wanted = {
                # Each other on all ports, the cluster's name servers, and the hub that values name. Neither another
                # name server, which could carry anything out, nor the API server.
                "coordinator": inside | {("name server", 53), ("hub", HUB)},
                "rollout": inside | {("name server", 53), ("hub", HUB)},
                # What it is for, and nothing else but itself: no name server, no other pod.
                "sandbox": {("coordinator", env.AGENTS_PORT), ("sandbox", OTHER)},
                # Neither a pod beside them nor one of another namespace with the same labels.
                "neighbour": outside,
                "tenant": outside,
                "prometheus": outside | metrics | {("operator", API)},
                **{
                    name: outside
                    | {(to, env.COORDINATOR_PORT) for to in ("coordinator", "rollout")}
                    | {(name, port) for port in (API, OTHER)}
                    for name in ("operator", "api")
                },
            }
            # Each node takes the rules up by itself, and a busy one answers late.
            for name, places_of_it in wanted.items():
                wait_for(f"the rules of {name}", lambda n=name, w=places_of_it: reached(n) == w)  # type: ignore[misc]
        finally:
            cluster.devcluster("stop", "policies")
        wait_for("no rules", lambda: reached("tenant") == everything)
