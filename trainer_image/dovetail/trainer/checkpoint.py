"""Checkpoints of everything a stage's training depends on: DCP shards and state.json.

Tensors are stored under the whole model's names and as parts of whole tensors, so that a checkpoint loads into any
(pp, dp). A tied weight that lives in two stages is stored once."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dovetail.models.export import write_text
from dovetail.trainer.engine_model import EngineModel, like
from dovetail.trainer.groups import PeerLost, RankFailed, peer_errors
from dovetail.trainer.storage import write_together

if TYPE_CHECKING:
    from dovetail.trainer.engine import Engine

STATE = "state.json"
_FORMAT = 1


def save(engine: Engine, path: Path) -> None:
    """Write the checkpoint folder `path`, whole or not at all; collective. Raises `RankFailed`, `PeerLost`."""
    import torch.distributed.checkpoint as dcp

    def write(folder: Path) -> tuple[str, dict[str, int]]:
        tensors = _tensors(engine, saving=True)
        with peer_errors("writing a checkpoint"):
            # Files are flushed to the disk by the writer (sync_files).
            dcp.save(
                tensors,
                storage_writer=dcp.FileSystemWriter(folder),
                process_group=engine.groups.control,
                no_dist=engine.groups.world_size == 1,
            )
        return _rng(engine), {name: model.optimizer.steps for name, model in engine.models.items()}

    def finish(folder: Path, ranks: list[tuple[str, dict[str, int]]]) -> None:
        assert engine.stage is not None
        state = {
            "format": _FORMAT,
            "stage": engine.stage.value,
            "step": engine.step,
            "optimizer_steps": {name: steps for _, models in ranks for name, steps in models.items()},
            "rng": [rng for rng, _ in ranks],
        }
        write_text(folder / STATE, json.dumps(state))

    write_together(engine.groups, path, write, finish)


def restore(engine: Engine, path: Path) -> int:
    """Fill the engine's models, optimizers and EMA from the checkpoint; returns its step; collective.

    Raises `RankFailed` on every rank when the folder is missing, incomplete, or of another stage."""
    import torch.distributed.checkpoint as dcp

    from dovetail.trainer.safe_metadata import SafeReader

    state, error = {}, None
    try:
        state = _read_state(engine, path)
    except (OSError, ValueError, KeyError) as problem:
        error = str(problem)
    engine.groups.all_succeed(error)
    try:
        with peer_errors("reading a checkpoint"):
            dcp.load(
                _tensors(engine, saving=False),
                storage_reader=SafeReader(path),
                process_group=engine.groups.control,
                no_dist=engine.groups.world_size == 1,
            )
    except PeerLost:
        raise
    except (Exception, CheckpointException) as problem:  # DCP's is not an Exception
        error = f"{path}: the checkpoint cannot be loaded into the job's models: {_first_line(problem)}"
    engine.groups.all_succeed(error)
    for name, model in engine.models.items():
        model.optimizer.steps = int(state["optimizer_steps"][name])
    if len(state["rng"]) == engine.groups.world_size:
        _set_rng(engine, state["rng"][engine.groups.rank])
    return int(state["step"])


def _read_state(engine: Engine, path: Path) -> dict[str, Any]:
    if not (path / STATE).is_file():
        raise ValueError(f"{path}: not a checkpoint: {STATE} is missing")
    state: dict[str, Any] = json.loads((path / STATE).read_text())
    assert engine.stage is not None
    if state["format"] != _FORMAT or state["stage"] != engine.stage.value:
        raise ValueError(f"{path}: a checkpoint of stage {state['stage']}, not of {engine.stage.value}")
    if missing := sorted(set(engine.loaded) - set(state["optimizer_steps"])):
        raise ValueError(f"{path}: the checkpoint has no model called {missing[0]}")
    return state


def _tensors(engine: Engine, saving: bool) -> dict[str, Any]:
    """What the checkpoint holds, as views of the engine's own memory: saved from and loaded into in place. Frozen
    weights are left out: they come from the model's source."""
    tree: dict[str, Any] = {name: _model_tensors(model, saving) for name, model in engine.models.items()}
    if engine.ema:
        actor = engine.models["actor"]
        tree["ema"] = _named(actor, engine.ema, saving)
    return tree


def _model_tensors(model: EngineModel, saving: bool) -> dict[str, Any]:
    moments = model.optimizer.moments
    return {
        "parameters": _named(model, {n: p.detach() for n, p in model.trainable().items()}, saving, wrapped=True),
        "first_moments": _named(model, {name: pair[0] for name, pair in moments.items()}, saving),
        "second_moments": _named(model, {name: pair[1] for name, pair in moments.items()}, saving),
    }


def _named(model: EngineModel, tensors: dict[str, Tensor], saving: bool, wrapped: bool = False) -> dict[str, Tensor]:
    parameters = model.trainable()
    copy = model.module.tied_copy
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if saving and name == copy and name != model.module.embedding_name:
            continue  # the first stage stores it
        named[model.module.checkpoint_name(name)] = tensor if wrapped else like(parameters[name], tensor)
    return named


def _rng(engine: Engine) -> str:
    states = [torch.get_rng_state()]
    if engine.groups.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(engine.groups.device))
    return "|".join(base64.b64encode(state.numpy().tobytes()).decode() for state in states)


def _set_rng(engine: Engine, text: str) -> None:
    states = [torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.uint8) for part in text.split("|")]
    torch.set_rng_state(states[0])
    if engine.groups.device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], engine.groups.device)


def _first_line(problem: BaseException) -> str:
    failures = list(getattr(problem, "failures", {}).values())
    lines = str(failures[0][0] if failures else problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__


__all__ = ["STATE", "RankFailed", "restore", "save"]
