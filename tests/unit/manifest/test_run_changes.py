"""What may change while a run goes on, what each step is run with then, and whose the files in a run directory are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.coordinator.loop.ppo_stage import stored_step
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.experience_files import ExperienceFiles
from dovetail.coordinator.store.identity import check_complete, check_model, identify, write_id
from dovetail.coordinator.store.manifest_changes import ChangeError, Settled, adopt, position, reshard
from dovetail.coordinator.store.store import Store, open_records
from dovetail.manifest.checks.changes import Change, changes
from dovetail.manifest.training_types import Optimizer
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.messages import Step
from dovetail.trainer.engine.optim import learning_rate
from helpers.jobs import tiny_job
from helpers.local_trainer import LocalTrainer
from helpers.trainer_ranks import job as trainer_job
from helpers.trainer_ranks import load_command, sft_batch


def spec(**fields: Any) -> RLHFJobSpec:
    return tiny_job(**fields).spec


def refused(**fields: Any) -> str:
    found = changes(spec().model_dump(mode="json", by_alias=True), spec(**fields))
    return next(change.sentence for change in found if not change.allowed)


def test_each_field_says_whether_it_may_change_and_why_not() -> None:
    allowed = changes(
        spec().model_dump(mode="json", by_alias=True),
        spec(
            ppo={
                "iterations": 9,
                "kl": {"coef": 0.2, "target": 3.0},
                "actorOptimizer": {"learningRate": 2e-4},
                "globalBatchSize": 16,
            },
            checkpoint={"everySteps": 5, "keep": 1},
            failurePolicy={"maxRestarts": 1},
            activeDeadlineSeconds=99,
        ),
    )
    assert all(change.allowed for change in allowed)
    assert {change.field for change in allowed} >= {
        "spec.ppo.iterations",
        "spec.ppo.kl.coef",
        "spec.ppo.kl.target",
        "spec.ppo.actorOptimizer.learningRate",
        "spec.checkpoint.everySteps",
        "spec.activeDeadlineSeconds",
    }
    assert refused(seed=4).startswith("spec.seed may not change from 3 to 4 in a run: everything random")
    assert "spec.data.prompts[0].synthetic.size may not" in refused(data={"prompts": [{"synthetic": {"size": 9}}]})
    assert "spec.ppo.clip" in refused(ppo={"clip": 0.3})
    assert "spec.ppo.actorOptimizer.schedule" in refused(ppo={"actorOptimizer": {"schedule": "Linear"}})
    for stage in ("sft", "reward"):
        assert "from 16 to 32 in a run: SFT, reward-model training and DPO cannot be extended" in refused(
            **{stage: {"steps": 32}}
        )
    assert "(may change: suspend, retry, managedBy, " in refused(seed=4)


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_the_learning_rate_of_every_stage_may_change(stage: str, tmp_path: Path) -> None:
    """That of DPO could not."""
    rates = [spec(**{stage: {"optimizer": {"learningRate": rate}}}) for rate in (1e-3, 2e-3)]
    store = Store(tmp_path)
    adopt(rates[0], store, Events())
    events = Events()
    adopt(rates[1], store, events)
    assert [(e["field"], e["new"]) for e in events] == [(f"spec.{stage}.optimizer.learningRate", 2e-3)]
    store.close()


@pytest.mark.parametrize(
    ("field", "old", "allowed", "reason"),
    [
        ("storage.folder", None, True, ""),
        ("plan.placement", "Auto", True, ""),
        ("plan.zero3", "Auto", False, "it says in which order gradients are added up"),
        ("checkpoint.keep", 2, True, ""),
        ("checkpoint.volume", None, False, "the run's files are there"),
        ("groups[1].podTemplate.spec.nodeName", None, True, ""),
        ("evaluation.prompts[0].path", "a", True, ""),
        ("models.actor.source.scratch.config.hidden_size", 8, False, "the weights so far belong to these models"),
        ("models.reward.workers", 2, True, ""),
        ("sft.steps", 9, False, "SFT, reward-model training and DPO cannot be extended"),
        ("ppo.kl.coef", 0.1, True, ""),
        ("ppo.kl.coef", 0.0, False, "with 0 no reference has scored the run's samples"),
        ("trainer.compile", "Auto", False, "steps since the last checkpoint are run again on resume"),
        ("a.field.of.another.release", 1, False, "steps since the last checkpoint are run again on resume"),
    ],
)
def test_the_nearest_policy_counts(field: str, old: Any, allowed: bool, reason: str) -> None:
    change = Change(f"spec.{field}", old, "new")
    assert change.allowed is allowed
    assert reason in change.sentence


def test_a_data_set_may_be_in_another_folder_but_not_another_file() -> None:
    assert Change("spec.data.prompts[0].path", "/a/prompts.jsonl", "/b/prompts.jsonl").allowed
    assert not Change("spec.data.prompts[0].path", "/a/prompts.jsonl", "/a/others.jsonl").allowed
    assert not Change("spec.data.prompts[0].path", None, "/a/others.jsonl").allowed


def begun_earlier(**ppo: Any) -> dict[str, Any]:
    """The spec as releases before `ppo.kl.in` wrote it into job.json, from the manifest of `spec(ppo=...)`."""
    document = spec(ppo=ppo).model_dump(mode="json", by_alias=True)
    document["ppo"]["kl"] = {"coef": 0.05, "target": None, "horizon": 10_000, "estimator": "k1"}
    document["ppo"]["rewardClip"] = 5.0
    for name in ("normalizeStd", "lossAggregation"):
        del document["ppo"][name]
    return document


GRPO = {"advantage": "grpo", "samplesPerPrompt": 4}


@pytest.mark.parametrize(
    ("ppo", "expected"),
    [
        ({}, {}),
        (GRPO, {"kl.estimator": ("k1", "Auto"), "kl.in": ("Reward", "Auto")}),
        ({**GRPO, "kl": {"in": "Reward"}}, {}),
        ({**GRPO, "kl": {"in": "Reward", "estimator": "k1"}, "rewardClip": 5.0}, {}),
    ],
)
def test_a_run_of_an_earlier_release_goes_on(ppo: dict[str, Any], expected: dict[str, tuple[str, str]]) -> None:
    found = changes(begun_earlier(**ppo), spec(ppo=ppo))
    assert {change.field: (change.old, change.new) for change in found} == {
        f"spec.ppo.{name}": values for name, values in expected.items()
    }
    assert all(change.allowed for change in found)


def test_a_run_of_an_earlier_release_takes_no_other_change() -> None:
    changed = spec(ppo={**GRPO, "rewardClip": 2.0, "clip": 0.3})
    found = [change.field for change in changes(begun_earlier(**GRPO), changed) if not change.allowed]
    assert found == ["spec.ppo.clip", "spec.ppo.rewardClip"]
    function = {"models": {**tiny_job().spec.models.model_dump(by_alias=True), "reward": {"function": "a:b"}}}
    (clip,) = changes(
        {**begun_earlier(), **spec(**function).model_dump(by_alias=True, include={"models"})}, spec(**function)
    )
    assert (clip.field, clip.old, clip.new, clip.allowed) == ("spec.ppo.rewardClip", 5.0, "Auto", True)


def test_a_run_that_streamed_goes_on_without() -> None:
    document = spec().model_dump(mode="json", by_alias=True)
    for streaming, expected in (("Never", []), ("Auto", [("spec.ppo.streaming", "Auto", None, True)])):
        document["ppo"]["streaming"] = streaming
        found = changes(document, spec())
        assert [(change.field, change.old, change.new, change.allowed) for change in found] == expected
    assert changes(spec().model_dump(mode="json", by_alias=True), spec(ppo={"streaming": "Never"})) == []


class Events(list[dict[str, Any]]):
    def __call__(self, event: str, **fields: Any) -> None:
        self.append({"event": event, **fields})


def settled(store: Store, **fields: Any) -> tuple[Settled, Events]:
    events = Events()
    adopt(spec(**fields), store, events)
    return Settled(spec(**fields), store), events


def step(number: int) -> Step:
    return Step(id=f"ppo/{number}/step", stage=Stage.PPO, step=number, batch=f"ppo/{number}", actions=[[]])


def test_steps_are_repeated_as_they_were_and_later_ones_follow_the_change(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, events = settled(store)
    assert first.settle(step(1)) == step(1)
    assert events == []
    store.put_all({"sft/done": True, "reward/done": True, "ppo/progress": {"step": 4, "kl_coef": 0.05}})
    changed = {"iterations": 9, "kl": {"coef": 0.2}, "actorOptimizer": {"learningRate": 2e-4}}
    now, events = settled(store, ppo=changed)
    assert {(e["field"], e["old"], e["new"], e["stage"], e["step"]) for e in events} == {
        ("spec.ppo.iterations", 4, 9, "ppo", 4),
        ("spec.ppo.kl.coef", 0.05, 0.2, "ppo", 4),
        ("spec.ppo.actorOptimizer.learningRate", 1e-4, 2e-4, "ppo", 4),
    }
    assert store.get("ppo/progress") == {"step": 4, "kl_coef": 0.2}
    # 16 samples in mini-batches of 8: two optimizer steps an iteration.
    before, after = now.settle(step(4)), now.settle(step(5))
    assert (before.learning_rates, before.total_steps, before.warmup_total) == ({"actor": 1e-4}, 8, 8)
    assert (after.learning_rates, after.total_steps, after.warmup_total) == ({"actor": 2e-4}, 18, 8)
    # Once more, with iteration 5's batch stored but its step not done: that step keeps what it had.
    store.put("ppo/5/facts", {"kl_coef": 0.2, "train_actor": True, "schedule": None})
    again, _ = settled(store, ppo={**changed, "iterations": 12})
    assert [again.settle(step(k)).total_steps for k in (4, 5, 6)] == [8, 18, 24]
    _, events = settled(store, ppo={**changed, "iterations": 12})
    assert events == [], "nothing changed since"
    store.close()


def test_a_refused_change_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path)
    settled(store)
    store.put("ppo/progress", {"step": 3, "kl_coef": 0.05})
    with pytest.raises(ChangeError, match=r"spec\.seed may not change"):
        settled(store, seed=99, ppo={"iterations": 9})
    with pytest.raises(ChangeError, match=r"spec\.ppo\.iterations is 2, but the run has done 3; set it to 3 or more"):
        settled(store, ppo={"iterations": 2})
    assert store.get("run/changes") is None
    assert store.get("run/spec")["seed"] == 3
    events = Events()
    adopt(spec(seed=99), store, events, guarded=True)
    assert [e["field"] for e in events] == ["spec.seed"]
    adopt(spec(), store, events, guarded=True)
    assert store.get("run/spec")["ppo"]["iterations"] == 4
    store.close()


def test_a_run_without_a_reference_cannot_get_a_penalty(tmp_path: Path) -> None:
    """Its scorers hold none, and the steps since its last checkpoint have no log-probabilities of it."""
    store = Store(tmp_path)
    settled(store, ppo={"kl": {"coef": 0.1}})
    settled(store, ppo={"kl": {"coef": 0}})
    with pytest.raises(
        ChangeError, match=r"kl\.coef may not change from 0\.0 to 0\.1 in a run: with 0 no reference has"
    ):
        settled(store, ppo={"kl": {"coef": 0.1}})
    store.close()


def test_groups_and_plan_may_be_adapted_to_the_nodes_but_not_the_order_of_sums(tmp_path: Path) -> None:
    store = Store(tmp_path)
    settled(store)
    settled(store, plan={"recompute": "Always"})
    with pytest.raises(ChangeError, match=r"spec\.plan\.zero3 .* in which order gradients are added up"):
        settled(store, plan={"recompute": "Always", "zero3": "Always"})
    store.close()


def test_other_trainer_ranks_forget_what_was_cut_for_the_earlier_ones(tmp_path: Path) -> None:
    """Two ranks in a pipeline become two that share the data: as many, but the stored schedules are of no use."""
    layouts: list[dict[str, int]] = [{"pp": 2}, {"dp": 2}]
    piped, shared = (spec(stages=["sft", "ppo"], plan={"parallelism": {"actor": at, "critic": at}}) for at in layouts)
    store, events = Store(tmp_path), Events()
    reshard(piped, make_plan(piped), store, events)
    schedule = {"family": "1f1b", "mini_batches": 1, "words": ["FB", "FB"]}
    facts = {"kl_coef": 0.1, "train_actor": True, "schedule": schedule}
    done = {"sft/done": True, "ppo/progress": {"step": 3, "kl_coef": 0.1}, "checkpoint/ppo": {"step": 2, "path": "x"}}
    placed = {"ppo/placement": {"reverse": True}, "sft/schedules": [[1, schedule]]}
    store.put_all({**done, **placed, "ppo/3/facts": facts, "ppo/4/facts": facts})
    reshard(piped, make_plan(piped), store, events)
    assert events == []
    assert store.get("ppo/4/facts") == facts

    reshard(shared, make_plan(shared), store, events)
    assert [(e["event"], e["stage"], e["step"]) for e in events] == [("trainers.changed", "ppo", 2)]
    assert (store.get("ppo/placement"), store.get("sft/schedules")) == (None, None)
    step = stored_step(shared, make_plan(shared), store, Settled(shared, store), {}, 4)
    assert {len(actions) for actions in step.actions} == {len(step.actions[0])} != {0}
    assert {a.model for actions in step.actions for a in actions} == {"actor", "critic"}
    (change,) = store.get("run/changes")
    assert (change["field"], change["step"], change["settled"]) == ("trainer ranks", 2, 4)
    assert change["old"] == "2 (actor: pp 2, dp 1, tp 1; critic: pp 2, dp 1, tp 1)"
    assert change["new"] == "2 (actor: pp 1, dp 2, tp 1; critic: pp 1, dp 2, tp 1)"
    store.close()


def test_the_position_of_a_run(tmp_path: Path) -> None:
    store, stages = Store(tmp_path), list(Stage)
    assert position(stages, store).stage is Stage.SFT
    store.put_all({"sft/done": True, "reward/step": 7})
    assert position(stages, store) == position([Stage.REWARD], store)
    assert position(stages, store).step == 7
    store.close()


def test_warm_up_does_not_begin_again_and_decay_follows_the_new_total() -> None:
    for schedule, expected in (("Constant", 1.0), ("Linear", 0.5)):
        config = Optimizer.model_validate({"learningRate": 1.0, "schedule": schedule, "warmupFraction": 0.1})
        assert learning_rate(9, 10, config) <= 1.0
        assert learning_rate(10, 100, config, warmup_total=10) > 0.9
        assert learning_rate(50, 99, config, warmup_total=10) == pytest.approx(expected)
        assert learning_rate(1, 10, config) == learning_rate(1, 10, config, warmup_total=10)


@pytest.mark.slow
def test_a_rank_follows_the_rates_of_each_step(tmp_path: Path) -> None:
    """Two steps with one rate, then one with another: what a manifest with that rate from the start does differs."""
    with LocalTrainer(trainer_job()) as trainer:
        trainer.metrics(load_command(Stage.SFT))
        rates = []
        for k, rate in ((1, {}), (2, {"actor": 1e-3}), (3, {"actor": 2e-3})):
            command = trainer.step(Stage.SFT, k, sft_batch(k), ["actor"], 4)
            rates.append(trainer.metrics(command.model_copy(update={"learning_rates": rate}))["learning_rate"])
    assert rates == pytest.approx([3e-3, 1e-3, 2e-3])


# ---------------------------------------------------------------- whose files


def test_a_run_keeps_its_id_and_a_lost_run_json_is_made_again(tmp_path: Path) -> None:
    write_id(tmp_path, "a")
    store = Store(tmp_path)
    assert identify(tmp_path, store) == "a"
    (tmp_path / "run.json").unlink()
    assert identify(tmp_path, store) == "a"
    assert identify(tmp_path, store) == "a"
    write_id(tmp_path, "b")
    with pytest.raises(StoreError, match=r"parts of two runs: run\.json is of run b, store\.sqlite of run a"):
        identify(tmp_path, store)
    store.close()


def test_a_store_is_not_begun_anew_beside_results(tmp_path: Path) -> None:
    check_complete(tmp_path)
    (tmp_path / "models" / "sft").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"has models/ of an earlier run, but its store\.sqlite is missing or empty"):
        check_complete(tmp_path)
    (tmp_path / "store.sqlite").touch()
    with pytest.raises(StoreError, match="missing or empty"):
        check_complete(tmp_path)
    Store(tmp_path).close()
    check_complete(tmp_path)


@pytest.mark.parametrize("name", ["summary.json", "tokenizer/tokenizer.json", "samples/mine.jsonl", "history.jsonl"])
def test_a_folder_of_somebody_on_a_claim_is_not_written_into(tmp_path: Path, name: str) -> None:
    """On a cluster spec.storage.folder may name any folder."""
    (tmp_path / "events.jsonl").touch()  # the coordinator's own
    (tmp_path / "notes.md").touch()
    check_complete(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(StoreError, match=rf"has {name.split('/')[0]}, which a run would write .*spec\.storage\.folder"):
        check_complete(tmp_path)
    write_id(tmp_path, "a")
    check_complete(tmp_path)


def test_a_model_of_another_run_or_a_missing_one_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "sft"
    with pytest.raises(StoreError, match="sft is missing, though the run has finished that stage"):
        check_model(folder, "a")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    check_model(folder, "a")  # of a release before run ids
    (folder / "dovetail.json").write_text('{"run": "b"}')
    with pytest.raises(StoreError, match=r"sft is of run b, but store\.sqlite of run a"):
        check_model(folder, "a")


def test_a_batch_of_another_run_or_a_damaged_one_is_named(tmp_path: Path) -> None:
    import numpy as np

    files = ExperienceFiles(tmp_path)
    digest = files.write(1, {"scores": np.zeros(4, np.float32)})
    assert ExperienceFiles(tmp_path).read(1, digest)
    other = files.write(1, {"scores": np.ones(4, np.float32)})
    with pytest.raises(ValueError, match=r"000001\.safetensors is damaged or of another run"):
        ExperienceFiles(tmp_path).read(1, digest)
    assert ExperienceFiles(tmp_path).read(1, other)


def test_records_are_read_without_touching_the_samples(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("a/b", 1)
    store.sync()
    store.close()
    records = open_records(tmp_path)
    assert records.get("a/b") == 1
    records.close()
