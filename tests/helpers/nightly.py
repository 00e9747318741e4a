"""Whether this run has the nightly tests of a file: a fixture that all of its tests share makes less without them."""

from __future__ import annotations

import pytest


def asked(request: pytest.FixtureRequest) -> bool:
    """Tests that `-m` leaves out are no longer among the session's."""
    mine = (item for item in request.session.items if item.path == request.path)
    return any(item.get_closest_marker("nightly") for item in mine)
