"""The operator's own cost: many RLHFJobs at once on nodes that kwok plays, beside the JobSet controller alone.

Clusters of hack/devcluster (root, Linux) are brought up and taken down again. In the first one as many JobSets are
created by hand as there will be jobs, equal to those that the operator makes; in a second one all objects that it
makes, each once and by no operator: what the cluster itself needs for them; in a third one the jobs. All are timed
from the first creation until all Jobs and pods exist. Then the jobs run, with coordinators that answer: what the
operator asks of the API server when nothing happens, and how long an event takes to be acted on. Prints a table and one
JSON line. JOBS (1000), QUIET: seconds of nothing (30), EVENTS (200), CLUSTER: its name (bench).

Everything shares this machine's cores, so CPU seconds of each program until all pods are ready are told beside the
times: they are much the same on a busy machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Clusters and operators are the tests' business too.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "hack/devcluster"))

import psutil
import yaml
from operator_scale.stage import claim, cpu, manifest, pod_template, stage

from dovetail.kube.connection import KubeError, connect
from dovetail.kube.resources import BY_KIND
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.manifest.types import KIND
from dovetail.operator.cluster.client import Client
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import jobset
from dovetail.operator.render.objects import secret, supporting_objects
from dovetail.planner.make_plan import make_plan
from helpers.cluster import KubeCluster, wait_for
from helpers.operator_process import OperatorProcess, install, kubeconfig, operator

ALONE, BY_HAND, OPERATED = "alone", "by-hand", "operated"
DEADLINE = 900.0
POLL_SECONDS, LIST_SECONDS = 0.5, 5.0  # a look takes the API server time as well
AT_A_TIME = 16
PODS, JOBS_OF_A_JOB = 4, 4
IMAGE = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072"}  # as operator/Dockerfile has it


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is to be taken down
    jobs, quiet = int(os.environ.get("JOBS", "1000")), float(os.environ.get("QUIET", "30"))
    events = min(jobs, int(os.environ.get("EVENTS", "200")))
    name = os.environ.get("CLUSTER", "bench")
    facts: dict[str, Any] = {"jobs": jobs}
    # A cluster each: thousands of pods that are there already would slow the second one's.
    for key, namespace in (("jobset_alone", ALONE), ("all_objects_by_hand", BY_HAND)):
        with cluster_for(name, namespace) as cluster, costs(facts, key, name, cluster, jobs):
            facts[key] = asyncio.run(unoperated(jobs, namespace))
        print(f"{key}: {facts[key]}", file=sys.stderr, flush=True)
    with (
        cluster_for(name, OPERATED) as cluster,
        tempfile.TemporaryDirectory() as folder,
        operating(cluster, Path(folder)) as process,
    ):
        usage = Usage(process)
        with costs(facts, "operator", name, cluster, jobs):
            facts["operator"] = asyncio.run(operated(jobs, usage))
        print(f"operator: {facts['operator']}", file=sys.stderr, flush=True)
        facts["quiet"] = asyncio.run(at_rest(quiet, usage))
        facts["events"] = asyncio.run(reactions(events))
        facts["memory_mib"] = round(usage.peak / 2**20, 1)
    for key in ("jobset_alone", "all_objects_by_hand"):
        facts[f"times_{key}"] = round(facts["operator"]["all_pods_s"] / facts[key]["all_pods_s"], 3)
    report(facts)
    return 0


@contextmanager
def cluster_for(name: str, namespace: str) -> Iterator[KubeCluster]:
    """A new one, with the CRDs, roles and the volume that the jobs of the namespace name."""
    with stage(name) as cluster:
        meta = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        cluster.apply(meta, claim(namespace), namespace=namespace)
        install(cluster, [namespace])
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
        yield cluster


@contextmanager
def operating(cluster: KubeCluster, folder: Path) -> Iterator[OperatorProcess]:
    template = folder / "pod-template.yaml"
    template.write_text(yaml.safe_dump(pod_template()))
    config = kubeconfig(cluster, folder)
    variables = {"DOVETAIL_POD_TEMPLATE": str(template), **IMAGE}
    with operator(config, folder, "bench", [OPERATED], **variables) as process:
        wait_for("leadership", process.leads, 120)
        yield process
        process.stop()


@contextmanager
def costs(facts: dict[str, Any], key: str, name: str, cluster: KubeCluster, jobs: int) -> Iterator[None]:
    """Adds to facts[key] what a job costs the cluster's programs in the block: CPU milliseconds, requests."""
    used, asked = cpu(name), requests(cluster)
    yield
    spent, told = cpu(name), requests(cluster) - asked
    facts[key]["cpu_ms_of_a_job"] = {program: milli((spent[program] - used[program]) / jobs) for program in used}
    facts[key]["api_requests_of_a_job"] = {what: round(count / jobs, 2) for what, count in told.most_common(30)}
    facts[key]["all_api_requests_of_a_job"] = round(told.total() / jobs, 1)


def requests(cluster: KubeCluster) -> Counter[str]:
    """What the API server was asked so far by everybody, watches aside, such as `PATCH pods/status`."""
    found: Counter[str] = Counter()
    for line in cluster.kubectl("get", "--raw", "/metrics").splitlines():
        if line.startswith("apiserver_request_total{") and 'verb="WATCH"' not in line:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            what = "/".join(part for part in (labels["resource"], labels["subresource"]) if part)
            found[f"{labels['verb']} {what}"] += int(float(line.rpartition(" ")[2]))
    return found


class Usage:
    """What the operator has used of memory and CPU, its planner's process with it, and of the API server."""

    def __init__(self, process: OperatorProcess) -> None:
        self._process = process
        self._cpu: dict[int, float] = {}  # by process, for the planner's may end
        self.peak = 0

    def look(self) -> dict[str, float]:
        """CPU seconds, requests so far; keeps the highest memory."""
        whole = [psutil.Process(self._process.process.pid)]
        whole += whole[0].children(recursive=True)
        self.peak = max(self.peak, sum(p.memory_info().rss for p in whole))
        self._cpu |= {p.pid: sum(p.cpu_times()[:2]) for p in whole}
        with urllib.request.urlopen(f"http://127.0.0.1:{self._process.port}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
        reconciles = sum(
            value for name, value in values.items() if name.startswith("dovetail_operator_reconciles_total")
        )
        return {
            "cpu": sum(self._cpu.values()),
            "requests": values["dovetail_operator_api_requests_total"],
            "reconciles": reconciles,
        }


async def submit(make: Callable[[int], list[dict[str, Any]]], count: int) -> None:
    """Create what `make` gives for each number, some numbers at a time."""
    api = await connect()
    try:
        client, numbers = Client(api), iter(range(count))

        async def create() -> None:
            for number in numbers:
                for thing in make(number):
                    await client.create(thing)

        await asyncio.gather(*(create() for _ in range(AT_A_TIME)))
    finally:
        await api.close()


async def counts(client: Client, namespace: str, *kinds: str) -> dict[str, int]:
    """How many of each kind there are, at the price of one each."""
    found = {}
    for kind in kinds:
        page = await client._call("GET", BY_KIND[kind].path(namespace), {"limit": "1"})
        found[kind] = len(page["items"]) + int(page["metadata"].get("remainingItemCount") or 0)
    return found


async def unoperated(jobs: int, namespace: str) -> dict[str, float]:
    """JobSets created by hand; in BY_HAND everything that the operator makes for a job, and the job."""
    document = manifest("job-0", namespace)
    job = parse(document)
    job = job.model_copy(update={"spec": resolve(job.spec)})
    plan, settings = make_plan(job.spec), OperatorSettings(pod_template=pod_template())

    def make(number: int) -> list[dict[str, Any]]:
        named = job.model_copy(update={"metadata": job.metadata.model_copy(update={"name": f"job-{number}"})})
        context = RenderContext(named, "0" * 36, plan, settings)
        things = [jobset(context)]
        if namespace == BY_HAND:
            told = manifest(f"job-{number}", namespace)
            things = [told, *supporting_objects(context), secret(context, "by hand"), *things]
        else:
            for replicated in things[0]["spec"]["replicatedJobs"]:
                replicated["template"]["spec"]["template"]["spec"]["serviceAccountName"] = "default"
        for thing in things:
            thing["metadata"].pop("ownerReferences", None)
        return things

    facts = await timed(jobs, namespace, make, [])
    await until("all pods are ready", lambda: ready(jobs, namespace), lambda: None)
    return facts


async def operated(jobs: int, usage: Usage) -> dict[str, float]:
    """RLHFJobs, of which the operator makes everything."""
    facts = await timed(jobs, OPERATED, lambda i: [manifest(f"job-{i}", OPERATED)], ["PodDisruptionBudget"], usage.look)
    facts["jobs_per_second"] = round(jobs / facts["all_children_s"], 2)
    await until("all jobs run", lambda: running(jobs), usage.look)
    # Until what was changed last has been acted on.
    before = usage.look()["requests"]
    while True:
        await asyncio.sleep(5)
        now = usage.look()
        if now["requests"] == before:
            break
        before = now["requests"]
    mine = {f"{what}_per_job": round(now[what] / jobs, 2) for what in ("requests", "reconciles")}
    return facts | mine | {"cpu_s": round(now["cpu"], 1), "own_cpu_ms_of_a_job": milli(now["cpu"] / jobs)}


async def timed(
    jobs: int,
    namespace: str,
    make: Callable[[int], list[dict[str, Any]]],
    more: list[str],
    look: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Seconds from the first creation until so many JobSets, Jobs, pods and whatever else exist."""
    api = await connect()
    try:
        client, facts = Client(api), {}
        wanted = {"JobSet": jobs, **dict.fromkeys(more, jobs), "Job": JOBS_OF_A_JOB * jobs, "Pod": PODS * jobs}
        began = time.monotonic()
        submitting = asyncio.create_task(submit(make, jobs))
        missing = dict(wanted)
        while missing:
            assert time.monotonic() - began < DEADLINE, f"not within {DEADLINE:.0f} s: {missing}"
            await asyncio.sleep(POLL_SECONDS)
            look()
            there = await counts(client, namespace, *missing)
            now = round(time.monotonic() - began, 2)
            if submitting.done():
                submitting.result()
                facts.setdefault("submitted_s", now)
            for kind in [kind for kind in missing if there[kind] >= wanted[kind]]:
                del missing[kind]
                facts["all_pods_s" if kind == "Pod" else f"all_{kind.lower()}s_s"] = now
        await submitting
        return facts | {"all_children_s": now}
    finally:
        await api.close()


async def until(what: str, check: Callable[[], Awaitable[bool]], look: Callable[[], object]) -> None:
    began = time.monotonic()
    while not await check():
        assert time.monotonic() - began < DEADLINE, f"{what}: not within {DEADLINE:.0f} s"
        await asyncio.sleep(LIST_SECONDS)
        look()


async def everything(kind: str, namespace: str) -> list[dict[str, Any]]:
    """All of a kind, as the API server's cache has it."""
    api = await connect()
    try:
        page = await Client(api)._call("GET", BY_KIND[kind].path(namespace), {"resourceVersion": "0"})
    finally:
        await api.close()
    return list(page["items"])


async def ready(jobs: int, namespace: str) -> bool:
    """Whether the JobSets made by hand say so of all their Jobs."""
    found = await everything("JobSet", namespace)
    parts = [part for jobset in found for part in jobset.get("status", {}).get("replicatedJobsStatus") or []]
    return sum(part["ready"] for part in parts) == jobs * JOBS_OF_A_JOB


async def running(jobs: int) -> bool:
    found = await everything(KIND, OPERATED)
    states = [{c["type"]: c["status"] for c in job.get("status", {}).get("conditions", [])} for job in found]
    return sum(s.get("Running") == "True" for s in states) == jobs


async def at_rest(seconds: float, usage: Usage) -> dict[str, float]:
    """All jobs run and nothing happens; their coordinators are asked how far they are."""
    before = usage.look()
    await asyncio.sleep(seconds)
    after = usage.look()
    cpu = (after["cpu"] - before["cpu"]) / seconds
    return {"seconds": seconds, "requests": after["requests"] - before["requests"], "cpu_cores": round(cpu, 3)}


async def reactions(events: int) -> dict[str, float]:
    """Somebody deletes an object of a job, ten times a second: how long until it is back, as a watch tells it."""
    api, seconds = await connect(), {}
    client = Client(api, seconds=DEADLINE)
    try:
        gone: dict[str, float] = {}
        ready = asyncio.Event()

        async def watch() -> None:
            path = BY_KIND["PodDisruptionBudget"].path(OPERATED) + "?watch=1"
            request = await api.param_serialize("GET", path, auth_settings=["BearerToken"])
            reply = await api.call_api(*request)
            ready.set()
            async for line in reply.response.content:
                event = json.loads(line)
                name = event["object"]["metadata"]["name"]
                if event["type"] == "DELETED":
                    gone[name] = time.monotonic()
                elif event["type"] == "ADDED" and name in gone:
                    seconds[name] = time.monotonic() - gone[name]
                    if len(seconds) == events:
                        return

        watching = asyncio.create_task(watch())
        await asyncio.wait({asyncio.create_task(ready.wait()), watching}, return_when=asyncio.FIRST_COMPLETED)
        for number in range(events):
            await client.delete("PodDisruptionBudget", OPERATED, f"job-{number}")
            await asyncio.sleep(0.1)
        await asyncio.wait_for(watching, DEADLINE)
    except KubeError as error:
        raise AssertionError(str(error)) from error
    finally:
        await api.close()
    values = sorted(seconds.values())
    return {"events": events, "median_ms": milli(statistics.median(values)), "p99_ms": milli(quantile(values, 0.99))}


def milli(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def told(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value}" for name, value in figures.items())


def report(facts: dict[str, Any]) -> None:
    made, quiet, event = facts["operator"], facts["quiet"], facts["events"]
    alone, by_hand = facts["jobset_alone"], facts["all_objects_by_hand"]
    lines = [
        f"{facts['jobs']} jobs of {PODS} pods",
        f"all pods exist       {made['all_pods_s']:.1f} s; JobSet alone {alone['all_pods_s']:.1f} s: "
        f"{facts['times_jobset_alone']:.2f} times; the same objects by hand {by_hand['all_pods_s']:.1f} s: "
        f"{facts['times_all_objects_by_hand']:.2f} times",
        f"all children exist   {made['all_children_s']:.1f} s: {made['jobs_per_second']} jobs/s",
        f"requests of a job    {made['requests_per_job']} of {made['all_api_requests_of_a_job']}; JobSet alone "
        f"{alone['all_api_requests_of_a_job']}, by hand {by_hand['all_api_requests_of_a_job']}",
        f"CPU ms of a job      operator {made['own_cpu_ms_of_a_job']}, {told(made['cpu_ms_of_a_job'])}",
        f"JobSet alone         {told(alone['cpu_ms_of_a_job'])}",
        f"by hand              {told(by_hand['cpu_ms_of_a_job'])}",
        f"event to applied     median {event['median_ms']} ms, 99th percentile {event['p99_ms']} ms",
        f"at rest              {quiet['requests']:.0f} requests in {quiet['seconds']:.0f} s, {quiet['cpu_cores']} CPUs",
        f"memory               {facts['memory_mib']} MiB; CPU until all run {made['cpu_s']} s",
    ]
    print("\n".join(lines), file=sys.stderr)
    facts["own_peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    print(json.dumps(facts))


if __name__ == "__main__":
    sys.exit(main())
