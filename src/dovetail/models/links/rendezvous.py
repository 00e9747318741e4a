"""Where the ranks of a channel meet and tell each other small things: the sender's TCP store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from dovetail.models.links.deadline import Deadline, TransferError, first_line
from dovetail.protocol.messages import CALLED_OFF

ABORT = "abort"
# How often a rank that waits for a GPU looks whether the transfer was called off.
LOOK_SECONDS = 0.02


class Rendezvous:
    """`cancelled` is asked while this rank waits: once true, this rank and all others give up.

    Every method raises TransferError when the store is gone, as its sender then is."""

    def __init__(self, store: dist.Store, cancelled: Callable[[], bool] = lambda: False):
        self.store = store
        self._cancelled = cancelled
        self._looked = 0.0

    def set(self, key: str, value: str | bytes) -> None:
        with broken_rendezvous():
            self.store.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        with broken_rendezvous():
            return bytes(self.store.get(key))

    def count(self, key: str, default: int = 0) -> int:
        """A number; `default` before it is there."""
        return int(self.get(key)) if self.has([key]) else default

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all the keys are there."""
        with broken_rendezvous():
            return bool(self.store.check(list(keys)))

    def wait(
        self,
        keys: Iterable[str],
        deadline: Deadline,
        late: Callable[[], str],
        when: str,
        ranks: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        """Returns when all the keys are there. Raises TransferError: past the deadline with the sentence of `late` and
        the `ranks` that it is about, and when the transfer was called off `when`. Who knows the `ranks` says so also
        where others have called it off meanwhile."""
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
        """Raises TransferError once the transfer was called off, by this rank or another. Asks the store every
        LOOK_SECONDS at most, unless `force`."""
        if not force and time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        if self._cancelled():
            self.set(ABORT, "1")
        if self.has([ABORT]):
            raise TransferError(f"{CALLED_OFF} {when}")

    def call_off(self) -> None:
        """Let all ranks give up, if they can still be told."""
        with suppress(TransferError):
            self.set(ABORT, "1")


@contextmanager
def broken_rendezvous() -> Iterator[None]:
    """What the store raises is a TransferError: the sender, whose store it is, has gone."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"{CALLED_OFF}, as the rendezvous broke: {first_line(error)}") from error
