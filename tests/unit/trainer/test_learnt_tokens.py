"""An episode of several turns: what the model sampled is trained, and nothing that it was told meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.sessions.episode import Branch, branch_arrays
from dovetail.manifest.types import Stage
from dovetail.protocol.experience import Experience
from dovetail.protocol.wire import Arrays, pack, unpack
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job, load_command, ppo_batch

# The response: the first turn, what a tool said, and the second turn.
FIRST, TOLD, SECOND = 3, 4, 3
WIDTH = FIRST + TOLD + SECOND
COUNT = 4


def episodes(seed: int = 1) -> Arrays:
    arrays = unpack(ppo_batch(seed, COUNT, response=WIDTH))
    random = np.random.default_rng(seed)
    branches = []
    for prompt, logprobs in zip(arrays["prompt_lengths"].tolist(), arrays["rollout_logprobs"], strict=True):
        learnt = np.array([False] * prompt + [True] * FIRST + [False] * TOLD + [True] * SECOND)
        said = np.where(learnt, np.concatenate([np.zeros(prompt, np.float32), logprobs]), np.float32(0))
        branches.append(Branch(random.integers(0, 60, prompt + WIDTH).astype(np.int32), learnt, said))
    advantages = np.repeat(random.standard_normal((COUNT, 1)), WIDTH, 1).astype(np.float32)
    return {**arrays, **branch_arrays(branches, 0), "advantages": advantages}


def turns(given: Arrays) -> Arrays:
    """The same as a sample for each turn, whose prompt is all that came before it."""
    found: dict[str, list[Any]] = {name: [] for name in given if name not in ("learnt", "groups")}
    for row in range(COUNT):
        for start, length in ((0, FIRST), (FIRST + TOLD, SECOND)):
            prompt = int(given["prompt_lengths"][row]) + start
            tokens = np.zeros_like(given["tokens"][row])
            tokens[: prompt + length] = given["tokens"][row][: prompt + length]
            own = {"tokens": tokens, "prompt_lengths": prompt, "response_lengths": length}
            for name, values in found.items():
                value = own.get(name, given[name][row])
                if name not in own and np.ndim(value):
                    value = value[start : start + length]
                values.append(value)
    groups = np.arange(2 * COUNT, dtype=np.int32) // 2
    return {name: np.asarray(values, given[name].dtype) for name, values in found.items()} | {"groups": groups}


def trained(arrays: Arrays, **ppo: Any) -> dict[str, float]:
    count = len(arrays["tokens"])
    sizes = {"globalBatchSize": count, "miniBatchSize": count, "microBatchSize": 2, "epochs": 1}
    ppo = {"advantage": "grpo", "samplesPerPrompt": 2, **sizes, **ppo}
    with LocalTrainer(job(ppo=ppo)) as trainer:
        load = load_command(Stage.PPO)
        trainer.metrics(load.model_copy(update={"models": {"actor": load.models["actor"]}}))
        step = trainer.step(Stage.PPO, 1, pack(arrays), ["actor"], count // 2, kl_coef=0.05)
        return trainer.metrics(step)


COMPARED = ("policy_loss", "actor_grad_norm", "entropy", "tokens", "kl_loss")


@pytest.mark.slow
@pytest.mark.parametrize("ppo", [{}, {"kl": {"in": "Loss"}, "entropyCoef": 0.1}, {"oldLogProbs": "Rollout"}])
def test_an_episode_trains_as_its_turns_do(ppo: dict[str, Any]) -> None:
    whole, apart = trained(episodes(), **ppo), trained(turns(episodes()), **ppo)
    names = [name for name in COMPARED if name in whole]
    assert len(names) >= 3, sorted(whole)
    for name in names:
        assert whole[name] == pytest.approx(apart[name], rel=2e-5), name
    assert whole["tokens"] == COUNT * (FIRST + SECOND)


@pytest.mark.slow
def test_what_is_not_learnt_has_no_say() -> None:
    """Neither log-probabilities nor advantages there are read. The tokens there are, as context."""
    arrays = episodes()
    changed = {**arrays}
    for name in ("rollout_logprobs", "ref_logprobs", "advantages"):
        changed[name] = np.where(arrays["learnt"], arrays[name], np.float32(-7))
    found, expected = trained(changed), trained(arrays)
    assert {**found, "seconds": 0} == {**expected, "seconds": 0}


def test_experience_counts_what_is_learnt() -> None:
    arrays = episodes()
    made = Experience(1, [], [], dict(arrays))
    assert made.mask.tolist() == arrays["learnt"].astype(bool).tolist()
    assert not made.per_token([1.0] * COUNT)[:, FIRST : FIRST + TOLD].any()
    difference = arrays["rollout_logprobs"] - arrays["ref_logprobs"]
    np.testing.assert_allclose(made.kl, (difference * arrays["learnt"]).sum(1), rtol=1e-5)
    assert made.rewards[:, -1] != pytest.approx(0.0), "the last token has the reward"
