"""A thread tells the coordinator every two seconds that this process lives, and which weights it holds."""

from __future__ import annotations

import http.client
import os
import threading
from urllib.parse import urlsplit

from dovetail.protocol.http import direct
from dovetail.protocol.http.last_address import CoordinatorConnection, LastAddress
from dovetail.protocol.messages import Register
from dovetail.protocol.process.env import ProcessEnv
from dovetail.rollout.serving.routes import ServerState

PERIOD_SECONDS = 2.0
TIMEOUT_SECONDS = 5.0


class Registrar:
    """Posts `Register` until it is stopped. `ready` becomes true once the server's own /health answers 200."""

    def __init__(self, env: ProcessEnv, state: ServerState, period_seconds: float = PERIOD_SECONDS):
        self._env = env
        self._state = state
        self._period = period_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="register", daemon=True)
        # vLLM forks its engine core. It must not do so during a request, because the child would inherit held locks.
        self._quiet = threading.Lock()
        coordinator = urlsplit(env.coordinator)
        self._path = f"{coordinator.path.rstrip('/')}/v1/instances"
        self._address, self._port = LastAddress(coordinator.hostname or ""), coordinator.port or 80
        self._parent = os.getpid()
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. This does not wait for a request in progress."""
        self._stopped.set()

    def _before_fork(self) -> None:
        self._quiet.acquire()
        self._address.settle()

    def _after_fork(self) -> None:
        self._quiet.release()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._quiet:
                ready = self._healthy()
                self._post(ready)
            # While the server starts, check more often, so that the first ready report is not late.
            self._stopped.wait(self._period if ready else self._period / 8)

    def _url(self) -> str:
        host = f"[{self._env.host}]" if ":" in self._env.host else self._env.host
        return f"http://{host}:{self._env.port}"

    def _healthy(self) -> bool:
        return direct.ask(f"{self._url()}/health", TIMEOUT_SECONDS) is not None

    def _post(self, ready: bool) -> None:
        message = Register(
            name=self._env.name,
            kind="rollout",
            group=self._env.group,
            url=self._url(),
            incarnation=self._state.incarnation,
            ready=ready,
            weight_version=self._state.weight_version,
            asleep=self._state.asleep,
            abilities=self._state.abilities(),
        )
        headers = {"Authorization": f"Bearer {self._env.token}", "Content-Type": "application/json"}
        connection = CoordinatorConnection(self._address, self._port, TIMEOUT_SECONDS)
        try:
            connection.request("POST", self._path, message.as_json().encode(), headers)
            if connection.getresponse().status == 200:
                self._address.answered()
        except (OSError, http.client.HTTPException):
            pass  # the coordinator may be restarting, and gets the next report
        finally:
            connection.close()
