"""Sends a weight version from rollouts that hold it to rollouts that came late, while the trainers cannot send it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from dovetail.coordinator.workers.fleet import Fleet
from dovetail.coordinator.workers.publishing import Publisher, Target
from dovetail.protocol.process.endings import cancel

# If this many servers could not send to a receiver, the receiver may be the cause. It then gets its weights from the
# trainers.
MOST_SENDERS = 2

# Name and incarnation of an instance.
Process = tuple[str, str]


def process_of(target: Target) -> Process:
    return target.name, target.incarnation


def same_bits(holder: Target, receiver: Target) -> bool:
    """Whether the holder's weights have the same bits for the receiver as the trainers' weights. A server in 16 bits
    may have received matrices in its own dtype. Every other server received them as the trainers hold them."""
    return holder.dtype not in ("bfloat16", "float16") or holder.dtype == receiver.dtype


def choose_senders(
    receivers: Sequence[Target],
    holders: Sequence[Target],
    failed: Mapping[Process, Set[Process]],
    sending: Counter[str] | None = None,
) -> dict[Target, Target]:
    """The sender for each receiver. Receivers that are not in the result get their weights from the trainers."""
    load = Counter(sending)
    failures = Counter(sender for senders in failed.values() for sender in senders)
    chosen: dict[Target, Target] = {}
    for receiver in sorted(receivers, key=lambda target: target.name):
        tried = failed.get(process_of(receiver), frozenset())
        able = [
            holder
            for holder in holders
            if holder.sends
            and receiver.sends
            and holder.kind == receiver.kind == "rollout"
            and holder.name != receiver.name
            and process_of(holder) not in tried
            and same_bits(holder, receiver)
        ]
        if not able or len(tried) >= MOST_SENDERS:
            continue
        sender = min(able, key=lambda holder: (failures[process_of(holder)], load[holder.name], holder.name))
        load[sender.name] += 1
        chosen[receiver] = sender
    return chosen


@dataclass(frozen=True)
class _Relay:
    sender: Target
    receiver: Target
    task: asyncio.Task[None]


class Relays:
    """The transfers between servers that run now. Each has one sender and one receiver, and ends by its own deadline.
    So none of them delays another one, or a transfer from the trainers. `prepare` makes an instance ready for
    weights."""

    def __init__(
        self,
        fleet: Fleet,
        publisher: Publisher,
        prepare: Callable[[Target], Awaitable[None]],
        log: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._publisher, self._prepare = fleet, publisher, prepare
        self._log, self._clock = log, clock
        self._running: dict[str, _Relay] = {}  # by receiver
        self._given_up: set[asyncio.Task[None]] = set()
        self._version = -1
        self._failed: dict[tuple[int, Process], set[Process]] = {}

    def choose(self, version: int, receivers: Sequence[Target]) -> dict[Target, Target]:
        """The sender of the version for each receiver, as `choose_senders` finds it."""
        if not self._publisher.has_probe(version):
            return {}
        failed = {receiver: senders for (of, receiver), senders in self._failed.items() if of == version}
        sending = Counter(relay.sender.name for relay in self._running.values() if not relay.task.done())
        return choose_senders(receivers, self._fleet.holders(version), failed, sending)

    @property
    def active(self) -> bool:
        """Whether any server is sending."""
        return any(not relay.task.done() for relay in self._running.values())

    def running(self, receiver: Target) -> bool:
        """Whether a server is sending to this process. A transfer to an older process of the same name is cancelled.
        Raises the unexpected error of a transfer, if it had one."""
        relay = self._running.get(receiver.name)
        if relay is None:
            return False
        if relay.task.done():
            del self._running[receiver.name]
            relay.task.result()
            return False
        if process_of(relay.receiver) == process_of(receiver):
            return True
        del self._running[receiver.name]
        self._given_up.add(relay.task)
        relay.task.add_done_callback(self._given_up.discard)
        relay.task.cancel()
        return False

    def start(self, version: int, chosen: dict[Target, Target]) -> None:
        """Start the transfers that were chosen."""
        for receiver, sender in chosen.items():
            self._fleet.update(receiver.name, True)
            task = asyncio.create_task(self._transfer(version, sender, receiver))
            self._running[receiver.name] = _Relay(sender, receiver, task)

    def forget_failures(self, before: int) -> None:
        """Forget which servers could not send versions older than this one."""
        self._failed = {key: senders for key, senders in self._failed.items() if key[0] >= before}

    async def close(self) -> None:
        """Cancel all transfers."""
        await cancel([*self._given_up, *(relay.task for relay in self._running.values())])

    async def _transfer(self, version: int, sender: Target, receiver: Target) -> None:
        began = self._clock()
        try:
            try:
                await self._prepare(receiver)
                problem = await self._publisher.relay(version, sender, receiver)
            except (OSError, TimeoutError) as error:
                problem = f"{receiver.name} could not be prepared: {error}"
            seconds = round(self._clock() - began, 3)
            told = {"instance": receiver.name, "sender": sender.name, "version": version, "seconds": seconds}
            if problem is None:
                self._fleet.weights_acked(receiver.name, receiver.incarnation, version)
                self._log("weights.relayed", **told)
            else:
                self._failed.setdefault((version, process_of(receiver)), set()).add(process_of(sender))
                self._fleet.transfer_failed(receiver.name, receiver.incarnation, False)
                self._log("weights.relay_failed", **told, reason=problem)
        finally:
            relay = self._running.get(receiver.name)
            if relay is not None and relay.task is asyncio.current_task():
                self._fleet.update(receiver.name, False)
