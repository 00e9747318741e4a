"""Generates samples on the servers of the fleet, and survives failures of servers.

Tokens are stored as they arrive. A sample must leave its server when the server dies, stalls, aborts the request, is
drained, or has too few samples left (the long tail, RLHFuse section 4). It continues on another server from the prompt
and its tokens so far. The noise of sampling depends only on the position, so the response ends as it would have on the
first server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dovetail.coordinator.samples.drawing import Drawing, Shared, Tail
from dovetail.coordinator.samples.in_flight import Generated, GenerationSettings, request_id
from dovetail.coordinator.samples.kv_migration import KVMigration
from dovetail.coordinator.samples.lineup import Turn
from dovetail.coordinator.samples.migrations import StopStrings
from dovetail.coordinator.samples.requests import Requests
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.store.samples import Sample, State
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.manifest.types import Generation


class Generator:
    """Generates the samples of a job. `drain` may be called while `generate` runs.

    `token` is the job's token. `clock` returns monotonic seconds. `decode` returns the text of tokens, with special
    tokens. It is needed if the job has stop strings. With `replay`, servers must report which experts each token used.
    Use it with `async with`, or call `close`."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        generation: Generation,
        token: str,
        log: Callable[..., None],
        settings: GenerationSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        decode: Callable[[Sequence[int]], str] | None = None,
        replay: bool = False,
    ) -> None:
        settings = settings or GenerationSettings()
        self.kv = KVMigration(clock)
        self._fleet = fleet
        self._shared = Shared(
            store,
            fleet,
            generation,
            log,
            settings,
            clock,
            self.kv,
            Requests(token, settings, log),
            StopStrings(generation.stop, decode),
            replay,
        )
        self._drawings: dict[int, Drawing] = {}
        for sample in store.take_interrupted():
            owner = (sample.instance or "", sample.incarnation or "")
            self._shared.leftovers.setdefault(owner, []).append(request_id(sample.key, sample.attempt))

    async def __aenter__(self) -> Generator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. It may be called again."""
        await self._shared.requests.close()

    async def generate(
        self,
        iteration: int,
        samples: Sequence[Sample] | None = None,
        on_finished: Callable[[Sample], None] | None = None,
        progress: Callable[[int, int, int], None] | None = None,
        tail: Tail | None = None,
        generation: Generation | None = None,
        turn: Turn | None = None,
    ) -> Generated:
        """Generate every given sample, and store it. By default these are all pending ones of the iteration. Raises
        GenerationError or StoreError.

        `on_finished` gets each sample when it is stored as generated. It does not get samples that were generated
        before this call, or that are stored while the call is cancelled or fails. Ask the store for these.
        `progress(done, total, tokens)` is called after each flush. When `tail` names instances, all remaining samples
        migrate to these, as long as one of them lives. `generation` says how these samples are drawn, if it differs
        from the job's other samples. Its limit of tokens and its stop strings must be the job's. When the call is
        cancelled, the requests end and the tokens are kept. `turn` is the iteration's place among several open ones.
        Without it no other call may run."""
        if iteration in self._drawings or (self._drawings and turn is None):
            raise RuntimeError("generate is already running")
        chosen = self._shared.store.samples.samples(iteration, State.PENDING) if samples is None else samples
        chosen = [s for s in chosen if s.state is State.PENDING]
        self._drawings[iteration] = drawing = Drawing(
            self._shared, iteration, chosen, on_finished, progress, tail, generation, turn
        )
        try:
            return await drawing.run()
        finally:
            del self._drawings[iteration]

    def idle(self, name: str) -> bool:
        """Whether an instance has nothing to generate. It then gets new samples only if other instances fail."""
        return all(drawing.idle(name) for drawing in self._drawings.values())

    def growing(self, iteration: int) -> list[Growing]:
        """The iteration's samples that servers are generating, with their tokens so far."""
        drawing = self._drawings.get(iteration)
        return [] if drawing is None else drawing.growing()

    def left(self, name: str) -> bool:
        """Whether an instance may end. It must have no samples. Each sample that left it must have its next token from
        another instance, or have no other instance to go to."""
        return all(drawing.left(name) for drawing in self._drawings.values())

    async def drain(self, name: str) -> None:
        """Give an instance no more work, and move its samples, with their tokens, to other instances. Returns when it
        has none left. `fleet.drain(name, False)` ends the draining."""
        self._fleet.drain(name)
        for drawing in list(self._drawings.values()):
            await drawing.drain(name)
