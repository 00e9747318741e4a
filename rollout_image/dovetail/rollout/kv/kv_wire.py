"""Serves held blocks over HTTP, as answers to `GET /kv/<key>` with the job's token. A header describes the body, which
has the raw bytes of the blocks, layer after layer. Every transfer has a deadline. An entry is dropped when it has been
read to its end."""

from __future__ import annotations

import hmac
import http.client
import http.server
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.rollout.kv.held import HeldBlocks

DESCRIPTION = "X-Dovetail-KV"
CHUNK_BYTES = 4 << 20


class PullError(Exception):
    """The blocks did not come. The message is one sentence for the log."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], held: HeldBlocks, token: str, layout: str, seconds: float, wait: float
    ):
        self.held, self.layout, self.seconds, self.wait_seconds = held, layout, seconds, wait
        self.expected = f"Bearer {token}".encode()
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _Handler, bind_and_activate=False)
        # The port is reserved by the API server's process (`dovetail.rollout.kv.kv_config.reserve_ports`).
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self.server_bind()
            self.server_activate()
        except BaseException:
            self.server_close()
            raise

    def service_actions(self) -> None:
        self.held.purge()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client has gone away, and recomputes


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.seconds)

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.close_connection = True
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), self.server.expected):
            self.send_error(401)
            return
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        try:
            key = urllib.parse.unquote(url.path.removeprefix("/kv/"))
            first, last, tokens = (int(query[name]) for name in ("first", "last", "tokens"))
        except (KeyError, ValueError):
            self.send_error(400)
            return
        held = self.server.held.get(key, self.server.wait_seconds)
        if held is None:
            self.send_error(404)
            return
        if tokens > held.tokens or not 0 <= first < last <= held.layers[0].shape[0]:
            self.send_error(409, f"{held.tokens} tokens are held")
            return
        parts = [layer[first:last] for layer in held.layers]
        self.send_response(200)
        self.send_header(DESCRIPTION, json.dumps({"weights": held.weights, "layout": self.server.layout}))
        self.send_header("Content-Length", str(sum(part.numel() for part in parts)))
        self.end_headers()
        for part in parts:
            self.wfile.write(memoryview(part.numpy()).cast("B"))
        self.server.held.drop(key)


class HeldServer:
    """Serves `held` from a thread of its own. `layout` describes the blocks, and both ends must agree on it. A client
    that is silent for `seconds` is given up. A request may wait `wait` seconds for a key. Raises OSError if the port is
    taken."""

    def __init__(
        self, address: tuple[str, int], held: HeldBlocks, token: str, layout: str, seconds: float, wait: float
    ) -> None:
        self._server = _Server(address, held, token, layout, seconds, wait)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="dovetail-kv", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def pull(
    address: tuple[str, int],
    token: str,
    key: str,
    blocks: tuple[int, int],
    tokens: int,
    weights: int,
    layout: str,
    block_bytes: Sequence[int],
    seconds: float,
) -> list[torch.Tensor]:
    """The `blocks` [first, last) that `address` holds under `key`, for each layer (last - first, block_bytes[layer])
    uint8.

    Raises PullError if it does not have `tokens` tokens of exactly these weights and layout, or if not all came within
    `seconds`. The size of allocations follows from the arguments, and not from the other side's answer."""
    end = time.monotonic() + seconds
    first, last = blocks
    connection = http.client.HTTPConnection(*address, timeout=seconds)
    try:
        query = urllib.parse.urlencode({"first": first, "last": last, "tokens": tokens})
        path = f"/kv/{urllib.parse.quote(key, safe='')}?{query}"
        connection.connect()
        sock = connection.sock
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        if response.status != 200:
            raise PullError(f"it answered {response.status} {response.reason}")
        described = json.loads(response.headers[DESCRIPTION])
        if described != {"weights": weights, "layout": layout}:
            raise PullError(f"it holds {described}, wanted are weights {weights}, layout {layout}")
        size = (last - first) * sum(block_bytes)
        if response.length != size:
            raise PullError(f"it sends {response.length} bytes, wanted are {size}")
        layers = []
        for nbytes in block_bytes:
            layer = torch.empty((last - first, nbytes), dtype=torch.uint8)
            view = memoryview(layer.numpy()).cast("B")
            while view:
                left = end - time.monotonic()
                if left <= 0:
                    raise PullError(f"it took longer than {seconds:g} s")
                sock.settimeout(left)
                # Unlike `readinto`, this reads the socket only once, so that the deadline is checked in between.
                part = response.read1(min(len(view), CHUNK_BYTES))
                if not part:
                    raise PullError("the connection ended early")
                view[: len(part)] = part
                view = view[len(part) :]
            layers.append(layer)
        return layers
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        raise PullError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    finally:
        connection.close()
