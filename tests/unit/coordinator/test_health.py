"""Verdicts on iterations: each case, none for a healthy run, and what a run does with them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.job import Job
from dovetail.coordinator.loop.engines import CoordinatorSettings, Engines
from dovetail.coordinator.loop.iteration_report import distinct_responses, equal_groups, iteration_metrics, mean_kl
from dovetail.coordinator.loop.ppo_stage import PPOStage
from dovetail.coordinator.reporting.health import REASONS, Rules, UnhealthyError, judge
from dovetail.coordinator.store.samples import Assignment, Delta, NewSample, ScoreRow
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.experience import Experience
from dovetail.protocol.messages import CommandResult
from helpers.jobs import tiny_job

# The quickstart with seed 0: KL per sample, mean length, entropy per token.
QUICKSTART = [
    (0.0, 24.2, 0.678),
    (0.16, 22.5, 0.644),
    (1.09, 21.8, 0.593),
    (1.43, 21.8, 0.543),
    (2.36, 21.3, 0.527),
    (3.36, 20.9, 0.531),
    (5.08, 18.6, 0.516),
    (6.62, 19.0, 0.510),
    (6.99, 17.8, 0.496),
    (7.10, 17.1, 0.450),
    (5.14, 17.0, 0.405),
    (5.91, 17.5, 0.406),
]
RULES = Rules(max_tokens=96)
GROUPED = Rules(max_tokens=96, grouped=True)


def row(kl: float = 1.0, length: float = 20.0, entropy: float = 0.5, **changes: float) -> dict[str, float]:
    healthy = {
        "kl": kl,
        "response_length": length,
        "entropy": entropy,
        "mismatch_abs": 1e-6,
        "finished_fraction": 1.0,
        "samples": 128.0,
        "distinct_responses": 80.0,
        "reward_min": -1.0,
        "reward_max": 2.0,
        "equal_reward_groups": 0.1,
    }
    return healthy | changes


FIRST = row(0.0, 24.0, 0.68)


def test_the_quickstart_is_healthy() -> None:
    rows = [row(*values) for values in QUICKSTART]
    for previous, now in zip([{}, *rows], rows, strict=False):
        assert judge(now, rows[0], previous, RULES) == []


@pytest.mark.parametrize(
    ("now", "rules", "reason", "told"),
    [
        (row(mismatch_abs=8.1), RULES, "LogProbMismatch", "by 8.1 nats per token before the first update"),
        (row(mismatch_abs=math.nan), RULES, "LogProbMismatch", "nan"),
        (row(policy_loss=math.nan, value_loss=math.inf), RULES, "NotFinite", "policy_loss, value_loss;"),
        (row(kl=30.0), RULES, "KLRunaway", "30 nats per sample, 1.5 per token"),
        (row(kl=-30.0), RULES, "KLRunaway", "-30 nats per sample"),
        (row(kl=8.0), RULES, "KLRunaway", "0.4 per token, over 3 times the 0.05"),
        (row(entropy=0.05), RULES, "EntropyCollapsed", "0.05 nats per token, 0.68 in the first"),
        (row(entropy=1.9), RULES, "EntropyExploded", "1.9 nats per token, 0.68 in the first"),
        (row(finished_fraction=0.0), RULES, "ResponsesTruncated", "no response ended before generation.maxTokens (96)"),
        (row(finished_fraction=0.03), RULES, "ResponsesTruncated", "only 3.0% of the responses"),
        (row(distinct_responses=1.0), RULES, "ResponsesEqual", "all 128 responses are the same"),
        (row(reward_min=0.0, reward_max=0.0), RULES, "RewardsEqual", "all rewards are 0,"),
        (row(reward_clipped=0.9), RULES, "RewardsClipped", "90% of the rewards lie beyond ppo.rewardClip"),
        (row(effective_sample_size=0.2, staleness=2.0), RULES, "SamplesTooOld", "2 iterations older than the policy"),
        (row(equal_reward_groups=1.0), GROUPED, "GroupRewardsEqual", "in 100% of the prompts"),
    ],
)
def test_each_verdict_says_the_figure_and_what_to_look_at(
    now: dict[str, float], rules: Rules, reason: str, told: str
) -> None:
    assert judge(row(), FIRST, row(kl=1.0), rules) == []
    verdict = judge(now, FIRST, row(kl=1.0), rules)[0]
    assert verdict.reason == reason
    assert told in verdict.message
    assert verdict.stops == (reason == "LogProbMismatch")
    assert REASONS.index(reason) >= 0


def test_what_does_not_fit_the_job_is_not_judged() -> None:
    assert judge(row(equal_reward_groups=1.0), FIRST, {}, RULES) == []
    assert judge(row(reward_min=1.0, reward_max=1.0), FIRST, {}, GROUPED) == []
    assert judge(row(reward_min=0.0, reward_max=0.0, steps=3.5), FIRST, row(kl=1.0), RULES) == []
    learns_from_a_teacher = row(kl=60.0, reward_min=0.0, reward_max=0.0)
    assert judge(learns_from_a_teacher, FIRST, row(kl=1.0), Rules(distils=True)) == []
    (verdict,) = judge(row(mismatch_abs=0.4), FIRST, {}, Rules(exact=False))
    assert not verdict.stops, "the adapters' dropout makes a difference, too"
    assert judge({}, {}, {}, GROUPED) == []
    assert judge(row(samples=1.0, distinct_responses=1.0, reward_min=1.0, reward_max=1.0), FIRST, {}, RULES) == []


def test_rules_follow_the_job() -> None:
    assert Rules.of(tiny_job().spec) == Rules(exact=True, grouped=False, max_tokens=48)
    assert Rules.of(tiny_job(ppo={"advantage": "rloo", "samplesPerPrompt": 2}).spec).grouped
    assert Rules.of(tiny_job(ppo={"advantage": "distillation"}).spec).distils


def arrays(scores: list[float], responses: list[list[int]], groups: list[int]) -> dict[str, Any]:
    count, longest = len(scores), max(map(len, responses))
    tokens = np.full((count, 2 + longest), 9, np.int32)
    for target, response in zip(tokens, responses, strict=True):
        target[2 : 2 + len(response)] = response
    return {
        "tokens": tokens,
        "prompt_lengths": np.full(count, 2, np.int32),
        "response_lengths": np.array([len(r) for r in responses], np.int32),
        "rollout_logprobs": np.zeros((count, longest), np.float32),
        "ref_logprobs": np.zeros((count, longest), np.float32),
        "scores": np.array(scores, np.float32),
        "groups": np.array(groups, np.int32),
        "finished": np.ones(count, np.uint8),
    }


def test_with_a_lag_the_trainers_kl_counts() -> None:
    found = arrays([1.0, 2.0], [[1, 2], [3]], [0, 1])
    found["ref_logprobs"] = found["rollout_logprobs"] - 1.0
    trained = {"kl": 0.25, "kl_ci95": 0.1}
    assert mean_kl(found, trained)["mean"] == 1.5
    # With a lag, rollouts report those of an older policy.
    assert mean_kl(found, trained, lag=1) == {"mean": 0.25, "ci95": 0.1}
    assert mean_kl(found, {}, lag=1)["mean"] == 1.5, "a result that was lost"
    assert iteration_metrics(found, trained, lag=1)["kl_ci95"] == 0.1


def test_equal_samples_are_counted_by_their_tokens_alone() -> None:
    found = arrays([1.0, 1.0, 0.0, 1.0, 5.0], [[1, 2], [1, 2], [1], [1, 2, 9], [3]], [0, 0, 1, 1, 2])
    assert distinct_responses(found) == 4
    assert equal_groups(found) == 0.5, "a prompt of one sample is no group"
    found["step_rewards"], found["step_ends"] = np.zeros((5, 3), np.float32), np.zeros((5, 3), np.uint8)
    found["step_ends"][:2, 1] = 1
    assert equal_groups(found) == 0.5, "steps with the same reward"
    found["step_rewards"][0, 1] = 1.0
    assert equal_groups(found) == 0.0


class Run:
    """The PPO stage on a real store and history; trainers return what `metrics` says."""

    def __init__(self, folder: Path, ppo: dict[str, Any] | None = None, **policy: Any) -> None:
        spec = tiny_job(failurePolicy=policy, ppo=ppo or {}).spec
        self.folder, self.lacks = folder, tuple[str, ...]()
        self.logged: list[tuple[str, dict[str, Any]]] = []
        self.engines = Engines(
            spec,
            make_plan(spec),
            CoordinatorSettings(folder, "secret", "127.0.0.1", 1, folder),
            lambda event, **told: self.logged.append((event, told)),
        )
        self.published: list[int] = []
        self.metrics: dict[str, float] = {}
        engines, records = self.engines, self.engines.records
        engines.session.run_step = self._run_step  # type: ignore[method-assign]
        engines.session.save = self._save  # type: ignore[method-assign]
        maker = SimpleNamespace(
            facts={},
            rest=self._save,
            discard=records.store.samples.forget,
        )
        sources: Any = SimpleNamespace(policy=lambda: None, critic=lambda: None)
        self.stage = PPOStage(
            Job(spec, engines.plan, folder, engines.run_id, records, sources),
            None,  # type: ignore[arg-type]
            engines.session,
            SimpleNamespace(publish=self._publish),  # type: ignore[arg-type]
            maker,  # type: ignore[arg-type]
            SimpleNamespace(due=lambda version: False, wanted=lambda version: False),  # type: ignore[arg-type]
        )

    async def _publish(self, version: int) -> None:
        self.published.append(version)

    async def _save(self) -> None:
        pass

    async def _run_step(self) -> CommandResult:
        self.engines.session._step += 1
        return CommandResult(id="x", ok=True, metrics={"entropy": 0.5, "mismatch_abs": 0.0, **self.metrics})

    def iterate(self, *scores: float, **metrics: float) -> None:
        """One iteration with these rewards."""
        self.metrics = metrics
        number = self.engines.session.step + 1
        new = [NewSample(p, 0, np.zeros(2, np.int32), 1, {}) for p in range(len(scores))]
        samples = self.engines.records.store.samples
        samples.begin_iteration(number, new)
        keys = [s.key for s in samples.samples(number)]
        attempts = samples.assign([Assignment(key, "r", "i", 0, 0) for key in keys])
        samples.record([Delta(k, attempt, 0, [1], [0.0], "stop") for k, attempt in zip(keys, attempts, strict=True)])
        samples.score(ScoreRow(key, None, None, score) for key, score in zip(keys, scores, strict=True))
        made = arrays(list(scores), [[p] for p in range(len(scores))], list(range(len(scores))))
        made = {name: array for name, array in made.items() if name not in self.lacks}
        asyncio.run(self._train(Experience(number, [""] * len(scores), [""] * len(scores), made)))

    async def _train(self, experience: Experience) -> None:
        await self.stage.train(experience)
        await self.stage._saved()

    def close(self) -> None:
        self.engines.records.close()

    @property
    def health(self) -> dict[str, Any]:
        return dict(self.engines.records.progress.document({})["health"])

    def told(self) -> list[tuple[str, int, str]]:
        return [(e, t["iteration"], t["reason"]) for e, t in self.logged if e.startswith("health.")]


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Any:
    made: list[Run] = []

    def make(**policy: Any) -> Run:
        if made:
            made[-1].close()
        made.append(Run(tmp_path, **policy))
        asyncio.run(made[-1].stage.begin())
        return made[-1]

    yield make
    made[-1].close()


def test_a_warning_is_logged_when_it_begins_and_ends_and_stays_in_the_summary(start: Start) -> None:
    run = start()
    run.iterate(1.0, 2.0)
    assert run.health == {"iteration": 1, "verdicts": []}
    for _ in range(3):
        run.iterate(1.0, 1.0)
    assert [v["reason"] for v in run.health["verdicts"]] == ["RewardsEqual"]
    assert run.engines.registry.get_sample_value("dovetail_unhealthy", {"reason": "RewardsEqual"}) == 1
    run = start()  # a coordinator that came back
    assert [v["reason"] for v in run.health["verdicts"]] == ["RewardsEqual"]
    assert run.told() == []
    run.iterate(1.0, 1.0)
    run.iterate(1.0, 2.0)
    assert run.told() == [("health.recovered", 6, "RewardsEqual")]
    assert run.engines.registry.get_sample_value("dovetail_unhealthy", {"reason": "RewardsEqual"}) == 0
    assert run.engines.registry.get_sample_value("dovetail_unhealthy", {"reason": "EntropyCollapsed"}) == 0
    health = run.engines.records.results.write("succeeded")["health"]
    assert (health["iterations"], health["unhealthy"], health["verdicts"]) == (6, 4, [])
    assert {k: v for k, v in health["reasons"]["RewardsEqual"].items() if k != "message"} == {
        "first": 2,
        "last": 5,
        "count": 4,
    }
    assert run.published == [4, 5, 6]


def test_the_kl_coefficient_waits_until_the_actor_learns(start: Start) -> None:
    """While the critic is trained alone the KL is 0, which says nothing about the coefficient."""
    kl = {"coef": 0.1, "target": 1.0, "horizon": 2}
    ppo = {"iterations": 4, "criticWarmupIterations": 2, "kl": kl}
    run, coefficients = start(ppo=ppo), []
    for _ in range(3):
        run.iterate(1.0, 2.0)
        coefficients.append(run.engines.records.store.get("ppo/progress")["kl_coef"])
    assert coefficients == [0.1, 0.1, pytest.approx(0.08)]
    assert run.engines.records.store.get("ppo/3/facts")["train_actor"], "the first step of the actor"


def test_without_a_reference_no_distance_to_it_is_told(start: Start) -> None:
    run = start(ppo={"kl": {"coef": 0}})
    run.lacks = ("ref_logprobs",)
    run.iterate(1.0, 2.0)
    row = json.loads((run.folder / "history.jsonl").read_text().splitlines()[-1])
    assert row["stage"] == "ppo"
    assert not {"kl", "kl_ci95"} & row["metrics"].keys()
    assert run.health == {"iteration": 1, "verdicts": []}
    told = run.engines.records.results.write("succeeded")
    assert told["ppo"].keys() >= {"reward_first", "reward_last"}
    assert not {"kl_first", "kl_last"} & told["ppo"].keys()
    assert run.engines.records.store.get("ppo/progress")["kl_coef"] == 0.0


def test_trends_are_kept_over_restarts(start: Start) -> None:
    start().iterate(1.0, 2.0, entropy=2.0)
    run = start()
    run.iterate(1.0, 2.0, entropy=0.1)
    assert run.told() == [("health.unhealthy", 2, "EntropyCollapsed")]


def test_on_unhealthy_stop_ends_the_run_after_the_iteration(start: Start) -> None:
    run = start(onUnhealthy="Stop")
    run.iterate(1.0, 2.0)
    sentence = r"iteration 2 is unhealthy and failurePolicy.onUnhealthy is Stop \(RewardsEqual\): all rewards are 1,"
    with pytest.raises(UnhealthyError, match=sentence):
        run.iterate(1.0, 1.0)
    assert start(onUnhealthy="Stop").engines.iteration == 2


def test_a_mismatch_stops_every_run_and_its_iteration_does_not_count(start: Start, tmp_path: Path) -> None:
    run = start()
    run.iterate(1.0, 2.0)
    sentence = (
        r"iteration 2 is stopped and does not count \(LogProbMismatch\): rollouts and trainers disagree .* 8.1 nats"
    )
    with pytest.raises(UnhealthyError, match=sentence):
        run.iterate(1.0, 2.0, mismatch_abs=8.1)
    assert run.published == [0, 1], "nobody gets the weights"
    assert run.health["verdicts"][0]["reason"] == "LogProbMismatch"
    assert json.loads((tmp_path / "history.jsonl").read_text().splitlines()[-1])["metrics"]["mismatch_abs"] == 8.1
    run = start()
    assert run.engines.iteration == 1
    assert run.engines.records.store.samples.samples(2) == [], "the prompts are answered anew"
    run.iterate(1.0, 2.0)
    assert (run.engines.iteration, run.health) == (2, {"iteration": 2, "verdicts": []})
