"""Keeps weight versions in a rank's host memory, so that the rank can send them while it trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dovetail.models.transfer import Part
from dovetail.protocol.messages import Probe
from dovetail.protocol.weights.layout import StageRanks
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.weight_sender import WeightParts, whole_part

Copies = dict[tuple[str, str], torch.Tensor]  # the key is (model, tensor name)


@dataclass
class Kept:
    """One version. `models` holds what this rank sends of each model. `probe` holds the version's log-probabilities, if
    there are any. `problem` says why the version cannot be sent. It is None if it can."""

    version: int
    models: dict[str, WeightParts]
    probe: Probe | None
    problem: str | None
    copies: Copies = field(default_factory=dict)
    users: int = 0


class KeptWeights:
    """The newest versions. The main thread adds them, and the thread that sends them reads them.

    When a version is no longer kept, the next one overwrites its copies, unless they are still being sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, Kept] = {}
        self._most = 0
        self._free: Copies = {}
        self._stream: torch.cuda.Stream | None = None  # for copies from the GPU

    def begin(self, most: int) -> None:
        """Drop all versions, and keep the newest `most` from now on."""
        with self._lock:
            self._kept.clear()
            self._free.clear()
            self._most = most

    @property
    def keeps(self) -> bool:
        """Whether versions are kept at all."""
        return self._most > 0

    @property
    def versions(self) -> list[int]:
        """The versions that can be sent."""
        with self._lock:
            return sorted(self._kept)

    def copy(self, engine: Engine, senders: int) -> Kept:
        """Begin to copy the engine's current weights, and give the result to `add`. This is a collective call. At most
        `senders` ranks of a stage may send.

        A deferred optimizer step is applied to each layer just before the layer is copied. On a GPU the copies have a
        stream of their own, so they overlap with the rest of the step (PUZZLE's shadow model)."""
        with self._lock:
            for version in sorted(self._kept)[: max(0, len(self._kept) + 1 - self._most)]:
                gone = self._kept.pop(version)
                if not gone.users:
                    self._free = gone.copies
            free, self._free = self._free, {}
        if self._stream is None and engine.groups.device.type == "cuda":
            self._stream = torch.cuda.Stream(engine.groups.device)
        kept = Kept(engine.step, {}, None, None)
        for name in sorted(engine.models):
            kept.models[name] = self._copied(engine, name, senders, free, kept.copies)
        return kept

    def add(self, kept: Kept, probe: Probe | None, problem: str | None = None) -> None:
        """Keep this version. `problem` says why it cannot be sent. Call it before the next optimizer step.

        The copies are complete when it returns, so later steps cannot change what is sent."""
        kept.probe, kept.problem = probe, problem
        if self._stream is not None:
            self._stream.synchronize()
        with self._lock:
            self._kept[kept.version] = kept

    @contextmanager
    def using(self, version: int) -> Iterator[Kept | None]:
        """The version, which does not change inside the block, or None if it is not kept."""
        with self._lock:
            kept = self._kept.get(version)
            if kept is not None:
                kept.users += 1
        try:
            yield kept
        finally:
            if kept is not None:
                with self._lock:
                    kept.users -= 1

    def _copied(self, engine: Engine, model: str, senders: int, free: Copies, copies: Copies) -> WeightParts:
        source = engine.sendable(model, senders)
        groups = engine.models[model].groups
        if isinstance(source, WeightParts):
            layout, parts = source.layout, source.iterate()
        else:
            assert callable(source)
            layout, parts = StageRanks(), map(whole_part, source())
        sends = groups.dp_rank < layout.dp and groups.tp_rank < layout.tp
        held: list[Part] = []
        for part in parts:  # every rank must iterate to the end, because this may be a collective
            if not sends:
                continue
            tensor = part.tensor.detach()
            copy = free.pop((model, part.name), None)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._begin_copy(tensor, copy)
            copies[model, part.name] = copy
            held.append(part._replace(tensor=copy))
        return WeightParts(lambda: iter(held), layout)

    def _begin_copy(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        if self._stream is None or not tensor.is_cuda:
            copy.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
        # The caller may free the tensor, for example a merged adapter, before it is copied.
        tensor.record_stream(self._stream)
