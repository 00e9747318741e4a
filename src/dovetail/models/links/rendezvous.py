"""Lets the ranks of a channel meet and exchange small values, in the sender's TCP store."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from dovetail.models.links.deadline import Deadline, T, TransferError, first_line, in_time
from dovetail.protocol.messages import CALLED_OFF

ABORT = "abort"
# A rank that waits for a GPU checks at this interval whether the transfer was called off.
LOOK_SECONDS = 0.02
# The store may take so long to answer. A thread of the sender does nothing else than answer.
ANSWER_SECONDS = 20.0


PROOF_BYTES = 32


def find_stranger(
    rank: int,
    others: Sequence[int],
    proof: Callable[[int, int], bytes],
    send: Callable[[torch.Tensor, int], Callable[[], object]],
    receive: Callable[[torch.Tensor, int], object],
) -> int | None:
    """Prove to each of the ranks `others` that this one knows a secret, and check what they show. Returns the first
    that showed something else, or None. Call it on all of them, because Gloo takes whoever connects first.

    `proof(sender, receiver)` has PROOF_BYTES bytes and is for this pair only, so nobody can use it again. `send` starts
    to send and returns what waits for its end; `receive` waits."""
    sent = []
    for other in others:
        mine = torch.frombuffer(bytearray(proof(rank, other)), dtype=torch.uint8)
        sent.append((send(mine, other), mine))
    for other in others:
        shown = torch.empty(PROOF_BYTES, dtype=torch.uint8)
        receive(shown, other)
        if not hmac.compare_digest(shown.numpy().tobytes(), proof(other, rank)):
            return other
    for finish, _ in sent:
        finish()
    return None


class SignedStore(dist.Store):
    """A store that gives only values of those who know `secret`. torch's own asks nobody who connects for anything. The
    offer of a transfer brings the secret to the receivers."""

    def __init__(self, store: dist.Store, secret: str) -> None:
        super().__init__()
        self._store, self.secret = store, secret

    def proof(self, text: str, value: bytes = b"") -> bytes:
        """What shows that the writer of `text` and `value` knows the secret: PROOF_BYTES bytes."""
        return hmac.digest(self.secret.encode(), f"{len(text)} {text}".encode() + value, "sha256")

    def within(self, prefix: str) -> SignedStore:
        """The same store, with a prefix before every key."""
        return SignedStore(dist.PrefixStore(prefix, self._store), self.secret)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a signed value."""
        given = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self.proof(key, given) + given)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value of a key. Raises RuntimeError if it was written without the secret."""
        found = bytes(self._store.get(key))
        shown, value = found[:PROOF_BYTES], found[PROOF_BYTES:]
        if not hmac.compare_digest(shown, self.proof(key, value)):
            raise RuntimeError(f"{key} was not written by a rank of this transfer")
        return value

    def check(self, keys: list[str]) -> bool:
        """Whether all the keys exist."""
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all the keys exist."""
        self._store.wait(keys, *([] if timeout is None else [timeout]))


class Rendezvous:
    """The meeting of the `world` ranks of a channel, as rank `rank` sees it. `cancelled` is asked while this rank
    waits. Once it is true, this rank and all others give up.

    Every method raises TransferError if the store is gone or does not answer, because then the sender is gone or
    frozen."""

    def __init__(self, store: SignedStore, rank: int, world: int, cancelled: Callable[[], bool] = lambda: False):
        self.store, self.rank, self.world = store, rank, world
        self._cancelled = cancelled
        self._looked = 0.0
        self._mute = False

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value for the other ranks."""
        self._ask(lambda: self.store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""
        return self._ask(lambda: self.store.get(key))

    def count(self, key: str, default: int = 0) -> int:
        """The number stored at a key, or `default` if the key does not exist yet."""
        return int(self.get(key)) if self.has([key]) else default

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all the keys exist."""
        wanted = list(keys)
        return self._ask(lambda: self.store.check(wanted))

    def wait(
        self,
        keys: Iterable[str],
        deadline: Deadline,
        late: Callable[[], str],
        when: str,
        ranks: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        """Wait until all the keys exist. Raises TransferError after the deadline, with the sentence that `late` gives
        and the `ranks` that are late. It also raises it if the transfer was called off. Then `when` ends the sentence.
        After the deadline the error names the `ranks` that a caller gives, even if others have called the transfer off
        meanwhile."""
        keys, pause = list(keys), 0.0005
        while not self.has(keys):
            try:
                deadline.left()
            except TransferError as error:
                if ranks is None:
                    self.look(when, force=True)
                raise TransferError(late(), [] if ranks is None else ranks()) from error
            self.look(when, force=True)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def look(self, when: str, force: bool = False) -> None:
        """Raise TransferError if this rank or another has called the transfer off. Without `force` the store is asked
        at most every LOOK_SECONDS."""
        if not force and time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        if self._cancelled():
            self.set(ABORT, "1")
        if self.has([ABORT]):
            raise TransferError(f"{CALLED_OFF} {when}")

    def call_off(self) -> None:
        """Make all ranks give up, if the store can still be reached."""
        with suppress(TransferError):
            self.set(ABORT, "1")

    def _ask(self, question: Callable[[], T]) -> T:
        late = f"the sender did not answer within {ANSWER_SECONDS:g} s"
        if self._mute:
            raise TransferError(late)
        with broken_rendezvous():
            try:
                return in_time(question, ANSWER_SECONDS, late)
            except TransferError:
                self._mute = True
                raise


@contextmanager
def broken_rendezvous() -> Iterator[None]:
    """A context that turns the store's errors into TransferError. They mean that the sender, which serves the store, is
    gone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"{CALLED_OFF}, as the rendezvous broke: {first_line(error)}") from error


Way = Literal["ipc", "nccl", "gloo"]


class Place(NamedTuple):
    """The place of a rank's tensors. `gpu`: the UUID of its GPU or MIG slice, or None without a GPU. `nccl`: the
    version of its NCCL, such as 22907, or None without NCCL. `board`: the GPU as NCCL identifies it (`nccl.board_of`),
    or None if it is not known. All MIG slices of a GPU have the same board."""

    gpu: str | None = None
    nccl: int | None = None
    board: str | None = None


def routes(places: Sequence[Place]) -> dict[int, Way]:
    """The link for each receiver, by rank. `places[0]` is the sender's place.

    NCCL refuses two ranks on one GPU, even on different MIG slices of it. It also refuses ranks of different versions.
    A receiver on the sender's GPU or slice maps the sender's memory (CUDA IPC). All other receivers that NCCL would
    refuse get their weights through host memory (Gloo)."""
    sender = places[0]
    ways: dict[int, Way] = {}
    taken = {sender.board or sender.gpu}
    for rank, place in enumerate(places[1:], 1):
        if place.gpu is None or sender.gpu is None:
            ways[rank] = "gloo"
        elif place.gpu == sender.gpu:
            ways[rank] = "ipc"
        elif place.nccl is None or place.nccl != sender.nccl or (place.board or place.gpu) in taken:
            ways[rank] = "gloo"
        else:
            ways[rank] = "nccl"
            taken.add(place.board or place.gpu)
    return ways
