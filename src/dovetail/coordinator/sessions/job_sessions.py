"""What the episodes of a job are played with, as its manifest says it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dovetail.coordinator.data.prepare import Prepared
from dovetail.coordinator.sessions.agent import AgentPlayer
from dovetail.coordinator.sessions.agents import CommandAgents, ServiceAgents
from dovetail.coordinator.sessions.answer_reader import AnswerReader
from dovetail.coordinator.sessions.bridge import Bridge
from dovetail.coordinator.sessions.chat_routes import ChatRoutes
from dovetail.coordinator.sessions.environment_workers import EnvironmentCode, EnvironmentWorkers, Read, unread
from dovetail.coordinator.sessions.http_environment import HttpEnvironment
from dovetail.coordinator.sessions.play import Environment, Player
from dovetail.coordinator.store.tool_calls import ToolCalls
from dovetail.coordinator.user_code.local_process import LocalProcesses
from dovetail.coordinator.user_code.sandbox import Sandbox
from dovetail.coordinator.user_code.sandbox_pods import SandboxPods
from dovetail.coordinator.user_code.user_process import ProcessPlace
from dovetail.manifest.training_types import Sessions
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.process.env import sandbox_token


class Places(NamedTuple):
    """Where a job has its code and its run, and the address at which agents elsewhere and sandboxes ask. Port 0 is
    any. `token` is the job's, if it has pods."""

    base_dir: Path
    run_dir: Path
    host: str = ""
    port: int = 0
    token: str = ""


def job_environment(
    spec: RLHFJobSpec, places: Places, run: str, log: Callable[..., None], read: Read = unread
) -> Environment | None:
    """The environments or the agents of a job's episodes. None if it has none. A class is imported from
    spec.models.reward.importPath, or else from `base_dir`, and does not see `run_dir`. An agent is started there. `run`
    is the run's name at a server. Where there are no pods, such as in a check, bubblewrap takes their place."""
    if (sessions := spec.sessions) is None:
        return None
    folder = Path(spec.models.reward.import_path or places.base_dir)
    place: ProcessPlace = LocalProcesses(None if sessions.sandbox == "None" else Sandbox(folder, [places.run_dir]))
    if sessions.sandbox == "Pod" and places.token:
        place = SandboxPods(sandbox_token(places.token), places.host, places.port)
    if sessions.agent is not None:
        length = spec.data.max_prompt_tokens + spec.generation.max_tokens
        routes = ChatRoutes(spec.generation, length, log)
        if sessions.agent.url is not None:
            return ServiceAgents(sessions.agent, run, places.port, routes)
        return CommandAgents(sessions.agent, folder, place, routes)
    given = sessions.environment
    assert given is not None
    if given.url is not None:
        return HttpEnvironment(given.url, run, given.timeout_seconds)
    assert given.function is not None
    code = EnvironmentCode(given.function, folder, given.workers, given.timeout_seconds, sessions.repeatable, place)
    return EnvironmentWorkers(code, read)


def job_player(
    sessions: Sessions, prepared: Prepared, environment: Environment, calls: ToolCalls
) -> Player | AgentPlayer:
    """What plays a job's episodes with its `environment`, which is open. Raises Unreadable if the chat template writes
    no calls of tools that can be read."""
    bridge = Bridge(prepared.chat, prepared.tokenizer)
    if sessions.agent is not None:
        return AgentPlayer.of(bridge, prepared.tokenizer, prepared.chat, sessions.max_turns)
    reader = AnswerReader.of(prepared.tokenizer, prepared.chat)
    return Player(bridge, reader, calls, environment.tools, sessions.max_turns, sessions.repeatable)
