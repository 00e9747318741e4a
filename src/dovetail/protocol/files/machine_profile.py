"""The file profile.json. `dovetail profile` measures a machine and writes it, and the schedule chooser reads it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from dovetail.manifest.base import Model, PositiveInt
from dovetail.manifest.model_shape import Head

Seconds = Annotated[float, Field(ge=0.0)]


class PassTimes(Model):
    """The times of one micro-batch through one part of a model. A time too short to measure is 0."""

    micro_batch: PositiveInt = Field(description="Sequences.")
    forward: Seconds
    backward: Seconds = Field(description="Whole: input and weight gradients at once.")
    input_gradient: Seconds = Field(description="The half for which the previous stage waits, if the pass is split.")
    weight_gradient: Seconds = Field(description="The other half. Both together may take longer than the whole.")
    activation_bytes: int = Field(ge=0, description="Saved for the backward pass.")


class ModelTimes(Model):
    """The times of a model's parts at each micro-batch size. `head` covers the final norm, the head and the loss."""

    head: Head
    layers: PositiveInt
    hidden_size: PositiveInt
    bytes_per_value: PositiveInt = Field(description="The bytes of one value of an activation between stages.")
    embedding_times: list[PassTimes] = Field(min_length=1)
    layer_times: list[PassTimes] = Field(min_length=1, description="The times of one layer.")
    head_times: list[PassTimes] = Field(min_length=1)


class LinkTimes(Model):
    """The times of point-to-point messages between two processes."""

    latency: Seconds = Field(description="Seconds of an empty message.")
    bytes_per_second: float = Field(gt=0)


class Cost(Model):
    """A fixed cost in seconds, and the seconds for each unit."""

    fixed: Seconds
    each: Seconds


class GenerationCosts(Model):
    """The costs of a vLLM server that has the machine to itself."""

    begin: Seconds = Field(description="Of the phase.")
    sample: Seconds = Field(description="A request: its prefill, and what the server and the coordinator do for it.")
    step: Seconds = Field(description="A decode step.")
    token: Seconds = Field(description="A sample in a decode step.")
    cores: float = Field(gt=0, description="That a server which generates keeps busy, helpers included.")


class ScoringCosts(Model):
    """The costs of a scorer that has the machine to itself."""

    begin: Seconds = Field(description="Of the phase, once nothing is left to generate.")
    batch: Seconds = Field(
        validation_alias=AliasChoices("batch", "chunk"),  # older files say chunk
        description="Samples scored together, whatever the models.",
    )
    token: dict[str, Seconds] = Field(description="Of prompt or response, by model.")
    cores: float = Field(gt=0)


class TrainingCosts(Model):
    """The costs of a trainer rank that has the machine to itself."""

    begin: Seconds = Field(description="Of the phase.")
    step: Seconds = Field(description="An optimizer step of all models, beside the passes.")
    exchange: Seconds = Field(description="More of it where ranks add up gradients.")
    message: Seconds = Field(description="Between two pipeline stages, where nothing hides it.")
    models: dict[str, Cost] = Field(description="Forward and backward of a micro-batch, and of each of its tokens.")
    cores: float = Field(gt=0)
    straggling: float = Field(
        default=0.0, ge=0.0, description="Share of its passes that a data-parallel rank waits for the slowest one."
    )


class Machine(Model):
    """The costs of PPO iterations with a job's models on one machine. All processes share its cores."""

    cores: PositiveInt
    generation: GenerationCosts
    scoring: ScoringCosts
    training: TrainingCosts
    weights: Cost = Field(description="The phase; each: rollout.")
    other: Cost = Field(description="The rest of an iteration; each: sample.")
    prompt_tokens: float = Field(gt=0, description="Of the job's prompts, on average.")
    end_rate: float | None = Field(
        default=None, gt=0, le=1, description="Of the policy's tokens, how many end a response; null: SFT changes it."
    )
    responses: tuple[float, float] | None = Field(
        default=None, description="Median and sigma of log-normal response lengths, where a run of the job tells them."
    )


class Profile(Model):
    """The measured times of a job's models on one kind of device."""

    version: Literal[1] = 1
    device: str
    threads: PositiveInt = Field(description="Of a process, on CPUs.")
    tokens: PositiveInt = Field(description="Length of the measured sequences.")
    models: dict[str, ModelTimes] = Field(min_length=1)
    link: LinkTimes | None = None
    machine: Machine | None = Field(
        default=None, description="Measured with whole iterations (`dovetail profile --iterations`), on CPUs."
    )
