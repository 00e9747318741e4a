"""A trainer rank's HTTP client. It makes short blocking requests to the coordinator, each with a deadline."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, ValidationError

from dovetail.protocol.http.last_address import CoordinatorConnection, LastAddress
from dovetail.protocol.messages import (
    BatchPart,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    NextReply,
    NextRequest,
    Offer,
)

# The coordinator answers a long poll within 20 s.
POLL_TIMEOUT_SECONDS = 30.0
REQUEST_TIMEOUT_SECONDS = 30.0
# If the coordinator's pod dies, nothing answers at its old address. Its Service may already point to the next pod, but
# an attempt to connect stays with the old address. So each attempt is short.
CONNECT_TIMEOUT_SECONDS = 3.0
JSON_LIMIT_BYTES = 16 * 2**20
BATCH_LIMIT_BYTES = 4 * 2**30
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0

M = TypeVar("M", bound=BaseModel)


class CoordinatorUnreachable(Exception):
    """The coordinator gave no answer within the deadline, despite retries."""


class StaleGeneration(Exception):
    """The answer was 409. This rank's generation is over, and it must join again."""


class Refused(Exception):
    """The coordinator refused the request (4xx), or its answer is not valid."""


class _Transient(Exception):
    """The request may succeed if it is tried again. There was no connection, it broke, or the answer was 5xx."""


class CoordinatorClient:
    """The requests of a rank. Several threads may use it, because every request has a connection of its own.

    If the coordinator is away, requests are retried for `patience` seconds. `clock` gives monotonic seconds."""

    def __init__(
        self,
        address: str,
        token: str,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises ValueError if `address` is not an http URL with host and port."""
        parts = urlsplit(address if "//" in address else f"http://{address}")
        if parts.scheme != "http" or not parts.hostname or parts.port is None:
            raise ValueError(f"DOVETAIL_COORDINATOR must look like http://host:port, not {address!r}")
        self._port, self._base = parts.port, parts.path.rstrip("/")
        self._token, self.patience = token, patience
        self._clock, self._sleep = clock, sleep
        self._address = LastAddress(parts.hostname)

    def join(self, request: JoinRequest) -> JoinReply:
        """Make one long poll, and wait for the coordinator if it is away. Raises CoordinatorUnreachable, Refused."""
        return self._message("/v1/trainer/join", request, JoinReply, POLL_TIMEOUT_SECONDS)

    def next(self, request: NextRequest, patience: float) -> NextReply:
        """Make one long poll, and wait `patience` seconds for the coordinator if it is away. Raises StaleGeneration,
        CoordinatorUnreachable, Refused."""
        return self._message("/v1/trainer/next", request, NextReply, POLL_TIMEOUT_SECONDS, patience)

    def last_word(self, request: NextRequest) -> None:
        """Send a result without waiting for the next command. There is one short try, and failures are ignored."""
        try:
            self._once("POST", "/v1/trainer/next", request.model_dump_json().encode(), 1.0, JSON_LIMIT_BYTES)
        except (_Transient, Refused, StaleGeneration):
            return

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply | None:
        """Send one heartbeat without retries. Returns None if the coordinator is away."""
        try:
            body = self._once("POST", "/v1/heartbeat", beat.model_dump_json().encode(), 5.0, JSON_LIMIT_BYTES)
            return HeartbeatReply.model_validate_json(body)
        except (_Transient, Refused, StaleGeneration, ValidationError):
            return None

    def offer(self, offer: Offer) -> None:
        """Send an offer (POST /v1/weights/offer). Raises CoordinatorUnreachable, Refused, StaleGeneration."""
        body = offer.model_dump_json().encode()
        self._retry("POST", "/v1/weights/offer", body, REQUEST_TIMEOUT_SECONDS, JSON_LIMIT_BYTES)

    def batch(self, key: str, part: BatchPart | None = None, patience: float | None = None) -> bytes:
        """The safetensors document of a batch, or of a part of it. Raises CoordinatorUnreachable, StaleGeneration, and
        Refused if there is no such batch."""
        method, body = ("GET", None) if part is None else ("POST", part.model_dump_json().encode())
        path = f"/v1/batches/{quote(key)}"
        return self._retry(method, path, body, REQUEST_TIMEOUT_SECONDS, BATCH_LIMIT_BYTES, patience)

    # ------------------------------------------------------------ helpers

    def _message(
        self, path: str, message: BaseModel, reply: type[M], timeout: float, patience: float | None = None
    ) -> M:
        document = message.model_dump_json().encode()
        body = self._retry("POST", path, document, timeout, JSON_LIMIT_BYTES, patience)
        try:
            return reply.model_validate_json(body)
        except ValidationError as error:
            raise Refused(f"the coordinator's answer to {path} is not a {reply.__name__}: {error}") from error

    def _retry(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout: float,
        limit: int,
        patience: float | None = None,
    ) -> bytes:
        patience = self.patience if patience is None else patience
        deadline = self._clock() + patience
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._once(method, path, body, timeout, limit)
            except _Transient as error:
                if self._clock() + pause > deadline:
                    raise CoordinatorUnreachable(
                        f"the coordinator at {self._address.host}:{self._port} did not answer {path} "
                        f"for {patience:.0f} s: {error}"
                    ) from error
            self._sleep(pause * random.uniform(0.7, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _once(self, method: str, path: str, body: bytes | None, timeout: float, limit: int) -> bytes:
        connect = min(timeout, CONNECT_TIMEOUT_SECONDS)
        connection = CoordinatorConnection(self._address, self._port, connect)
        headers = {"Authorization": f"Bearer {self._token}", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            connection.request(method, self._base + path, body, headers)
            response = connection.getresponse()
            length, chunked = response.length, response.chunked
            data = response.read(limit + 1)
        except (OSError, http.client.HTTPException) as error:
            raise _Transient(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        # A coordinator that is killed meanwhile sends less, of which `read` says nothing.
        if not chunked and (length is None or len(data) < min(length, limit + 1)):
            raise _Transient(f"the answer broke off after {len(data)} bytes")
        if len(data) > limit:
            raise Refused(f"the coordinator's answer to {path} is larger than {limit} bytes")
        if response.status in (200, 409):
            self._address.answered()
        if response.status == 200:
            return data
        text = data[:500].decode(errors="replace")
        if response.status == 409:
            raise StaleGeneration(text)
        if response.status >= 500:
            raise _Transient(f"HTTP {response.status}: {text}")
        raise Refused(f"HTTP {response.status} from {path}: {text}")


class BatchAhead:
    """The next batch, fetched by a thread while a step runs. What fails is fetched again when it is needed."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._key, self._found = "", Future[bytes]()

    def fetch(self, key: str) -> None:
        """Begin to fetch this batch. It takes the place of one that nobody took."""
        self._key, self._found = key, Future()
        threading.Thread(target=self._run, args=(key, self._found), name=f"fetches {key}", daemon=True).start()

    def take(self, key: str) -> bytes:
        """The batch, once. Raises as `CoordinatorClient.batch`."""
        if key == self._key:
            self._key = ""
            if self._found.exception() is None:
                return self._found.result()
        return self._client.batch(key)

    def _run(self, key: str, found: Future[bytes]) -> None:
        try:
            found.set_result(self._client.batch(key, patience=0.0))
        except Exception as error:
            found.set_exception(error)


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, as others know it: its name, and the address at which they reach it (None: any). `log`
    writes an event."""

    name: str
    client: CoordinatorClient
    log: Callable[..., None]
    host: str | None = None
