"""Checkpoints of everything that a stage's training depends on. A checkpoint is DCP shards and state.json.

Tensors are stored under the whole model's names and as parts of whole tensors. So a checkpoint loads into any (pp, dp).
A tied weight that is in two stages is stored once."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dovetail.models.export import write_text
from dovetail.trainer.communication.groups import PeerLost, RankFailed, peer_errors
from dovetail.trainer.engine.engine_model import EngineModel, EngineState, like
from dovetail.trainer.engine.optim import local
from dovetail.trainer.files.storage import causes, write_together

STATE = "state.json"
_LIST = ".metadata"
_FORMAT = 1


class CheckpointDamaged(RankFailed):
    """The checkpoint's files are not what was saved. An older checkpoint may be intact."""


def save(engine: EngineState, path: Path, run: str = "") -> None:
    """Write the checkpoint folder `path` of the run with the id `run`, completely or not at all. This is a collective
    call.

    Raises `RankFailed` and `PeerLost`."""
    import torch.distributed.checkpoint as dcp

    from dovetail.trainer.files.shards import AT_ONCE, digest, digests

    # With several files, copies from a GPU, packing and the disk overlap.
    files = min(AT_ONCE, os.cpu_count() or 1) if engine.groups.device.type == "cuda" else 1

    def write(folder: Path) -> tuple[str, dict[str, int], dict[str, str]]:
        tensors = _tensors(engine, saving=True)
        with peer_errors("writing a checkpoint"):
            # The writer flushes its files to the disk (sync_files).
            dcp.save(
                tensors,
                storage_writer=dcp.FileSystemWriter(folder, thread_count=files),
                process_group=engine.groups.control,
                no_dist=engine.groups.world_size == 1,
            )
        # These are the names that the writer gives to a rank's files.
        mine = digests(sorted(folder.glob(f"__{engine.groups.rank}_*")))
        return _rng(engine), {name: model.optimizer.steps for name, model in engine.models.items()}, mine

    def finish(folder: Path, ranks: list[tuple[str, dict[str, int], dict[str, str]]]) -> None:
        assert engine.stage is not None
        state = {
            "format": _FORMAT,
            "stage": engine.stage.value,
            "step": engine.step,
            "run": run,
            "optimizer_steps": {name: steps for _, models, _ in ranks for name, steps in models.items()},
            "rng": [rng for rng, _, _ in ranks],
            "files": {name: found for _, _, files in ranks for name, found in files.items()}
            | {_LIST: digest(folder / _LIST)},
        }
        write_text(folder / STATE, json.dumps(state | {"checksum": _checksum(state)}))

    write_together(engine.groups, path, write, finish)


def restore(engine: EngineState, path: Path, run: str = "") -> int:
    """Load the engine's models, optimizers and EMA from the checkpoint. Returns its step. This is a collective call.

    Every rank verifies the files that it reads. Raises on every rank `CheckpointDamaged` if the folder is missing,
    incomplete or altered, and `RankFailed` if it is of another stage or run, or cannot be read. Raises `PeerLost`."""
    import torch.distributed.checkpoint as dcp

    from dovetail.trainer.files.shards import CheckedReader, Damaged

    state, error, damaged = {}, None, False
    try:
        state = checked_state(path)
        _check_state(engine, state, path, run)
    except Damaged as problem:
        error, damaged = str(problem), True
    except (OSError, ValueError, KeyError) as problem:
        error = str(problem)
    _agree(engine, error, damaged)
    reader = CheckedReader(path, state.get("files", {}))
    try:
        with peer_errors("reading a checkpoint"):
            dcp.load(
                _tensors(engine, saving=False),
                storage_reader=reader,
                process_group=engine.groups.control,
                no_dist=engine.groups.world_size == 1,
            )
    except PeerLost:
        raise
    except (Exception, CheckpointException) as problem:  # CheckpointException is no subclass of Exception
        damage = [c for c in causes(problem) if isinstance(c, Damaged)]
        damaged = bool(damage)
        error = (
            f"{path}: the checkpoint cannot be loaded into the job's models: {first_line(reader.problem or problem)}"
        )
        error = str(damage[0]) if damage else error
    _agree(engine, error, damaged)
    for name, model in engine.models.items():
        _fill_tied(model, engine.ema if name == "actor" else {})
        model.optimizer.steps = int(state["optimizer_steps"][name])
    if len(state["rng"]) == engine.groups.world_size:
        _set_rng(engine, state["rng"][engine.groups.rank])
    return int(state["step"])


def _agree(engine: EngineState, error: str | None, damaged: bool) -> None:
    """A barrier that fails on every rank if any rank has an error. It raises `CheckpointDamaged` if every error is
    damage, and `RankFailed` otherwise."""
    found = engine.groups.share_json((error, damaged))
    try:
        engine.groups.all_succeed(error)
    except RankFailed as failed:
        if all(hurt for text, hurt in found if text is not None):
            raise CheckpointDamaged(str(failed)) from failed
        raise


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def checked_state(path: Path) -> dict[str, Any]:
    """The content of state.json. The checkpoint's list of tensors is verified too. Raises Damaged."""
    from dovetail.trainer.files.shards import Damaged, verify

    try:
        state = json.loads((path / STATE).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{path}: not a checkpoint: {STATE} is missing") from None
    except ValueError as error:
        raise Damaged(f"{path / STATE} is damaged: {error}") from error
    if not isinstance(state, dict):
        raise Damaged(f"{path / STATE} is damaged: it holds no mapping")
    expected = state.pop("checksum", None)
    if expected != _checksum(state) and (expected is not None or "files" in state):
        raise Damaged(f"{path / STATE} is damaged: its content is not what was saved")
    verify(path, _LIST, state.get("files", {}))
    return state


def _check_state(engine: EngineState, state: dict[str, Any], path: Path, run: str) -> None:
    """Raises ValueError unless the checkpoint is of this stage and run and has these models."""
    assert engine.stage is not None
    if run and state.get("run") and state["run"] != run:
        raise ValueError(
            f"{path} is of run {state['run']}, but store.sqlite of run {run}: the folder holds parts of two runs; put "
            "this run's checkpoints back, or start a new run in another folder"
        )
    if state["format"] != _FORMAT or state["stage"] != engine.stage.value:
        raise ValueError(f"{path}: a checkpoint of stage {state['stage']}, not of {engine.stage.value}")
    if missing := sorted(set(engine.loaded) - set(state["optimizer_steps"])):
        raise ValueError(f"{path}: the checkpoint has no model called {missing[0]}")


def _tensors(engine: EngineState, saving: bool) -> dict[str, Any]:
    """The checkpoint's tensors, as views of the engine's own memory. They are saved from there and loaded into it in
    place. Frozen weights are left out, because they come from the model's source."""
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
        if name == copy and name != model.module.embedding_name and (saving or model.is_first):
            continue  # the first stage stores it; if that stage is here too, `_fill_tied` copies it
        named[model.module.checkpoint_name(name)] = tensor if wrapped else like(parameters[name], tensor)
    return named


def _fill_tied(model: EngineModel, average: dict[str, Tensor]) -> None:
    """Copy the restored embedding to the head that it is tied to, if both are on this rank. `average` holds the EMA of
    the model's parameters, if there is one."""
    name, embedding, parameters = model.module.tied_copy, model.module.embedding_name, model.trainable()
    if name is None or name == embedding or not {name, embedding} <= parameters.keys():
        return
    moments = model.optimizer.moments
    pairs = [*zip((parameters[embedding], *moments[embedding]), (parameters[name], *moments[name]), strict=True)]
    pairs += [(average[embedding], average[name])] if average else []
    with torch.no_grad():
        for source, target in pairs:
            local(target).copy_(local(source))


def _rng(engine: EngineState) -> str:
    states = [torch.get_rng_state()]
    if engine.groups.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(engine.groups.device))
    return "|".join(base64.b64encode(state.numpy().tobytes()).decode() for state in states)


def _set_rng(engine: EngineState, text: str) -> None:
    states = [torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.uint8) for part in text.split("|")]
    torch.set_rng_state(states[0])
    if engine.groups.device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], engine.groups.device)


def first_line(problem: BaseException) -> str:
    failures = list(getattr(problem, "failures", {}).values())
    lines = str(failures[0][0] if failures else problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__
