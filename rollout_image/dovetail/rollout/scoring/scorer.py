"""The scorer process: `python -m dovetail.rollout.scoring.scorer`. It serves `scorer_app`, and registers with the
coordinator."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import torch
from pydantic import ValidationError

from dovetail.gpus.gpu_failure import GPUFailed
from dovetail.gpus.kernel_check import my_capability
from dovetail.gpus.kernels import serving_dtype
from dovetail.manifest.accelerators import sleeps
from dovetail.manifest.types import Dtype, RLHFJob
from dovetail.protocol.budgets import SCORER_TOKENS
from dovetail.protocol.eventlog import EventLog
from dovetail.protocol.http import serving
from dovetail.protocol.http.client_session import client_session, resend
from dovetail.protocol.http.last_address import LastAddress
from dovetail.protocol.messages import Register
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.debugger import wait_for_debugger
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.process.inheritance import use_expandable_segments
from dovetail.protocol.process.pulse import Pulse
from dovetail.rollout.scoring.forward_passes import ModelScorer
from dovetail.rollout.scoring.host_weights import CudaCopies
from dovetail.rollout.scoring.scorer_app import Log, Metrics, ScorerService, make_app

REGISTER_SECONDS = 2.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """The job's settings for this process. `temperature` is the sampler's, which the reference's log-probabilities must
    share. `dtype` and `on_gpu` are those of its group. `shared` says that the server beside it sleeps while the scorer
    works. `split` maps a model to the number of GPUs over which the plan splits it, if there are several. `room` is the
    number of tokens of unfinished samples that may keep their keys and values."""

    temperature: float = 1.0
    dtype: Dtype = Dtype.AUTO
    on_gpu: bool = True
    shared: bool = False
    split: Mapping[str, int] = field(default_factory=dict)
    room: int = 0


def read_settings(env: ProcessEnv) -> Settings:
    """Read the settings from job.json and plan.json. Without a job these are the defaults. Raises ValueError if a file
    is wrong."""
    path = env.job_file
    if not path.is_file():
        return Settings()
    try:
        spec = RLHFJob.model_validate_json(path.read_bytes()).spec
    except ValidationError as error:
        raise ValueError(f"{path} is not a valid RLHFJob: {error.errors()[0]['msg']}") from error
    for group in spec.groups:
        if group.name == env.group:
            on_gpu = group.gpu.product is not None and group.gpu.per_pod > 0
            shared, room = sleeps(group), spec.data.max_prompt_tokens + spec.generation.max_tokens
            return Settings(spec.generation.temperature, group.dtype, on_gpu, shared, planned_split(env), room)
    return Settings(spec.generation.temperature)


def planned_split(env: ProcessEnv) -> dict[str, int]:
    """The number of GPUs over which each model is split, for this scorer of the group. A scorer that is not in the plan
    is like the others of its group. Raises ValueError."""
    if not env.plan_file.is_file():
        return {}
    try:
        plan = Plan.model_validate_json(env.plan_file.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{env.plan_file} is not a plan: {error.errors()[0]['msg']}") from error
    split: dict[str, int] = {}
    for rollout in plan.rollouts:
        if rollout.group == env.group:
            split.update({str(model): count for model, count in rollout.split.items()})
    return split


def devices_for(settings: Settings, given: str | None, gpus: int) -> list[str]:
    """The scorer's devices. They are those that are `given` (`cuda:0,cuda:1`). Otherwise they are as many of the
    visible `gpus` as the plan says, or the CPU if there is none."""
    if given:
        return given.split(",")
    if not settings.on_gpu or not gpus:
        return ["cpu"]
    return [f"cuda:{k}" for k in range(min(gpus, max(settings.split.values(), default=1)))]


async def register_forever(env: ProcessEnv, url: str, incarnation: str, service: ScorerService, log: Log) -> None:
    """POST /v1/instances every 2 s for as long as the process lives. It logs only changes of the outcome."""
    address = LastAddress(urlsplit(env.coordinator).hostname or "")
    async with client_session(address=address, middlewares=[resend]) as session:
        await _register(session, address, env, url, incarnation, service, log)


async def _register(
    session: aiohttp.ClientSession,
    address: LastAddress,
    env: ProcessEnv,
    url: str,
    incarnation: str,
    service: ScorerService,
    log: Log,
) -> None:
    headers = {"Authorization": f"Bearer {env.token}"}
    last: str | None = ""
    while True:
        message = Register(
            name=env.name,
            kind="scorer",
            group=env.group,
            url=url,
            incarnation=incarnation,
            ready=True,
            weight_version=service.scorer.critic_version,
            abilities={
                "device": service.scorer.place,
                "dtype": str(service.scorer.dtype).removeprefix("torch."),
                "models": sorted(service.scorer.models),
                "host_weights": service.scorer.host is not None,
                "room": service.scorer.room,
            },
        )
        problem: str | None = None
        try:
            async with session.post(
                f"{env.coordinator}/v1/instances",
                data=message.as_json(),
                headers={**headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=10),
            ) as response:
                if response.status == 200:
                    address.answered()
                else:
                    problem = f"status {response.status}: {(await response.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem != last:
            if problem is None:
                log("coordinator.joined", url=env.coordinator)
            else:
                log("coordinator.unreachable", url=env.coordinator, error=problem)
            last = problem
        await asyncio.sleep(REGISTER_SECONDS)


def advertised_host(host: str) -> str:
    """The address at which others reach this process: `host`, or this machine's address if the process listens on all
    addresses."""
    return socket.gethostbyname(socket.gethostname()) if host in ("0.0.0.0", "::", "") else host


async def serve(env: ProcessEnv, service: ScorerService, log: Log) -> None:
    """Serve until SIGTERM or SIGINT. Raises OSError if the port is taken, and GPUFailed if this process can no longer
    use its GPU."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = await serving.listen(make_app(service, env.token), env.host, env.port)
    try:
        port = runner.addresses[0][1]
        url = f"http://{advertised_host(env.host)}:{port}"
        log("scorer.started", url=url, device=service.scorer.place)
        task = asyncio.create_task(register_forever(env, url, uuid.uuid4().hex, service, log))
        stopping = asyncio.create_task(stop.wait())
        beating = asyncio.create_task(Pulse.read().forever(service.alive))
        failing = asyncio.create_task(service.failed.wait())
        await asyncio.wait({task, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        for each in (stopping, beating, failing):
            each.cancel()
        if task.done():
            task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        service.close()
        await runner.cleanup()
    if service.failure:
        raise GPUFailed(service.failure)
    log("scorer.stopped")


def main(argv: list[str] | None = None) -> int:
    """Returns 0 after a stop signal. Otherwise it writes one sentence to stderr, and returns 2 for a wrong
    configuration, or 1 if it cannot start or its GPU failed."""
    parser = argparse.ArgumentParser(prog="python -m dovetail.rollout.scoring.scorer", description=__doc__)
    parser.add_argument(
        "--device", help="one, or several, as `cuda:0,cuda:1`, to split all models over; default: as the plan says"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="default: the group's; Auto: bfloat16 on GPUs (float16 on older ones), float32 on CPUs",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=SCORER_TOKENS, help="tokens per forward pass (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.max_tokens < 1:
        parser.error("--max-tokens must be at least 1")
    use_expandable_segments(os.environ)
    try:
        env = ProcessEnv.read()
        wait_for_debugger(env.name, EventLog(env.name))
        settings = read_settings(env)
        # This comes before any other use of CUDA. If torch has no kernels for this GPU, it ends with a sentence.
        capability = my_capability() if settings.on_gpu or args.device else None
        devices = devices_for(settings, args.device, torch.cuda.device_count() if torch.cuda.is_available() else 0)
        on_cpu = devices[0] == "cpu"
        dtype = DTYPES[args.dtype or serving_dtype(settings.dtype, Dtype.AUTO, None if on_cpu else capability).value]
        log, metrics = EventLog(env.name), Metrics()
        copies = [CudaCopies(torch.device(d)) for d in devices] if settings.shared and not on_cpu else None
        split = None if args.device else settings.split
        scorer = ModelScorer(
            devices,
            dtype,
            args.max_tokens,
            lambda m, n: metrics.tokens.labels(m).inc(n),
            copies,
            split,
        )
        scorer.room = settings.room
        service = ScorerService(scorer, log, metrics, temperature=settings.temperature)
        asyncio.run(serve(env, service, log))
    except (ValueError, OSError, GPUFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # sys.exit would wait for a forward pass or a weight transfer in a thread.
    os._exit(code)
