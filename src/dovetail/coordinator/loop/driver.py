"""Runs the whole job, which is the stages of the manifest, one after another."""

from __future__ import annotations

from typing import Any

from dovetail.coordinator.loop.engines import Engines
from dovetail.manifest.types import Stage


async def run_job(engines: Engines) -> dict[str, Any]:
    """Run SFT, reward-model training, DPO and PPO, as the manifest says. A restarted job continues at the point that
    the store has recorded. Returns the content of summary.json."""
    stages = engines.spec.stages
    await engines.check_rewards()
    await engines.check_output()
    if Stage.SFT in stages:
        await engines.run_sft()
    if Stage.REWARD in stages:
        await engines.run_reward()
    if Stage.DPO in stages:
        await engines.run_dpo()
    if Stage.PPO in stages:
        await engines.begin_ppo()
        while not engines.over:
            experience = await engines.generate_experience()
            await engines.train(experience)
    return await engines.finish()
