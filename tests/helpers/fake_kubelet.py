"""Runs the pods of a rendered job as processes of this machine, each with a loopback address of its own: what a kubelet
does with the container's command, environment and files, as far as our programs can tell."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from dovetail.kube import names
from dovetail.operator.render.config_map import config_map
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import jobset, surplus_jobs
from dovetail.protocol.process.env import COORDINATOR_PORT
from helpers.patience import PATIENCE

Object = dict[str, Any]


class Pod:
    """One container of one pod."""

    def __init__(
        self, name: str, template: Object, index: int, address: str, token: str, folder: Path, url: str
    ) -> None:
        self.name, self.address, self.log = name, address, folder / f"{name}-{address}.log"
        (container,) = template["spec"]["containers"]
        self._container = container
        places = {names.VOLUME_MOUNT: str(folder / "files"), names.CONFIG_MOUNT: str(folder / "plan")}
        given = {"status.podIP": address, f"metadata.annotations['{names.INDEX_ANNOTATION}']": str(index)}
        self.env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        for variable in container["env"]:
            source = variable.get("valueFrom", {})
            value = variable.get("value") or given.get(source.get("fieldRef", {}).get("fieldPath", ""), token)
            for inside, outside in places.items():
                value = outside + value.removeprefix(inside) if value.startswith(inside) else value
            self.env[variable["name"]] = value
        self.env |= {"DOVETAIL_COORDINATOR": url, "HOME": str(folder / "home")}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(self._container["command"]), env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def delete(self, grace: float) -> int:
        """The preStop hook, SIGTERM, and SIGKILL when that was not heard; the exit code."""
        assert self.process is not None
        hook = self._container.get("lifecycle", {}).get("preStop")
        if hook:
            subprocess.run(self._command(hook["exec"]["command"]), env=self.env, timeout=grace, check=False)
        self.process.terminate()
        try:
            return self.process.wait(grace)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """At once, with all that it started."""
        assert self.process is not None
        for group in _groups_below(self.process.pid):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return self.process.wait(PATIENCE)

    @staticmethod
    def _command(words: list[str]) -> list[str]:
        assert words[0] == "python"
        return [sys.executable, *words[1:]]


class FakeKubelet:
    """The pods of one job, replaced when they fail, until the coordinator ends. Use as a context manager."""

    def __init__(self, context: RenderContext, folder: Path) -> None:
        self._folder = folder
        self._token = secrets.token_hex(16)
        # Addresses that no other test is likely to have.
        self._network = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(200) + 20}"
        self._used = 0
        self.url = f"http://{self._network}.1:{COORDINATOR_PORT}"
        self.run_dir = folder / "files" / names.run_dir(context.job, context.uid).removeprefix(f"{names.VOLUME_MOUNT}/")
        for name in ("files", "plan", "home"):
            (folder / name).mkdir()
        for name, text in config_map(context)["data"].items():
            (folder / "plan" / name).write_text(text)
        self._templates: dict[str, tuple[Object, int]] = {}
        for group in jobset(context)["spec"]["replicatedJobs"]:
            spec = group["template"]["spec"]
            for index in range(group["replicas"] * spec["completions"]):
                self._templates[f"{group['name']}-{index}"] = (spec["template"], index)
        self._surplus = {j["metadata"]["name"]: (j["spec"]["template"], 0) for j in surplus_jobs(context)}
        self.pods: dict[str, Pod] = {}
        self.restarts: list[str] = []

    def __enter__(self) -> FakeKubelet:
        for name in self._templates:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            if pod.process is not None and pod.process.poll() is None:
                pod.kill()

    def start(self, name: str) -> Pod:
        """A new pod, with a new address unless it is the coordinator, whose name stays."""
        template, index = (self._templates | self._surplus)[name]
        self._used += 1
        address = f"{self._network}.{1 if name == 'coordinator-0' else self._used + 1}"
        pod = Pod(name, template, index, address, self._token, self._folder, self.url)
        self.pods[name] = pod
        pod.start()
        return pod

    def surplus(self) -> list[str]:
        return list(self._surplus)

    def status(self) -> Object:
        """The coordinator's; empty while it does not answer."""
        request = urllib.request.Request(f"{self.url}/v1/status", headers={"Authorization": f"Bearer {self._token}"})
        try:
            with urllib.request.urlopen(request, timeout=5) as reply:
                return dict(json.load(reply))
        except (OSError, ValueError):
            return {}

    def step(self) -> int | None:
        """Replace what failed; the coordinator's exit code once it has one."""
        for name, pod in list(self.pods.items()):
            assert pod.process is not None
            code = pod.process.poll()
            if code is not None and name == "coordinator-0":
                return code
            if code:
                assert code != 2, f"{name} is configured wrongly: {pod.log.read_text()[-2000:]}"
                self.restarts.append(name)
                self.start(name)
        return None

    def run(self, seconds: float, until: Any = None) -> int | None:
        """Step until the coordinator ended (its exit code) or `until(status)` holds (None)."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            code = self.step()
            if code is not None:
                return code
            if until is not None and until(self.status()):
                return None
            time.sleep(0.3)
        logs = "\n".join(f"{p.name}: {p.log.read_text()[-1500:]}" for p in self.pods.values())
        raise AssertionError(f"not within {seconds:.0f} s; status {self.status()}\n{logs}")


def _groups_below(pid: int) -> list[int]:
    """Process groups of a process and all its descendants."""
    import psutil

    try:
        found = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    groups = []
    for process in found:
        try:
            groups.append(os.getpgid(process.pid))
        except ProcessLookupError:
            continue
    return list(dict.fromkeys(groups))
