"""Measurements of the executor's actions: seconds of compute, and bytes of saved activations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.cuda.memory import memory_stats_as_nested_dict

from dovetail.protocol.messages import Kind, StageTimes
from dovetail.trainer.compat import arrived, viewed
from dovetail.trainer.engine.optim import local

# The kind of action, and its (model, chunk, micro-batch).
Key = tuple[Kind, tuple[str, int, int]]


class ActionStopwatch:
    """Measures when blocks of compute began and how long they took, by key. On a GPU it uses events. So nothing waits
    for the device before `spans` or `seconds` is called. `clock` gives seconds since the epoch."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.time) -> None:
        self._gpu = device.type == "cuda"
        self._clock = clock
        self._spans: dict[Key, tuple[float, float]] = {}
        self._events: list[tuple[Key, Any, Any]] = []

    def time(self, key: Key) -> AbstractContextManager[None]:
        """Measure the block under this key."""
        return self._on_gpu(key) if self._gpu else _OnHost(self._spans, key, self._clock)

    @contextmanager
    def _on_gpu(self, key: Key) -> Iterator[None]:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._events.append((key, first, last))

    def spans(self) -> dict[Key, tuple[float, float]]:
        """The begin of each block (seconds since the epoch) and its duration in seconds. Waits for the device."""
        if self._events:
            # The device's clock is compared with the host's once, at the end. The stream runs in order, so this event
            # is the last one.
            now = torch.cuda.Event(enable_timing=True)
            now.record()
            now.synchronize()
            end = self._clock()
            for key, first, last in self._events:
                began = end - first.elapsed_time(now) / 1e3
                self._spans[key] = (began, first.elapsed_time(last) / 1e3)
            self._events.clear()
        return self._spans

    def seconds(self) -> dict[Key, float]:
        """The duration of each block in seconds. Waits for the device."""
        return {key: seconds for key, (_, seconds) in self.spans().items()}


class _OnHost:
    """Adds the begin of its block and its duration to `spans`. It is cheaper than a generator."""

    __slots__ = ("_began", "_clock", "_key", "_spans", "_start")

    def __init__(self, spans: dict[Key, tuple[float, float]], key: Key, clock: Callable[[], float]) -> None:
        self._spans, self._key, self._clock = spans, key, clock

    def __enter__(self) -> None:
        self._began, self._start = self._clock(), time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._spans[self._key] = (self._began, time.perf_counter() - self._start)


class Meter(Protocol):
    """A context manager. `bytes` counts the activations that its block keeps for the backward pass."""

    bytes: int

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...


class AllocatedBytes:
    """Counts the bytes of device memory that are allocated at the end of the block but not at its begin. `gathered`,
    the bytes of weights that were all-gathered meanwhile, are subtracted. This costs the host almost nothing.
    `SavedBytes` looks at every tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gathered = 0
        self.bytes = 0

    def __enter__(self) -> AllocatedBytes:
        self._before = self._allocated()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bytes = max(0, self._allocated() - self._before - self.gathered)

    def _allocated(self) -> int:
        """The result of `torch.cuda.memory_allocated`. That function makes and sorts a table of all statistics first,
        and the number is needed twice in each forward pass."""
        found: int = memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["current"]
        return found


class SavedBytes:
    """Counts the bytes of the tensors that autograd saves for the backward pass inside the block. Weights do not count.
    A tensor that several operations save counts once."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {local(weight).untyped_storage().data_ptr() for weight in weights}
        self.bytes = 0

    def __enter__(self) -> SavedBytes:
        self.bytes = 0
        self._seen: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        tensor = arrived(tensor)
        # A linear layer that is split over tp ranks saves a transposed view of its weight.
        if not isinstance(viewed(tensor), torch.nn.Parameter):
            storage = local(tensor).untyped_storage()
            place = storage.data_ptr()
            if place not in self._seen and place not in self._weights:
                self._seen.add(place)
                self.bytes += storage.nbytes()
        # An operation may save its own output. Without `detach` it would then keep itself and the whole graph alive, if
        # no backward pass visits it.
        return tensor.detach()


class Collected:
    """Measurements of several runs of one schedule, by the position within a mini-batch."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int, Kind, int], list[float]] = {}
        self._bytes: dict[tuple[str, int, int], list[float]] = {}
        self.peak_bytes = 0

    def add(
        self,
        seconds: dict[Key, float],
        saved: dict[tuple[str, int, int], int],
        peak_bytes: int,
        counts: dict[str, int],
    ) -> None:
        """Add a run. `counts[model]` is the number of micro-batches in a mini-batch. `seconds` has the durations, and
        `saved` the bytes by model, chunk and micro-batch. `peak_bytes` is the run's largest sum of saved bytes."""
        for (kind, (model, chunk, index)), value in seconds.items():
            self._seconds.setdefault((model, chunk, kind, index % counts[model]), []).append(value)
        for (model, chunk, index), size in saved.items():
            self._bytes.setdefault((model, chunk, index % counts[model]), []).append(size)
        self.peak_bytes = max(self.peak_bytes, peak_bytes)

    def take(self, rank: int) -> list[StageTimes]:
        """One message for each stage of each model, with medians. Afterwards all measurements are dropped."""
        found = []
        for model, chunk in sorted({key[:2] for key in self._seconds}):
            kinds: dict[Kind, list[float]] = {}
            for kind in ("F", "B", "I", "W"):
                values = [v for key, v in sorted(self._seconds.items()) if key[:3] == (model, chunk, kind)]
                if values:
                    kinds[kind] = [statistics.median(v) for v in values]
            sizes = [statistics.median(v) for key, v in sorted(self._bytes.items()) if key[:2] == (model, chunk)]
            found.append(StageTimes(rank=rank, model=model, chunk=chunk, seconds=kinds, activation=sizes))
        self._seconds, self._bytes, self.peak_bytes = {}, {}, 0
        return found
