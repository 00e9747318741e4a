"""The private parts of other packages that the operator uses are where they were."""

import inspect
from importlib.metadata import version

import pytest

from dovetail.operator import compat


def parts():
    """What must hold, by a sentence that says what has moved."""
    watch = inspect.signature(compat.kopf_watching.infinite_watch).parameters
    yield "kopf: queueing.watcher", inspect.iscoroutinefunction(compat.kopf_queueing.watcher)
    yield (
        "kopf: arguments of watching.infinite_watch",
        {"settings", "resource", "namespace", "operator_paused"} <= set(watch),
    )
    yield "kopf: watching.Bookmark", inspect.isclass(compat.kopf_watching.Bookmark)
    yield "kopf: clients.api parses with json.loads", "json.loads(" in inspect.getsource(compat.kopf_api)
    lock = compat.LeaseLock("name", "namespace", "me", None)
    yield "kubernetes: LeaseLock.api_instance", hasattr(lock, "api_instance")
    yield "kubernetes: LeaseLock.update_lease", callable(getattr(lock, "update_lease", None))
    yield "kubernetes: LeaseLock.lease_reference", "self.lease_reference =" in inspect.getsource(compat.LeaseLock.get)


@pytest.mark.parametrize(("part", "there"), parts(), ids=[part for part, _ in parts()])
def test_a_private_part_is_where_it_was(part, there):
    package = part.partition(":")[0]
    assert there, f"{part} has moved in {package} {version(package)}; see compat.py"
