"""Training on the first samples of an iteration while others are drawn: which come first, who can have it, and the same
bits whatever was learnt early."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group

from dovetail.cli.common.plan_tables import plan_tables
from dovetail.cli.common.prediction_tables import prediction_tables
from dovetail.coordinator.data.text.texts import Texts
from dovetail.coordinator.loop.experience_assembly import ExperienceAssembly
from dovetail.coordinator.loop.streaming import PromptProgress, Streaming, in_learning_order, known_first
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.samples import Assignment, Delta, Key, NewSample, ScoreRow
from dovetail.coordinator.store.store import Store
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.manifest.types import Parallelism, Stage
from dovetail.planner import streamed_parts
from dovetail.planner.make_plan import make_plan
from dovetail.planner.placement.placed import Placed
from dovetail.planner.placement.planned_job import PlannedJob
from dovetail.planner.simulate.drawn_iterations import hidden
from dovetail.protocol.messages import Accumulate, CommandResult, Step
from dovetail.protocol.wire import Arrays, pack, unpack
from dovetail.trainer.steps.streamed_step import digest_of, rows_of
from helpers.example_jobs import EXAMPLES, hub_configs
from helpers.family_models import FAMILIES
from helpers.jobs import tiny_job
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job, load_command, ppo_batch

# ---------------------------------------------------------------- the order


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=6),
    drawn=st.integers(0, 9),
    unscored=st.sets(st.integers(0, 5)),
)
def test_what_is_known_to_come_first_comes_first(lengths: list[list[int]], drawn: int, unscored: set[int]) -> None:
    """All samples have as many tokens as were drawn, or have ended."""
    seen = [
        PromptProgress(p, max(min(drawn, n) for n in each), max(each) <= drawn and p not in unscored)
        for p, each in enumerate(lengths)
    ]
    rows = [(p, n) for p, each in enumerate(lengths) for n in each]
    arrays = {"groups": np.array([p for p, _ in rows]), "response_lengths": np.array([n for _, n in rows])}
    order = in_learning_order(arrays)
    found = known_first(seen)
    assert np.repeat(found, 2).tolist() == order["groups"][: 2 * len(found)].tolist()
    if drawn == 9 and not unscored:
        assert len(found) == len(lengths)


def test_training_is_hidden_from_when_the_first_prompts_are_scored() -> None:
    scored, lengths = [1.0, 1.0, 4.0, 2.0, 2.0, 9.0], [1, 1, 5, 3, 2, 8]
    # In twos: prompts of rows (0, 1), (2, 3), (4, 5), longest 1, 5, 8; the last one is scored at the end.
    assert hidden(scored, lengths, [1] * 6, 2, 3, 3.0, 9.0) == pytest.approx(2.0)
    # The second part is under way when the stage ends.
    assert hidden(scored, lengths, [1] * 6, 2, 3, 12.0, 9.0) == pytest.approx(8.0)
    assert hidden([9.0] * 6, lengths, [1] * 6, 2, 3, 3.0, 9.0) == 0.0


# ---------------------------------------------------------------- what the trainers get


def answered(
    store: Store, key: Key, length: int, steps: list[tuple[int, float]], experts: tuple[int, bytes] | None = None
) -> None:
    """A response of so many tokens, scored by a function `f` that gave it these steps."""
    (attempt,) = store.samples.assign([Assignment(key, "r", "i", 0, 0)])
    store.samples.record([Delta(key, attempt, 0, [key.sample + 1] * length, [0.0] * length, "stop", experts)])
    store.samples.add_rewards("f", {key: float(key.sample)}, {key: steps})
    store.samples.score([ScoreRow(key, np.zeros(length, np.float32), None, float(key.sample))])


def assembly(store: Store) -> ExperienceAssembly:
    texts = Texts(SimpleNamespace(decode=lambda tokens, **_: "x" * len(tokens)))
    calls: Any = SimpleNamespace(functions=[SimpleNamespace(title="f", weight=0.5)])
    return ExperienceAssembly(store.samples, texts, 0, calls)


def test_a_part_is_what_the_whole_batch_has_also_with_rewards_of_steps(tmp_path: Path) -> None:
    """Prompt 1 ends first, and no reward function marks steps in its responses."""
    store, files = Store(tmp_path), ExperienceFiles(tmp_path)
    store.samples.begin_iteration(1, [NewSample(p, s, [7] * (p + 1), 2 * p + s) for p in range(2) for s in range(2)])
    given: list[str] = []
    early = asyncio.Event()
    records: Any = SimpleNamespace(
        store=store, batches=files, log=lambda *_, **__: None, timeline=SimpleNamespace(add=lambda _: None)
    )

    class Session:
        async def accumulate(self, command: Accumulate) -> CommandResult:
            part = files.part(command.batch)
            assert part is not None
            given.append(digest_of(rows_of(unpack(part), 0, 2)))
            early.set()
            return CommandResult(id=command.id, ok=True)

    def step(iteration: int) -> Step:
        return Step(id="ppo/1/step", stage=Stage.PPO, step=iteration, batch="ppo/1", actions=[[]], parts=2)

    async def scenario() -> None:
        spec = tiny_job(ppo={**CAN, "globalBatchSize": 4, "miniBatchSize": 4, "samplesPerPrompt": 2}).spec
        session: Any = Session()
        async with Streaming(spec, 2, records, session, assembly(store).arrays_of, step).beside(1):
            for sample in range(2):
                answered(store, Key(1, 1, sample), 2, [])
                # Still drawn, and longer.
                (attempt,) = store.samples.assign([Assignment(Key(1, 0, sample), "r", "i", 0, 0)])
                store.samples.record([Delta(Key(1, 0, sample), attempt, 0, [3] * 4, [0.0] * 4)])
            async with asyncio.timeout(60):
                await early.wait()
            for sample in range(2):
                key = Key(1, 0, sample)
                store.samples.record([Delta(key, 1, 4, [4], [0.0], "stop")])
                store.samples.add_rewards("f", {key: 0.0}, {key: [(2, 1.0), (5, -1.0)]})
                store.samples.score([ScoreRow(key, np.zeros(5, np.float32), None, 0.0)])

    asyncio.run(scenario())
    whole = unpack(pack(in_learning_order(assembly(store).arrays_of(1, store.samples.experience(1)))))
    assert whole["step_rewards"].any()
    assert given == [digest_of(rows_of(whole, 0, 2))]
    store.close()


def test_a_part_whose_experts_nobody_reported_has_none(tmp_path: Path) -> None:
    store, file = Store(tmp_path), io.BytesIO()
    np.save(file, np.zeros((2, 1, 1), np.int16))
    store.samples.begin_iteration(1, [NewSample(p, 0, [7], p) for p in range(2)])
    answered(store, Key(1, 0, 0), 2, [], (0, file.getvalue()))
    answered(store, Key(1, 1, 0), 2, [])
    for prompts, there in (([0], True), ([1], False), ([0, 1], True)):
        arrays = assembly(store).arrays_of(1, store.samples.of_prompts(1, prompts))
        assert ("routed_experts" in arrays) == there, prompts
    store.close()


# ---------------------------------------------------------------- who can have it

CAN: dict[str, Any] = {"advantage": "grpo", "samplesPerPrompt": 4, "miniBatchSize": 16, "streaming": "Auto"}


def planned(**ppo: Any) -> tuple[int, str]:
    plan = make_plan(resolve(tiny_job(ppo={**CAN, "microBatchSize": 2, **ppo}).spec))
    return plan.streamed_parts, plan.not_streamed


def test_a_plan_says_in_how_many_parts_or_why_not() -> None:
    assert planned() == (4, "")
    # Two trainers with micro-batches of 4 take two prompts at a time.
    assert planned(microBatchSize=4) == (2, "")
    assert planned(streaming="Never") == (0, "")
    assert planned(advantage="gae", samplesPerPrompt=1, whitenAdvantages=False) == (4, "")
    for changed, words in (
        ({"advantage": "gae", "samplesPerPrompt": 1}, "whitenAdvantages"),
        ({"miniBatchSize": 8}, "several optimizer steps"),
        ({"epochs": 2}, "several optimizer steps"),
        ({"lag": 1}, "spec.ppo.lag is above 0"),
        ({"advantage": "reinforce++"}, "normalises over all samples"),
        ({"ptxCoef": 0.1}, "ptxCoef"),
        ({"microBatchTokens": 200}, "microBatchTokens"),
        ({"microBatchSize": 8}, "parts of whole prompts"),
    ):
        parts, why = planned(**changed)
        assert parts == 0
        assert words in why
        assert not why.endswith(".")


@pytest.mark.parametrize("start", ["reward", "critic"])
def test_a_critic_with_a_load_balancing_loss_is_found_wherever_it_starts_from(start: str) -> None:
    """A critic without a source of its own is made from the reward model."""
    experts = {"scratch": {"architecture": "qwen3_moe", "config": FAMILIES["qwen3_moe"]}}
    settings = {"advantage": "gae", "samplesPerPrompt": 1, "whitenAdvantages": False, "microBatchSize": 2}
    for coefficient in (0.01, 0.0):
        models: dict[str, Any] = {"reward": {}, "critic": {"routerAuxLossCoef": coefficient}}
        models[start]["source"] = experts
        plan = make_plan(resolve(tiny_job(models=models, ppo={**CAN, **settings}).spec))
        found = "spec.models.critic.routerAuxLossCoef" in plan.not_streamed, plan.streamed_parts
        assert found == ((True, 0) if coefficient else (False, 4)), plan.not_streamed


def test_actor_and_critic_both_cut_a_part_into_whole_micro_batches() -> None:
    settings = {"advantage": "gae", "samplesPerPrompt": 1, "whitenAdvantages": False, "microBatchSize": 2}
    spec = resolve(tiny_job(ppo={**CAN, **settings, "globalBatchSize": 24, "miniBatchSize": 24}).spec)
    layouts = {"actor": Parallelism(tp=2, dp=3), "critic": Parallelism(tp=3, dp=2)}
    # Six samples are enough for the actor's ranks, but the critic's take four at a time.
    assert streamed_parts.streamed(PlannedJob(spec), Placed(layouts)) == (2, "")


def test_a_plan_predicts_what_is_hidden_behind_the_samples() -> None:
    found = {}
    for streaming in ("Never", "Auto"):
        document = yaml.safe_load((EXAMPLES / "hh-rlhf.yaml").read_text())
        size = document["spec"]["ppo"]["globalBatchSize"]
        more = {"miniBatchSize": size, "microBatchSize": 1, "epochs": 1, "streaming": streaming}
        document["spec"]["ppo"] |= {"advantage": "grpo", "samplesPerPrompt": 4, "ptxCoef": 0, **more}
        plan = make_plan(resolve(parse(document).spec), None, hub_configs("hh-rlhf"))
        assert (plan.streamed_parts > 1) == (streaming == "Auto"), plan.not_streamed
        found[streaming] = plan.prediction
        assert found[streaming] is not None
    plain, streamed = found["Never"], found["Auto"]
    assert 0 < streamed.streamed_seconds < plain.phases["training"]
    assert streamed.iteration_seconds == pytest.approx(plain.iteration_seconds - streamed.streamed_seconds)
    assert streamed.synchronous_seconds == plain.iteration_seconds
    assert streamed.lags[0].iteration_seconds == streamed.iteration_seconds
    assert "learn from an iteration's samples in" in shown(plan_tables(plan))
    assert "Training hidden behind the samples" in shown(prediction_tables(streamed))


def shown(tables: Group) -> str:
    text = io.StringIO()
    Console(width=250, file=text).print(tables)
    return text.getvalue()


# ---------------------------------------------------------------- bits

PARTS = 4


def batch(scores: float = 0.0) -> Arrays:
    """16 samples of 8 prompts, in the order in which they are learnt."""
    arrays = unpack(ppo_batch(1))
    arrays["groups"] = np.arange(16, dtype=np.int32) // 2
    arrays["scores"] = arrays["scores"] + np.float32(scores) * np.arange(16, dtype=np.float32)
    return in_learning_order(arrays)


Early = Sequence[tuple[int, Arrays]]


def learnt(
    settings: dict[str, Any], early: Early, parts: int = PARTS
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights and metrics after two steps on the same batch, of which some parts were learnt before. The second one
    begins while the first is decided, but not yet applied."""
    ppo = {"miniBatchSize": 16, "epochs": 1, "microBatchSize": 2, "samplesPerPrompt": 2, **settings}
    models = ["actor", "critic"] if ppo.get("advantage") == "gae" else ["actor"]
    with LocalTrainer(job(ppo=ppo, generation={"maxTokens": 32})) as trainer:
        load = load_command(Stage.PPO)
        trainer.metrics(load.model_copy(update={"models": {name: load.models[name] for name in models}}))
        count = 8 // max(1, parts)
        for number in (1, 2):
            step = trainer.step(Stage.PPO, number, pack(batch()), models, count, kl_coef=0.05, parts=parts)
            for place, (part, arrays) in enumerate(early):
                trainer.metrics(accumulate(trainer, step, part, arrays, place))
            metrics = trainer.metrics(step)
            assert trainer.runner.step == number
        return {f"{m}.{n}": t.clone() for m in models for n, t in trainer.runner.engine.weights(m)}, metrics


def accumulate(trainer: LocalTrainer, step: Step, part: int, arrays: Arrays, number: int) -> Accumulate:
    key = f"ppo-part/{step.step}/{number}"
    size = 16 // PARTS
    trainer.client.batches[key] = pack(rows_of(arrays, part * size, (part + 1) * size))
    return Accumulate(id=f"ppo/{step.step}/accumulate/{number}", step=step, part=part, batch=key)


SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo"},
    "sequences": {"advantage": "grpo", "lossAggregation": "Sequence", "dropEqualGroups": True, "entropyCoef": 0.01},
    "rloo, trusted": {"advantage": "rloo", "oldLogProbs": "Rollout", "kl": {"in": "Reward"}},
    "gae": {"advantage": "gae", "whitenAdvantages": False},
}


@pytest.fixture(params=SETTINGS)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SETTINGS[request.param]


@pytest.mark.slow
def test_whatever_is_learnt_early_the_bits_are_the_same(settings: dict[str, Any]) -> None:
    after, metrics = learnt(settings, [])
    assert metrics["streamed_fraction"] == 0.0
    assert metrics["optimizer_steps"] == 1.0
    good, other = batch(), batch(scores=1.0)
    cases: list[tuple[Early, float]] = [
        ([(0, good), (1, good)], 0.5),
        # A coordinator that came back gives the first ones again.
        ([(0, good), (0, good), (1, good), (2, good)], 0.75),
        # What was learnt early is not what the step's batch says.
        ([(0, good), (1, other)], 0.0),
    ]
    for early, share in cases:
        found, told = learnt(settings, early)
        assert told.pop("streamed_fraction") == share
        assert [name for name in after if not torch.equal(after[name], found[name])] == []
        assert {n: v for n, v in told.items() if "seconds" not in n} == pytest.approx(
            {n: v for n, v in metrics.items() if "seconds" not in n and n != "streamed_fraction"}
        )
    # Of a step that sees all samples at once it differs by rounding.
    whole, told = learnt(settings, [], parts=0)
    for name in ("policy_loss", "actor_grad_norm", "kl", "reward", "entropy"):
        assert metrics[name] == pytest.approx(told[name], rel=1e-3, abs=1e-5), name
    apart = torch.cat([(after[name] - whole[name]).abs().flatten() for name in after])
    assert float(apart.mean()) < 1e-5


@pytest.mark.slow
def test_parts_that_do_not_fit_are_refused_and_change_nothing() -> None:
    ppo = {"miniBatchSize": 16, "epochs": 1, "microBatchSize": 2, "samplesPerPrompt": 2, "advantage": "grpo"}
    with LocalTrainer(job(ppo=ppo)) as trainer:
        load = load_command(Stage.PPO)
        trainer.metrics(load.model_copy(update={"models": {"actor": load.models["actor"]}}))
        step = trainer.step(Stage.PPO, 1, pack(batch()), ["actor"], 2, kl_coef=0.05, parts=PARTS)
        command = accumulate(trainer, step, 1, batch(), 0)
        assert "part 1 cannot follow the 0 parts" in str(trainer.execute(command).error)
        later = step.model_copy(update={"step": 2})
        assert "step 2 cannot follow step 0" in str(trainer.execute(command.model_copy(update={"step": later})).error)
        uneven = step.model_copy(update={"parts": 5})
        assert "cannot be cut into 5 equal parts" in str(
            trainer.execute(command.model_copy(update={"step": uneven})).error
        )
        assert trainer.runner.stage is Stage.PPO
        # It was learnt with another coefficient of the KL penalty than its step has.
        trainer.metrics(accumulate(trainer, step.model_copy(update={"kl_coef": 0.1}), 0, batch(), 1))
        assert trainer.metrics(step)["streamed_fraction"] == 0.0
