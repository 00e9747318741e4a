"""Evaluations: what is answered and measured, when, what it decides, and that it is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.prepare import PromptRecord
from dovetail.coordinator.reporting.run_records import RunRecords
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT, evaluation_files, read_rows
from dovetail.coordinator.reporting.summary_rows import evaluation_rows
from dovetail.coordinator.rewards.calls import RewardError, evaluation_slot
from dovetail.coordinator.samples.best_weights import BestWeights
from dovetail.coordinator.samples.evaluation import Evaluator
from dovetail.coordinator.samples.evaluation_metrics import EvaluationMetrics, HeldOutAnswer, is_match
from dovetail.coordinator.store.identity import delete_folder
from dovetail.coordinator.store.samples import NewSample, State
from dovetail.coordinator.store.store import Store
from dovetail.manifest.types import RLHFJob, RLHFJobSpec
from helpers.finished_runs import history_of
from helpers.manifests import changed

ASK = "\n\nHuman: Tell me two things about the cat.\n\nAssistant:"
GOOD = " Of course! The cat is small. It has fur. I hope this helps."


class Policy:
    """Its rewards by version; its answers are bad before PPO, and good afterwards."""

    def __init__(self, *rewards: float) -> None:
        self.rewards = rewards or (0.0, 1.0)
        self.calls: list[tuple[int, list[list[int]], float | None]] = []

    async def __call__(
        self,
        version: int,
        records: Sequence[PromptRecord],
        seeds: Sequence[Sequence[int]],
        temperature: float | None,
        rewarded: bool,
    ) -> list[HeldOutAnswer]:
        self.calls.append((version, [list(of_prompt) for of_prompt in seeds], temperature))
        text = " The cat can run." if version == 0 else GOOD
        reward = self.rewards[min(version, len(self.rewards) - 1)]
        return [
            HeldOutAnswer(record, number, text, 8, "stop", reward)
            for record, of_prompt in zip(records, seeds, strict=True)
            for number in range(len(of_prompt))
        ]


def spec_of(**evaluation: object) -> RLHFJobSpec:
    return RLHFJob.model_validate(changed(evaluation=evaluation)).spec


def prompts_of(count: int, **fields: object) -> list[PromptRecord]:
    return [PromptRecord(i, ASK, [1, 2], fields) for i in range(count)]


class Run:
    """A run directory with its records, and an evaluation."""

    def __init__(self, path: Path, policy: Policy, prompts: int = 64, **evaluation: object) -> None:
        self.spec = spec_of(**evaluation)
        self.registry = CollectorRegistry()
        self.path, self.told = path, []  # type: ignore[var-annotated]
        self.records = RunRecords.of(
            path, Store(path), self.spec, self.registry, lambda event, **fields: self.told.append((event, fields))
        )
        metrics = EvaluationMetrics(self.spec, path, self.records.log)
        self.evaluation = Evaluator(self.spec, lambda: prompts_of(prompts), metrics, policy, self.records)

    def __call__(self, *versions: int) -> Evaluator:
        async def each() -> None:
            for version in versions:
                await self.evaluation.run(version)

        asyncio.run(each())
        return self.evaluation

    def close(self) -> dict[str, Any]:
        facts = self.records.results.write("succeeded")
        self.records.close()
        return dict(facts.get("evaluation", {}))


def test_the_languages_quality_and_the_reward_are_reported_before_and_after_ppo(tmp_path: Path) -> None:
    policy = Policy(-1.0, 2.0)
    run = Run(tmp_path, policy, samplesPerPrompt=2, temperature=0.0)
    run(0, 12).note_end(12)
    assert 'dovetail_evaluation_mean{metric="reward"} 2.0' in generate_latest(run.registry).decode()
    found = run.close()
    assert found["prompts"] == 64
    assert found["reward"]["before_ppo"]["mean"] == -1.0
    assert found["quality"]["after_ppo"] == {"mean": pytest.approx(1.0), "ci95": pytest.approx(0.0)}
    assert found["quality"]["before_ppo"]["mean"] < 0.7
    (_, first, temperature), (_, second, _) = policy.calls
    assert first == second, "all versions draw alike"
    assert len({seed for of_prompt in first for seed in of_prompt}) == 128
    assert temperature == 0.0
    curve = history_of(tmp_path)["evaluation"]
    assert {version: row["reward"] for version, row in curve.items()} == {0: -1.0, 12: 2.0}


def test_it_is_done_once_for_the_same_weights_and_settings(tmp_path: Path) -> None:
    policy = Policy()
    Run(tmp_path, policy)(0, 0, 12)
    Run(tmp_path, policy)(12)
    assert [version for version, *_ in policy.calls] == [0, 12]
    # A run that was extended is measured again, and so is one with other prompts; these are not compared.
    Run(tmp_path, policy)(20)
    assert not Run(tmp_path, policy, heldOut=32).evaluation.found()
    Run(tmp_path, policy, heldOut=32, everyIterations=5)(20)
    assert [version for version, *_ in policy.calls] == [0, 12, 20, 20]


def test_the_model_before_sft_is_measured_later_and_is_no_version_of_ppo(tmp_path: Path) -> None:
    """Its answers are drawn before the scorers have weights, and its high reward neither decides what is kept nor is
    a point of the curve."""
    policy = Policy(1.0, 2.0, 9.0)
    run = Run(tmp_path, policy, everyIterations=1, keepBest=True)
    asyncio.run(run.evaluation.draw(BEFORE_SFT))
    assert [call[0] for call in policy.calls] == [BEFORE_SFT]
    evaluation = run(BEFORE_SFT, 0)
    told = run.records.progress.document({})["evaluation"]
    assert (told["iteration"], told["before_sft"]["reward"]["mean"]) == (0, 9.0)
    run(1)
    asyncio.run(evaluation.draw(BEFORE_SFT))
    run(BEFORE_SFT)
    assert [call[0] for call in policy.calls] == [BEFORE_SFT, BEFORE_SFT, 0, 1], "it is done once"
    assert not evaluation.wanted(BEFORE_SFT)
    assert [one.version for one in evaluation.found()] == [0, 1]
    best = evaluation.best()
    assert best is not None
    assert best.version == 1
    assert sorted(history_of(tmp_path)["evaluation"]) == [0, 1]
    rows = read_rows(evaluation_files(tmp_path)[BEFORE_SFT])
    assert len(rows) == 64
    assert rows[0]["measures"]["reward"] == 9.0
    found = run.close()
    assert (found["reward"]["before_sft"]["mean"], found["reward"]["before_ppo"]["mean"]) == (9.0, 1.0)
    shown = evaluation_rows({"evaluation": found, "method": "GRPO"})
    assert ("Reward of 64 held-out answers, by SFT", "9.000 ± 0.000", "1.000 ± 0.000") in shown
    assert ("Reward of 64 held-out answers, by GRPO", "1.000 ± 0.000", "") in shown
    # With other settings it answers again.
    again = Run(tmp_path, policy, heldOut=32)
    assert again.evaluation.wanted(BEFORE_SFT)
    again.close()


def test_without_prompts_nothing_is_asked(tmp_path: Path) -> None:
    policy = Policy()
    run = Run(tmp_path, policy, prompts=0, everyIterations=1)
    assert not run(0).due(1)
    asyncio.run(run.evaluation.draw(BEFORE_SFT))
    assert not run.evaluation.wanted(BEFORE_SFT)
    assert run.close() == {}
    assert policy.calls == []


def test_the_best_is_the_earliest_with_the_highest_mean_and_ppo_ends_without_gain(tmp_path: Path) -> None:
    run = Run(tmp_path, Policy(0, 1, 3, 3, 2, 1), everyIterations=1, keepBest=True, stopAfterNoGain=2)
    assert [run.evaluation.due(version) for version in (0, 1, 2)] == [True, True, True]
    evaluation = run(0, 1, 2, 3)
    best = evaluation.best()
    assert best is not None
    assert (best.version, best.mean("reward")) == (2, 3.0)
    assert evaluation.reason_to_stop(3) is None
    run(4)
    # With a lag later evaluations may be there already: they do not count yet.
    assert evaluation.reason_to_stop(3) is None
    reason = evaluation.reason_to_stop(4)
    assert reason is not None
    assert reason.startswith("the last 2 evaluations have not raised reward above 3, which it had after iteration 2")
    assert run.close()["best"] == {"iteration": 2, "metric": "reward", "mean": 3.0, "ci95": 0.0}


class Session:
    """Exports the step that it is at, as config.json."""

    step = 0

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    async def export(self, model: str, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(str(self.step))

    def delete(self, folder: Path) -> None:
        delete_folder(folder, self._run_dir, "")

    prune = delete


def test_with_a_lag_weights_are_set_aside_until_they_are_evaluated(tmp_path: Path) -> None:
    """The trainers are one step ahead. A killed coordinator goes on with what was set aside."""
    run = Run(tmp_path, Policy(0, 5, 3, 6), everyIterations=1, keepBest=True)
    session = Session(tmp_path)

    def kept() -> BestWeights:
        return BestWeights(run.spec, tmp_path, run.records.store, session, run.evaluation)  # type: ignore[arg-type]

    best = tmp_path / "models/actor-best/config.json"
    for version, expected in ((0, "0"), (1, "1"), (2, "1"), (3, "3")):
        session.step = version
        asyncio.run(kept().set_aside(version))
        session.step = version + 1
        run(version)
        kept().choose(version)
        assert best.read_text() == expected
    assert not list((tmp_path / "set-aside").glob("*"))
    run.close()


def test_weights_are_kept_though_the_coordinator_was_killed_after_their_evaluation(tmp_path: Path) -> None:
    run = Run(tmp_path, Policy(0, 5, 3), everyIterations=1, keepBest=True)
    session = Session(tmp_path)
    kept = BestWeights(run.spec, tmp_path, run.records.store, session, run.evaluation)  # type: ignore[arg-type]
    for version in (1, 2):
        session.step = version
        asyncio.run(kept.set_aside(version))
        run(version)  # and here it is killed
    kept.choose(2)
    assert (tmp_path / "models/actor-best/config.json").read_text() == "1"
    kept.close(2)
    assert not (tmp_path / "set-aside").exists()
    run.close()


def test_weights_are_kept_though_their_evaluation_ended_before_they_were_set_aside(tmp_path: Path) -> None:
    """The trainers may wait for a checkpoint, or for the code between two calls of a loop of one's own. Or the
    coordinator was killed in between."""
    run = Run(tmp_path, Policy(0, 5, 3, 6), everyIterations=1, keepBest=True)
    session = Session(tmp_path)
    kept = BestWeights(run.spec, tmp_path, run.records.store, session, run.evaluation)  # type: ignore[arg-type]
    best = tmp_path / "models/actor-best/config.json"
    for version, expected in ((0, "0"), (1, "1"), (2, "1")):
        session.step = version
        run(version)
        kept.choose(version)
        asyncio.run(kept.set_aside(version))
        assert best.read_text() == expected
        assert not list((tmp_path / "set-aside").glob("*"))

    async def export(model: str, path: Path) -> None:
        """The evaluation ends meanwhile."""
        await run.evaluation.run(3)
        kept.choose(3)
        await Session.export(session, model, path)

    session.step, session.export = 3, export  # type: ignore[method-assign]
    asyncio.run(kept.set_aside(3))
    assert best.read_text() == "3"
    run.close()


def test_a_right_answer_matches_apart_from_white_space() -> None:
    assert is_match(" 42\n", 42)
    assert is_match("b", ["a", "b"])
    assert not is_match("42.", "42")


def test_exact_match_needs_the_right_answers_before_training(tmp_path: Path) -> None:
    metrics = EvaluationMetrics(spec_of(metrics=["exactMatch"], answerField="right"), tmp_path, lambda *_, **__: None)
    prompts = prompts_of(2, right="42")
    asyncio.run(metrics.check(prompts))
    answers = [HeldOutAnswer(prompts[0], 0, " 42", 2, "stop"), HeldOutAnswer(prompts[1], 0, "41", 2, "stop")]
    assert asyncio.run(metrics.measure(3, answers))["exactMatch"] == [1.0, 0.0]
    with pytest.raises(DataError, match="evaluated prompt 0 has no field 'right' with the right answer"):
        asyncio.run(metrics.check(prompts_of(1)))


CODE = """
def length(prompts, responses, right, **fields):
    assert right == ["x"] * len(responses)
    return [float(len(text)) for text in responses]
def broken(prompts, responses, **fields):
    raise KeyError("no")
def ended(prompts, responses, raw, **fields):
    return [float(text.endswith("<end>")) for text in raw]
"""


def test_functions_of_the_users_measure_all_answers_to_a_prompt_at_once(tmp_path: Path) -> None:
    (tmp_path / "own_metrics.py").write_text(CODE)

    async def run(*functions: str) -> dict[str, list[float]]:
        spec = spec_of(metrics=[f"own_metrics:{name}" for name in functions], samplesPerPrompt=2)
        metrics = EvaluationMetrics(spec, tmp_path, lambda *_, **__: None)
        try:
            prompts = prompts_of(2, right="x")
            await metrics.check(prompts)
            answers = [
                HeldOutAnswer(p, s, text := "ab" * (s + 1), 2, "stop", None, text + "<end>" * s)
                for p in prompts
                for s in range(2)
            ]
            return await metrics.measure(3, answers)
        finally:
            await metrics.close()

    found = asyncio.run(run("length", "ended"))
    assert found["length"] == [2.0, 4.0, 2.0, 4.0]
    assert found["ended"] == [0.0, 1.0, 0.0, 1.0]
    with pytest.raises(RewardError, match=r"metric broken \(.*own_metrics.py:5\) raised KeyError.*on prompt 0"):
        asyncio.run(run("length", "broken"))


def test_answers_stay_apart_from_the_samples_of_training(tmp_path: Path) -> None:
    """A checkpoint lets go of the iterations before it while an evaluation may go on."""
    store, slots = Store(tmp_path), (evaluation_slot(BEFORE_SFT), evaluation_slot(0), evaluation_slot(12))
    for iteration in (*slots, 11, 12):
        store.samples.begin_iteration(iteration, [NewSample(0, 0, [1, 2], 7)])
    store.samples.forget_before(12)
    assert [len(store.samples.samples(i, State.PENDING)) for i in (*slots, 11, 12)] == [1, 1, 1, 0, 1]
    store.close()
