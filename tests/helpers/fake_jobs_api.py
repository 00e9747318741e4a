"""A status API in a thread, on a fake Kubernetes API and a real coordinator's routes."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry

from dovetail.coordinator.reporting.page.page_documents import PageDocuments
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.reporting.run_records import Timeline
from dovetail.coordinator.reporting.telemetry import MetricsHistory
from dovetail.coordinator.serving.coordinator_routes import make_app
from dovetail.kube import coordinator_http, names
from dovetail.manifest.types import Stage
from dovetail.protocol.process.process_names import COORDINATOR
from dovetail.statusapi.__main__ import Http, serve
from dovetail.statusapi.api_settings import ApiSettings
from dovetail.statusapi.app import create_app
from helpers.fake_kube import FakeKube, ServerThread
from helpers.patience import PATIENCE

TOKEN = "the-jobs-own"
JOBS = "/apis/dovetail.dev/v1alpha1/namespaces/lab/rlhfjobs"
PODS = "/api/v1/namespaces/lab/pods"
ALL = {("ada", v, r) for v, r in (("list", "rlhfjobs"), ("get", "rlhfjobs"), ("list", "events"), ("list", "pods"))}


class Run:
    """What a coordinator serves of a run: real history and traces, and the status that the test sets."""

    trainers: Any = None

    def __init__(self, folder: Path) -> None:
        self.history = MetricsHistory(folder)
        self.timeline = Timeline(folder)
        self.document: dict[str, Any] = {"state": "running", "stage": "ppo", "phase": "generation", "instances": {}}

    def add(self, step: int, **metrics: float) -> None:
        self.history.add(Stage.PPO, step, metrics)

    def status(self) -> dict[str, Any]:
        return self.document

    def history_since(self, offset: int) -> dict[str, Any]:
        return self.history.since(offset)

    def trace(self, iteration: int) -> bytes:
        return self.timeline.read(iteration)


def condition(kind: str, status: str = "True", message: str = "because") -> dict[str, Any]:
    time = "2026-11-21T10:00:00Z"
    return {"type": kind, "status": status, "reason": "Tested", "message": message, "lastTransitionTime": time}


def job(name: str = "job", uid: str = "uid-1", **status: Any) -> dict[str, Any]:
    metadata = {"namespace": "lab", "name": name, "uid": uid, "creationTimestamp": "2026-11-21T09:00:00Z"}
    return {
        "apiVersion": "dovetail.dev/v1alpha1",
        "kind": "RLHFJob",
        "metadata": metadata,
        "spec": {},
        "status": status,
    }


def child(name: str, uid: str = "uid-1", **fields: Any) -> dict[str, Any]:
    owner = {"apiVersion": "dovetail.dev/v1alpha1", "kind": "RLHFJob", "name": "job", "uid": uid, "controller": True}
    return {"metadata": {"name": name, "namespace": "lab", "ownerReferences": [owner]}, **fields}


def of_job(job: str) -> dict[str, Any]:
    """What Kubernetes writes into the metadata of a pod of this Job."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": f"{job}-uid", "controller": True}
    labels = {"batch.kubernetes.io/controller-uid": f"{job}-uid", "batch.kubernetes.io/job-name": job}
    return {"labels": labels, "ownerReferences": [owner]}


def coordinator_pod(name: str = "job-coordinator-0-0-abcde", uid: str = "uid-1", **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "lab", "creationTimestamp": "2026-11-21T09:00:01Z"}
    metadata |= of_job("job-coordinator-0")
    metadata["labels"] |= names.labels("job", uid, COORDINATOR) | {names.ROLE_LABEL: COORDINATOR}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running", "podIP": "127.0.0.1"} | status}


class Api:
    """The API as it runs in a pod. The coordinator's pod has this machine's address, and a port that is free."""

    def __init__(self, folder: Path, monkeypatch: Any, **settings: Any) -> None:
        self.kube = FakeKube()
        monkeypatch.setenv("KUBECONFIG", str(self.kube.kubeconfig(folder)))
        self.run = Run(folder)
        documents = PageDocuments(RunFolder(folder))
        app = make_app(self.run, TOKEN, CollectorRegistry(), lambda q: documents.answer(q, time.time(), True))  # type: ignore[arg-type]
        self.coordinator = ServerThread(app)
        defaults = {
            "poll_seconds": 0.05,
            "auth_cache_seconds": 0.0,
            "watch_seconds": 0.0,
        }
        monkeypatch.setattr(coordinator_http, "COORDINATOR_PORT", int(self.coordinator.url.rsplit(":", 1)[1]))
        config = ApiSettings(**(defaults | settings))
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(lambda: serve(config)),
                port=0,
                http=Http,
                log_level="warning",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait(lambda: self._server.started or not self._thread.is_alive(), "the API to start")
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE)
        self.kube.users["ada-token"] = "ada"
        self.kube.rights |= ALL
        self.kube.objects[f"{JOBS}/job"] = job(conditions=[condition("Running")], stage="ppo", iteration=2)
        self.kube.objects[f"{PODS}/job-coordinator-0-0-abcde"] = coordinator_pod()
        encoded = base64.b64encode(TOKEN.encode()).decode()
        self.kube.objects["/api/v1/namespaces/lab/secrets/job-token"] = child("job-token", data={"token": encoded})

    def get(self, path: str, token: str | None = "ada-token", **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return self.client.get(path, headers=headers | options.pop("headers", {}), **options)

    def events(self, path: str, until: Callable[[str, Any], bool], last: int = 0) -> list[tuple[str, Any, str | None]]:
        """Server-sent events up to the one that `until` accepts, or the end of the stream."""
        headers = {"Authorization": "Bearer ada-token", "Last-Event-ID": str(last)}
        found: list[tuple[str, Any, str | None]] = []
        with self.client.stream("GET", path, headers=headers) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            fields: dict[str, str] = {}
            for line in reply.iter_lines():
                if line and not line.startswith(":"):
                    key, _, value = line.partition(": ")
                    fields[key] = value
                elif fields:
                    found.append((fields["event"], json.loads(fields["data"]), fields.get("id")))
                    if until(*found[-1][:2]):
                        break
                    fields = {}
        return found

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        self.coordinator.close()
        self.run.history.close()
        self.kube.close()


def wait(ready: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
