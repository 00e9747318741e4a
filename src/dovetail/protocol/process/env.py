"""The environment variables of every process of a job. The local launcher and pods set the same ones."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

JOB = "DOVETAIL_JOB"
NAME = "DOVETAIL_NAME"
RUN_DIR = "DOVETAIL_RUN_DIR"
COORDINATOR = "DOVETAIL_COORDINATOR"
TOKEN = "DOVETAIL_TOKEN"
HOST = "DOVETAIL_HOST"
PORT = "DOVETAIL_PORT"
METRICS_PORT = "DOVETAIL_METRICS_PORT"
GROUP = "DOVETAIL_GROUP"
RANK = "DOVETAIL_RANK"
WORLD_SIZE = "DOVETAIL_WORLD_SIZE"
# Only pods have these: the folder of the mounted job.json and plan.json, the pod's number in its group, and 1 for a
# rollout that may come and go (its end after a drain is a success).
CONFIG_DIR = "DOVETAIL_CONFIG_DIR"
INDEX = "DOVETAIL_INDEX"
SURPLUS = "DOVETAIL_SURPLUS"

# Pods mount a cache of hub models here (spec.hub.cacheClaim).
HUB_CACHE = "/var/dovetail-hub"

# In a run's directory: the actor's config.json without weights, from which rollouts start.
ACTOR_CONFIG = "models/actor-config"

# The ports of pods. Each pod has an address of its own. Trainer rank i of a pod serves metrics on TRAINER_METRICS_PORT
# + i.
COORDINATOR_PORT = 8000
SERVER_PORT = 8001
SCORER_PORT = 8002
TRAINER_METRICS_PORT = 9000
# At the coordinator's pod: where agents that are services ask for turns of the model, and what is in sandboxes.
AGENTS_PORT = 8003


def sandbox_token(token: str) -> str:
    """The token of the sandboxes of the job with this token. It opens their route, and no other."""
    return hmac.digest(token.encode(), b"sandbox", hashlib.sha256).hex()


def token_problem(token: str) -> str | None:
    """Why a job's token cannot be used in HTTP headers. None if it can."""
    if not token:
        return "is empty"
    if not (token.isascii() and token.isprintable() and " " not in token):
        return "holds more than letters, digits and signs"
    return None


@dataclass(frozen=True)
class ProcessEnv:
    """The identity of this process and the place of its job. `run_dir`: the job's volume, with job.json (the manifest
    with defaults), plan.json, models/, checkpoints/ and logs/. `host` and `port`: the address at which this process
    serves HTTP. Trainer ranks serve only metrics (`metrics_port`). `config_dir`: the folder of job.json and plan.json
    if they are not in the run directory."""

    job: str
    name: str
    run_dir: Path
    coordinator: str
    token: str
    host: str
    port: int
    metrics_port: int
    group: str
    rank: int
    world_size: int
    config_dir: Path | None = None

    @property
    def job_file(self) -> Path:
        """The path of the manifest with defaults."""
        return (self.config_dir or self.run_dir) / "job.json"

    @property
    def plan_file(self) -> Path:
        """The path of the plan."""
        return (self.config_dir or self.run_dir) / "plan.json"

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> ProcessEnv:
        """Read the variables. Raises ValueError that names the variable that is missing or wrong."""

        def need(key: str) -> str:
            if key not in environ:
                raise ValueError(f"environment variable {key} is not set; start this process with `dovetail run`")
            return environ[key]

        token = need(TOKEN)
        if problem := token_problem(token):
            raise ValueError(f"environment variable {TOKEN} {problem}; start this process with `dovetail run`")
        return ProcessEnv(
            job=need(JOB),
            name=need(NAME),
            run_dir=Path(need(RUN_DIR)),
            coordinator=need(COORDINATOR),
            token=token,
            host=environ.get(HOST, "127.0.0.1"),
            port=int(environ.get(PORT, "0")),
            metrics_port=int(environ.get(METRICS_PORT, "0")),
            group=environ.get(GROUP, ""),
            rank=int(environ.get(RANK, "0")),
            world_size=int(environ.get(WORLD_SIZE, "1")),
            config_dir=Path(environ[CONFIG_DIR]) if environ.get(CONFIG_DIR) else None,
        )

    def write(self) -> dict[str, str]:
        """The variables that `read` reads."""
        variables = {
            JOB: self.job,
            NAME: self.name,
            RUN_DIR: str(self.run_dir),
            COORDINATOR: self.coordinator,
            TOKEN: self.token,
            HOST: self.host,
            PORT: str(self.port),
            METRICS_PORT: str(self.metrics_port),
            GROUP: self.group,
            RANK: str(self.rank),
            WORLD_SIZE: str(self.world_size),
        }
        if self.config_dir is not None:
            variables[CONFIG_DIR] = str(self.config_dir)
        return variables


def started_with(entries: Iterable[str]) -> set[int]:
    """The ids of the processes of this user that have one of the `NAME=value` in the environment with which they were
    started. A process inherits it whatever session and parent it has."""
    wanted, found = {entry.encode() for entry in entries}, set()
    for folder in Path("/proc").glob("[0-9]*") if wanted else ():
        with contextlib.suppress(OSError):
            if not wanted.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                found.add(int(folder.name))
    return found
