"""Write tests/golden/plan-decisions.json anew: what the planner decides for the examples and for jobs drawn at random.

python tests/golden/make_decisions.py            # the file
python tests/golden/make_decisions.py --all FILE # more jobs, for a large change: record before, compare after

A job's record is a hash of the plan without its floats, and one number that sums the floats up. Look at the difference
before you commit a new file: a change of words changes a hash, a change of the models of time changes the sum.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from dovetail.coordinator.samples.fusion.threshold import ThresholdController
from dovetail.fusion.profile import StageProfile
from dovetail.gpus.inventory import read
from dovetail.manifest.checks.rules import check
from dovetail.manifest.documents import ManifestError, parse
from dovetail.manifest.resolve import resolve
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.planner.make_plan import PlanError, make_plan
from dovetail.planner.placements import recommend
from dovetail.planner.planned_job import Chosen, Infeasible, PlannedJob
from dovetail.protocol.files.machine_profile import (
    Cost,
    GenerationCosts,
    Machine,
    ModelTimes,
    PassTimes,
    Profile,
    ScoringCosts,
    TrainingCosts,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.example_jobs import EXAMPLES, hub_configs
from helpers.example_jobs import recommended as on_example

FILE = Path(__file__).parent / "plan-decisions.json"
PRODUCTS = ("NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3", "NVIDIA-B200", "Tesla-V100-SXM2-32GB", "NVIDIA-A10")
# Hidden and intermediate size, layers, heads, key heads.
SIZES = ((512, 1376, 4, 8, 4), (2048, 5504, 16, 16, 16), (4096, 11008, 32, 32, 8), (5120, 13824, 40, 40, 40))
TINY = (128, 384, 4, 4, 2)

Record = dict[str, str | float]


def digest(document: Any) -> Record:
    """A hash of a JSON document without its floats, and the sum of the floats' logarithms."""
    floats: list[float] = []

    def stripped(value: Any) -> Any:
        if isinstance(value, float):
            floats.append(value)
            return None
        if isinstance(value, dict):
            return {k: stripped(v) for k, v in value.items()}
        return [stripped(v) for v in value] if isinstance(value, list | tuple) else value

    text = json.dumps(stripped(document), sort_keys=True)
    total = math.fsum(math.log(abs(x)) for x in floats if x and math.isfinite(x))
    return {"plan": hashlib.sha256(text.encode()).hexdigest()[:12], "floats": round(total, 6)}


def examples() -> Iterator[tuple[str, Record]]:
    for path in sorted(EXAMPLES.glob("*.yaml")):
        spec = resolve(parse(yaml.safe_load(path.read_text())).spec)
        configs = hub_configs(path.stem)
        yield path.stem, planned(spec, configs)
        for inventory in sorted((EXAMPLES / "inventories").glob("*.yaml")):
            if Stage.PPO in spec.stages and (path.stem == "rlhf-65b") == (inventory.stem == "a100x128"):
                yield f"{path.stem} on {inventory.stem}", recommended(partial(on_example, path.stem, inventory.stem))


def planned(spec: RLHFJobSpec, configs: Any = None, profile: Profile | None = None) -> Record:
    try:
        return digest(make_plan(spec, None, configs or {}, None, profile).model_dump(mode="json"))
    except PlanError as error:
        return digest(str(error))


def recommended(search: Callable[[], Chosen], play: bool = False) -> Record:
    """`play`: also the iteration event by event, which compiles the search of schedules."""
    try:
        chosen = search()
    except Infeasible as error:
        return digest(str(error))
    played = []
    if play:
        from dovetail.cli.simulated_iteration import simulate

        work = chosen.costs.work
        prompts, responses = work.prompt.quantiles(work.batch), work.response.quantiles(work.batch)
        made = simulate(chosen.candidate, chosen.costs, prompts, responses)
        played = [made.phases, made.migrated, [list(bar) for bar in made.bars]]
    return digest([chosen.prediction.model_dump(mode="json"), str(chosen.candidate), [], played])


# ------------------------------------------------------------ jobs drawn at random


def drawn(seed: int, gpus: bool) -> RLHFJobSpec | None:
    """A job; None where the rules refuse it."""
    rng = random.Random(seed)
    document = yaml.safe_load((EXAMPLES / "quickstart-cluster.yaml").read_text())
    spec = document["spec"]
    some = rng.choice
    architecture = some(["llama", "llama", "qwen2", "qwen3", "opt"])
    spec["models"] = {
        "actor": {
            "source": {
                "scratch": {
                    "architecture": architecture,
                    "config": sizes(some(SIZES if gpus else [TINY]), architecture),
                }
            }
        },
        "tokenizer": {"train": {"vocabSize": 32000 if gpus else 512}},
    }
    models = spec["models"]
    if rng.random() < 0.2:
        models["actor"]["lora"] = {"rank": 8}
    if rng.random() < 0.2:
        models["critic"] = some([{"shareActorBody": True}, {"lora": {"rank": 4}}])
    if "shareActorBody" in models.get("critic", {}):
        del spec["ppo"]["criticOptimizer"]
    if rng.random() < 0.2:
        models["reward"] = {"function": "rewards:length"}
    spec["stages"] = some([["sft", "reward", "ppo"], ["reward", "ppo"], ["reward", "ppo"], ["sft"]])
    if "function" in models.get("reward", {}):
        spec["stages"] = [stage for stage in spec["stages"] if stage != "reward"]
    micro = some([1, 2, 4])
    spec["sft"]["batchSize"] = spec["reward"]["batchSize"] = some([32, 64])
    spec["sft"]["microBatchSize"] = spec["reward"]["microBatchSize"] = some([1, 2])
    mini = some([32, 64]) if gpus else 16
    spec["ppo"] |= {"globalBatchSize": mini * some([1, 2, 4]), "miniBatchSize": mini, "microBatchSize": micro}
    spec["ppo"] |= some([{}, {}, {"epochs": 2}, {"samplesPerPrompt": 4}, {"ema": 0.99}])
    spec["ppo"] |= some([{}, {}, {"advantage": "grpo", "samplesPerPrompt": 4}, {"oldLogProbs": "Recompute"}])
    if rng.random() < 0.3 and "shareActorBody" not in models.get("critic", {}):
        for name in ("actorOptimizer", "criticOptimizer"):
            spec["ppo"][name] = {"offload": gpus}
    spec["data"]["maxPromptTokens"], spec["data"]["maxTokens"] = (some([128, 512]), 1024) if gpus else (32, 64)
    spec["generation"] = {"maxTokens": some([256, 1024]) if gpus else 32, "maxConcurrent": some([16, 64])}
    spec["groups"] = groups(rng, gpus)
    spec["plan"] = plan_pins(rng, spec["groups"])
    try:
        read = parse(document).spec
    except (ManifestError, ValidationError):
        return None
    return None if check(read) else resolve(read)


def sizes(size: tuple[int, ...], architecture: str) -> dict[str, Any]:
    hidden, inner, layers, heads, keys = size
    found = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    if architecture == "opt":
        return {**found, "ffn_dim": inner, "max_position_embeddings": 2048}
    return {**found, "intermediate_size": inner, "num_key_value_heads": keys}


def groups(rng: random.Random, gpus: bool) -> list[dict[str, Any]]:
    def group(name: str, roles: list[str], most: int) -> dict[str, Any]:
        found: dict[str, Any] = {"name": name, "roles": roles, "replicas": rng.choice([1, 2, most])}
        if gpus:
            product = rng.choice(PRODUCTS[:3] if "trainer" in roles else PRODUCTS)
            found["gpu"] = {"product": product, "perPod": rng.choice([1, 2, 4, 8])}
        return found

    if rng.random() < 0.3:
        return [group("both", ["trainer", "rollout"], 4)] + (
            [group("more", ["rollout"], 2)] if rng.random() < 0.4 else []
        )
    return [group("train", ["trainer"], 4), *(group(f"gen{i}", ["rollout"], 4) for i in range(rng.choice([1, 1, 2])))]


def plan_pins(rng: random.Random, groups: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    together = "both" in (group["name"] for group in groups)
    if rng.random() < 0.25:
        found["placement"] = rng.choice(["Interleaving", "Flattening" if together else "Separation"])
    if rng.random() < 0.3:
        found["intraStageFusion"] = rng.choice(["Fused", "TimeSharing", "Dedicated", "Serial"])
    if rng.random() < 0.25:
        found["interStageFusion"] = rng.choice(["Off", 0.2])
    if rng.random() < 0.3:
        found["recompute"] = rng.choice(["Always", "Never"])
    if rng.random() < 0.15:
        found["activationMemory"] = rng.choice([0.01, 0.5, 4.0])
    ranks = groups[0]["replicas"] * groups[0].get("gpu", {}).get("perPod", 1)
    if rng.random() < 0.2:
        pp = rng.choice([1, 2]) if ranks > 1 else 1
        found["parallelism"] = {"actor": {"pp": pp, "tp": 1, "dp": ranks // pp}}
    return found


def jobs(count: int, large: int, play: bool) -> Iterator[tuple[str, Record]]:
    """`count` drawn jobs on GPUs and as many on CPUs; of the first `large` also the best on an inventory."""
    inventory = read(yaml.safe_load((EXAMPLES / "inventories" / "a100-v100-a10.yaml").read_text()))
    for gpus in (True, False):
        kind = "gpu" if gpus else "cpu"
        for seed in range(count):
            spec = drawn(seed, gpus)
            if spec is None:
                continue
            yield f"{kind} {seed}", planned(spec, profile=None if gpus or seed % 3 == 0 else profile(spec, seed))
            if gpus and seed < large and "ppo" in spec.stages:
                yield f"{kind} {seed} on unlike GPUs", recommended(partial(recommend, spec, {}, inventory), play)


def profile(spec: RLHFJobSpec, seed: int) -> Profile:
    """A machine with costs drawn at random, measured with the job's models."""
    rng = random.Random(seed)
    known = PlannedJob(spec).shapes or {}

    def near(value: float) -> float:
        return value * rng.uniform(0.5, 2.0)

    passes = [
        PassTimes(
            micro_batch=1, forward=1e-3, backward=2e-3, input_gradient=1e-3, weight_gradient=1e-3, activation_bytes=4096
        )
    ]
    models = {
        name: ModelTimes(
            head="lm" if name == "actor" else "value",
            layers=shape.layers,
            hidden_size=shape.hidden,
            bytes_per_value=4,
            embedding_times=passes,
            layer_times=passes,
            head_times=passes,
        )
        for name, shape in known.items()
    }
    each = ("reference", "reward", "critic", "actor")
    return Profile(
        device="cpu",
        threads=1,
        tokens=64,
        models=models,
        machine=Machine(
            cores=rng.choice([1, 2, 8]),
            generation=GenerationCosts(begin=0.02, sample=near(4e-3), step=near(6e-3), token=near(4e-4), cores=1.4),
            scoring=ScoringCosts(begin=0.02, batch=near(0.02), token={m: near(1e-4) for m in each}, cores=1.2),
            training=TrainingCosts(
                begin=0.03,
                step=near(0.02),
                exchange=near(0.01),
                message=near(2e-3),
                models={m: Cost(fixed=near(0.01), each=near(2e-4)) for m in ("actor", "critic")},
                cores=1.3,
                straggling=0.05,
            ),
            weights=Cost(fixed=0.05, each=0.05),
            other=Cost(fixed=0.01, each=1e-4),
            prompt_tokens=16.0,
            end_rate=rng.choice([None, 0.05]),
        ),
    )


def controllers(count: int) -> Iterator[tuple[str, Record]]:
    """Migration thresholds over three iterations."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        instances, batch = int(rng.integers(1, 5)), int(rng.integers(16, 64))
        profiles = [
            StageProfile(
                decode=((1, 0.01), (32, 0.01 + 0.02 * float(rng.random()))),
                prefill_seconds_per_token=1e-5,
                inference_seconds_per_token=float(rng.uniform(1e-5, 1e-3)),
                inference_seconds_per_batch=0.01,
                swap_in_seconds=float(rng.choice([0.0, 0.2])),
                max_samples=int(rng.choice([8, 32])),
                kv_tokens=[None, 8192][int(rng.integers(2))],
            )
            for _ in range(instances)
        ]
        setting: Any = ["Auto", "Auto", "Off", 0.2][seed % 4]
        controller = ThresholdController(setting, 512, seed)
        found = []
        for _ in range(3):
            decision = controller.decide([64] * batch, profiles)
            found.append([decision.threshold, decision.roomy, decision.reason, decision.serial_seconds])
            found.append([decision.fused_seconds, decision.prediction.migrated, list(decision.prediction.idle_seconds)])
            controller.observe([int(n) for n in np.minimum(rng.geometric(0.02, batch), 512)])
        yield f"threshold {seed}", digest(found)


def decisions(count: int = 20, large: int = 2, play: bool = False) -> dict[str, Record]:
    """By name. `count`: jobs of a kind; `large`: of these, so many are also placed on an inventory."""
    return {**dict(examples()), **dict(jobs(count, large, play)), **dict(controllers(count // 5))}


if __name__ == "__main__":
    everything = "--all" in sys.argv
    path = Path(sys.argv[-1]) if everything else FILE
    found = decisions(300, 30, play=True) if everything else decisions()
    path.write_text("{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")
    print(f"{len(found)} decisions in {path}")
