"""Rollouts and scorers that only wait: vLLM's and the scorer's protocols, with the durations of a profile.

Each instance is one device: a server that decodes all its requests in step, and a scorer whose passes run one after
another. They run in a process of their own, `serve`; their clocks do not drift, however late they are woken. HTTP is
spoken by hand, as two cores must do for many instances and the coordinator that is measured."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
from websockets.frames import Frame, Opcode
from websockets.http11 import Request as HttpRequest
from websockets.server import ServerProtocol

from dovetail.fusion.profile import StageProfile
from dovetail.protocol.budgets import RESPONSE_BLOCK
from dovetail.protocol.sample_stream import MOST_BYTES, ROUTE, Answers, unpack_asked
from dovetail.protocol.sampling import SEED
from dovetail.protocol.wire import CONTENT_TYPE, pack, unpack

# The tokens of every response, however long it is.
TOKENS = [position % 199 for position in range(40_000)]
# Takes new tokens of a request, their log-probabilities, and the reason with the last ones.
Write = Callable[[list[int], list[float], str | None], None]


class Request:
    """`left` tokens to make, `stride` in a step, the next one to send at position `at` of the response; `unsent` made
    but not sent."""

    def __init__(self, left: int, interval: int, write: Write, at: int = 0, stride: int = 1) -> None:
        self.left, self.interval, self.write, self.at, self.stride = left, interval, write, at, stride
        self.unsent = 0
        self.first = True
        self.aborted = False

    def made(self) -> bool:
        """One more step; True when it was the last."""
        new = min(self.stride, self.left)
        self.unsent, self.left = self.unsent + new, self.left - new
        reason = "stop" if self.left == 0 else "abort" if self.aborted else None
        if reason or self.first or self.unsent >= self.interval:
            end = self.at + self.unsent
            self.write(TOKENS[self.at : end], [-1.25] * self.unsent, reason)
            self.at, self.unsent, self.first = end, 0, False
        return reason is not None


class Instance:
    """`length(seed)`: tokens of a response. `prompt`: tokens of every prompt. `worked`: (begin, end) of generation and
    of scoring, in seconds of the event loop's clock."""

    def __init__(self, profile: StageProfile, length: Callable[[int], int], prompt: int, stride: int = 1) -> None:
        self.profile, self.length, self.prompt, self.stride = profile, length, prompt, stride
        self.requests: dict[str, Request] = {}
        self.prefill = 0
        self.wake = asyncio.Event()
        self.scored_until = 0.0
        # Tokens that it has seen of unfinished samples, by their prompts.
        self.seen: dict[bytes, int] = {}
        self.worked: list[tuple[float, float]] = []
        self._taken = 0.0  # seconds that scoring took from generation since the last step

    async def decode(self) -> None:
        """For ever: one step of all requests, in which new ones are prefilled and make their first token."""
        clock = asyncio.get_running_loop().time
        now = begun = clock()
        while True:
            if not self.requests:
                self.worked.append((begun, now))
                self.wake.clear()
                await self.wake.wait()
                now = begun = max(clock(), self.scored_until)
                self._taken = 0.0
            taken, self._taken = self._taken, 0.0
            now += taken
            tokens, self.prefill = self.prefill, 0
            batch = list(self.requests.items())
            now += tokens * self.profile.prefill_seconds_per_token
            now += self.profile.steps[min(len(batch), self.profile.max_samples)]
            await asyncio.sleep(max(0.0, now - clock()))
            for name, request in batch:
                if request.made():
                    del self.requests[name]

    def generate(self, body: dict[str, Any], write: Write) -> None:
        params = body["sampling_params"]
        so_far = len(body["token_ids"]) - self.prompt
        left = self.length(params["extra_args"][SEED]) - so_far
        self.start(body, Request(left, params.get("stream_interval", 1), write, so_far, self.stride))

    def start(self, body: dict[str, Any], request: Request) -> None:
        """Take up the request of this body."""
        self.requests[body["request_id"]] = request
        self.prefill += len(body["token_ids"])
        self.wake.set()

    def abort(self, names: list[str]) -> None:
        for name in names:
            if name in self.requests:
                self.requests[name].aborted = True

    async def busy(self, tokens: list[int]) -> None:
        clock = asyncio.get_running_loop().time
        seconds = self.profile.batch_seconds(tokens) if any(tokens) else 0.0
        begun = max(self.scored_until, clock())
        self.scored_until = begun + seconds
        self.worked.append((begun, self.scored_until))
        self._taken += seconds
        await asyncio.sleep(self.scored_until - clock())

    async def begin(self, body: bytes) -> bytes:
        found = read(body)
        held = [max(0, response - 1) // RESPONSE_BLOCK * RESPONSE_BLOCK for _, _, response in found]
        wholes = [prompt + count for (_, prompt, _), count in zip(found, held, strict=True)]
        await self.busy([whole - self.seen.get(key, 0) for (key, _, _), whole in zip(found, wholes, strict=True)])
        self.seen.update((key, whole) for (key, _, _), whole in zip(found, wholes, strict=True))
        return json.dumps({"held": held}).encode()

    async def score(self, body: bytes) -> bytes:
        found = read(body)
        await self.busy([prompt + response - self.seen.pop(key, 0) for key, prompt, response in found])
        full = np.full((len(found), max(response for _, _, response in found)), -1.25, np.float32)
        return pack({"ref_logprobs": full, "values": full, "scores": np.ones(len(found), np.float32)})


def read(body: bytes) -> list[tuple[bytes, int, int]]:
    """Of each sample: its prompt, which no other has, and the tokens of prompt and response."""
    arrays = unpack(body)
    prompts, responses = arrays["prompt_lengths"].tolist(), arrays["response_lengths"].tolist()
    return [(row[:p].tobytes(), p, r) for row, p, r in zip(arrays["tokens"], prompts, responses, strict=True)]


class Connection(asyncio.Protocol):
    """One of the coordinator's connections to an instance."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.buffer = bytearray()
        self.answering: asyncio.Task[None] | None = None
        self.socket: ServerProtocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.socket is not None:
            self.sending.cancel()

    def data_received(self, data: bytes) -> None:
        if self.socket is not None:
            self.socket.receive_data(data)
            self.answer_socket()
            return
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            first, *lines = bytes(self.buffer[:end]).split(b"\r\n")
            size = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
            if len(self.buffer) < end + 4 + size:
                return
            body = bytes(self.buffer[end + 4 : end + 4 + size])
            if first.split(b" ")[1] == ROUTE.encode():
                self.socket = ServerProtocol(max_size=MOST_BYTES)
                self.answers = Answers(self.send)
                self.sending = asyncio.create_task(self.answers.run())
                self.socket.receive_data(bytes(self.buffer))
                self.answer_socket()
                return
            del self.buffer[: end + 4 + size]
            self.route(first.split(b" ")[1].split(b"?")[0], body)

    def route(self, path: bytes, body: bytes) -> None:
        if path == b"/v1/begin":
            self.answering = asyncio.create_task(self.later(self.instance.begin(body)))
        elif path == b"/v1/score":
            self.answering = asyncio.create_task(self.later(self.instance.score(body)))
        else:
            raise ValueError(f"no such route: {path!r}")

    def answer_socket(self) -> None:
        """Do what came over the WebSocket."""
        assert self.socket is not None
        for event in self.socket.events_received():
            if isinstance(event, HttpRequest):
                self.socket.send_response(self.socket.accept(event))
            elif isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                asked = unpack_asked(bytes(event.data))
                if isinstance(asked, list):
                    self.instance.abort(asked)
                    continue
                requests, self.answers.seconds = asked
                for fields, tokens in requests:
                    write = partial(self.answers.add, fields["number"])
                    self.instance.generate({**fields, "token_ids": tokens}, write)
        self.transport.writelines(self.socket.data_to_send())

    async def send(self, frame: bytes) -> None:
        assert self.socket is not None
        self.socket.send_binary(frame)
        self.transport.writelines(self.socket.data_to_send())

    async def later(self, work: Coroutine[None, None, bytes]) -> None:
        """Answer with what `work` returns."""
        self.answer(await work)

    def answer(self, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)


def most_files() -> None:
    """Each stream is a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(profile: StageProfile, count: int, lengths: dict[int, int], prompt: int, pipe: Pipe, stride: int = 1) -> None:
    """A process of `count` instances, which make `stride` tokens in a step: sends their ports, then serves until the
    pipe closes."""
    most_files()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ports, tasks = [], []
        for _ in range(count):
            instance = Instance(profile, lengths.__getitem__, prompt, stride)
            listening = await loop.create_server(partial(Connection, instance), "127.0.0.1", 0, backlog=1024)
            ports.append(listening.sockets[0].getsockname()[1])
            tasks.append(asyncio.create_task(instance.decode()))
        pipe.send(ports)
        over = asyncio.Event()
        loop.add_reader(pipe.fileno(), over.set)
        await over.wait()
        for task in tasks:
            task.cancel()

    asyncio.run(main())
