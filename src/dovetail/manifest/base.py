"""The base class of every API object, and the field types that they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
# The names of Secrets and ConfigMaps, which may have dots.
OBJECT_NAME_PATTERN = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
FOLDER_PATTERN = r"^[A-Za-z0-9][-A-Za-z0-9._]*$"
WORD_PATTERN = r"^[A-Za-z_]\w*$"
KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"
CONTROLLER_PATTERN = r"^[a-z0-9][-.a-z0-9]*/[A-Za-z0-9][-._/A-Za-z0-9]*$"
FIELD_PATTERN = r"^(metadata|spec)(\.[A-Za-z][-A-Za-z0-9]*)*$"
URL_PATTERN = r"^https?://\S+$"
SERVER_PATTERN = r"^https?://[^/\s]+/?$"
BUCKET_PATTERN = r"^[a-z0-9][-a-z0-9._]*[a-z0-9]$"
PREFIX_PATTERN = r"^([^/\s][^\s]*)?$"
CALLABLE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"

# The policy losses that the trainer implements (`dovetail.trainer.algorithms.policy`).
LOSSES = ("ppo", "gspo", "cispo")
LOSS_PATTERN = rf"^({'|'.join(LOSSES)}|{CALLABLE_PATTERN[1:-1]})$"

# The built-in metrics of an evaluation (`dovetail.coordinator.samples.evaluation_metrics`).
METRICS = ("reward", "exactMatch")
METRIC_PATTERN = rf"^({'|'.join(METRICS)}|{CALLABLE_PATTERN[1:-1]})$"

Name = Annotated[str, Field(min_length=1, max_length=63, pattern=NAME_PATTERN)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=OBJECT_NAME_PATTERN)]
ControllerName = Annotated[str, Field(max_length=63, pattern=CONTROLLER_PATTERN)]
Folder = Annotated[str, Field(min_length=1, max_length=128, pattern=FOLDER_PATTERN)]
Callable_ = Annotated[str, Field(max_length=256, pattern=CALLABLE_PATTERN)]
LossName = Annotated[str, Field(max_length=256, pattern=LOSS_PATTERN)]
EvaluationMetric = Annotated[str, Field(max_length=256, pattern=METRIC_PATTERN)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Path_ = Annotated[str, Field(min_length=1, max_length=4096)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


class Model(BaseModel):
    """The base class of every API object. Aliases are in camelCase, unknown fields are refused, and objects are
    immutable."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, allow_inf_nan=False
    )


class ObjectMeta(BaseModel):
    """The parts of Kubernetes metadata that Dovetail reads. Other parts are kept unchanged."""

    model_config = ConfigDict(extra="allow")

    name: Name = Field(description="The job's name: lower-case letters, digits and dashes.")
    namespace: Name | None = Field(default=None, description="Kubernetes namespace.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels, for selection.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations, for tools.")
