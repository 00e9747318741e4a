"""A training loop of one's own on Dovetail's Python API: python examples/custom_pipeline.py

SFT as in the quickstart, then PPO with a reward and an advantage estimator written here: no reward model is trained."""

from __future__ import annotations

import sys

import numpy as np

from dovetail.coordinator.data.synthetic import quality
from dovetail.local.pipeline import Pipeline
from dovetail.protocol.experience import Experience


def reward(prompts: list[str], responses: list[str], **fields: object) -> list[float]:
    """The built-in language's own measure of a good reply, less a little for every word."""
    return [quality(p, r) - 0.002 * len(r.split()) for p, r in zip(prompts, responses, strict=True)]


def advantages(experience: Experience) -> np.ndarray:
    """REINFORCE with the batch mean as baseline: the same advantage for every token of a response."""
    scores = experience.scores
    return experience.per_token((scores - scores.mean()) / (scores.std() + 1e-6))


def main(iterations: int) -> None:
    with Pipeline.from_manifest(
        "examples/quickstart.yaml",
        run_dir="runs/custom",
        reward_function=reward,
        advantage_function=advantages,
        overwrite=True,
    ) as pipeline:
        pipeline.run_sft()
        pipeline.begin_ppo()
        for _ in range(iterations):
            prompts = pipeline.prompts()
            experience = pipeline.generate_experience(prompts)
            metrics = pipeline.train(experience)
            print(f"iteration {pipeline.iteration}: reward {metrics['reward']:.3f}, KL {metrics['kl']:.3f}")
            print(f"  {prompts[0].strip()!r} -> {experience.responses[0].strip()!r}")
        pipeline.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
