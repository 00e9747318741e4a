"""Where plans have activation checkpointing: as pinned, and where memory asks for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from dovetail.cli.common.plan_tables import plan_tables
from dovetail.coordinator.schedules.scheduling import Scheduling
from dovetail.manifest.types import RLHFJob, RLHFJobSpec, Stage
from dovetail.pipelines import FAMILIES
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.placements import supervised
from dovetail.planner.planned_job import PlannedJob

EXAMPLES = Path(__file__).parents[3] / "examples"
A100 = "NVIDIA-A100-SXM4-80GB"
LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
}
SMALL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}


def on_gpus(tokens: int = 1024, micro: int = 1, stages: list[str] | None = None, **plan: Any) -> RLHFJobSpec:
    """7B on 8 A100s, which keep the activations of one sequence of 1,024 tokens and not those of 8,192."""
    document = {
        "stages": stages or ["sft", "ppo"],
        "models": {
            "actor": {"source": {"scratch": {"architecture": "llama", "config": LLAMA_7B}}},
            "reward": {"function": "rewards:score"},
            "tokenizer": {"train": {"vocabSize": 32000}},
        },
        "data": {"maxTokens": tokens, "maxPromptTokens": 256},
        "sft": {"batchSize": 64, "microBatchSize": micro},
        "ppo": {"globalBatchSize": 64, "miniBatchSize": 64, "microBatchSize": 1, "advantage": "grpo"},
        "generation": {"maxTokens": 256},
        "groups": [
            {"name": "t", "roles": ["trainer"], "gpu": {"product": A100, "perPod": 8}},
            {"name": "r", "roles": ["rollout"], "gpu": {"product": A100, "perPod": 1}, "replicas": 8},
        ],
        "plan": {"parallelism": {"actor": {"dp": 8}}} | plan,
    }
    return RLHFJobSpec.model_validate(document)


def on_cpus(**plan: Any) -> RLHFJobSpec:
    document = {
        "stages": ["sft", "ppo"],
        "models": {"actor": {"source": {"scratch": {"architecture": "llama", "config": SMALL}}}},
        "groups": [{"name": "t", "roles": ["trainer"], "replicas": 2}, {"name": "r", "roles": ["rollout"]}],
        "ppo": {"globalBatchSize": 32, "miniBatchSize": 32, "microBatchSize": 4, "epochs": 1},
        "plan": {"parallelism": {"actor": {"pp": 2}}, **plan},
    }
    return RLHFJobSpec.model_validate(document)


def again(spec: RLHFJobSpec) -> list[tuple[Stage, str]]:
    return [(row.stage, row.model) for row in make_plan(spec).batching if row.recompute]


def test_it_is_done_in_the_stages_that_do_not_fit_without() -> None:
    assert again(on_gpus()) == []
    assert again(on_gpus(tokens=8192, micro=1)) == [(Stage.SFT, "actor")]
    assert again(on_gpus(recompute="Always")) == [(Stage.SFT, "actor"), (Stage.PPO, "actor")]
    with pytest.raises(PlanError, match=r"sft needs [\d.]+ GiB .*activations.*; set spec.plan.recompute to Auto$"):
        make_plan(on_gpus(tokens=8192, recompute="Never", zero3="Never"))


def test_ppo_s_plan_says_it_with_the_memory_and_a_third_more_time() -> None:
    predictions = [make_plan(on_gpus(stages=["ppo"], recompute=way)).prediction for way in ("Always", "Never")]
    always, never = (next(t for t in p.tasks if t.task == "actor_training") for p in predictions if p is not None)
    assert "activation checkpointing" in always.details
    assert "activation checkpointing" not in never.details
    assert never.seconds < always.seconds < 1.4 * never.seconds
    parts = {name for memory in predictions[0].memory for name in memory.parts} if predictions[0] else set()
    assert "actor_training: a layer's backward" in parts


@pytest.mark.parametrize(("replicas", "models"), [(10, set()), (8, {"actor"})])
def test_the_65b_example_trains_on_its_own_groups_and_on_fewer(replicas: int, models: set[str]) -> None:
    spec = RLHFJob.model_validate(yaml.safe_load((EXAMPLES / "rlhf-65b.yaml").read_text())).spec
    groups = [g.model_copy(update={"replicas": replicas}) if g.name == "trainers" else g for g in spec.groups]
    spec = spec.model_copy(update={"groups": groups})
    job = PlannedJob(spec)
    for model in ("actor", "critic", "reward"):
        # Without tensor parallelism, with which even fewer would do.
        fitting = [f for f in supervised(job, model) if f.layout.tp == 1]
        assert fitting
        assert (Stage.PPO in fitting[0].recompute) is (model in models), (model, fitting)


def test_on_cpus_the_limit_of_activation_memory_decides() -> None:
    sizes = make_plan(on_cpus(recompute="Never")).activation_bytes
    smaller = make_plan(on_cpus(recompute="Always")).activation_bytes
    assert all(4 * max(smaller[model]) < min(sizes[model]) for model in sizes)
    assert again(on_cpus()) == []
    limit = 0.9 * min(min(each) for each in sizes.values()) / 2**30
    assert again(on_cpus(activationMemory=limit)) == [(Stage.PPO, "actor"), (Stage.PPO, "critic")]
    assert make_plan(on_cpus(activationMemory=limit)).activation_bytes == smaller
    with pytest.raises(PlanError, match=r"activationMemory is .* needs; set spec.plan.recompute to Auto, raise it, or"):
        make_plan(on_cpus(activationMemory=limit, recompute="Never"))
    with pytest.raises(PlanError, match=r"activationMemory is .* needs; raise it, or lower spec.ppo.microBatchSize"):
        make_plan(on_cpus(activationMemory=limit / 100))


def test_the_table_of_batches_says_it() -> None:
    console = Console(width=160)
    with console.capture() as shown:
        console.print(plan_tables(make_plan(on_cpus(recompute="Always"))))
    assert shown.get().count("recomputed") == 3
    with console.capture() as shown:
        console.print(plan_tables(make_plan(on_cpus())))
    assert "recomputed" not in shown.get()


def chosen(spec: RLHFJobSpec, folder: Path) -> dict[str, Any]:
    """The schedule.json of a job that begins."""

    class Records(dict[str, Any]):
        def put(self, key: str, value: object) -> None:
            self[key] = value

    asyncio.run(Scheduling(spec, make_plan(spec), Records(), folder, lambda *_, **__: None).begin())
    found: dict[str, Any] = json.loads((folder / "schedule.json").read_text())
    return found


def test_schedules_that_split_backwards_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.coordinator.schedules.scheduling.SEARCH_SECONDS", 0.2)
    written = chosen(on_cpus(recompute="Always"), tmp_path)
    split = {name for name, family in FAMILIES.items() if family.split}
    assert "fused" in written["families"]
    assert not split & set(written["families"])
    assert all("spec.plan.recompute" in written["refused"][name] for name in split)
    assert "fused-v-whole" in written["families"], "Auto may put two stages on a rank"
    assert written["families"]["fused-v-whole"]["runs_here"] == (written["chosen"] == "fused-v-whole")


def test_stages_in_a_v_run_whole_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the manifest pins it, or as its limit of memory asks for it."""
    monkeypatch.setattr("dovetail.coordinator.schedules.scheduling.SEARCH_SECONDS", 0.2)
    whole = min(min(each) for each in make_plan(on_cpus(recompute="Never")).activation_bytes.values())
    for plan in ({"recompute": "Always"}, {"activationMemory": 0.9 * whole / 2**30}):
        spec = on_cpus(intraStageFusion="VShaped", **plan)
        assert make_plan(spec).chunks == 2
        assert again(spec)[-2:] == [(Stage.PPO, "actor"), (Stage.PPO, "critic")]
        assert chosen(spec, tmp_path)["chosen"] == "fused-v-whole"


def test_on_gpus_stages_in_a_v_take_the_time_and_the_memory_of_whole_backwards() -> None:
    def planned(recompute: str) -> tuple[float, float]:
        document = on_gpus(stages=["ppo"], recompute=recompute, intraStageFusion="VShaped").model_dump(
            mode="json", by_alias=True
        )
        document["ppo"] |= {"advantage": "gae", "samplesPerPrompt": 1}
        document["plan"]["parallelism"] = {"actor": {"pp": 4, "dp": 2}}
        plan = make_plan(RLHFJobSpec.model_validate(document))
        assert (plan.schedule, plan.chunks) == ("VShaped", 2)
        assert plan.recomputed(Stage.PPO) == (["actor", "critic"] if recompute == "Always" else [])
        assert plan.prediction is not None
        parts = next(memory.parts for memory in plan.prediction.memory if memory.group == "t")
        training = next(t for t in plan.prediction.tasks if t.task == "actor_training")
        return training.seconds, sum(s for name, s in parts.items() if name.endswith("activations of both models"))

    (slow, small), (fast, large) = planned("Always"), planned("Never")
    assert 1.1 * fast < slow < 1.6 * fast, "each layer has one more forward pass"
    assert small < large / 4
