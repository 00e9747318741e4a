"""The interface of a rollout backend, and the choice of the backend that a server process uses.

A backend is a server process to which the coordinator talks over HTTP. docs/extending.md lists the routes that it must
have. vLLM with Dovetail's plug-ins (`dovetail.rollout.serving.vllm_server.VLLM`) is the only implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dovetail.manifest.callables import load_callable
from dovetail.manifest.types import Group, RLHFJob
from dovetail.protocol.process.env import ACTOR_CONFIG, ProcessEnv

# This variable names a backend other than vLLM, as module:class.
VARIABLE = "DOVETAIL_ROLLOUT_BACKEND"


@dataclass(frozen=True)
class ServerPlan:
    """The model that a server process serves, and its settings. `config`: the actor's config.json. `on_cpu`: whether
    the server uses no GPU. `dtype`: the dtype of weights and KV cache, such as `float16`. `stages` and `ranks`: the
    numbers of pipeline stages and of tensor-parallel ranks. `memory`: the share of each GPU's memory that the server
    may use, or None for the backend's default. `arguments`: the command line of this process."""

    env: ProcessEnv
    job: RLHFJob
    group: Group
    config: Mapping[str, Any]
    on_cpu: bool
    dtype: str
    stages: int = 1
    ranks: int = 1
    memory: float | None = None
    arguments: tuple[str, ...] = ()

    @property
    def model(self) -> Path:
        """The folder of the actor's config.json. It holds no weights, because these come from the trainers."""
        return self.env.run_dir / ACTOR_CONFIG


class RolloutBackend(Protocol):
    """A kind of server. An instance is made without arguments."""

    def problem(self, plan: ServerPlan) -> str | None:
        """One sentence that says why the backend can never serve this plan, or None if it can."""
        ...

    def serve(self, plan: ServerPlan) -> int:
        """Register with the coordinator every two seconds and serve at `plan.env.host` and `plan.env.port` until
        SIGTERM. Returns the exit code (`dovetail.protocol.process.endings`)."""
        ...


def load_backend(environ: Mapping[str, str], default: type[RolloutBackend]) -> RolloutBackend:
    """The backend that the environment names, or `default` if it names none. Raises ValueError with one sentence."""
    name = environ.get(VARIABLE)
    backend: RolloutBackend = (default if name is None else load_callable(name, VARIABLE))()
    return backend
