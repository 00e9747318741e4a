"""The environments of verifiers 0.4 as a service that plays episodes: python verifiers_service.py PORT TASKSET

It runs in a Python of its own (pip install verifiers), and serves the contract of `spec.sessions.agent.url`
(docs/environments.md, "An agent that is a service"). A prompt's record has `task`, the number of a task in the taskset,
which is a module that Python finds, or one of those that come with verifiers: nemo_gym, openenv, textarena. The tasks
of its `harbor` want containers and an agent with a shell: name another runtime and harness in `seat`."""

import itertools
import os
import sys

import httpx
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, load_environment


def environment(taskset: str) -> vf.Env:
    """The taskset's own environment, or one agent that plays its tasks. The agent is a chat loop without a program."""
    kind = concrete_type(environment_class(taskset), vf.EnvConfig, origin=vf.Env) or vf.SingleAgentEnvConfig
    seats = [name for name, field in kind.model_fields.items() if field.annotation is vf.AgentConfig]
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return load_environment(kind(taskset={"id": taskset}, **dict.fromkeys(seats, seat)))


def app(env: vf.Env) -> web.Application:
    tasks = {task.data.idx: task for task in itertools.islice(env.taskset, 100_000)}

    async def episodes(request: web.Request) -> web.Response:
        asked = await request.json()
        # verifiers reads keys from variables only.
        variable = f"KEY_OF_{asked['episode']}"
        os.environ[variable] = asked["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
            found = await env.run_episode(tasks[asked["record"]["task"]], vf.ModelContext(asked["model"], client))
        finally:
            del os.environ[variable]
        errors = [*found.errors, *(error for trace in found.traces for error in trace.errors)]
        if errors:
            # What verifiers calls an error is no failure of the model. The episode is in no baseline then.
            return web.Response(status=500, text=f"{errors[0].type}: {errors[0].message}")
        reward = sum(trace.reward for trace in found.traces)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {asked['api_key']}"}) as job:
            answer = await job.post(f"{asked['base_url']}/reward", json={"reward": reward})
            answer.raise_for_status()
        return web.json_response({})

    async def serving(_: web.Application):
        async with env.serving():
            yield

    made = web.Application()
    made.cleanup_ctx.append(serving)
    made.router.add_post("/v1/episodes", episodes)
    return made


if __name__ == "__main__":
    web.run_app(app(environment(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), print=None)
