"""Writes trainer-curves.json: losses of a few steps of each stage, of a tiny model on fixed batches, on one rank.

    python tests/golden/make_trainer_curves.py

Run it only when the arithmetic is meant to change, and say why in the commit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

FILE = Path(__file__).with_name("trainer-curves.json")
sys.path.insert(0, str(FILE.parents[1]))

STEPS = 4
# What is compared, by stage.
CURVES = {
    "sft": ["loss", "grad_norm"],
    "reward": ["loss", "accuracy", "grad_norm"],
    "dpo": ["loss", "accuracy", "margin", "rewards/chosen", "grad_norm"],
    "ppo": [
        "policy_loss",
        "value_loss",
        "approx_kl",
        "clipfrac",
        "entropy",
        "ratio",
        "kl",
        "explained_variance",
        "mismatch_kl",
        "ptx_loss",
        "actor_grad_norm",
        "critic_grad_norm",
    ],
}


def curve_job():  # type: ignore[no-untyped-def]
    """The job of the curves: every part of the PPO loss is on."""
    from helpers.trainer_ranks import job

    spec = job().spec.ppo.model_dump(by_alias=True)
    ppo = {**spec, "entropyCoef": 0.01, "ptxCoef": 0.5, "dualClip": 3.0, "ema": 0.9, "missingEosPenalty": 0.5}
    return job(ppo=ppo)


def curve_batch(stage: str, step: int) -> bytes:
    """Batch of a step."""
    from helpers.trainer_ranks import dpo_batch, ppo_batch, reward_batch, sft_batch

    if stage == "ppo":
        return ppo_batch(step, ptx=6)
    return {"sft": sft_batch, "reward": reward_batch, "dpo": dpo_batch}[stage](step)


def curves() -> dict[str, dict[str, list[float]]]:
    """Per stage and metric, its value at each step, and of the evaluations after the last one."""
    from dovetail.manifest.types import Stage
    from dovetail.protocol.messages import Evaluate
    from helpers.local_trainer import LocalTrainer
    from helpers.trainer_ranks import load_command

    found: dict[str, dict[str, list[float]]] = {}
    with LocalTrainer(curve_job()) as trainer:
        for stage, models in (
            (Stage.SFT, ["actor"]),
            (Stage.REWARD, ["reward"]),
            (Stage.DPO, ["actor"]),
            (Stage.PPO, ["actor", "critic"]),
        ):
            trainer.metrics(load_command(stage, id=f"load/{stage.value}"))
            curve = found[stage.value] = {name: [] for name in CURVES[stage.value]}
            for step in range(1, STEPS + 1):
                batch = curve_batch(stage.value, step)
                metrics = trainer.metrics(trainer.step(stage, step, batch, models, 4, kl_coef=0.05))
                for name, values in curve.items():
                    values.append(metrics[name])
            if stage is not Stage.PPO:
                keys = [f"{stage.value}/{step}" for step in (1, 2)]
                metrics = trainer.metrics(Evaluate(id=f"evaluate/{stage.value}", stage=stage, batches=keys))
                curve["evaluation"] = [metrics["loss"], metrics.get("accuracy", 0.0)]
    return found


if __name__ == "__main__":
    rounded = {s: {n: [round(x, 7) for x in v] for n, v in c.items()} for s, c in curves().items()}
    FILE.write_text(json.dumps(rounded, indent=1) + "\n")
    print(f"wrote {FILE}")
