"""The kernel's settings that kubelets change for the whole machine. They are noted before the first node starts, and
set back when the last cluster is gone."""

import json
from pathlib import Path

from devcluster.settings import machine_lock, state_root

# What a kubelet sets (k8s.io/kubernetes/pkg/kubelet/cm), and no namespace holds.
NAMES = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
PROC = Path("/proc/sys")


def _kept() -> Path:
    return state_root() / ".sysctls.json"


def keep(proc: Path = PROC) -> None:
    """Note the machine's values, unless an earlier cluster's kubelets may have changed them already."""
    with machine_lock():
        if not _kept().exists():
            values = {name: (proc / name).read_text() for name in NAMES if (proc / name).exists()}
            _kept().write_text(json.dumps(values))


def restore(proc: Path = PROC) -> None:
    """Set the noted values, if no cluster is left."""
    with machine_lock():
        if not _kept().exists() or any(state_root().glob("*/cluster.json")):
            return
        for name, value in json.loads(_kept().read_text()).items():
            if (proc / name).read_text() != value:
                (proc / name).write_text(value)
        _kept().unlink()
