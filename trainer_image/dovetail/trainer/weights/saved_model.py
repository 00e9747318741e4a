"""Reads one model from a checkpoint in this process, on the CPU, and exports it as the trainer ranks would."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dovetail.manifest.types import LoRA
from dovetail.models import HuggingFaceWriter, ModelError, PipelineStage, load_config
from dovetail.models.build import fill, open_source
from dovetail.models.model_stage import VALUE_HEAD
from dovetail.models.source import in_files
from dovetail.protocol.messages import ModelRef
from dovetail.trainer.engine import lora
from dovetail.trainer.engine.checkpoint import checked_state, first_line
from dovetail.trainer.engine.model_export import complete
from dovetail.trainer.files.shards import CheckedReader, Damaged
from dovetail.trainer.files.storage import causes


@dataclass(frozen=True)
class SavedModel:
    """The model `model` (actor, critic, reward, or ema) in a checkpoint. It was built from `ref` and trained with the
    adapters `adapters`, if any. `compute` is the dtype of exports."""

    checkpoint: Path
    model: str
    ref: ModelRef
    adapters: LoRA | None
    compute: torch.dtype

    def write(self, folder: Path) -> None:
        """Write the whole model into an empty folder, as the job's own export does, with adapters merged. Raises
        `ModelError` for a checkpoint that cannot be used, and OSError."""
        stage = self._stage()
        stage.to_empty(device="cpu")
        parameters = {name: p.detach() for name, p in stage.named_parameters()}
        trained = _trained(stage)
        if frozen := {n: plain for n in parameters.keys() - trained if (plain := lora.plain_name(n)) is not None}:
            fill(stage, open_source(self.ref, stage), frozen)
        state = self._read({name: parameters[name] for name in trained})
        writer, beside = HuggingFaceWriter(folder), stage.beside_policy
        writer.write_value_head([(name, p) for name, p in parameters.items() if name == beside])
        tensors = lora.merged(stage, [name for name in parameters if name != beside], parameters.__getitem__)
        written = writer.write(in_files(stage.family, tensors), self.compute, stage.family.constants)
        complete(folder, [written], self.ref, self.compute, state)

    def write_adapter(self, folder: Path, base: str) -> None:
        """Write the adapters into an empty folder, as PEFT reads them. `base`: the model to which they belong, as
        adapter_config.json names it. Raises the same errors as `write`."""
        from safetensors.torch import save_file

        assert self.adapters is not None
        stage = self._stage()
        names = [name for name in _trained(stage) if name != stage.beside_policy]
        tensors = {name: torch.empty_like(stage.get_parameter(name), device="cpu").detach() for name in names}
        self._read(tensors)
        found = {f"base_model.model.{lora.saved_name(name)}": tensor for name, tensor in tensors.items()}
        save_file(found, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
        described = lora.described(
            stage,
            self.adapters,
            task_type="SEQ_CLS" if stage.head == "value" else "CAUSAL_LM",
            modules_to_save=[VALUE_HEAD] if stage.head == "value" else None,
            base_model_name_or_path=base,
            inference_mode=True,
        )
        described.save_pretrained(str(folder))

    def _stage(self) -> PipelineStage:
        """The whole model on the meta device, with adapters. Without adapters it has the dtype of exports, so that the
        whole model in float32 needs no memory."""
        stage = PipelineStage(load_config(self.ref), self.ref.head)
        if self.adapters is not None:
            lora.inject(stage, self.adapters)
            return stage
        for name, parameter in stage.named_parameters():
            if name != stage.beside_policy and name not in stage.constants:  # these are exported in float32
                parameter.data = parameter.data.to(self.compute)
        return stage

    def _read(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Fill the tensors of parameters from the checkpoint. Returns the content of state.json."""
        import torch.distributed.checkpoint as dcp

        tree: dict[str, Any] = {"ema": tensors} if self.model == "ema" else {self.model: {"parameters": tensors}}
        reader: CheckedReader | None = None
        try:
            state = checked_state(self.checkpoint)
            reader = CheckedReader(self.checkpoint, state.get("files", {}))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(tree, storage_reader=reader, no_dist=True)
        except (Exception, CheckpointException) as problem:  # CheckpointException is no subclass of Exception
            damage = next((str(each) for each in causes(problem) if isinstance(each, Damaged)), None)
            why = first_line((reader.problem if reader is not None else None) or problem)
            raise ModelError(damage or f"{self.checkpoint} has no {self.model} as it should be: {why}") from problem
        return state


def _trained(stage: PipelineStage) -> list[str]:
    """The names of the parameters that the checkpoint has."""
    return [name for name, parameter in stage.named_parameters() if parameter.requires_grad]
