"""A job with agents, one episode after another, whose model says what the test wants."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.coordinator.data.text.chat_template import chat_format
from dovetail.coordinator.sessions.agent import AgentPlayer
from dovetail.coordinator.sessions.agents import CommandAgents, ServiceAgents
from dovetail.coordinator.sessions.bridge import Bridge
from dovetail.coordinator.sessions.chat_routes import ChatRoutes
from dovetail.coordinator.sessions.play import AskedTurn, Played, SampledTurn, check_opening
from dovetail.coordinator.store.samples import Key
from dovetail.coordinator.user_code.local_process import LocalProcesses
from dovetail.coordinator.user_code.sandbox import Sandbox
from dovetail.coordinator.user_code.user_process import ProcessPlace
from dovetail.manifest.training_types import Generation, SessionAgent
from helpers.chat_templates import byte_tokens, said, shipped, with_ends

END = "<|im_end|>"
# The whole agent, with one tool. It imports nothing of ours. What it is to do besides is in the record.
AGENT = '''
import json, sys
from openai import OpenAI

client, record = OpenAI(), json.load(sys.stdin)
tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}
messages, told = list(record["messages"]), []


def ask(messages=messages, **settings):
    return client.chat.completions.create(model="gpt-4o", messages=messages, tools=[tool], **settings)


def turn(**settings):
    found = ask(**settings).choices[0]
    messages.append(found.message.model_dump(exclude_none=True))
    for call in found.message.tool_calls or []:
        given = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
    return found


def tell(found):
    """What the test sees."""
    print("TOLD", json.dumps(found), file=sys.stderr, flush=True)


exec(record["do"])
'''


def added(a: int, b: int, words: str = "") -> str:
    return f'{words}<tool_call>\n{{"name": "add", "arguments": {{"a":{a}, "b": {b}}}}}\n</tool_call>{END}'


class Job:
    """A job with one episode after another. The model says `answers`, one in each turn that is drawn."""

    def __init__(self, folder: Path, answers: list[str], max_turns: int = 8, most: int = 10**6) -> None:
        folder.chmod(0o755)
        (folder / "agent.py").write_text(AGENT)
        self.folder, self.answers, self.max_turns, self.most = folder, answers, max_turns, most
        self.tokenizer = with_ends(byte_tokens(), shipped()["trl: qwen2_5"][0])
        self.command = [sys.executable, "agent.py"]
        self.seconds = 300.0
        self.place: ProcessPlace = LocalProcesses(Sandbox(folder))
        self.url, self.room = "", 10**6
        self.drawn: list[tuple[AskedTurn, SampledTurn]] = []
        self.notes: list[dict[str, Any]] = []
        self.during: Callable[[], Any] | None = None

    def play(self, do: str = "while turn().message.tool_calls: pass", **record: Any) -> Played:
        return asyncio.run(self._play({"messages": [said("user", "Add.")], "do": do, **record}))

    async def _play(self, record: dict[str, Any]) -> Played:
        routes = ChatRoutes(Generation(), 4096, lambda event, **note: self.notes.append(note))
        agents: Any
        if self.url:
            agents = ServiceAgents(SessionAgent(url=self.url, timeout_seconds=self.seconds), "run", 0, routes)
        else:
            given = SessionAgent(command=self.command, timeout_seconds=self.seconds)
            agents = CommandAgents(given, self.folder, self.place, routes)
        chat = chat_format(self.tokenizer)
        player = AgentPlayer.of(Bridge(chat, self.tokenizer), self.tokenizer, chat, self.max_turns)
        await agents.open()
        try:
            asked = record.pop("messages")
            episode = await agents.begin("1-0-0-0", asked, record)
            return await player.play(Key(1, 0, 0), 0, asked, episode, self._draw)
        finally:
            assert routes.episodes == {}
            await agents.close()

    async def _draw(self, asked: AskedTurn) -> SampledTurn:
        check_opening(asked, self.room)
        if asked.before > self.most:
            return SampledTurn([], [], False)
        if self.during is not None:
            await self.during()
        text = self.answers[len(self.drawn)]
        ids = self.tokenizer(text)["input_ids"]
        found = SampledTurn(ids, [-1.0] * len(ids), text.endswith(END))
        self.drawn.append((asked, found))
        return found


def learnt(job: Job, played: Played) -> list[str]:
    return [job.tokenizer.decode(branch.tokens[branch.learnt]) for branch in played.branches]
