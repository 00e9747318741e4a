"""A resources server of NeMo Gym 0.7, whose episodes a service plays: python nemo_gym_service.py PORT RESOURCES_URL

It needs httpx and aiohttp and no NeMo Gym, whose server at RESOURCES_URL has the tools and the rewards. It serves the
contract of `spec.sessions.agent.url` (docs/environments.md, "An agent that is a service"). A prompt's record has the
fields of a line of NeMo Gym's data, beside its `messages`. The loop is that of NeMo Gym's SimpleAgent."""

import json
import sys
from typing import Any

import httpx
from aiohttp import web


class Masked(Exception):
    """The reward says nothing about the model."""


async def played(asked: dict[str, Any], resources_url: str) -> float:
    """Play an episode, and return its reward. Raises Masked and httpx.HTTPError."""
    row = {name: value for name, value in asked["record"].items() if name != "messages"}
    params, outputs = row["responses_create_params"], list[dict[str, Any]]()
    given = params["input"]
    said = [{"role": "user", "content": given}] if isinstance(given, str) else given
    tools = {tool["name"] for tool in params.get("tools") or []}
    key = {"Authorization": f"Bearer {asked['api_key']}"}
    # The session is a cookie.
    async with (
        httpx.AsyncClient(base_url=resources_url, timeout=None) as resources,
        httpx.AsyncClient(base_url=asked["base_url"], timeout=None, headers=key) as job,
    ):
        (await resources.post("/seed_session", json=row)).raise_for_status()
        calls: list[dict[str, Any]] = [{}]
        while calls:
            body = {**params, "model": asked["model"], "input": [*said, *outputs]}
            answer = await job.post("/responses", json=body)
            if answer.status_code == 400 and outputs:
                break  # the episode gets no further turn
            response = answer.raise_for_status().json()
            outputs += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            for call in calls:
                told = await called(resources, call, tools)
                outputs.append({"type": "function_call_output", "call_id": call["call_id"], "output": told})
            if response["status"] == "incomplete":
                break
        verified = await resources.post("/verify", json={**row, "response": {**response, "output": outputs}})
        found = verified.raise_for_status().json()
        if found.get("mask_sample"):
            raise Masked(f"{found.get('failure_kind')}: {found.get('failure_reason')}")
        (await job.post("/reward", json={"reward": found["reward"]})).raise_for_status()
        return float(found["reward"])


async def called(resources: httpx.AsyncClient, call: dict[str, Any], names: set[str]) -> str:
    """What a tool answers. Raises httpx.HTTPError if the server failed."""
    if call["name"] not in names:
        return json.dumps({"error": f"there is no tool {call['name']}"})
    answer = await resources.post(f"/{call['name']}", json=json.loads(call["arguments"]))
    if answer.status_code >= 500:
        answer.raise_for_status()
    return answer.text


def app(resources_url: str) -> web.Application:
    async def episodes(request: web.Request) -> web.Response:
        try:
            return web.json_response({"reward": await played(await request.json(), resources_url)})
        except (Masked, httpx.HTTPError) as error:
            # No failure of the model: the episode is in no baseline then.
            return web.Response(status=500, text=f"{type(error).__name__}: {error}")

    made = web.Application()
    made.router.add_post("/v1/episodes", episodes)
    return made


if __name__ == "__main__":
    web.run_app(app(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), print=None)
