"""A way to a server that a test can cut, as a restart of the server or a broken network would."""

from __future__ import annotations

import selectors
import socket
import threading


class BreakableProxy:
    """Passes TCP connections from `port`, on 127.0.0.1, to `host`:`to` until `close`."""

    def __init__(self, host: str, to: int) -> None:
        self._to = (host, to)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and each new one at once."""
        self._cut = True
        for each in list(self._open):
            each.close()

    def mend(self) -> None:
        self._cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if self._cut:
                here.close()
            else:
                threading.Thread(target=self._pass, args=(here,), daemon=True).start()

    def _pass(self, here: socket.socket) -> None:
        with here, socket.create_connection(self._to) as there, selectors.DefaultSelector() as waiting:
            pairs = {here: there, there: here}
            self._open |= pairs.keys()
            for each in pairs:
                waiting.register(each, selectors.EVENT_READ)
            try:
                while not self._cut:
                    for key, _ in waiting.select(0.2):
                        data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                        if not data:
                            return
                        pairs[key.fileobj].sendall(data)  # type: ignore[index]
            except (OSError, ValueError):
                return
            finally:
                self._open -= pairs.keys()
