"""What all tests share: this file's folder is on sys.path, so that tests/helpers is importable as `helpers`.

`make test` runs four workers of pytest-xdist. Each test file is run by one worker, all that use the cluster with nodes
by the same one, and all that use API servers by another. Two workers run these and whole jobs, one after the other, and
the others the rest beside them (helpers/lanes.py)."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from helpers import forked_workers

# An example's wall-clock time says more about the machine's load than about the code. The examples are always the same,
# so that a test fails for a change and not by chance. `make test-nightly` looks for others.
settings.register_profile("dovetail", deadline=None, derandomize=True)
settings.register_profile("fast", deadline=None, derandomize=True, max_examples=25)  # of `make test-fast`
settings.register_profile("nightly", deadline=None, derandomize=False)
settings.load_profile("dovetail")

# Of tests/cluster, those that run on the three nodes, and those that begin clusters of their own. The others need API
# servers without nodes.
ON_NODES = {
    "test_devcluster.py",
    "test_faults.py",
    "test_kueue.py",
    "test_network_policies.py",
    "test_operator.py",
    "test_sandbox_job.py",
}
OWN_CLUSTERS = {"test_getting_started.py", "test_multikueue.py"}
# Of a run by several workers: the long ones first. The many short ones come last and fill up what is left.
ORDER = {"cluster": 0, "api server": 1, "e2e": 2, "own clusters": 3, "schedules": 4, "vllm": 5, "unit": 6}
# Tests that share something slow to begin with, which one worker alone does for all: numba compiles the schedules'
# kernels, the examples' placements are searched, and vLLM is imported.
TOGETHER = {
    "schedules": (
        "pipelines/",
        *("planner/test_activation_limit.py", "planner/test_division.py", "planner/test_placement_dedicated.py"),
        *(
            "planner/test_placement_examples.py",
            "planner/test_placement_job.py",
            "planner/test_planner_decisions.py",
            "planner/test_planner_schedules.py",
            "coordinator/test_training_schedule.py",
        ),
    ),
    "vllm": (
        *("rollout/test_compat.py", "rollout/test_kv_connector.py", "rollout/test_model_infos.py"),
        "rollout/test_rollout_rows.py",
        *("rollout/test_rollout_sampler.py", "planner/test_server_degrees.py"),
    ),
}
# Those that start clusters or whole jobs.
HEAVY = {"cluster", "own clusters", "api server", "e2e"}
SHARING = {"cluster", "own clusters", "api server", "nullgpu", *TOGETHER}
# A test without the mark slow needs half of this at most, beside what it is the first to import or compile.
FAST_CPU_SECONDS = 1.0
BEGAN = pytest.StashKey[float]()
# The files whose import has begun a thread.
THREADED: list[str] = []


gc.disable()  # until all tests are collected: what is imported stays
# Some machines turn Python's cache of compiled modules off. Every process of a test would then compile torch anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if "PYTEST_XDIST_WORKER" in os.environ:
    # That of the workers, who list their tests alike. Processes that tests start have one each, as users' processes do.
    os.environ.pop("PYTHONHASHSEED", None)


def below_tests(file: Path) -> tuple[str, ...]:
    """The parts of its path below tests/."""
    return file.parts[len(file.parts) - file.parts[::-1].index("tests") :]


def part_of(file: Path) -> str:
    """The name of its folder in tests/, or of the part of it whose tests share something."""
    folder, *below = below_tests(file)
    if folder == "cluster" and file.name not in ON_NODES:
        return "own clusters" if file.name in OWN_CLUSTERS else "api server"
    if folder == "unit":
        return next((part for part, names in TOGETHER.items() if "/".join(below).startswith(names)), folder)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: an id with an address differs between workers; give the test ids")
        if below_tests(item.path)[0] != "unit" and item.get_closest_marker("slow") is None:
            raise pytest.UsageError(f"{item.nodeid}: give it the mark slow, or move it to tests/unit")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: ORDER.get(part_of(item.path), 3))
    else:
        # One process alone comes to the clusters last: nothing then runs beside them.
        items.sort(key=lambda item: below_tests(item.path)[0] == "cluster")


def cpu_seconds() -> float:
    """User and system time of this process and of the processes that it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[BEGAN] = cpu_seconds()
    if (nursery := sys.modules.get("helpers.nursery")) is not None:
        nursery.NURSERY.refused = None if item.get_closest_marker("slow") else item.nodeid
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    speed = "fast" if item.get_closest_marker("slow") is None else "slow"
    item.user_properties.append((speed, cpu_seconds() - item.stash[BEGAN]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The dearest files, and the fast tests that are not fast. Time of the CPU depends less on what else the machine
    does than the clock's."""
    reports = [report for each in terminalreporter.stats.values() for report in each if hasattr(report, "when")]
    ends = [(report.nodeid, dict(report.user_properties)) for report in reports if report.when == "teardown"]
    files = Counter[str]()
    for name, taken in ends:
        files[name.partition("::")[0]] += sum(taken.get(speed, 0.0) for speed in ("fast", "slow"))
    if len(files) > 1:
        terminalreporter.section(f"{files.total():.0f} CPU seconds, of which")
        terminalreporter.write("".join(f"{seconds:6.1f} {name}\n" for name, seconds in files.most_common(20)))
    long = sorted(
        ((taken["fast"], name) for name, taken in ends if taken.get("fast", 0.0) > FAST_CPU_SECONDS), reverse=True
    )
    if long:
        terminalreporter.section(f"more than {FAST_CPU_SECONDS:.0f} CPU second without the mark slow")
        terminalreporter.write("".join(f"{seconds:6.1f} {name}\n" for seconds, name in long))


def threads() -> int:
    """Those of this process, Python's and others."""
    return len(list(Path("/proc/self/task").glob("*")))


THREADS = threads()


PROVED: dict[str, Any] = {}


@pytest.fixture
def proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dovetail validate --deep` proves a model in processes of its own, for some CPU seconds. A worker proves
    models of equal configurations once."""
    from dovetail.tools import model_check

    prove = model_check.prove_model

    def once(ref: Any, scratch: Path) -> Any:
        stated = ref.scratch.model_dump_json() if ref.scratch else Path(ref.path, "config.json").read_text()
        if stated not in PROVED:
            PROVED[stated] = prove(ref, scratch)
        return PROVED[stated]

    monkeypatch.setattr(model_check, "prove_model", once)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    # With more than one, torch has threads of its own.
    if os.environ.get("OMP_NUM_THREADS") == "1" and not forked_workers.COLLECTED and threads() > THREADS:
        THREADED.append(report.nodeid)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Test files import neither vLLM, which takes five seconds that most runs don't need, nor pyarrow, whose threads
    would keep the workers from being forked.

    A million objects of imported modules live as long as the tests. Else each `gc.collect()` would visit them."""
    if named := sorted({"vllm", "pyarrow"} & sys.modules.keys()):
        raise pytest.UsageError(f"a test file imports {named[0]} when it is imported; let it use helpers.lazy")
    if THREADED and threads() > THREADS:  # no error: what a library does when it is imported depends on the machine
        print(f"{THREADED[0]} starts a thread when it is imported, so workers cannot be forked.", file=sys.stderr)
    names = {item.nodeid for item in session.items}
    if named := sorted(names ^ (forked_workers.COLLECTED or names)):
        raise pytest.UsageError(f"{named[0]} is found once only; give parametrize a list, not an iterator")
    forked_workers.COLLECTED |= names
    forked_workers.keep_path()
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    if sys.platform == "linux":
        forked_workers.begin(config, specs)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Those that share something are handed out as if they were one file."""
    from helpers.lanes import Lanes

    def scope_of(nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        part = part_of(Path(file))
        return part if part in SHARING else file

    config.option.loadscopereorder = False
    return Lanes(config, log, scope_of, lambda scope: (scope if scope in SHARING else part_of(Path(scope))) in HEAVY)
