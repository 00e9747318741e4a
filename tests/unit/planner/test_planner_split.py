"""Inference models that the planner splits over a pod's GPUs, and what the plan says of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from dovetail.cli.common.plan_tables import plan_tables
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.manifest.types import RLHFJob, RLHFJobSpec
from dovetail.planner.candidate import Candidate, Placement
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.search import Found, Limits, Rejected, Result, search_fewest_stages
from dovetail.planner.seconds import Estimate
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.env import ProcessEnv
from dovetail.rollout.scoring import scorer
from dovetail.rollout.serving import vllm_server as server

EXAMPLE = Path(__file__).parents[3] / "examples" / "rlhf-65b.yaml"
A100 = "NVIDIA-A100-SXM4-80GB"
# LLaMA 13B.
LARGE = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
MODELS = ("reference", "reward", "critic")


def spec(product: str = A100, per_pod: int = 2, **plan: object) -> RLHFJobSpec:
    """13B models, two rollouts of `per_pod` GPUs."""
    document = yaml.safe_load(EXAMPLE.read_text())
    source = {"source": {"scratch": {"architecture": "llama", "config": LARGE}}}
    document["spec"]["models"] |= {"actor": source, "reward": source}
    trainers, rollouts = document["spec"]["groups"]
    trainers["replicas"] = 2
    rollouts |= {"gpu": {"product": product, "perPod": per_pod}, "replicas": 2}
    document["spec"]["plan"] = plan
    return resolve(parse(document).spec)


@pytest.fixture(scope="module")
def example() -> tuple[RLHFJob, Plan]:
    job = parse(yaml.safe_load(EXAMPLE.read_text()))
    job = job.model_copy(update={"spec": resolve(job.spec)})
    return job, make_plan(job.spec)


def test_the_65b_reference_is_split_over_a_pods_gpus_and_all_fits(example: tuple[RLHFJob, Plan]) -> None:
    _, plan = example
    assert plan.prediction is not None
    for memory in plan.prediction.memory:
        assert sum(memory.parts.values()) <= memory.capacity
    # One GPU has no room for the reference (121 GiB), two have none for it beside the server.
    references = [r.split["reference"] for r in plan.rollouts if "reference" in r.scores]
    assert references == [4] * len(references)
    assert references
    assert all(set(r.split) <= set(r.scores) for r in plan.rollouts)
    assert all(count <= 8 for r in plan.rollouts for count in r.split.values())


def test_the_server_leaves_the_scorer_its_part_of_the_memory(example: tuple[RLHFJob, Plan]) -> None:
    _, plan = example
    assert plan.prediction is not None
    cells = [m for m in plan.prediction.memory if any(name.startswith("reference:") for name in m.parts)]
    assert cells
    for cell in cells:
        scored = sum(size for name, size in cell.parts.items() if name.startswith(MODELS))
        served = sum(size for name, size in cell.parts.items() if name.startswith("generation:"))
        share = next(r.memory for r in plan.rollouts if "reference" in r.scores)
        assert share is not None
        assert served < share * cell.capacity < cell.capacity - scored


def test_the_plans_table_says_over_how_many_gpus(example: tuple[RLHFJob, Plan]) -> None:
    text = io.StringIO()
    Console(file=text, width=200).print(plan_tables(example[1]))
    rows = [line.split() for line in text.getvalue().splitlines() if "trainer rank" in line]
    assert [" ".join(row) for row in rows] == ["trainer-0 to trainer-79 │ trainers │ trainer ranks 0 to 79 of 80"], (
        "processes of a kind are in one row"
    )
    assert "reference (on 4 GPUs) inference" in text.getvalue()


def test_scorers_and_servers_take_what_the_plan_says(example: tuple[RLHFJob, Plan], tmp_path: Path) -> None:
    job, plan = example
    (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True))
    (tmp_path / "plan.json").write_text(plan.model_dump_json(by_alias=True))
    # A rollout that came later than the plan is like the others of its group.
    env = ProcessEnv("job", "rollouts-9-scorer", tmp_path, "http://x", "t", "127.0.0.1", 0, 0, "rollouts", 0, 1)
    settings = scorer.read_settings(env)
    assert settings.split == {"reference": 4, "reward": 4, "critic": 4}
    assert scorer.devices_for(settings, None, 8) == [f"cuda:{k}" for k in range(4)]
    planned = server.planned_server(env.plan_file, "rollouts")
    assert planned is not None
    arguments = server.vllm_arguments(env, job, job.spec.groups[1], {}, False, "bfloat16", planned.pp, planned.memory)
    assert arguments[arguments.index("--gpu-memory-utilization") + 1] == str(planned.memory)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"plan\.json is not a plan"):
        scorer.read_settings(env)


@pytest.mark.slow
def test_models_that_fit_stay_whole() -> None:
    plan = make_plan(spec("NVIDIA-B200", per_pod=2))
    assert [r.split for r in plan.rollouts] == [{}, {}]


@pytest.mark.slow
def test_models_are_split_over_as_few_gpus_as_they_need() -> None:
    # Three models of 24 GiB beside the server: not on one of these, but on two.
    plan = make_plan(spec(per_pod=4, placement="Separation"))
    assert [max(r.split.values()) for r in plan.rollouts] == [2, 2]
    with pytest.raises(PlanError, match="rollouts"):
        make_plan(spec(per_pod=1, placement="Separation"))


def test_the_plan_says_why_fewer_gpus_do_not_do(example: tuple[RLHFJob, Plan]) -> None:
    prediction = example[1].prediction
    assert prediction is not None
    against = {a.note: a.problem for a in prediction.alternatives}
    whole = next(problem for note, problem in against.items() if note.endswith("inference models whole"))
    two = next(problem for note, problem in against.items() if note.endswith("inference models on at most 2 GPUs"))
    assert str(whole).startswith("reference on rollouts[0:3] needs 130.2 GiB per GPU, 80.0 GiB there")
    assert "reference: weights 60.8" in str(two)
    tasks = [task for task in prediction.tasks if task.task in MODELS]
    assert [task.details for task in tasks] == [["split over 4 GPUs"]] * len(tasks)


@pytest.mark.parametrize(
    ("fits", "most", "allowed", "expected"),
    [(1, 8, 16, 1), (2, 8, 16, 2), (3, 8, 16, 4), (8, 8, 16, 8), (9, 8, 16, 8), (4, 8, 2, 2), (1, 1, 16, 1)],
)
def test_stages_are_doubled_until_something_fits(fits: int, most: int, allowed: int, expected: int) -> None:
    asked: list[int] = []

    def search(limits: Limits) -> Result:
        asked.append(limits.inference_pp)
        candidate = Candidate(Placement.SEPARATION, (), ())
        fitting = Found(candidate, Estimate({}, (), None)) if limits.inference_pp >= fits else None
        return Result(fitting, [Rejected(candidate, problem=f"{asked[-1]} are too few")])

    result, limits = search_fewest_stages(replace(Limits(), inference_pp=allowed), most, search)
    assert asked == [2**k for k in range(len(asked))]
    assert limits.inference_pp == asked[-1] == expected
    assert (result.best is not None) == (fits <= expected)
    if result.best is not None:
        assert [r.problem for r in result.rejected[1:]] == [f"{stages} are too few" for stages in asked[:-1]]
