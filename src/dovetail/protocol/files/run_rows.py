"""What is asked about a run: the stages in history.jsonl, the choice of samples for `dovetail samples` and
`Cluster.samples`, and the questions of the run page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.manifest.types import Stage

_NUMBER = "[0-9]{1,9}"
# The run page's questions, as paths below a coordinator's /v1/page/ or below a run in `dovetail ui`. It is a regular
# expression for a whole path. Only its numbers ever get into a file's name. `samples/12/rows/200` asks for the complete
# rows of iteration 12, from the 200th on.
QUESTION = (
    f"overview|events|bill|(?:history|samples|evaluation|timeline|schedule)/{_NUMBER}|evaluation/-1"
    f"|sample/{_NUMBER}/{_NUMBER}/{_NUMBER}|samples/{_NUMBER}/rows/{_NUMBER}|evaluation/(?:-1|{_NUMBER})/rows/{_NUMBER}"
)
EVALUATION = "evaluation"
# The values of a row's `stage`. The step of an evaluation is the iteration after which the weights were evaluated.
ROW_STAGES = (*(stage.value for stage in Stage), EVALUATION)
# Samples can be sorted by these figures of a row.
ORDERS = ("reward", "kl", "tokens")
_TEXTS = ("prompt", "response")


def choose(
    rows: Sequence[dict[str, Any]],
    order: str | None = None,
    ascending: bool = False,
    pattern: re.Pattern[str] | None = None,
) -> list[dict[str, Any]]:
    """The rows whose prompt or response matches `pattern`. They are sorted by `order`, one of ORDERS, highest first.
    Without `order` they keep their order. A row without the figure counts as the lowest."""
    kept = [row for row in rows if pattern is None or any(pattern.search(str(row[key])) for key in _TEXTS)]
    return kept if order is None else sorted(kept, key=lambda row: _figure(row, order), reverse=not ascending)


def _figure(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name, (row.get("measures") or {}).get(name))
    return float(value) if isinstance(value, int | float) else float("-inf")
