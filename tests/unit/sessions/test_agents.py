"""Agents of one's own, in processes that know nothing of the job: what the model wrote for them is what is trained."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.data.text.chat_template import chat_format
from dovetail.coordinator.sessions.agent import AgentPlayer
from dovetail.coordinator.sessions.agents import Agents
from dovetail.coordinator.sessions.bridge import Bridge
from dovetail.coordinator.sessions.chat_routes import ChatRoutes
from dovetail.coordinator.sessions.effects import Failed
from dovetail.coordinator.sessions.play import AskedTurn, Ending, Played, SampledTurn
from dovetail.coordinator.store.samples import Key
from dovetail.coordinator.user_code.sandbox import Sandbox
from dovetail.manifest.training_types import Generation, SessionAgent
from helpers.chat_templates import byte_tokens, said, shipped, with_ends

pytestmark = pytest.mark.slow

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
        self.seconds, self.sandbox = 300.0, Sandbox(folder)
        self.drawn: list[tuple[AskedTurn, SampledTurn]] = []
        self.notes: list[dict[str, Any]] = []
        self.during: Callable[[], Any] | None = None

    def play(self, do: str = "while turn().message.tool_calls: pass", **record: Any) -> Played:
        return asyncio.run(self._play({"messages": [said("user", "Add.")], "do": do, **record}))

    async def _play(self, record: dict[str, Any]) -> Played:
        given = SessionAgent(command=self.command, timeout_seconds=self.seconds)
        routes = ChatRoutes(Generation(), 4096, lambda event, **note: self.notes.append(note))
        agents = Agents(given, self.folder, self.sandbox, routes)
        chat = chat_format(self.tokenizer)
        player = AgentPlayer.of(Bridge(chat, self.tokenizer), self.tokenizer, chat, self.max_turns)
        await agents.open()
        try:
            episode = await agents.begin("1-0-0-0", record)
            return await player.play(Key(1, 0, 0), 0, record["messages"], episode, self._draw)
        finally:
            assert routes.episodes == {}
            await agents.close()

    async def _draw(self, asked: AskedTurn) -> SampledTurn:
        if asked.before > self.most:
            return SampledTurn([], [], False)
        if self.during is not None:
            await self.during()
        text = self.answers[len(self.drawn)]
        ids = self.tokenizer(text)["input_ids"]
        found = SampledTurn(ids, [-1.0] * len(ids), text.endswith(END))
        self.drawn.append((asked, found))
        return found


def told(captured: Any) -> list[Any]:
    lines = captured.readouterr().err.splitlines()
    return [json.loads(line.removeprefix("TOLD ")) for line in lines if line.startswith("TOLD ")]


def learnt(job: Job, played: Played) -> list[str]:
    return [job.tokenizer.decode(branch.tokens[branch.learnt]) for branch in played.branches]


GAME = [added(1, 2), added(3, 4, "And now."), f"It is 7.{END}"]


def test_an_agent_with_tools_of_its_own(tmp_path: Path) -> None:
    job = Job(tmp_path, GAME)
    played = job.play()
    assert (played.ending, played.turns, played.calls, played.reward) == (Ending.ANSWERED, 3, 2, None)
    assert learnt(job, played) == ["".join(GAME)], "one sequence, as it was sampled"
    roles = [(m["role"], m["content"]) for m in played.messages]
    calls = [("assistant", ""), ("tool", "3"), ("assistant", "And now."), ("tool", "7")]
    assert roles == [("user", "Add."), *calls, ("assistant", "It is 7.")]


def test_the_agent_of_the_how_to_page(tmp_path: Path) -> None:
    def guess(number: object) -> str:
        return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {json.dumps(number)}}}}}\n</tool_call>{END}'

    job = Job(tmp_path, [guess(3), guess("x"), guess(7)])
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "agents.md").read_text()
    (tmp_path / "agent.py").write_text(page.partition("```python\n# agent.py\n")[2].partition("```")[0])
    played = job.play(secret=7)
    assert (played.ending, played.reward, played.turns) == (Ending.ANSWERED, pytest.approx(1 / 3), 3)
    assert [m["content"] for m in played.messages if m["role"] == "tool"] == ["wrong", "not a number"]


def test_parallel_calls_that_are_streamed(tmp_path: Path, capfd: Any) -> None:
    both = added(1, 2).removesuffix(END) + "\n" + added(3, 4)
    job = Job(tmp_path, [both, f"3 and 7.{END}"])
    played = job.play("""
chunks = list(ask(stream=True, stream_options={"include_usage": True}))
calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
messages.append({"role": "assistant", "content": None, "tool_calls": [
    {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
    for c in calls]})
for call in calls:
    given = json.loads(call.function.arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
text = "".join(c.choices[0].delta.content or "" for c in ask(stream=True) if c.choices)
ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
tell([[c.index for c in calls], ends, chunks[-1].usage.completion_tokens, text])
""")
    assert told(capfd) == [[[0, 1], ["tool_calls"], len(job.drawn[0][1].tokens), "3 and 7."]]
    assert (played.turns, played.calls) == (2, 2)
    assert learnt(job, played) == [both + f"3 and 7.{END}"]
    assert [m["content"] for m in played.messages if m["role"] == "tool"] == ["3", "7"]


def test_what_a_client_sends_again_is_one_turn(tmp_path: Path, capfd: Any) -> None:
    """The model takes longer than the client waits. The turn is drawn once, and its answer comes to a later try."""
    job = Job(tmp_path, GAME)
    asked, again = Counter[str](), asyncio.Event()
    chat = ChatRoutes._ask

    async def counted(routes: ChatRoutes, episode: Any, body: Any) -> Any:
        asked[json.dumps(body["messages"])] += 1
        if max(asked.values()) > 1:
            again.set()
        return await chat(routes, episode, body)

    job.during = again.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatRoutes, "_ask", counted)
        played = job.play("""
first = client
client = OpenAI(timeout=1.0, max_retries=100)
found = turn()
client = first
del messages[1:]
tell([turn().message == found.message, [m["role"] for m in messages]])
while turn().message.tool_calls: pass
""")
    assert told(capfd) == [[True, ["user", "assistant", "tool"]]]
    assert max(asked.values()) >= 3
    assert (len(job.drawn), learnt(job, played)) == (3, ["".join(GAME)])


def test_what_an_agent_may_not_choose(tmp_path: Path, capfd: Any) -> None:
    job = Job(tmp_path, GAME)
    played = job.play("""
from openai import BadRequestError
refused = []
for settings in ({"n": 2}, {"logit_bias": {"5": 1}}, {"response_format": {"type": "json_object"}},
                 {"tool_choice": "required"}, {"stop": ["!"]}, {"max_tokens": 0}, {"messages": []},
                 {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
                 {"messages": [{"role": "user", "content": "\\ud800"}]}):
    try:
        ask(**{"messages": messages, **settings})
    except (BadRequestError, UnicodeEncodeError) as error:
        refused.append([list(settings)[0], str(error)])
tell(refused)
for _ in range(3):
    turn(temperature=0.2, top_p=0.5, seed=3, frequency_penalty=0.0, presence_penalty=1.0, n=1, tool_choice="auto",
         response_format={"type": "text"}, extra_body={"top_k": 5})
tell([client.models.list().data[0].id, client.models.list().data[0].max_model_len])
try:
    OpenAI(api_key="another").models.list()
except Exception as error:
    tell(error.status_code)
""")
    refused, model, status = told(capfd)
    assert [name for name, _ in refused] == [
        *("n", "logit_bias", "response_format", "tool_choice", "stop", "max_tokens", "messages", "messages", "messages")
    ]
    assert 'tool_choice is "required", which cannot be trained with; leave it out' in refused[3][1].replace("\\", "")
    assert (model, status) == (["actor", 4096], 401)
    assert [(note["setting"], note["asked"], note["used"]) for note in job.notes] == [
        ("temperature", 0.2, 1.0),
        ("top_p", 0.5, 1.0),
        ("top_k", 5, 0),
        ("seed", 3, None),
        ("presence_penalty", 1.0, 0),
    ], "once each"
    assert learnt(job, played) == ["".join(GAME)]


@pytest.mark.parametrize(
    ("do", "answers", "ending", "reward", "why"),
    [
        ("while turn(): pass", GAME[:2] * 2, Ending.TURNS, None, "2 turns"),
        ("turn()", [added(1, 2).removesuffix(END)], Ending.CUT, None, ""),
        ("turn()", [f"<tool_call>\n{{broken\n</tool_call>{END}"], Ending.WRONG_CALL, None, "call cannot be read"),
        ("turn(); tell(messages[-1]['content'])", [f"<tool_call>x{END}"], Ending.WRONG_CALL, None, "cannot be read"),
        (
            "turn(); client.post('/reward', body={'reward': 0.5}, cast_to=object); sys.exit(3)",
            GAME,
            Ending.ANSWERED,
            0.5,
            "",
        ),
    ],
    ids=["turns", "cut", "wrong call", "what is no call is a text", "it says what it earned"],
)
def test_what_the_model_fails_is_the_models(
    tmp_path: Path, do: str, answers: list[str], ending: Ending, reward: float | None, why: str
) -> None:
    job = Job(tmp_path, answers, max_turns=2)
    played = job.play(do)
    assert (played.ending, played.reward) == (ending, reward)
    assert why in played.why
    assert learnt(job, played) == ["".join(answers[: len(job.drawn)])]


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("turn(); sys.exit(3)", "the agent ended with exit code 3"),
        ("raise OSError('the shop is closed')", "the agent ended with exit code 1: OSError: the shop is closed"),
        ("turn(); import os; os.kill(os.getpid(), 11)", "the agent was ended by SIGSEGV"),
        ("pass", "the agent ended without a turn of the model"),
        ("turn(); import time; time.sleep(3600)", "the agent asked for no new turn and did not end within 1 s"),
        ("while True: turn(max_tokens=-1)", "the agent ended with exit code 1: openai.BadRequestError"),
    ],
)
def test_what_the_agent_fails_is_not_the_models(tmp_path: Path, do: str, says: str) -> None:
    job = Job(tmp_path, GAME)
    job.seconds = 1.0 if "3600" in do else 300.0
    with pytest.raises(Failed, match=says):
        job.play(do)


def test_an_agent_that_cannot_be_started(tmp_path: Path) -> None:
    job = Job(tmp_path, GAME)
    job.command = ["no-such-program"]
    with pytest.raises(
        Failed, match=r"spec\.sessions\.agent\.command: no-such-program cannot be started: .*No such file"
    ):
        job.play()


def test_an_agent_that_goes_back_and_one_that_has_another(tmp_path: Path) -> None:
    """Histories that are not those before are sequences of their own. Each token is learnt once."""
    job = Job(tmp_path, [*GAME[:2], f"Sub.{END}", f"Again.{END}"])
    played = job.play("""
turn()
turn()
ask(messages=[{"role": "system", "content": "You are another."}, {"role": "user", "content": "?"}])
messages[:] = [messages[0], {"role": "user", "content": "Forget it."}]
turn()
""")
    assert sorted(learnt(job, played)) == sorted(["".join(GAME[:2]), f"Sub.{END}", f"Again.{END}"])
    lengths = [len(branch.tokens) for branch in played.branches]
    last, said_last = job.drawn[-1]
    first = played.branches[0].prompt_length
    assert last.before + len(said_last.tokens) == sum(lengths) - first, "what counts against generation.maxTokens"
    assert first == min(branch.prompt_length for branch in played.branches)


def test_no_token_is_left(tmp_path: Path, capfd: Any) -> None:
    job = Job(tmp_path, GAME, most=100)
    played = job.play("""
try:
    while turn(): pass
except Exception as error:
    tell([error.status_code, error.message])
""")
    ((status, says),) = told(capfd)
    assert status == 400
    assert "no tokens are left of spec.generation.maxTokens" in says
    assert played.ending is Ending.CUT
    assert learnt(job, played) == ["".join(GAME[: len(job.drawn)])]


def test_the_sandbox_lets_an_agent_reach_its_model_and_nothing_else(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_TOKEN", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    job = Job(tmp_path, GAME)
    (tmp_path / "run").mkdir()
    job.sandbox = Sandbox(tmp_path, [tmp_path / "run"])
    (tmp_path / "run" / "store").write_text("the job's")
    do = """
import os, socket, urllib.parse
turn()
def reaches(address):
    try:
        socket.create_connection(address, 5).close()
        return True
    except OSError:
        return False
def writes(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False
mine = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
tell([reaches((mine.hostname, mine.port)), reaches(("127.0.0.1", record["port"])), reaches(("192.0.2.1", 80)),
      writes("agent.py"), os.path.exists("run/store"), "secret" in str(os.environ), "user's" in str(os.environ)])
"""

    async def played(reader: Any, writer: Any) -> None:
        writer.close()

    async def with_a_server() -> None:
        server = await asyncio.start_server(played, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await job._play({"messages": [said("user", "Add.")], "do": do, "port": port})

    asyncio.run(with_a_server())
    assert told(capfd) == [[True, False, False, False, False, False, False]]


def test_without_a_sandbox_and_what_it_started_ends_with_it(tmp_path: Path, capfd: Any) -> None:
    job = Job(tmp_path, GAME)
    job.sandbox = None
    job.play("""
import subprocess
turn()
tell(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True).pid)
""")
    (pid,) = told(capfd)
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()
