"""Generates samples on the servers of the fleet, and survives failures of servers.

Tokens are stored as they arrive. A sample must leave its server when the server dies, stalls, aborts the request, is
drained, or has too few samples left (the long tail, RLHFuse section 4). It continues on another server from the prompt
and its tokens so far. The noise of sampling depends only on the position, so the response ends as it would have on the
first server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dovetail.coordinator.job import Job
from dovetail.coordinator.samples.allotment import Allotment
from dovetail.coordinator.samples.drawing import Drawing, DrawingFollower, Shared
from dovetail.coordinator.samples.in_flight import Generated, GenerationSettings, request_id
from dovetail.coordinator.samples.kv_migration import KVMigration
from dovetail.coordinator.samples.lineup import Lineup, Turn
from dovetail.coordinator.samples.migrations import StopStrings
from dovetail.coordinator.samples.requests import Requests
from dovetail.coordinator.samples.streams import Growing
from dovetail.coordinator.store.samples import Sample, State
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.coordinator.workers.weights import Weights
from dovetail.manifest.training_types import Generation
from dovetail.protocol.sampling import asked_of_servers


class Generator:
    """Generates the samples of a job on the rollouts of the fleet. `drain` may be called while `generate` runs.

    `weights` learns which version is needed. `token` is the job's token. `decode` returns the text of tokens, with
    special tokens. It is needed if the job has stop strings. Use it with `async with`, or call `close`."""

    def __init__(
        self,
        job: Job,
        fleet: Fleet,
        weights: Weights,
        token: str,
        decode: Callable[[Sequence[int]], str] | None = None,
        settings: GenerationSettings | None = None,
    ) -> None:
        spec, log = job.spec, job.log
        settings = settings or GenerationSettings(wait=job.start_seconds)
        self.kv = KVMigration(job.clock)
        self._fleet, self._samples = fleet, job.store.samples
        gather = spec.plan.inter_stage_fusion not in ("Off", 0)
        self._lineup = Lineup(fleet, weights, Allotment(spec.generation.max_concurrent, gather), spec.ppo.lag, log)
        self._shared = Shared(
            job.store,
            fleet,
            asked_of_servers(spec),
            log,
            settings,
            job.clock,
            self.kv,
            Requests(token, settings, log),
            StopStrings(spec.generation.stop, decode),
            spec.ppo.routing_replay,
        )
        self._drawings: dict[int, Drawing] = {}
        for sample in job.store.take_interrupted():
            owner = (sample.instance or "", sample.incarnation or "")
            self._shared.leftovers.setdefault(owner, []).append(request_id(sample.key, sample.attempt))

    async def __aenter__(self) -> Generator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. It may be called again."""
        await self._shared.requests.close()

    @contextmanager
    def open(self, iteration: int, version: int) -> Iterator[Turn]:
        """Open an iteration, whose samples are in the store. It stays open until this context ends. Until then its
        samples are drawn and scored, with this version of the weights."""
        counts = self._samples.counts(iteration)
        with self._lineup.open(iteration, version, sum(counts.values()), counts.get(State.PENDING, 0)) as turn:
            yield turn

    async def generate(
        self, turn: Turn, follower: DrawingFollower | None = None, generation: Generation | None = None
    ) -> Generated:
        """Generate every pending sample of the iteration, and store it. Raises GenerationError or StoreError.

        `generation` says how these samples are drawn, if it differs from the job's other samples. Its limit of tokens
        and its stop strings must be the job's. When the call is cancelled, the requests end and the tokens are
        kept."""
        pending = self._samples.samples(turn.iteration, State.PENDING)
        return await self.draw(turn, pending, follower or DrawingFollower(), generation)

    async def draw(
        self, turn: Turn, pending: Sequence[Sample], follower: DrawingFollower, generation: Generation | None
    ) -> Generated:
        """As `generate`, for these samples of the iteration, and for those that `follower` adds."""
        iteration = turn.iteration
        if iteration in self._drawings:
            raise RuntimeError("generate is already running")
        drawing = Drawing(self._shared, turn, pending, follower, generation)
        self._drawings[iteration] = drawing
        try:
            return await drawing.run()
        finally:
            del self._drawings[iteration]

    def idle(self, name: str) -> bool:
        """Whether an instance has nothing to generate. It then gets new samples only if other instances fail."""
        return all(drawing.idle(name) for drawing in self._drawings.values())

    def on_servers(self) -> dict[str, tuple[int, float]]:
        """By server that has samples: their number, and when its last token came, in monotonic seconds."""
        found: dict[str, tuple[int, float]] = {}
        for drawing in self._drawings.values():
            for name, (count, token) in drawing.on_servers().items():
                before = found.get(name, (0, token))
                found[name] = before[0] + count, max(before[1], token)
        return found

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
