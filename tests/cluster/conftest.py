"""Clusters for the tests in this folder, each brought up once a session, when a test first asks for it.

DOVETAIL_TEST_CLUSTER=keep leaves them for the next run; =external uses KUBECONFIG's cluster for both.
"""

from collections.abc import Iterator

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
    # Last, so that no cluster works beside the other tests.
    items.sort(key=lambda item: str(item.path).startswith(FOLDER))


@pytest.fixture(scope="session")
def api_server() -> Iterator[KubeCluster]:
    """etcd, API server and controller manager, in seconds: for CRDs, CEL, RBAC and server-side apply. No pod starts."""
    theirs = external()
    if theirs is not None:
        yield theirs
        return
    with running("dovetail-api", api_only=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[KubeCluster]:
    """Three nodes with GPUs, CoreDNS and JobSet."""
    theirs = external()
    if theirs is not None:
        yield theirs
        return
    with running("dovetail-test") as cluster:
        yield cluster


@pytest.fixture
def namespace(cluster: KubeCluster) -> Iterator[str]:
    """A new namespace on `cluster`."""
    with cluster.namespace() as name:
        yield name
