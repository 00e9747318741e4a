"""Clusters for the tests in this folder, each brought up when a test first asks for it and taken down when the tests
that follow don't need it.

DOVETAIL_TEST_CLUSTER=keep leaves them for the next run with keep; =external uses KUBECONFIG's cluster for both.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from helpers.cluster import KubeCluster, external, running, unsupported

FOLDER = __file__.rsplit("/", 1)[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unsupported()
    for item in items:
        if str(item.path).startswith(FOLDER):
            item.add_marker(pytest.mark.slow)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
    # Those of the API server alone one after the other, and the others.
    items.sort(key=lambda item: str(item.path).startswith(FOLDER) and "cluster" in getattr(item, "fixturenames", ()))


class Clusters:
    """Those that run now, by the fixture that they belong to."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[KubeCluster, ExitStack]] = {}

    def get(self, fixture: str, name: str, **options: bool) -> KubeCluster:
        """Brought up if it does not run."""
        theirs = external()
        if theirs is not None:
            return theirs
        if fixture not in self._running:
            stack = ExitStack()
            self._running[fixture] = stack.enter_context(running(name, **options)), stack
        return self._running[fixture][0]

    def end(self, needed: set[str]) -> None:
        """Take down those of other fixtures."""
        for fixture in self._running.keys() - needed:
            _, stack = self._running.pop(fixture)
            stack.close()


CLUSTERS = Clusters()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        file = [] if nextitem is None else [each for each in item.session.items if each.path == nextitem.path]
        CLUSTERS.end({name for each in file for name in getattr(each, "fixturenames", ())})


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """After an interrupt no test is torn down."""
    CLUSTERS.end(set())


@pytest.fixture(scope="module")
def api_server() -> KubeCluster:
    """etcd, API server and controller manager, in seconds: for CRDs, CEL, RBAC and server-side apply. No pod starts."""
    return CLUSTERS.get("api_server", "dovetail-api", api_only=True)


@pytest.fixture(scope="module")
def gang_server() -> KubeCluster:
    """As `api_server`, with a scheduler that has Kubernetes' own gangs, and nodes that kwok plays."""
    return CLUSTERS.get("gang_server", "dovetail-gangs", api_only=True, kwok=True, gangs=True)


@pytest.fixture(scope="module")
def cluster() -> KubeCluster:
    """Three nodes with GPUs, CoreDNS and JobSet."""
    return CLUSTERS.get("cluster", "dovetail-test")


@pytest.fixture
def namespace(cluster: KubeCluster) -> Iterator[str]:
    """A new namespace on `cluster`."""
    with cluster.namespace() as name:
        yield name
