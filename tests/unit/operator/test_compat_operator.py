"""The private parts of other packages that the operator uses are where they were."""

import inspect
from importlib.metadata import version

import pytest

from dovetail.operator import compat


def parts():
    """What must hold, by a sentence that says what has moved."""
    lock = compat.LeaseLock("name", "namespace", "me", None)
    yield "kubernetes: LeaseLock.api_instance", hasattr(lock, "api_instance")
    yield "kubernetes: LeaseLock.update_lease", callable(getattr(lock, "update_lease", None))
    yield "kubernetes: LeaseLock.lease_reference", "self.lease_reference =" in inspect.getsource(compat.LeaseLock.get)


@pytest.mark.parametrize(("part", "there"), [pytest.param(*each, id=each[0]) for each in parts()])
def test_a_private_part_is_where_it_was(part, there):
    package = part.partition(":")[0]
    assert there, f"{part} has moved in {package} {version(package)}; see compat.py"
