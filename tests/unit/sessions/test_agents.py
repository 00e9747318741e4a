"""Agents of one's own, in processes that know nothing of the job: what the model wrote for them is what is trained."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import OpenAI

from dovetail.coordinator.sessions import http_environment
from dovetail.coordinator.sessions.chat_routes import ChatRoutes
from dovetail.coordinator.sessions.effects import Failed
from dovetail.coordinator.sessions.play import Ending, Played
from dovetail.coordinator.user_code.local_process import LocalProcesses
from dovetail.coordinator.user_code.sandbox import Sandbox
from helpers.agent_life import END, Job, added, learnt
from helpers.chat_templates import said
from helpers.free_ports import free_port
from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow


def told(captured: Any) -> list[Any]:
    lines = captured.readouterr().err.splitlines()
    return [json.loads(line.removeprefix("TOLD ")) for line in lines if line.startswith("TOLD ")]


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
for settings in ({"n": 2}, {"logit_bias": {"5": 1}}, {"stop": [""]}, {"max_tokens": 0}, {"messages": []},
                 {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
                 {"messages": [{"role": "user", "content": "\\ud800"}]}):
    try:
        ask(**{"messages": messages, **settings})
    except (BadRequestError, UnicodeEncodeError) as error:
        refused.append([list(settings)[0], str(error)])
tell(refused)
for _ in range(3):
    turn(temperature=0.2, top_p=0.5, seed=3, frequency_penalty=0.0, presence_penalty=1.0, n=1, tool_choice="required",
         response_format={"type": "json_object"}, extra_body={"top_k": 5})
tell([client.models.list().data[0].id, client.models.list().data[0].max_model_len])
try:
    OpenAI(api_key="another").models.list()
except Exception as error:
    tell(error.status_code)
try:
    client.embeddings.create(model="actor", input="a")
except Exception as error:
    tell(error.body["message"])
""")
    refused, model, status, unknown = told(capfd)
    assert [name for name, _ in refused] == [
        *("n", "logit_bias", "stop", "max_tokens", "messages", "messages", "messages")
    ]
    assert "n is 2, which cannot be trained with; leave it out" in refused[0][1]
    assert unknown == "a job has no POST /v1/embeddings; ask at /v1/chat/completions or /v1/responses"
    assert (model, status) == (["actor", 4096], 401)
    assert [(note["setting"], note["asked"], note["used"]) for note in job.notes] == [
        ("temperature", 0.2, 1.0),
        ("top_p", 0.5, 1.0),
        ("top_k", 5, 0),
        ("seed", 3, None),
        ("tool_choice", "required", "auto"),
        ("presence_penalty", 1.0, 0),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
    ], "once each"
    assert learnt(job, played) == ["".join(GAME)]


def test_an_answer_ends_with_what_the_agent_says_ends_it(tmp_path: Path, capfd: Any) -> None:
    """The text that ends an answer is learnt, as it was sampled. What the model wrote behind it is not."""
    wrote = [f"<think>é</think>Look it up.\nObservation: 5{END}", f"It is 5.{END}"]
    job = Job(tmp_path, wrote)
    played = job.play("""
first = turn(stop=["Obs", "never"])
messages.append({"role": "user", "content": "Observation: 6"})
tell([first.message.content, first.finish_reason, turn(stop="vation").message.content])
""")
    assert told(capfd) == [["Look it up.", "stop", "It is 5."]]
    assert played.ending == Ending.ANSWERED
    assert sorted(learnt(job, played)) == [wrote[0].partition("ervation")[0], wrote[1]]
    assert all(asked.exchange.answer is not None for asked, _ in job.drawn)


RESPONSES = """
call = {"type": "function", **tool["function"]}
items = [{"role": "user", "content": [{"type": "input_text", "text": "Add."}]}]


def respond(**settings):
    asked = {"model": "gpt-5", "instructions": "Add well.", "input": items, "tools": [call], **settings}
    if not streamed:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds.extend(event.type for event in stream)
        return stream.get_final_response()


kinds, done = [], False
while not done:
    response = respond(tool_choice="required")
    items += [item.model_dump(exclude_none=True) for item in response.output]
    calls = [item for item in response.output if item.type == "function_call"]
    for item in calls:
        given = json.loads(item.arguments)
        answer = str(given["a"] + given["b"])
        items.append({"type": "function_call_output", "call_id": item.call_id, "output": answer})
    done = not calls
tell([response.output_text, response.status, response.usage.total_tokens > 0, [item["type"] for item in items[1:]]])
tell(kinds)
refused = []
image = {"type": "input_image", "image_url": "a"}
for wrong in ({"previous_response_id": response.id}, {"tools": [{"type": "web_search"}]},
              {"input": [{"type": "message", "role": "user", "content": [image]}]}, {"input": [{"type": "shell"}]}):
    try:
        respond(**wrong)
    except Exception as error:
        refused.append(error.body["message"])
tell(refused)
"""


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_that_uses_the_responses_api(tmp_path: Path, capfd: Any, streamed: bool) -> None:
    wrote = [added(1, 2, "I add."), added(3, 4), f"<think>\nEasy.\n</think>\n\nIt is 7.{END}"]
    job = Job(tmp_path, wrote)
    played = job.play(f"streamed = {streamed}{RESPONSES}")
    (answer, status, counted, kinds), events, refused = told(capfd)
    assert (answer, status, counted) == ("It is 7.", "completed", True)
    call = ["function_call", "function_call_output"]
    assert kinds == ["message", *call, *call, "reasoning", "message"]
    assert events.count("response.completed") == (3 if streamed else 0)
    assert len(refused) == 4
    assert "previous_response_id is set" in refused[0]
    assert 'tools.0.type is "web_search"' in refused[1]
    assert 'input.0.type is "shell"' in refused[3]
    assert [len(asked.exchange.messages) for asked, _ in job.drawn] == [2, 4, 6]
    assert job.drawn[-1][0].exchange.messages[0] == {"role": "system", "content": "Add well."}
    assert learnt(job, played) == ["".join(wrote)], "one branch"


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
    job.place = LocalProcesses(Sandbox(tmp_path, [tmp_path / "run"]))
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
    job.place = LocalProcesses()
    job.play("""
import subprocess
turn()
tell(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True).pid)
""")
    (pid,) = told(capfd)
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def generate(prompt: list[int], key: str, base_url: str) -> dict[str, Any]:
    """A turn in token ids, as a client of vLLM's route asks for it."""
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 100, "logprobs": 1, "top_p": 0.5}}
    asked = urllib.request.Request(
        f"{base_url.removesuffix('/v1')}/inference/v1/generate",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
        return dict(json.load(answer))


class Service:
    """An agent that runs somewhere, and is asked for episodes."""

    def __init__(self, plays: Callable[[dict[str, Any]], Any], faults: list[str] | None = None) -> None:
        self.plays, self.faults = plays, faults or []
        self.asked: list[dict[str, Any]] = []

    async def episodes(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked.append(asked)
        await asyncio.to_thread(self.plays, asked)
        match self.faults.pop(0) if self.faults else "":
            case "drops":
                assert request.transport is not None
                request.transport.abort()
            case "500":
                return web.Response(status=500, text="the agent is confused")
        return web.json_response({})

    def play(self, job: Job, **record: Any) -> Played:
        async def main() -> Played:
            app = web.Application()
            app.router.add_post("/v1/episodes", self.episodes)
            async with TestServer(app) as server:
                job.url = str(server.make_url(""))
                return await job._play({"messages": [said("user", "Add.")], **record})

        return asyncio.run(main())


def adds(asked: dict[str, Any]) -> None:
    """It has one tool, and says what it earned."""
    client = OpenAI(base_url=asked["base_url"], api_key=asked["api_key"])
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    add: Any = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": schema}}
    messages: list[Any] = list(asked["record"]["messages"])
    while True:
        found = client.chat.completions.create(model=asked["model"], messages=messages, tools=[add]).choices[0].message
        messages.append(found.model_dump(exclude_none=True))
        if not found.tool_calls:
            client.post("/reward", body={"reward": asked["record"]["worth"]}, cast_to=object)
            return
        for made in found.tool_calls:
            given = json.loads(made.function.arguments)  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": made.id, "content": str(given["a"] + given["b"])})


def test_a_service_plays_an_episode_and_once_more_when_its_connection_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it gets the answers that are stored."""
    monkeypatch.setattr(http_environment, "TRIES", 3)
    monkeypatch.setattr(http_environment, "BACKOFF_SECONDS", 0.01)
    job, service = Job(tmp_path, GAME), Service(adds, ["drops", "drops"])
    played = service.play(job, worth=0.25)
    assert (played.ending, played.turns, played.calls, played.reward) == (Ending.ANSWERED, 3, 2, 0.25)
    assert learnt(job, played) == ["".join(GAME)]
    assert [asked["episode"] for asked in service.asked] == ["run-1-0-0-0"] * 3
    with pytest.raises(Failed, match=r"/v1/episodes lost its connection \(ServerDisconnectedError\), 3 times$"):
        Service(lambda asked: None, ["drops"] * 3).play(Job(tmp_path, GAME))


def test_a_service_that_is_away_for_long_plays_the_episode_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies in the midst of an episode, and nobody can connect to it for more tries than are made otherwise."""
    monkeypatch.setattr(http_environment, "TRIES", 2)
    monkeypatch.setattr(http_environment, "BACKOFF_SECONDS", 0.01)
    job, port = Job(tmp_path, GAME), free_port()
    refused, first, job.url = 0, Service(adds, ["drops"]), f"http://127.0.0.1:{port}"
    again, asks = Service(adds), aiohttp.TCPConnector.connect

    async def served(service: Service) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/episodes", service.episodes)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        return runner

    async def main() -> Played:
        runners = [await served(first)]

        async def connect(self: Any, request: Any, *others: Any, **options: Any) -> Any:
            nonlocal refused
            try:
                return await asks(self, request, *others, **options)
            except aiohttp.ClientConnectorError:
                refused += 1
                if refused == 5:
                    runners.append(await served(again))
                raise

        async def die() -> None:
            if job.drawn and len(runners) == 1:
                await runners[0].cleanup()

        monkeypatch.setattr(aiohttp.TCPConnector, "connect", connect)
        job.during = die
        try:
            return await job._play({"messages": [said("user", "Add.")], "worth": 0.5})
        finally:
            for runner in runners:
                await runner.cleanup()

    played = asyncio.run(main())
    assert (played.ending, played.turns, played.reward) == (Ending.ANSWERED, 3, 0.5)
    assert learnt(job, played) == ["".join(GAME)]
    assert (refused, len(again.asked)) == (5, 1)


def test_a_first_prompt_that_is_too_long_is_refused_and_a_shorter_one_is_not(tmp_path: Path, capfd: Any) -> None:
    job = Job(tmp_path, [f"Yes.{END}"])
    job.room = 700
    played = job.play("""
import openai
for words in (500, 0):
    try:
        turn(messages=[{"role": "user", "content": "so " * words}])
    except openai.BadRequestError as error:
        tell(str(error))
""")
    assert (played.ending, played.turns) == (Ending.ANSWERED, 1)
    (refusal,) = told(capfd)
    assert "tokens, but spec.data.maxPromptTokens is 700; raise it, because the tools and all" in refusal
    with pytest.raises(Failed, match=r"the agent ended with exit code 1: .*spec\.data\.maxPromptTokens is 700"):
        job.play("turn(messages=[{'role': 'user', 'content': 'so ' * 500}])")


def test_what_a_service_fails_is_not_the_models(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"/v1/episodes answered 500: the agent is confused$"):
        Service(lambda asked: None, ["500"]).play(Job(tmp_path, GAME))
    job = Job(tmp_path, GAME)
    job.url = "http://no-such-host.invalid:1"
    with pytest.raises(ValueError, match=r"^spec\.sessions\.agent\.url: http://no-such-host.* cannot be reached"):
        job.play()


def test_a_service_asks_in_token_ids(tmp_path: Path) -> None:
    """The prompt goes on with the ids that were sampled. What is asked again is the same turn, and what begins
    otherwise is a branch."""
    turns = [f"One.{END}", f"Two.{END}", f"Three.{END}"]
    job, answers = Job(tmp_path, turns), list[dict[str, Any]]()

    def plays(asked: dict[str, Any]) -> None:
        ask = partial(generate, key=asked["api_key"], base_url=asked["base_url"])
        encode = job.tokenizer
        prompt = encode("Count.")["input_ids"]
        answers.extend([ask(prompt), ask(prompt)])
        prompt = [*prompt, *answers[0]["choices"][0]["token_ids"], *encode("Go on.")["input_ids"]]
        answers.extend([ask(prompt), ask(encode("Again.")["input_ids"])])
        for wrong in ([], ["a"], [-1], [True]):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                ask(wrong)  # type: ignore[arg-type]

    played = Service(plays).play(job)
    choices = [answer["choices"][0] for answer in answers]
    assert [job.tokenizer.decode(choice["token_ids"]) for choice in choices] == [turns[0], turns[0], turns[1], turns[2]]
    assert choices[0]["logprobs"]["content"][0]["token"] == f"token_id:{choices[0]['token_ids'][0]}"
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert sorted(learnt(job, played)) == sorted([turns[0] + turns[1], turns[2]])
    whole = next(branch for branch in played.branches if branch.learnt.sum() > len(choices[3]["token_ids"]))
    text = job.tokenizer.decode(whole.tokens)
    assert text == f"Count.{turns[0]}Go on.{turns[1]}", "no token is added"
    assert (job.drawn[0][0].most, job.drawn[0][0].before) == (100, 0)
    assert [note["setting"] for note in job.notes] == ["top_p"]
