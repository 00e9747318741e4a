"""Finds the addresses of a host name. While no name server answers, the last known address is used for as long as it
answers."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import threading
import time
from collections.abc import Callable

# If a name server is down, a lookup may take glibc half a minute. A process that knows an address does not wait so
# long.
WAIT_SECONDS = 1.0
UNKNOWN_SECONDS = 10.0
# The address of a pod that has ended goes to another pod later. That pod must not get the job's token.
KEEP_SECONDS = 30.0


class LastAddress:
    """Looks up a host's addresses each time they are asked for. Any thread may use it.

    `lookup` may raise OSError, and may take long. `clock` gives monotonic seconds."""

    def __init__(
        self,
        host: str,
        lookup: Callable[[str], list[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: float = WAIT_SECONDS,
        unknown: float = UNKNOWN_SECONDS,
    ) -> None:
        self.host = host
        self._lookup = lookup or addresses
        self._clock, self._wait, self._unknown = clock, wait, unknown
        self._lock = threading.Lock()
        self._running: _Lookup | None = None
        self._known: list[str] = []
        self._good = 0.0

    def find(self) -> list[str]:
        """The host's addresses. If a lookup fails or takes long, they are those of the last lookup, provided that one
        of them has answered lately. Raises OSError."""
        if _is_address(self.host):
            return [self.host]
        with self._lock:
            known = self._known if self._clock() - self._good <= KEEP_SECONDS else []
            running = self._running
            if running is None or running.done.is_set():
                running = self._running = _Lookup(self._lookup, self.host)
        if not running.done.wait(self._wait if known else self._unknown):
            if known:
                return known
            raise TimeoutError(f"no name server answers for {self.host}")
        if running.error is None:
            with self._lock:
                self._known, self._good = running.found, self._clock()
            return running.found
        # "No such name" is an answer, too. It means that the coordinator's Service has no pod now.
        if known and not _no_such_name(running.error):
            return known
        raise running.error

    def answered(self) -> None:
        """Record that the host has answered at an address that `find` returned."""
        with self._lock:
            self._good = self._clock()

    def settle(self) -> None:
        """Wait until no lookup is running, as a process must before it forks."""
        with self._lock:
            running = self._running
        if running is not None:
            running.done.wait()

    def connect(self, port: int, timeout: float) -> socket.socket:
        """A connection to the first address that accepts it. `timeout`: seconds for each address. Raises OSError."""
        error: OSError = socket.gaierror(socket.EAI_NONAME, f"{self.host} has no address")
        for address in self.find():
            try:
                return socket.create_connection((address, port), timeout)
            except OSError as failure:
                error = failure
        raise error


class CoordinatorConnection(http.client.HTTPConnection):
    """An HTTP connection to a host whose last address is known. Raises OSError like its base class."""

    def __init__(self, address: LastAddress, port: int, timeout: float) -> None:
        super().__init__(address.host, port, timeout=timeout)
        self._address = address

    def connect(self) -> None:
        self.sock = self._address.connect(self.port, self.timeout or UNKNOWN_SECONDS)


class _Lookup:
    """One lookup, in a thread of its own because it can't be cancelled."""

    def __init__(self, lookup: Callable[[str], list[str]], host: str) -> None:
        self.found: list[str] = []
        self.error: OSError | None = None
        self.done = threading.Event()
        threading.Thread(target=self._run, args=(lookup, host), name="lookup", daemon=True).start()

    def _run(self, lookup: Callable[[str], list[str]], host: str) -> None:
        try:
            self.found = lookup(host)
        except OSError as error:
            self.error = error
        except Exception as error:  # the host may be no valid name, and nobody may wait for ever
            self.error = OSError(f"{host!r} can't be looked up: {error}")
        finally:
            self.done.set()


def addresses(host: str) -> list[str]:
    """The addresses that the name servers give now. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _no_such_name(error: OSError) -> bool:
    return isinstance(error, socket.gaierror) and error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5))
