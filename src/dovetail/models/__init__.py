"""Builds, loads, runs and exports Hugging Face causal language models as pipeline stages. Trainer and scorer share
it."""

from dovetail.models.build import build_stage
from dovetail.models.config import ModelError, load_config
from dovetail.models.export import HuggingFaceWriter
from dovetail.models.model_stage import Outputs, PipelineStage

__all__ = ["HuggingFaceWriter", "ModelError", "Outputs", "PipelineStage", "build_stage", "load_config"]
