"""Exports a model from a checkpoint that a run keeps. The run may go on meanwhile: it is not changed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dovetail.coordinator.data.downloads.hub import Hub
from dovetail.coordinator.data.prepare import model_sources, own_model
from dovetail.coordinator.data.text import tokenizer as tokenizers
from dovetail.coordinator.loop.model_sources import ModelSources
from dovetail.coordinator.reporting.model_card import CardFacts
from dovetail.coordinator.reporting.model_files import describe_model
from dovetail.gpus.gpu_products import gpu, is_known
from dovetail.manifest.sizes import has_critic
from dovetail.manifest.types import Dtype, RLHFJob, RLHFJobSpec, Role, Stage
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.files.durable import read_object
from dovetail.protocol.messages import ModelRef
from dovetail.protocol.process.env import ACTOR_CONFIG

if TYPE_CHECKING:
    import torch

# The folder below a run's `cache` with the exports that `chat`, `serve` and `push` made.
MADE = "exports"


@dataclass(frozen=True)
class KeptModel:
    """A model that a run keeps, in a checkpoint or finished. `model` is the name of its folder in `models`."""

    run_dir: Path
    stage: Stage
    step: int
    model: str
    finished: bool = False

    @property
    def when(self) -> str:
        return f"iteration {self.step}" if self.stage is Stage.PPO else f"step {self.step} of {self.stage.value}"

    @property
    def folder(self) -> Path:
        if self.finished:
            return self.run_dir / "models" / self.model
        return self.run_dir / "checkpoints" / f"{self.stage.value}-{self.step:06d}"

    @property
    def saved(self) -> str:
        """The model's name in the checkpoint."""
        return {"sft": "actor", "actor-ema": "ema"}.get(self.model, self.model)


def find(run_dir: Path, model: str | None, iteration: int | None, adapter: bool = False) -> KeptModel:
    """The model after `iteration` (a step in other stages than PPO), or the newest one. Without `model` it is of the
    last stage that keeps one. `adapter`: its adapters are wanted, which finished models lack. Raises UsageError, which
    names what the run keeps."""
    spec = read_job(run_dir).spec
    if model == "actor-best":
        raise UsageError("no checkpoint has the model actor-best, only the finished run; leave out --iteration")
    names = [model] if model is not None else _names(spec)
    for name in names:
        stage = _stage(spec, name)
        kept = {step: KeptModel(run_dir, stage, step, name) for step in _steps(run_dir, stage)}
        if not adapter and (done := _finished(run_dir, stage, name)) is not None:
            kept[done.step] = done
        if kept:
            break
    if not _trains(spec, name):
        raise UsageError(f"{run_dir} trains no model {name}; it trains {', '.join(_names(spec))}")
    if not kept:
        raise UsageError(
            f"{run_dir} keeps no checkpoint with the model {name}; spec.checkpoint.everySteps says how often one is "
            "written, and those of a finished stage are deleted"
        )
    found = max(kept) if iteration is None else iteration
    if found not in kept:
        raise UsageError(
            f"{run_dir} keeps no model {name} after {KeptModel(run_dir, stage, found, name).when}, only after "
            f"{', '.join(map(str, sorted(kept)))} (spec.checkpoint.everySteps and keep say which)"
        )
    return kept[found]


def export(kept: KeptModel, folder: Path, adapter: bool = False) -> None:
    """Write the model into `folder`, completely or not at all. `adapter`: write its LoRA adapters alone, as PEFT reads
    them. Raises UsageError if the folder holds anything or the model has no adapters, and RunError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already; name a new folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        if kept.finished:
            shutil.copytree(kept.folder, temporary)
        else:
            with _held(kept) as checkpoint:
                temporary.mkdir(parents=True)
                _write(kept, checkpoint, temporary, adapter)
        if folder.is_dir():
            folder.rmdir()
        temporary.rename(folder)
    except ValueError as error:
        raise RunError(str(error)) from error
    except OSError as error:
        raise RunError(f"the model cannot be written to {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(kept: KeptModel, checkpoint: Path, folder: Path, adapter: bool) -> None:
    """Write a model, or its adapters, from a checkpoint. Raises ValueError, DataError and OSError."""
    from dovetail.trainer.weights.saved_model import SavedModel

    job = read_job(kept.run_dir)
    name = "actor" if kept.saved == "ema" else kept.saved
    trained = getattr(job.spec.models, name)
    if adapter and trained.lora is None:
        raise UsageError(f"{kept.model} is trained whole, without spec.models.{name}.lora; leave out --adapter")
    ref = stage_sources(kept.run_dir, job, kept.stage, trained.lora is not None and not adapter)[name]
    if adapter and ref.path is None:
        raise UsageError(
            f"the adapters of {kept.model} belong to random weights, which no folder holds; leave out --adapter"
        )
    saved = SavedModel(checkpoint, kept.saved, ref, trained.lora, _dtype(job.spec, trained.dtype))
    if adapter:
        hub = next((part for part in Path(str(ref.path)).parts if part.startswith("models--")), None)
        saved.write_adapter(folder, str(ref.path) if hub is None else "/".join(hub.split("--")[1:]))
    else:
        saved.write(folder)
        _describe(kept, job, folder)


def exported(run_dir: Path, model: str, iteration: int) -> Path:
    """The folder of the model after `iteration`. It is made at its first use. Raises the errors of `find` and
    `export`."""
    folder = run_dir / "cache" / MADE / f"{model}-{iteration:06d}"
    if not (folder / "config.json").is_file():
        export(find(run_dir, model, iteration), folder)
    return folder


def policy(run_dir: Path, version: int, scratch: Path) -> Path:
    """A folder with the actor after so many iterations of PPO, and with 0 as PPO began with it. It is exported below
    `scratch`. Raises the errors of `find` and `export`, UsageError if no folder holds it, and DataError."""
    if version < 1:
        path = stage_sources(run_dir, read_job(run_dir), Stage.PPO)["actor"].path
        if path is None or not (Path(path) / "config.json").is_file():
            raise UsageError(f"no folder holds the weights with which PPO of {run_dir} began")
        return Path(path)
    export(find(run_dir, "actor", version), scratch / "actor")
    return scratch / "actor"


def read_job(run_dir: Path) -> RLHFJob:
    """The job of a run. Raises UsageError for a folder that is no run, and RunError."""
    if not (run_dir / "job.json").is_file():
        raise UsageError(f"{run_dir} is no run directory: it has no job.json")
    try:
        return RLHFJob.model_validate_json((run_dir / "job.json").read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise RunError(f"{run_dir}: job.json cannot be read: {error}") from error


def stage_sources(run_dir: Path, job: RLHFJob, stage: Stage, weights: bool = True) -> dict[str, ModelRef]:
    """The models that the ranks loaded at the beginning of a stage. `weights`: download the weights of models of a hub,
    if they are not there. Raises DataError."""
    spec = job.spec
    hub = Hub(spec.hub, run_dir)
    own = model_sources(spec, Path(), hub)
    if weights:
        hub.download_weights()
    sources = ModelSources(
        spec, run_dir, lambda name: own_model(spec, name, own, run_dir / "tokenizer"), not spec.models.reward.calls
    )
    if stage is Stage.REWARD:
        return {"reward": sources.reward()}
    if stage is not Stage.PPO:
        return {"actor": sources.actor() if stage is Stage.SFT else sources.actor_for_ppo()}
    return {"actor": sources.policy()} | ({"critic": sources.critic()} if has_critic(spec) else {})


def _names(spec: RLHFJobSpec) -> list[str]:
    """The models that a run trains, those of the last stage first."""
    names = ("actor", "critic", "actor-ema", "reward", "sft")
    return [name for name in names if _trains(spec, name)]


def _trains(spec: RLHFJobSpec, name: str) -> bool:
    if (name == "critic" and not has_critic(spec)) or (name == "actor-ema" and spec.ppo.ema is None):
        return False
    return _stage(spec, name) in spec.stages


def _stage(spec: RLHFJobSpec, name: str) -> Stage:
    if name == "actor" and Stage.PPO not in spec.stages:
        return Stage.DPO
    return {"sft": Stage.SFT, "reward": Stage.REWARD}.get(name, Stage.PPO)


def _finished(run_dir: Path, stage: Stage, name: str) -> KeptModel | None:
    """The model that the run exported at the end of the stage, or at an earlier end if it was extended."""
    folder = run_dir / "models" / name
    told = read_object(folder / "dovetail.json")
    if told.get("stage") != stage.value or "step" not in told or not (folder / "config.json").is_file():
        return None
    return KeptModel(run_dir, stage, int(told["step"]), name, finished=True)


def _steps(run_dir: Path, stage: Stage) -> list[int]:
    """The steps of the stage's checkpoints, in ascending order."""
    names = (path.name.removeprefix(f"{stage.value}-") for path in (run_dir / "checkpoints").glob(f"{stage.value}-*"))
    return sorted(int(name) for name in names if name.isdecimal())


@contextlib.contextmanager
def _held(kept: KeptModel) -> Iterator[Path]:
    """A folder with the checkpoint's files. The files stay until the context ends, even if the run deletes the
    checkpoint: they are hard links. Where none can be made, it is the checkpoint itself."""
    with contextlib.ExitStack() as stack:
        try:
            folder = tempfile.TemporaryDirectory(prefix=".export-", dir=kept.run_dir / "checkpoints")
            linked = Path(stack.enter_context(folder))
            for path in kept.folder.iterdir():
                os.link(path, linked / path.name)
        except FileNotFoundError as error:
            raise RunError(
                f"the run has just deleted its checkpoint {kept.step}; export a newer one, or give the run a higher "
                "spec.checkpoint.keep"
            ) from error
        except OSError:
            linked = kept.folder
        yield linked


def _dtype(spec: RLHFJobSpec, dtype: Dtype) -> torch.dtype:
    """The dtype in which the trainers of the run compute and export."""
    import torch

    if dtype is Dtype.AUTO:
        group = next(group for group in spec.groups if Role.TRAINER in group.roles)
        product = None if group.on_cpu else group.gpu.product
        old = product is None or (is_known(product, {}) and not gpu(product).bf16)
        dtype = Dtype.FLOAT32 if old else Dtype.BFLOAT16
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _describe(kept: KeptModel, job: RLHFJob, folder: Path) -> None:
    """Complete the folder as the end of a run does."""
    tokenizer = tokenizers.load(
        kept.run_dir / "tokenizer", "spec.models.tokenizer", trust_remote_code=job.spec.models.actor.trust_remote_code
    )
    summary = read_object(kept.run_dir / "summary.json")
    base = kept.run_dir / ACTOR_CONFIG
    describe_model(folder, kept.model, base, CardFacts(job.metadata.name, job.spec, summary), tokenizer)
