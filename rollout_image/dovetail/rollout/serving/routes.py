"""The routes that Dovetail adds to the vLLM server (group `vllm.endpoint_plugins`), and their state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from dovetail.protocol.messages import KVAbility, SendOn
from dovetail.protocol.process.pulse import BEAT_SECONDS, Pulse
from dovetail.protocol.sample_stream import ROUTE, FrameError
from dovetail.protocol.sampling import COUNTER_SAMPLER, Sampler
from dovetail.rollout.compat import keep_environment, uses_v2_runner
from dovetail.rollout.kv.kv_config import CONNECTORS
from dovetail.rollout.serving.sample_connection import GivenUp, SampleConnection
from dovetail.rollout.serving.weights_worker import SENDING_WORKER

# A WebSocket gives its reason to close in at most 123 bytes.
MOST_REASON = 120


@dataclass
class ServerState:
    """The state of this API server process. `weight_version` is None before the first update, after a failed one, and
    from the start of an update until the coordinator has seen that the new weights are served. While it is None, the
    server refuses to generate. `arrived` says that a complete version has come, and a probe may ask for it.
    `paused_version` is the version that the server held when it was paused for an update. A paused server reports no
    version, because nobody would resume it if the coordinator died. `asleep` says that the server was told to sleep and
    has not been woken. Then another process has its GPU memory, and the server keeps its version in host memory.
    `dtype`: see `dtype_of`."""

    name: str = ""
    incarnation: str = ""
    vllm_version: str = ""
    sampler: Sampler = "counter"
    weight_engine: str = "dovetail"
    weight_version: int | None = None
    arrived: int | None = None
    paused_version: int | None = None
    asleep: bool = False
    dtype: str | None = None
    kv_connector: str | None = None
    kv: KVAbility | None = None
    max_model_len: int = 0
    sleep: bool = False
    # Whether the server keeps a copy of the weights that it received, and can send it to another server.
    sends_weights: bool = False
    # The number of workers, each of which receives weights, and of the data-parallel engines that they make up.
    world: int = 1
    engines: int = 1

    def abilities(self) -> dict[str, Any]:
        """The content of `Register.abilities`."""
        own = ("name", "incarnation", "weight_version", "arrived", "paused_version", "asleep")
        return {key: value for key, value in self.described().items() if key not in own}

    def pause(self) -> None:
        """Record that the engine is being paused. It will take no samples until it is resumed."""
        if self.weight_version is not None:
            self.paused_version, self.weight_version = self.weight_version, None

    def resume(self) -> None:
        """Record that the engine was resumed. If no update began since the pause, it serves the same version as
        before."""
        if self.weight_version is None:
            self.weight_version = self.paused_version
        self.paused_version = None

    def lose_weights(self) -> None:
        """Record that an update begins. From here on the weights may be in pieces."""
        self.weight_version = self.arrived = self.paused_version = None

    def described(self) -> dict[str, Any]:
        """The whole state as JSON."""
        return asdict(self) | {"kv": None if self.kv is None else self.kv.model_dump()}


STATE = ServerState()


def dtype_of(config: Any) -> str | None:
    """torch's name of the weights' dtype in a VllmConfig. It is None if they are quantised, or if the KV cache has a
    dtype of its own."""
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    whole = config.model_config.quantization is None and config.cache_config.cache_dtype in ("auto", dtype)
    return dtype if whole else None


class UnsuitableRunner(ValueError):
    """vLLM uses a model runner whose samples cannot be continued on another server."""


def sampler_of(config: Any) -> Sampler:
    """The sampler with which the server of a VllmConfig draws samples. Raises UnsuitableRunner with one sentence."""
    if uses_v2_runner(config):
        return "native"
    if COUNTER_SAMPLER in (config.model_config.logits_processors or ()):
        return "counter"
    raise UnsuitableRunner(
        "vLLM has chosen its V1 model runner, whose samples change when they move to another server. Unset "
        "VLLM_USE_V2_MODEL_RUNNER and remove the vllmArgs that vLLM's V2 runner does not support, or add "
        f"`--logits-processors {COUNTER_SAMPLER}` to the group's vllmArgs."
    )


async def beat(engine_client: Any, pulse: Pulse) -> None:
    """Touch the pulse as long as the engine core answers. It answers between two steps, through the queue of requests.
    It ends when the engine has died. Then the server ends, too."""
    while not engine_client.errored:
        with contextlib.suppress(Exception):  # an error is an answer, too
            await engine_client.is_paused()
        pulse.beat()
        await asyncio.sleep(BEAT_SECONDS)


class InfoRoutes:
    """Adds GET /dovetail/info and the calls of a weight update. These are vLLM's own routes, but they also update
    `STATE` and read every worker's answer. With POST /dovetail/serve the coordinator lets the server answer with a
    version that has passed its probe. With POST /dovetail/send_weights it lets the server send its version to another
    one. Over the WebSocket /dovetail/samples it draws samples."""

    name = "dovetail_info"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        from fastapi import APIRouter, Body, Request, WebSocket
        from fastapi.responses import JSONResponse

        from dovetail.rollout.compat import weight_operation

        router = APIRouter()

        async def info() -> Any:
            return JSONResponse(STATE.described())

        async def guarded(request: Request, method: str, **arguments: Any) -> None:
            client = request.app.state.engine_client
            problems = await client.collective_rpc("guarded", args=(method, json.dumps(arguments)))
            if problem := next((problem for problem in problems if problem is not None), None):
                raise RuntimeError(problem)

        async def init_weight_transfer_engine(request: Request, init_info: dict[str, Any]) -> Any:
            with weight_operation("init"):
                await guarded(request, "init_weight_transfer_engine", init_info=init_info)
            return JSONResponse({"message": "Weight transfer initialized"})

        async def update_weights(request: Request, update_info: dict[str, Any]) -> Any:
            with weight_operation("update"):
                await guarded(request, "update_weights", update_info=update_info)
            return JSONResponse({"message": "Weights updated"})

        async def start_weight_update(request: Request) -> Any:
            # This must be recorded before the engine gets the request.
            STATE.lose_weights()
            with weight_operation("start"):
                await guarded(request, "begin_weight_update")
            return JSONResponse({"message": "Weight update started"})

        async def finish_weight_update(request: Request, weight_version: str | None = Body(None, embed=True)) -> Any:
            try:
                version = int(weight_version or "")
            except ValueError:
                return JSONResponse(
                    {"error": {"message": f"weight_version must be an integer, not {weight_version!r}"}}, 400
                )
            with weight_operation("finish"):
                await guarded(request, "finish_weight_update")
                await request.app.state.engine_client.update_weight_version(str(version))
            STATE.arrived = version
            return JSONResponse({"message": "Weight update finished"})

        async def serve(weight_version: int = Body(embed=True)) -> Any:
            if STATE.arrived != weight_version:
                held = "no whole version" if STATE.arrived is None else f"version {STATE.arrived}"
                message = f"this server holds {held} of the weights, not version {weight_version}"
                return JSONResponse({"error": {"message": message}}, 409)
            STATE.weight_version = weight_version
            return JSONResponse({"message": "Serving"})

        async def send_weights(request: Request) -> Any:
            try:
                message = SendOn.model_validate_json(await request.body())
            except ValueError as error:
                return JSONResponse({"error": {"message": f"not a SendOn: {error}"}}, 400)
            if not STATE.sends_weights:
                return JSONResponse({"error": {"message": "this server keeps no copy of its weights"}}, 409)
            # The engine answers between two steps. The weights then leave in a thread of a worker.
            client = request.app.state.engine_client
            answers = await client.collective_rpc("send_weights_on", args=(message.model_dump_json(),))
            answer = json.loads(next(a for a in answers if a is not None))
            if "error" in answer:
                return JSONResponse({"error": {"message": answer["error"]}}, 409)
            return JSONResponse(answer["offer"])

        async def samples(websocket: WebSocket) -> None:
            await websocket.accept()
            try:
                await SampleConnection(websocket.app.state.engine_client, websocket, STATE).serve()
            except FrameError as error:
                await websocket.close(1002, str(error)[:MOST_REASON])
            except GivenUp as error:
                logging.getLogger("vllm.dovetail.samples").warning("The stream of samples ends: %s", error)
                with contextlib.suppress(RuntimeError, OSError):  # it may be closed already
                    await websocket.close(1011, str(error)[:MOST_REASON])

        # FastAPI inspects these types, so they must not be this module's postponed annotations.
        information = Annotated[dict[str, Any], Body(embed=True)]
        init_weight_transfer_engine.__annotations__ = {"request": Request, "init_info": information}
        update_weights.__annotations__ = {"request": Request, "update_info": information}
        start_weight_update.__annotations__ = {"request": Request}
        finish_weight_update.__annotations__ = {"request": Request, "weight_version": str | None}
        serve.__annotations__ = {"weight_version": int}
        send_weights.__annotations__ = {"request": Request}
        samples.__annotations__ = {"websocket": WebSocket}
        info.__annotations__ = {}
        router.add_api_websocket_route(ROUTE, samples)
        router.add_api_route("/dovetail/info", info, methods=["GET"])
        router.add_api_route("/dovetail/serve", serve, methods=["POST"])
        router.add_api_route("/dovetail/send_weights", send_weights, methods=["POST"])
        router.add_api_route("/init_weight_transfer_engine", init_weight_transfer_engine, methods=["POST"])
        router.add_api_route("/update_weights", update_weights, methods=["POST"])
        router.add_api_route("/start_weight_update", start_weight_update, methods=["POST"])
        router.add_api_route("/finish_weight_update", finish_weight_update, methods=["POST"])
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        if engine_client is not None:
            keep_environment()
            self._beating = asyncio.create_task(beat(engine_client, Pulse.read()))
            config = engine_client.vllm_config
            STATE.max_model_len = int(config.model_config.max_model_len)
            STATE.dtype = dtype_of(config)
            STATE.sampler = sampler_of(config)
            parallel = config.parallel_config
            STATE.engines = int(parallel.data_parallel_size)
            STATE.world = int(parallel.world_size) * STATE.engines
            STATE.sends_weights = parallel.worker_extension_cls == SENDING_WORKER
            transfer = config.kv_transfer_config
            STATE.kv_connector = transfer.kv_connector if transfer is not None else None
            if STATE.kv is not None:
                # The group's own arguments may ask for another connector, of which nothing is known here.
                ours = STATE.kv_connector == CONNECTORS[STATE.kv.transport]
                size = {"block_tokens": int(config.cache_config.block_size)}
                STATE.kv = STATE.kv.model_copy(update=size) if ours else None
