"""Agents of public frameworks are trained as they are. Each is in a Python of its own, which is installed from a
registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.coordinator.sessions.play import Ending
from dovetail.coordinator.user_code.local_process import LocalProcesses
from helpers.agent_life import END, Job, added, learnt
from helpers.own_python import installed

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PACKAGES = (
    *("openai-agents>=0.24,<1", "pydantic-ai-slim[openai]>=2,<3", "langchain-openai>=1,<2", "langgraph>=1,<2"),
    *("smolagents>=1.26,<2", "litellm>=1.110,<2", "instructor>=1.17,<2", "autogen-agentchat>=0.7,<1"),
    "autogen-ext[openai]>=0.7,<1",
)
BEGIN = '''
import asyncio, json, os, sys

record = json.load(sys.stdin)
task = record["messages"][-1]["content"]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def tell(found):
    print("TOLD", found, file=sys.stderr, flush=True)

'''
# The Responses API, which it uses by itself.
OPENAI_AGENTS = """
from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
tell(Runner.run_sync(Agent(name="adder", instructions="Add.", tools=[function_tool(add)]), task).final_output)
"""
OPENAI_AGENTS_STREAMED = """
from agents import Agent, Runner, function_tool, set_tracing_disabled


async def main():
    found = Runner.run_streamed(Agent(name="adder", instructions="Add.", tools=[function_tool(add)]), task)
    async for event in found.stream_events():
        pass
    tell(found.final_output)


set_tracing_disabled(True)
asyncio.run(main())
"""
PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAI{kind}Model

tell(Agent(OpenAI{kind}Model("actor"), system_prompt="Add.", tools=[add]).run_sync(task).output)
"""
LANGGRAPH = """
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

model = ChatOpenAI(model="actor", temperature=0.7, streaming=True)
found = create_react_agent(model, [tool(add)], prompt="Add.").invoke({"messages": [("user", task)]})
tell(found["messages"][-1].content)
"""
SMOLAGENTS = """
from smolagents import {kind}, OpenAIServerModel, tool

server = {{"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}}
model = OpenAIServerModel(model_id="actor", **server)
tell({kind}(tools=[tool(add)], model=model, max_steps=3, verbosity_level=0).run(task))
"""
LITELLM = """
import litellm

schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": schema}}
messages, calls = list(record["messages"]), True
while calls:
    asked = {"model": "openai/actor", "messages": messages, "api_base": os.environ["OPENAI_BASE_URL"]}
    message = litellm.completion(tools=[tool], **asked).choices[0].message
    messages.append(message.model_dump())
    calls = message.tool_calls
    for call in calls or []:
        said = str(add(**json.loads(call.function.arguments)))
        messages.append({"role": "tool", "tool_call_id": call.id, "name": "add", "content": said})
tell(message.content)
"""
INSTRUCTOR = """
import instructor, openai
from pydantic import BaseModel


class Sum(BaseModel):
    a: int
    b: int


client = instructor.from_openai(openai.OpenAI())
found = client.chat.completions.create(model="actor", response_model=Sum, messages=record["messages"])
tell(f"It is {found.a + found.b}.")
"""
AUTOGEN = """
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

able = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown"}
able["structured_output"] = False
model = OpenAIChatCompletionClient(model="actor", base_url=os.environ["OPENAI_BASE_URL"], model_info=able)
agent = AssistantAgent("adder", model_client=model, tools=[add], reflect_on_tool_use=True)
tell(asyncio.run(agent.run(task=task)).messages[-1].content)
"""
CALL, SAID = added(1, 2), f"It is 3.{END}"
# By name: the agent, what the model says, and how many of the sequences that are trained it makes.
AGENTS: dict[str, tuple[str, list[str], int]] = {
    "openai-agents": (OPENAI_AGENTS, [CALL, SAID], 1),
    "openai-agents, streamed": (OPENAI_AGENTS_STREAMED, [CALL, SAID], 1),
    "pydantic-ai": (PYDANTIC_AI.format(kind="Chat"), [CALL, SAID], 1),
    "pydantic-ai, responses": (PYDANTIC_AI.format(kind="Responses"), [CALL, SAID], 1),
    "langgraph": (LANGGRAPH, [CALL, SAID], 1),
    # It writes earlier calls as texts, so each step is a sequence of its own.
    "smolagents": (
        SMOLAGENTS.format(kind="ToolCallingAgent"),
        [CALL, f'<tool_call>\n{{"name": "final_answer", "arguments": {{"answer": "It is 3."}}}}\n</tool_call>{END}'],
        2,
    ),
    # An answer ends with the code.
    "smolagents, code": (
        SMOLAGENTS.format(kind="CodeAgent"),
        ["Thought: I add.\n<code>\nfinal_answer(f'It is {add(1, 2)}.')\n</code>"],
        1,
    ),
    "litellm": (LITELLM, [CALL, SAID], 1),
    "instructor": (INSTRUCTOR, [CALL.replace('"add"', '"Sum"')], 1),
    # It asks for the answer without its tools.
    "autogen": (AUTOGEN, [CALL, SAID], 2),
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has all of them."""
    return installed(tmp_path_factory.mktemp("frameworks"), *PACKAGES)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_trained_as_it_is(
    name: str, python: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    agent, says, sequences = AGENTS[name]
    job = Job(tmp_path, says)
    (tmp_path / "agent.py").write_text(BEGIN + agent)
    job.command, job.place = [str(python), "agent.py"], LocalProcesses()
    played = job.play()
    assert "TOLD It is 3.\n" in capfd.readouterr().err
    assert (played.ending, len(job.drawn), len(played.branches)) == (Ending.ANSWERED, len(says), sequences)
    assert sorted(learnt(job, played)) == (["".join(says)] if sequences == 1 else sorted(says))
