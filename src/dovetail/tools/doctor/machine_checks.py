"""The checks of `dovetail doctor` on every machine: Python, packages, processors, memory, disk and ports. Functions
that judge measurements are separate from those that measure, so that they can be tested on any machine."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from dovetail.gpus.nvidia_driver import BrokenDriver, NoDriver, ask_driver, cuda_devices
from dovetail.launch.ports import PortReservation
from dovetail.protocol.errors import RunError
from dovetail.rollout.versions import installed, version_problem
from dovetail.tools.doctor.finding import Finding, State
from dovetail.tools.doctor.gpu_checks import SHARED, check_gpus, shared_memory

GIB = 2**30
# The same range as in pyproject.toml.
PYTHON_FROM, PYTHON_BEFORE = (3, 11), (3, 14)
# The quickstart needs these. It has two trainer ranks, two vLLM servers and two scorers of a tiny model.
LEAST_CPUS, LEAST_MEMORY = 2, 8 * GIB
# A run keeps checkpoints and exports of each model. A hub's model of 1B parameters has 2 GB.
LITTLE_DISK, LEAST_DISK = 20 * GIB, GIB
# The open files of a coordinator that generates some hundred samples at once.
OPEN_FILES = 1024
# The number of processes of a job with a few groups.
PORTS = 16
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_machine(missing: Callable[[], list[tuple[str, str]]], runs: Path) -> Iterator[Finding]:
    """Yields each finding as soon as it is known. `missing` returns the missing parts of the installation, each with
    the command that installs it. `runs`: the folder of runs."""
    yield python_found(sys.version_info[:2], sys.platform)
    yield packages_found(missing())
    if (found := installed()) is not None and (problem := version_problem(found[1])):
        says, _, mend = problem.partition("; ")
        yield Finding("vLLM", "problem", says, mend)
    yield cpus_found(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield memory_size(_memory())
    yield shared_memory(os.statvfs(SHARED).f_frsize * os.statvfs(SHARED).f_blocks if SHARED.is_dir() else 0)
    yield from disks(runs)
    yield files_found(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield ports_found()


def check_gpus_if_any() -> Iterator[Finding]:
    """Yields the findings of `check_gpus` if there is a GPU or a driver. If not, it yields one that says that jobs run
    on CPUs."""
    try:
        ask_driver()
    except NoDriver as error:
        if not cuda_devices():
            yield Finding("GPUs", "skipped", "there is no NVIDIA GPU, so jobs run on CPUs")
            return
        yield Finding("GPUs", "problem", str(error), "install NVIDIA's driver, or its container toolkit in a container")
        return
    except BrokenDriver:
        pass  # check_gpus says why
    # check_machine tells the size of /dev/shm.
    yield from (finding for finding in check_gpus() if finding.check != "shared memory")


def python_found(version: tuple[int, int], platform: str) -> Finding:
    says = f"Python {version[0]}.{version[1]} on {platform}"
    if platform != "linux":
        return Finding("Python", "problem", says, "run jobs on Linux, or in one of the images")
    if not PYTHON_FROM <= version < PYTHON_BEFORE:
        return Finding("Python", "problem", says, "make an environment with Python 3.11, 3.12 or 3.13")
    return Finding("Python", "ok", says)


def packages_found(missing: list[tuple[str, str]]) -> Finding:
    """Judges the installation. `missing`: the extras that are not installed, each with the command that installs it."""
    if missing:
        names = " and ".join(name for name, _ in missing)
        return Finding("packages", "problem", f"jobs need {names}", f"install it: {missing[0][1]}")
    return Finding("packages", "ok", "coordinator, trainer and vLLM are installed")


def cpus_found(count: int) -> Finding:
    says = f"{count} CPU{'s' * (count > 1)} for this process"
    if count < LEAST_CPUS:
        return Finding("CPUs", "warning", says, f"give the machine or container {LEAST_CPUS} or more")
    return Finding("CPUs", "ok", says, figures={"count": count})


def memory_size(size: int) -> Finding:
    """Judges the memory. `size`: the bytes that this process may use."""
    says, figures = f"{size / GIB:.1f} GiB of memory", {"gib": round(size / GIB, 1)}
    if size < LEAST_MEMORY:
        mend = f"use a machine or container with {LEAST_MEMORY // GIB} GiB, which a first run needs"
        return Finding("memory", "warning", says, mend, figures)
    return Finding("memory", "ok", says, figures=figures)


def disks(runs: Path) -> Iterator[Finding]:
    """Checks the disk of runs, and the disk of hub models if it is another one."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    seen: set[int] = set()
    for name, path, mend in (
        ("disk of runs", runs, "free some space, or give dovetail run --run-dir on a larger disk"),
        ("disk of models", Path(cache).expanduser(), "free some space, or set HF_HUB_CACHE to a larger disk"),
    ):
        there = next(p for p in (path.resolve(), *path.resolve().parents) if p.exists())
        if os.stat(there).st_dev not in seen:
            seen.add(os.stat(there).st_dev)
            yield disk_found(name, there, shutil.disk_usage(there).free, os.access(there, os.W_OK), mend)


def disk_found(name: str, path: Path, free: int, writable: bool, mend: str) -> Finding:
    """Judges a disk. `free`: its free bytes."""
    says, figures = f"{free / GIB:.1f} GiB are free at {path}", {"free_gib": round(free / GIB, 1)}
    if not writable:
        return Finding(
            name, "problem", f"{path} cannot be written", mend.replace("free some space", "change its rights")
        )
    state: State = "problem" if free < LEAST_DISK else "warning" if free < LITTLE_DISK else "ok"
    return Finding(name, state, says, mend if state != "ok" else "", figures)


def files_found(soft: int, hard: int) -> Finding:
    """Judges the limits of open files. A run raises the soft limit itself."""
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        says = f"a process may have {hard} files open, which is too few for many samples at once"
        return Finding("open files", "warning", says, f"raise the limit: ulimit -Hn {OPEN_FILES} as root")
    return Finding("open files", "ok", f"a process may have {'any number of' if hard < 0 else hard} files open")


def ports_found() -> Finding:
    """Checks whether the processes of a job can listen on this machine."""
    reservation = PortReservation()
    try:
        reservation.reserve(map(str, range(PORTS)))
    except RunError as error:
        says, _, mend = str(error).partition("; ")
        return Finding("ports", "problem", says, mend)
    finally:
        reservation.close()
    return Finding("ports", "ok", f"{PORTS} free TCP ports were found on 127.0.0.1")


def _memory() -> int:
    """The bytes of the machine's memory, or the container's limit if that is lower."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(size, int(_LIMIT.read_text()))
    except (OSError, ValueError):
        return size
