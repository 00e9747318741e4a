"""The methods that a manifest can name beside PPO and GRPO, against their papers' formulas written down plainly."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from dovetail.manifest.checks.rules import check
from dovetail.manifest.resolve import resolve
from dovetail.manifest.training_types import PPO, Overlong
from dovetail.manifest.types import Stage
from dovetail.protocol.experience import Experience
from dovetail.protocol.wire import pack, unpack
from dovetail.trainer.algorithms import policy
from dovetail.trainer.algorithms.advantages import (
    compute_advantages,
    equal_groups,
    overlong_penalty,
    process_advantages,
    reinforce,
    reinforce_baseline,
)
from dovetail.trainer.algorithms.losses import right_loss
from dovetail.trainer.steps.experience_batch import PPOSamples, counted_samples, targets
from helpers.jobs import tiny_job
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job, load_command, ppo_batch

LENGTHS = [3, 1, 5]
N = sum(LENGTHS)


def inputs(config: PPO, spread: float = 0.4) -> policy.LossInputs:
    generator = torch.Generator().manual_seed(4)
    old = -torch.rand(N, generator=generator, dtype=torch.float64) - 0.1
    per_sample = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    new = (old + spread * torch.randn(N, generator=generator, dtype=torch.float64)).requires_grad_()
    return policy.LossInputs(
        tokens=torch.arange(N),
        sequence_ids=ids,
        mask=torch.ones(N, dtype=torch.bool),
        logprobs=new,
        old_logprobs=old,
        rollout_logprobs=old,
        ref_logprobs=old,
        advantages=per_sample[ids],
        entropy=torch.zeros(N),
        config=config,
        kl_coef=0.0,
        samples=3,
    )


def samples_of(x: Tensor) -> list[Tensor]:
    return list(x.split(LENGTHS))


def sequence_mean(losses: Tensor) -> Tensor:
    """What `lossAggregation: Sequence` makes of token losses."""
    return torch.stack([part.mean() for part in samples_of(losses)]).mean()


def gradient(of: Tensor, at: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(of, at)
    return found


@pytest.mark.parametrize("spread", [0.02, 0.4])
def test_gspo_is_the_papers_objective_and_gradient(spread: float) -> None:
    """Eq. 5 for whole samples: (1/G) sum of min(s A, clip(s) A), s = exp(mean log ratio)."""
    config = PPO(loss="gspo", loss_aggregation="Sequence", clip_low=0.03, clip_high=0.04)
    given = inputs(config, spread)
    losses, metrics = policy.gspo(given)
    objective = torch.zeros((), dtype=torch.float64)
    clipped = []
    for new, old, a in zip(
        samples_of(given.logprobs), samples_of(given.old_logprobs), samples_of(given.advantages), strict=True
    ):
        s = ((new - old).sum() / len(new)).exp()
        bounded = s.clamp(1 - 0.03, 1 + 0.04)
        objective = objective + torch.minimum(s * a[0], bounded * a[0]) / 3
        clipped += [float(bounded * a[0] < s * a[0])] * len(new)
    assert float(sequence_mean(losses)) == pytest.approx(-float(objective), rel=1e-12)
    assert torch.allclose(gradient(sequence_mean(losses), given.logprobs), -gradient(objective, given.logprobs))
    assert metrics["clipfrac"].tolist() == clipped


def test_cispo_is_a_weighted_policy_gradient_that_cuts_no_token_off() -> None:
    given = inputs(PPO(loss="cispo", clip_high=0.2), spread=0.5)
    losses, metrics = policy.cispo(given)
    found = gradient(losses.sum(), given.logprobs).tolist()
    ratios = (given.logprobs - given.old_logprobs).exp().tolist()
    assert found == pytest.approx([-min(r, 1.2) * a for r, a in zip(ratios, given.advantages.tolist(), strict=True)])
    assert metrics["clipfrac"].tolist() == [float(r > 1.2) for r in ratios]
    assert all(found), "every token has a gradient"
    bounded = inputs(PPO(loss="cispo", clip_high=0.2, clip_low=0.1), spread=0.5)
    least = gradient(policy.cispo(bounded)[0].sum(), bounded.logprobs).abs() / bounded.advantages.abs()
    assert float(least.min()) == pytest.approx(0.9)


def test_clip_higher_moves_the_upper_bound_alone() -> None:
    given = inputs(PPO(clip_low=0.1, clip_high=0.5), spread=0.6)
    losses, _ = policy.ppo(given)
    for loss, r, a in zip(
        losses.tolist(),
        (given.logprobs - given.old_logprobs).exp().tolist(),
        given.advantages.tolist(),
        strict=True,
    ):
        assert loss == pytest.approx(-min(r * a, min(max(r, 0.9), 1.5) * a))
    assert PPO().clip_range == (0.2, 0.2)
    assert PPO(clip=0.3, clip_high=0.4).clip_range == (0.3, 0.4)
    assert PPO(loss="cispo").clip_range == (1.0, 0.2)


# ---------------------------------------------------------------- advantages


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def test_reinforce_plus_plus_sums_what_follows_and_normalises_over_the_batch() -> None:
    rewards = torch.tensor([[-0.1, -0.2, 1.0], [0.3, 0.5, 9.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    gamma, sums = 0.9, []
    for row, length in zip(rewards.tolist(), (3, 2), strict=True):
        sums.append([sum(gamma ** (k - t) * row[k] for k in range(t, length)) for t in range(length)])
    found = reinforce(rewards, mask, gamma)
    assert found[mask].tolist() == pytest.approx([x for row in whitened(sums) for x in row], abs=1e-5)
    assert float(found[1, 2]) == 0.0


def test_the_baseline_is_the_prompts_and_the_deviation_the_batches() -> None:
    scores, groups = torch.tensor([1.0, 3.0, 10.0, 10.0]), torch.tensor([0, 0, 1, 1])
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    wanted = whitened([[-1.0, -1.0], [1.0], [0.0, 0.0], [0.0, 0.0]])
    found = reinforce_baseline(scores, groups, mask)
    assert found[mask].tolist() == pytest.approx([x for row in wanted for x in row], abs=1e-5)


def test_overlong_responses_lose_linearly() -> None:
    lengths = torch.tensor([0, 10, 12, 15, 20, 25])
    config = Overlong(from_tokens=10, to_tokens=20, penalty=2.0)
    assert overlong_penalty(lengths, config).tolist() == pytest.approx([0.0, 0.0, 0.4, 1.0, 2.0, 2.0])
    with pytest.raises(ValueError, match=r"overlong\.toTokens is missing"):
        overlong_penalty(lengths, Overlong(from_tokens=10))
    spec = resolve(tiny_job(ppo={"overlong": {"fromTokens": 8}}).spec)
    assert spec.ppo.overlong is not None
    assert spec.ppo.overlong.to_tokens == spec.generation.max_tokens


def test_what_an_advantage_function_sees_is_what_the_estimators_use() -> None:
    config = PPO(overlong={"from_tokens": 2, "to_tokens": 6}, reward_clip=0.5, missing_eos_penalty=0.25)
    arrays = unpack(ppo_batch(3))
    goals = targets(PPOSamples.read(arrays, config), config, 0.1, None)
    seen = Experience(1, [], [], arrays, config=config, kl_coef=0.1)
    assert goals.metrics["reward_with_kl"] == pytest.approx(float(seen.rewards.sum(axis=1).mean()), abs=1e-6)
    plain = Experience(1, [], [], arrays, config=config.model_copy(update={"overlong": None}), kl_coef=0.1)
    assert plain.rewards.sum() - seen.rewards.sum() > 0.5


def plain_gae(rewards: list[float], values: list[float], lam: float) -> list[float]:
    """The recursion, with gamma 1."""
    advantages, after, value = [], 0.0, 0.0
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        after = r + value - v + lam * after
        advantages.append(after)
        value = v
    return advantages[::-1]


def test_vapo_has_a_lambda_for_the_critic_and_one_for_each_length() -> None:
    """Yue et al. 2025: lambda is 1 - 1 / (alpha l) for the policy, and 1 for the critic, whose returns are then the
    sums of rewards."""
    config = PPO(lam_value=1.0, lam_alpha=0.5, whiten_advantages=False)
    lengths = [1, 2, 3, 6, 6]
    mask = torch.arange(6) < torch.tensor(lengths).unsqueeze(1)
    made = torch.Generator().manual_seed(1)
    scores, values = torch.randn(5, generator=made), torch.where(mask, torch.randn(5, 6, generator=made), 0.0)
    nothing = torch.zeros(5, 6)
    found = compute_advantages(
        config,
        scores=scores,
        logprobs=nothing,
        ref_logprobs=nothing,
        mask=mask,
        groups=torch.arange(5),
        finished=torch.ones(5, dtype=torch.bool),
        kl_coef=0.1,
        values=values,
    )
    assert found.returns is not None
    for row, length in enumerate(lengths):
        rewards = [0.0] * (length - 1) + [float(scores[row])]
        lam = max(0.0, 1 - 1 / (0.5 * length))
        wanted = plain_gae(rewards, values[row, :length].tolist(), lam)
        assert found.advantages[row].tolist() == pytest.approx(wanted + [0.0] * (6 - length), abs=1e-5)
        assert found.returns[row].tolist() == pytest.approx(
            [float(scores[row])] * length + [0.0] * (6 - length), abs=1e-5
        )


def test_rewards_of_steps_are_those_of_process_supervision() -> None:
    """Shao et al. 2024, section 4.1.3: r' = (r - mean(R)) / std(R), R all steps of the group; a token's advantage is
    the sum of r' of the steps that end at it or later."""
    steps = {0: {1: 0.5, 3: -1.0}, 1: {0: 2.0}, 2: {2: 1.0}, 3: {0: 1.0, 1: 1.0, 2: 4.0}}
    groups, lengths, width = [7, 7, 2, 2], [4, 3, 3, 4], 4
    rewards, ends = torch.zeros(4, width), torch.zeros(4, width, dtype=torch.bool)
    for row, marks in steps.items():
        for at, reward in marks.items():
            rewards[row, at], ends[row, at] = reward, True
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    for normalize in (True, False):
        found = process_advantages(rewards, ends, torch.tensor(groups), mask, normalize)
        for row in range(4):
            every = [r for other, marks in steps.items() if groups[other] == groups[row] for r in marks.values()]
            mean = sum(every) / len(every)
            std = math.sqrt(sum((r - mean) ** 2 for r in every) / (len(every) - 1)) + 1e-6 if normalize else 1.0
            wanted = [sum((r - mean) / std for at, r in steps[row].items() if at >= t) for t in range(lengths[row])]
            assert found[row].tolist() == pytest.approx(wanted + [0.0] * (width - lengths[row]), abs=1e-5)


def test_rewards_of_steps_reach_every_estimator() -> None:
    """With gae and reinforce++ they are rewards of their tokens; group baselines add them to what the scores give."""
    arrays = unpack(ppo_batch(3))
    width = arrays["rollout_logprobs"].shape[1]
    first = np.arange(width)[None, :] == 0
    arrays["step_rewards"] = np.where(first, np.arange(16, dtype=np.float32)[:, None], np.float32(0))
    arrays["step_ends"] = np.broadcast_to(first, (16, width)).astype(np.uint8)
    for ppo in ({"whiten_advantages": False, "lam": 1.0}, {"advantage": "grpo", "samples_per_prompt": 2}):
        config = PPO(**ppo)
        batch = PPOSamples.read(arrays, config)
        goals = targets(batch, config, 0.1, None)
        assert (goals.metrics["steps"], goals.metrics["step_reward"]) == (1.0, 7.5)
        plain = targets(
            PPOSamples.read({k: v for k, v in arrays.items() if "step" not in k}, config), config, 0.1, None
        )
        more = goals.advantages - plain.advantages
        if config.advantage == "gae":
            assert torch.allclose(more, torch.from_numpy(arrays["step_rewards"]) * batch.mask, atol=1e-5)
            seen = Experience(1, [], [], arrays, config=config, kl_coef=0.1)
            assert goals.metrics["reward_with_kl"] == pytest.approx(float(seen.rewards.sum(axis=1).mean()), abs=1e-4)
        else:
            assert more[:, 0].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)] * 8, abs=1e-4)
            assert float(more[:, 1:].abs().max()) == pytest.approx(0.0, abs=1e-6)


# ---------------------------------------------------------------- which samples count


def test_truncated_responses_and_equal_groups_are_left_out() -> None:
    arrays = unpack(ppo_batch(3))
    arrays["scores"] = np.array([1, 1, 0, 1] * 4, np.float32)
    config = PPO(advantage="grpo", samples_per_prompt=2)
    batch = PPOSamples.read(arrays, config)
    assert counted_samples(batch, config) is None
    assert equal_groups(batch.scores, batch.groups).tolist() == [True, True, False, False] * 4
    both = config.model_copy(update={"mask_truncated": True, "drop_equal_groups": True})
    found = counted_samples(batch, both)
    assert found is not None
    expected = [bool(f) and not e for f, e in zip(arrays["finished"], [True, True, False, False] * 4, strict=True)]
    assert found.tolist() == expected


def test_a_group_whose_steps_differ_is_not_equal() -> None:
    arrays = unpack(ppo_batch(3))
    width = arrays["rollout_logprobs"].shape[1]
    arrays["scores"] = np.array([1, 1, 0, 1] * 4, np.float32)
    arrays["step_rewards"], arrays["step_ends"] = np.zeros((16, width), np.float32), np.zeros((16, width), np.uint8)
    # With their steps both samples of the second group sum up to 1; those of the others have the same steps, or none.
    arrays["step_ends"][[0, 1, 2, 4, 5], 0] = 1
    arrays["step_rewards"][[0, 1, 2, 5], 0] = 1.0
    config = PPO(advantage="grpo", samples_per_prompt=2, drop_equal_groups=True)
    found = counted_samples(PPOSamples.read(arrays, config), config)
    assert found is not None
    assert found.tolist() == [False, False, True, True, True, True, True, True] + [False, False, True, True] * 2


def trained(data: bytes, micro: int, **ppo: Any) -> dict[str, float]:
    """The metrics of an iteration of one mini-batch of an actor alone."""
    fields = {"globalBatchSize": 16, "miniBatchSize": 16, "microBatchSize": micro, "samplesPerPrompt": 2}
    fields |= {"advantage": "grpo", **ppo}
    with LocalTrainer(job(ppo=fields, generation={"maxTokens": 10})) as trainer:
        load = load_command(Stage.PPO)
        trainer.metrics(load.model_copy(update={"models": {"actor": load.models["actor"]}}))
        return trainer.metrics(trainer.step(Stage.PPO, 1, data, ["actor"], 16 // micro, kl_coef=0.3))


def test_the_loss_on_right_responses_is_vapos() -> None:
    """Yue et al. 2025, section 4.3: L_NLL = -1 / sum |o_i| * sum of log pi over the tokens of right responses, and
    L = L_PPO + mu L_NLL. The paper's sums are written down with loops, and differentiated by finite differences."""
    made = torch.Generator().manual_seed(2)
    logprobs = (-torch.rand(4, 5, generator=made, dtype=torch.float64)).requires_grad_()
    lengths, right = [3, 5, 1, 4], [True, False, True, False]
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]) & torch.tensor(right)[:, None]
    loss, stats = right_loss(logprobs, mask, normaliser=int(mask.sum()), coef=0.1)
    rows = [i for i in range(4) if right[i]]

    def paper(table: list[list[float]]) -> float:
        return -sum(table[i][t] for i in rows for t in range(lengths[i])) / sum(lengths[i] for i in rows)

    table = logprobs.detach().tolist()
    assert float(loss) == pytest.approx(0.1 * paper(table), rel=1e-12)
    assert float(stats["right_loss"] / stats["right_tokens"]) == pytest.approx(paper(table), rel=1e-6)
    loss.backward()
    assert logprobs.grad is not None
    for i, t in ((0, 0), (0, 2), (1, 1), (2, 0), (2, 1), (3, 3)):
        moved = [list(row) for row in table]
        moved[i][t] += 1e-3
        assert float(logprobs.grad[i, t]) == pytest.approx(0.1 * (paper(moved) - paper(table)) / 1e-3, abs=1e-9)


@pytest.mark.slow
def test_right_responses_are_learnt_in_a_step_however_it_is_cut() -> None:
    """With no advantages and no KL the step's gradient is that of the loss on right responses alone, and it is
    proportional to its weight. The loss is the mean of what the trainer itself says of these tokens."""
    arrays = unpack(ppo_batch(5))
    arrays["advantages"] = np.zeros_like(arrays["rollout_logprobs"])
    arrays["scores"] = np.array([1.0, 0.0, 0.5, 2.0] * 4, np.float32)
    off = {"kl": {"in": "Reward"}}  # which is in the advantages
    data = pack(arrays)
    few, many = (trained(data, micro, rightCoef=0.1, **off) for micro in (16, 4))
    assert few["right_fraction"] == 0.5
    for name in ("right_loss", "actor_grad_norm"):
        assert many[name] == pytest.approx(few[name], rel=1e-4), name
    assert trained(data, 16, rightCoef=0.3, **off)["actor_grad_norm"] == pytest.approx(3 * few["actor_grad_norm"], 1e-4)
    assert trained(data, 16, **off)["actor_grad_norm"] == pytest.approx(0.0, abs=1e-7)
    assert "right_loss" not in trained(data, 16, **off)
    # The mean over other responses is another one; where nothing is right, nothing is learnt.
    other = trained(data, 16, rightCoef=0.1, rightScore=2.0, **off)
    assert (other["right_fraction"], other["right_loss"] != few["right_loss"]) == (0.25, True)
    none = trained(data, 16, rightCoef=0.1, rightScore=3.0, **off)
    assert (none["right_fraction"], none["right_loss"]) == (0.0, 0.0)
    assert none["actor_grad_norm"] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["Token", "Sequence"])
def test_what_does_not_count_might_as_well_say_anything(aggregation: str) -> None:
    """Neither its advantages nor its number change the loss of the others."""
    options = {"maskTruncated": True, "lossAggregation": aggregation, "entropyCoef": 0.01, "normalizeStd": False}
    arrays = unpack(ppo_batch(5))
    arrays["finished"] = np.array([1, 0] * 8, np.uint8)
    ones = np.ones_like(arrays["rollout_logprobs"])
    one, other = (pack(arrays | {"advantages": x}) for x in (ones, np.where(arrays["finished"][:, None], ones, 50.0)))
    first, second, uneven = trained(one, 16, **options), trained(other, 16, **options), trained(other, 4, **options)
    assert first["counted_fraction"] == 0.5
    for name in ("policy_loss", "kl_loss", "entropy", "actor_grad_norm"):
        assert second[name] == pytest.approx(first[name], rel=1e-5), name
        assert uneven[name] == pytest.approx(first[name], rel=1e-4), name
    assert trained(one, 16, **options | {"maskTruncated": False})["entropy"] != first["entropy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ppo",
    [
        {"loss": "gspo", "lossAggregation": "Sequence", "clipLow": 3e-4, "clipHigh": 4e-4},
        {"loss": "cispo", "clipHigh": 0.3},
        {"advantage": "reinforce++", "samplesPerPrompt": 1},
        {"advantage": "reinforce++-baseline", "dropEqualGroups": True},
    ],
)
def test_every_method_trains_alike_however_the_batch_is_cut(ppo: dict[str, Any]) -> None:
    few, many = (trained(ppo_batch(2), micro, **ppo) for micro in (16, 4))
    for name in ("policy_loss", "actor_grad_norm"):
        assert many[name] == pytest.approx(few[name], rel=1e-4, abs=1e-6), name
    assert few["actor_grad_norm"] > 0


def test_the_methods_of_the_docs_are_manifests() -> None:
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = page.split("## Methods by their names")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| `(\{.*\})` \|", table, re.M)
    assert len(rows) >= 9
    models = {
        "reference": {"source": {"path": "a-larger-model"}},
        "reward": {"function": "dovetail.coordinator.rewards.nothing:zero"},
    }
    for name, ppo in rows:
        distils = yaml.safe_load(ppo).get("advantage") == "distillation"
        spec = tiny_job(ppo=yaml.safe_load(ppo), generation={"maxTokens": 512}, models=models if distils else {}).spec
        assert [sentence for sentence in check(spec) if "spec.ppo" in sentence] == [], name


@pytest.mark.parametrize(
    ("ppo", "words"),
    [
        ({"loss": "gspo"}, "set it to Sequence"),
        ({"loss": "cispo", "dualClip": 3.0}, "dualClip has no effect with loss cispo"),
        ({"clipLow": 1.5}, "clipLow is above 1"),
        ({"dropEqualGroups": True}, "do not compare the samples of one prompt"),
        ({"overlong": {"fromTokens": 48}}, "fromTokens is not below its toTokens"),
        ({"advantage": "reinforce++", "lamValue": 1.0}, "lamAlpha belong to generalised advantage estimation"),
        ({"advantage": "reinforce++-baseline"}, "reinforce++-baseline compares samples of the same prompt"),
    ],
)
def test_what_does_nothing_is_refused(ppo: dict[str, Any], words: str) -> None:
    (sentence,) = check(tiny_job(ppo=ppo).spec)
    assert words in sentence
