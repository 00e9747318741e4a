"""The scorer's HTTP routes (docs/architecture.md). Forward passes run in one worker thread, in order of
arrival."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from dovetail.gpus.gpu_failure import context_is_lost, names_cuda
from dovetail.models.links.deadline import TransferError
from dovetail.protocol.http import serving
from dovetail.protocol.http.serving import Handler
from dovetail.protocol.messages import ModelRef, Receive
from dovetail.protocol.process.pulse import PROGRESS
from dovetail.protocol.wire import CONTENT_TYPE, pack, unpack
from dovetail.rollout.scoring.forward_passes import ModelScorer, NotReady
from dovetail.rollout.scoring.packed_samples import SamplesToScore
from dovetail.rollout.weight_receiver import WeightReceiver

MAX_BODY_BYTES = 256 * 2**20
R = TypeVar("R")
Log = Callable[..., None]


class LoadRequest(BaseModel):
    """POST /v1/load."""

    model_config = ConfigDict(extra="forbid")
    models: dict[str, ModelRef]


class Metrics:
    """The scorer's Prometheus metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "dovetail_scorer_requests_total",
            "Requests by route and HTTP status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "dovetail_scorer_tokens_total", "Tokens run through a model.", ["model"], registry=self.registry
        )
        self.seconds = Histogram(
            "dovetail_scorer_score_seconds",
            "Time of a score request, without waiting for the one before.",
            registry=self.registry,
        )
        self.version = Gauge(
            "dovetail_scorer_weight_version", "Version of the critic's weights.", registry=self.registry
        )


class ScorerService:
    """A `Scorer` with two threads. One runs forward passes and changes weights. The other receives weights, so that a
    version can arrive while the last one is still used.

    `temperature` is for requests that name none."""

    def __init__(
        self,
        scorer: ModelScorer,
        log: Log,
        metrics: Metrics | None = None,
        receiver: WeightReceiver | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.scorer, self.log, self.temperature = scorer, log, temperature
        self.metrics = metrics or Metrics()
        self._receiver = receiver or WeightReceiver(scorer.device)
        self._forward = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._transfer = ThreadPoolExecutor(1, thread_name_prefix="transfer")

        self._at_work = False
        # The process must end if this is set. `failure` says why.
        self.failed = asyncio.Event()
        self.failure = ""

    async def see_whether_the_gpu_failed(self, error: Exception) -> None:
        """Set `failed` if the error says that this process can no longer use its GPU."""
        loop = asyncio.get_running_loop()
        if names_cuda(error) and await loop.run_in_executor(None, context_is_lost, self.scorer.devices):
            self.failure = f"the GPU failed: {str(error).strip().splitlines()[0]}"
            self.failed.set()

    def alive(self) -> bool:
        """Whether forward passes and loads make progress, if there are any. Call it in the event loop."""
        return PROGRESS.moved() or not self._at_work

    async def _run(self, function: Callable[..., R], *args: Any) -> R:
        def work() -> R:
            self._at_work = True
            try:
                return function(*args)
            finally:
                self._at_work = False
                PROGRESS.made()

        return await asyncio.get_running_loop().run_in_executor(self._forward, work)

    async def load(self, models: dict[str, ModelRef]) -> None:
        """Do the same as `Scorer.load`, after the forward passes in progress."""
        started = time.monotonic()
        await self._run(self.scorer.load, models)
        self.log("models.loaded", models=sorted(models), seconds=round(time.monotonic() - started, 3))

    async def bring(self) -> list[str]:
        """Do the same as `Scorer.bring`."""
        return await self._run(self.scorer.bring)

    async def leave(self) -> None:
        """Do the same as `Scorer.leave`, after the forward passes in progress."""
        await self._run(self.scorer.leave)

    async def score(self, want: list[str], body: bytes, temperature: float) -> bytes:
        """Score packed arrays. Returns packed arrays. Raises NotReady and ValueError."""

        def work() -> bytes:
            with self.metrics.seconds.time():
                return pack(self.scorer.score(want, samples, temperature))

        samples = _samples(body)
        return await self._run(work)

    async def begin(self, want: list[str], body: bytes, temperature: float) -> list[int]:
        """Do the same as `Scorer.begin` with packed arrays. Raises NotReady and ValueError."""
        return await self._run(self.scorer.begin, want, _samples(body), temperature)

    async def receive(self, receive: Receive) -> None:
        """Take the critic's segments and apply them once all are there and verified.

        Raises TransferError, NotReady or ValueError. Then the critic scores nothing until a later call succeeds."""
        segments = [s for s in receive.offer.segments if s.model == "critic"]
        if not segments:
            raise ValueError("the offer has no segment of model critic")
        offer = receive.offer.model_copy(update={"segments": segments})
        mine = receive.model_copy(update={"offer": offer})
        started = time.monotonic()
        try:
            staged = await asyncio.get_running_loop().run_in_executor(
                self._transfer, lambda: self.scorer.stage_weights(self._receiver.receive(mine))
            )
            await self._run(self.scorer.apply_weights, staged, offer.version)
        except Exception as error:
            await self._run(self.scorer.lose_weights, f"version {offer.version} failed: {error}")
            raise
        self.metrics.version.set(offer.version)
        self.log("weights.applied", version=offer.version, seconds=round(time.monotonic() - started, 3))

    def info(self) -> dict[str, Any]:
        """The body of the answer to GET /v1/info."""
        scorer = self.scorer
        return {
            "models": {name: ref.model_dump(mode="json") for name, ref in scorer.models.items()},
            "weight_version": scorer.critic_version,
            "device": scorer.place,
            "dtype": str(scorer.dtype).removeprefix("torch."),
            "max_tokens": scorer.max_tokens,
            "temperature": self.temperature,
            "room": scorer.room,
        }

    def close(self) -> None:
        """Stop taking work. Work that runs in a thread is not waited for."""
        self._forward.shutdown(wait=False, cancel_futures=True)
        self._transfer.shutdown(wait=False, cancel_futures=True)


def _samples(body: bytes) -> SamplesToScore:
    """The samples in a request's body. Raises ValueError."""
    try:
        return SamplesToScore.read(unpack(body))
    except SafetensorError as error:
        raise ValueError(f"the body is not a safetensors document: {error}") from error


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def make_app(service: ScorerService, token: str) -> web.Application:
    """The routes. All except /metrics and /healthz ask for the job's token. An error is one sentence of text: 400 for a
    bad request, 401 without the token, 409 if a model is not loaded, 502 for a failed transfer, 507 if memory runs
    out."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await answer(request, handler)
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        service.metrics.requests.labels(route, response.status).inc()
        if response.status >= 400:
            text = response.text if isinstance(response, web.Response) else None
            service.log("request.failed", route=route, status=response.status, error=text)
        return response

    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            await serving.admit(request, token)
            return await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status, text=error.text or error.reason)
        except NotReady as error:
            return web.Response(status=409, text=str(error))
        except TransferError as error:
            return web.Response(status=502, text=str(error))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return web.Response(status=400, text=f"bad request: {problems}")
        except ValueError as error:
            return web.Response(status=400, text=str(error))
        except Exception as error:
            if _is_out_of_memory(error):
                return web.Response(
                    status=507, text=f"out of memory on {service.scorer.place}; lower --max-tokens: {error}"
                )
            await service.see_whether_the_gpu_failed(error)
            return web.Response(status=500, text=f"{type(error).__name__}: {error}")

    async def info(_: web.Request) -> web.Response:
        return web.json_response(service.info())

    async def load(request: web.Request) -> web.Response:
        await service.load(LoadRequest.model_validate_json(await request.read()).models)
        return web.json_response(service.info())

    def asked(request: web.Request) -> tuple[list[str], float]:
        """The request's models and temperature. Raises ValueError."""
        want = [name for name in request.query.get("want", "").split(",") if name]
        if not want:
            raise ValueError(f"say what is wanted: {request.path}?want=reference,reward,critic")
        try:
            temperature = float(request.query.get("temperature", service.temperature))
        except ValueError:
            raise ValueError(f"temperature {request.query['temperature'][:64]!r} is not a number") from None
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be a number above 0, not {temperature}")
        return want, temperature

    async def score(request: web.Request) -> web.Response:
        want, temperature = asked(request)
        body = await service.score(want, await request.read(), temperature)
        return web.Response(body=body, content_type=CONTENT_TYPE)

    async def begin(request: web.Request) -> web.Response:
        want, temperature = asked(request)
        return web.json_response({"held": await service.begin(want, await request.read(), temperature)})

    async def bring(_: web.Request) -> web.Response:
        return web.json_response({"models": await service.bring()})

    async def leave(_: web.Request) -> web.Response:
        await service.leave()
        return web.json_response({})

    async def weights(request: web.Request) -> web.Response:
        message = Receive.model_validate_json(await request.read())
        await service.receive(message)
        return web.json_response({"version": message.offer.version})

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            web.get("/v1/info", info),
            web.post("/v1/load", load),
            web.post("/v1/score", score),
            web.post("/v1/begin", begin),
            web.post("/v1/weights", weights),
            web.post("/v1/bring", bring),
            web.post("/v1/leave", leave),
            web.get("/metrics", serving.metrics(service.metrics.registry)),
            web.get("/healthz", serving.healthz),
        ]
    )
    return app
