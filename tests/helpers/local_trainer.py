"""A trainer of one rank inside the test's process: the real command runner and engine, batches from a dictionary."""

from __future__ import annotations

from typing import Any

from dovetail.manifest.types import RLHFJob, Stage
from dovetail.protocol.messages import Action, BatchPart, Command, CommandResult, Step
from dovetail.protocol.wire import Document
from dovetail.trainer.command_runner import CommandRunner
from dovetail.trainer.communication.groups import Groups
from dovetail.trainer.rank.coordinator_client import RankProcess, Refused
from helpers.free_ports import free_port
from helpers.trainer_ranks import layouts


def sent(batch: bytes, part: BatchPart) -> bytes:
    """What the coordinator's route answers."""
    document = Document(batch)
    head, ranges = document.part(part)
    return head + document.read(ranges)


class _Batches:
    """The part of CoordinatorClient that commands use."""

    def __init__(self) -> None:
        self.batches: dict[str, bytes] = {}

    def batch(self, key: str, part: BatchPart | None = None, patience: float | None = None) -> bytes:
        if key not in self.batches:
            raise Refused(f"HTTP 404 from /v1/batches/{key}: no batch {key}")
        return self.batches[key] if part is None else sent(self.batches[key], part)


class LocalTrainer:
    """`events` collects what was logged; `failed` is the memory of commands that failed on one rank alone."""

    def __init__(self, job: RLHFJob) -> None:
        self.job = job
        self.client = _Batches()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.failed: dict[str, str] = {}
        self.groups = Groups.form("127.0.0.1", free_port("127.0.0.1"), 0, 1, layouts(), 240.0)
        self.runner = CommandRunner(
            RankProcess(
                "trainer-0",
                self.client,  # type: ignore[arg-type]
                lambda event, **fields: self.events.append((event, fields)),
            ),
            job.spec,
            self.groups,
            self.failed,
        )

    def __enter__(self) -> LocalTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.groups.close()
        self.runner.close()

    def execute(self, command: Command) -> CommandResult:
        return self.runner.execute(command)

    def metrics(self, command: Command) -> dict[str, float]:
        """Of a command that must succeed."""
        result = self.execute(command)
        assert result.ok, result.error
        return result.metrics

    def step(self, stage: Stage, step: int, batch: bytes, models: list[str], micro_batches: int, **fields: Any) -> Step:
        """A step on `batch`, each model's micro-batches forward and backward in turn."""
        key = f"{stage.value}/{step}"
        name = key
        while self.client.batches.get(name, batch) != batch:
            name += "'"
        self.client.batches[name] = batch
        actions = [
            Action(model=model, micro_batch=i, kind=kind)  # type: ignore[arg-type]
            for model in models
            for i in range(micro_batches)
            for kind in ("F", "B")
        ]
        return Step(id=f"{key}/step", stage=stage, step=step, batch=name, actions=[actions], **fields)
