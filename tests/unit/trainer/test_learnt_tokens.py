"""An episode of several turns: what the model sampled is trained, and nothing that it was told meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.data.text.tokenize import right_pad
from dovetail.coordinator.sessions.episode import Branch, joined
from dovetail.manifest.types import Stage
from dovetail.protocol.experience import Experience
from dovetail.protocol.wire import LEARNT, Arrays, pack, unpack
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job, load_command, ppo_batch

# The response: the first turn, what a tool said, and the second turn.
FIRST, TOLD, SECOND = 3, 4, 3
WIDTH = FIRST + TOLD + SECOND
COUNT = 4


def episodes(seed: int = 1, apart: bool = False) -> Arrays:
    """Episodes of one branch. Those that are `apart` have a branch for each turn, with a prompt of its own."""
    arrays = unpack(ppo_batch(seed, COUNT, response=WIDTH))
    random = np.random.default_rng(seed)
    rows = []
    for prompt, logprobs in zip(arrays["prompt_lengths"].tolist(), arrays["rollout_logprobs"], strict=True):
        learnt = np.array([False] * prompt + [True] * FIRST + [False] * TOLD + [True] * SECOND)
        said = np.where(learnt, np.concatenate([np.zeros(prompt, np.float32), logprobs]), np.float32(0))
        whole = Branch(random.integers(0, 60, prompt + WIDTH).astype(np.int32), learnt, said)
        cuts = [slice(None, prompt + FIRST), slice(prompt + FIRST, None)] if apart else [slice(None)]
        rows.append(joined([Branch(whole.tokens[cut], whole.learnt[cut], whole.logprobs[cut]) for cut in cuts]))
    tokens, _ = right_pad([np.concatenate([row.prompt, row.response]) for row in rows], 0)
    said, learnt = (np.stack([getattr(row, name) for row in rows]) for name in ("logprobs", "marks"))
    advantages = np.repeat(random.standard_normal((COUNT, 1)), WIDTH, 1).astype(np.float32)
    own = {"tokens": tokens, "response_lengths": np.full(COUNT, WIDTH, np.int32), "rollout_logprobs": said}
    return {**arrays, **own, "learnt": learnt, "advantages": advantages}


def turns(given: Arrays, apart: bool = False) -> Arrays:
    """The same as a sample for each turn. Its prompt is all that came before it in its branch."""
    found: dict[str, list[Any]] = {name: [] for name in given if name not in ("learnt", "groups")}
    for row in range(COUNT):
        for start, length in ((0, FIRST), (FIRST + TOLD, SECOND)):
            end = int(given["prompt_lengths"][row]) + start + length
            begin = end - length - TOLD if apart and start else 0
            prompt, tokens = end - length - begin, np.zeros_like(given["tokens"][row])
            tokens[: end - begin] = given["tokens"][row][begin:end]
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
@pytest.mark.parametrize("apart", [False, True], ids=["one branch", "a branch for each turn"])
@pytest.mark.parametrize("ppo", [{}, {"kl": {"in": "Loss"}, "entropyCoef": 0.1}, {"oldLogProbs": "Rollout"}])
def test_an_episode_trains_as_its_turns_do(ppo: dict[str, Any], apart: bool) -> None:
    given = episodes(apart=apart)
    whole, each = trained(given, **ppo), trained(turns(given, apart), **ppo)
    names = [name for name in COMPARED if name in whole]
    assert len(names) >= 3, sorted(whole)
    for name in names:
        assert whole[name] == pytest.approx(each[name], rel=2e-5), name
    assert whole["tokens"] == COUNT * (FIRST + SECOND)


@pytest.mark.slow
def test_a_branch_does_not_see_the_branch_before_it() -> None:
    """Other tokens there change nothing that it learns. In one branch they do."""
    found = []
    for apart in (True, False):
        given = episodes(apart=apart)
        given["learnt"][:, :FIRST] = 0
        other = {**given, "tokens": given["tokens"].copy()}
        for row, prompt in enumerate(given["prompt_lengths"].tolist()):
            other["tokens"][row, prompt : prompt + FIRST] += 1
        found.append([trained(arrays)["actor_grad_norm"] for arrays in (given, other)])
    (one, same), (joint, different) = found
    assert one == pytest.approx(same, rel=1e-6)
    assert joint != pytest.approx(different, rel=1e-3)


@pytest.mark.slow
def test_what_is_not_learnt_has_no_say() -> None:
    """Neither log-probabilities nor advantages there are read. The tokens there are, as context."""
    arrays = episodes()
    changed = {**arrays}
    for name in ("rollout_logprobs", "ref_logprobs", "advantages"):
        changed[name] = np.where(arrays["learnt"] == LEARNT, arrays[name], np.float32(-7))
    found, expected = trained(changed), trained(arrays)
    assert {**found, "seconds": 0} == {**expected, "seconds": 0}


def test_experience_counts_what_is_learnt() -> None:
    arrays = episodes(apart=True)
    made = Experience(1, [], [], dict(arrays))
    assert made.mask.tolist() == [[True] * FIRST + [False] * TOLD + [True] * SECOND] * COUNT
    assert not made.per_token([1.0] * COUNT)[:, FIRST : FIRST + TOLD].any()
    difference = arrays["rollout_logprobs"] - arrays["ref_logprobs"]
    np.testing.assert_allclose(made.kl, (difference * made.mask).sum(1), rtol=1e-5)
    assert made.rewards[:, -1] != pytest.approx(0.0), "the last token has the reward"
