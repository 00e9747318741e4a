"""Whether NetworkPolicies can be executed on this machine, and where a pod can connect to."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from helpers.cluster import KubeCluster

REACH = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reached(place):
    try:
        socket.create_connection(tuple(place), timeout=2).close()
    except OSError:
        return False
    return True
places = json.loads(sys.argv[1])
with ThreadPoolExecutor(20) as pool:
    print(json.dumps(list(pool.map(reached, places))))
"""


def lacking() -> str | None:
    """Why policies cannot be executed here."""
    if not Path("/proc/sys/net/bridge").exists():
        return "what passes between two pods of a node meets no rule of this kernel"
    if subprocess.run(["unshare", "--net", "ipset", "list"], capture_output=True).returncode != 0:
        return "this kernel has no sets of addresses (ipset)"
    return None


def reached(cluster: KubeCluster, namespace: str, pod: str, places: Sequence[tuple[str, int]]) -> list[bool]:
    """Which addresses and ports the pod, which has Python, can connect to."""
    words = ("exec", pod, "-n", namespace, "--", "python", "-c", REACH, json.dumps([list(place) for place in places]))
    return [bool(each) for each in json.loads(cluster.kubectl(*words))]
