"""The FastAPI application. It has routes, errors, metrics and the page. `service` computes the answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.kube.connection import KubeError
from dovetail.manifest.base import NAME_PATTERN
from dovetail.protocol.files.run_rows import QUESTION, ROW_STAGES
from dovetail.statusapi.answers import IterationList, JobDetail, JobList, PodLogList, Problem
from dovetail.statusapi.auth import Forbidden, Unauthenticated
from dovetail.statusapi.coordinator_reader import Unreachable
from dovetail.statusapi.fair_room import EventResponse, LargeResponse, TooMany
from dovetail.statusapi.jobs import Large, NotFound, Service
from dovetail.web.page_files import HEADERS, INDEX, PageFile, page_files

Namespace = Annotated[str, Path(max_length=63, pattern=NAME_PATTERN, description="Kubernetes namespace.")]
Name = Annotated[str, Path(max_length=63, pattern=NAME_PATTERN, description="The RLHFJob's name.")]
Pod = Annotated[str, Path(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", description="A pod's name.")]
Token = Annotated[str | None, Header(alias="Authorization", include_in_schema=False)]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most jobs to return.")]
Rest = Annotated[str | None, Query(alias="continue", max_length=4096)]

# The maximum time to read a large answer.
SEND_SECONDS = 30.0
_SAYS = {
    400: "A parameter is wrong.",
    401: "The bearer token is missing, wrong or expired.",
    403: "RBAC does not let the user.",
    404: "There is none.",
    502: "The coordinator cannot be asked.",
    503: "The Kubernetes API does not answer, or too many streams or large answers are under way.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": Problem, "description": said} for code, said in _SAYS.items()
}
_STATUS: dict[type[Exception], int] = {
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    Unreachable: 502,
    TooMany: 503,
}


def create_app(service: Callable[[], AbstractAsyncContextManager[Service]]) -> FastAPI:
    """The application. It enters the context manager `service` while it runs."""
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        async with service() as app.state.service:
            yield

    app = FastAPI(
        title="Dovetail status API",
        description="RLHFJobs: list, get, iterations, plan, logs and live progress. Send a Kubernetes bearer token; "
        "the rights are those of RBAC (get and list of rlhfjobs, list of events and pods, get of pods/log).",
        version="v1",
        lifespan=lifespan,
        docs_url=None,  # the pages load scripts from elsewhere
        redoc_url=None,
    )
    _routes(app)
    _open_routes(app, registry)
    _errors(app)
    app.add_middleware(ApiMetrics, registry=registry)
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # ours is 400
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def openapi_document() -> dict[str, Any]:
    """The description of the API as OpenAPI. It needs no cluster."""

    @asynccontextmanager
    async def none() -> Any:
        raise RuntimeError("this application is only described")
        yield

    return create_app(none).openapi()


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


Ask = Annotated[Service, Depends(_service)]


def _sent(large: Large, kind: str) -> Response:
    headers = {"X-Content-Type-Options": "nosniff"}
    return LargeResponse(large.content, large.share, SEND_SECONDS, kind, headers)


def _routes(app: FastAPI) -> None:
    base = "/api/v1/namespaces/{namespace}/rlhfjobs"
    common: dict[str, Any] = {
        "responses": _ERRORS,
        "dependencies": [Depends(HTTPBearer(auto_error=False, description="A Kubernetes bearer token."))],
        "tags": ["rlhfjobs"],
    }

    @app.get("/api/v1/rlhfjobs", operation_id="listAllJobs", summary="The jobs of all namespaces", **common)
    async def list_all_jobs(ask: Ask, limit: Limit = 500, rest: Rest = None, token: Token = None) -> JobList:
        return await ask.jobs(token, "", limit, rest)

    @app.get(base, operation_id="listJobs", summary="The jobs of a namespace", **common)
    async def list_jobs(
        ask: Ask, namespace: Namespace, limit: Limit = 500, rest: Rest = None, token: Token = None
    ) -> JobList:
        return await ask.jobs(token, namespace, limit, rest)

    @app.get(base + "/{name}", operation_id="getJob", summary="Everything about a job", **common)
    async def get_job(ask: Ask, namespace: Namespace, name: Name, token: Token = None) -> JobDetail:
        return await ask.job(token, namespace, name)

    @app.get(base + "/{name}/iterations", operation_id="listIterations", summary="Finished iterations", **common)
    async def list_iterations(
        ask: Ask,
        namespace: Namespace,
        name: Name,
        stage: Annotated[
            str | None, Query(pattern=f"^({'|'.join(ROW_STAGES)})$", description="Of this stage only.")
        ] = None,
        after: Annotated[int, Query(ge=0, description="`next` of an earlier answer.")] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        token: Token = None,
    ) -> IterationList:
        return await ask.iterations(token, namespace, name, stage, after, limit)

    @app.get(
        base + "/{name}/iterations/{iteration}/trace",
        operation_id="getTrace",
        summary="A PPO iteration's timeline, in Chrome's trace format (Perfetto opens it)",
        response_class=Response,
        **(common | {"responses": _ERRORS | {200: {"content": {"application/json": {}}}}}),
    )
    async def get_trace(
        ask: Ask,
        namespace: Namespace,
        name: Name,
        iteration: Annotated[int, Path(ge=0, le=999_999_999)],
        token: Token = None,
    ) -> Response:
        return _sent(await ask.trace(token, namespace, name, iteration), "application/json")

    @app.get(
        base + "/{name}/run/{question:path}",
        operation_id="getRunPage",
        summary="What the run page shows: overview, metrics, samples, timelines, schedule",
        response_class=Response,
        **(common | {"responses": _ERRORS | {200: {"content": {"application/json": {}}}}}),
    )
    async def get_run_page(
        ask: Ask,
        namespace: Namespace,
        name: Name,
        question: Annotated[str, Path(max_length=64, pattern=f"^(?:{QUESTION})$", description="As in `samples/12`.")],
        token: Token = None,
    ) -> Response:
        return _sent(await ask.page(token, namespace, name, question), "application/json")

    @app.get(base + "/{name}/plan", operation_id="getPlan", summary="The plan document", **common)
    async def get_plan(ask: Ask, namespace: Namespace, name: Name, token: Token = None) -> dict[str, Any]:
        return await ask.plan(token, namespace, name)

    @app.get(
        base + "/{name}/events",
        operation_id="streamEvents",
        summary="Live progress as server-sent events",
        description="`status` (a JobDetail, whenever it changes), `iteration` (an Iteration, from the first or after "
        "Last-Event-ID), and `end` once the job is over, deleted or no longer yours to see.",
        response_class=StreamingResponse,
        **(common | {"responses": _ERRORS | {200: {"content": {"text/event-stream": {}}}}}),
    )
    async def stream_events(
        ask: Ask,
        namespace: Namespace,
        name: Name,
        last: Annotated[int, Header(alias="Last-Event-ID", ge=0)] = 0,
        token: Token = None,
    ) -> StreamingResponse:
        return EventResponse(*await ask.stream(token, namespace, name, last))

    @app.get(base + "/{name}/logs", operation_id="listLogs", summary="Where the pods' logs are", **common)
    async def list_logs(ask: Ask, namespace: Namespace, name: Name, token: Token = None) -> PodLogList:
        return await ask.logs(token, namespace, name)

    @app.get(
        base + "/{name}/logs/{pod}",
        operation_id="readLog",
        summary="The end of a pod's log",
        response_class=PlainTextResponse,
        **common,
    )
    async def read_log(
        ask: Ask,
        namespace: Namespace,
        name: Name,
        pod: Pod,
        lines: Annotated[int, Query(ge=1, le=100_000, description="How many, from the end.")] = 1000,
        previous: Annotated[bool, Query(description="Of the container before the last restart.")] = False,
        token: Token = None,
    ) -> Response:
        return _sent(await ask.log(token, namespace, name, pod, lines, previous), "text/plain; charset=utf-8")


def _open_routes(app: FastAPI, registry: CollectorRegistry) -> None:
    def served(found: PageFile) -> Response:
        return Response(found.content, media_type=f"{found.kind}; charset=utf-8", headers=HEADERS)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return served(page_files()[INDEX])

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        found = page_files().get(name)
        if found is None:
            raise NotFound("there is no such file")
        return served(found)

    @app.get("/api/v1/about", include_in_schema=False)
    async def about(request: Request) -> dict[str, object]:
        # A proxy may add the user's token to all requests. Otherwise the page asks for one before it asks for jobs.
        return {"source": "cluster", "token": "authorization" in request.headers}

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok")

    @app.get("/readyz", include_in_schema=False)
    async def readyz(ask: Ask) -> PlainTextResponse:
        await ask.ready()
        return PlainTextResponse("ok")

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _errors(app: FastAPI) -> None:
    def problem(code: int, detail: str) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if code == 401 else {"Retry-After": "5"} if code == 503 else None
        return JSONResponse({"detail": detail}, code, headers)

    for kind, code in _STATUS.items():

        async def say(_: Request, error: Exception, code: int = code) -> JSONResponse:
            return problem(code, str(error))

        app.add_exception_handler(kind, say)

    async def kube(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, KubeError)
        code = error.status if error.status in (400, 404, 410) else 503
        return problem(code, str(error))

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return problem(400, f"{first['loc'][-1]}: {first['msg'].lower()}; it is {str(first.get('input'))[:64]!r}")

    app.add_exception_handler(KubeError, kube)
    app.add_exception_handler(RequestValidationError, invalid)


class ApiMetrics:
    """Metrics of the status API itself, as ASGI middleware (FastAPI's own would buffer streams). Labels are bounded,
    because they hold the route's template and never the path."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter("dovetail_api_requests", "Requests answered.", ["route", "code"], registry=registry)
        self._seconds = Histogram(
            "dovetail_api_request_seconds",
            "Time to the first byte of the answer.",
            ["route"],
            registry=registry,
            buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
        )
        self._open = Gauge("dovetail_api_requests_in_progress", "Requests and streams under way.", registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._requests.labels(route, str(message["status"])).inc()
                self._seconds.labels(route).observe(time.perf_counter() - begun)
            await send(message)

        with self._open.track_inprogress():
            await self._app(scope, receive, watched)
