"""Emulated servers in a process of their own that start and die on order. Tokens depend on seed and position alone."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

from interstage.emulated import Connection, Instance, Write, most_files

from dovetail.fusion.profile import StageProfile
from dovetail.protocol.sampling import SEED

WORDS = 50_000


def token_at(seed: int, position: int) -> int:
    """The token of a response at a position of it."""
    return zlib.crc32(f"{seed}/{position}".encode()) % WORDS


class Request:
    """As `interstage.emulated.Request`, with tokens of its own. `at`: the position of the next one to send."""

    def __init__(self, seed: int, at: int, left: int, interval: int, write: Write) -> None:
        self.seed, self.at, self.left, self.interval, self.write = seed, at, left, interval, write
        self.unsent = 0
        self.first = True
        self.aborted = False

    def made(self) -> bool:
        """One more token; True when it was the last."""
        self.unsent, self.left = self.unsent + 1, self.left - 1
        reason = "stop" if self.left == 0 else "abort" if self.aborted else None
        if reason or self.first or self.unsent == self.interval:
            tokens = [token_at(self.seed, self.at + i) for i in range(self.unsent)]
            self.write(tokens, [-(1 + token % 15) / 8 for token in tokens], reason)
            self.at, self.unsent, self.first = self.at + self.unsent, 0, False
        return reason is not None


class Server(Instance):
    """It can die: its connections break at once, and what was not sent is lost. `began`: the monotonic time of its
    first token; None before. `steps`: decode steps, whatever they took on a busy machine."""

    def __init__(self, profile: StageProfile, length: Callable[[int], int], prompt: int) -> None:
        super().__init__(profile, length, prompt)
        self.made = self.steps = 0
        self.stepping = False
        self.began: float | None = None
        self.transports: set[asyncio.Transport] = set()

    def generate(self, body: dict[str, Any], write: Write) -> None:
        params = body["sampling_params"]
        seed, so_far = params["extra_args"][SEED], len(body["token_ids"]) - self.prompt
        request = Request(seed, so_far, self.length(seed) - so_far, params.get("stream_interval", 1), write)
        made = request.made

        def counted() -> bool:
            self.made += 1
            if not self.stepping:  # the first of this step
                self.steps, self.stepping = self.steps + 1, True
                asyncio.get_running_loop().call_soon(self.stepped)
            self.began = self.began or time.monotonic()
            return made()

        request.made = counted  # type: ignore[method-assign]
        self.requests[body["request_id"]] = request  # type: ignore[assignment]
        self.prefill += len(body["token_ids"])
        self.wake.set()

    def stepped(self) -> None:
        self.stepping = False


class Link(Connection):
    """A connection that its server knows of."""

    instance: Server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.instance.transports.add(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.instance.transports.discard(self.transport)


@dataclass(frozen=True)
class Told:
    """Of all servers, living and dead: tokens and decode steps, and by name the monotonic time of the first token."""

    made: int
    steps: int
    began: dict[str, float]


def serve(profile: StageProfile, lengths: dict[int, int], prompt: int, pipe: Pipe) -> None:
    """Orders through the pipe: ("start", name) answers a port, ("kill", name), ("tell", "") answers a `Told`. Ends when
    the pipe closes."""
    most_files()

    async def main() -> None:
        loop, everyone = asyncio.get_running_loop(), dict[str, Server]()
        there: dict[str, tuple[Server, asyncio.Server, asyncio.Task[None]]] = {}
        orders: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()

        def read() -> None:
            try:
                orders.put_nowait(pipe.recv())
            except EOFError:
                loop.remove_reader(pipe.fileno())
                orders.put_nowait(None)

        loop.add_reader(pipe.fileno(), read)
        while (order := await orders.get()) is not None:
            what, name = order
            if what == "start":
                server = everyone[name] = Server(profile, lengths.__getitem__, prompt)
                listening = await loop.create_server(partial(Link, server), "127.0.0.1", 0, backlog=1024)
                there[name] = server, listening, asyncio.create_task(server.decode())
                pipe.send(listening.sockets[0].getsockname()[1])
            elif what == "kill" and name in there:
                server, listening, decoding = there.pop(name)
                decoding.cancel()
                listening.close()
                for transport in list(server.transports):
                    transport.abort()
            elif what == "tell":
                made, steps = sum(s.made for s in everyone.values()), sum(s.steps for s in everyone.values())
                pipe.send(Told(made, steps, {n: s.began for n, s in everyone.items() if s.began is not None}))

    asyncio.run(main())


class Servers:
    """The process's end of the orders."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def start(self, name: str) -> int:
        """Its port. Raises RuntimeError if the process does not answer."""
        return int(self._ask("start", name))

    def kill(self, name: str) -> None:
        self._pipe.send(("kill", name))

    def tell(self) -> Told:
        """What all servers have done so far."""
        told = self._ask("tell", "")
        assert isinstance(told, Told)
        return told

    def _ask(self, what: str, name: str) -> Any:
        self._pipe.send((what, name))
        if not self._pipe.poll(120):
            raise RuntimeError("the emulated servers did not answer within 120 s")
        return self._pipe.recv()


@contextmanager
def servers(profile: StageProfile, lengths: dict[int, int], prompt: int) -> Iterator[Servers]:
    """`lengths`: tokens of the response with each seed."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(profile, lengths, prompt, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Servers(ours)
    finally:
        ours.close()
        process.join(10)
        process.kill()
