"""What a cluster needs of the machine, and one clear sentence for each thing that is missing."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from devcluster.settings import ClusterError

PACKAGES = {
    "buildah": "buildah",
    "conntrack": "conntrack",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "ipset": "ipset",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "runc": "runc",
    "unshare": "util-linux",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/bin/busybox": "busybox-static",
}
# What tests need beside it.
TEST_PACKAGES = {"bwrap": "bubblewrap", "chromium": "chromium"}


def unsupported() -> str | None:
    """Why no cluster can run here, None when it can: no package helps against this."""
    if platform.system() != "Linux":
        return f"a cluster needs Linux, and this is {platform.system()}"
    if os.geteuid() != 0:
        return "a cluster needs root: its kubelets mount file systems, and make network interfaces and cgroups"
    return None


# What a control plane alone needs.
API_ONLY = ("ip", "nsenter", "openssl", "unshare")


def _missing(programs: Iterable[str] = PACKAGES) -> list[str]:
    def there(program: str) -> bool:
        return Path(program).exists() if program.startswith("/") else shutil.which(program) is not None

    return sorted({(PACKAGES | TEST_PACKAGES)[program] for program in programs if not there(program)})


def install_packages(*, tests: bool) -> None:
    missing = _missing([*PACKAGES, *(TEST_PACKAGES if tests else ())])
    if missing:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment)
        subprocess.run(
            ["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *missing], check=True, env=environment
        )


def check(*, api_only: bool = False) -> None:
    """Raises: ClusterError for what is missing."""
    reason = unsupported()
    if reason:
        raise ClusterError(reason)
    missing = _missing(API_ONLY if api_only else PACKAGES)
    if missing:
        raise ClusterError(f"missing Debian packages: {' '.join(missing)} (make cluster-packages installs them)")
    for kind in ("pid", "mnt", "net"):
        if not Path(f"/proc/self/ns/{kind}").exists():
            raise ClusterError(f"this kernel has no {kind} namespaces, in which a cluster lives")
    if subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode != 0:
        raise ClusterError("may not make namespaces: a cluster needs CAP_SYS_ADMIN and CAP_NET_ADMIN")
    if api_only:
        return
    if "overlay" not in Path("/proc/filesystems").read_text():
        raise ClusterError("this kernel has no overlay file system, which containerd needs: modprobe overlay")
    controllers = {line.split()[0] for line in Path("/proc/cgroups").read_text().splitlines()[1:]}
    for controller in ("cpu", "cpuset", "memory", "pids"):
        if controller not in controllers:
            raise ClusterError(f"this kernel has no cgroup controller {controller!r}, which kubelets need")
