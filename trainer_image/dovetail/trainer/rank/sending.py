"""The thread of a rank that sends kept weight versions while the main thread trains."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dovetail.models.links.deadline import TransferError
from dovetail.models.transfer import store_at
from dovetail.protocol.messages import Command, CommandResult, NextRequest, Publish, Span
from dovetail.trainer.communication.groups import Groups, PeerLost, peer_errors
from dovetail.trainer.rank.coordinator_client import CoordinatorUnreachable, RankProcess, Refused, StaleGeneration
from dovetail.trainer.weight_sender import WeightSender
from dovetail.trainer.weights.kept_weights import KeptWeights

POLL_SECONDS = 0.02
LANE = "sending"


class Exchange:
    """Small messages between the sending threads of all ranks. They do not use the groups of the main threads, because
    two threads may not share a group.

    Messages go through a store at rank 0. `over()` says whether to stop waiting. Every method raises PeerLost if the
    store is gone, `over` becomes true, or a message is later than `timeout`."""

    def __init__(self, groups: Groups, store: dist.Store | None, timeout: timedelta, over: Callable[[], bool]) -> None:
        """`store` may be None if there is only one rank."""
        self.rank, self.world_size = groups.rank, groups.world_size
        self.device = groups.device
        self.model: Mapping[str, Any] = groups.model
        self._store, self._timeout, self._over = store, timeout, over
        self._number = 0
        self._read: list[str] = []

    @classmethod
    def form(cls, groups: Groups, host: str, timeout: timedelta, over: Callable[[], bool]) -> Exchange:
        """Connect the ranks at `host`, rank 0's address. This is a collective call of the main threads. Raises
        PeerLost."""
        store: dist.Store | None = None
        if groups.world_size > 1:
            with peer_errors("forming the exchange of the sending threads"):
                if groups.meeting:
                    store = dist.FileStore(f"{groups.meeting}-sending", groups.world_size)
                    store.set_timeout(timeout)
                    return cls(groups, store, timeout, over)
                if groups.rank == 0:
                    store = store_at(host, 0, None, timeout, wait_for_workers=False)
                port = groups.broadcast_json(int(store.port) if isinstance(store, dist.TCPStore) else 0)
                if groups.rank != 0:
                    store = dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
        return cls(groups, store, timeout, over)

    def broadcast_json(self, value: Any, patient: bool = False) -> Any:
        """Rank 0's value, on every rank. With `patient` there is no deadline. Raises PeerLost."""
        if self._store is None:
            return value
        self._number += 1
        key = f"word/{self._number}"
        if self.rank == 0:
            with peer_errors("telling the other sending threads"):
                self._store.set(key, json.dumps(value))
            self._read.append(key)
            return value
        return json.loads(self._take(key, patient))

    def gather_json(self, value: Any) -> list[Any] | None:
        """Every rank's value, in the order of ranks, on rank 0, and None on other ranks. Raises PeerLost."""
        if self._store is None:
            return [value]
        self._number += 1
        keys = [f"part/{self._number}/{rank}" for rank in range(self.world_size)]
        if self.rank != 0:
            with peer_errors("telling rank 0's sending thread"):
                self._store.set(keys[self.rank], json.dumps(value))
            return None
        found = [value, *(json.loads(self._take(key, False)) for key in keys[1:])]
        # All ranks have read the messages before this one.
        with peer_errors("tidying up after the sending threads"):
            for key in [*self._read, *keys[1:]]:
                self._store.delete_key(key)
        self._read.clear()
        return found

    def _take(self, key: str, patient: bool) -> bytes:
        assert self._store is not None
        end = time.monotonic() + self._timeout.total_seconds()
        with peer_errors("waiting for a sending thread"):
            while not self._store.check([key]):
                if self._over():
                    raise PeerLost("the generation is over")
                if not patient and time.monotonic() > end:
                    raise PeerLost(f"a sending thread said nothing for {self._timeout.total_seconds():.0f} s")
                time.sleep(POLL_SECONDS)
            return bytes(self._store.get(key))


class SendingThread:
    """Sends the weights of one generation. `over()` says whether this rank leaves the generation. `cancelled(id)`: see
    `WeightSender`."""

    def __init__(
        self,
        process: RankProcess,
        kept: KeptWeights,
        exchange: Exchange,
        generation: int,
        cancelled: Callable[[str], bool],
        over: Callable[[], bool],
    ) -> None:
        self._kept, self._exchange, self._client, self._generation = kept, exchange, process.client, generation
        self._process, self._log, self._over = process.name, process.log, over
        self._running = ""
        self._stopped = threading.Event()
        self._sender = WeightSender(
            exchange,
            process.client.offer,
            host=process.host,
            cancelled=lambda: self._stopped.is_set() or cancelled(self._running),
        )
        self._thread = threading.Thread(target=self._run, name="sending", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end soon. May be called repeatedly."""
        self._stopped.set()

    @property
    def ending(self) -> bool:
        """Whether the generation is over for this thread."""
        return self._stopped.is_set() or self._over()

    def _run(self) -> None:
        try:
            if self._exchange.device.type == "cuda":
                torch.cuda.set_device(self._exchange.device)
                with torch.cuda.stream(torch.cuda.Stream(self._exchange.device)):
                    self._serve()
            else:
                self._serve()
        except (PeerLost, StaleGeneration, CoordinatorUnreachable, Refused) as reason:
            # The main thread gets the same error, now or soon.
            self._log("sending.ended", generation=self._generation, reason=str(reason))
        except Exception as error:
            self._log("sending.failed", generation=self._generation, exception=error)
        finally:
            self._sender.close()

    def _serve(self) -> None:
        result: CommandResult | None = None
        while not self.ending:
            if self._exchange.rank == 0:
                command, result = self._next(result), None
                if command is None:
                    continue
                self._exchange.broadcast_json(command.model_dump(mode="json"))
            else:
                command = Publish.model_validate(self._exchange.broadcast_json(None, patient=True))
            result = self._publish(command)

    def _next(self, result: CommandResult | None) -> Publish | None:
        request = NextRequest(
            generation=self._generation, result=result, versions=self._kept.versions, thread="weights"
        )
        command: Command | None = self._client.next(request, self._client.patience).command
        # If a finished command comes again, the coordinator did not get its result.
        if command is None or (result is not None and command.id == result.id):
            return None
        assert isinstance(command, Publish)
        return command

    def _publish(self, command: Publish) -> CommandResult:
        started, self._running = time.time(), command.id
        self._log("command.started", id=command.id, kind=command.kind)
        metrics: dict[str, float] = {}
        with self._kept.using(command.version) as kept:
            error = f"version {command.version} is not kept" if kept is None else kept.problem
            errors = self._exchange.gather_json(error)
            error = self._exchange.broadcast_json(next((e for e in errors or [] if e is not None), None))
            if error is None and kept is not None:
                try:
                    metrics = self._sender.publish(command, kept.models)
                except TransferError as problem:
                    error = str(problem)
            ended = time.time()
            span = Span(
                name="publish",
                process=self._process,
                lane=LANE,
                start=started,
                end=ended,
                args={"version": command.version, "receivers": ", ".join(r.name for r in command.receivers)},
            )
            self._log(
                "command.finished", id=command.id, ok=error is None, error=error, seconds=round(ended - started, 3)
            )
            return CommandResult(
                id=command.id,
                ok=error is None,
                error=error,
                metrics={**metrics, "seconds": ended - started} if error is None else {},
                spans=[span],
                probe=kept.probe if kept is not None and error is None else None,
            )
