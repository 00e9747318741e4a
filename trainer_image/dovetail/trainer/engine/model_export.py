"""Export of a trained model as a Hugging Face folder, by all ranks that hold a part of it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dovetail.models import HuggingFaceWriter, load_config
from dovetail.models.export import write_text
from dovetail.models.source import in_files
from dovetail.protocol.messages import ModelRef
from dovetail.trainer.engine.engine_model import EngineState, tokenizer_folder
from dovetail.trainer.engine.parallel import compute_dtype
from dovetail.trainer.files.storage import write_together


def export_model(engine: EngineState, model: str, path: Path, subtract: float = 0.0, run: str = "") -> None:
    """Write the model as a folder. The first data-parallel rank of each stage writes one safetensors file, in the
    model's compute dtype. A value head beside a language model gets a file of its own. `subtract`: see
    `HuggingFaceWriter.finish`. dovetail.json says which run made the folder, and at which step. This is a collective
    call.

    Raises `RankFailed` on every rank if any rank could not write, and `PeerLost`."""
    name = "actor" if model == "ema" else model
    ref, held = engine.loaded[name], engine.models.get(name)
    compute = compute_dtype(getattr(engine.spec.models, name).dtype, engine.groups.device)

    def write(folder: Path) -> dict[str, Any]:
        if held is None:
            return {"files": [], "bytes": 0}
        tensors = engine.weights(model)
        beside = list(held.gather(engine.ema if model == "ema" else None, beside=True))
        try:
            if held.groups.dp_rank == 0 and held.groups.tp_rank == 0:
                writer = HuggingFaceWriter(folder, held.groups.pp_rank)
                writer.write_value_head(beside)
                family = held.module.family
                return writer.write(in_files(family, tensors), compute, family.constants)
            return {"files": [], "bytes": 0}
        finally:
            deque(tensors, maxlen=0)  # gathering is collective, so take part to the end, even after an error

    def finish(folder: Path, manifests: list[dict[str, Any]]) -> None:
        stage = engine.stage.value if engine.stage else ""
        complete(folder, manifests, ref, compute, {"run": run, "stage": stage, "step": engine.step}, subtract)

    write_together(engine.groups, path, write, finish)


def complete(
    folder: Path,
    manifests: list[dict[str, Any]],
    ref: ModelRef,
    compute: torch.dtype,
    origin: Mapping[str, Any],
    subtract: float = 0.0,
) -> None:
    """Write everything beside the weights. `origin` has the run, the stage and the step of the weights. `subtract`: see
    `HuggingFaceWriter.finish`."""
    write_text(folder / "dovetail.json", json.dumps({name: origin[name] for name in ("run", "stage", "step")}))
    HuggingFaceWriter(folder).finish(manifests, load_config(ref), ref.head, compute, tokenizer_folder(ref), subtract)
