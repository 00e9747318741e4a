"""The cluster's own network: a cable to this machine, a bridge for each node, and no way further."""

import json
import subprocess

from devcluster.settings import NODES, Cluster, ClusterError, find, machine_lock, state_root
from devcluster.supervisor import Supervisor

OCTETS = range(200, 250)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _taken() -> set[int]:
    """The X of every 10.X that this machine or a cluster of ours has a use for."""
    taken = set()
    addresses = [entry["local"] for link in json.loads(_ip("-j", "addr")) for entry in link["addr_info"]]
    routes = [route["dst"] for route in json.loads(_ip("-j", "route"))]
    for address in [*addresses, *routes]:
        parts = address.split(".")
        if parts[0] == "10" and len(parts) > 1:
            taken.add(int(parts[1].split("/")[0]))
    for settings in state_root().glob("*/cluster.json"):
        other = find(settings.parent.name)
        if other is not None:
            taken.add(other.octet)
    return taken


def allocate(name: str) -> Cluster:
    """The cluster of that name, with addresses that nobody else here has."""
    with machine_lock():
        known = find(name)
        if known is not None:
            return known
        taken = _taken()
        free = [octet for octet in OCTETS if octet not in taken]
        if not free:
            raise ClusterError(f"no free network between 10.{OCTETS[0]} and 10.{OCTETS[-1]} for a cluster")
        cluster = Cluster(name, free[0])
        cluster.state.mkdir(parents=True, exist_ok=True)
        (cluster.state / "cluster.json").write_text(json.dumps({"octet": cluster.octet}))
        return cluster


def connect(cluster: Cluster, supervisor: Supervisor) -> None:
    """The cable between this machine and the cluster, and this machine's route to pods and services."""
    if subprocess.run(["ip", "link", "show", cluster.link], capture_output=True).returncode != 0:
        pid = str(supervisor.pid())
        _ip("link", "add", cluster.link, "type", "veth", "peer", "name", "uplink", "netns", pid)
    _ip("addr", "replace", f"{cluster.host}/24", "dev", cluster.link)
    _ip("link", "set", cluster.link, "up")
    inside = [
        "link set lo up",
        f"addr replace {cluster.address}/24 dev uplink",
        "link set uplink up",
        # The API server calls webhooks by their service. Any route will do: iptables gives the packet another address.
        f"route replace {cluster.services} dev uplink src {cluster.address}",
    ]
    supervisor.run("sh", "-ec", "\n".join(f"ip {command}" for command in inside))
    _ip("route", "replace", f"{cluster.prefix}.0.0/16", "via", cluster.address)


def bridges(cluster: Cluster, supervisor: Supervisor) -> None:
    """A bridge for each node, there before its kubelet, whose address is the bridge's."""
    script = [
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        # Where the kernel can: what passes between two pods of one node meets iptables too.
        "f=/proc/sys/net/bridge/bridge-nf-call-iptables; test ! -e $f || echo 1 > $f",
    ]
    for node in NODES:
        bridge = cluster.bridge(node)
        script += [
            f"ip link show {bridge} >/dev/null 2>&1 || ip link add {bridge} type bridge",
            f"ip addr replace {cluster.node_address(node)}/24 dev {bridge}",
            f"ip link set {bridge} up",
        ]
    supervisor.run("sh", "-ec", "\n".join(script))


def disconnect(cluster: Cluster) -> None:
    """Removes the cable, if it is still there: its other end and the route go with it."""
    subprocess.run(["ip", "link", "delete", cluster.link], capture_output=True, check=False)
