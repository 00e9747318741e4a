"""The names of stages in the rows of history.jsonl. Each row has the stage of its step. Evaluations have rows of their
own."""

from __future__ import annotations

from dovetail.manifest.types import Stage

EVALUATION = "evaluation"
# The values of a row's `stage`. The step of an evaluation is the iteration after which the weights were evaluated.
ROW_STAGES = (*(stage.value for stage in Stage), EVALUATION)
