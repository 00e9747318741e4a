"""A small environment of OpenEnv's, with tools over MCP: python openenv_boxes.py PORT

There is a thing in one of three boxes. Who opens the right one first earns 1."""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Boxes(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("boxes")
        self.box, self.opened = "", list[str]()

        @mcp.tool
        def open_box(box: str) -> str:
            """Open a box: red, green or blue."""
            if box == "glued":
                raise OSError("the lid is stuck")
            self.opened.append(box)
            return "the thing" if box == self.box else "nothing"

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None, box: str = "red", **_: Any) -> Observation:
        self.box, self.opened = box, []
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(done=False, reward=0.0, metadata={})

    def step(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        return self._rewarded(super().step(action, timeout_s=timeout_s, **options))

    async def step_async(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        return self._rewarded(await super().step_async(action, timeout_s=timeout_s, **options))

    def _rewarded(self, found: Observation) -> Observation:
        if isinstance(found, CallToolObservation) and found.error is None:
            found.reward, found.done = float(self.opened == [self.box]), self.box in self.opened
        return found

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError(f"there is no action {type(action).__name__}")

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Boxes, CallToolAction, CallToolObservation, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
