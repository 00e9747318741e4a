"""The coordinators of all jobs at once, for a cluster whose pods are played by kwok: `coordinator.py PORT`.

Answers GET /v1/status at every address of this machine, as a coordinator in the middle of PPO would."""

from __future__ import annotations

import sys

from aiohttp import web

STATUS = {
    "state": "running",
    "stage": "ppo",
    "iteration": 3,
    "total_iterations": 100,
    "weight_version": 3,
    "metrics": {"reward": 0.5, "kl": 0.1, "samples_per_second": 12.0, "iteration_seconds": 60.0},
    "checkpoint": {"stage": "ppo", "step": 3, "path": "/var/dovetail/checkpoints/ppo-3"},
}


async def status(_: web.Request) -> web.Response:
    return web.json_response(STATUS)


if __name__ == "__main__":
    app = web.Application()
    app.router.add_get("/v1/status", status)
    web.run_app(app, port=int(sys.argv[1]), access_log=None, print=None)
