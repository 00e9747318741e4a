"""The commands; see README.md."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from devcluster import addons, binaries, control_plane, dockerfiles, lifecycle, nodes, preflight, release
from devcluster.settings import NODES, REPOSITORY, Cluster, ClusterError, cluster_name, find, state_root
from devcluster.supervisor import Supervisor


def _running(arguments: argparse.Namespace) -> tuple[Cluster, Supervisor]:
    cluster = find(arguments.name)
    if cluster is None:
        raise ClusterError(f"no cluster {arguments.name} here: make cluster")
    return cluster, Supervisor(cluster)


def _up(arguments: argparse.Namespace) -> int:
    wanted = ("api_only", "kueue", "kwok", "gangs", "policies")
    cluster = lifecycle.up(arguments.name, **{name: getattr(arguments, name) for name in wanted})
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    if not lifecycle.down(arguments.name):
        print(f"no cluster {arguments.name} here", file=sys.stderr)
    return 0


def _kubeconfig(arguments: argparse.Namespace) -> int:
    print(state_root() / arguments.name / "kubeconfig")
    return 0


def _bin(_: argparse.Namespace) -> int:
    print(binaries.link_folder())
    return 0


def _build(arguments: argparse.Namespace) -> int:
    reason = preflight.unsupported()
    if arguments.where_supported and reason:
        print(f"no cluster: {reason}")
        return 0
    known = binaries.MODULES | binaries.ON_REQUEST
    unknown = set(arguments.module) - set(known)
    if unknown:
        raise ClusterError(f"no module {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    modules = arguments.module or list(binaries.MODULES)
    binaries.build_all(modules)
    for module in modules:
        print(binaries.folder(module))
    return 0


def _tools(_: argparse.Namespace) -> int:
    if shutil.which("go") is None:
        print("devcluster: without Go the tests of the Helm chart are skipped", file=sys.stderr)
        return 0
    binaries.build_all(binaries.TOOLS)
    binaries.fetch("kubernetes", "k8s.io/kubernetes")
    return 0


def _packages(arguments: argparse.Namespace) -> int:
    preflight.install_packages(tests=arguments.tests)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    cluster, supervisor = _running(arguments)
    print(json.dumps({"server": cluster.server, "processes": supervisor.ask(do="status")}, indent=1))
    return 0


def _component(arguments: argparse.Namespace) -> int:
    _, supervisor = _running(arguments)
    if arguments.command in ("stop", "restart"):
        supervisor.stop(arguments.component)
    if arguments.command in ("start", "restart"):
        supervisor.start(arguments.component)
    if arguments.command == "kill":
        supervisor.kill(arguments.component)
    return 0


def _exec(arguments: argparse.Namespace) -> int:
    _, supervisor = _running(arguments)
    node = next((node for node in NODES if node.name == arguments.node), None)
    if arguments.node and node is None:
        raise ClusterError(f"no node {arguments.node!r}: there are {', '.join(node.name for node in NODES)}")
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    path = f"{binaries.link_folder()}:{os.environ.get('PATH', os.defpath)}"
    return subprocess.run([*supervisor.enter(node), *words], env={**os.environ, "PATH": path}, check=False).returncode


def _load(arguments: argparse.Namespace) -> int:
    _, supervisor = _running(arguments)
    nodes.load_everywhere(supervisor, arguments.archive.resolve())
    return 0


def _images(arguments: argparse.Namespace) -> int:
    names = arguments.image or list(dockerfiles.FOLDERS)
    for image in dockerfiles.build(names, arguments.base, arguments.tag, arguments.requirements):
        print(image)
    return 0


def _push(arguments: argparse.Namespace) -> int:
    names = arguments.image or list(dockerfiles.FOLDERS)
    tag = arguments.as_tag or dockerfiles.released()
    pushed = dockerfiles.push(names, arguments.tag, arguments.registry, tag, arguments.insecure)
    print(release.values(arguments.registry.rstrip("/"), tag, pushed), end="")
    return 0


def _release(arguments: argparse.Namespace) -> int:
    made = release.Release(
        arguments.registry.rstrip("/"),
        arguments.tag,
        arguments.key.resolve(),
        arguments.folder.resolve(),
        arguments.requirements,
        arguments.insecure,
    )
    checks = made.publish()
    print(f"# chart values, and the packages of each image, are in {made.folder}; whoever has the public key checks:")
    print("\n".join(checks))
    return 0


def _registry(arguments: argparse.Namespace) -> int:
    cluster, _ = _running(arguments)
    nodes.allow_plain_registry(cluster, arguments.address)
    return 0


def _install(arguments: argparse.Namespace) -> int:
    cluster, _ = _running(arguments)
    addons.install_dovetail(cluster, arguments.namespace, arguments.set)
    return 0


def _user(arguments: argparse.Namespace) -> int:
    cluster, _ = _running(arguments)
    print(json.dumps(control_plane.kubeconfig(cluster, arguments.user), indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="devcluster", description="A Kubernetes cluster on this Linux machine.")
    parser.add_argument("--name", help="the cluster's name (else $DOVETAIL_CLUSTER, else dovetail)")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.set_defaults(run=run)
        return command

    command = add("up", _up, "bring it up, or add what is missing")
    command.add_argument("--api-only", action="store_true", help="no scheduler and no nodes")
    command.add_argument("--kueue", action="store_true", help="with the Kueue controller")
    command.add_argument("--kwok", action="store_true", help="with kwok, for nodes that are not there")
    command.add_argument("--gangs", action="store_true", help="with Kubernetes' own gangs, which are alpha")
    command.add_argument("--policies", action="store_true", help="with kube-router, which executes NetworkPolicies")
    add("down", _down, "end it and remove all of it")
    add("status", _status, "what runs, as JSON")
    add("kubeconfig", _kubeconfig, "print the path of the administrator's kubeconfig")
    add("user", _user, "print a kubeconfig for a test user").add_argument("user")
    add("bin", _bin, "print the folder of kubectl, helm and so on")
    command = add("build", _build, "build the programs, all of them unless told")
    command.add_argument("module", nargs="*")
    command.add_argument("--where-supported", action="store_true", help="do nothing where no cluster can run")
    add("tools", _tools, "build what the tests of the Helm chart run, where there is Go")
    command = add("packages", _packages, "install the Debian packages that are missing")
    command.add_argument("--tests", action="store_true", help="also what the tests need: a browser and bubblewrap")
    for name, help in (
        ("stop", "end a component until it is started again"),
        ("start", "start a component that was stopped"),
        ("restart", "stop and start"),
        ("kill", "SIGKILL a component: it comes back by itself"),
    ):
        add(name, _component, help).add_argument("component")
    command = add("exec", _exec, "run a command in the cluster's namespaces")
    command.add_argument("--node", help="in this node's mount namespace")
    command.add_argument("words", nargs=argparse.REMAINDER)
    add("load", _load, "load an image archive onto every node").add_argument("archive", type=Path)
    command = add("images", _images, "build the images from their Dockerfiles: operator, trainer, rollout")
    command.add_argument("image", nargs="*")
    command.add_argument("--base", help="base image (else one made by debootstrap)")
    command.add_argument("--tag", default="dev")
    command.add_argument("--requirements", default="rollout-cpu.txt", help="the rollout image's list")
    command = add("push", _push, "push these images to a registry, and print chart values that name them")
    command.add_argument("registry", help="such as registry.example.com/team")
    command.add_argument("image", nargs="*")
    command.add_argument("--tag", default="dev", help="the tag that they were built with")
    command.add_argument("--as-tag", help="their tag there (else the chart's appVersion)")
    command.add_argument("--insecure", action="store_true", help="the registry has no TLS")
    command = add("release", _release, "push images and chart, signed, with the packages of each image")
    command.add_argument("registry", help="such as registry.example.com/team")
    command.add_argument("--key", type=Path, required=True, help="cosign's private key; COSIGN_PASSWORD: its password")
    command.add_argument("--tag", default="dev", help="the tag that the images were built with")
    command.add_argument("--folder", type=Path, default=REPOSITORY / "dist/release", help="where the files go")
    command.add_argument("--requirements", default="rollout-cpu.txt", help="the rollout image's list")
    command.add_argument("--insecure", action="store_true", help="the registry has no TLS")
    command = add("registry", _registry, "let the nodes pull from a registry without TLS")
    command.add_argument("address", help="host:port")
    command = add("install", _install, "install Dovetail's chart, with images made from this checkout")
    command.add_argument("--namespace", default="dovetail-system")
    command.add_argument("--set", action="append", default=[], help="a chart value, as for helm")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        arguments.name = cluster_name(arguments.name)
        return int(arguments.run(arguments))
    except ClusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return 1
