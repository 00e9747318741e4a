"""Starts a cluster's first process, and talks to it."""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from devcluster.settings import Cluster, ClusterError, Node


def wait_for(what: str, check: Any, seconds: float, interval: float = 0.1) -> Any:
    """The first true value of `check`; ClusterError when the deadline passes."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {seconds:.0f} s")
        time.sleep(interval)


class Supervisor:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._socket = str(cluster.state / "init.sock")

    def pid(self) -> int | None:
        """The first process's id out here, None when the cluster does not run."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(30)
                connection.connect(self._socket)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
        return int(struct.unpack("3i", credentials)[0])

    def launch(self) -> None:
        """Does nothing when it runs."""
        if self.pid() is not None:
            return
        self.cluster.logs.mkdir(parents=True, exist_ok=True)
        namespaces = ["--pid", "--mount-proc", "--mount", "--net", "--ipc", "--uts"]
        init = [sys.executable, str(Path(__file__).with_name("init.py")), str(self.cluster.state)]
        with (self.cluster.logs / "init.log").open("ab") as log:
            subprocess.Popen(
                ["unshare", "--fork", *namespaces, "--", *init],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(Path.home()), "LC_ALL": "C.UTF-8"},
            )
        wait_for("the cluster's first process", self.pid, 30)

    def terminate(self) -> None:
        """Ends every process of the cluster, at once."""
        pid = self.pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            wait_for(f"the end of process {pid}", lambda: not Path(f"/proc/{pid}").exists(), 60)

    def ask(self, **request: Any) -> dict[str, Any]:
        """The state of all components after the request."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(120)
                connection.connect(self._socket)
                connection.sendall(json.dumps(request).encode() + b"\n")
                reply = json.loads(connection.makefile().readline())
        except OSError as error:
            raise ClusterError(f"cluster {self.cluster.name} does not run ({error}): make cluster") from error
        if "error" in reply:
            raise ClusterError(f"{request}: {reply['error']}")
        return dict(reply["processes"])

    def start(self, name: str, argv: list[str] | None = None, environment: dict[str, str] | None = None) -> None:
        """Does nothing when it runs; without `argv` as it was started before."""
        if argv is None:
            self.known(name)
            self.ask(do="start", name=name)
            return
        program = shutil.which(argv[0])
        if program is None:
            raise ClusterError(f"{argv[0]} is not there: make cluster-packages, then make cluster-binaries")
        self.ask(do="start", name=name, argv=[program, *argv[1:]], environment=environment or {})

    def known(self, name: str) -> None:
        names = self.ask(do="status")
        if name not in names:
            raise ClusterError(f"no component {name!r}: there are {', '.join(sorted(names))}")

    def stop(self, name: str, seconds: float = 30) -> None:
        """Returns when the process is gone, killed after so many seconds; it stays away until started."""
        self.known(name)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.ask(do="signal", name=name, signal=int(number), wanted=False)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if self.ask(do="status")[name]["pid"] is None:
                    return
                time.sleep(0.05)
        raise ClusterError(f"{name} does not end, not even by SIGKILL")

    def kill(self, name: str) -> None:
        """SIGKILL: it is started again, as a machine's service manager would."""
        self.known(name)
        self.ask(do="signal", name=name, signal=int(signal.SIGKILL), wanted=True)

    def enter(self, node: Node | None = None) -> list[str]:
        """The words that go before a command to run it in the cluster's namespaces, or a node's."""
        pid = self.pid()
        if pid is None:
            raise ClusterError(f"cluster {self.cluster.name} does not run: make cluster")
        words = ["nsenter", "--target", str(pid), "--pid", "--mount", "--net", "--ipc", "--uts", "--"]
        if node is not None:
            holder = self.ask(do="status").get(f"node-{node.name}", {}).get("pid")
            if holder is None:
                raise ClusterError(f"node {node.name} does not run: make cluster")
            words += ["nsenter", "--target", str(holder), "--mount", "--"]
        return words

    def run(self, *command: str, node: Node | None = None, check: bool = True) -> str:
        """What the command, run in the namespaces, wrote to its standard output."""
        done = subprocess.run(
            [*self.enter(node), *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        if check and done.returncode != 0:
            raise ClusterError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout
