"""The server's end of the stream of samples (`dovetail.protocol.sample_stream`). The coordinator draws all its samples
of this server over one connection."""

from __future__ import annotations

import asyncio
import io
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import numpy as np

from dovetail.protocol.process.endings import cancel
from dovetail.protocol.sample_stream import FAILED, REFUSED, SERVER_REASONS, Answers, unpack_asked
from dovetail.rollout.compat import WrongRequest, draw

# A coordinator that takes no frame for so long is gone, or has another connection by now.
SEND_SECONDS = 600.0


class HeldWeights(Protocol):
    """The part of `ServerState` that is used here."""

    weight_version: int | None
    paused_version: int | None
    asleep: bool


class LostWeights(Exception):
    """The server does not hold the weights that a sample must be drawn with."""


class GivenUp(Exception):
    """The server ends the connection, because the coordinator did not take a frame."""


class SampleConnection:
    """One connection. `engine` is vLLM's AsyncLLM. `websocket` is an accepted one. `state` knows the weights."""

    def __init__(self, engine: Any, websocket: Any, state: HeldWeights) -> None:
        self._engine, self._websocket, self._state = engine, websocket, state
        self._answers = Answers(self._send)
        self._drawing: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Draw what is asked until the connection ends. Samples that are not finished then are given up. Raises
        FrameError for a message that cannot be read, and GivenUp if the coordinator takes no frame."""
        from fastapi import WebSocketDisconnect

        sending = asyncio.create_task(self._answers.run())
        sending.add_done_callback(lambda _: receiving.cancel())
        receiving = asyncio.create_task(self._receive())
        try:
            await receiving
        except WebSocketDisconnect:
            pass
        except asyncio.CancelledError:
            # Either the server ends, or a frame could not be sent.
            if not sending.done() or sending.cancelled():
                raise
            error = sending.exception()
            if not isinstance(error, WebSocketDisconnect):
                raise GivenUp(f"a frame could not be sent: {type(error).__name__}: {error}".rstrip(": ")) from error
        finally:
            await cancel([sending, receiving, *self._drawing.values()])

    async def _receive(self) -> None:
        while True:
            asked = unpack_asked(await self._websocket.receive_bytes())
            if isinstance(asked, list):
                await self._engine.abort(asked)
                continue
            requests, self._answers.seconds = asked
            for fields, tokens in requests:
                number = int(fields["number"])
                task = self._drawing[number] = asyncio.create_task(self._draw(number, fields, tokens))
                task.add_done_callback(partial(self._drawn, number))
            # Requests are with the engine before the next message can end them.
            await asyncio.sleep(0)

    def _drawn(self, number: int, _: asyncio.Task[None]) -> None:
        del self._drawing[number]

    async def _send(self, frame: bytes) -> None:
        async with asyncio.timeout(SEND_SECONDS):
            await self._websocket.send_bytes(frame)

    async def _draw(self, number: int, fields: dict[str, Any], tokens: list[int]) -> None:
        try:
            await self._answer(number, fields, tokens)
        except WrongRequest as error:
            self._answers.add(number, [], [], REFUSED, str(error).encode())
        except Exception as error:
            text = str(error) if isinstance(error, LostWeights) else f"{type(error).__name__}: {error}"
            self._answers.add(number, [], [], FAILED, text.rstrip(": ").encode())

    async def _answer(self, number: int, fields: dict[str, Any], tokens: list[int]) -> None:
        try:
            weights, params, name = fields["weights"], fields["sampling_params"], str(fields["request_id"])
        except KeyError as error:
            raise WrongRequest(f"the request has no field {error}") from error
        self._check(weights, waiting=False)
        async with aclosing(draw(self._engine, tokens, params, fields.get("kv_transfer_params"), name)) as drawn:
            async for new, logprobs, reason, experts in drawn:
                self._check(weights, waiting=True)
                if reason not in SERVER_REASONS:
                    raise RuntimeError(f"the engine ended the request with the reason {reason}")
                extra = b"" if experts is None or reason is None else _file(experts)
                self._answers.add(number, new, logprobs, reason, extra)

    def _check(self, weights: int | None, waiting: bool) -> None:
        """Raise LostWeights unless the server holds this version. Tokens that were drawn before a pause are still of
        the old version. A request that reached a paused engine would be drawn with other weights."""
        state = self._state
        if not waiting and state.asleep:
            raise LostWeights("this server is asleep")
        held = (state.weight_version, state.paused_version) if waiting else (state.weight_version,)
        if weights not in held or weights is None:
            raise LostWeights(f"this server holds version {state.weight_version} of the weights, not {weights}")


def _file(experts: Any) -> bytes:
    with io.BytesIO() as file:
        np.save(file, experts, allow_pickle=False)
        return file.getvalue()
