"""The placement of a manifest: on its own groups, and the groups that an inventory would allow."""

import pytest
import yaml

from dovetail.cli.planning import server_pods
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool, read
from dovetail.manifest.checks.rules import check
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism, RLHFJobSpec
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.placements import Unknown, fragment, recommend
from dovetail.planner.planned_job import ConfigError, Infeasible, PlannedJob
from dovetail.protocol.plan import Plan
from helpers.example_jobs import EXAMPLES, recommended

SMALL = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 16, "num_attention_heads": 16}
# Large enough for a decode step to be more than the host's own time, at which layouts tie.
MEDIUM = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LARGE = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
A100, V100, A10 = "NVIDIA-A100-SXM4-80GB", "Tesla-V100-SXM2-32GB", "NVIDIA-A10"


def group(name, roles, product=A100, per_pod=1, replicas=1):
    return {"name": name, "roles": roles, "gpu": {"product": product, "perPod": per_pod}, "replicas": replicas}


SEPARATE = [group("train", ["trainer"], per_pod=4), group("gen", ["rollout"], replicas=4)]


def spec(groups=SEPARATE, config=SMALL, **changes) -> RLHFJobSpec:
    document = yaml.safe_load((EXAMPLES / "quickstart-cluster.yaml").read_text())
    document["spec"]["models"] = {
        "actor": {"source": {"scratch": {"architecture": "llama", "config": config}}},
        "tokenizer": {"train": {"vocabSize": 32000}},
    }
    document["spec"]["groups"] = groups
    document["spec"]["stages"] = ["reward", "ppo"]
    document["spec"]["reward"] = {"batchSize": 32, "microBatchSize": 2}
    document["spec"]["ppo"] |= {"microBatchSize": 2}
    for name, value in changes.items():
        document["spec"][name] = document["spec"].get(name, {}) | value if isinstance(value, dict) else value
    read = parse(document).spec
    assert check(read) == []
    return resolve(read)


def test_the_cluster_example_is_predicted_with_memory_by_part_and_alternatives():
    plan = make_plan(resolve(parse(yaml.safe_load((EXAMPLES / "quickstart-cluster.yaml").read_text())).spec))
    found = plan.prediction
    assert found is not None
    assert {(t.task, t.group) for t in found.tasks} >= {("generation", "v100"), ("generation", "a10")}
    assert {t.group for t in found.tasks if t.task.endswith("_training")} == {"a100"}
    assert found.samples_per_second == pytest.approx(128 / found.iteration_seconds)
    assert sum(found.phases.values()) == pytest.approx(found.iteration_seconds)
    assert found.hardware == "data sheets"
    for memory in found.memory:
        assert 0 < sum(memory.parts.values()) <= memory.capacity
    assert all((a.seconds is None) != (a.problem is None) for a in found.alternatives)
    assert Plan.model_validate_json(plan.model_dump_json(by_alias=True)) == plan


def test_pipeline_stages_come_where_a_model_does_not_fit_without():
    rollouts = group("gen", ["rollout"], "NVIDIA-B200", replicas=2)
    large = make_plan(spec(config=LARGE, groups=[group("t", ["trainer"], per_pod=8), rollouts]))
    assert large.parallelism["actor"].pp > 1
    assert world_size(large.parallelism["actor"]) == 8
    assert large.warnings == []
    assert large.prediction is not None


@pytest.mark.parametrize(
    ("config", "product", "batch", "told"),
    [
        (SMALL, A100, 16, "on the first of them. With gpu.perPod 2 and replicas 2 an iteration would take 0."),
        (SMALL, A100, 512, "on the first of them. With gpu.perPod 1 and replicas 4 an iteration would take 2."),
        (MEDIUM, A10, 16, "on the first 4. Smaller pods on the same GPUs would not be faster."),
    ],
)
def test_pods_of_several_gpus_are_one_server_each_and_told_with_faster_ones(config, product, batch, told):
    groups = [group("train", ["trainer"], per_pod=4), group("gen", ["rollout"], product, per_pod=4)]
    job = spec(groups, config, ppo={"globalBatchSize": batch, "miniBatchSize": batch})
    (found,) = server_pods(job, make_plan(job), make_plan)
    assert found.startswith("Each pod of group gen is one server on its 4 GPUs, with reference, reward, critic ")
    assert told in found


def test_pods_of_one_gpu_are_not_spoken_of():
    job = spec()
    assert list(server_pods(job, make_plan(job), make_plan)) == []


def test_a_plan_warns_of_rollouts_that_the_coordinator_cannot_follow():
    """Many short responses: each sample costs the coordinator the same, however short."""
    sizes = {"globalBatchSize": 2048, "miniBatchSize": 2048}
    groups = [group("train", ["trainer"], per_pod=4), group("gen", ["rollout"], replicas=8)]
    (warning,) = make_plan(spec(groups, ppo=sizes, generation={"maxTokens": 8})).warnings
    assert "the coordinator follows about" in warning
    assert "tokens a second" in warning
    larger = [group("train", ["trainer"], per_pod=8), group("gen", ["rollout"], replicas=8)]
    assert make_plan(spec(larger, MEDIUM)).warnings == []


def test_groups_that_are_too_small_are_refused_with_the_number_and_what_helps():
    with pytest.raises(
        PlanError, match=r"needs [\d.]+ GiB per GPU on group t, 32.0 GiB there \(most: .*use GPUs of at least 40 GiB"
    ):
        make_plan(spec(config=LARGE, groups=[group("t", ["trainer"], V100, 4), SEPARATE[1]]))
    with pytest.raises(PlanError, match=r"(generation|reference) on gen\[0:4\].*GiB.*(more memory|offload)"):
        make_plan(spec(config=LARGE, groups=[group("t", ["trainer"], per_pod=8), group("gen", ["rollout"], A10, 1, 4)]))


def test_remedies_lead_from_a_pinned_layout_to_one_that_fits():
    groups = [group("t", ["trainer"], A10, 8), group("gen", ["rollout"], "NVIDIA-B200", replicas=2)]
    with pytest.raises(PlanError, match=r"on group t, 22.5 GiB there .*; set spec.plan.parallelism to Auto$"):
        make_plan(spec(config=MEDIUM, groups=groups, plan={"parallelism": {"actor": {"dp": 8}}}))
    with pytest.raises(PlanError, match=r"; set spec.ppo.actorOptimizer.offload and spec.ppo.criticOptimizer.offload"):
        make_plan(spec(config=MEDIUM, groups=groups))
    offload = {f"{model}Optimizer": {"offload": True} for model in ("actor", "critic")}
    assert make_plan(spec(config=MEDIUM, groups=groups, ppo=offload)).prediction is not None


def test_pins_are_kept_and_contradictions_named():
    pinned = spec(plan={"parallelism": {"actor": {"pp": 2, "dp": 2}}, "interStageFusion": 0.3})
    found = make_plan(pinned)
    assert found.parallelism["actor"] == Parallelism(pp=2, dp=2)
    assert found.prediction is not None
    assert found.prediction.migration == 0.3
    with pytest.raises(PlanError, match="placement is Flattening, but no group both trains and generates"):
        make_plan(spec(plan={"placement": "Flattening"}))
    both = [group("all", ["trainer", "rollout"], per_pod=4)]
    with pytest.raises(PlanError, match="placement is Separation, but group all both trains and generates"):
        make_plan(spec(groups=both, plan={"placement": "Separation"}))


def test_unknown_products_and_configurations_are_named():
    with pytest.raises(PlanError, match=r"spec.groups\[1\].gpu.product: GPU product A100 is unknown; did you mean NV"):
        make_plan(spec(groups=[SEPARATE[0], group("gen", ["rollout"], "A100")]))
    foreign = spec().model_copy(deep=True)
    data = foreign.model_dump(by_alias=True, mode="json")
    data["models"]["actor"]["source"] = {"path": "/models/bert"}
    read = RLHFJobSpec.model_validate(data)
    assert make_plan(read).prediction is None  # nothing is known of it
    with pytest.raises(ConfigError, match=r"spec.models.actor.source: model type 'bert' is not supported"):
        PlannedJob(read, {"actor": {"model_type": "bert"}}).shape("actor")
    with pytest.raises(PlanError, match=r"spec.models.actor.source: the model's hidden_size is 'wide'"):
        make_plan(read, configs={"actor": {"model_type": "llama", "hidden_size": "wide"}})


def test_a_pinned_interleaving_is_predicted_with_halves():
    found = make_plan(spec(plan={"placement": "Interleaving"}))
    assert found.prediction is not None
    assert found.prediction.placement == "Interleaving"
    reference = [t for t in found.prediction.tasks if t.task == "reference"]
    reward = [t for t in found.prediction.tasks if t.task == "reward"]
    assert [(t.first, t.gpus) for t in reference] == [(0, 2)]
    assert [(t.first, t.gpus) for t in reward] == [(2, 2)]
    assert [r.scores for r in found.rollouts] == [["reference"]] * 2 + [["reward", "critic"]] * 2


def test_a_server_takes_what_the_trainers_beside_it_leave():
    """They keep weights, moments and, until the weights are sent, gradients."""
    both = [group("all", ["trainer", "rollout"], per_pod=1, replicas=4)]
    plan = make_plan(spec(groups=both))
    assert plan.prediction is not None
    for cell in plan.prediction.memory:
        parts = [(name.partition("_training: ")[2], size) for name, size in cell.parts.items()]
        kept = sum(size for name, size in parts if name in ("weights", "optimizer", "moving average"))
        assert kept > 0.05 * cell.capacity
        for rollout in plan.rollouts:
            assert rollout.memory is not None
            assert 0.05 < rollout.memory <= 0.92 - kept / cell.capacity
    assert [t.details for t in plan.prediction.tasks if t.task == "generation"] == [["asleep while others work"]]
    assert [t.details for t in plan.prediction.tasks if t.task == "reference"] == [["weights wait in host memory"]]


def test_colocated_groups_are_flattened():
    both = [group("all", ["trainer", "rollout"], per_pod=1, replicas=4)]
    found = make_plan(spec(groups=both, plan={"placement": "Flattening"})).prediction
    assert found is not None
    assert found.placement == "Flattening"
    assert {(t.first, t.gpus) for t in found.tasks} == {(0, 4)}


# ------------------------------------------------------------ inventories


@pytest.mark.slow
def test_the_recommended_groups_make_a_manifest_whose_plan_is_the_recommended_one():
    there = read({"pools": [{"name": "a100", "product": A100, "gpusPerNode": 8, "pricePerGPUHour": 2}]})
    job = spec(config=MEDIUM)
    chosen = recommend(job, {}, there)
    assert chosen.prediction.samples_per_dollar is not None
    written = fragment(chosen)
    data = job.model_dump(by_alias=True, mode="json")
    data["groups"] = written["groups"]
    data["ppo"] |= written["ppo"]
    data["plan"] |= written["plan"]
    again = RLHFJobSpec.model_validate(data)
    assert check(again) == []
    plan = make_plan(resolve(again))
    assert plan.prediction is not None
    # Pods of one job are taken to be on nodes of their own, so messages between them take longer.
    assert plan.prediction.phases["generation"] == pytest.approx(chosen.prediction.phases["generation"], rel=0.1)
    assert plan.prediction.iteration_seconds < 3 * chosen.prediction.iteration_seconds
    assert {t.task: (t.pp, t.tp, t.dp) for t in plan.prediction.tasks} == {
        t.task: (t.pp, t.tp, t.dp) for t in chosen.prediction.tasks
    }


@pytest.mark.slow
@pytest.mark.parametrize(("config", "nodes", "per_node"), [(MEDIUM, 1, 4), (MEDIUM, 2, 4), (LARGE, 2, 4)])
def test_what_is_recommended_can_be_planned(config, nodes, per_node):
    """Trainers that share a server's pod have their tensor parallel ranks in it, and messages as slow as between
    pods."""
    job = spec(config=config)
    chosen = recommend(job, {}, Inventory((Pool("p", gpu(A100), nodes, per_node),)))
    data = job.model_dump(by_alias=True, mode="json")
    for field, value in fragment(chosen).items():
        data[field] = data[field] | value if isinstance(value, dict) else value
    again = RLHFJobSpec.model_validate(data)
    assert check(again) == []
    found = make_plan(resolve(again)).prediction
    assert found is not None
    assert found.phases["training"] < 1.2 * chosen.prediction.phases["training"]


@pytest.mark.slow
def test_more_gpus_are_never_slower():
    job = spec()
    seconds = [
        recommend(job, {}, Inventory((Pool("p", gpu(A100), n, 4),))).prediction.iteration_seconds for n in (1, 2, 4)
    ]
    assert seconds[2] <= seconds[1] <= seconds[0]


@pytest.mark.slow
def test_what_trainers_and_scorers_cannot_run_is_no_plan():
    """65B models fit on 16 GPUs, but only with weights of scorers that wait in host memory."""
    job = resolve(parse(yaml.safe_load((EXAMPLES / "rlhf-65b.yaml").read_text())).spec)
    with pytest.raises(Infeasible, match=r"a100.* needs [\d.]+ GiB per GPU.*add GPUs"):
        recommend(job, {}, Inventory((Pool("a100", gpu(A100), 2, 8),)))


def inventory(name):
    return read(yaml.safe_load((EXAMPLES / "inventories" / f"{name}.yaml").read_text()))


@pytest.mark.slow
def test_a_65b_job_on_128_gpus_is_planned():
    assert inventory("a100x128").gpus == 128
    chosen = recommended("rlhf-65b", "a100x128")
    assert all(t.pp > 1 and t.tp == 1 for t in chosen.prediction.tasks if t.task in ("reference", "reward", "critic"))


def test_an_inventory_that_is_too_small_or_a_job_without_ppo_is_refused():
    with pytest.raises(ValueError, match=r"needs [\d.]+ GiB per GPU.*(most: .*).*add GPUs"):
        recommend(spec(config=LARGE), {}, Inventory((Pool("p", gpu("Tesla-T4"), 1, 1),)))
    with pytest.raises(Unknown, match="has no ppo"):
        recommend(spec(stages=["reward"]), {}, Inventory((Pool("p", gpu(A100), 1, 8),)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "quickstart-cluster", "rlhf-65b"])
def test_an_examples_recommended_groups_are_a_valid_manifest(name):
    """Of all its stages: SFT and the reward model share the layouts that are pinned."""
    document = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    chosen = recommended(name, "a100x128" if name == "rlhf-65b" else "a100-v100-a10")
    for field, value in fragment(chosen).items():
        document["spec"][field] = document["spec"].get(field, {}) | value if isinstance(value, dict) else value
    own = parse(document).spec
    assert check(own) == []
    found = make_plan(resolve(own)).prediction
    assert found is not None
    assert (found.placement, found.schedule) == (chosen.prediction.placement, chosen.prediction.schedule)


def test_stages_without_iterations_have_a_duration_on_gpus():
    """Within what the FLOPs of their tokens allow. DPO has a forward pass of the reference more than it trains."""
    steps, batch, tokens = 40, 64, 1024

    def plan(**changes) -> Plan:
        own = {"stages": ["sft", "dpo"], "data": {"maxTokens": tokens}, "sft": {"steps": steps, "batchSize": batch}}
        dpo = {"steps": steps, "batchSize": batch // 2, "microBatchSize": 2}
        return make_plan(spec(groups=SEPARATE[:1], **own | {"dpo": dpo} | changes))

    sft, dpo = plan().stages
    assert [(each.stage.value, each.steps) for each in (sft, dpo)] == [("sft", steps), ("dpo", steps)]
    shape = PlannedJob(spec()).shape("actor")
    flops = 4 * gpu(A100).training.flops["bfloat16"]
    forward = 2 * shape.parameters("lm") * batch * tokens / flops
    assert 3 * forward < sft.step_seconds < 3 * 3 * forward
    assert 4 * forward < dpo.step_seconds < 3 * 4 * forward
    assert dpo.step_seconds / sft.step_seconds == pytest.approx(4 / 3, rel=0.1)
    (alone,) = plan(stages=["dpo"], dpo={"batchSize": batch, "microBatchSize": 2}).stages
    assert alone.step_seconds == pytest.approx(2 * dpo.step_seconds, rel=0.1)
    assert alone.steps is None
    # A job with PPO tells its earlier stages too. One on CPUs has nothing to tell, and its plan stays as it was.
    before_ppo = make_plan(spec(stages=["sft", "reward", "ppo"]))
    assert [each.stage.value for each in before_ppo.stages] == ["sft", "reward"]
    assert "stages" not in make_plan(spec(groups=[{"name": "all", "roles": ["trainer", "rollout"]}])).model_dump()


def test_a_stages_duration_counts_adapters_and_moments_in_host_memory():
    """LoRA trains few parameters. Moments in host memory travel over PCIe twice in a step, 8 bytes a parameter."""

    def seconds(lora=None, offload=False) -> float:
        actor = {"source": {"scratch": {"architecture": "llama", "config": MEDIUM}}, "lora": lora}
        sft = {
            "steps": 40,
            "batchSize": 64,
            "microBatchSize": 1,
            "optimizer": {"learningRate": 1e-5, "offload": offload},
        }
        groups = [group("train", ["trainer"], per_pod=8)]
        models = {"actor": actor, "tokenizer": {"train": {"vocabSize": 32000}}}
        pins = {"parallelism": {"actor": {"dp": 8}}}
        (stage,) = make_plan(spec(groups, models=models, stages=["sft"], sft=sft, plan=pins)).stages
        return stage.step_seconds

    moments = 8 * PlannedJob(spec(config=MEDIUM)).shape("actor").parameters("lm") / 8
    assert seconds(offload=True) - seconds() > 2 * moments / gpu(A100).pcie
    assert seconds(lora={"rank": 8}) < seconds() - moments / gpu(A100).memory_bandwidth
