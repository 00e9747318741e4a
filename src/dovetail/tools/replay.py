"""Runs one stored PPO iteration again, with the trainer ranks alone.

A PPO step is a function of the weights before it and of its stored batch. So ranks that load the checkpoint before an
iteration, and run the stored commands, get the same bits as the run. If they do not, some step depends on more than its
inputs, or this code differs from the code of the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.loop.ppo_stage import stored_step
from dovetail.coordinator.schedules.step_commands import optimizer_steps
from dovetail.coordinator.schedules.stored_schedule import applies
from dovetail.coordinator.serving.coordinator_routes import make_app
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.identity import KEY
from dovetail.coordinator.store.manifest_changes import CHANGES, RANKS, Settled
from dovetail.coordinator.store.store import KeyValues, open_records
from dovetail.coordinator.workers.trainer_group import TrainerError, TrainerGroup, TrainerLost
from dovetail.gpus.nvidia_driver import cuda_devices
from dovetail.launch.local.launcher import spawn_kind
from dovetail.launch.ports import PortReservation
from dovetail.launch.processes import HOST, ProcessSpec, port_names, render
from dovetail.launch.supervisor import cpu_threads
from dovetail.manifest.sizes import has_critic
from dovetail.manifest.types import RLHFJob, Stage
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.http import serving
from dovetail.protocol.messages import Command, CommandResult, Export, Load, Offer, Register, Save, Step
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.endings import cancel
from dovetail.protocol.process.process_names import COORDINATOR
from dovetail.tools.checkpoint_export import stage_sources

JOIN_SECONDS = 300.0
# A debugger may stop a rank for a long time.
STEP_SECONDS = 24 * 3600.0
# Metrics with these endings depend on the machine, so they may differ.
MEASURED = ("seconds", "activation_peak_bytes")


@dataclass(frozen=True)
class Section:
    """The iterations `first` to `last`, which are run again. They start from the checkpoint before `first`, or from
    the beginning of PPO if `first` is 1. `target`: the folder of the run with which the weights after `last` are
    compared. None if the run kept no such weights."""

    first: int
    last: int
    target: str | None


def choose_section(
    iteration: int, done: int, checkpoints: Collection[int], batches: Collection[int], exported: bool
) -> Section:
    """The section that contains an iteration. It goes from the last checkpoint before it to the next weights that the
    run kept. `done`: the number of finished iterations. `checkpoints`: the iterations after which a checkpoint is kept.
    `batches`: the iterations whose batch is kept. `exported`: the run has exported its last weights. Raises UsageError
    if the iteration cannot be replayed."""
    if not 1 <= iteration <= done:
        raise UsageError(f"iteration {iteration} cannot be replayed: the run has finished iterations 1 to {done}")
    kept = [step for step in checkpoints if step <= done]
    before = max((step for step in kept if step < iteration), default=0)
    after = min((step for step in kept if step >= iteration), default=None)
    if after is not None:
        section = Section(before + 1, after, f"checkpoints/ppo-{after:06d}")
    elif exported:
        section = Section(before + 1, done, "models")
    else:
        section = Section(before + 1, iteration, None)
    missing = [i for i in range(section.first, section.last + 1) if i not in batches]
    if missing:
        raise UsageError(
            f"iteration {iteration} cannot be replayed: the batch of iteration {missing[0]} is not kept any more. A "
            "run keeps the batches since its oldest checkpoint; a higher spec.checkpoint.keep keeps more"
        )
    return section


@dataclass(frozen=True)
class Replay:
    """What a replay needs from a run. `load` and `steps`: the commands to the ranks. `batches`: the stored batch of
    each iteration, by its number. `metrics`: the metrics that the run's ranks reported for each iteration. `models`:
    the models that are compared with the run's exported ones."""

    run_dir: Path
    job: RLHFJob
    plan: Plan
    section: Section
    load: Load
    steps: list[Step]
    batches: dict[int, bytes]
    metrics: dict[int, dict[str, float]]
    models: list[str]


def read_replay(run_dir: Path, iteration: int) -> Replay:
    """Read what the run stored. The run directory is not changed. Raises UsageError if the iteration cannot be
    replayed, and RunError if files are missing or the run is not finished."""
    run_dir = run_dir.resolve()
    if not (run_dir / "store.sqlite").is_file():
        raise UsageError(f"{run_dir} is no run directory: it has no store.sqlite")
    try:
        job = RLHFJob.model_validate_json((run_dir / "job.json").read_text(encoding="utf-8"))
        plan = Plan.model_validate_json((run_dir / "plan.json").read_text(encoding="utf-8"), extra="ignore")
    except (OSError, ValidationError) as error:
        raise RunError(f"{run_dir}: job.json and plan.json cannot be read: {error}") from error
    try:
        records = open_records(run_dir)
    except StoreError as error:
        raise RunError(str(error)) from error
    try:
        return _read(run_dir, job, plan, records, iteration)
    except (StoreError, DataError, ValueError) as error:
        raise RunError(str(error)) from error
    finally:
        records.close()


def _read(run_dir: Path, job: RLHFJob, plan: Plan, records: KeyValues, iteration: int) -> Replay:
    from dovetail.coordinator.schedules.scheduling import stored_layouts

    spec, files = job.spec, ExperienceFiles(run_dir)
    done = int((records.get("ppo/progress") or {"step": 0})["step"])
    batches = [i for i in range(1, done + 1) if files.has(i) and records.get(f"ppo/{i}/facts") is not None]
    names = (path.name.removeprefix("ppo-") for path in (run_dir / "checkpoints").glob("ppo-*"))
    checkpoints = [int(name) for name in names if name.isdecimal()]
    models = [name for name in ("actor", "critic") if name == "actor" or has_critic(spec)]
    models += ["ema"] if spec.ppo.ema is not None else []
    exported = all((run_dir / "models" / _folder(name)).is_dir() for name in models)
    # Until an extended run ends, its exported models are those of an earlier iteration.
    succeeded = exported and _ended(run_dir, done)
    section = choose_section(iteration, done, checkpoints, batches, succeeded)
    for change in records.get(CHANGES) or []:
        if change["field"] == RANKS and change["stage"] == Stage.PPO.value and section.first <= change["settled"]:
            raise UsageError(
                f"iteration {iteration} was trained by other trainer ranks, {change['old']}, than the run has since "
                f"iteration {change['settled']}, {change['new']}; only later iterations can be replayed bit for bit"
            )
    layouts = stored_layouts(records, plan) if applies(spec, plan) else {}
    load = Load(
        id="replay/load",
        stage=Stage.PPO,
        models=stage_sources(run_dir, job, Stage.PPO),
        total_steps=optimizer_steps(spec),
        checkpoint=str(run_dir / "checkpoints" / f"ppo-{section.first - 1:06d}") if section.first > 1 else None,
        run=str(records.get(KEY) or ""),
        layouts=layouts,
        recompute=plan.recomputed(Stage.PPO),
        zero3=plan.gathered_by_layer(Stage.PPO),
    )
    settled, again = Settled(spec, records), range(section.first, section.last + 1)
    results = {i: records.get(f"result/ppo/{i}/step") or {} for i in again}
    return Replay(
        run_dir,
        job,
        plan,
        section,
        load,
        [stored_step(spec, plan, records, settled, layouts, i) for i in again],
        {i: files.read(i, records.get(f"ppo/{i}/batch")) for i in again},
        {i: result.get("metrics", {}) for i, result in results.items()},
        models if section.target == "models" else [],
    )


def _ended(run_dir: Path, done: int) -> bool:
    """Whether the run's exported models are those of its last iteration."""
    from dovetail.coordinator.reporting.run_summary import read_summary

    with contextlib.suppress(RunError):
        summary = read_summary(run_dir)
        return summary.get("state") == "succeeded" and summary.get("progress") == {"stage": "ppo", "done": done}
    return False


def _folder(model: str) -> str:
    return "actor-ema" if model == "ema" else model


def first_difference(stored: dict[str, float], replayed: dict[str, float]) -> str | None:
    """The first metric that differs, as "name: x in the run, y now". None if all are equal. Metrics that depend on the
    machine are left out."""
    for name in sorted(stored.keys() & replayed.keys()):
        if not name.endswith(MEASURED) and stored[name] != replayed[name]:
            return f"{name}: {stored[name]!r} in the run, {replayed[name]!r} now"
    return None


# ---------------------------------------------------------------- running it


@dataclass
class _Host:
    """The part of the coordinator's HTTP interface that trainer ranks use."""

    trainers: TrainerGroup
    batches: dict[int, bytes]

    async def batch(self, key: str) -> bytes:
        return self.batches[int(key.removeprefix("ppo/"))]

    def register(self, message: Register) -> None: ...
    def retire(self, name: str, host: str | None = None) -> None: ...
    def left(self, name: str) -> bool:
        return True

    def offer(self, message: Offer) -> None: ...
    def status(self) -> dict[str, Any]:
        return {}

    def history_since(self, offset: int) -> dict[str, Any]:
        return {}

    def trace(self, iteration: int) -> bytes:
        raise FileNotFoundError


@dataclass
class Replayed:
    """The result of a replay: a checkpoint or exported models below `folder`, and the metrics of each iteration."""

    folder: Path
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)


def run_replay(replay: Replay, folder: Path, tell: Callable[[str], None]) -> Replayed:
    """Start the run's trainer ranks on this machine, and let them run the iterations again. Everything new is below
    `folder`. Raises RunError with one sentence if a rank fails. Its log is in `folder`/logs."""
    return asyncio.run(_run(replay, folder, tell))


async def _run(replay: Replay, folder: Path, tell: Callable[[str], None]) -> Replayed:
    token = secrets.token_hex(16)
    group = TrainerGroup(
        world_size=replay.plan.world_size,
        generation=1,
        formed=False,
        peer_timeout=STEP_SECONDS,
        clock=time.monotonic,
        record_generation=lambda _: None,
        record_result=lambda _: None,
        log=lambda event, **fields: None,
    )
    app = make_app(_Host(group, replay.batches), token, CollectorRegistry())
    reservation = PortReservation(HOST)
    runner: serving.Runner | None = None
    try:
        ports = reservation.reserve(port_names(replay.plan))
        runner = await serving.listen(app, HOST, ports[COORDINATOR])
        with _ranks(_specs(replay, folder, ports, token)) as ranks:
            watching = asyncio.create_task(_watch(ranks, folder))
            working = asyncio.create_task(_work(replay, folder, group, tell))
            try:
                await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done() and not working.done():
                    watching.result()  # raises
                return await working
            finally:
                await cancel((watching, working))
    finally:
        if runner is not None:
            await runner.cleanup()
        reservation.close()


async def _work(replay: Replay, folder: Path, group: TrainerGroup, tell: Callable[[str], None]) -> Replayed:
    outcome = Replayed(folder)

    async def execute(command: Command) -> CommandResult:
        try:
            return await group.execute(command, STEP_SECONDS)
        except (TrainerError, TrainerLost) as error:
            raise RunError(f"{command.id} failed: {error} (logs: {folder / 'logs'})") from error

    try:
        await group.wait_position(JOIN_SECONDS)
    except TimeoutError as error:
        raise RunError(f"{error} (logs: {folder / 'logs'})") from error
    await execute(replay.load)
    for step in replay.steps:
        result = await execute(step)
        outcome.metrics[step.step] = result.metrics
        problem = first_difference(replay.metrics[step.step], result.metrics)
        tell(f"iteration {step.step}: {problem or 'the metrics are those of the run'}")
    if replay.models:
        for name in replay.models:
            path = str(folder / "models" / _folder(name))
            await execute(Export.model_validate({"id": f"replay/export-{name}", "model": name, "path": path}))
    elif replay.section.target is not None:
        await execute(Save(id="replay/save", path=str(folder / replay.section.target), run=replay.load.run))
    return outcome


def _specs(replay: Replay, folder: Path, ports: dict[str, int], token: str) -> list[ProcessSpec]:
    """The processes of the run's trainer ranks, with as many threads as in the run."""
    devices = cuda_devices(os.environ)
    at_work = max(len(replay.plan.trainers), len(replay.plan.rollouts))
    threads = 1 if spawn_kind(os.environ, devices) == "fork" else cpu_threads(at_work)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    # A rank that a debugger has stopped must not look dead to the others.
    spec = replay.job.spec
    patient = spec.failure_policy.model_copy(update={"peer_timeout_seconds": int(STEP_SECONDS)})
    job = replay.job.model_copy(update={"spec": spec.model_copy(update={"failure_policy": patient})})
    (folder / "job.json").write_text(job.model_dump_json(by_alias=True), encoding="utf-8")
    (folder / "plan.json").write_text(replay.plan.model_dump_json(by_alias=True), encoding="utf-8")
    all_of_them = render(
        job, replay.plan, folder, ports, token, base_env=dict(os.environ), devices=devices, threads=threads
    )
    mine = {trainer.name for trainer in replay.plan.trainers}
    return [spec for spec in all_of_them if spec.name in mine]


@contextlib.contextmanager
def _ranks(specs: list[ProcessSpec]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the ranks, and end them when the context ends."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for spec in specs:
            with spec.log.open("ab") as log:
                command = [sys.executable, "-P", "-m", spec.module]
                started[spec.name] = subprocess.Popen(
                    command, env=spec.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        yield started
    finally:
        for process in started.values():
            process.kill()
        for process in started.values():
            process.wait()


async def _watch(ranks: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until a rank ends, and raise RunError then."""
    while True:
        for name, process in ranks.items():
            if (code := process.poll()) is not None:
                raise RunError(f"{name} ended with exit code {code} (log: {folder / 'logs' / name}.log)")
        await asyncio.sleep(0.2)
