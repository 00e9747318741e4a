"""What `dovetail profile` measures on a machine and the schedule chooser reads: profile.json."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dovetail.api.base import Model, PositiveInt

Seconds = Annotated[float, Field(ge=0.0)]


class PassTimes(Model):
    """One micro-batch through one part of a model. What cannot be told from 0 is 0."""

    micro_batch: PositiveInt = Field(description="Sequences.")
    forward: Seconds
    backward: Seconds = Field(description="Whole: input and weight gradients at once.")
    input_gradient: Seconds = Field(description="The half that the previous stage waits for, where it is split.")
    weight_gradient: Seconds = Field(description="The other half. Both together may take longer than the whole.")
    activation_bytes: int = Field(ge=0, description="Saved for the backward pass.")


class ModelTimes(Model):
    """A model's parts, each by micro-batch size. `head` holds the final norm, the head and the loss."""

    head: Literal["lm", "value"]
    layers: PositiveInt
    hidden_size: PositiveInt
    bytes_per_value: PositiveInt = Field(description="Of an activation between stages.")
    embedding_times: list[PassTimes] = Field(min_length=1)
    layer_times: list[PassTimes] = Field(min_length=1, description="Of one layer.")
    head_times: list[PassTimes] = Field(min_length=1)


class Link(Model):
    """Point-to-point messages between two processes."""

    latency: Seconds = Field(description="Seconds of an empty message.")
    bytes_per_second: float = Field(gt=0)


class Profile(Model):
    """Measured times of the models of a job on one kind of device."""

    version: Literal[1] = 1
    device: str
    threads: PositiveInt = Field(description="Of a process, on CPUs.")
    tokens: PositiveInt = Field(description="Length of the measured sequences.")
    models: dict[str, ModelTimes] = Field(min_length=1)
    link: Link | None = None
