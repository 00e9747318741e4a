"""The questions that the run page may ask about a run. Each is a path below a coordinator's /v1/page/, or below a run
in `dovetail ui`."""

from __future__ import annotations

_NUMBER = "[0-9]{1,9}"
# A regular expression for a whole path. Only its numbers ever get into a file's name. `samples/12/rows/200` asks for
# the complete rows of iteration 12, from the 200th on.
QUESTION = (
    f"overview|events|bill|(?:history|samples|evaluation|timeline|schedule)/{_NUMBER}|evaluation/-1"
    f"|sample/{_NUMBER}/{_NUMBER}/{_NUMBER}|samples/{_NUMBER}/rows/{_NUMBER}|evaluation/(?:-1|{_NUMBER})/rows/{_NUMBER}"
)
