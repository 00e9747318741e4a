"""Everything of a job but its coordinator, emulated in one process: trainers, rollouts and scorers that only wait.

They speak the coordinator's own protocols: they register, join, pull commands, offer weights and take them. No weights
are sent: a version takes a given time to arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

import aiohttp
import numpy as np
from interstage.emulated import Connection, Instance, Request, Write, most_files

from dovetail.fusion.profile import StageProfile
from dovetail.protocol.messages import (
    Bucket,
    Command,
    CommandResult,
    Export,
    Heartbeat,
    JoinReply,
    JoinRequest,
    Load,
    NextReply,
    NextRequest,
    Offer,
    Publish,
    RankThread,
    Register,
    Save,
    Segment,
    Step,
)
from dovetail.protocol.sampling import SEED
from dovetail.protocol.wire import unpack

TOKEN = "token"
REPORT_SECONDS = 2.0
Interval = tuple[float, float]


@dataclass(frozen=True)
class World:
    """`instances`: rollouts, each with a scorer on the same device, all like `profile`. `max_tokens`: of a response.
    `weights`: seconds until a version has arrived. `token_seconds`: of training, for each token of prompt and response;
    `keep`: versions that the trainers keep to be sent while they train."""

    coordinator: str
    instances: int
    profile: StageProfile
    max_tokens: int
    weights: float
    token_seconds: float
    keep: int


@dataclass(frozen=True)
class Busy:
    """(begin, end) in monotonic seconds: training, and for each instance whatever it does."""

    trainers: list[Interval]
    instances: list[list[Interval]]


def length_of(seed: int, max_tokens: int) -> int:
    """Log-normal, the median an eighth of the longest."""
    drawn = max_tokens / 8 * np.exp(np.log(8) / 2.4 * np.random.default_rng(seed).standard_normal())
    return int(np.clip(np.rint(drawn), 1, max_tokens))


class Device(Instance):
    """A rollout and its scorer. `versions`: what each of the two holds."""

    def __init__(self, world: World) -> None:
        super().__init__(world.profile, partial(length_of, max_tokens=world.max_tokens), 0)
        self.world = world
        self.versions: dict[str, int | None] = {"rollout": None, "scorer": None}
        self.arrived: int | None = None

    def generate(self, body: dict[str, Any], write: Write) -> None:
        params = body["sampling_params"]
        left = self.length(params["extra_args"][SEED]) - (self.world.max_tokens - params["max_tokens"])
        self.start(body, Request(max(1, left), params.get("stream_interval", 1), write))

    async def take(self) -> bytes:
        """Weights arrive."""
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(self.world.weights)
        self.worked.append((begun, begun + self.world.weights))
        return b"{}"

    async def score_weights(self, version: int) -> bytes:
        await self.take()
        self.versions["scorer"] = version
        return b"{}"


class Served(Connection):
    """One of the coordinator's connections to a device."""

    instance: Device

    def route(self, path: bytes, body: bytes) -> None:
        device = self.instance
        if path in (b"/pause", b"/resume", b"/init_weight_transfer_engine", b"/reset_prefix_cache", b"/v1/load"):
            self.answer(b"{}")
        elif path == b"/start_weight_update":
            device.versions["rollout"] = None
            self.answer(b"{}")
        elif path == b"/update_weights":
            self.answering = asyncio.create_task(self.later(device.take()))
        elif path == b"/finish_weight_update":
            device.arrived = int(json.loads(body)["weight_version"])
            self.answer(b"{}")
        elif path == b"/dovetail/serve":
            device.versions["rollout"] = device.arrived
            self.answer(b"{}")
        elif path == b"/v1/weights":
            version = json.loads(body)["offer"]["version"]
            self.answering = asyncio.create_task(self.later(device.score_weights(version)))
        else:
            super().route(path, body)


@dataclass
class Trainers:
    """One rank, whose steps only wait. With kept versions a second task sends them."""

    world: World
    session: aiohttp.ClientSession
    busy: list[Interval] = field(default_factory=list)
    generation: int = 0
    stage: str | None = None
    step: int = 0

    async def post(self, path: str, message: Any) -> str:
        async with self.session.post(self.world.coordinator + path, data=message.model_dump_json()) as reply:
            reply.raise_for_status()
            return await reply.text()

    async def run(self) -> None:
        request = JoinRequest(
            name="trainer-0", rank=0, world_size=1, incarnation=str(os.getpid()), host="127.0.0.1", port=1
        )
        while not self.generation:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                reply = JoinReply.model_validate_json(await self.post("/v1/trainer/join", request))
                self.generation = reply.generation or 0
                continue
            await asyncio.sleep(0.1)
        threads: list[RankThread] = ["main", "weights"] if self.world.keep else ["main"]
        await asyncio.gather(self.beat(), *(self.serve(thread) for thread in threads))

    async def beat(self) -> None:
        while True:
            beat = Heartbeat(name="trainer-0", rank=0, incarnation=str(os.getpid()), generation=self.generation)
            await self.post("/v1/heartbeat", beat)
            await asyncio.sleep(REPORT_SECONDS)

    async def serve(self, thread: RankThread) -> None:
        result: CommandResult | None = None
        while True:
            oldest = max(0, self.step - self.world.keep + 1)
            request = NextRequest.model_validate(
                {
                    "generation": self.generation,
                    "result": result,
                    "stage": self.stage,
                    "step": self.step,
                    "versions": list(range(oldest, self.step + 1)) if self.stage and self.world.keep else [],
                    "thread": thread,
                }
            )
            command = NextReply.model_validate_json(await self.post("/v1/trainer/next", request)).command
            result = None if command is None else await self.execute(command)

    async def execute(self, command: Command) -> CommandResult:
        clock = asyncio.get_running_loop().time
        begun = clock()
        if isinstance(command, Load):
            self.stage, self.step = command.stage.value, 0
        elif isinstance(command, Step):
            await self.learn(command.batch)
            self.step = command.step
        elif isinstance(command, Publish):
            segments = [
                Segment(index=0, model=model, host="127.0.0.1", port=1, secret="s", buckets=[BUCKET])
                for model in sorted({m for r in command.receivers for m in r.models})
            ]
            offer = Offer(version=command.version, epoch=command.epoch, backend="gloo", segments=segments)
            await self.post("/v1/weights/offer", offer)
            await asyncio.sleep(self.world.weights)
        elif not isinstance(command, Save | Export):
            raise ValueError(f"the emulated trainer does not know {command.kind}")
        return CommandResult(id=command.id, ok=True, metrics={"seconds": clock() - begun})

    async def learn(self, batch: str) -> None:
        """Take the time of the batch's tokens."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        async with self.session.get(f"{self.world.coordinator}/v1/batches/{batch}") as reply:
            arrays = unpack(await reply.read())
        tokens = int(arrays["prompt_lengths"].sum() + arrays["response_lengths"].sum())
        await asyncio.sleep(begun + tokens * self.world.token_seconds - clock())
        self.busy.append((begun, clock()))


BUCKET = Bucket(names=["w"], dtypes=["float32"], shapes=[[1]], offsets=[0], nbytes=4)


def serve(world: World, pipe: Pipe) -> None:
    """Be the job's other processes until the pipe closes. Asked for it, send what was busy when."""
    most_files()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        devices, reports = [], []
        tasks: list[asyncio.Task[Any]] = []
        for index in range(world.instances):
            device = Device(world)
            listening = await loop.create_server(partial(Served, device), "127.0.0.1", 0, backlog=1024)
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            tasks.append(asyncio.create_task(device.decode()))
            devices.append(device)
            reports.append((f"rollouts-{index}", "rollout", url, device))
            reports.append((f"rollouts-{index}-scorer", "scorer", url, device))
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            trainers = Trainers(world, session)
            tasks += [asyncio.create_task(report(session, world, *each)) for each in reports]
            tasks.append(asyncio.create_task(trainers.run()))
            over = asyncio.Event()

            def asked() -> None:
                try:
                    pipe.recv()
                except EOFError:
                    over.set()
                    return
                pipe.send(Busy(trainers.busy, [device.worked for device in devices]))

            loop.add_reader(pipe.fileno(), asked)
            ended = asyncio.create_task(over.wait())
            await asyncio.wait({ended, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            loop.remove_reader(pipe.fileno())
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            # A coordinator that has ended refuses connections.
            known = asyncio.CancelledError | aiohttp.ClientConnectionError
            for error in outcomes:
                if isinstance(error, BaseException) and not isinstance(error, known):
                    raise error

    asyncio.run(main())


async def report(session: aiohttp.ClientSession, world: World, name: str, kind: str, url: str, device: Device) -> None:
    """Register now and every 2 s."""
    while True:
        message = Register.model_validate(
            {
                "name": name,
                "kind": kind,
                "group": "rollouts",
                "url": url,
                "incarnation": "1",
                "ready": True,
                "weight_version": device.versions[kind],
                "abilities": {"sampler": "counter"} if kind == "rollout" else {},
            }
        )
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.post(world.coordinator + "/v1/instances", data=message.model_dump_json()):
                pass
        await asyncio.sleep(REPORT_SECONDS)
