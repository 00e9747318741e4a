"""Chooses the server that sends a weight version to a server that came late. It only computes, without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from dovetail.coordinator.workers.publishing import Target

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
