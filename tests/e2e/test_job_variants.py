"""Whole jobs off the beaten track: other layouts, algorithms and models, and a loop of one's own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file

from dovetail.cli.main import cli
from dovetail.coordinator.data.synthetic import quality
from dovetail.coordinator.schedules.training_schedule import pinned_families
from dovetail.launch.local.launcher import Launcher
from dovetail.local.pipeline import Pipeline
from dovetail.manifest.checks.rules import check
from dovetail.protocol.experience import Experience
from helpers.jobs import (
    SMALLER,
    Fault,
    Injector,
    events,
    history,
    read_status,
    run_job,
    same_weights,
    summary,
    tied_actor,
    tiny_job,
)
from helpers.nursery import forked_jobs
from helpers.patience import PATIENCE

pytestmark = pytest.mark.slow

PIPELINE = {"parallelism": {"actor": {"pp": 2, "dp": 1}, "critic": {"pp": 1, "dp": 2}}}


def test_stages_adapters_mixture_and_average_in_one_job(tmp_path: Path) -> None:
    """Actor in two pipeline stages with LoRA, demonstrations mixed in and an averaged copy; critic
    data-parallel; truncated sampling, so that the policy ratio's denominator is recomputed by the trainer."""
    job = tiny_job(
        models={
            "actor": {**tiny_job().spec.models.actor.model_dump(by_alias=True, exclude_none=True), "lora": {"rank": 4}}
        },
        ppo={"iterations": 2, "ptxCoef": 0.5, "ema": 0.9, "epochs": 2},
        generation={"temperature": 0.8, "topP": 0.9, "topK": 40},
        plan=PIPELINE,
        **SMALLER,
    )
    seen: dict[str, str] = {}

    def look(launcher: Launcher) -> None:
        status = read_status(launcher)
        if status is not None and status["stage"] == "ppo" and status["iteration"] >= 2 and not seen:
            with urllib.request.urlopen(f"{launcher.url}/metrics", timeout=PATIENCE) as response:
                seen["metrics"] = response.read().decode()
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{launcher.url}/v1/status", timeout=PATIENCE)

    outcome, _ = run_job(job, tmp_path, look)
    assert outcome.succeeded, outcome.reason
    rows = history(tmp_path, "ppo")
    assert sorted(rows) == [1, 2]
    assert rows[2]["ptx_loss"] > 0
    # The first mini-batch of an iteration has ratio 1 by construction; later ones move.
    assert rows[1]["ratio"] == pytest.approx(1.0, abs=0.2)
    # The rollouts' log-probabilities are the scorers' as long as nothing is learnt, at the temperature of both.
    kl = summary(tmp_path)["ppo"]
    assert kl["kl_first"]["mean"] == pytest.approx(0.0, abs=1e-3)
    assert kl["kl_last"]["mean"] != 0
    for name in ("actor", "actor-ema", "critic"):
        assert (tmp_path / "models" / name / "config.json").exists()
    assert 'dovetail_stage_step{stage="ppo"}' in seen["metrics"]
    assert "dovetail_weight_version" in seen["metrics"]


def test_a_critic_on_the_actor_s_body(tmp_path: Path) -> None:
    """A tied one in two pipeline stages; a trainer dies between two checkpoints, a scorer never gets weights."""
    job = tiny_job(
        stages=["sft", "ppo"],
        models={
            "actor": tied_actor(),
            "critic": {"shareActorBody": True},
            "reward": {"function": "dovetail.coordinator.data.synthetic:reward"},
        },
        ppo={"iterations": 3, "ema": 0.9, "criticOptimizer": {}},
        plan={"parallelism": {"actor": {"pp": 2}}},
        **SMALLER,
    )
    assert check(job.spec) == []
    killer = Injector([Fault("trainer-1", lambda status: status["stage"] == "ppo" and status["iteration"] >= 2)])
    outcome, _ = run_job(job, tmp_path, killer)
    assert outcome.succeeded, outcome.reason
    assert killer.killed == ["trainer-1"]
    rows = history(tmp_path, "ppo")
    assert sorted(rows) == [1, 2, 3]
    assert all(row["value_loss"] > 0 and "critic_grad_norm" not in row for row in rows.values())
    assert rows[3]["value"] != 0
    assert not (tmp_path / "models" / "critic").exists()
    for name in ("actor", "actor-ema"):
        folder = tmp_path / "models" / name
        _, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not report["unexpected_keys"]
        assert (folder / "value_head" / "model.safetensors").is_file()


def test_grpo_on_a_reward_function_with_another_family(tmp_path: Path) -> None:
    """No reward model, no critic: groups of four answers, an adaptive KL coefficient, Qwen2 with tp 2. Two reward
    functions, one of which is called for each answer as it is finished."""
    (tmp_path / "brief.py").write_text("def score(prompts, responses, **_): return [len(r.split()) for r in responses]")
    job = tiny_job(
        stages=["sft", "ppo"],
        models={
            "actor": {
                "source": {
                    "scratch": {
                        "architecture": "qwen2",
                        "config": {
                            "hidden_size": 64,
                            "intermediate_size": 128,
                            "num_hidden_layers": 2,
                            "num_attention_heads": 2,
                            "num_key_value_heads": 2,
                            "max_position_embeddings": 128,
                        },
                    }
                }
            },
            "reward": {
                "functions": [
                    {"function": "dovetail.coordinator.data.synthetic:reward", "name": "language"},
                    {"function": "brief:score", "name": "brief", "weight": -0.01, "needs": "Sample"},
                ],
                "importPath": str(tmp_path),
            },
        },
        ppo={"iterations": 2, "advantage": "grpo", "samplesPerPrompt": 4, "kl": {"coef": 0.1, "target": 1.0}},
        plan={"parallelism": {"actor": {"tp": 2}}},
        **SMALLER,
    )
    assert check(job.spec) == []
    outcome, _ = run_job(job, tmp_path)
    assert outcome.succeeded, outcome.reason
    assert sorted(history(tmp_path, "ppo")) == [1, 2]
    assert not (tmp_path / "models" / "critic").exists()
    assert "reward_model" not in summary(tmp_path)
    for row in history(tmp_path, "ppo").values():
        assert row["reward"] == pytest.approx(row["reward/language"] - 0.01 * row["reward/brief"])
    early = 0
    for iteration in (1, 2):
        trace = json.loads((tmp_path / "traces" / f"iteration-{iteration:04d}.json").read_text())["traceEvents"]
        generated = max(e["ts"] + e["dur"] for e in trace if e["name"] == "generation")
        calls = [e for e in trace if e["name"] == "reward function"]
        by_function = Counter(e["args"]["function"] for e in calls)
        assert by_function == {"language": 4, "brief": 16}
        early += sum(e["ts"] + e["dur"] < generated for e in calls)
    assert early, "answered while other samples were still generated"


@pytest.mark.nightly
def test_ranks_that_share_the_tokens_of_each_sequence(tmp_path: Path) -> None:
    """All stages with cp 2: preferences, values of last tokens, advantages. Then as many ranks that share the batch.
    Then cp 2 again, where a trainer dies between two checkpoints."""
    means = []
    killer = Injector([Fault("trainer-1", lambda status: status["stage"] == "ppo" and status["iteration"] >= 2)])
    for name, cp, inject in (("tokens", 2, Injector([])), ("batch", 1, Injector([])), ("killed", 2, killer)):
        job = tiny_job(
            ppo={"iterations": 3},
            plan={"parallelism": {"actor": {"dp": 2, "cp": cp}}},
            checkpoint={"everySteps": 100},
            **SMALLER,
        )
        assert check(job.spec) == []
        outcome, _ = run_job(job, tmp_path / name, inject)
        assert outcome.succeeded, outcome.reason
        assert sorted(history(tmp_path / name, "ppo")) == [1, 2, 3]
        means.append({stage: history(tmp_path / name, stage)[1] for stage in ("sft", "reward", "ppo")})
    for stage, name in (("sft", "loss"), ("reward", "loss"), ("ppo", "policy_loss"), ("ppo", "value_loss")):
        assert means[0][stage][name] == pytest.approx(means[1][stage][name], rel=1e-3, abs=1e-5)
    assert killer.killed == ["trainer-1"]
    assert same_weights(tmp_path / "tokens", tmp_path / "killed") == []


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """The Python API with one's own prompts and their fields, reward, advantages and evaluations."""
    calls: list[int] = []
    numbers: list[int] = []

    def reward(prompts: list[str], responses: list[str], **fields: Any) -> list[float]:
        calls.append(len(responses))
        numbers.extend(fields.get("number", []))
        told.update(pipeline.status()["stage"] for pipeline in entered)
        return [quality(p, r) for p, r in zip(prompts, responses, strict=True)]

    def advantages(experience: Experience) -> np.ndarray:
        assert experience.config == job.spec.ppo.model_copy(update={"reward_clip": None})
        assert experience.kl_coef == job.spec.ppo.kl.coef
        return experience.per_token(experience.scores - experience.scores.mean())

    job = tiny_job(**SMALLER)
    told: set[str] = set()
    entered: list[Pipeline] = []
    with forked_jobs(), Pipeline(job, tmp_path, reward_function=reward, advantage_function=advantages) as pipeline:
        entered.append(pipeline)
        pipeline.run_sft()
        assert pipeline.status()["stage"] == "sft"
        pipeline.begin_ppo()
        with pytest.raises(ValueError, match="1 prompts given, 16 expected"):
            pipeline.generate_experience(["Human: hi\n\nAssistant:"])
        mine = [f"Human: what is a cat number {i}?\n\nAssistant:" for i in range(16)]
        assert [record["prompt"] for record in pipeline.prompt_records()] == pipeline.prompts()
        first = pipeline.evaluate()["reward"]["mean"]
        experience = pipeline.generate_experience([{"prompt": text, "number": i} for i, text in enumerate(mine)])
        assert experience.prompts == mine
        assert sorted(numbers) == list(range(16))
        assert len(experience.responses) == 16
        metrics = pipeline.train(experience)
        assert metrics["reward"] == pytest.approx(float(experience.scores.mean()))
        assert pipeline.iteration == 1
        last = pipeline.evaluate()["reward"]["mean"]
        document = pipeline.finish()
    # One for each prompt: two of a rehearsal, and 20 of the evaluations before SFT, after it and at the end.
    assert calls == [1] * (2 + 20 + 20 + 16 + 20)
    assert json.loads((tmp_path / "summary.json").read_text()) == document
    measured = document["evaluation"]["reward"]
    assert (measured["before_ppo"]["mean"], measured["after_ppo"]["mean"]) == (first, last)
    assert "before_sft" in measured
    assert "ppo" in told, "the reward's thread asked while generate_experience ran"
    assert (tmp_path / "models" / "actor" / "config.json").exists()


def learning(iteration: int) -> Any:
    return lambda status: status["stage"] == "ppo" and status["iteration"] >= iteration


@pytest.mark.nightly
@pytest.mark.parametrize("advantage", ["gae", "grpo"])
def test_stages_in_a_v_train_the_weights_of_one_stage_a_rank(tmp_path: Path, advantage: str) -> None:
    """Bit by bit, though a trainer and the coordinator are killed meanwhile: actor and critic with activation
    checkpointing, the first iteration with the critic alone; and the actor of a job without a critic, whose backwards
    are split."""
    actor = tiny_job().spec.models.actor.model_dump(by_alias=True, exclude_none=True)
    actor["source"]["scratch"]["config"]["num_hidden_layers"] = 4
    changes: dict[str, Any] = {"ppo": {"iterations": 3, "criticWarmupIterations": 1}}
    if advantage == "grpo":
        changes = {"stages": ["ppo"], "ppo": {"iterations": 2, "advantage": "grpo", "samplesPerPrompt": 4}}
    reward = {"reward": {"function": "dovetail.coordinator.data.synthetic:reward"}} if advantage == "grpo" else {}
    weights = {}
    for pin in ("VShaped", "Serial"):
        plan = {"parallelism": {"actor": {"pp": 2}}, "intraStageFusion": pin}
        if pin == "VShaped" and advantage == "gae":
            plan["recompute"] = "Always"  # the weights are the same without it
        job = tiny_job(models={"actor": actor, **reward}, plan=plan, **changes, **SMALLER)
        assert check(job.spec) == []
        killer = Injector([])
        if pin == "VShaped":
            killer.faults += [Fault("trainer-1", learning(2))]
            killer.faults += [Fault("coordinator", learning(3))] if advantage == "gae" else []
        outcome, _ = run_job(job, tmp_path / pin, killer)
        assert outcome.succeeded, outcome.reason
        assert all(fault.done for fault in killer.faults)
        folders = [tmp_path / pin / "models" / model for model in ("actor", "critic")]
        weights[pin] = {
            (folder.name, name): tensor
            for folder in folders
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
    chosen = json.loads((tmp_path / "VShaped" / "schedule.json").read_text())["chosen"]
    assert chosen in pinned_families("VShaped", 2 if advantage == "gae" else 1)
    assert weights["VShaped"].keys() == weights["Serial"].keys()
    assert [n for n, tensor in weights["VShaped"].items() if not torch.equal(tensor, weights["Serial"][n])] == []


@pytest.mark.nightly
def test_ppo_goes_on_with_one_trainer_rank_in_place_of_a_pipeline(tmp_path: Path) -> None:
    """The schedules that were stored for two ranks are made anew, and the next iterations learn all their samples."""

    def job(replicas: int, stages: int) -> Any:
        at = {"pp": stages}
        groups = [{**SMALLER["groups"][0], "replicas": replicas}, SMALLER["groups"][1]]
        plan = {"parallelism": {"actor": at, "critic": at}}
        return tiny_job(**{**SMALLER, "groups": groups, "checkpoint": {"everySteps": 1, "keep": 9}, "plan": plan})

    def saved(status: dict[str, Any]) -> bool:
        return status["stage"] == "ppo" and (status["checkpoint"] or {"step": 0})["step"] >= 2

    outcome, _ = run_job(job(2, 2), tmp_path, Injector([], interrupt_when=saved))
    assert outcome.interrupted
    before = history(tmp_path, "ppo")
    outcome, _ = run_job(job(1, 1), tmp_path, resume=True)
    assert outcome.succeeded, outcome.reason
    rows = history(tmp_path, "ppo")
    assert sorted(rows) == [1, 2, 3, 4]
    assert {row["samples"] for row in rows.values()} == {16.0}
    assert [rows[i] for i in (1, 2)] == [before[i] for i in (1, 2)]
    (change,) = events(tmp_path, "trainers.changed")
    assert (change["stage"], change["new"][:2]) == ("ppo", "1 ")
    assert 2 <= change["step"] < 4
    result = CliRunner().invoke(cli, ["debug", "replay", str(tmp_path), "--iteration", "2"])
    assert result.exit_code == 2
    assert "iteration 2 was trained by other trainer ranks, 2 (actor: pp 2" in result.output
