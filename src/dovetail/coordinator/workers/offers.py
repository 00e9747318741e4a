"""Tells receivers to take an offer of weights. Rollouts get vLLM's sequence of calls. Scorers get one call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from dovetail.protocol.messages import Offer, Receive, Receiver

# Seconds that are added to the transfer's deadline, for the calls before and after it.
GRACE_SECONDS = 10.0
# The time limit of calls that only change state. An engine answers them between two decode steps.
CALL_SECONDS = 30.0


class ReceiverError(RuntimeError):
    """A receiver refused a call or did not answer. The message is one sentence."""


def receive_for(offer: Offer, receiver: Receiver, receivers: Sequence[Receiver]) -> Receive:
    """The part of `offer` that `receiver` takes. Raises ValueError if its models have communicators of different
    sizes."""
    segments = [s for s in offer.segments if s.model in receiver.models]
    sizes = {1 + sum(r.world for r in receivers if s.model in r.models) for s in segments}
    if len(sizes) > 1:
        raise ValueError(f"{receiver.name} takes models with different sets of receivers, which is not supported")
    return Receive(
        offer=offer.model_copy(update={"segments": segments}),
        rank_offset=receiver.rank_offset,
        world_size=sizes.pop() if sizes else 1,
    )


async def push_offer(
    session: aiohttp.ClientSession,
    offer: Offer,
    receivers: Sequence[tuple[Receiver, str]],
    epoch_is_new: bool,
    *,
    on_error: Callable[[str, str], None] = lambda name, error: None,
) -> dict[str, str | None]:
    """Let all receivers (with their base URLs) take `offer` at the same time. `session` sends the job's token.

    The result has one entry for each name. It is None if the receiver holds the whole version, and otherwise the error.
    A rollout that fails before its weights were changed continues with the old ones. A rollout that fails later stays
    paused, and refuses to generate until a later offer succeeds. A rollout that does not fail also refuses to generate,
    until it has passed the probe (`dovetail.coordinator.workers.publishing`). Running requests are aborted.
    `on_error(name, what)` is called as soon as a receiver fails, while others may still wait for it."""
    everyone = [receiver for receiver, _ in receivers]

    async def one(receiver: Receiver, url: str) -> str | None:
        base = url.rstrip("/")
        try:
            receive = receive_for(offer, receiver, everyone)
            if not receive.offer.segments:
                return f"the offer has no weights of {', '.join(receiver.models)}"
            if receiver.kind == "scorer":
                await post(session, f"{base}/v1/weights", offer.deadline_seconds + GRACE_SECONDS, _json(receive))
            else:
                await _update_rollout(session, base, receive, epoch_is_new)
        except (ReceiverError, ValueError) as error:
            on_error(receiver.name, str(error))
            return str(error)
        return None

    outcomes = await asyncio.gather(*(one(receiver, url) for receiver, url in receivers))
    return {receiver.name: outcome for (receiver, _), outcome in zip(receivers, outcomes, strict=True)}


async def _update_rollout(session: aiohttp.ClientSession, base: str, receive: Receive, epoch_is_new: bool) -> None:
    long = receive.offer.deadline_seconds + GRACE_SECONDS
    body = {"receive": _json(receive)}
    await post(session, f"{base}/pause?mode=abort", long)
    try:
        if epoch_is_new:
            await post(session, f"{base}/init_weight_transfer_engine", long, {"init_info": body})
    except ReceiverError:
        # Its old weights are complete, so it may continue with them.
        with suppress(ReceiverError):
            await post(session, f"{base}/resume", CALL_SECONDS)
        raise
    await post(session, f"{base}/start_weight_update", CALL_SECONDS)
    await post(session, f"{base}/update_weights", long, {"update_info": body})
    # The KV cache was computed with the old weights, so it is invalid now.
    await post(session, f"{base}/reset_prefix_cache?reset_running_requests=true", CALL_SECONDS)
    await post(session, f"{base}/finish_weight_update", CALL_SECONDS, {"weight_version": str(receive.offer.version)})
    await post(session, f"{base}/resume", CALL_SECONDS)


def _json(receive: Receive) -> dict[str, Any]:
    return receive.model_dump(mode="json")


async def post(
    session: aiohttp.ClientSession,
    url: str,
    seconds: float,
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Any:
    """Send a POST request with a time limit of `seconds`. Returns the answer as JSON, or None if it is not JSON. Raises
    ReceiverError."""
    route = "/" + url.split("://", 1)[-1].split("/", 1)[-1].split("?", 1)[0]
    try:
        limit = aiohttp.ClientTimeout(total=seconds)
        async with session.post(url, json=body, timeout=limit, headers=headers) as reply:
            text = await reply.text()
            if reply.status >= 400:
                raise ReceiverError(f"{route} answered {reply.status}: {_reason(text)}")
    except TimeoutError as error:
        raise ReceiverError(f"{route} did not answer within {seconds:g} s") from error
    except aiohttp.ClientError as error:
        raise ReceiverError(f"{route} failed: {type(error).__name__}: {error}") from error
    try:
        return json.loads(text)
    except ValueError:
        return None


def _reason(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given")[:400]
